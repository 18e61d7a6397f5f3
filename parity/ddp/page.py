"""The page of data parallelism: proofs, steps by strategy, communication, overlap, buckets and their model."""

import pandas as pd

from parity.core.comparison import Comparison, ms_of
from parity.ddp.communication import behind, fitted, handout_optimum, optimum, times_of
from parity.shared.bench_ranks import MIB
from parity.shared.pages import last, mark, on_gpu, ran_with
from parity.shared.ranked import NARROW

PROOFS = {
    "naive": "naive_ddp",
    "flat": "naive_ddp",
    "overlap": "ddp_overlap_individual_parameters",
    "bucketed": "ddp_overlap_bucketed",
}
TIMES = {
    "naive": "naive_ddp_benchmarking",
    "flat": "minimal_ddp_flat_benchmarking",
    "overlap": "ddp_overlap_individual_parameters_benchmarking",
    "bucketed": "ddp_bucketed_benchmarking",
}
STRATEGIES = tuple(TIMES)
MINE = ("c_nccl", "c_mpi", "c_gloo")
WAY = ("size", "dtype", "optimizer", "ranks")  # what steps of one comparison have in common
ASKED_MB = (1, 10, 100, 1000)  # sizes of buckets that the handout asks for


def report(page, records):
    errors = type(records)(r for r in records.records if "steps" in r["case"])
    times = type(records)(r for r in records.records if "warmup" in r["case"])
    runs = [r for r in records.only(part="communication").records if "values" in r and r["status"] == "ok"]
    runs.sort(key=lambda r: (MINE.index(r["impl"]), *order_of(r["case"])))
    links = {(r["impl"], r["case"].get("dtype") in NARROW): r["series"] for r in records.records
             if r["case"].get("part") == "fit" and "series" in r}  # fmt: skip
    report_proofs(page, errors, "naive")
    way = way_of(runs, times)
    report_naive(page, times, runs, way)
    report_flat(page, times, runs, way)
    report_proofs(page, errors, "overlap")
    report_overlap(page, times, runs, way)
    report_traces(page, runs, way)
    report_proofs(page, errors, "bucketed")
    report_buckets(page, times, runs, links, way)
    page.table(pd.DataFrame([taken(r, links) for r in runs]), "communication_of_all", more=True)
    if len(times.values("ranks")) > 1:
        page.table(pd.DataFrame(by_strategy(times)), "steps_of_all", more=True)
    captured = (
        " C's steps are captured as graphs; PyTorch's are queued, except torch_ddp_graph."
        if on_gpu(times)
        else ""
    )
    page.method(
        "Every rank is a process of one host; a sample is the time of the slowest rank, and each rank has "
        "its own batch. "
        "torch_ddp is the assignment's own way for naive, flat and overlap, and DistributedDataParallel for buckets."
        f"{captured} Ranks begin with different weights, and rank 0's count. {ran_with(times)}"
    )
    page.method(
        "Communication is measured by C's own benchmark. collectives: how long a step's collectives ran. "
        "exposed: the step "
        "less the same step without communication. tail: from the end of backward to the end of the last collective. "
        "during backward: the share of the collectives' time before the end of backward."
    )


def order_of(case):
    dtypes = ("f32", "bf16", "bf16_mixed")
    return dtypes.index(case["dtype"]), STRATEGIES.index(case["strategy"]), case.get("bucket_mb", 0)


def way_of(runs, times):
    """The size, dtype, optimizer and number of ranks that the answers are of: f32, and the fewest ranks."""
    found = [r["case"] for r in [*runs, *times.records]]
    case = min(found, key=lambda case: (case["dtype"] != "f32", case["ranks"]), default=None)
    return {name: case[name] for name in WAY} if case else {}


def side_of(records):
    return next((impl for impl in MINE if any(r["impl"] == impl for r in records)), None)


def of(records, way, strategy=None, impl=None, **keys):
    return [
        r
        for r in records
        if all(r["case"].get(name) == value for name, value in {**way, **keys}.items())
        and strategy in (None, r["case"]["strategy"])
        and impl in (None, r["impl"])
    ]


# ---- proofs ----


def report_proofs(page, errors, strategy):
    page.section(PROOFS[strategy])
    mine = errors.only(strategy=[strategy, "flat"] if strategy == "naive" else [strategy])
    rows, worst = {}, []
    for record in mine.records:
        if not record["impl"].startswith("c_") or record["status"] == "unsupported":
            continue
        case = record["case"]
        key = (case.get("model", case.get("size")), case["ranks"], case.get("dtype", "f32"), record["impl"])
        row = rows.setdefault(key, dict(zip(("model", "ranks", "dtype", "side"), key, strict=True)))
        row["results"] = row.get("results", 0) + 1
        row["hold"] = row.get("hold", 0) + (record["status"] == "ok")
        far = record.get("error", {}).get("max_abs")
        if far is not None:
            row["largest difference"] = max(far, row.get("largest difference", 0.0))
            worst += [far] if case.get("dtype", "f32") == "f32" else []
    frame = pd.DataFrame([rows[key] for key in sorted(rows, key=str)])
    page.table(frame, f"proofs_{strategy}")
    held, results = (sum(row[name] for row in rows.values()) for name in ("hold", "results"))
    page.say(held=held, results=results or None, worst=max(worst, default=None))


# ---- steps ----


def steps_table(page, times, runs, way, strategies, name):
    """A row a strategy and bucket: steps of C and PyTorch, and what communication takes in C."""
    rows = {}
    for record in of(times.records, way):
        case = record["case"]
        if case["strategy"] in strategies and "ms" in record:
            row = rows.setdefault(order_of(case), row_of(case))
            row[f"{record['impl']} (ms)"] = record["ms"]["median"]
            mark(row, record)
    for record in of(runs, way, impl=side_of(runs)):
        case, values = record["case"], record["values"]
        if case["strategy"] in strategies:
            row = rows.setdefault(order_of(case), row_of(case))
            row |= {"step, watched (ms)": values["step"], "without communication (ms)": values["without"]}
            row |= {
                "exposed (ms)": values["exposed"],
                "share": f"{100 * values['exposed'] / values['step']:.0f} %",
            }
            row |= {
                "collectives (ms)": values["collectives"],
                "during backward": f"{100 * hidden(values):.0f} %",
            }
            row |= {"calls": values["calls"], "MiB": values["bytes"] / MIB}
    frame = pd.DataFrame([rows[key] for key in sorted(rows)])
    if len(frame):
        page.note(
            "{size}, {dtype}, {optimizer}, {ranks} ranks. A sample is the time of the slowest rank.".format(
                **way
            )
        )
    page.table(last(frame, "noisy"), name)
    return frame


def row_of(case):
    return {"strategy": case["strategy"], "bucket (MiB)": case.get("bucket_mb")}


def hidden(values):
    return values["beside"] / values["collectives"] if values["collectives"] else 0.0


def best(records):
    return min(records, key=lambda r: r["values"]["step"], default=None)


def values_of(runs, way, strategy):
    """What communication takes of C's step with a strategy, for sentences; of its best bucket."""
    record = best(of(runs, way, strategy, side_of(runs)))
    if record is None:
        return None
    values = record["values"]
    found = {name: values[name] for name in ("step", "without", "exposed", "collectives", "calls", "tail")}
    return found | {
        "share": values["exposed"] / values["step"],
        "hidden": hidden(values),
        "bucket": record["case"].get("bucket_mb"),
    }


def steps_of(times, way, strategy):
    """C's step and PyTorch's with a strategy."""
    records = of(times.records, way, strategy)
    mine = [r for r in records if r["impl"] == side_of(records)]
    theirs = [r for r in records if r["impl"] == "torch_ddp"]
    mine, theirs = (min(found, key=lambda r: ms_of(r) or 1e30, default=None) for found in (mine, theirs))
    return Comparison.of(mine, theirs)


def report_naive(page, times, runs, way):
    page.section("naive_ddp_benchmarking")
    steps_table(page, times, runs, way, ("naive",), "naive")
    compared = steps_of(times, way, "naive")
    if compared is None:
        page.lacks("a step of PyTorch beside C's")
    page.say(**way, naive=values_of(runs, way, "naive"), compared=compared)


def report_flat(page, times, runs, way):
    page.section("minimal_ddp_flat_benchmarking")
    steps_table(page, times, runs, way, ("naive", "flat"), "flat")
    compared = steps_of(times, way, "flat")
    if compared is None:
        page.lacks("a step of PyTorch beside C's")
    page.say(**way, naive=values_of(runs, way, "naive"), flat=values_of(runs, way, "flat"), compared=compared)


def report_overlap(page, times, runs, way):
    page.section("ddp_overlap_individual_parameters_benchmarking (a)")
    strategies = {name: values_of(runs, way, name) for name in STRATEGIES}
    steps_table(page, times, runs, way, STRATEGIES[:3], "overlap")
    if not strategies["overlap"]:
        page.lacks("steps with overlap of single gradients")
    page.say(**way, **strategies, compared=steps_of(times, way, "overlap"))
    page.note("All strategies and sizes of buckets with the fewest ranks, without a watch:")
    fewest = min(times.values("ranks"), default=0)
    page.table(pd.DataFrame(by_strategy(times.only(ranks=fewest))), "steps")


def report_traces(page, runs, way):
    """Passes and collectives of one step, rank 0: without overlap, of single gradients, and in buckets."""
    page.section("ddp_overlap_individual_parameters_benchmarking (b)")
    panels = {}
    for strategy in ("naive", "overlap", "bucketed"):
        watched = [r for r in of(runs, way, strategy, side_of(runs)) if "series" in r]
        if watched:
            case = watched[0]["case"]
            name = f"{strategy}, {case['bucket_mb']:g} MiB" if "bucket_mb" in case else strategy
            panels[name] = bars_of(watched[0]["series"])
    if panels:
        where = "{size}, {dtype}, {ranks} ranks".format(**way)
        page.note("Each panel is one step: what a rank computes, and under it what it sends.")
        page.timeline(
            "timeline", panels, x="ms since the step began", title=f"One training step by strategy, {where}"
        )
    if "overlap" not in panels:
        page.lacks(
            "the trace of a step with overlap of single gradients: records have naive and bucketed alone"
        )
    page.say(naive=values_of(runs, way, "naive"), overlap=values_of(runs, way, "overlap"))


def bars_of(series):
    """{row: {what: [(begin, end)]}} of every rank."""
    found = {}
    for rank in range(sum(name.endswith("passes") for name in series)):
        forward, backward, end = series[f"{rank} passes"]
        found[f"rank {rank}"] = {
            "forward": [(0.0, forward)],
            "backward": [(forward, backward)],
            "waiting and optimizer": [(backward, end)],
        }
        calls = zip(series[f"{rank} begin"], series[f"{rank} end"], strict=True)
        found[f"rank {rank} sends"] = {"communication": list(calls)}
    return found


# ---- buckets ----


def report_buckets(page, times, runs, links, way):
    page.section("ddp_bucketed_benchmarking (a)")
    frame = steps_table(page, times, runs, way, ("overlap", "bucketed"), "buckets")
    sizes = {
        r["case"].get("bucket_mb") for r in [*of(runs, way, "bucketed"), *of(times.records, way, "bucketed")]
    }
    missing = [mb for mb in ASKED_MB if mb not in sizes]
    if missing:
        page.lacks(f"buckets of {', '.join(map(str, missing))} MiB")
    curves, chosen = {}, frame[frame["strategy"] == "bucketed"] if len(frame) else frame
    for side in (side_of([*runs, *times.records]), "torch_ddp"):
        names = [f"{side} (ms)"] if side == "torch_ddp" else [f"{side} (ms)", "step, watched (ms)"]
        there = [name for name in names if name in chosen]
        if there:
            name = max(there, key=lambda name: chosen[name].count())
            curves[side] = (list(chosen["bucket (MiB)"]), list(chosen[name]))
    where = "{size}, {dtype}, {ranks} ranks".format(**way) if way else ""
    page.plot(
        "buckets",
        curves,
        x="MiB of a bucket",
        y="ms a step",
        title=f"A step by bucket size, {where}",
        log="x",
    )
    mine = sorted(of(runs, way, "bucketed", side_of(runs)), key=lambda r: r["case"]["bucket_mb"])
    found = best(mine)
    spans = [r["values"]["step"] for r in mine]
    without = values_of(runs, way, "naive")
    page.say(
        best=found["case"]["bucket_mb"] if found else None,
        step=found["values"]["step"] if found else None,
        smallest=mine[0]["case"]["bucket_mb"] if mine else None,
        first=spans[0] if len(spans) > 1 else None,
        largest=mine[-1]["case"]["bucket_mb"] if mine else None,
        last=spans[-1] if len(spans) > 1 else None,
        spread=max(spans) / min(spans) - 1 if len(spans) > 1 else None,
        naive=without and without["step"],
        hidden=hidden(found["values"]) if found else None,
    )
    page.table(pd.DataFrame(fits(links)), "fit", more=True)
    page.table(pd.DataFrame(best_buckets(runs, links)), "optimum", more=True)
    page.table(pd.DataFrame(predictions(runs, links)), "buckets_by_the_model", more=True)
    page.method(
        "The model of buckets: s bytes in n buckets, each sent in c = s / (n w) + o, with w bytes/s and o "
        "seconds a call "
        "fitted to all-reduces alone. Buckets become final at equal distances of a backward pass of T and are sent one "
        "after the other. The last ends max(c, T / n + n c - T) after backward. If a bucket is sent while the next is "
        "computed, this is s / (n w) + n o, as the handout has it."
    )


def link_of(links, record):
    """The all-reduces that a step's collectives are like; f32's if there are no others; None without."""
    impl = record["impl"]
    return links.get((impl, record["case"]["dtype"] in NARROW), links.get((impl, False)))


def taken(record, links):
    """A row of what communication takes."""
    values, case = record["values"], record["case"]
    row = {"side": record["impl"]} | {name: case[name] for name in WAY} | row_of(case)
    row |= {f"{name} (ms)": values[name] for name in ("step", "without", "exposed", "tail", "collectives")}
    row |= {
        "during backward": f"{100 * hidden(values):.0f} %",
        "calls": values["calls"],
        "MiB": values["bytes"] / MIB,
    }
    if link_of(links, record):
        o, w = fitted(link_of(links, record))
        row["calls and bytes (ms)"] = 1e3 * (values["calls"] * o + values["bytes"] / w)
    return row


def by_strategy(times):
    rows = {}
    for record in times.records:
        if "ms" in record:
            case = record["case"]
            way = {name: case[name] for name in WAY}
            row = rows.setdefault((*way.values(), *order_of(case)), way | row_of(case))
            row[f"{record['impl']} (ms)"] = record["ms"]["median"]
    for row in rows.values():
        for best, of_best in (
            ("compiled", row.get("torch_ddp_compiled (ms)")),
            ("graph", row.get("torch_ddp_graph (ms)")),
        ):
            for name in [
                name for name in row if of_best and name.startswith("c_") and name.endswith(" (ms)")
            ]:
                row[f"{name.removesuffix(' (ms)')} / {best}"] = row[name] / of_best
    return [rows[key] for key in sorted(rows)]


def modelled(runs, links):
    """(run in buckets, ms of backward, (o, w)), where the same way was run one by one."""
    for record in runs:
        way = {name: record["case"][name] for name in WAY}
        naive = [r for r in of(runs, way, "naive", record["impl"]) if "series" in r]
        if record["case"]["strategy"] == "bucketed" and naive and link_of(links, record):
            ends = [values for name, values in naive[0]["series"].items() if name.endswith("passes")]
            yield record, sum(e[1] - e[0] for e in ends) / len(ends), fitted(link_of(links, record))


def predictions(runs, links):
    rows = []
    for record, backward, (o, w) in modelled(runs, links):
        values, case = record["values"], record["case"]
        tail = behind(values["calls"], values["bytes"], backward, o, w)
        rows.append(
            {"side": record["impl"]}
            | {name: case[name] for name in ("dtype", "optimizer")}
            | row_of(case)
            | {
                "calls": values["calls"],
                "after backward, model (ms)": tail,
                "exposed (ms)": values["exposed"],
            }
            | {"step, model (ms)": values["without"] + tail, "step (ms)": values["step"]}
            | {"model / step": (values["without"] + tail) / values["step"]}
        )
    return rows


def best_buckets(runs, links):
    """A row for each side and way: the model's best buckets, and the handout's."""
    rows = {}
    for record, backward, (o, w) in modelled(runs, links):
        case, nbytes = record["case"], record["values"]["bytes"]
        calls = optimum(nbytes, backward, o, w)
        key = (record["impl"], *(case[name] for name in WAY))
        rows[key] = {"side": record["impl"]} | {name: case[name] for name in ("dtype", "optimizer")}
        rows[key] |= {"backward (ms)": backward, "s / w (ms)": 1e3 * nbytes / w, "best n": calls}
        rows[key] |= {"best bucket (MiB)": nbytes / calls / MIB}
        rows[key] |= {"after backward (ms)": behind(calls, nbytes, backward, o, w)}
        rows[key]["by the handout's formula (MiB)"] = handout_optimum(nbytes, o, w) / MIB
    return list(rows.values())


def fits(links):
    rows = []
    for (impl, narrow), series in links.items():
        o, w = fitted(series)
        row = {
            "side": impl,
            "of": "16 bits" if narrow else "f32",
            "o (ms a call)": 1e3 * o,
            "w (GB/s)": w / 1e9,
        }
        for nbytes, ms in zip(series["bytes"], times_of(series), strict=True):
            row[f"{nbytes / MIB:g} MiB (ms)"] = ms
            row[f"model / it, {nbytes / MIB:g} MiB"] = 1e3 * (o + nbytes / w) / ms
        rows.append(row)
    return rows
