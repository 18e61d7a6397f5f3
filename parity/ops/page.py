"""The page of ops."""

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
    page.question("How fast are a copy and everything between the products?")
    report_times(page, timed.only(op=[*between, "copy"]), "between")
    page.question("How fast are the optimizers?")
    report_times(page, timed.only(op=list(OPTIMIZERS)), "optimizers")
    page.method(gpu=on_gpu(timed))


def report_times(page, timed, name):
    def cells(record):
        shape = ", ".join(f"{k} {v}" for k, v in record["case"].items() if k not in ("op", "dtype"))
        return {"shape": shape, record["impl"]: record["ms"]["median"]}

    keys = ["op", "dtype", *dict.fromkeys(key for r in timed.records for key in r["case"])]
    rows, order = tabled(timed.records, keys, cells), ["op", "dtype", "shape", *SIDES]
    page.table(rows, name, order, dict.fromkeys(SIDES, "ms"))
