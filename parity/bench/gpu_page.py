"""The page of bench on a GPU."""

import re

import pandas as pd

from parity.bench.cpu_page import rows_of, table_of_steps, variability
from parity.bench.rules import BARS
from parity.bench.steps import COLD_CONTEXT, LONG_S, LONGEST_S, PHASES, WARMUPS, WHOLE_CONTEXT
from parity.core import geomean
from parity.core.clock import statistics
from parity.shared.pages import launch_bound, peak_of, ran_with, ranged, spread, units_of, without
from ref.transformer import SIZES

COMPILED = ("torch_compile", "torch_compile_graph")
GRAPHS = ("c_graph", "c_graph_overlap")
ORDER = ("c", *GRAPHS, "torch_eager", *COMPILED)
DTYPES = ("bf16_mixed", "f32", "tf32")
LOW = ("bf16_mixed",)
BEST = "best PyTorch"
MEMORY_RATIOS = [("c_graph", "torch_compile"), ("c", "torch_eager")]
EAGER = "torch_eager attends by materialised scores and runs AdamW as a Python loop over the parameters"


def report(page, records):
    compiled = records.only("torch_compile")
    grid = records.only(["benchmarking_script", "benchmarking_mixed_precision"])
    warm = type(records)(in_order(r for r in grid.records if r["case"]["context"] != COLD_CONTEXT))
    steps = warm.only(context=WHOLE_CONTEXT, dtype=["f32", "tf32"], **{"pass": "step"}).records
    whole = type(records)(in_order([*compiled.only(**{"pass": "step"}).records, *steps]))
    cold = in_order(grid.only(context=COLD_CONTEXT).records)
    cold = [record for record in cold if len(record.get("samples", [])) > max(WARMUPS) + 1]
    report_grid(page, warm, cold)
    report_warmup(page, cold)
    report_speedups(page, warm)
    report_whole(page, whole, type(records)(in_order(compiled.only(**{"pass": "inference"}).records)))
    report_memory(page, whole)
    report_apart(page, whole.only("torch_compile"))
    parts = compiled.only(**{"pass": "parts"})
    report_parts(page, type(records)(in_order(parts.records)))


def in_order(records):
    """By dtype, size and context, whatever order they ran in."""

    def place(record):
        case = record["case"]
        dtype = DTYPES.index(case["dtype"]) if case["dtype"] in DTYPES else len(DTYPES)
        return dtype, list(SIZES).index(case["size"]), case["context"], ORDER.index(record["impl"])

    return sorted(records, key=place)


def by_case(records, keys):
    """{case keys: {impl: record}} in order."""
    found = {}
    for record in records.records:
        found.setdefault(tuple(record["case"][key] for key in keys), {})[record["impl"]] = record
    return found


def best_of(impls, sides, name):
    """Which of these sides has the smallest number; None where none has one."""
    values = {impl: number_of(sides.get(impl), name) for impl in impls}
    return min((impl for impl in impls if values[impl] is not None), key=values.get, default=None)


def table_of_ratios(page, frame, name, keys):
    """Where there is a ratio at all; a column without a number is left out."""
    frame = frame.dropna(axis="columns", how="all")
    if len(frame.columns) > len(keys):
        page.table(frame.dropna(subset=[column for column in frame if column not in keys], how="all"), name)


def number_of(record, name):
    if record is None:
        return None
    return record["ms"]["median"] if name == "ms" and "ms" in record else record.get(name)


def quotient(mine, theirs):
    return mine / theirs if mine and theirs else None


def shown(record, name):
    """The number, or in words why there is none."""
    value = number_of(record, name)
    return value if value is not None or record is None else record["status"]


def report_whole(page, records, forward):
    page.question("How long does a training step take, when nothing waits inside (batch 4, context 512)?")
    times, spreads, ratios, shares, found = [], [], [], [], {}
    impls = [impl for impl in ORDER if len(records.only(impl=impl))]
    for (dtype, size), sides in by_case(records, ["dtype", "size"]).items():
        key = {"dtype": dtype, "size": size}
        times.append(key | {impl: shown(sides.get(impl), "ms") for impl in impls})
        spreads += [key | spread(record) for record in sides.values() if "ms" in record]
        ratios.append(key | ratios_of(sides, BARS.get(dtype, (None, None))))
        found.setdefault(dtype, {})[size] = sides
        shares.append(key | {impl: utilisation(sides.get(impl)) for impl in impls})
    for dtype in dict.fromkeys(row["dtype"] for row in times):
        frame = pd.DataFrame([row for row in times if row["dtype"] == dtype]).dropna(
            axis="columns", how="all"
        )
        page.table(frame, f"steps_{dtype}", units=units_of(frame, impls, "ms"))
    passes = report_forward(page, forward)
    if not times:
        page.table(pd.DataFrame(), "steps")
        return
    ranges = pd.DataFrame(spreads).dropna(axis="columns", how="all")
    page.table(
        ranges, "steps_spread", units=units_of(ranges, ("median", "min", "max", "slower process"), "ms")
    )
    plot_whole(page, found.get("bf16_mixed", {}))
    low = pd.DataFrame([row for row in ratios if row["dtype"] in LOW])
    table_of_ratios(page, low, "step_ratios", ("dtype", "size"))
    stated = stated_peaks(records)
    if stated:
        low = pd.DataFrame([row for row in shares if row["dtype"] in LOW])
        table_of_ratios(page, low, "step_mfu", ("dtype", "size"))
    for dtype, (graph_bar, eager_bar) in BARS.items():
        for impl in GRAPHS:
            say_ratios(page, dtype, found.get(dtype, {}), impl, BEST, graph_bar)
        say_ratios(page, dtype, found.get(dtype, {}), "c", "torch_eager", eager_bar)
    answer_whole(page, found.get("bf16_mixed", {}), passes)
    page.method(
        "Whole steps: medians; n is how many samples each is of, the largest spread is (max - min) / median of "
        "the side "
        "named. A sample of bf16_mixed is the mean of ten steps between two events on the stream; of f32 and "
        "tf32 it is "
        "a step of the grid, in which c and torch_eager wait for the device after each phase. "
        f"{how_they_ran(records)} A step is forward, loss, backward and AdamW. bf16_mixed has f32 weights: in PyTorch "
        f"by autocast. {EAGER}, as the course does. torch_compile compiles the model with its loss, attends by "
        "scaled_dot_product_attention and steps by the fused AdamW; torch_compile_graph is that, captured as one CUDA "
        "graph; compiling is in no sample. c queues its step operation by operation; c_graph is that step, captured. "
        "c_graph_overlap is one captured step too, of the same forward, backward and AdamW: each layer's weights are "
        "updated along the backward pass, large ones by the kernel that computes their gradients."
    )
    bars = " and ".join(
        (f"{graph:.2f} of the best PyTorch for a captured step and " if graph else "")
        + f"{eager:.2f} of torch_eager for c in {dtype}"
        for dtype, (graph, eager) in BARS.items()
    )
    page.method(
        "The best PyTorch is the faster of torch_compile and torch_compile_graph. The bars that ratios are held "
        f"against: {bars}. A ratio's range, in brackets, is that of its samples pair by pair where both sides "
        "alternated; else it is from C's fastest sample over PyTorch's slowest to C's slowest over PyTorch's fastest. "
        f"A ratio is at the bar where the bar lies in its range, and below it where all of the range is. {stated}"
    )


def report_forward(page, records):
    """The forward pass without gradients, by size, beside the step. Returns {size: {impl: record}}."""
    impls = [impl for impl in ORDER if len(records.only(impl=impl))]
    found, rows, ranges = {}, [], []
    for (size,), sides in by_case(records, ["size"]).items():
        found[size] = sides
        row = {"size": size} | {impl: shown(sides.get(impl), "ms") for impl in impls}
        ms = {impl: number_of(sides.get(impl), "ms") for impl in impls}
        row[f"c_graph / {BEST}"] = quotient(ms.get("c_graph"), ms.get(best_of(COMPILED, sides, "ms")))
        row["c / torch_eager"] = quotient(ms.get("c"), ms.get("torch_eager"))
        rows.append(row)
        ranges += [{"size": size} | spread(record) for record in sides.values() if "ms" in record]
    if not rows:
        return found
    page.text("The forward pass alone, without gradients, in bf16_mixed:")
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    page.table(frame, "forward", units=units_of(frame, impls, "ms"))
    if ranges:
        frame = pd.DataFrame(ranges)
        units = units_of(frame, ("median", "min", "max", "slower process"), "ms")
        page.table(frame, "forward_spread", units=units)
    page.method(
        "The forward pass alone: ids in, logits out, no loss and nothing kept; samples as of the step. "
        f"{how_they_ran(records)} In PyTorch autocast rounds the f32 weights in every pass; C has 16-bit copies of "
        "them, which it makes when weights change. c_graph copies ids in and replays one graph; torch_compile_graph "
        f"replays one that reads the same ids. {ran_with(records)}"
    )
    return found


def answer_whole(page, steps, passes):
    """Compiled over eager, which is the handout's question; C's captured step over both, and over its queued one: of
    the step, and of the forward pass where it was measured."""

    def faster(by_size, mine, theirs, digits):
        ratios = ratios_over(by_size, mine, theirs)
        return ", ".join(f"{1 / ratio:.{digits}f} ({size})" for size, ratio in ratios.items())

    def over_best(by_size, impl):
        found = {size: ratio_and_range(sides, impl, BEST) for size, sides in by_size.items()}
        return {size: ratio[0] for size, ratio in found.items() if ratio}

    def listed(ratios):
        return ", ".join(f"{ratio:.2f} ({size})" for size, ratio in ratios.items())

    gains = [faster(by_size, COMPILED, ("torch_eager",), 1) for by_size in (steps, passes)]
    best = [over_best(steps, "c_graph_overlap"), over_best(passes, "c_graph")]
    own = [faster(by_size, ("c_graph",), ("c",), 2) for by_size in (steps, passes)]
    if not gains[0] or not best[0]:
        return
    said = [
        f"Compiling makes PyTorch's step {gains[0]} times as fast as eager"
        + (f" and its forward pass {gains[1]}" if gains[1] else "")
        + ", in bf16 mixed precision.",
        "C's captured step with its updates along the backward pass takes "
        f"{listed(best[0])} times the best compiled step's time"
        + (
            f", and its captured forward pass {listed(best[1])} times the best compiled one's"
            if best[1]
            else ""
        )
        + ".",
    ]
    if own[0]:
        forward = f", its forward pass {own[1]}" if own[1] else ""
        said.append(f"Captured as a graph, C's own step is {own[0]} times as fast as queued{forward}.")
    page.answer("torch_compile (b)", " ".join(said), f"{ranged(best[0].values())} x the best compiled step")


def ratios_over(by_size, mine, theirs):
    """{size: time of the fastest of one over that of the fastest of the others}."""
    found = {}
    for size, sides in by_size.items():
        times = [number_of(sides.get(best_of(impls, sides, "ms")), "ms") for impls in (mine, theirs)]
        if all(times):
            found[size] = times[0] / times[1]
    return found


def plot_whole(page, by_size):
    """TFLOP/s of the model's products against the work of a step, below the peak of the data sheet."""
    curves, peaks = {}, []
    for sides in by_size.values():
        for impl in ORDER:
            record = sides.get(impl)
            if record and record.get("tflops"):
                xs, ys = curves.setdefault(impl, ([], []))
                xs.append(record["values"]["flops"] / 1e12)
                ys.append(record["tflops"])
                peaks += [peak_of(record)] if peak_of(record) else []
    ceilings = {"data sheet's peak": peaks[0]} if peaks else None
    title = f"A training step, batch 4, context {WHOLE_CONTEXT}, bf16 mixed precision"
    page.plot("step", curves, x="TFLOP a step", y="TFLOP/s", title=title, ceilings=ceilings)


def ratios_of(sides, bars):
    """Of one case: each captured step of C over compiled PyTorch, its queued step over eager PyTorch, and the bars."""

    def over(mine, theirs):
        return quotient(number_of(sides.get(mine), "ms"), number_of(sides.get(theirs), "ms"))

    best = best_of(COMPILED, sides, "ms")
    row = {f"{impl} / torch_compile": over(impl, "torch_compile") for impl in GRAPHS}
    row |= {BEST: best} | {f"{impl} / {BEST}": over(impl, best) for impl in GRAPHS}
    row[f"bar over {BEST}"] = bars[0] if any(row[f"{impl} / {BEST}"] for impl in GRAPHS) else None
    row["c / torch_eager"] = over("c", "torch_eager")
    row["bar over torch_eager"] = bars[1] if row["c / torch_eager"] else None
    return row


def how_they_ran(records):
    """Which sides alternated, and which ran in several processes."""
    alternated, processes = {}, {}
    for record in records.records:
        if record.get("ratio", {}).get("over") in COMPILED:
            size = alternated.setdefault(record["case"]["size"], [record["ratio"]["over"]])
            size.append(record["impl"])
        if "processes" in record:
            processes.setdefault(record["impl"], []).append(
                max(record["processes"]) / min(record["processes"])
            )
    sizes = {}
    for size, impls in alternated.items():
        sizes.setdefault(", ".join(impls), []).append(size)
    said = [f"calls of {impls} alternated for {', '.join(found)}" for impls, found in sizes.items()]
    rest = "the other sides were measured" if said else "the sides were measured"
    said.append(f"{rest} one after the other, each opened, timed and closed alone")
    words = f"{'; '.join(said)}."
    words = words[0].upper() + words[1:]
    if processes:
        apart = ", ".join(f"{impl} {max(found):.2f}" for impl, found in processes.items())
        words += (
            " Sides that wait for the host were timed in two processes, of which the faster one counts; at the most "
            f"the slower one's median over the faster one's is: {apart}."
        )
    return words


def ratio_and_range(sides, impl, over):
    """Of the medians, and the least and the most that it is pair by pair; of sides that did not alternate, from the
    fastest sample over the slowest to the slowest over the fastest."""
    over = best_of(COMPILED, sides, "ms") if over == BEST else over
    mine, theirs = sides.get(impl, {}), sides.get(over, {})
    if "ms" not in mine or "ms" not in theirs:
        return None
    if mine.get("ratio", {}).get("over") == over:
        pairs = [a / b for a, b in zip(mine["samples"], theirs["samples"], strict=False)]
        return mine["ms"]["median"] / theirs["ms"]["median"], min(pairs), max(pairs)
    low = min(mine["samples"]) / max(theirs["samples"])
    return mine["ms"]["median"] / theirs["ms"]["median"], low, max(mine["samples"]) / min(theirs["samples"])


def say_ratios(page, dtype, by_size, impl, over, bar):
    found = {size: ratio_and_range(sides, impl, over) for size, sides in by_size.items()}
    found = {size: ratio for size, ratio in found.items() if ratio}
    if not found or bar is None:
        return
    figures = ", ".join(
        f"{ratio:.2f} ({size}, {low:.2f} to {high:.2f})" for size, (ratio, low, high) in found.items()
    )
    below = sum(high < bar for _, _, high in found.values())
    at = sum(low <= bar <= high for _, low, high in found.values())
    held = f"{below} of {len(found)} below {bar:.2f}" + (f", {at} at the bar" if at else "")
    whose = f"{over}'s" if over != BEST else "the best compiled PyTorch side's"
    page.text(f"{dtype}: {impl} takes {figures} times {whose} time; {held}.")


def utilisation(record):
    """The share of the peak that a side's products reach."""
    peak = peak_of(record) if record and record.get("tflops") else None
    return f"{100 * record['tflops'] / peak:.0f} %" if peak else None


def stated_peaks(records):
    peaks = {r["case"]["dtype"]: peak_of(r) for r in records.records if peak_of(r)}
    stated = ", ".join(f"{dtype} {peak:g}" for dtype, peak in peaks.items())
    if not stated:
        return ""
    return (
        "MFU is the model's matrix products, all of the square of attention among them, over the step's time and the "
        f"data sheet's peak of dense products, which is in TFLOP/s: {stated}."
    )


def report_memory(page, records):
    page.question("How much memory does the training step need?")
    rows = []
    impls = [impl for impl in ORDER if len(records.only(impl=impl))]
    for (dtype, size), sides in by_case(records, ["dtype", "size"]).items():
        row = {"dtype": dtype, "size": size} | {impl: shown(sides.get(impl), "peak_mib") for impl in impls}
        requested = number_of(sides.get("torch_compile"), "requested_mib")
        for mine, theirs in MEMORY_RATIOS:
            found = (number_of(sides.get(impl), "peak_mib") for impl in (mine, theirs))
            row[f"{mine} / {theirs}"] = quotient(*found)
        row["requested by torch_compile"] = requested
        row["c_graph / requested by torch_compile"] = quotient(
            number_of(sides.get("c_graph"), "peak_mib"), requested
        )
        rows.append(row)
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        frame = pd.DataFrame([row for row in rows if row["dtype"] == dtype]).dropna(axis="columns", how="all")
        units = units_of(frame, [*impls, "requested by torch_compile"], "MiB")
        page.table(frame, f"step_memory_{dtype}", units=units)
    if rows:
        page.method(
            "Peaks of the whole side: weights, gradients, moments, activations and scratch. C's is its "
            "recorder's, PyTorch's the peak of allocated blocks, which its allocator rounds up; the bytes "
            "that torch_compile requested stand beside. Memory of the driver, of loaded kernels and of graphs is in "
            "neither; torch_compile_graph's is the peak of its capture, whose blocks stay taken. Transient gradients "
            "take the memory of dead activations; a backward pass with keep all computes nothing up again "
            "(transformer.h). " + ran_with(records)
        )
    for mine, theirs in MEMORY_RATIOS:
        found = [row[f"{mine} / {theirs}"] for row in rows if row[f"{mine} / {theirs}"]]
        if found:
            page.text(f"{mine} takes {ranged(found)} times {theirs}'s memory.")


def report_apart(page, records):
    """Phases of the cases above, measured after them."""
    rows, counts = [], set()
    for record in records.records:
        phases = record.get("phases") or {}
        if phases:
            row = {"size": record["case"]["size"], "impl": record["impl"]}
            rows.append(row | {phase: found["median"] for phase, found in phases.items()})
            counts |= {found["n"] for found in phases.values()}
    if not rows:
        return
    page.question("How does the step divide into forward, backward and optimizer, each synchronised?")
    units = {phase: "ms" for phase in PHASES if any(phase in row for row in rows)}
    page.table(pd.DataFrame(rows), "step_phases", units=units)
    page.method(
        f"The step divided: bf16_mixed. Medians of {' or '.join(map(str, sorted(counts)))} steps after the "
        f"ones above, by the host's "
        "clock with the device synchronised at each boundary."
    )


# Kernels by name: ours are called td_<class>_<operation>, the libraries' as they please.
FUSED = "products with AdamW"
PARTS = {
    FUSED: r"td_linear_adamw",
    "optimizer": r"td_optimizer|[Aa]dam|multi_tensor_apply",
    "attention": r"td_attention|flash|fmha|sdpa|attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|gemv|splitK|td_gemm",
}
# What the compiler fuses between products is named after the operations around it, attention among them.
BETWEEN = r"triton_(poi|red|per|for)_"


def part_of(kernel):
    if re.match(BETWEEN, kernel):
        return "rest"
    return next((part for part, names in PARTS.items() if re.search(names, kernel)), "rest")


def report_parts(page, records):
    """GPU time of the kernels of one step, by part, beside the least that each part can take."""
    if not any(record.get("parts") for record in records.records):
        return
    page.question("Where does the time of a step go, beside the floor of each part (bf16_mixed)?")
    rows = []
    for (size,), sides in by_case(records, ["size"]).items():
        taken = {}
        for impl, record in sides.items():
            for kernel, ms in (record.get("parts") or {}).items():
                sums = taken.setdefault(impl, {})
                sums[part_of(kernel)] = sums.get(part_of(kernel), 0.0) + ms
        values = next((record["values"] for record in sides.values() if record.get("parts")), None)
        if values is None:
            continue
        for part in (*PARTS, "rest"):
            row = {"size": size, "part": part} | {impl: sums.get(part) for impl, sums in taken.items()}
            row["floor"] = values.get(f"floor_{part}")
            row["c / floor"] = quotient(row.get("c"), row["floor"])
            if part != FUSED or any(sums.get(part) for sums in taken.values()):
                rows.append(row)
        total = {"size": size, "part": "sum"} | {impl: sum(sums.values()) for impl, sums in taken.items()}
        total["floor"] = sum(values[f"floor_{part}"] for part in (*PARTS, "rest") if part != FUSED)
        for impl in ("c", "c_graph_overlap"):
            total[f"{impl} / floor"] = quotient(total.get(impl), total["floor"])
        rows.append(total)
        page.text(
            f"{size}: floors at {values['product_tflops']:.0f} TFLOP/s (a product of 8192 cubed) and "
            f"{values['copy_gb_s']:.0f} GB/s (a copy of 1 GiB), both measured in the same process."
        )
    impls = [impl for impl in ORDER if any(impl in row for row in rows)]
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    names = ["size", "part", *impls, "floor", "c / floor", "c_graph_overlap / floor"]
    for size in dict.fromkeys(row["size"] for row in rows):
        page.table(
            frame[frame["size"] == size],
            f"step_parts_{size}",
            columns=[name for name in names if name in frame],
            units=units_of(frame, [*impls, "floor"], "ms"),
        )
    page.method(
        "Parts: sums of the GPU time of the kernels of one step, as the profiler reports them. Floors: FLOPs of "
        "the linear layers, forward and both gradients, and of causal attention with its recomputation, at "
        "the product's rate; bytes of AdamW (28 a parameter) and of everything between the products at the "
        "copy's. Kernels are told apart by their names. torch_eager attends by products and elementwise kernels, which "
        "count as products and rest; and its AdamW is made of elementwise kernels (mul, addcmul, sqrt, addcdiv) that "
        "do not say what they are for: they match no part and are in rest too. "
        f"{FUSED[0].upper()}{FUSED[1:]} update the weights they are the gradient of: the floors of both are theirs."
    )


def report_grid(page, records, cold):
    page.question("How long do forward, backward and optimizer take (batch 4)?")
    rows = []
    waiting = launch_bound(records, "context")
    for row in rows_of(records):
        row["n"] = str(row.get("n", ""))
        if row.get("peak_tflops"):
            row["MFU"] = f"{100 * row['gflops'] / 1e3 / row['peak_tflops']:.0f} %"
        rows.append(row)
    bound = {tuple(case) for case in waiting}
    for row, record in zip(rows, records.records, strict=True):
        row["waits for launches"] = record["impl"] == "torch_eager" and tuple(record["case"].items()) in bound
    keys = ["dtype", "size", "context", "impl"]
    numbers = ["median", "cv", "n", "tokens_s", "MFU"]
    steps = pd.DataFrame([row for row in rows if row["pass"] == "step"])
    if len(steps):
        few = steps[
            (steps["dtype"] == "f32")
            & (steps["context"] == WHOLE_CONTEXT)
            & steps["impl"].isin(["c", "torch_eager"])
        ]
        if len(few):
            page.text(f"f32, context {WHOLE_CONTEXT}:")
            table_of_steps(
                page, few, "phases_f32", ["size", "impl", *PHASES, "median", "cv", "peak_mib", "status"]
            )
    table_of_steps(
        page,
        steps,
        "steps_by_context",
        [*keys, *PHASES, *numbers, "peak_mib", "waits for launches", "status"],
    )
    page.method(
        "The grid of contexts: phases are means ± standard deviations, by the host's clock with the device "
        "synchronised "
        "at each boundary; the step is the median between two events. c_graph is C's whole step as one launch, "
        "which has "
        "no phases. 10 timed steps behind 5 of warm-up, as in the handout; behind 2 where PyTorch was expected to take "
        f"more than {LONG_S:g} s, behind 1 where more than {LONGEST_S:g} s; n says where an earlier run took "
        f"fewer. The "
        "sides ran one after the other, not interleaved. A row without times ended as its status says: oom is "
        "a size and "
        "context that this side cannot hold. torch_eager waits for launches where a longer context takes "
        "hardly longer; "
        "means of ratios leave such cases out."
    )
    inference = pd.DataFrame([row for row in rows if row["pass"] == "inference"])
    if len(inference):
        page.text("Forward alone, with nothing kept for a backward pass:")
        table_of_steps(page, inference, "inference", [*keys, "mean", "std", *numbers, "status"])
    plot_grid(page, records)
    whole = without(records, waiting).only(**{"pass": "step"})
    ratios = {dtype: whole.only(dtype=dtype).ratio("ms") for dtype in whole.values("dtype")}
    said = [
        f"{geomean(found):.2f} in {dtype} ({ranged(found)}, {len(found)} sizes and contexts)"
        for dtype, found in ratios.items()
        if len(found)
    ]
    if said:
        timed = records.only(dtype="f32", **{"pass": "step"})
        page.answer(
            "benchmarking_script",
            f"C's step takes {'; '.join(said)} times eager PyTorch's time, where that does not wait for launches. "
            f"In f32 it {variability(timed)}. {cold_words(cold)}",
            f"f32 step {geomean(ratios['f32']):.2f} x eager PyTorch's time"
            if len(ratios.get("f32", ()))
            else "",
        )


def plot_grid(page, records):
    """TFLOP/s against the context of the smallest and the largest size."""
    panels = {}
    steps = records.only(dtype="bf16_mixed", **{"pass": "step"})
    for size in ("small", "xl", "2.7B"):
        for impl in ("c", "c_graph", "torch_eager"):
            part = steps.only(size=size, impl=impl)
            contexts = part.values("context")
            speeds = [part.value("tflops", impl=impl, context=context) for context in contexts]
            if contexts:
                panels.setdefault(size, {})[impl] = (contexts, speeds)
    peaks = [peak_of(record) for record in steps.records if peak_of(record)]
    ceilings = {"data sheet's peak": peaks[0]} if peaks else None
    page.plot(
        "contexts",
        panels,
        x="context",
        y="TFLOP/s",
        title="Steps in bf16 mixed precision, batch 4",
        ceilings=ceilings,
    )


def cold_words(cold):
    first = first_steps(cold)
    said = []
    for impl in dict.fromkeys(row["impl"] for row in first):
        mine = [row["first / settled"] for row in first if row["impl"] == impl]
        said.append(f"{ranged(mine)} times ({impl})")
    if not said:
        return ""
    return (
        f"Without warm-up the first step takes {' and '.join(said)} a settled one: kernels are loaded in it."
    )


def first_steps(cold):
    """Of each process its first steps, one by one, beside the settled one: the median of those behind any warm-up."""
    rows = []
    for record in cold:
        steps = record["samples"]
        settled = statistics(steps[max(WARMUPS) :])["median"]
        row = {"size": record["case"]["size"], "impl": record["impl"]}
        row |= {f"step {i + 1}": steps[i] for i in range(max(WARMUPS) + 1)} | {"settled": settled}
        rows.append(row | {"first / settled": steps[0] / settled, "second / settled": steps[1] / settled})
    return rows


def report_warmup(page, cold):
    """Rows of any number of warm-up steps, from one process whose every step was timed."""
    page.question("What do fewer warm-up steps change, and why?")
    if not cold:
        page.table(pd.DataFrame(), "warmup")
        return
    first = first_steps(cold)
    rows, shifts = [], {}
    for record, settled in zip(cold, (row["settled"] for row in first), strict=True):
        steps = record["samples"]
        key = {"size": record["case"]["size"], "impl": record["impl"]}
        for warmup in WARMUPS:
            timed = steps[warmup : warmup + len(steps) - max(WARMUPS)]
            found = statistics(timed)
            row = key | {"warm-up steps": warmup} | {name: found[name] for name in ("mean", "std", "median")}
            rows.append(row | {"std / mean": found["std"] / found["mean"], "n": found["n"]})
            shifts.setdefault((record["impl"], warmup), []).append((found["mean"], found["median"], settled))
    names = [*(f"step {i + 1}" for i in range(max(WARMUPS) + 1)), "settled"]
    page.text("The first steps of a process one by one:")
    page.table(pd.DataFrame(first), "first_steps", units=dict.fromkeys(names, "ms"))
    page.text("Ten steps behind any number of warm-up steps:")
    page.table(pd.DataFrame(rows), "warmup", units=dict.fromkeys(("mean", "std", "median"), "ms"))
    page.method(
        f"Warm-up: bf16_mixed, context {COLD_CONTEXT}, a fresh process a size, each of whose first "
        f"{len(cold[0]['samples'])} steps was timed: the row of w warm-up steps is of the ten that follow the first w "
        "of that one run. C's steps come first in the process, PyTorch's after them. The driver's own start is "
        "outside, "
        "for the harness has used the GPU before."
    )
    page.text(
        "Once in a process kernels are loaded, when they are first launched, the matrix library chooses an "
        "algorithm for "
        "each shape, and PyTorch's allocator asks the driver for each new size of block, where C planned all of them "
        "before the first step."
    )
    for impl in dict.fromkeys(row["impl"] for row in first):
        moved = [
            f"{warmup}, {ranged([mean / settled for mean, _, settled in shifts[impl, warmup]])} and "
            f"{ranged([median / settled for _, median, settled in shifts[impl, warmup]])}"
            for warmup in WARMUPS
        ]
        page.text(
            f"{impl}: mean and median of ten steps over the settled step, by steps of warm-up: {'; '.join(moved)}."
        )


def report_speedups(page, records):
    page.question("What do TF32 and bf16 do to the time of each size?")
    times = {}
    for row in rows_of(records):
        if "median" in row:
            key = tuple(row[name] for name in ("size", "context", "pass", "impl"))
            times.setdefault(key, {})[row["dtype"]] = row
    rows = []
    order = list(SIZES)
    for (size, context, mode, impl), found in sorted(times.items(), key=lambda item: order.index(item[0][0])):
        row = {"size": size, "context": context, "pass": mode, "impl": impl}
        row |= {dtype: sides["median"] for dtype, sides in found.items()}
        for dtype in ("tf32", "bf16_mixed"):
            row[f"f32 / {dtype}"] = quotient(row.get("f32"), row.get(dtype))
        for phase in ("forward", "backward"):
            both = [found.get(dtype, {}).get(phase) for dtype in ("f32", "bf16_mixed")]
            row[f"{phase} f32 / bf16_mixed"] = both[0].mean / both[1].mean if all(both) else None
        rows.append(row)
    rows = [row for row in rows if row["f32 / tf32"] or row["f32 / bf16_mixed"]]
    if not rows:
        page.table(pd.DataFrame(), "speedups")
        return
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    gains = ["forward f32 / bf16_mixed", "backward f32 / bf16_mixed", "f32 / bf16_mixed", "f32 / tf32"]
    few = frame[
        (frame["context"] == WHOLE_CONTEXT)
        & (frame["pass"] == "step")
        & frame["impl"].isin(["c", "torch_eager"])
    ]
    if len(few):
        page.text(f"Of a step, context {WHOLE_CONTEXT}:")
        page.table(
            few, "speedups_by_size", columns=["size", "impl", *(name for name in gains if name in few)]
        )
    page.table(frame, "speedups", units=units_of(frame, ("f32", "tf32", "bf16_mixed"), "ms"))
    said = {}
    for row in rows:
        if (
            row["impl"] == "c"
            and row["pass"] == "step"
            and row["context"] == WHOLE_CONTEXT
            and row["f32 / bf16_mixed"]
        ):
            said[row["size"]] = row
    if said:
        by_phase = [
            f"{phase} {ranged([row[f'{phase} f32 / bf16_mixed'] for row in said.values()], 1)}"
            for phase in ("forward", "backward")
            if all(row[f"{phase} f32 / bf16_mixed"] for row in said.values())
        ]
        steps = [row["f32 / bf16_mixed"] for row in said.values()]
        means = ", ".join(f"{row['f32 / bf16_mixed']:.1f} ({size})" for size, row in said.items())
        page.answer(
            "benchmarking_mixed_precision (c)",
            f"At context {WHOLE_CONTEXT} bf16 mixed precision makes C's step {means} times as fast as f32"
            + (f": {' and '.join(by_phase)} times by pass" if by_phase else "")
            + ". The gain grows with the size, as products outweigh what only moves bytes."
            * (steps[-1] > steps[0]),
            f"bf16 {ranged(steps, 1)} x as fast as f32",
        )
