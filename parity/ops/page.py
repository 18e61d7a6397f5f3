"""The page of ops."""

import numpy as np

from parity.core.comparison import geomean
from parity.shared.pages import errors_by, held, on_gpu, tabled

OPTIMIZERS = ("adamw_step", "adamw_update", "sgd_step")
SIDES = ("c", "torch_eager", "torch_compile", "torch_library")


def report(page, records):
    page.section("operations", "Is every operation as exact as PyTorch's, and how fast is it?")
    timed = records.where(lambda r: "ms" in r)
    between = [op for op in timed.values("op") if op not in ("gemm", "copy", *OPTIMIZERS)]
    gemms, rest, ms = timed.only(op="gemm"), timed.only(op=between), dict.fromkeys(SIDES, "ms")
    ratios = {over: geomean(rest.ratio("ms", over=over)) for over in SIDES[1:]}
    page.say(**held(records), **ratios, gemm=geomean(gemms.ratio("ms")))
    page.table(errors_by(records, ["dtype"]), "errors_by_dtype")
    page.table(errors_by(records, ["op", "dtype"]), "errors", more=True)
    page.question("How fast are the matrix products of the models?")
    keys = ["dtype", "m", "n", "k", "trans_a", "trans_b"]
    pairs = zip(gemms.wide(keys, "ms", base="torch_eager"), gemms.wide(keys, "tflops"), strict=True)
    rows = [row | {f"TFLOP/s of {impl}": of.get(impl) for impl in SIDES[:2]} for row, of in pairs]
    page.table(rows, "products", units=ms)
    copies = report_copies(page, timed.only(op="copy"))
    page.question("How fast is everything between the products?")
    report_times(page, rest, copies, "between")
    page.question("How fast are the optimizers?")
    report_times(page, timed.only(op=list(OPTIMIZERS)), copies, "optimizers")
    page.method(gpu=on_gpu(timed))


def report_copies(page, timed):
    """[(bytes moved, GB/s)] of the faster side, by size."""
    page.question("How fast is a copy, which reads and writes memory?")

    def cells(record):
        return {"MiB": record["case"]["count"] * 4 / 2**20, record["impl"]: record.get("gb_s")}

    rows = tabled(timed.records, ("count",), cells, order=lambda key: key)
    page.table(rows, "copies", ["MiB", *SIDES], dict.fromkeys(SIDES, "GB/s"))
    found = [(2 * row["MiB"] * 2**20, [row[i] for i in SIDES if row.get(i)]) for row in rows]
    return sorted((nbytes, max(speeds)) for nbytes, speeds in found if speeds)


def report_times(page, timed, copies, name):
    """A row a case: times of all sides, and the share of a copy's speed that C reaches."""

    def cells(record):
        case, ms, speed = record["case"], record["ms"]["median"], record.get("gb_s")
        shape = ", ".join(f"{k} {v}" for k, v in case.items() if k not in ("op", "dtype"))
        row = {"shape": shape, record["impl"]: ms}
        if record["impl"] == "c" and speed:
            row["GB/s"] = speed
            if copies:
                row["% of a copy"] = f"{100 * speed / copy_speed(copies, speed * 1e6 * ms):.0f} %"
        return row

    keys = ["op", "dtype", *dict.fromkeys(key for r in timed.records for key in r["case"])]
    order = ["op", "dtype", "shape", *SIDES, "GB/s", "% of a copy"]
    page.table(tabled(timed.records, keys, cells), name, order, dict.fromkeys(SIDES, "ms"))


def copy_speed(copies, nbytes):
    """GB/s of a copy that moves so many bytes, between the measured ones on a logarithmic axis."""
    sizes, speeds = zip(*copies, strict=True)
    return float(np.interp(np.log(nbytes), np.log(sizes), speeds))
