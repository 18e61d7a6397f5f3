"""The page of ops."""

import numpy as np
import pandas as pd

from parity.core import geomean
from parity.ops.rules import BARS
from parity.shared.pages import error_answer, errors_by, on_gpu, units_of

OPTIMIZERS = ("adamw_step", "adamw_update", "sgd_step")
FUSED = "linear_adamw_update"
SIDES = ("c", "torch_eager", "torch_compile", "torch_library")


def report(page, records):
    page.question("Is every operation as exact as PyTorch's, forward and backward?")
    answer, figure = error_answer(records)
    page.answer("operations", answer, figure)
    page.table(errors_by(records, ["dtype"]), "errors_by_dtype")
    page.table(errors_by(records, ["op", "dtype"]), "errors")
    page.method(
        "Errors are relative L2 errors against float64, the worst of an operation's cases, with every size in the "
        "records. Copies (embedding) and products of small whole numbers must be exact, and are compared so."
    )

    timed = type(records)(record for record in records.records if "ms" in record)
    if on_gpu(records):
        report_products(page, timed.only(op="gemm"))
        copies = report_copies(page, timed.only(op="copy"))
        report_bandwidth(page, timed, copies)
    else:
        report_cpu(page, timed)


# ---- on a GPU ----


def report_products(page, timed):
    page.question("How fast are the products of the models (batch 4, context 512)?")
    frame = timed.wide(["dtype", "m", "n", "k", "trans_a", "trans_b"], "ms", base="torch_eager")
    rates = timed.wide(["dtype", "m", "n", "k", "trans_a", "trans_b"], "tflops")
    for impl in ("c", "torch_eager"):
        if impl in rates:
            frame[f"TFLOP/s of {impl}"] = rates[impl]
    page.table(frame, "products", units=units_of(frame, timed.impls(), "ms"))
    ceilings = {}
    for dtype in timed.values("dtype"):
        found = [record["tflops"] for record in timed.only(dtype=dtype).records if "tflops" in record]
        if found:
            ceilings[dtype] = max(found)
    ratios = timed.ratio("ms")
    if ceilings and len(ratios):
        best = ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in ceilings.items())
        page.text(
            f"The best rates of either side are {best} TFLOP/s. Both call the vendor's library; C takes "
            f"{geomean(ratios):.2f} times PyTorch's time in the geometric mean of {len(ratios)} products. "
            "f32 is true f32 and tf32 is TF32 on both sides, as the case says; the second-level cache is "
            "overwritten before each call."
        )


def report_copies(page, timed):
    """[(bytes moved, GB/s)] of the faster side, by size; and the table of both."""
    page.question("What does the memory give? A copy of so many bytes, read and written")
    rows = []
    for count in timed.values("count"):
        row = {"MiB": count * 4 / 2**20}
        for impl in timed.impls():
            row[impl] = known(timed.value("gb_s", impl=impl, count=count))
        rows.append(row)
    frame = pd.DataFrame(rows)
    page.table(frame, "copies", units=units_of(frame, timed.impls(), "GB/s"))
    found = []
    for row in rows:
        speeds = [row[impl] for impl in timed.impls() if row[impl]]
        if speeds:
            found.append((2 * row["MiB"] * 2**20, max(speeds)))
    return sorted(found)


def report_bandwidth(page, timed, copies):
    page.question("What share of that do the operations between the products reach?")
    ops = [op for op in timed.values("op") if op not in ("gemm", "copy", FUSED, *OPTIMIZERS)]
    shares = share_table(page, timed.only(op=ops), copies, "between")
    page.method(
        "GB/s counts the bytes that the operation cannot do without, each read or written once. The share "
        "is that of the largest copy; beside it stands the share of a copy that moves as many bytes, "
        "for a short call ends before the memory is at full speed. torch_eager is the formula, "
        "torch_compile the same formula compiled, torch_library PyTorch's own fused function where it has "
        "one."
    )
    say_shares(page, shares, BARS["else"], "operations")
    for over in ("torch_eager", "torch_compile", "torch_library"):
        ratios = timed.only(op=ops).ratio("ms", over=over)
        if len(ratios):
            page.text(
                f"C takes {geomean(ratios):.2f} times {over}'s time in the geometric mean of {len(ratios)} rows "
                f"({ratios.min():.2f} to {ratios.max():.2f})."
            )

    page.question("What share does AdamW reach?")
    shares = share_table(page, timed.only(op=list(OPTIMIZERS)), copies, "adamw")
    say_shares(page, shares, BARS["adamw"], "optimizers")

    page.question("And the gradient of a weight with its AdamW step in one?")
    share_table(page, timed.only(op=FUSED), copies, "linear_adamw")
    page.text(
        "GB/s counts the weight, its moments and its copy; the products are done beside them. On PyTorch's side the "
        "product, the gradient in f32, AdamW and the copy for the next forward, one after the other."
    )


def share_table(page, timed, copies, name):
    """A row a case, and of C's rows (name, share of the largest copy, share of an equal copy)."""
    rows, shares = {}, []
    for record in timed.records:
        case = record["case"]
        shape = ", ".join(f"{k} {v}" for k, v in case.items() if k not in ("op", "dtype"))
        key = (case["op"], case["dtype"], shape)
        row = rows.setdefault(key, {"op": case["op"], "dtype": case["dtype"], "shape": shape})
        row[record["impl"]] = record["ms"]["median"]
        if record["impl"] == "c" and record.get("gb_s"):
            row["GB/s"] = record["gb_s"]
            if copies:
                nbytes = record["gb_s"] * 1e6 * record["ms"]["median"]
                row["share"] = record["gb_s"] / copies[-1][1]
                row["share of its size"] = record["gb_s"] / copy_speed(copies, nbytes)
                shares.append((f"{case['op']} {case['dtype']}", row["share"], row["share of its size"]))
    sides = [impl for impl in SIDES if any(impl in row for row in rows.values())]
    names = ["op", "dtype", "shape", *sides, "GB/s", "share", "share of its size"]
    frame = pd.DataFrame(list(rows.values()))
    shown = [column for column in names if column in frame]
    page.table(frame, name, columns=shown, units=units_of(frame, sides, "ms"))
    return shares


def copy_speed(copies, nbytes):
    """GB/s of a copy that moves so many bytes, between the measured ones on a logarithmic axis."""
    sizes, speeds = zip(*copies, strict=True)
    return float(np.interp(np.log(nbytes), np.log(sizes), speeds))


def say_shares(page, shares, bar, what):
    if not shares:
        return
    held = sum(share >= bar for _, share, _ in shares)
    equal = sum(share >= bar for _, _, share in shares)
    worst = min(shares, key=lambda found: found[1])
    page.text(
        f"{held} of {len(shares)} {what} reach {bar:.0%} of the largest copy, {equal} that share of a copy "
        f"of their size. The lowest is {worst[0]}, {worst[1]:.0%} and {worst[2]:.0%}."
    )


def known(value):
    return None if value != value else value


# ---- on a CPU ----


def report_cpu(page, timed):
    page.question("How fast are the products of the small model (batch 4, context 128)?")
    table_of_times(page, timed.only(op="gemm"), ["m", "n", "k", "trans_a", "trans_b", "dtype"], "products")
    rates = timed.only(op="gemm", dtype="f32")
    best = {
        impl: max(r["tflops"] for r in rates.only(impl=impl).records)
        for impl in ("c", "torch_eager")
        if len(rates.only(impl=impl))
    }
    if len(best) == 2:
        page.text(
            f"In f32 C reaches {1e3 * best['c']:.0f} GFLOP/s and PyTorch {1e3 * best['torch_eager']:.0f}: C calls "
            "oneDNN, PyTorch MKL. The C / PyTorch columns are ratios of medians of calls that alternate in one "
            "process."
        )

    page.question("How fast is everything between the products?")
    between = [op for op in timed.values("op") if op not in ("gemm", "adamw_step", "sgd_step")]
    table_of_times(page, timed.only(op=between), ["op", "dtype"], "between")
    ratios, library = (
        timed.only(op=between).ratio("ms", over=side) for side in ("torch_eager", "torch_library")
    )
    if len(ratios):
        page.text(
            f"C takes {geomean(ratios):.2f} times the time of the formula in eager PyTorch (torch_eager), "
            f"and {geomean(library):.2f} times that of PyTorch's own fused function where it has one "
            "(torch_library), both as geometric means."
        )

    page.question("How long does an optimizer step take on the small model's parameters?")
    steps = timed.only(op=["adamw_step", "sgd_step"])
    table_of_times(page, steps, ["op", "count"], "optimizers")
    adamw, fused = (
        steps.only(op="adamw_step").ratio("ms", over=side) for side in ("torch_eager", "torch_library")
    )
    if len(adamw) and len(fused):
        said = f"AdamW takes {adamw[0]:.2f} times torch.optim.AdamW(foreach=True)"
        page.text(
            f"{said} and {fused[0]:.2f} times its fused form: one pass over p, g, m and v instead of one for each "
            "elementary operation."
        )


def table_of_times(page, records, keys, name):
    frame = records.wide(keys, "ms", base="torch_eager")
    page.table(frame, name, units=units_of(frame, records.impls(), "ms"))
