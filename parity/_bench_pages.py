"""The page of parity/bench.py; no module of its own."""

import re
from statistics import median

import pandas as pd

from parity._pages import on_gpu, peak_of, units_of
from parity.core import geomean

PHASES = ("forward", "backward", "optimizer")
COMPILED = ("torch_compile", "torch_compile_graph")
GRAPHS = ("c_graph", "c_graph_overlap")
ORDER = ("c", *GRAPHS, "torch_eager", *COMPILED)
# What a step on a GPU is to reach: C's captured step over PyTorch's best, C's eager step over PyTorch's eager one.
BARS = {"bf16_mixed": (0.80, 0.50), "f32": (None, 0.90)}


def report(page, records):
    script = records.only("benchmarking_script")
    mixed = records.only("benchmarking_mixed_precision")
    if on_gpu(records):
        whole = records.only("torch_compile", **{"pass": "step"})
        report_whole(page, whole)
        report_memory(page, whole)
        report_apart(page, whole)
        report_parts(page, records.only("torch_compile", **{"pass": "parts"}), whole)
        grid = type(records)(script.records + mixed.records)
        report_grid(page, type(records)(r for r in grid.records if r["case"]["context"] != COLD_CONTEXT))
        report_warmup(page, grid.only(context=COLD_CONTEXT), gpu=True)
        report_speedups(page, grid)
        return
    report_phases(page, script)
    report_warmup(page, script.only(context=128))
    report_bf16(page, script, mixed)


# ---- the whole step, on a GPU ----

COLD_CONTEXT = 384  # of the cases that measure what warm-up changes


def by_case(records, keys):
    """{case keys: {impl: record}} in order."""
    found = {}
    for record in records.records:
        found.setdefault(tuple(record["case"][key] for key in keys), {})[record["impl"]] = record
    return found


def best_of(impls, sides, name):
    """The smallest number of these sides; None where none has one."""
    values = [number_of(sides.get(impl), name) for impl in impls]
    return min((value for value in values if value is not None), default=None)


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
    rows = []
    impls = [impl for impl in ORDER if len(records.only(impl=impl))]
    for (dtype, size), sides in by_case(records, ["dtype", "size"]).items():
        row = {"dtype": dtype, "size": size} | {impl: shown(sides.get(impl), "ms") for impl in impls}
        mine = best_of(GRAPHS, sides, "ms")
        row["c_graph / compiled"] = quotient(mine, best_of(COMPILED, sides, "ms"))
        row["c / torch_eager"] = quotient(
            number_of(sides.get("c"), "ms"), number_of(sides.get("torch_eager"), "ms")
        )
        best = max(
            (sides[impl] for impl in GRAPHS if impl in sides), key=lambda r: r.get("tflops", 0), default={}
        )
        peak = peak_of(best) if best else None
        if peak and best.get("tflops"):
            row["MFU of C"] = f"{100 * best['tflops'] / peak:.0f} %"
        if "torch_compile" in sides and sides["torch_compile"].get("first_ms"):
            row["compiling"] = sides["torch_compile"]["first_ms"] / 1e3
        rows.append(row)
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    page.table(frame, units=units_of(frame, impls, "ms") | units_of(frame, ["compiling"], "s"))
    if not rows:
        return
    peaks = {r["case"]["dtype"]: peak_of(r) for r in records.records if peak_of(r)}
    stated = ", ".join(f"{dtype} {peak:g}" for dtype, peak in peaks.items())
    page.text(
        "Medians of groups of ten steps between two events on the stream. A step is forward, loss, backward and "
        "AdamW. bf16_mixed has f32 weights: in PyTorch by autocast. torch_eager attends and steps as the course does; "
        "torch_compile compiles the model with its loss, attends by scaled_dot_product_attention and steps by the "
        "fused AdamW; torch_compile_graph is that, captured as one CUDA graph. c_graph is C's step, captured; "
        "c_graph_overlap the same with each layer's weights updated beside the backward pass of the layers before it. "
        "The column c_graph / compiled has the faster of either two. Compiling is the first call of torch_compile, "
        "which is in no mean. In pure bf16 PyTorch's fused AdamW keeps its moments in bf16, C in f32."
        + (
            f" MFU counts the model's matrix products against the data sheet's peak (TFLOP/s: {stated})."
            if stated
            else ""
        )
    )
    for dtype, (graph_bar, eager_bar) in BARS.items():
        mine = [row for row in rows if row["dtype"] == dtype]
        for name, bar, title in (
            ("c_graph / compiled", graph_bar, "C's captured step takes {} times PyTorch's best compiled one"),
            ("c / torch_eager", eager_bar, "C's eager step takes {} times PyTorch's eager one"),
        ):
            found = {row["size"]: row[name] for row in mine if row.get(name)}
            if not found or bar is None:
                continue
            figures = ", ".join(f"{ratio:.2f} ({size})" for size, ratio in found.items())
            held = (
                "all"
                if max(found.values()) <= bar
                else f"{sum(r <= bar for r in found.values())} of {len(found)}"
            )
            page.text(f"{dtype}: {title.format(figures)}; {held} at or below {bar:.2f}.")
            page.verdict(
                "torch_compile", f"{dtype}: {name} {min(found.values()):.2f} to {max(found.values()):.2f}."
            )
    curves = {
        impl: zip(*[(row["size"], row[impl]) for row in rows if row["dtype"] == "bf16_mixed"], strict=True)
        for impl in impls
        if any(row["dtype"] == "bf16_mixed" for row in rows)
    }
    numel = {r["case"]["size"]: r["values"]["flops"] / 1e12 for r in records.records if "values" in r}
    drawn = {}
    for impl, (sizes, values) in ((impl, tuple(pairs)) for impl, pairs in curves.items()):
        known = [(numel[size], value) for size, value in zip(sizes, values, strict=True) if size in numel]
        drawn[impl] = ([x for x, _ in known], [y for _, y in known])
    page.plot(
        "step",
        drawn,
        x="TFLOP a step",
        y="ms",
        caption="Training step in bf16 mixed precision against its work",
    )


def report_memory(page, records):
    page.question("How much memory does the training step need?")
    rows = []
    impls = [impl for impl in ORDER if len(records.only(impl=impl))]
    for (dtype, size), sides in by_case(records, ["dtype", "size"]).items():
        row = {"dtype": dtype, "size": size} | {impl: shown(sides.get(impl), "peak_mib") for impl in impls}
        mine = number_of(sides.get("c_graph") or sides.get("c"), "peak_mib")
        row["c / torch_compile"] = quotient(mine, number_of(sides.get("torch_compile"), "peak_mib"))
        row["c / torch_eager"] = quotient(mine, number_of(sides.get("torch_eager"), "peak_mib"))
        row["requested by torch_compile"] = number_of(sides.get("torch_compile"), "requested_mib")
        rows.append(row)
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    page.table(frame, units=units_of(frame, [*impls, "requested by torch_compile"], "MiB"))
    if rows:
        page.text(
            "Peaks of the whole side: weights, gradients, moments, activations and scratch. C's is its "
            "recorder's, PyTorch's the peak of allocated blocks (which its allocator rounds up; the bytes "
            "requested stand beside). Memory of the driver, of loaded kernels and of graphs is in neither; "
            "torch_compile_graph's is the peak of its capture, whose blocks stay taken."
        )
    for over in ("torch_compile", "torch_eager"):
        found = [row[f"c / {over}"] for row in rows if row.get(f"c / {over}")]
        if found:
            page.verdict("torch_compile", f"Memory {min(found):.2f} to {max(found):.2f} x {over}'s.")


def report_apart(page, records):
    """Phases of the cases above, measured after them."""
    rows = []
    for record in records.records:
        phases = record.get("phases") or {}
        if phases:
            row = {key: record["case"][key] for key in ("dtype", "size")} | {"impl": record["impl"]}
            rows.append(row | {phase: found["median"] for phase, found in phases.items()})
    if not rows:
        return
    page.question("How does the step divide into forward, backward and optimizer, each synchronised?")
    page.table(
        pd.DataFrame(rows), units={phase: "ms" for phase in PHASES if any(phase in row for row in rows)}
    )
    page.text("Medians of a few steps, by the host's clock with the device synchronised at each boundary.")


# Kernels by name: ours are called td_<class>_<operation>, the libraries' as they please.
PARTS = {
    "optimizer": r"td_optimizer|[Aa]dam|multi_tensor_apply",
    "attention": r"td_attention|td_flash|flash|fmha|sdpa|attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|gemv|splitK|td_gemm",
}


def part_of(kernel):
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
        values = next((record["values"] for record in sides.values() if record.get("values")), {})
        for part in (*PARTS, "rest"):
            row = {"size": size, "part": part} | {impl: sums.get(part) for impl, sums in taken.items()}
            row["floor"] = values.get(f"floor_{part}")
            row["c / floor"] = quotient(row.get("c"), row["floor"])
            rows.append(row)
        total = {"size": size, "part": "sum"} | {impl: sum(sums.values()) for impl, sums in taken.items()}
        found = [values.get(f"floor_{part}") for part in (*PARTS, "rest")]
        total["floor"] = sum(found) if None not in found else None
        total["c / floor"] = quotient(total.get("c"), total["floor"])
        rows.append(total)
        step = whole.only(size=size, dtype="bf16_mixed")
        page.text(
            f"{size}: at {values['product_tflops']:.0f} TFLOP/s (a product of 8192 cubed) and "
            f"{values['copy_gb_s']:.0f} GB/s (a copy of 1 GiB), both measured in the same process"
            + "".join(
                f"; {impl}'s whole step takes {step.value('ms', impl=impl):.3g} ms"
                for impl in ("c", "c_graph", "torch_compile")
                if step.value("ms", impl=impl) == step.value("ms", impl=impl)
            )
            + "."
        )
    impls = [impl for impl in ("c", "torch_eager", "torch_compile") if any(impl in row for row in rows)]
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    names = ["size", "part", *impls, "floor", "c / floor"]
    page.table(
        frame,
        columns=[name for name in names if name in frame],
        units=units_of(frame, [*impls, "floor"], "ms"),
    )
    page.text(
        "Sums of the GPU time of the kernels of one step, as the profiler reports them. Floors: FLOPs of "
        "the linear layers, forward and both gradients, and of causal attention with its recomputation, at "
        "the product's rate; bytes of AdamW (28 a parameter) and of everything between the products at the "
        "copy's. torch_eager attends by products and elementwise kernels, which count as products and rest."
    )


def report_grid(page, records):
    page.question(
        "How long do forward, backward and optimizer take by context (batch 4, 5 warm-up, 10 timed steps)?"
    )
    rows = []
    for row in rows_of(records):
        row["MFU"] = (
            f"{100 * row['gflops'] / 1e3 / row['peak_tflops']:.0f} %" if row.get("peak_tflops") else None
        )
        rows.append(row)
    steps = pd.DataFrame([row for row in rows if row["pass"] == "step"])
    columns = [
        "dtype",
        "size",
        "context",
        "impl",
        *PHASES,
        "median",
        "cv",
        "tokens_s",
        "MFU",
        "peak_mib",
        "status",
    ]
    table_of_steps(page, steps, columns)
    page.text(
        "Phases are means ± standard deviations, by the host's clock with the device synchronised at each "
        "boundary; the step is the median between two events. A row without times ended as its status says."
    )
    for dtype in records.values("dtype"):
        ratios = records.only(dtype=dtype, **{"pass": "step"}).ratio("ms")
        if len(ratios):
            page.text(
                f"{dtype}: C's step takes {ratios.min():.2f} to {ratios.max():.2f} times PyTorch eager's time, "
                f"{geomean(ratios):.2f} in the geometric mean of {len(ratios)} sizes and contexts."
            )
            deliverable = (
                "benchmarking_script" if dtype in ("f32", "tf32") else "benchmarking_mixed_precision"
            )
            page.verdict(deliverable, f"{dtype} step {geomean(ratios):.2f} x PyTorch eager's time.")
    inference = pd.DataFrame([row for row in rows if row["pass"] == "inference"])
    if len(inference):
        page.text("Forward alone, with nothing kept for a backward pass:")
        columns = [
            "dtype",
            "size",
            "context",
            "impl",
            "mean",
            "std",
            "median",
            "cv",
            "tokens_s",
            "MFU",
            "status",
        ]
        table_of_steps(page, inference, columns)


def report_speedups(page, records):
    page.question("What do TF32 and bf16 do to the time of each size?")
    times = {}
    for row in rows_of(records.only(warmup=5)):
        if "median" in row:
            key = tuple(row[name] for name in ("size", "context", "pass", "impl"))
            times.setdefault(key, {})[row["dtype"]] = row["median"]
    rows = []
    for (size, context, mode, impl), found in times.items():
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
        found = [row["f32 / bf16_mixed"] for row in rows if row["impl"] == impl and row["f32 / bf16_mixed"]]
        if found:
            page.text(
                f"{impl}: bf16 mixed precision is {min(found):.2f} to {max(found):.2f} times as fast as "
                "f32. The gain grows with the products' share of the step: small models wait for launches "
                "and for memory."
            )
            if impl == "c":
                page.verdict("benchmarking_mixed_precision", f"bf16 speed-up of C {geomean(found):.2f}.")


def table_of_steps(page, frame, columns):
    names = {
        "median": "step",
        "cv": "std / mean",
        "tokens_s": "tokens/s",
        "gflops": "GFLOP/s",
        "peak_mib": "peak",
    }
    units = dict.fromkeys((*PHASES, "mean", "std", "median", "min", "p95"), "ms") | {"peak_mib": "MiB"}
    columns = {name: names.get(name, name) for name in columns if name in frame}
    page.table(frame, columns=columns, units={name: unit for name, unit in units.items() if name in columns})


# ---- both kinds of machine ----


def rows_of(records):
    """A row for each implementation of a case, with its phases beside the whole."""
    for record in records.records:
        row = dict(record["case"]) | {"impl": record["impl"], "status": record["status"]}
        if "ms" in record:
            row |= {
                "median": record["ms"]["median"],
                "mean": record["ms"]["mean"],
                "std": record["ms"]["std"],
            }
            row |= {"cv": record["ms"]["std"] / record["ms"]["mean"], "first": record["samples"][0]}
            row |= {"min": record["ms"]["min"], "p95": record["ms"]["p95"], "peak_tflops": peak_of(record)}
            row["tokens_s"] = record["values"]["tokens"] / record["ms"]["median"] * 1e3
            row["gflops"] = record["values"]["flops"] / record["ms"]["median"] / 1e6
            for phase, found in record["phases"].items():
                digits = ".3g" if record.get("device") else ".0f"
                row[phase] = f"{found['mean']:{digits}} ± {found['std']:{digits}}"
        row["peak_mib"] = record.get("peak_mib")
        yield row


def report_phases(page, records):
    page.question("How long do forward, backward and optimizer take (batch 4, 5 warm-up and 10 timed steps)?")
    warm = records.only(warmup=5)
    keys = ["size", "context", "impl"]
    columns = [*keys, *PHASES, "median", "min", "p95", "cv", "tokens_s", "gflops", "peak_mib", "status"]
    steps = pd.DataFrame(rows_of(warm.only(**{"pass": "step"})))
    names = {
        "median": "step",
        "cv": "std / mean",
        "tokens_s": "tokens/s",
        "gflops": "GFLOP/s",
        "peak_mib": "peak",
    }
    units = dict.fromkeys((*PHASES, "median", "min", "p95"), "ms") | {"peak_mib": "MiB"}
    if len(steps):
        page.table(
            steps,
            columns={name: names.get(name, name) for name in columns if name in steps},
            units={name: unit for name, unit in units.items() if name in steps},
        )
    ratios = warm.only(**{"pass": "step"}).ratio("ms")
    peaks = warm.only(**{"pass": "step"}).ratio("peak_mib")
    if len(ratios):
        page.text(
            "A step is forward, loss, backward and AdamW; phases are means ± standard deviations, the step's median "
            f"is {geomean(ratios):.2f} times PyTorch's with {geomean(peaks):.2f} times its memory (geometric means). "
            "C attends with flash, PyTorch as the course does; both run AdamW in the course's order. GFLOP/s counts "
            "the matrix products alone."
        )
        page.verdict(
            "benchmarking_script",
            f"step {geomean(ratios):.2f} x PyTorch eager's time, {geomean(peaks):.2f} x its memory.",
        )
    inference = pd.DataFrame(rows_of(warm.only(**{"pass": "inference"})))
    if len(inference):
        page.text("Forward alone, with nothing kept for a backward pass:")
        page.table(
            inference,
            columns={
                name: names.get(name, name)
                for name in [*keys, "mean", "std", "median", "cv", "tokens_s", "gflops"]
            }
            | {"median": "median"},
            units=dict.fromkeys(("mean", "std", "median"), "ms"),
        )


def report_warmup(page, records, gpu=False):
    page.question("What do fewer warm-up steps change, and why?")
    few = [row for row in rows_of(records) if row["warmup"] in (0, 1, 2, 5) and "mean" in row]
    compared = {(row["size"], row["pass"]) for row in few if row["warmup"] == 0}
    few = [row for row in few if (row["size"], row["pass"]) in compared]
    if not few:
        return
    for row in few:
        row["first_over"] = row["first"] / row["median"]
    frame = pd.DataFrame(few).sort_values(["size", "pass", "impl", "warmup"])
    page.table(
        frame,
        columns={
            "size": "size",
            "pass": "pass",
            "impl": "impl",
            "warmup": "warm-up steps",
            "mean": "mean",
            "std": "std",
        }
        | {"median": "median", "cv": "std / mean", "first_over": "first / median"},
        units=dict.fromkeys(("mean", "std", "median"), "ms"),
    )
    cold = {row["impl"]: row["first_over"] for row in few if row["warmup"] == 0}
    warm = [row["first_over"] for row in few if row["warmup"] == 5]
    if not cold or not warm:
        return
    page.text(
        "Each row is a process of its own. Without warm-up the first step takes "
        + " and ".join(f"{ratio:.2f} times the median in {impl}" for impl, ratio in cold.items())
        + f"; after five steps {median(warm):.2f} times. It pays for what happens once: {ONCE[gpu]}. One "
        "such step among ten moves the mean and the standard deviation, the median hardly; so medians are "
        "quoted here."
    )


# What only the first step pays for: on a CPU, on a GPU.
ONCE = (
    "pages of memory touched for the first time, the matrix library generating its kernels, threads being "
    "started, caches being filled",
    "kernels being loaded when they are first launched, the matrix library choosing an algorithm for each "
    "shape, PyTorch's allocator asking the driver for each new size of block, where C planned all of them "
    "before the first step; the driver's own start is outside, for the harness has used the GPU before",
)


def report_bf16(page, script, mixed):
    page.question("What does bf16 do to the time of each size?")
    rows = []
    for row in rows_of(mixed):
        same = dict(size=row["size"], context=row["context"], impl=row["impl"], warmup=5)
        base = [other for other in rows_of(script.only(**same | {"pass": row["pass"]})) if "median" in other]
        if "median" in row and base:
            row |= {"f32": base[0]["median"], "speedup": base[0]["median"] / row["median"]}
            rows.append(row)
    if not rows:
        return
    page.table(
        pd.DataFrame(rows),
        columns={
            "size": "size",
            "context": "context",
            "pass": "pass",
            "impl": "impl",
            "f32": "f32",
            "median": "bf16",
        }
        | {"speedup": "f32 / bf16"},
        units={"f32": "ms", "median": "ms"},
    )
    for impl in ("c", "torch_eager"):
        found = [row["speedup"] for row in rows if row["impl"] == impl]
        if found:
            page.text(
                f"{impl}: f32 takes {geomean(found):.2f} times bf16's time. Weights and activations are bf16 here, "
                "sums f32. Half the bytes help only where the processor multiplies bf16 itself, or where bytes are "
                "the limit; without such instructions the operands of a product are converted first."
            )
    mine = [row["speedup"] for row in rows if row["impl"] == "c"]
    page.verdict("benchmarking_mixed_precision", f"bf16 speed-up of C {geomean(mine):.2f} on this CPU.")
