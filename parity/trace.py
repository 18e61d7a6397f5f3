"""What runs in a training step, kernel by kernel, in C by its own trace and in PyTorch by its own profiler: the
handout's nsys_profile. On a CPU the same by operations."""

import itertools
import re
from collections import Counter
from contextlib import closing
from statistics import median

import torch

from parity.core import Case, Side, equal, grid
from parity.core.comparison import clean, same_place
from parity.shared.model import (
    c_switches,
    draw_batch,
    initial_state,
    noise_model,
    quick_start,
    torch_model,
    torch_switches,
    train_options,
)
from parity.shared.pages import by_case, extent, on_gpu, tabled
from parity.shared.sizes import BATCH, extents, keys_of
from ref import trace as ref
from ref.transformer import SIZES

CONTEXTS = [128, 256, 512, 1024]
RATES = {"cpu": 5e10, "cuda": 5e13}  # FLOP/s to expect
KERNELS, FEW_KERNELS = 16, 5  # of a record, for each of SCOPES; of an older record
NAMED = 0.01  # of the forward pass, from which on a table names a kernel
PHASES = ("forward", "loss", "backward", "optimizer", "elsewhere")
FORWARD = ("forward", "loss")  # of the handout
SCOPES = {"forward": ("forward",), "forward and backward": ("forward", "loss", "backward"), "step": PHASES}
PARTS = ("scores", "softmax", "values", "fused")
WHAT = ("name", "class", "share", "calls")  # a record has of a kernel
# PyTorch's operations on a CPU by class: the list of kernels' names does not have them.
OPERATIONS = {
    "matmul": "mm bmm addmm",
    "softmax": "softmax",
    "reduction": "sum mean amax max norm",
    "memory": "copy_ fill_ zero_ empty empty_strided",
    "elementwise": "mul add sub div exp neg rsqrt sqrt sigmoid pow where",
}
CLASS_OF = {operation: name for name, found in OPERATIONS.items() for operation in found.split()}


def cases(profile, device):
    for keys in grid(dtype=["f32", "bf16_mixed"], context=[16, 48]):
        shape = dict(d_model=64, d_ff=96, layers=3, heads=4, vocab=64, batch=2)
        yield Case("nsys_profile", part="flops", size="tiny", seconds=0.3, **shape, **keys)
    if device == "cuda":
        sizes = list(SIZES)[:5] if profile == "full" else ["small"]
        for keys in grid(size=sizes, context=CONTEXTS if profile == "full" else [512]):
            yield profile_case(device, **keys)
        return
    contexts = [64, 128, 256] if profile == "full" else [64]
    for context in contexts:
        size = "laptop" if profile == "quick" else "small"
        yield profile_case(device, size=size, context=context, batch=1)


def profile_case(device, size, context, batch=BATCH):
    shape, numel = extents(size)
    step = batch * context * 6 * numel / RATES[device]
    # PyTorch keeps three matrices of scores a layer for backward, and makes more.
    scores = 16 * shape["layers"] * batch * shape["heads"] * context**2
    phases = {"timed": "phases"}
    config = {
        "c": {"attention": "naive"} | c_switches(keep="all", gradients="transient") | phases,
        "torch_eager": torch_switches("f32") | {"attention": "scores", "optimizer": "loop"} | phases,
    }
    return Case(
        "nsys_profile",
        measure="memory",
        seconds=(10 if device == "cuda" else 2) + numel / 1e9 + len(config) * 8 * step,
        in_turn=True,
        alone=True,
        config=config,
        needs_bytes=numel * 18 + scores,
        part="profile",
        **keys_of(size, context, "f32", "step", batch, warmup=2 if device == "cuda" else 1),
    )


def runs(case):
    return ["bench"]


def run(case, draw, c):
    return flops(case, draw, c) if case.part == "flops" else profiles(case, draw, c)


def flops(case, draw, c):
    tokens = draw.integers("tokens", (case.batch, case.context), high=case.vocab)

    def tandem():
        with closing(Traced(case, c, {"attention": "naive"} | c_switches(keep="all"), 0, 1)) as traced:
            forward, step = traced.total(("forward",)), traced.total(PHASES)
            attention = c.value("td_trace_attention_of", traced.trace).flops
            found = {"forward": forward.flops[traced.matmul], "step": step.flops[traced.matmul]}
            return found | {"scores": attention[1], "values": attention[3]}

    def eager():
        state = initial_state(case, draw.normal)
        model = torch_model(case, state, dtype=torch.float32)
        return {name: float(count) for name, count in ref.flops(model, tokens, tokens).items()}

    return {"c": tandem, "torch_eager": eager, "rule": {"*": equal()}}


class Traced:
    """Steps of libtandem: without a trace, each phase until the device is done; then with one."""

    def __init__(self, case, c, switches, warmup, steps):
        self.c, self.steps = c, steps
        how = dict(mode="train", warmup=warmup, steps=steps, graph=switches["graph"])
        config = c.struct("td_bench_config", case, model=train_options(switches)["model"], **how)
        self.classes = [c.ffi.string(c.td_op_class_name(i)).decode() for i in range(9)]
        self.matmul = self.classes.index("matmul")
        self.timer = self.bench(config)
        config.timed = c.TD_TIMED_EVENTS
        self.trace = c.value("td_trace_begin", c.device)
        self.bench(config)
        c.td_trace_end(self.trace)
        self.info = c.value("td_trace_info_of", self.trace)

    def bench(self, config):
        """The median time of the forward pass, in ms."""
        with quick_start(self.c):
            result = self.c.value("td_bench_run", self.c.device, self.c.ffi.NULL, config, None, None)
        ms = self.c.value("td_bench_summary_of", result).forward.ms.median
        self.c.td_bench_result_destroy(result)
        return ms

    def close(self):
        self.c.td_trace_destroy(self.trace)

    def bits(self, phases):
        return sum(1 << PHASES.index(name) for name in phases)

    def total(self, phases):
        return self.c.value("td_trace_total_of", self.trace, self.bits(phases))

    def kernels(self, phases):
        rows, count = self.c.ffi.new("td_trace_kernel[]", KERNELS), self.c.ffi.new("int64_t *")
        self.c.td_trace_kernels(self.trace, self.bits(phases), KERNELS, rows, count)
        for row in list(rows)[: count[0]]:
            yield self.c.ffi.string(row.name).decode(), self.classes[row.op_class], row.share, row.per_pass

    def values(self):
        without = self.c.ffi.string(self.info.cupti).decode()
        values = {"without kernels": without} if without else {}
        values |= {"forward timer": self.timer, "forward window": self.total(FORWARD).window_ms}
        values |= {"optimizer busy": self.total(("optimizer",)).busy_ms}
        for scope, phases in SCOPES.items():
            total = self.total(phases)
            values |= {f"{scope} ms {name}": total.by_class_ms[i] for i, name in enumerate(self.classes)}
            values |= numbered(scope, self.kernels(phases))
        attention = self.c.value("td_trace_attention_of", self.trace)
        for i, part in enumerate(PARTS, 1):
            if attention.ms[i] > 0:
                values |= {f"attention ms {part}": attention.ms[i]}
        return values


def numbered(scope, kernels):
    cells = ((i, zip(WHAT, kernel, strict=True)) for i, kernel in enumerate(kernels, 1))
    return {f"{scope} {i} {what}": cell for i, pairs in cells for what, cell in pairs}


def class_of(c, name):
    """By the same list for both sides; operations of a CPU, which are no kernels, by their own."""
    if name.startswith("aten::"):
        short = name.removeprefix("aten::").removeprefix("_")
        return CLASS_OF.get(short) or CLASS_OF.get(short.rstrip("_"), "other")
    op_class = c.value("td_trace_classify", name.encode())
    return c.ffi.string(c.td_op_class_name(op_class)).decode()


def busy(activities):
    """Milliseconds while at least one ran."""
    total, until = 0.0, float("-inf")
    for activity in sorted(activities, key=lambda found: found.begin):
        total += max(0.0, activity.end - max(activity.begin, until))
        until = max(until, activity.end)
    return total / 1e3


def window(activities, steps):
    """Milliseconds from a step's first activity to its last, the mean of the steps."""
    begins, ends = {}, {}
    for found in activities:
        begins[found.step] = min(begins.get(found.step, found.begin), found.begin)
        ends[found.step] = max(ends.get(found.step, found.end), found.end)
    return sum(ends[step] - begins[step] for step in begins) / 1e3 / steps


def torch_values(profiled, c):
    steps, activities = profiled.steps, profiled.activities
    classes = {name: class_of(c, name) for name in {found.name for found in activities}}

    def of(phases):
        return [found for found in activities if found.phase in phases]

    clocks = zip(*(profiled.timer[phase] for phase in FORWARD), strict=True)
    values = {"forward timer": median(map(sum, clocks)), "forward window": window(of(FORWARD), steps)}
    values |= {"optimizer busy": busy(of(("optimizer",))) / steps}
    for scope, phases in SCOPES.items():
        by_class, by_name, calls = Counter(), Counter(), Counter()
        for found in of(phases):
            by_class[classes[found.name]] += (found.end - found.begin) / 1e3 / steps
            by_name[found.name] += (found.end - found.begin) / 1e3 / steps
            calls[found.name] += 1
        total, top = by_name.total(), by_name.most_common(KERNELS)
        values |= {f"{scope} ms {name}": ms for name, ms in sorted(by_class.items())}
        values |= numbered(scope, ((n, classes[n], ms / total, calls[n] / steps) for n, ms in top))
    for part in PARTS:
        found = [a for a in activities if a.part == part]
        gemms = [a for a in found if classes[a.name] == "matmul"]
        for name, those in ((part, found), (f"{part} matmul", gemms)):
            ms = sum(a.end - a.begin for a in those) / 1e3 / steps
            values |= {f"attention ms {name}": ms} if ms > 0 else {}
    return values


STEPS = {"cuda": 5, "cpu": 3}


def profiles(case, draw, c):
    steps = STEPS[draw.device.type]
    return {"c": tandem_side(case, c, steps), "torch_eager": eager_side(case, draw, c, steps)}


def tandem_side(case, c, steps):
    found = {}

    def call():
        with closing(Traced(case, c, case.config["c"], case.warmup, steps)) as traced:
            found["values"] = traced.values()

    # C keeps one matrix of scores a layer.
    rest = case.needs_bytes - 8 * case.layers * case.batch * case.heads * case.context**2
    return Side(call, record=lambda: found, needs_bytes=rest)


def eager_side(case, draw, c, steps):
    made, found = {}, {}

    def open():
        how = (*draw_batch(case, draw), case.dtype == "bf16_mixed", c.on.synchronize)
        made["profiler"] = ref.Profiler(noise_model(case, draw.device), *how)

    def call():
        found["values"] = torch_values(made["profiler"].run(case.warmup, steps), c)

    def holds():
        return list(made["profiler"].model.parameters())

    return Side(call, open=open, close=made.clear, holds=holds, record=lambda: found)


KEYS = ("size", "context")
BOTH = ("c", "torch_eager")
BENCHMARKED = 512  # context of the table of benchmarking_script (b)
STATUSES = ("c status", "torch_eager status")
CLASSES = ("matmul", "attention", "softmax", "reduction", "elementwise", "optimizer", "memory", "other")


def report(page, records):
    profiled = records.only(part="profile", impl=list(BOTH)).ordered(lambda r: extent(r["case"]))
    shown = profiled.where(values_of)
    last = [{}, *by_case(shown, KEYS).values()][-1]
    both = {name: last[impl] for name, impl in zip(("mine", "theirs"), BOTH, strict=True) if impl in last}
    case = case_of(last["c"]) if "c" in last else {}
    report_times(page, profiled, both, case)
    report_top(page, shown.records, both, case)
    report_others(page, both, case)
    report_share(page, profiled, both, case)
    report_softmax(page, profiled, both, case)
    counted = records.only(part="flops", impl="c").records
    same = bool(counted) and all(record["status"] == "ok" for record in counted)
    page.method(gpu=on_gpu(profiled), same=same)


def case_of(record):
    return {name: record["case"][name] for name in ("size", "dtype", "context")}


def values_of(record):
    found = (record or {}).get("values", {})
    return found if "forward timer" in found else {}


def rows_of(profiled, cells):
    """A row a case: what `cells` makes of each side, under "side what"."""

    def of_side(record):
        found = cells(record) if values_of(record) else {"status": record["status"]}
        return {f"{record['impl']} {name}": cell for name, cell in found.items()}

    return tabled(profiled.records, KEYS, of_side)


def percent(share):
    return f"{100 * share:.1f} %"


def report_times(page, profiled, both, case):
    page.section("nsys_profile (a)")

    def times(record):
        return {"clock": record["values"]["forward timer"], "profiler": record["values"]["forward window"]}

    def apart(record):
        return times(record)["profiler"] / times(record)["clock"] - 1

    def cells(record):
        found = {f"{name} (ms)": ms for name, ms in times(record).items()}
        return found | {"difference": f"{100 * apart(record):+.1f} %"}

    batch = next((record["case"]["batch"] for record in both.values()), None)
    page.note(
        f"f32, batch {batch}, the forward pass with its loss. clock: without a profiler, to the end of the device's "
        "work. PyTorch's short passes wait for launches by the host, so their times vary. C's attention writes its "
        "scores as PyTorch's does; in benchmarking_script (b) it is fused."
    )
    order = [f"{impl} {what}" for impl in BOTH for what in ("clock (ms)", "profiler (ms)", "difference")]
    page.table(rows_of(profiled, cells), "forward", [*KEYS, *order, *STATUSES], expected=20)
    theirs = profiled.only(impl="torch_eager").where(values_of).records
    ran = {(r["case"]["size"], r["case"]["context"]) for r in profiled.records}
    gone = set(itertools.product(profiled.values("size"), profiled.values("context"))) - ran
    lost = [(r["impl"], r["case"], r["status"]) for r in profiled.records if not values_of(r)]
    lost = ["{} of {size} at {context}: {}".format(of, status, **case) for of, case, status in lost]
    lost += [f"{size} at {context}: not run" for size, context in sorted(gone)]
    told = case | {name: times(record) for name, record in both.items()}
    told |= {"gpu": on_gpu(profiled), "lost": lost, "earlier": benchmarked(page.others, theirs)}
    told["most"] = max((abs(apart(record)) for record in both.values()), default=None)
    page.say(**told, slowed=max(map(apart, theirs), default=0.0))


def benchmarked(records, profiled):
    """PyTorch's forward pass of the largest of these cases that benchmarking_script (b) timed, by that and by the
    profiler; nothing if it timed none."""
    found = {}
    for record in profiled:
        case = {name: record["case"][name] for name in ("size", "context", "batch", "dtype", "pass")}
        timed = records.only("benchmarking_script", impl=record["impl"], **case).where(clean).records
        timed = [r for r in timed if same_place(r, record)]
        means = [r["phases"]["forward"]["mean"] for r in timed if "forward" in r.get("phases", {})]
        if means and case["context"] == BENCHMARKED:
            window = record["values"]["forward window"]
            found = {"size": case["size"], "context": BENCHMARKED, "mean": means[0], "profiler": window}
            found["apart"] = abs(window / means[0] - 1)
    return found


def class_times(record, scope):
    values = values_of(record)
    return {name: values[f"{scope} ms {name}"] for name in CLASSES if f"{scope} ms {name}" in values}


# What an elementwise kernel of PyTorch computes, by a functor or a function in its template's arguments.
OPERATION = re.compile(
    r"CUDAFunctor_(\w+)|(\w+?)Functor\b|(\w+?)_kernel_(?:cuda|impl)\b|(\w+?)Ops<|(\w+?)_functor\b"
)
WRAPPERS = ("Binary", "Unary", "AUnary", "CUDA")


def short(name):
    """A kernel's name that fits a table: without arguments, templates and what every GEMM's name has."""
    found = OPERATION.finditer(name)
    operations = [of for match in found if (of := next(filter(None, match.groups()))) not in WRAPPERS]
    scaled = " by a number" * ("AUnaryFunctor" in name)
    left_out = r"^void |\(anonymous namespace\)::|at::native::|f32f32_f32f32_f32_|tilesize|_stage\d.*"
    name = re.sub(left_out, "", name)
    inner = re.search(r"Kernel2?<(cutlass\w+)", name)
    name = inner.group(1) if inner else re.split(r"[<(]", name)[0]
    name = name if len(name) <= 44 else f"{name[:43]}…"
    return f"{name} ({operations[0]}{scaled})" if operations else name


def kernel_of(record, scope, i=1):
    """The kernel with the most time of a scope, or the i-th; nothing if there is none."""
    values = values_of(record)
    found = {what: values.get(f"{scope} {i} {what}") for what in WHAT}
    return found | {"kernel": short(found["name"])} if found["name"] else {}


def kernel_cells(record, scope):
    found = kernel_of(record, scope)
    cells = {"kernel": found["kernel"], "class": found["class"], "share": percent(found["share"])}
    return cells | {"calls a pass": round(found["calls"])}


def report_top(page, shown, both, case):
    page.section("nsys_profile (b)")
    rows = []
    for record, scope in itertools.product(shown, SCOPES):
        if kernel_of(record, scope):
            head = case_of(record) | {"side": record["impl"], "pass": scope}
            rows.append(head | kernel_cells(record, scope))
    contexts, kernels = [row["context"] for row in rows], {}
    longest = max(contexts, key=lambda context: (contexts.count(context), context), default=None)
    top = [row for row in rows if row["context"] == longest and row["pass"] != "step"]
    for row in top:
        kernels.setdefault(row["size"], set()).add((row["side"], row["kernel"]))
    page.note(f"f32, context {longest}: the kernel with the most time.")
    columns = ["size", "side", "pass", "kernel", "class", "share", "calls a pass"]
    page.table(top, "top_kernel", columns, expected=20)
    page.table(rows, "top_kernel_of_all", more=True)
    told = {}
    for name, record in both.items():
        first, with_backward = (kernel_of(record, scope) for scope in ("forward", "forward and backward"))
        if first and with_backward:
            told[name] = first | {"both": with_backward["kernel"], "part": with_backward["share"]}
    stays = [size for size, found in kernels.items() if len(found) == len({side for side, _ in found})]
    page.say(**told, stays=stays, **case)


def report_others(page, both, case):
    page.section("nsys_profile (c)")
    rows, told, few = [], {}, False
    for name, record in both.items():
        times = class_times(record, "forward")
        total, others = sum(times.values()), {k: ms for k, ms in times.items() if k != "matmul"}
        recorded = [k for k in (kernel_of(record, "forward", i) for i in range(1, KERNELS + 1)) if k]
        few = few or len(recorded) == FEW_KERNELS
        named = [k for k in recorded if k["class"] != "matmul" and k["share"] >= NAMED]
        for kind, ms in others.items():
            if total and ms >= 0.001 * total:
                row = {"side": record["impl"], "class": kind, "ms": ms, "share": percent(ms / total)}
                kernels = [f"{k['kernel']} {percent(k['share'])}" for k in named if k["class"] == kind]
                rows.append(row | {"kernels": ", ".join(kernels)})
        if others and total:
            told[name] = {"all": sum(others.values()) / total}
            told[name]["rest"] = told[name]["all"] - sum(k["share"] for k in named)
            told[name]["named"] = [f"`{k['kernel']}` {percent(k['share'])}" for k in named[:3]]
    if case:
        page.note("{size}, context {context}, f32, the forward pass:".format(**case))
    page.table(rows, "others", ["side", "class", "ms", "share", "kernels"])
    page.say(**told, **case, few=few or None)


def shares(record):
    """The share of matrix products in forward and in the step."""
    found = []
    for scope in ("forward", "step"):
        total = sum(ms for name, ms in record["values"].items() if name.startswith(f"{scope} ms "))
        found.append(record["values"].get(f"{scope} ms matmul", 0) / total if total else 0)
    return found


def report_share(page, profiled, both, case):
    page.section("nsys_profile (d)")
    names = ("in forward", "in a step", "optimizer (ms)")

    def cells(record):
        forward, step = map(percent, shares(record))
        return dict(zip(names, (forward, step, record["values"]["optimizer busy"]), strict=True))

    page.note("f32: time of matrix products over the time of all kernels.")
    order = [f"{impl} {name}" for impl in BOTH for name in names]
    page.table(rows_of(profiled, cells), "share", [*KEYS, *order, *STATUSES], expected=20)
    told = {}
    for name, record in both.items():
        forward, step = shares(record)
        told[name] = {"forward": forward, "step": step, "optimizer": record["values"]["optimizer busy"]}
        of_size = profiled.only(size=record["case"]["size"])
        told["least"] = min(of_size.values("context"))
        least = of_size.where(values_of).first(impl=record["impl"], context=told["least"])
        told[name]["short"] = least and shares(least)
    page.say(**told, **case)


QK = "attention ms scores matmul"  # of PyTorch, whose scores are several kernels


def softmax_ratio(record):
    """Softmax over both products, in time and in FLOPs; None if attention is one kernel."""
    values = values_of(record)
    names = (f"attention ms {part}" for part in PARTS[:3])
    parts = [values.get(f"{name} matmul") or values.get(name) for name in names]
    if None in parts:
        return None
    case = record["case"]
    rows = case["batch"] * case["heads"] * case["context"] * case["layers"]
    products = 4 * rows * case["context"] * case["d_model"] / case["heads"]
    return parts[1] / (parts[0] + parts[2]), rows * (5 * case["context"] - 2) / products


def report_softmax(page, profiled, both, case):
    page.section("nsys_profile (e)")
    alone = any(QK in values_of(record) for record in profiled.records)

    def cells(record):
        found = {f"{part} (ms)": record["values"].get(f"attention ms {part}") for part in PARTS[:3]}
        found["QK^T (ms)"] = record["values"].get(QK)
        ratio = softmax_ratio(record)
        return found | ({"softmax / products": ratio[0]} if ratio else {})

    rows, panels = rows_of(profiled, cells), {}
    for record in profiled.where(softmax_ratio).records:
        panel = panels.setdefault(record["case"]["size"], {})
        for name, value in zip((record["impl"], "FLOPs"), softmax_ratio(record), strict=True):
            panel.setdefault(name, {})[record["case"]["context"]] = value
    for row in rows:
        of_size = panels.get(row["size"], {}).get("FLOPs", {})
        row["FLOPs, softmax / products"] = of_size.get(row["context"])
    which = ", which the ratio counts" if alone else ", which was not recorded"
    page.note(
        "f32, one forward pass. scores: QK^T, in PyTorch with scaling and mask, which are kernels of their own. QK^T: "
        f"its GEMM alone{which}. values: PV."
    )
    names = ("QK^T (ms)", *(f"{part} (ms)" for part in PARTS[:3]), "softmax / products")
    order = [f"{impl} {name}" for impl in BOTH for name in names]
    page.table(rows, "attention", [*KEYS, *order, "FLOPs, softmax / products", *STATUSES], expected=20)
    drawn = {
        size: {name: tuple(zip(*sorted(points.items()), strict=True)) for name, points in panel.items()}
        for size, panel in panels.items()
        if any(len(points) > 1 for points in panel.values())
    }
    ends = {size: drawn[size] for size in [*drawn][:1] + [*drawn][-1:]}
    axes = {"x": "context", "y": "ratio of times: softmax / (QK^T and PV)"}
    title = "Softmax over both products of attention: time of C and PyTorch, and FLOPs"
    page.plot("softmax", ends, **axes, title=title)
    ratios = {name: softmax_ratio(record) for name, record in both.items() if softmax_ratio(record)}
    flops = next((ratio[1] for ratio in ratios.values()), None)
    told = {name: ratio[0] for name, ratio in ratios.items()}
    page.say(**told, flops=flops, mixed=not alone or None, **case)
