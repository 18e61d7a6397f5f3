"""What the pages of several modules have in common."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from parity.core import geomean
from parity.core.view import number

MIB = 2**20
HARDLY = 1.3  # times as long, though the work is several times as much

# Dense matrix products by the vendor's data sheets (SXM), TFLOP/s: the peaks by which utilisation is stated.
PEAKS = {name: {"bf16": 989.4, "f16": 989.4, "tf32": 494.7, "f32": 66.9} for name in ("H100", "H200")}


def peak_of(record) -> float | None:
    """The peak, in TFLOP/s, of the dtype in which the record's products are computed; None of a machine not listed."""
    dtype = record["case"].get("dtype", "").removesuffix("_mixed")
    found = [peaks for name, peaks in PEAKS.items() if name in record.get("machine", "")]
    return found[0].get(dtype) if found else None


def on_gpu(records) -> bool:
    return any(record.get("device") == "cuda" for record in records.records)


def ran_with(records) -> str:
    """The switches that each side ran with, as its records say; a side's records may differ."""
    sides = {}
    for record in records.records:
        if record.get("config"):
            words = ", ".join(f"{name} {_word(value)}" for name, value in record["config"].items())
            sides.setdefault(record["impl"], {})[words] = None
    said = [f"{impl} ran with {', and with '.join(found)}" for impl, found in sides.items()]
    unsaid = sum("build" not in record for record in records.records)
    if unsaid:
        said.append(f"{unsaid} of {len(records)} results do not say with which switches they ran")
    return f"{'; '.join(said)}." if said else ""


def _word(value) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def valued(records, impl="c", **keys) -> list[dict]:
    """The records of these keys that hold `values`, each as one row of its case keys and values."""
    found = records.only(impl=impl, **keys).records
    return [record["case"] | record["values"] for record in found if "values" in record]


def errors_by(records, keys: Sequence[str], base: str = "torch_eager") -> pd.DataFrame:
    """A row for each combination of the case keys: how many cases, the worst errors, the ratio of C's to those
    that it is judged against, and the largest share of its allowance that an error of C uses. C is judged
    against `base`, or another PyTorch side that the records name."""
    groups: dict[tuple, list[dict]] = {}
    for record in records.records:
        if "error" in record and all(key in record["case"] for key in keys):
            groups.setdefault(tuple(record["case"][key] for key in keys), []).append(record)
    rows = []
    for combination, group in groups.items():
        subset = type(records)(group)
        ratios = subset.error_ratio(base)
        others = sorted({r["reference"] for r in group if r.get("reference")} - {base})
        worst = {
            f"worst {impl}": max(r["error"]["rel_l2"] or 0.0 for r in group if r["impl"] == impl)
            for impl in ("c", base, *others)
            if any(r["impl"] == impl for r in group)
        }
        row = dict(zip(keys, combination, strict=True)) | {"cases": len(subset.only(impl="c"))} | worst
        used = [number(r, "used") for r in group if number(r, "used") is not None]
        row |= {"error ratio": geomean(ratios) if len(ratios) else None}
        rows.append(row | ({"allowance used": f"{100 * max(used):.0f} %"} if used else {}))
    return pd.DataFrame(rows)


def error_answer(records, base: str = "torch_eager") -> tuple[str, str]:
    """How many cases hold, and which side is closer to float64: two sentences, and the figure of the index."""
    judged = [
        r
        for r in records.only(impl="c").records
        if "error" in r["measure"] and r["status"] in ("ok", "failed")
    ]
    held = sum(r["status"] == "ok" for r in judged)
    ratios = [ratio for ratio in records.error_ratio(base) if np.isfinite(ratio)]
    words, figure = f"The rule holds in {held} of {len(judged)} cases", f"{held} of {len(judged)} cases"
    used = [share for share in (number(r, "used") for r in judged) if share is not None]
    if used:
        words += f", with {100 * max(used):.0f} % of what an error may be at the most and "
        words += f"{100 * float(np.median(used)):.0f} % in the median"
    if not ratios:
        return f"{words}.", figure
    mean = geomean(ratios)
    return (
        f"{words}. C's relative L2 error against float64 is {mean:.2f} times that of the PyTorch side it is judged "
        f"against, in the geometric mean ({max(ratios):.2f} times at the most)."
    ), f"{figure}, error {mean:.2f} x PyTorch's"


def launch_bound(records, axis: str, impl: str = "torch_eager") -> set[tuple]:
    """The cases in which a side waits for the launch of its kernels, as items of their keys: a case with a larger
    `axis`, alike in all other keys, takes hardly longer."""
    series: dict[tuple, list] = {}
    for record in records.only(impl=impl).records:
        if "ms" in record and axis in record["case"]:
            case = record["case"]
            rest = tuple(item for item in case.items() if item[0] not in (axis, "seq_k"))
            series.setdefault(rest, []).append((case[axis], record["ms"]["median"], tuple(case.items())))
    found = set()
    for points in series.values():
        for at, ms, case in points:
            if any(other > at and theirs < HARDLY * ms for other, theirs, _ in points):
                found.add(case)
    return found


def without(records, cases: set[tuple]):
    """The records of all other cases."""
    return type(records)(r for r in records.records if tuple(r["case"].items()) not in cases)


def ranged(values, digits: int = 2) -> str:
    """ "0.35 to 0.59", or one number where both are the same."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def spread(record) -> dict:
    """A timed side's samples in columns; "slower process": the median there, of sides that were timed in two."""
    row = {"side": record["impl"], **{name: record["ms"][name] for name in ("median", "min", "max", "n")}}
    return row | ({"slower process": max(record["processes"])} if "processes" in record else {})


def largest_spread(records) -> dict[str, str]:
    """A column of results that stand side by side: the side whose samples lie furthest apart, by (max - min) /
    median."""
    apart = {r["impl"]: (r["ms"]["max"] - r["ms"]["min"]) / r["ms"]["median"] for r in records if "ms" in r}
    impl = max(apart, key=apart.get, default=None)
    return {"largest spread": f"{100 * apart[impl]:.1f} % ({impl})"} if impl else {}


def mib(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / MIB


def units_of(frame: pd.DataFrame, names, unit: str) -> dict[str, str]:
    """The unit for those of the columns that the frame has: a side that measured nothing has none."""
    return {name: unit for name in names if name in frame}
