"""The page of bench: phases of the models' steps, warm-up, precision, compiling, checkpoints, and parts of a step."""

import re

import pandas as pd

from parity.bench import checkpointing
from parity.bench.steps import COLD_CONTEXT, PHASES, WARMUPS, WHOLE_CONTEXT
from parity.core.clock import statistics
from parity.core.comparison import ADAMW_BYTES, Comparison, clean, geomean, ms_of
from parity.core.tables import Spread
from parity.shared.pages import by_case, extent, mark, peak_of, ran_with, units_of

COMPILED = ("torch_compile", "torch_compile_graph")
ORDER = ("c", "c_graph", "c_graph_overlap", "torch_eager", *COMPILED)
BOTH = ("c", "torch_eager")
STEPS, WARM = 10, 5  # that the handout asks for
SLOWER = 1.1  # times a settled step: what a first step takes at least for a sentence
# Kernels by name: ours are called td_<class>_<operation>, the libraries' as they please.
FUSED = "products with AdamW"  # of builds before 26 November 2026, in older records
PARTS = {
    FUSED: r"td_linear_adamw",
    "optimizer": r"td_optimizer|[Aa]dam|multi_tensor_apply",
    "attention": r"td_attention|flash|fmha|sdpa|attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|gemv|splitK|td_gemm",
}
BETWEEN = r"triton_(poi|red|per|for)_"  # what the compiler fuses between products, whatever its name says


def report(page, records):
    grid = records.only(["benchmarking_script", "benchmarking_mixed_precision"])
    warm = type(records)(
        in_order(r for r in grid.records if r["case"]["warmup"] > 0 and r["case"]["context"] != COLD_CONTEXT)
    )
    compiled = records.only("torch_compile")
    page.section("benchmarking_script (a)")
    page.say()
    report_phases(page, warm)
    report_warmup(page, grid)
    report_precision(page, warm)
    report_compiled(page, type(records)(in_order(compiled.records)))
    report_parts(page, type(records)(in_order(compiled.only(**{"pass": "parts"}).records)))
    report_update(page, compiled)
    checkpointing.report(page, records)
    page.method(
        "A step is forward, loss, backward and AdamW. Phases are timed with the device synchronized at their ends. C "
        "attends with flash attention. torch_eager attends with scores in memory and updates in a Python loop, as the "
        "course does. torch_compile compiles model and loss, attends with scaled_dot_product_attention, and "
        "has the fused "
        f"AdamW. No sample contains compiling. {ran_with(records)}"
    )


def in_order(records):
    """By dtype, size, context and side, whatever order they ran in."""
    dtypes = ("f32", "tf32", "bf16_mixed")

    def place(record):
        case, impl = record["case"], record["impl"]
        dtype = dtypes.index(case["dtype"]) if case["dtype"] in dtypes else len(dtypes)
        side = ORDER.index(impl) if impl in ORDER else len(ORDER)
        return dtype, *extent(case), side, -case["warmup"]

    return sorted(records, key=place)


def phases_of(record):
    return {
        name: Spread(record["phases"][name]["mean"], record["phases"][name]["std"])
        for name in PHASES
        if name in record.get("phases", {})
    }


def asked_context(records):
    """512, where it has as many sizes as another context."""
    sizes = {}
    for record in records.records:
        sizes.setdefault(record["case"]["context"], set()).add(record["case"]["size"])
    return max(sizes, key=lambda context: (len(sizes[context]), context == WHOLE_CONTEXT, context), default=0)


def report_phases(page, warm):
    page.section("benchmarking_script (b)")
    f32 = warm.only(dtype="f32", impl=list(BOTH), **{"pass": "step"})
    asked = f32.only(context=asked_context(f32))
    rows, fewer = [], {"warm-up": {}, "timed": {}}
    for size, impl in dict.fromkeys((r["case"]["size"], r["impl"]) for r in asked.records):
        record, row = first(asked, impl, size), {"size": size, "side": impl}
        case = record["case"]
        if "ms" not in record:
            rows.append(row | {"forward": record["status"]})
            continue
        row |= phases_of(record) | {"step": Spread(record["ms"]["mean"], record["ms"]["std"])}
        row |= {"std / mean": f"{100 * record['ms']['std'] / record['ms']['mean']:.2f} %"}
        row |= {"warm-up steps": case["warmup"], "steps": record["ms"]["n"]}
        mark(row, record)
        numel = 2 * case["vocab"] * case["d_model"] + case["layers"] * (
            4 * case["d_model"] ** 2 + 3 * case["d_model"] * case["d_ff"]
        )
        rows.append(row | {"% of the bound": page.rates.share(record, ADAMW_BYTES * numel)})
        fewer["warm-up"] |= {case["size"]: WARM} if case["warmup"] < WARM else {}
        fewer["timed"] |= {case["size"]: STEPS} if record["ms"]["n"] < STEPS else {}
    frame = pd.DataFrame(rows)
    page.note(f"f32, batch 4, context {asked_context(f32)}; means ± standard deviations in ms.")
    page.table(frame, "phases", units=dict.fromkeys((*PHASES, "step"), "ms"), expected=2 * 5)
    for what, sizes in fewer.items():
        if sizes:
            page.lacks(f"{max(sizes.values())} {what} steps of {', '.join(sizes)}: fewer were run")
    sizes = [size for size in asked.values("size") if clean(first(asked, "c", size))]
    ends, longer = {}, []
    for name, size in (("small", sizes[0]), ("large", sizes[-1])) if sizes else ():
        mine, theirs = (first(asked, impl, size) for impl in BOTH)
        forward = {impl: r["phases"]["forward"]["mean"] for impl, r in zip(BOTH, (mine, theirs), strict=True)
                   if clean(r) and "forward" in r.get("phases", {})}  # fmt: skip
        ends[name] = {"size": size, **forward, "comparison": Comparison.of(mine, theirs)}
    for phases in (first(asked, "c", size).get("phases", {}) for size in sizes):
        if {"forward", "backward"} <= set(phases):
            longer.append(phases["backward"]["mean"] / phases["forward"]["mean"])
    spreads = [r["ms"]["std"] / r["ms"]["mean"] for r in asked.records if clean(r)]
    page.say(
        **ends,
        longer=geomean(longer),
        spread=max(spreads, default=None),
        several=len(sizes) > 1,
        cold=list(fewer["warm-up"]),
        asked=WARM,
    )
    numbers = ["forward", "backward", "optimizer", "median", "n", "MFU", "peak", "status"]
    everything = pd.DataFrame([step_row(record) for record in warm.records])
    keys = ["dtype", "size", "context", "pass", "side"]
    page.table(everything, "steps", [*keys, *numbers], {"median": "ms", "peak": "MiB"}, more=True)


def step_row(record):
    row = {name: record["case"][name] for name in ("dtype", "size", "context", "pass")}
    row |= {"side": record["impl"], "peak": record.get("peak_mib"), "status": record["status"]}
    if "ms" in record:
        peak = peak_of(record)
        share = f"{100 * record['tflops'] / peak:.0f} %" if peak and record.get("tflops") else None
        row |= phases_of(record) | {"median": record["ms"]["median"], "n": record["ms"]["n"], "MFU": share}
    return row


def first(records, impl, size, **keys):
    return next((r for r in records.only(impl=impl, size=size, **keys).records), None)


# ---- warm-up ----


def report_warmup(page, grid):
    """From runs whose every step was timed: the ten steps after w warm-up steps of the same run. On a CPU each w has a
    run of its own."""
    page.section("benchmarking_script (c)")
    rows, firsts = {}, {}
    for record in in_order(grid.records):
        case, steps = record["case"], record.get("samples", [])
        key = (case["size"], case["pass"], record["impl"])
        if case["context"] == COLD_CONTEXT and len(steps) > max(WARMUPS) + 1:
            settled = statistics(steps[max(WARMUPS) :])["median"]
            row = {"size": key[0], "pass": key[1], "side": key[2], "first step": steps[0]}
            for warmup in WARMUPS:
                found = statistics(steps[warmup : warmup + len(steps) - max(WARMUPS)])
                row[f"w = {warmup}"] = Spread(found["mean"], found["std"])
            rows[key] = row | {"settled": settled, "first / settled": steps[0] / settled}
            firsts.setdefault(record["impl"], []).append((steps[0], settled, case))
        elif (
            case["context"] == 128
            and case["dtype"] == "f32"
            and "ms" in record
            and record.get("device") != "cuda"
        ):
            row = rows.setdefault(key, {"size": key[0], "pass": key[1], "side": key[2]})
            row[f"w = {case['warmup']}"] = Spread(record["ms"]["mean"], record["ms"]["std"])
            if case["warmup"] == 0 and steps:
                row |= {"first step": steps[0], "first / settled": steps[0] / record["ms"]["median"]}
                firsts.setdefault(record["impl"], []).append((steps[0], record["ms"]["median"], case))
    frame = pd.DataFrame([row for row in rows.values() if "w = 0" in row])
    names = [
        "size",
        "pass",
        "side",
        "first step",
        *(f"w = {w}" for w in WARMUPS),
        "settled",
        "first / settled",
    ]
    whose = next((case for found in firsts.values() for *_, case in found), None)
    if whose:
        page.note(
            "{dtype}, batch {batch}, context {context}. Mean ± standard deviation in ms of the ten steps after w "
            "warm-up steps.".format(**whose)
        )
    page.table(frame, "warmup", names, dict.fromkeys(("first step", "settled"), "ms"), expected=2)
    ratios = [first / settled for found in firsts.values() for first, settled, _ in found]
    told = {}
    if ratios and min(ratios) > SLOWER:  # else it is noise
        for impl, found in firsts.items():
            first, settled, case = max(found, key=lambda times: times[0] / times[1])
            told[impl] = {"first": first, "settled": settled, "size": case["size"]}
    page.say(**told, gpu=on_gpu_of(grid) if told else None)


def on_gpu_of(records):
    return any(record.get("device") == "cuda" for record in records.records)


# ---- precision ----


def report_precision(page, warm):
    """Forward and backward with and without bf16; forward alone where no step was measured with it."""
    page.section("benchmarking_mixed_precision (c)")
    low = {"bf16_mixed", "bf16"}
    bf16 = type(warm)(r for r in warm.records if r["case"]["dtype"] in low)
    context = asked_context(bf16)
    rows, found = [], {}
    for record in bf16.only(context=context, impl=list(BOTH)).records:
        case = record["case"]
        base = first(
            warm, record["impl"], case["size"], context=context, dtype="f32", **{"pass": case["pass"]}
        )
        if not (clean(record) and clean(base)):
            continue
        row = {"size": case["size"], "pass": case["pass"], "side": record["impl"]}
        for phase in ("forward", "backward"):
            pair = [r.get("phases", {}).get(phase) for r in (base, record)]
            if all(pair):
                row |= {f"{phase} f32": pair[0]["mean"], f"{phase} bf16": pair[1]["mean"]}
                row[f"{phase}, f32 / bf16"] = pair[0]["mean"] / pair[1]["mean"]
        row |= {"whole f32": ms_of(base), "whole bf16": ms_of(record)}
        row["whole, f32 / bf16"] = ms_of(base) / ms_of(record)
        rows.append(row)
        found.setdefault((case["pass"], record["impl"]), []).append(row)
    frame = pd.DataFrame(rows)
    page.note(f"Batch 4, context {context}, in ms.")
    passes = ("forward", "backward", "whole")
    columns = [f"{what} {dtype}" for what in passes for dtype in ("f32", "bf16")]
    order = [f"{what}{end}" for what in passes for end in (" f32", " bf16", ", f32 / bf16")]
    frame = (
        frame[["size", "pass", "side", *(name for name in order if name in frame)]] if len(frame) else frame
    )
    steps = frame[frame["pass"] == "step"] if len(frame) else frame
    page.table(steps if len(steps) else frame, "precision", units=units_of(frame, columns, "ms"), expected=10)
    page.table(frame, "precision_of_passes", units=units_of(frame, columns, "ms"), more=True)
    mine = found.get(("step", "c")) or found.get(("inference", "c")) or []
    page.say(
        **({key.replace(" ", "_"): value for key, value in mine[-1].items()} if mine else {}),
        ends={impl: rows for (what, impl), rows in found.items() if what == "step" and len(rows) > 1},
        gpu=on_gpu_of(warm) if mine else None,
    )


# ---- compiling ----


def report_compiled(page, compiled):
    page.section("torch_compile (b)")
    steps = compiled.only(**{"pass": "step"})
    wide = times_of(steps, ["dtype", "size"])
    page.note(
        f"A training step, batch 4, context {WHOLE_CONTEXT}. The clock waits for the device once a step; in "
        "benchmarking_mixed_precision (c) it waits after each phase, so its times differ."
    )
    page.table(wide, "steps_bf16_mixed", units=units_of(wide, ORDER, "ms"), expected=5)
    forward = times_of(compiled.only(**{"pass": "inference"}), ["dtype", "size"])
    page.note("The forward pass alone, without gradients:")
    page.table(forward, "forward", units=units_of(forward, ORDER, "ms"))
    if not len(wide):
        page.lacks("whole steps: the forward pass alone was measured")
    rows = []
    for (size,), sides in by_case(steps, ["size"]).items():
        shares = {impl: page.rates.share(record) for impl, record in sides.items()}
        rows += [{"size": size} | shares] if any(shares.values()) else []
    page.note("The same steps: FLOPs of the matrix products in % of the GEMM rate measured on this card.")
    page.table(pd.DataFrame(rows), "steps_of_the_bound")
    speeds = {
        size: {impl: record["tflops"] for impl, record in sides.items() if record.get("tflops")}
        for (size,), sides in by_case(steps, ["size"]).items()
    }
    page.bars(
        "step",
        speeds,
        y="TFLOP/s",
        title=f"A training step, batch 4, context {WHOLE_CONTEXT}, bf16 mixed precision",
        stacked=False,
    )
    said = {}
    for name, chosen in (("step", steps), ("forward", compiled.only(**{"pass": "inference"}))):
        sizes = by_case(chosen, ["size"])
        usable = {
            size: sides
            for (size,), sides in sizes.items()
            if fastest(sides) and clean(sides.get("torch_eager"))
        }
        if usable:
            size, sides = list(usable.items())[-1]
            best = fastest(sides)
            mine = min((sides[i] for i in ORDER[:3] if clean(sides.get(i))), key=ms_of, default=None)
            gains = [Comparison.of(s["torch_eager"], fastest(s)).ratio for s in usable.values()]
            said[name] = {impl: ms_of(record) for impl, record in sides.items()} | {"c": ms_of(mine)}
            said[name] |= {"size": size, "comparison": Comparison.of(mine, best), "small": None}
            if gains[0] > gains[-1]:
                least, sides = next(iter(usable.items()))
                said[name]["small"] = {impl: ms_of(r) for impl, r in sides.items()} | {"size": least}
    page.say(**said)
    memory = steps.wide(["dtype", "size"], "peak_mib") if len(steps) else pd.DataFrame()
    page.table(memory, "step_memory", units=units_of(memory, ORDER, "MiB"), more=True)


def times_of(records, keys):
    wide = records.wide(keys, "ms") if len(records) else pd.DataFrame()
    return wide[[*keys, *(impl for impl in ORDER if impl in wide)]] if len(wide) else wide


def fastest(sides):
    return min((sides[impl] for impl in COMPILED if clean(sides.get(impl))), key=ms_of, default=None)


# ---- the update along the backward pass ----


def report_update(page, compiled):
    """Times of steps by the number of SMs on which the weights are updated."""
    steps = {size: sides for (size,), sides in by_case(compiled.only(**{"pass": "step"}), ["size"]).items()}
    rows: dict[str, dict] = {}
    for record in filter(clean, compiled.only(**{"pass": "update"}).records):
        size = record["case"]["size"]
        after, best = (steps.get(size, {}).get(impl) for impl in ("c_graph", "c_graph_overlap"))
        row = rows.setdefault(size, {"size": size, "after the pass": ms_of(after) if clean(after) else None})
        row[f"{record['case']['update_sms']} SMs"] = ms_of(record)
        row["SMs by default"] = (best or {}).get("update_sms")
    page.question(
        "On how many SMs is the update fastest, next to the GEMMs of the backward pass (bf16_mixed)?"
    )
    frame = pd.DataFrame(rows.values())
    numbers = [name for name in frame if name not in ("size", "SMs by default")]
    page.table(frame, "update_sms", units=units_of(frame, numbers, "ms"))


# ---- parts ----


def part_of(kernel):
    if re.match(BETWEEN, kernel):
        return "rest"
    return next((part for part, names in PARTS.items() if re.search(names, kernel)), "rest")


def report_parts(page, records):
    """GPU time of the kernels of one step by part, and the least that each part can take."""
    page.question("Where does the time of a step go (bf16_mixed), and what is the least of each part?")
    for (size,), sides in by_case(records, ["size"]).items():
        taken = {}
        for impl, record in sides.items():
            for kernel, ms in (record.get("parts") or {}).items():
                sums = taken.setdefault(impl, {})
                sums[part_of(kernel)] = sums.get(part_of(kernel), 0.0) + ms
        values = next((record["values"] for record in sides.values() if record.get("parts")), None)
        if values is None:
            continue
        rows = [
            {"part": part}
            | {impl: sums.get(part) for impl, sums in taken.items()}
            | {"floor": values.get(f"floor_{part}")}
            for part in (*PARTS, "rest")
        ]
        floors = [row["floor"] for row in rows if row["floor"]]
        rows.append(
            {"part": "sum", "floor": sum(floors)} | {i: sum(sums.values()) for i, sums in taken.items()}
        )
        frame = pd.DataFrame(rows)
        page.table(frame, f"step_parts_{size}", units=units_of(frame, [*ORDER, "floor"], "ms"), more=True)
    page.method(
        "Parts of a step: sums of the GPU time of its kernels, told apart by their names. A floor is FLOPs at the GEMM "
        "rate, or bytes at the copy rate, both measured in the same process."
    )
