"""The page of ops."""

import numpy as np
import pandas as pd

from parity.core.comparison import geomean
from parity.shared.pages import errors_by, held, mark, on_gpu, units_of

OPTIMIZERS = ("adamw_step", "adamw_update", "sgd_step")
SIDES = ("c", "torch_eager", "torch_compile", "torch_library")


def report(page, records):
    page.section("operations", "Is every operation as exact as PyTorch's, and how fast is it?")
    timed = type(records)(record for record in records.records if "ms" in record)
    between = [op for op in timed.values("op") if op not in ("gemm", "copy", *OPTIMIZERS)]
    ratios = {
        over: geomean(timed.only(op=between).ratio("ms", over=over))
        for over in SIDES[1:]
        if len(timed.only(impl=over))
    }
    page.say(**held(records), **ratios, gemm=geomean(timed.only(op="gemm").ratio("ms")))
    page.table(errors_by(records, ["dtype"]), "errors_by_dtype")
    page.table(errors_by(records, ["op", "dtype"]), "errors", more=True)
    page.question("How fast are the matrix products of the models?")
    gemms = timed.only(op="gemm")
    keys = ["dtype", "m", "n", "k", "trans_a", "trans_b"]
    frame = gemms.wide(keys, "ms", base="torch_eager") if len(gemms) else pd.DataFrame()
    if len(frame):
        rates = gemms.wide(keys, "tflops")
        for impl in ("c", "torch_eager"):
            if impl in rates:
                frame[f"TFLOP/s of {impl}"] = rates[impl]
    page.table(frame, "products", units=units_of(frame, gemms.impls(), "ms"))
    copies = report_copies(page, timed.only(op="copy"))
    for question, name, ops in (
        ("How fast is everything between the products?", "between", between),
        ("How fast are the optimizers?", "optimizers", list(OPTIMIZERS)),
    ):
        page.question(question)
        page.table(times_table(timed.only(op=ops), copies), name, units=dict.fromkeys(SIDES, "ms"))
    device = (
        "the second-level cache is overwritten before each call"
        if on_gpu(timed)
        else "calls alternate in one process"
    )
    page.method(
        "Errors are relative L2 errors against float64, the worst of an operation's cases. Copies and "
        "products of small "
        f"whole numbers must be exact. For times, {device}. GB/s counts the bytes that the operation must read and "
        "write once; its share is of a copy that moves as many bytes."
    )


def report_copies(page, timed):
    """[(bytes moved, GB/s)] of the faster side, by size."""
    page.question("How fast is a copy, which reads and writes memory?")
    rows = []
    for count in timed.values("count"):
        row = {"MiB": count * 4 / 2**20}
        for impl in timed.impls():
            speed = timed.value("gb_s", impl=impl, count=count)
            row[impl] = None if speed != speed else speed
        rows.append(row)
    frame = pd.DataFrame(rows)
    page.table(frame, "copies", units=units_of(frame, timed.impls(), "GB/s"))
    found = [(2 * row["MiB"] * 2**20, [row[i] for i in timed.impls() if row[i]]) for row in rows]
    return sorted((nbytes, max(speeds)) for nbytes, speeds in found if speeds)


def times_table(timed, copies):
    """A row a case: times of all sides, and the share of a copy's speed that C reaches."""
    rows = {}
    for record in timed.records:
        case = record["case"]
        shape = ", ".join(f"{k} {v}" for k, v in case.items() if k not in ("op", "dtype"))
        key = (case["op"], case["dtype"], shape)
        row = rows.setdefault(key, {"op": case["op"], "dtype": case["dtype"], "shape": shape})
        row[record["impl"]] = record["ms"]["median"]
        mark(row, record)
        if record["impl"] == "c" and record.get("gb_s"):
            row["GB/s"] = record["gb_s"]
            if copies:
                nbytes = record["gb_s"] * 1e6 * record["ms"]["median"]
                row["% of a copy"] = f"{100 * record['gb_s'] / copy_speed(copies, nbytes):.0f} %"
    frame = pd.DataFrame(list(rows.values()))
    names = ["op", "dtype", "shape", *SIDES, "GB/s", "% of a copy", "noisy"]
    return frame[[name for name in names if name in frame]] if len(frame) else frame


def copy_speed(copies, nbytes):
    """GB/s of a copy that moves so many bytes, between the measured ones on a logarithmic axis."""
    sizes, speeds = zip(*copies, strict=True)
    return float(np.interp(np.log(nbytes), np.log(sizes), speeds))
