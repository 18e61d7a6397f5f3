"""The page of data parallelism: proofs, steps by strategy, communication, overlap, buckets and their model."""

from itertools import product
from typing import Any, NamedTuple

from parity.core.comparison import Comparison, clean, ms_of
from parity.core.tables import Spread
from parity.shared.pages import MIB, on_gpu, report_proofs, setup, tabled

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
# What steps of one comparison have in common.
WAY = ("size", "dtype", "optimizer", "ranks", "batch", "context")
DTYPES = ("f32", "bf16", "bf16_mixed")
ASKED_MB = (1, 10, 100, 1000)  # sizes of buckets that the handout asks for


class Steps(NamedTuple):
    """The steps that answers compare: all have the same keys of WAY."""

    way: dict  # what they have in common
    side: str | None  # C's
    timed: Any  # Records of steps next to PyTorch's
    runs: Any  # Records of C's own benchmark, with what communication takes

    def setup(self):
        return setup(self.way) if self.way else ""


def report(page, records):
    errors = records.where(lambda r: "steps" in r["case"])
    times = records.where(lambda r: "warmup" in r["case"])
    runs = [r for r in records.only(part="communication").records if "values" in r and r["status"] == "ok"]
    runs = type(records)(sorted(runs, key=lambda r: (MINE.index(r["impl"]), *order_of(r["case"]))))
    proofs(page, errors, "naive")
    way = way_of([*runs.records, *times.records])
    side = next((impl for impl in MINE if impl in (runs if len(runs) else times).impls()), None)
    steps = Steps(way, side, times.only(**way), runs.only(impl=side, **way))
    report_one(page, steps, ("naive",))
    report_one(page, steps, ("naive", "flat"))
    proofs(page, errors, "overlap")
    report_overlap(page, steps, times)
    report_traces(page, steps)
    proofs(page, errors, "bucketed")
    report_buckets(page, steps)
    page.table([row_of(r, WAY_AND_STEP) for r in runs.records], "communication_of_all", more=True)
    if len(times.values("ranks")) > 1:
        page.table(by_strategy(times.records, WAY_AND_STEP), "steps_of_all", more=True)
    page.method("steps", gpu=on_gpu(times))
    page.method("communication")


def order_of(case):
    return DTYPES.index(case["dtype"]), STRATEGIES.index(case["strategy"]), case.get("bucket_mb", 0)


def way_of(records):
    """What the steps of the answers have in common: f32, and the fewest ranks."""
    found = [record["case"] for record in records]
    case = min(found, key=lambda case: (case["dtype"] != "f32", case["ranks"]), default=None)
    return {name: case[name] for name in WAY} if case else {}


def proofs(page, errors, strategy):
    page.section(PROOFS[strategy])
    mine = errors.only(strategy=[strategy, "flat"] if strategy == "naive" else [strategy])
    keys = ("model", "ranks", "dtype", *(["bucket_mb"] if strategy == "bucketed" else []))
    report_proofs(page, mine.records, f"proofs_{strategy}", keys)


STEP = {"strategy": "strategy", "bucket_mb": "bucket (MiB)"}
WAY_AND_STEP = dict(zip(WAY, WAY, strict=True)) | STEP


def steps_table(page, steps, strategies, name):
    """Steps of C and PyTorch, a row a strategy and bucket; and what communication takes of C's."""
    timed = steps.timed.only(strategy=strategies).where(lambda r: "ms" in r).records
    if timed:
        words = "A sample is the time of the slowest rank, next to PyTorch's."
        page.note(f"{steps.setup()}, {steps.way['optimizer']}. {words}")
    page.table(by_strategy(timed, STEP), name)
    found = steps.runs.only(strategy=strategies).records
    if found:
        page.note(
            "What communication takes of C's step. exposed: the step less the same step without communication. Both "
            "are captured as graphs on GPUs; collectives are timed in further steps, which are queued. after backward: "
            "from its end to the end of the last collective. The steps of this table are other ones than above."
        )
    if any(updates_apart(r["values"]) for r in found):
        page.note(
            "In this build the step without communication updates weights during backward; the steps naive and "
            "flat update them after it. So what communication adds to these is not known."
        )
        page.lacks("a step without communication that updates weights when naive's does")
    page.table([row_of(r, STEP) for r in found], f"{name}_communication")


SPLIT = {"step": "step", "without communication": "without", "exposed": "exposed"}
SPLIT |= {"collectives": "collectives", "after backward": "tail"}


def row_of(record, keys):
    """What communication takes of a step, after these case keys."""
    values = record["values"]
    row = {"side": record["impl"]} | {title: record["case"].get(key) for key, title in keys.items()}
    shown = values | ({"exposed": None} if updates_apart(values) else {})
    row |= {f"{title} (ms)": shown[key] for title, key in SPLIT.items()}
    for name in ("exposed", "collectives"):
        share = shown[name] and f"{100 * shown[name] / values['step']:.0f} %"
        row[f"{name} / step"] = share
    row |= {"during backward": f"{100 * hidden(values):.0f} %", "calls": values["calls"]}
    return row | {"MiB": values["bytes"] / MIB}


def updates_apart(values):
    """Whether a step updates its weights at another time than the same step without communication."""
    return values["exposed"] > 1.1 * values["collectives"]


def hidden(values):
    return values["beside"] / values["collectives"] if values["collectives"] else 0.0


def values_of(steps, strategy):
    """C's step with a strategy and what communication takes of it, of its best bucket, and PyTorch's step."""
    found = steps.runs.only(strategy=strategy).records
    if not found:
        return None
    values = min((r["values"] for r in found), key=lambda v: v["step"])
    theirs = theirs_of(steps, strategy)
    found = values | {"hidden": hidden(values), "theirs": min(map(ms_of, theirs), default=None)}
    found["collectives_share"] = values["collectives"] / values["step"]
    found["apart"] = updates_apart(values)
    naive = theirs_of(steps, "naive")
    apart = [Comparison.of(*pair) for pair in product(theirs, naive)]
    found["spread"] = max((r["ms"]["std"] / r["ms"]["mean"] for r in [*theirs, *naive]), default=None)
    return found | {"equal": any(of and of.verdict == "equal" for of in apart)}


def theirs_of(steps, strategy):
    """PyTorch's steps with a strategy, without noise."""
    return steps.timed.only(strategy=strategy, impl="torch_ddp").where(clean).records


def report_one(page, steps, strategies):
    """The steps of these strategies. The section is of the last one."""
    page.section(TIMES[strategies[-1]])
    steps_table(page, steps, strategies, strategies[-1])
    if not theirs_of(steps, strategies[-1]):
        page.lacks("a step of PyTorch beside C's")
    page.say(**steps.way, **{name: values_of(steps, name) for name in strategies})


def report_overlap(page, steps, times):
    page.section("ddp_overlap_individual_parameters_benchmarking (a)")
    strategies = {name: values_of(steps, name) for name in STRATEGIES}
    steps_table(page, steps, STRATEGIES[:3], "overlap")
    if not strategies["overlap"]:
        page.lacks("steps with overlap of single gradients")
    rows = by_strategy(times.only(ranks=min(times.values("ranks"), default=0)).records, WAY_AND_STEP)
    told = by_strategy(steps.timed.only(strategy=STRATEGIES[:3]).records, STEP)
    if len(rows) > len(told):  # not the same again
        page.note("All strategies and sizes of buckets with the fewest ranks; batch: of a rank:")
        page.table(rows, "steps")
    page.say(**steps.way, **strategies)


def report_traces(page, steps):
    """Passes and collectives of one step, rank 0: without overlap, of single gradients, and in buckets."""
    page.section("ddp_overlap_individual_parameters_benchmarking (b)")
    panels = {}
    for strategy in ("naive", "overlap", "bucketed"):
        for record in steps.runs.only(strategy=strategy).where(lambda r: "series" in r).records[:1]:
            mb = record["case"].get("bucket_mb")
            panels[f"{strategy}, {mb:g} MiB" if mb else strategy] = bars_of(record["series"])
    if panels:
        page.note(
            "Each panel is one queued step, the last of those whose collectives are timed: what a rank computes, and "
            "under it what it sends. The rank waits at the end of backward, so the step is longer than the captured "
            "steps in (a). With overlap and with buckets the weights are updated during backward. Steps of PyTorch are "
            "not traced: no record has when its passes and collectives begin and end."
        )
    title = f"One training step of {steps.side} by strategy, {steps.setup()}"
    page.timeline("timeline", panels, x="ms since the step began", title=title)
    if "overlap" not in panels:
        page.lacks(
            "the trace of a step with overlap of single gradients: records have naive and bucketed alone"
        )
    page.say(**{name: values_of(steps, name) for name in STRATEGIES[::2]}, traced="overlap" in panels)


def bars_of(series):
    """{row: {what: [(begin, end)]}} of every rank."""
    found = {}
    for rank in range(sum(name.endswith("passes") for name in series)):
        forward, backward, end = series[f"{rank} passes"]
        calls = list(zip(series[f"{rank} begin"], series[f"{rank} end"], strict=True))
        sent = min(end, max([backward, *(stop for _, stop in calls)]))
        found[f"rank {rank}"] = {
            "forward": [(0.0, forward)],
            "backward": [(forward, backward)],
            "waiting for communication": [(backward, sent)],
            "update of the weights": [(sent, end)],
        }
        found[f"rank {rank} sends"] = {"communication": calls}
    return found


def report_buckets(page, steps):
    page.section("ddp_bucketed_benchmarking (a)")
    steps_table(page, steps, ("overlap", "bucketed"), "buckets")
    timed, runs = (records.only(strategy="bucketed") for records in (steps.timed, steps.runs))
    seen = runs.values("bucket_mb")
    sizes = (*seen, *timed.values("bucket_mb"))
    for words_of, there in (("buckets of", sizes), ("what communication takes with buckets of", seen)):
        missing = [str(mb) for mb in ASKED_MB if mb not in there]
        if missing:
            page.lacks(f"{words_of} {', '.join(missing)} MiB")
    if not any(len(records.only(strategy="overlap")) for records in (steps.timed, steps.runs)):
        page.lacks("overlap without buckets, which buckets are compared with")
    bars = {}
    for side in (steps.side, "torch_ddp", "torch_ddp_compiled", "torch_ddp_graph"):
        singles, buckets = (steps_by_bucket(steps, side, way, spread_of) for way in ("overlap", "bucketed"))
        for mb, ms in (singles | buckets).items():
            bars.setdefault(f"{mb:g} MiB" if mb else "no buckets", {})[side] = ms
    title = f"A step by bucket size, median ± std, {steps.setup()}"
    page.bars("buckets", bars, y="ms a step", title=title, stacked=False)
    told = {}
    for side, name in ((steps.side, "c"), ("torch_ddp", "torch")):
        found = steps_by_bucket(steps, side)
        if len(found) > 1:
            best, worst = min(found, key=found.get), max(found, key=found.get)
            told[name] = {"best": best, "fast": found[best], "worst": worst, "slow": found[worst]}
    told["single"] = steps_by_bucket(steps, steps.side, "overlap").get(0)
    buckets = [r["values"] | {"mb": r["case"]["bucket_mb"]} for r in runs.records]
    told["hidden"] = min(map(hidden, buckets), default=None)
    told["small"], told["large"] = (pick(buckets, key=lambda v: v["mb"], default={}) for pick in (min, max))
    theirs = [r["ms"] for r in timed.only(impl="torch_ddp").records if "ms" in r]
    told["model"] = bucket_model(page, steps, runs)
    if told["model"]:
        small, large = told["small"], told["large"]
        told["explained"] = 1e-3 * told["model"]["o"] * (small["calls"] - large["calls"])
        told["partly"] = told["explained"] < (small["collectives"] - large["collectives"]) / 2
    told["more_calls"] = more_calls(buckets) if steps.way.get("dtype") == "f32" else None
    told["spread"] = max((ms["std"] / ms["mean"] for ms in theirs), default=None)
    page.say(**steps.way, **told)


def bucket_model(page, steps, runs):
    """What the model of (b) leaves exposed with each size, from the cost of a call and the bandwidth of our own steps
    without overlap, next to what was measured."""
    naive, flat = (steps.runs.first(strategy=name) for name in STRATEGIES[:2])
    if not (naive and flat and len(runs)) or naive["values"]["calls"] <= flat["values"]["calls"]:
        return None
    naive, flat = naive["values"], flat["values"]
    call = (naive["collectives"] - flat["collectives"]) / (naive["calls"] - flat["calls"])
    if call <= 0:
        return None
    rows = []
    for record in runs.records:
        values = record["values"]
        ms = flat["collectives"] / values["calls"] + values["calls"] * call
        row = {"bucket": record["case"]["bucket_mb"], "calls": values["calls"], "by the model": ms}
        rows.append(row | {"measured": values["exposed"]})
    units = {"bucket": "MiB", "by the model": "ms", "measured": "ms"}
    page.note(
        "What is exposed: by the model of (b), with the cost of a call and the bandwidth of naive and flat."
    )
    page.table(rows, "model", units=units)
    times = [row["by the model"] for row in rows]
    more = sum(row["measured"] > row["by the model"] for row in rows)
    told = {"o": 1e3 * call, "w": flat["bytes"] / flat["collectives"] / 1e6, "least": min(times)}
    return told | {"most": max(times)} if 2 * more > len(rows) else None


def more_calls(buckets):
    """The two smallest buckets of xl in f32, if neither holds two matrices, of which the smallest has 9.8 MiB."""
    found = sorted((v for v in buckets if v["mb"] <= 10), key=lambda v: v["mb"])
    return {"small": found[0], "large": found[-1]} if len(found) > 1 else None


def steps_by_bucket(steps, side, strategy="bucketed", pick=ms_of):
    """{MiB of a bucket, 0 without buckets: ms of a side's step}: timed with PyTorch's if more sizes have that."""
    timed, runs = (of.only(strategy=strategy, impl=side).records for of in (steps.timed, steps.runs))
    timed = {r["case"].get("bucket_mb", 0): pick(r) for r in timed if "ms" in r}
    seen = {r["case"].get("bucket_mb", 0): r["values"]["step"] for r in runs}
    found = timed if len(timed) >= len(seen) else seen
    return {mb: found[mb] for mb in sorted(found) if found[mb]}


def spread_of(record):
    return Spread(record["ms"]["median"], record["ms"]["std"])


def by_strategy(records, keys):
    """A row for each of these keys: every side's step, and how PyTorch's spread."""

    def order(key):
        case = dict(zip(keys, key, strict=True))
        dtype = DTYPES.index(case.get("dtype", "f32"))
        return case.get("ranks", 0), dtype, STRATEGIES.index(case["strategy"]), case["bucket_mb"] or 0

    def cells(record):
        impl, ms = record["impl"], record["ms"]
        found = {f"{impl} (ms)": ms["median"]}
        if impl == "torch_ddp":
            found[f"{impl} std / mean"] = f"{100 * ms['std'] / ms['mean']:.0f} %"
        return found

    return tabled((r for r in records if "ms" in r), keys, cells, order)
