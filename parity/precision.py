"""Accumulation in low precision, and which dtype each operation has under autocast."""

import torch

from parity.core import DTYPES, NAMES, Case, Side, equal, grid
from parity.shared.pages import tabled, valued
from ref import precision as ref

LOW = ["f16", "bf16"]
DEVICES = ["cpu", "cuda"]
LOSSES = ["cross_entropy_loss", "mse_loss", "mean"]
LISTED = "2.13"  # the PyTorch whose operator lists are C's
METHODS = {"sequential": ref.accumulate, "kahan": ref.kahan, "pairwise": ref.pairwise}
# (addend, accumulator): every accumulator with its own addend, and the low ones promoted into f32.
SUMS = [("f64", "f64"), ("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("f16", "f32"), ("bf16", "f32")]


def cases(profile, device):
    for loop in range(4):
        yield Case("mixed_precision_accumulation", loop=loop + 1)
    # The arithmetic is the processor's whatever the device: a GPU's report has no use for the longest sums.
    long = profile == "full" and device == "cpu"
    counts = [10, 100, 1000, 10_000, 100_000] if long else [10, 1000, 10_000]
    for keys in grid(value=[0.01, 0.1], count=counts, method=list(METHODS)):
        for addend, accumulator in SUMS:
            seconds = 2e-5 * keys["count"]
            keys = {**keys, "addend": addend, "accumulator": accumulator}
            yield Case("mixed_precision_accumulation", seconds=seconds, **keys)
    for keys in grid(device=DEVICES, low=LOW, loss=LOSSES):
        yield Case("benchmarking_mixed_precision", part="toy_model", **keys)
    for keys in grid(device=DEVICES, low=LOW):
        yield Case("benchmarking_mixed_precision", part="operations", seconds=1, **keys)
    for device in DEVICES:
        yield Case("benchmarking_mixed_precision", part="lists", device=device)
    for keys in grid(dtype=["f32", "f16", "bf16"], x=[100.0, 255.0, 256.0, 1000.0]):
        yield Case("benchmarking_mixed_precision", part="square", **keys)


def run(case, draw, c):
    if "loop" in case or "method" in case:
        return sums(case, c)
    parts = {"toy_model": toy_model, "operations": operations, "lists": lists, "square": square}
    return parts[case.part](case, c)


def sums(case, c):
    """Every sum must be PyTorch's bit for bit, and so must the addition after which it stopped to grow."""
    if "loop" in case:
        desc = c.value("td_precision_handout_case", case.loop - 1)
        addend, accumulator = name_of(c, desc.addend), name_of(c, desc.accumulator)
        count, value, method, cast_first = desc.count, desc.value, "sequential", desc.cast_first
        desc = c.ffi.addressof(desc)
    else:
        desc = c.struct("td_sum_case", case)
        addend, accumulator, cast_first = case.addend, case.accumulator, False
        count, value, method = case.count, case.value, case.method
    arguments = (count, value, DTYPES[addend], DTYPES[accumulator])

    def tandem():
        total, stalled = c.ffi.new("double *"), c.ffi.new("int64_t *")
        c.td_precision_sum(desc, total, stalled)
        return {"sum": total[0], "stalled": stalled[0]}

    def eager():
        if method != "sequential":
            return {"sum": METHODS[method](*arguments), "stalled": count}
        totals = [0.0, *ref.running_sums(*arguments, cast_first)]
        grew = (i for i in range(1, count + 1) if totals[i] != totals[i - 1])
        return {"sum": totals[-1], "stalled": max(grew)}

    named = {"addend": addend, "accumulator": accumulator, "cast_first": bool(cast_first)}
    return exact_sides("values", tandem(), eager(), **named, exact=count * value, count=count)


def exact_sides(key, mine, theirs, **more):
    """What both sides found, which must be equal, and stands in their records."""
    mine, theirs = (Side(lambda x=x: x, record={key: x | more}) for x in (mine, theirs))
    return {"c": mine, "torch_eager": theirs, "rule": {"*": equal()}}


def name_of(c, dtype):
    return c.ffi.string(c.td_dtype_name(dtype)).decode()


def toy_model(case, c):
    components, count = c.ffi.new("td_toy_component[8]"), c.ffi.new("int64_t *")
    device = c.enum("td_autocast_device", case.device)
    c.td_autocast_toy_model(device, c.enum("td_dtype", case.low), case.loss, components, count)
    mine = {c.ffi.string(part.name).decode(): name_of(c, part.dtype) for part in components[0 : count[0]]}
    seen = ref.toy_dtypes(case.device, DTYPES[case.low], case.loss)
    return exact_sides("dtypes", mine, {name: NAMES[dtype] for name, dtype in seen.items()})


def refuse_other_lists(on):
    """A GPU machine brings its own PyTorch, and the lists grow from one to the next. A CPU has ours."""
    if on.type != "cpu" and not torch.__version__.startswith(f"{LISTED}."):
        raise NotImplementedError(
            f"the operator lists come from PyTorch {LISTED}, and this is PyTorch {torch.__version__}"
        )


def operations(case, c):
    """Every operation that ref/precision.py can call, with f32 inputs, with low ones, and with both."""
    refuse_other_lists(c.on.torch)
    mine, theirs = {}, {}
    listed = ref.registered(case.device)
    for op, (count, _) in ref.OPS.items():
        inputs = [["f32"] * count, [case.low] * count]
        if count == 2 and op in listed and rule_of(c, case.device, op) in ("lower", "widest"):
            inputs.append(["f32", case.low])
        for dtypes in inputs:
            name = f"{op}({', '.join(dtypes)})"
            mine[name] = result_by_tandem(c, case, op, dtypes)
            dtype = ref.op_dtype(case.device, DTYPES[case.low], op, [DTYPES[name] for name in dtypes])
            theirs[name] = "banned" if dtype is None else NAMES[dtype]
    return exact_sides("dtypes", mine, theirs)


def rule_of(c, device, op):
    rule = c.value("td_autocast_rule_find", c.enum("td_autocast_device", device), op)
    return c.ffi.string(c.td_autocast_rule_name(rule)).decode()


def result_by_tandem(c, case, op, dtypes):
    if rule_of(c, case.device, op) == "banned":
        return "banned"
    inputs = c.ffi.new("td_dtype[]", [c.enum("td_dtype", dtype) for dtype in dtypes])
    device, low = c.enum("td_autocast_device", case.device), c.enum("td_dtype", case.low)
    return name_of(c, c.value("td_autocast_result", device, low, op, len(dtypes), inputs))


def lists(case, c):
    """C's lists name exactly the operators for which PyTorch has an autocast kernel."""
    refuse_other_lists(c.on.torch)
    device, named = c.enum("td_autocast_device", case.device), []
    for index in range(c.td_autocast_list_size(device)):
        op, rule = c.ffi.new("char **"), c.ffi.new("td_autocast_rule *")
        c.td_autocast_list_entry(device, index, op, rule)
        named.append(c.ffi.string(op[0]).decode())
    mine, theirs = sorted(named), sorted(ref.registered(case.device))
    return exact_sides("dtypes", {"operators": " ".join(mine)}, {"operators": " ".join(theirs)})


def square(case, c):
    """What a layer norm does to one large value: x^2, and 1 / sqrt(x^2), each rounded to the dtype."""
    dtype = c.enum("td_dtype", case.dtype)

    def rounded(x):
        given, narrow, wide = c.ffi.new("double *", x), c.ffi.new("double *"), c.ffi.new("double *")
        c.td_convert(1, c.enum("td_dtype", "f64"), given, dtype, narrow)
        c.td_convert(1, dtype, narrow, c.enum("td_dtype", "f64"), wide)
        return wide[0]

    squared = rounded(rounded(case.x) ** 2)
    mine = {"square": squared, "rsqrt": rounded(1 / squared**0.5)}
    x = torch.tensor(case.x, dtype=DTYPES[case.dtype])
    theirs = {"square": (x * x).item(), "rsqrt": (1 / (x * x).sqrt()).item()}
    return exact_sides("values", mine, theirs)


def report(page, records):
    report_sums(page, records)
    autocast = records.only("benchmarking_mixed_precision")
    report_toy_model(page, autocast.only(part="toy_model", impl="c"))
    report_layer_norm(page, autocast, records)
    page.method(listed=LISTED, operations=len(ref.OPS))


def stalled_in_bf16(records):
    """A thousand additions of 0.01 with an accumulator in bf16."""
    rows = valued(records, count=1000, value=0.01, accumulator="bf16", method="sequential")
    return rows[0] if rows else None


def report_sums(page, records):
    page.section("mixed_precision_accumulation")
    loops = [row for row in valued(records) if "loop" in row]
    for row in loops:
        row |= {"in full": repr(row["sum"]), "printed": f"{row['sum']:.4f}"}
        row["error"] = row["sum"] - row["exact"]
        row["addend"] += ", cast before the addition" if row["cast_first"] else ""
    names = {"loop": "loop", "accumulator": "accumulator", "addend": "addend", "in full": "sum"}
    page.table(loops, "four_sums", names | {"printed": "printed", "error": "sum - 10"}, expected=4)
    printed, exact = ({f"loop{row['loop']}": row[name] for row in loops} for name in ("printed", "in full"))
    same = len({row["sum"] for row in loops[2:]}) == 1 and len(loops) == 4
    f16 = loops[-1]["sum"] / 1000 if loops else None
    page.say(**printed, same=same, exact=exact, f16=f16, bf16=stalled_in_bf16(records))


def report_toy_model(page, toys):
    page.section("benchmarking_mixed_precision (a)")
    columns = {}
    for record in toys.only(loss="cross_entropy_loss").records:
        columns[f"{record['case']['device']}, {record['case']['low']}"] = record.get("dtypes", {})
    names = next(iter(columns.values()), {})
    rows = [{"component": n} | {title: found.get(n, "") for title, found in columns.items()} for n in names]
    page.table(rows, "autocast_dtypes", expected=6)
    page.say(**columns.get("cuda, f16", {}))

    def cells(record):
        return {f"{record['case']['device']}, f16": record.get("dtypes", {}).get("loss", "")}

    page.note("The dtype of the loss depends on whether autocast promotes it:")
    page.table(tabled(toys.only(low="f16").records, ("loss",), cells), "autocast_losses")


def report_layer_norm(page, records, everything):
    page.section("benchmarking_mixed_precision (b)")
    rows = valued(records, part="square")
    for row in rows:
        row["square"] = "overflows" if row["square"] is None else row["square"]  # JSON has no infinity
    columns = {"dtype": "dtype", "x": "x", "square": "x^2", "rsqrt": "1 / sqrt(x^2)"}
    page.table(rows, "layer_norm", columns, digits={"x": 4})
    squares = {row["dtype"]: row["square"] for row in rows if row["x"] == 1000.0}
    told = {"overflows": squares.get("f16") == "overflows" or None, "square": squares.get("bf16")}
    page.say(**told, stops=(stalled_in_bf16(everything) or {}).get("sum"))
