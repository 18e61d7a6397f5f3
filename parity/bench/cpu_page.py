"""The page of bench on a CPU, and what it shares with that of a GPU."""

import pandas as pd

from parity.bench.steps import PHASES, WARMUPS
from parity.core import geomean
from parity.shared.pages import peak_of, ran_with


def report(page, records):
    script = records.only("benchmarking_script")
    report_phases(page, script)
    report_warmup(page, script.only(context=128))
    report_bf16(page, script, records.only("benchmarking_mixed_precision"))


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
            for phase, found in record["phases"].items():
                digits = ".3g" if record.get("device") else ".0f"
                row[phase] = f"{found['mean']:{digits}} ± {found['std']:{digits}}"
        row["peak_mib"] = record.get("peak_mib")
        yield row


def table_of_steps(page, frame, columns):
    names = {
        "median": "step" if "backward" in frame else "median",  # of forward alone
        "cv": "std / mean",
        "tokens_s": "tokens/s",
        "gflops": "GFLOP/s",
        "peak_mib": "peak",
    }
    units = dict.fromkeys((*PHASES, "mean", "std", "median", "min", "p95"), "ms") | {"peak_mib": "MiB"}
    columns = {name: names.get(name, name) for name in columns if name in frame}
    page.table(frame, columns=columns, units={name: unit for name, unit in units.items() if name in columns})


def report_phases(page, records):
    page.question("How long do forward, backward and optimizer take (batch 4, 5 warm-up and 10 timed steps)?")
    warm = records.only(warmup=5)
    keys = ["size", "context", "impl"]
    columns = [*keys, *PHASES, "median", "min", "p95", "cv", "tokens_s", "gflops", "peak_mib", "status"]
    steps = pd.DataFrame(rows_of(warm.only(**{"pass": "step"})))
    if len(steps):
        table_of_steps(page, steps, columns)
    ratios = warm.only(**{"pass": "step"}).ratio("ms")
    peaks = warm.only(**{"pass": "step"}).ratio("peak_mib")
    if len(ratios):
        page.text(
            "A step is forward, loss, backward and AdamW; phases are means ± standard deviations, the step's median "
            f"is {geomean(ratios):.2f} times PyTorch's with {geomean(peaks):.2f} times its memory (geometric means). "
            "C attends with flash, torch_eager as the course does, by materialised scores; both run AdamW in the "
            "course's order, torch_eager in a Python loop over the parameters. GFLOP/s counts "
            f"the matrix products alone. {ran_with(warm.only(**{'pass': 'step'}))}"
        )
        page.verdict(
            "benchmarking_script",
            f"step {geomean(ratios):.2f} x PyTorch eager's time, {geomean(peaks):.2f} x its memory.",
        )
    inference = pd.DataFrame(rows_of(warm.only(**{"pass": "inference"})))
    if len(inference):
        page.text("Forward alone, with nothing kept for a backward pass:")
        table_of_steps(page, inference, [*keys, "mean", "std", "median", "cv", "tokens_s", "gflops"])


def report_warmup(page, records):
    page.question("What do fewer warm-up steps change, and why?")
    few = [row for row in rows_of(records) if row["warmup"] in WARMUPS and "mean" in row]
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
    said = []
    for impl in dict.fromkeys(row["impl"] for row in few):
        cold, warm = (
            [row for row in few if row["impl"] == impl and row["warmup"] == count] for count in (0, 5)
        )
        if cold and warm:
            said.append(
                f"{impl}: without warm-up the first step takes {geomean(row['first_over'] for row in cold):.2f} times "
                f"the median of its run and the mean is {geomean(row['mean'] / row['median'] for row in cold):.2f} "
                f"times the median; after five steps of warm-up {geomean(row['first_over'] for row in warm):.2f} and "
                f"{geomean(row['mean'] / row['median'] for row in warm):.2f} times."
            )
    if said:
        page.text(
            f"Each row is a process of its own. {' '.join(said)} Once in a process pages of memory are touched for the "
            "first time, the matrix library generates its kernels, threads are started and caches filled."
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
