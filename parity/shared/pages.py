"""What the pages of several modules have in common."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from parity.core.case import is_judged
from parity.core.comparison import geomean, noisy
from parity.core.record import grouped
from parity.core.view import count, number

MIB = 2**20


def extent(case) -> tuple[int, int]:
    """Orders cases by the size of their model, then by context."""
    return case["layers"] * case["d_model"], case["context"]


def on_gpu(records) -> bool:
    return any(record.get("device") == "cuda" for record in records.records)


def valued(records, impl="c", **keys) -> list[dict]:
    """The records of these keys that hold `values`, each as one row of its case keys and values."""
    found = records.only(impl=impl, **keys).records
    return [record["case"] | record["values"] for record in found if "values" in record]


def errors_by(records, keys: Sequence[str]) -> list[dict]:
    """A row for each combination of the case keys: how many cases; the largest relative error of each side; C's errors
    over those of its reference; and the largest share of the allowed error that C uses."""
    judged = (r for r in records.records if "error" in r and all(key in r["case"] for key in keys))
    rows = []
    for combination, group in grouped(judged, lambda r: tuple(r["case"][key] for key in keys)).items():
        subset = type(records)(group)
        row = dict(zip(keys, combination, strict=True)) | {"cases": len(subset.only(impl="c"))}
        for impl in subset.impls():
            errors = [number(r, "rel_l2") or 0.0 for r in subset.only(impl=impl).records]
            row[f"relative error, {impl}"] = max(errors)
        used = [number(r, "used") for r in group if number(r, "used") is not None]
        row |= {"error ratio": geomean(subset.error_ratio())}
        rows.append(row | ({"allowance used": f"{100 * max(used):.0f} %"} if used else {}))
    return rows


def held(records) -> dict:
    """For sentences: how many cases hold, the share of the allowed error that C uses, and C's error over PyTorch's."""
    judged = [r for r in records.records if is_judged(r["impl"]) and r["status"] in ("ok", "failed")]
    judged = [r for r in judged if "error" in r.get("measure", "error")]
    used = [share for share in (number(r, "used") for r in judged) if share is not None]
    ratios = records.error_ratio()
    found = {"held": sum(r["status"] == "ok" for r in judged), "judged": len(judged) or None}
    found |= {"ratio": geomean(ratios), "ratios": sum(ratio > 0 for ratio in ratios)}
    return found | {"used": max(used, default=None)}


def setup(case) -> str:
    """What every result of ranks was measured with, for captions and titles."""
    return "{size}, {dtype}, batch {batch} a rank, context {context}, {ranks} ranks".format(**case)


def report_proofs(page, records, name, columns, **more) -> None:
    """A row for each combination of the keys and side of C: results that hold, and the largest error of weights or
    updates. `worst`: the row in f32 with C's largest error; `behind`: rows in which PyTorch's error is smaller. `more`:
    for sentences."""
    rows, theirs = {}, {}
    for record in records:
        if record["status"] == "unsupported":
            continue
        case = {"model": record["case"].get("size"), "dtype": "f32"} | record["case"]
        key, far = tuple(case[column] for column in columns), apart_of(record)
        if not record["impl"].startswith("c_"):
            theirs[key] = max(far or 0.0, theirs.get(key, 0.0))
            continue
        key = (*key, record["impl"])
        head = dict(zip((*columns, "side"), key, strict=True))
        row = rows.setdefault(key, head | {"results": 0, "hold": 0})
        row["results"] += 1
        row["hold"] += record["status"] == "ok"
        if far is not None:
            row["weights, C"] = max(far, row.get("weights, C", 0.0))
        if "state_bytes" in record.get("values", {}):
            row["state of rank 0 (bytes)"] = record["values"]["state_bytes"]
    found = [rows[key] | {"weights, PyTorch": theirs.get(key[:-1])} for key in sorted(rows, key=str)]
    page.note("weights: their largest absolute difference from training in float64.")
    page.table(found, name)
    held, results = (sum(row[what] for row in found) for what in ("hold", "results"))
    pairs = [
        {"mine": row["weights, C"], "theirs": row["weights, PyTorch"]}
        for row in found
        if row.get("dtype", "f32") == "f32" and "weights, C" in row and row["weights, PyTorch"] is not None
    ]
    worst = max(pairs, key=lambda pair: pair["mine"], default=None)
    behind = sum(pair["mine"] > pair["theirs"] for pair in pairs)
    page.say(held=held, results=results or None, rows=len(pairs), worst=worst, behind=behind, **more)


def apart_of(record) -> float | None:
    """The largest difference of a weight or an update from float64's; losses, which are larger, do not count."""
    outputs = record.get("error", {}).get("outputs", {})
    errors = [error for name, error in outputs.items() if name.startswith(("weight", "update"))]
    return max((number({"error": e}, "max_abs") for e in errors), default=number(record, "max_abs"))


def mark(row, record, name: str = "") -> None:
    """Names a side under the row's `noisy` if its samples lie too far apart, its machine was loaded, or its answer was
    not judged."""
    if record:
        count(row, record)
    unjudged = " (not judged)" * (record or {}).get("message", "").startswith("not judged")
    if record and (noisy(record) or unjudged):
        names = row["noisy"].split(", ") if "noisy" in row else []
        row["noisy"] = ", ".join(dict.fromkeys([*names, (name or record["impl"]) + unjudged]))


def tabled(records: Iterable[Mapping], keys: Iterable[str], cells: Callable, order: Any = None) -> list[dict]:
    """A row for each combination of these case keys, which may have titles: what `cells` makes of each of its records,
    and which of them are noisy. `order`: sorts the rows by their keys; without it they stand as they first ran."""
    titles = keys.values() if isinstance(keys, Mapping) else keys
    rows: dict[tuple, dict] = {}
    for record in records:
        key = tuple(record["case"].get(name) for name in keys)
        row = rows.setdefault(key, dict(zip(titles, key, strict=True)))
        row |= cells(record)
        phase = record["case"].get("pass", "") if "pass" not in keys else ""
        mark(row, record, f"{phase} {record['impl']}".strip())
    return [rows[key] for key in (sorted(rows, key=order) if order else rows)]


def time_of(record) -> float | str:
    """The median, or why there is none."""
    return record["ms"]["median"] if "ms" in record else record["status"]


def grid_rows(timed, more: Callable[[Mapping], dict] = lambda record: {}) -> list[dict]:
    """The handout's grid of attention: a row a shape, times of both passes and all sides."""

    def cells(record):
        return {f"{record['case']['pass']} {record['impl']}": time_of(record)} | more(record)

    return tabled(timed.records, ("seq", "head_dim"), cells, order=lambda key: key)


def plot_passes(page, curves, title, name="time"):
    """Times of both passes by the length."""
    panels = {}
    for phase in ("forward", "backward"):
        of = curves.only(**{"pass": phase})
        panels[phase] = {impl: of.curve("seq", "ms", impl) for impl in of.impls()}
    page.plot(name, panels, x="tokens", y="ms", title=title)


def by_case(records, keys: Sequence[str]) -> dict[tuple, dict]:
    """{case keys: {impl: record}} in order."""
    found: dict[tuple, dict] = {}
    for record in records.records:
        found.setdefault(tuple(record["case"].get(key) for key in keys), {})[record["impl"]] = record
    return found
