"""The page of bench on a GPU."""

import re

import pandas as pd

from parity.bench.cpu_page import rows_of, table_of_steps
from parity.bench.rules import BARS
from parity.bench.steps import COLD_CONTEXT, LONG_S, LONGEST_S, PHASES, WARMUPS, WHOLE_CONTEXT
from parity.core import geomean
from parity.core.clock import statistics
from parity.shared.pages import peak_of, ran_with, spread, units_of
from ref.transformer import SIZES

COMPILED = ("torch_compile", "torch_compile_graph")
GRAPHS = ("c_graph", "c_graph_overlap")
ORDER = ("c", *GRAPHS, "torch_eager", *COMPILED)
DTYPES = ("bf16_mixed", "f32", "tf32")
BEST = "best PyTorch"
MEMORY_RATIOS = [("c_graph", "torch_compile"), ("c", "torch_eager")]
EAGER = "torch_eager attends by materialised scores and runs AdamW as a Python loop over the parameters"


def report(page, records):
    compiled = records.only("torch_compile")
    grid = records.only(["benchmarking_script", "benchmarking_mixed_precision"])
    warm = type(records)(in_order(r for r in grid.records if r["case"]["context"] != COLD_CONTEXT))
    steps = warm.only(context=WHOLE_CONTEXT, dtype=["f32", "tf32"], **{"pass": "step"}).records
    whole = type(records)(in_order([*compiled.only(**{"pass": "step"}).records, *steps]))
    report_whole(page, whole)
    report_memory(page, whole)
    report_apart(page, whole.only("torch_compile"))
    parts = compiled.only(**{"pass": "parts"})
    report_parts(page, type(records)(in_order(parts.records)), whole)
    report_warmup(page, type(records)(in_order(grid.only(context=COLD_CONTEXT).records)))
    report_grid(page, warm)
    report_speedups(page, warm)


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


def table_of_ratios(page, frame, keys):
    """Where there is a ratio at all; a column without a number is left out."""
    frame = frame.dropna(axis="columns", how="all")
    if len(frame.columns) > len(keys):
        page.table(frame.dropna(subset=[name for name in frame if name not in keys], how="all"))


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


def report_whole(page, records):
    page.question("How long does a training step take, when nothing waits inside (batch 4, context 512)?")
    times, ratios, shares, found = [], [], [], {}
    impls = [impl for impl in ORDER if len(records.only(impl=impl))]
    for (dtype, size), sides in by_case(records, ["dtype", "size"]).items():
        key = {"dtype": dtype, "size": size}
        times.append(key | {impl: shown(sides.get(impl), "ms") for impl in impls} | spread(sides.values()))
        ratios.append(key | ratios_of(sides, BARS.get(dtype, (None, None))))
        found.setdefault(dtype, {})[size] = sides
        shares.append(key | {impl: utilisation(sides.get(impl)) for impl in impls})
    frame = pd.DataFrame(times).dropna(axis="columns", how="all")
    page.table(frame, units=units_of(frame, impls, "ms"))
    if not times:
        return
    page.text(
        "Medians; n is how many samples each is of, the largest spread is (max - min) / median of the side named. A "
        "sample of bf16_mixed is the mean of ten steps between two events on the stream; of f32 and tf32 it is a step "
        "of the grid below, in which c and torch_eager wait for the device after each phase. "
        f"{how_they_ran(records)} A step is forward, loss, backward "
        f"and AdamW. bf16_mixed has f32 weights: in PyTorch by autocast. {EAGER}, as the course does. torch_compile "
        "compiles the model with its loss, attends by scaled_dot_product_attention and steps by the fused AdamW; "
        "torch_compile_graph is that, captured as one CUDA graph; compiling is in no sample. c queues its step "
        "operation by operation; c_graph is that step, captured. c_graph_overlap is one captured step too, of the same "
        "forward, backward and AdamW: each layer's weights are updated along the backward pass, large ones by the "
        "kernel that computes their gradients."
    )
    table_of_ratios(page, pd.DataFrame(ratios), ("dtype", "size"))
    bars = " and ".join(
        (f"{graph:.2f} of the best PyTorch for a captured step and " if graph else "")
        + f"{eager:.2f} of torch_eager for c in {dtype}"
        for dtype, (graph, eager) in BARS.items()
    )
    page.text(
        "Ratios of the medians above, each of the two sides in its title; below 1, C is faster. The best PyTorch is "
        "the faster of torch_compile and torch_compile_graph, and its column says which. The bars that these ratios "
        f"are held against: {bars}. A ratio's range, in brackets, is that of its samples pair by pair where both sides "
        "alternated; else it is from C's fastest sample over PyTorch's slowest to C's slowest over PyTorch's fastest. "
        "A ratio is at the bar where the bar lies in its range, and below it where all of the range is."
    )
    for dtype, (graph_bar, eager_bar) in BARS.items():
        for impl in GRAPHS:
            say_ratios(page, dtype, found.get(dtype, {}), impl, BEST, graph_bar)
        say_ratios(page, dtype, found.get(dtype, {}), "c", "torch_eager", eager_bar, f" ({EAGER})")
    stated = stated_peaks(records)
    if stated:
        page.text(stated)
        table_of_ratios(page, pd.DataFrame(shares), ("dtype", "size"))
    curves = {}
    for record in records.only(dtype="bf16_mixed").records:
        if "ms" in record:
            xs, ys = curves.setdefault(record["impl"], ([], []))
            xs.append(record["values"]["flops"] / 1e12)
            ys.append(record["ms"]["median"])
    page.plot(
        "step",
        curves,
        x="TFLOP a step",
        y="ms",
        caption="Training step in bf16 mixed precision against its work",
    )


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


def say_ratios(page, dtype, by_size, impl, over, bar, remark=""):
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
    page.text(f"{dtype}: {impl} takes {figures} times {whose} time; {held}{remark}.")
    ratios = [ratio for ratio, _, _ in found.values()]
    page.verdict("torch_compile", f"{dtype}: {impl} {ranged(ratios)} x {whose} time, {held}{remark}.")


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
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    page.table(frame, units=units_of(frame, [*impls, "requested by torch_compile"], "MiB"))
    if rows:
        page.text(
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
            page.verdict(
                "torch_compile", f"Memory of {mine} {min(found):.2f} to {max(found):.2f} x {theirs}'s."
            )


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
    page.table(
        pd.DataFrame(rows), units={phase: "ms" for phase in PHASES if any(phase in row for row in rows)}
    )
    page.text(
        f"bf16_mixed. Medians of {' or '.join(map(str, sorted(counts)))} steps after the ones above, by the host's "
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


def report_parts(page, records, whole):
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
        step = whole.only(size=size, dtype="bf16_mixed")
        page.text(
            f"{size}: at {values['product_tflops']:.0f} TFLOP/s (a product of 8192 cubed) and "
            f"{values['copy_gb_s']:.0f} GB/s (a copy of 1 GiB), both measured in the same process"
            + "".join(
                f"; {impl}'s whole step takes {step.value('ms', impl=impl):.3g} ms"
                for impl in ORDER
                if step.value("ms", impl=impl) == step.value("ms", impl=impl)
            )
            + "."
        )
    impls = [impl for impl in ORDER if any(impl in row for row in rows)]
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    names = ["size", "part", *impls, "floor", "c / floor", "c_graph_overlap / floor"]
    page.table(
        frame,
        columns=[name for name in names if name in frame],
        units=units_of(frame, [*impls, "floor"], "ms"),
    )
    page.text(
        "Sums of the GPU time of the kernels of one step, as the profiler reports them. Floors: FLOPs of "
        "the linear layers, forward and both gradients, and of causal attention with its recomputation, at "
        "the product's rate; bytes of AdamW (28 a parameter) and of everything between the products at the "
        "copy's. Kernels are told apart by their names. torch_eager attends by products and elementwise kernels, which "
        "count as products and rest; and its AdamW is made of elementwise kernels (mul, addcmul, sqrt, addcdiv) that "
        "do not say what they are for: they match no part and are in rest too. "
        f"{FUSED[0].upper()}{FUSED[1:]} update the weights they are the gradient of: the floors of both are theirs."
    )


def report_grid(page, records):
    page.question("How long do forward, backward and optimizer take by context (batch 4)?")
    rows = []
    for row in rows_of(records):
        row["n"] = str(row.get("n", ""))
        if row.get("peak_tflops"):
            row["MFU"] = f"{100 * row['gflops'] / 1e3 / row['peak_tflops']:.0f} %"
        rows.append(row)
    keys = ["dtype", "size", "context", "impl"]
    numbers = ["median", "cv", "n", "tokens_s", "MFU"]
    steps = pd.DataFrame([row for row in rows if row["pass"] == "step"])
    table_of_steps(page, steps, [*keys, *PHASES, *numbers, "peak_mib", "status"])
    page.text(
        "Phases are means ± standard deviations, by the host's clock with the device synchronised at each boundary; "
        "the step is the median between two events. c_graph is C's whole step as one launch, which has no phases. "
        "10 timed steps behind 5 of warm-up, as in the handout; behind 2 where PyTorch was expected to take more than "
        f"{LONG_S:g} s, behind 1 where more than {LONGEST_S:g} s; n says where an earlier run took fewer. The sides "
        "ran one after the other, not interleaved. "
        f"{EAGER}, as the course does; it is autocast where the dtype is bf16_mixed; compiled PyTorch "
        f"is above, at context {WHOLE_CONTEXT}. A row without times ended as its status says: oom is a size and "
        f"context that this side cannot hold. {stated_peaks(records)}"
    )
    for dtype in records.values("dtype"):
        ratios = records.only(dtype=dtype, **{"pass": "step"}).ratio("ms")
        if len(ratios):
            page.text(
                f"{dtype}: the step of c takes {ratios.min():.2f} to {ratios.max():.2f} times torch_eager's time, "
                f"{geomean(ratios):.2f} in the geometric mean of the {len(ratios)} sizes and contexts measured."
            )
            deliverable = (
                "benchmarking_script" if dtype in ("f32", "tf32") else "benchmarking_mixed_precision"
            )
            page.verdict(deliverable, f"{dtype} step {geomean(ratios):.2f} x torch_eager's time ({EAGER}).")
    inference = pd.DataFrame([row for row in rows if row["pass"] == "inference"])
    if len(inference):
        page.text("Forward alone, with nothing kept for a backward pass:")
        table_of_steps(page, inference, [*keys, "mean", "std", *numbers, "status"])


def report_warmup(page, records):
    """Rows of any number of warm-up steps, from one process whose every step was timed."""
    page.question("What do fewer warm-up steps change, and why?")
    cold = [record for record in records.records if len(record.get("samples", [])) >= max(WARMUPS) + 2]
    if not cold:
        page.table(pd.DataFrame())
        return
    rows, first, shifts = [], [], {}
    for record in cold:
        steps = record["samples"]
        key = {"size": record["case"]["size"], "impl": record["impl"]}
        settled = statistics(steps[max(WARMUPS) :])["median"]
        for warmup in WARMUPS:
            timed = steps[warmup : warmup + len(steps) - max(WARMUPS)]
            found = statistics(timed)
            row = key | {"warm-up steps": warmup} | {name: found[name] for name in ("mean", "std", "median")}
            rows.append(row | {"std / mean": found["std"] / found["mean"], "n": found["n"]})
            shifts.setdefault((record["impl"], warmup), []).append((found["mean"], found["median"], settled))
        row = key | {f"step {i + 1}": steps[i] for i in range(max(WARMUPS) + 1)} | {"settled": settled}
        first.append(row | {"first / settled": steps[0] / settled, "second / settled": steps[1] / settled})
    page.table(pd.DataFrame(rows), units=dict.fromkeys(("mean", "std", "median"), "ms"))
    names = [*(f"step {i + 1}" for i in range(max(WARMUPS) + 1)), "settled"]
    page.text(
        f"bf16_mixed, context {COLD_CONTEXT}, a fresh process a size, each of whose first "
        f"{len(cold[0]['samples'])} steps was timed: the row of w warm-up steps is of the ten that follow the first w "
        "of that one run. C's steps come first in the process, PyTorch's after them. The first steps one by one:"
    )
    page.table(pd.DataFrame(first), units=dict.fromkeys(names, "ms"))
    said = []
    for impl in dict.fromkeys(row["impl"] for row in first):
        mine = [row for row in first if row["impl"] == impl]
        once, twice = ([row[f"{name} / settled"] for row in mine] for name in ("first", "second"))
        cost = [row["step 1"] - row["settled"] for row in mine]
        said.append(
            f"{impl}'s first step takes {min(once):.2f} to {max(once):.2f} times as long as its settled ones, "
            f"{min(cost):.0f} to {max(cost):.0f} ms more, and its second {min(twice):.2f} to {max(twice):.2f} times"
        )
    page.text(
        "; ".join(said)
        + ". Once in a process kernels are loaded, when they are first launched, the matrix library chooses an "
        "algorithm for each shape, and PyTorch's allocator asks the driver for each new size of block, where C planned "
        "all of them before the first step. The driver's own start is outside, for the harness has used the GPU before."
    )
    for impl in dict.fromkeys(row["impl"] for row in first):
        moved = [
            f"{warmup}, {ranged(mean / settled for mean, _, settled in shifts[impl, warmup])} and "
            f"{ranged(median / settled for _, median, settled in shifts[impl, warmup])}"
            for warmup in WARMUPS
        ]
        page.text(
            f"{impl}: mean and median of ten steps over the settled step, by steps of warm-up: {'; '.join(moved)}."
        )
    page.verdict("benchmarking_script", f"{said[0]}.")


def ranged(values):
    values = list(values)
    return f"{min(values):.2f} to {max(values):.2f}"


def report_speedups(page, records):
    page.question("What do TF32 and bf16 do to the time of each size?")
    times = {}
    for row in rows_of(records):
        if "median" in row:
            key = tuple(row[name] for name in ("size", "context", "pass", "impl"))
            times.setdefault(key, {})[row["dtype"]] = row["median"]
    rows = []
    order = list(SIZES)
    for (size, context, mode, impl), found in sorted(times.items(), key=lambda item: order.index(item[0][0])):
        row = {"size": size, "context": context, "pass": mode, "impl": impl} | found
        for dtype in ("tf32", "bf16_mixed"):
            row[f"f32 / {dtype}"] = quotient(found.get("f32"), found.get(dtype))
        rows.append(row)
    rows = [row for row in rows if row["f32 / tf32"] or row["f32 / bf16_mixed"]]
    if not rows:
        page.text("Not measured in two dtypes yet.")
        return
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    page.table(frame, units=units_of(frame, ("f32", "tf32", "bf16_mixed"), "ms"))
    for impl in ("c", "torch_eager"):
        mine = [row for row in rows if row["impl"] == impl and row["f32 / bf16_mixed"]]
        found = [row["f32 / bf16_mixed"] for row in mine]
        if found:
            by_size = {
                size: [row["f32 / bf16_mixed"] for row in mine if row["size"] == size] for size in order
            }
            means = ", ".join(f"{geomean(gains):.2f} ({size})" for size, gains in by_size.items() if gains)
            page.text(
                f"{impl}: bf16 mixed precision is {ranged(found)} times as fast as f32; by size, in the geometric mean "
                f"of its contexts and passes, {means}."
            )
            if impl == "c":
                page.verdict("benchmarking_mixed_precision", f"bf16 speed-up of C {geomean(found):.2f}.")
