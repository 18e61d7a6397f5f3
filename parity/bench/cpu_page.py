"""The page of bench on a CPU, and what it shares with that of a GPU."""

import pandas as pd

from parity.bench.steps import PHASES, WARMUPS
from parity.core import geomean
from parity.core.tables import Spread
from parity.shared.pages import peak_of, ran_with, ranged


def report(page, records):
    script = records.only("benchmarking_script")
    answer, figure = report_phases(page, script)
    cold = report_warmup(page, script.only(context=128))
    if answer:
        page.answer("benchmarking_script", f"{answer} {cold}", figure)
    report_bf16(page, script, records.only("benchmarking_mixed_precision"))
    report_compiled(page, records.only("torch_compile"))


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
            row["n"] = record["ms"]["n"]
            row |= {"min": record["ms"]["min"], "p95": record["ms"]["p95"], "peak_tflops": peak_of(record)}
            row["tokens_s"] = record["values"]["tokens"] / record["ms"]["median"] * 1e3
            row["gflops"] = record["values"]["flops"] / record["ms"]["median"] / 1e6
            row |= {phase: Spread(found["mean"], found["std"]) for phase, found in record["phases"].items()}
        row["peak_mib"] = record.get("peak_mib")
        yield row


def table_of_steps(page, frame, name, columns):
    names = {
        "median": "step" if "backward" in frame else "median",  # of forward alone
        "cv": "std / mean",
        "tokens_s": "tokens/s",
        "gflops": "GFLOP/s",
        "peak_mib": "peak",
    }
    units = dict.fromkeys((*PHASES, "mean", "std", "median", "min", "p95"), "ms") | {"peak_mib": "MiB"}
    columns = {name: names.get(name, name) for name in columns if name in frame}
    units = {column: unit for column, unit in units.items() if column in columns}
    page.table(frame, name, columns=columns, units=units)


def report_phases(page, records):
    page.question("How long do forward, backward and optimizer take (batch 4, 5 warm-up and 10 timed steps)?")
    warm = records.only(warmup=5)
    keys = ["size", "context", "impl"]
    columns = [*keys, *PHASES, "median", "min", "p95", "cv", "tokens_s", "gflops", "peak_mib", "status"]
    whole = warm.only(**{"pass": "step"})
    steps = pd.DataFrame(rows_of(whole))
    if len(steps):
        table_of_steps(page, steps, "steps", columns)
    inference = pd.DataFrame(rows_of(warm.only(**{"pass": "inference"})))
    if len(inference):
        page.text("Forward alone, with nothing kept for a backward pass:")
        table_of_steps(
            page, inference, "inference", [*keys, "mean", "std", "median", "cv", "tokens_s", "gflops"]
        )
    page.method(
        "A step is forward, loss, backward and AdamW; phases are means ± standard deviations. C attends with flash, "
        "torch_eager as the course does, by materialised scores; both run AdamW in the course's order, "
        "torch_eager in a "
        f"Python loop over the parameters. GFLOP/s counts the matrix products alone. {ran_with(whole)}"
    )
    ratios, peaks = whole.ratio("ms"), whole.ratio("peak_mib")
    if len(ratios):
        return (
            f"C's step takes {ranged(ratios)} times eager PyTorch's time with {ranged(peaks)} times its memory, and "
            f"{variability(whole)}."
        ), f"step {geomean(ratios):.2f} x eager PyTorch's time"
    return "", ""


def variability(records):
    """The largest std / mean of each side's steps."""
    found = {}
    for record in records.records:
        if "ms" in record:
            spread = record["ms"]["std"] / record["ms"]["mean"]
            found[record["impl"]] = max(spread, found.get(record["impl"], 0.0))
    words = ", ".join(f"{100 * spread:.1f} % ({impl})" for impl, spread in found.items())
    return f"varies by std / mean of {words} at most after the warm-up"


def report_warmup(page, records):
    """Also returns a sentence for the answer."""
    page.question("What do fewer warm-up steps change, and why?")
    few = [row for row in rows_of(records) if row["warmup"] in WARMUPS and "mean" in row]
    compared = {(row["size"], row["pass"]) for row in few if row["warmup"] == 0}
    few = [row for row in few if (row["size"], row["pass"]) in compared]
    if not few:
        page.table(pd.DataFrame(), "warmup")
        return ""
    for row in few:
        row["first_over"] = row["first"] / row["median"]
    frame = pd.DataFrame(few).sort_values(["size", "pass", "impl", "warmup"])
    page.table(
        frame,
        "warmup",
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
    page.text(
        "Each row is a process of its own. Once in a process pages of memory are touched for the first time, "
        "the matrix "
        "library generates its kernels, threads are started and caches filled."
    )
    said = []
    for impl in dict.fromkeys(row["impl"] for row in few):
        cold = [row for row in few if row["impl"] == impl and row["warmup"] == 0]
        if cold:
            said.append(f"{geomean(row['first_over'] for row in cold):.2f} times ({impl})")
    if not said:
        return ""
    return f"Without warm-up the first step takes {' and '.join(said)} the median of its run."


def report_bf16(page, script, mixed):
    page.question("What does bf16 do to the time of each size?")
    rows = []
    for row in rows_of(mixed):
        same = dict(size=row["size"], context=row["context"], impl=row["impl"], warmup=5)
        base = [other for other in rows_of(script.only(**same | {"pass": row["pass"]})) if "median" in other]
        if "median" in row and base:
            row |= {"f32": base[0]["median"], "speedup": base[0]["median"] / row["median"]}
            rows.append(row)
    page.table(
        pd.DataFrame(rows),
        "bf16",
        columns={
            "size": "size",
            "context": "context",
            "pass": "pass",
            "impl": "impl",
            "f32": "f32",
            "median": "bf16",
        }
        | {"speedup": "f32 / bf16"},
        units={"f32": "ms", "median": "ms"} if rows else None,
    )
    gains = {
        impl: geomean(row["speedup"] for row in rows if row["impl"] == impl)
        for impl in dict.fromkeys(row["impl"] for row in rows)
    }
    if "c" in gains:
        words = " and ".join(f"{gain:.2f} times ({impl})" for impl, gain in gains.items())
        page.answer(
            "benchmarking_mixed_precision (c)",
            f"bf16 is {words} as fast as f32 on this CPU. Weights and activations are bf16, sums f32: half the "
            f"bytes help "
            "only where the processor multiplies bf16 itself, or where bytes are the limit.",
            f"bf16 {gains['c']:.2f} x as fast as f32",
        )


def report_compiled(page, records):
    """The forward pass, without gradients, as it is and compiled."""
    page.question("How long does the forward pass take, compiled (batch 4, context 128)?")
    times = {}
    for record in records.records:
        row = times.setdefault(record["case"]["size"], {})
        row[record["impl"]] = record["ms"]["median"] if "ms" in record else record["status"]
    gains, mine = {}, {}
    for size, row in times.items():
        c, eager, compiled = (row.get(impl) for impl in ("c", "torch_eager", "torch_compile"))
        if isinstance(compiled, float) and isinstance(eager, float):
            gains[size] = row["torch_eager / torch_compile"] = eager / compiled
        if isinstance(compiled, float) and isinstance(c, float):
            mine[size] = row["c / torch_compile"] = c / compiled
    names = ["c", "torch_eager", "torch_compile", "torch_eager / torch_compile", "c / torch_compile"]
    frame = pd.DataFrame({"size": size} | row for size, row in times.items())
    columns = ["size", *(name for name in names if name in frame)] if times else None
    page.table(frame, "forward", columns=columns, units={name: "ms" for name in names[:3] if name in frame})
    if not gains or not mine:
        return
    page.method(
        "Forward and compiled: f32, without gradients, medians of 5 passes behind 2 of warm-up, in the first of which "
        f"torch.compile compiles; calls of the sides alternated. {ran_with(records)}"
    )
    gained, took = (
        ", ".join(f"{ratio:.2f} ({size})" for size, ratio in ratios.items()) for ratios in (gains, mine)
    )
    page.answer(
        "torch_compile (b)",
        f"Compiling makes PyTorch's forward pass {gained} times as fast as eager on this CPU, in f32. C's, which "
        f"compiles nothing, takes {took} times the compiled one's time. Whole steps are compared on a GPU.",
        f"forward {ranged(mine.values())} x compiled PyTorch's time",
    )
