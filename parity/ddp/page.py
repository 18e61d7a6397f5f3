"""The page of data parallelism: proofs, steps by strategy, communication, overlap, buckets and their model."""

from parity.core.comparison import Comparison, ms_of
from parity.ddp.communication import behind, fitted, handout_optimum, optimum, times_of
from parity.shared.bench_ranks import MIB
from parity.shared.pages import on_gpu, ran_with, report_proofs, setup, tabled
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
DTYPES = ("f32", "bf16", "bf16_mixed")
ASKED_MB = (1, 10, 100, 1000)  # sizes of buckets that the handout asks for


def report(page, records):
    errors = records.where(lambda r: "steps" in r["case"])
    times = records.where(lambda r: "warmup" in r["case"])
    runs = [r for r in records.only(part="communication").records if "values" in r and r["status"] == "ok"]
    runs.sort(key=lambda r: (MINE.index(r["impl"]), *order_of(r["case"])))
    fitted_to = records.only(part="fit").where(lambda r: "series" in r).records
    links = {(r["impl"], r["case"].get("dtype") in NARROW): r["series"] for r in fitted_to}
    proofs(page, errors, "naive")
    way = way_of(runs, times)
    report_one(page, times, runs, way, ("naive",))
    report_one(page, times, runs, way, ("naive", "flat"))
    proofs(page, errors, "overlap")
    report_overlap(page, times, runs, way)
    report_traces(page, times, runs, way)
    proofs(page, errors, "bucketed")
    report_buckets(page, times, runs, links, way)
    page.table([taken(r, links) for r in runs], "communication_of_all", more=True)
    if len(times.values("ranks")) > 1:
        page.table(by_strategy(times), "steps_of_all", more=True)
    page.method("steps", gpu=on_gpu(times), switches=ran_with(times))
    page.method("communication")


def order_of(case):
    return DTYPES.index(case["dtype"]), STRATEGIES.index(case["strategy"]), case.get("bucket_mb", 0)


def way_of(runs, times):
    """The size, dtype, optimizer and number of ranks that the answers are of: f32, and the fewest ranks."""
    found = [r["case"] for r in [*runs, *times.records]]
    case = min(found, key=lambda case: (case["dtype"] != "f32", case["ranks"]), default=None)
    return {name: case[name] for name in (*WAY, "batch", "context")} if case else {}


def side_of(records):
    return next((impl for impl in MINE if any(r["impl"] == impl for r in records)), None)


def of(records, way, strategy=None, impl=None):
    return [
        r
        for r in records
        if all(r["case"].get(name) == value for name, value in way.items())
        and strategy in (None, r["case"]["strategy"])
        and impl in (None, r["impl"])
    ]


def proofs(page, errors, strategy):
    page.section(PROOFS[strategy])
    mine = errors.only(strategy=[strategy, "flat"] if strategy == "naive" else [strategy])
    report_proofs(page, mine.records, f"proofs_{strategy}", ("model", "ranks", "dtype"))


# ---- steps ----

STEP = {"strategy": "strategy", "bucket_mb": "bucket (MiB)"}


def steps_table(page, times, runs, way, strategies, name):
    """A row a strategy and bucket: steps of C and PyTorch, and what communication takes in C."""

    def cells(record):
        if "ms" in record:
            return {f"{record['impl']} (ms)": record["ms"]["median"]}
        values = record["values"]
        return (
            {"step, watched (ms)": values["step"], "without communication (ms)": values["without"]}
            | {
                "exposed (ms)": values["exposed"],
                "share": f"{100 * values['exposed'] / values['step']:.0f} %",
            }
            | sent(values)
        )

    records = [r for r in of(times.records, way) if "ms" in r] + of(runs, way, impl=side_of(runs))
    found = [r for r in records if r["case"]["strategy"] in strategies]
    rows = tabled(found, STEP, cells, lambda key: (STRATEGIES.index(key[0]), key[1] or 0))
    if rows:
        page.note(f"{setup(way)}, {way['optimizer']}. A sample is the time of the slowest rank.")
    page.table(rows, name)


def sent(values):
    return {
        "collectives (ms)": values["collectives"],
        "during backward": f"{100 * hidden(values):.0f} %",
        "calls": values["calls"],
        "MiB": values["bytes"] / MIB,
    }


def hidden(values):
    return values["beside"] / values["collectives"] if values["collectives"] else 0.0


def values_of(times, runs, way, strategy):
    """C's step with a strategy and what communication takes of it, for sentences; of its best bucket. The step is the
    one without a watch, if it was measured and is not noisy."""
    found = of(runs, way, strategy, side_of(runs))
    if not found:
        return None
    values, compared = (
        min((r["values"] for r in found), key=lambda v: v["step"]),
        steps_of(times, way, strategy),
    )
    return values | {
        "step": compared.mine if compared else values["step"],
        "share": values["exposed"] / values["step"],
        "hidden": hidden(values),
        "theirs": compared and compared.theirs,
    }


def steps_of(times, way, strategy):
    """C's step and PyTorch's with a strategy."""
    records = of(times.records, way, strategy)
    sides = ([r for r in records if r["impl"] == impl] for impl in (side_of(records), "torch_ddp"))
    return Comparison.of(*(min(found, key=lambda r: ms_of(r) or 1e30, default=None) for found in sides))


def report_one(page, times, runs, way, strategies):
    """The steps of the last of these strategies beside the others."""
    page.section(TIMES[strategies[-1]])
    steps_table(page, times, runs, way, strategies, strategies[-1])
    if steps_of(times, way, strategies[-1]) is None:
        page.lacks("a step of PyTorch beside C's")
    page.say(**way, **{name: values_of(times, runs, way, name) for name in strategies})


def report_overlap(page, times, runs, way):
    page.section("ddp_overlap_individual_parameters_benchmarking (a)")
    strategies = {name: values_of(times, runs, way, name) for name in STRATEGIES}
    steps_table(page, times, runs, way, STRATEGIES[:3], "overlap")
    if not strategies["overlap"]:
        page.lacks("steps with overlap of single gradients")
    page.say(**way, **strategies)
    page.note(
        "All strategies and sizes of buckets with the fewest ranks, without a watch"
        + (", batch {batch} a rank, context {context}:".format(**way) if way else ":")
    )
    page.table(by_strategy(times.only(ranks=min(times.values("ranks"), default=0))), "steps")


def report_traces(page, times, runs, way):
    """Passes and collectives of one step, rank 0: without overlap, of single gradients, and in buckets."""
    page.section("ddp_overlap_individual_parameters_benchmarking (b)")
    panels = {}
    for strategy in ("naive", "overlap", "bucketed"):
        for record in [r for r in of(runs, way, strategy, side_of(runs)) if "series" in r][:1]:
            mb = record["case"].get("bucket_mb")
            panels[f"{strategy}, {mb:g} MiB" if mb else strategy] = bars_of(record["series"])
    if panels:
        page.note(
            "Each panel is the last step of a run: what a rank computes, and under it what it sends. Tables have "
            "medians of all steps."
        )
    title = f"One training step by strategy, {setup(way)}" if way else ""
    page.timeline("timeline", panels, x="ms since the step began", title=title)
    if "overlap" not in panels:
        page.lacks(
            "the trace of a step with overlap of single gradients: records have naive and bucketed alone"
        )
    page.say(
        **{name: values_of(times, runs, way, name) for name in STRATEGIES[::2]},
        drawn=" and ".join(f"`{name}`" for name in panels) or None,
        traced="overlap" in panels,
    )


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
    steps_table(page, times, runs, way, ("overlap", "bucketed"), "buckets")
    every = of([*runs, *times.records], way)
    sizes = {r["case"].get("bucket_mb") for r in every if r["case"]["strategy"] == "bucketed"}
    missing = [str(mb) for mb in ASKED_MB if mb not in sizes]
    if missing:
        page.lacks(f"buckets of {', '.join(missing)} MiB")
    if not of(every, way, "overlap"):
        page.lacks("overlap without buckets, which buckets are compared with")
    mine = side_of([*runs, *times.records])
    bars = {}
    for side in (mine, "torch_ddp"):
        singles = steps_by_bucket(times, runs, way, side, "overlap")
        for mb, ms in (singles | steps_by_bucket(times, runs, way, side)).items():
            bars.setdefault(f"{mb:g} MiB" if mb else "no buckets", {})[side] = ms
    title = f"A step by bucket size, {setup(way) if way else ''}"
    page.bars("buckets", bars, y="ms a step", title=title, stacked=False)
    steps = steps_by_bucket(times, runs, way, mine, pick=ms_of)
    told = {"steps": len(steps) if len(steps) > 1 else None}
    if steps:
        best_mb, slowest = min(steps, key=steps.get), max(steps, key=steps.get)
        told |= {"best": best_mb, "step": steps[best_mb], "slowest": slowest, "slow": steps[slowest]}
        told |= {"first": steps[min(steps)], "last": steps[max(steps)]}
    told["hidden"] = min((hidden(r["values"]) for r in of(runs, way, "bucketed", mine)), default=None)
    told["single"] = steps_by_bucket(times, runs, way, mine, "overlap", ms_of).get(0)
    best = best_buckets(runs, links)
    model = next((r for r in best if (r["side"], r["dtype"]) == (mine, way["dtype"])), {})
    told |= {"model": model.get("best bucket (MiB)"), "formula": model.get("by the handout's formula (MiB)")}
    page.say(**told)
    page.table(fits(links), "fit", more=True)
    page.table(best, "optimum", more=True)
    page.table(predictions(runs, links), "buckets_by_the_model", more=True)
    page.method("buckets")


def steps_by_bucket(times, runs, way, side, strategy="bucketed", pick=lambda record: record["ms"]["median"]):
    """{MiB of a bucket, 0 without buckets: ms of a side's step}: without a watch, if more sizes were measured so."""
    timed = {
        r["case"].get("bucket_mb", 0): pick(r) for r in of(times.records, way, strategy, side) if "ms" in r
    }
    seen = {r["case"].get("bucket_mb", 0): r["values"]["step"] for r in of(runs, way, strategy, side)}
    found = timed if len(timed) >= len(seen) else seen
    return {mb: found[mb] for mb in sorted(found) if found[mb]}


def link_of(links, record):
    """The all-reduces that a step's collectives are like; f32's if there are no others; None without."""
    impl = record["impl"]
    return links.get((impl, record["case"]["dtype"] in NARROW), links.get((impl, False)))


def head_of(record, names):
    """The side, these case keys, strategy and bucket of a run."""
    keys = dict(zip(names, names, strict=True)) | STEP
    return {"side": record["impl"]} | {title: record["case"].get(key) for key, title in keys.items()}


def taken(record, links):
    """A row of what communication takes."""
    values = record["values"]
    row = head_of(record, WAY)
    row |= {f"{name} (ms)": values[name] for name in ("step", "without", "exposed", "tail")} | sent(values)
    if link_of(links, record):
        o, w = fitted(link_of(links, record))
        row["calls and bytes (ms)"] = 1e3 * (values["calls"] * o + values["bytes"] / w)
    return row


def by_strategy(times):
    def order(key):
        return *key[:4], DTYPES.index(key[1]), STRATEGIES.index(key[4]), key[5] or 0

    def cells(record):
        return {f"{record['impl']} (ms)": record["ms"]["median"]}

    keys = dict(zip(WAY, WAY, strict=True)) | STEP
    rows = tabled(times.where(lambda r: "ms" in r).records, keys, cells, order)
    for row in rows:
        for best in ("compiled", "graph"):
            theirs = row.get(f"torch_ddp_{best} (ms)")
            for name in [name for name in row if theirs and name.startswith("c_") and name.endswith(" (ms)")]:
                row[f"{name.removesuffix(' (ms)')} / {best}"] = row[name] / theirs
    return rows


def modelled(runs, links):
    """(run in buckets, ms of backward, (o, w)), where the same way was run one by one."""
    for record in runs:
        way = {name: record["case"][name] for name in WAY}
        naive = [r for r in of(runs, way, "naive", record["impl"]) if "series" in r]
        if record["case"]["strategy"] == "bucketed" and naive and link_of(links, record):
            ends = [values for name, values in naive[0]["series"].items() if name.endswith("passes")]
            yield record, sum(e[1] - e[0] for e in ends) / len(ends), fitted(link_of(links, record))


def predictions(runs, links):
    for record, backward, (o, w) in modelled(runs, links):
        values = record["values"]
        tail = behind(values["calls"], values["bytes"], backward, o, w)
        step = values["without"] + tail
        yield (
            head_of(record, ("dtype", "optimizer"))
            | {
                "calls": values["calls"],
                "after backward, model (ms)": tail,
                "exposed (ms)": values["exposed"],
            }
            | {"step, model (ms)": step, "step (ms)": values["step"], "model / step": step / values["step"]}
        )


def best_buckets(runs, links):
    """A row for each side and way: the model's best buckets, and the handout's."""
    rows = {}
    for record, backward, (o, w) in modelled(runs, links):
        case, nbytes = record["case"], record["values"]["bytes"]
        calls = optimum(nbytes, backward, o, w)
        row = {"side": record["impl"]} | {name: case[name] for name in ("dtype", "optimizer")}
        row |= {"backward (ms)": backward, "s / w (ms)": 1e3 * nbytes / w, "best n": calls}
        row |= {"best bucket (MiB)": nbytes / calls / MIB}
        row |= {"after backward (ms)": behind(calls, nbytes, backward, o, w)}
        row["by the handout's formula (MiB)"] = handout_optimum(nbytes, o, w) / MIB
        rows[record["impl"], *(case[name] for name in WAY)] = row
    return list(rows.values())


def fits(links):
    for (impl, narrow), series in links.items():
        o, w = fitted(series)
        row = {"side": impl, "of": "16 bits" if narrow else "f32"}
        row |= {"o (ms a call)": 1e3 * o, "w (GB/s)": w / 1e9}
        for nbytes, ms in zip(series["bytes"], times_of(series), strict=True):
            row[f"{nbytes / MIB:g} MiB (ms)"] = ms
            row[f"model / it, {nbytes / MIB:g} MiB"] = 1e3 * (o + nbytes / w) / ms
        yield row
