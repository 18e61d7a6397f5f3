"""What runs in a training step, kernel by kernel, in C by its own trace and in PyTorch by its own profiler: the
handout's nsys_profile. On a CPU the same by operations."""

import re
from collections import defaultdict, namedtuple
from statistics import mean, median

import pandas as pd
import torch

from parity.core import DTYPES, Case, Side, equal, grid
from parity.shared.model import (
    c_switches,
    extents,
    initial_state,
    quick_start,
    sizes_of,
    torch_model,
    torch_switches,
)
from parity.shared.pages import by_case, extent, on_gpu, ran_with
from ref import trace as ref
from ref.transformer import SIZES

DELIVERABLES = {"nsys_profile": "What runs in a step: kernels, their classes, and attention's parts"}

BATCH = 4
CONTEXTS = [128, 256, 512, 1024]
RATES = {"cpu": 5e10, "f32": 5e13, "bf16_mixed": 2e14}  # FLOP/s to expect
APART_MS = 0.02  # a gap that no picture shows
KERNELS = 5  # of a record, for each of SCOPES
PHASES = ("forward", "loss", "backward", "optimizer", "elsewhere")
PASSES = {
    "forward": ("forward", "loss"),
    "backward": ("backward",),
    "optimizer": ("optimizer",),
    "step": PHASES,
}
SCOPES = {
    "forward": ("forward",),
    "forward and backward": ("forward", "loss", "backward"),
    "step": PHASES,
}
PARTS = ("scores", "softmax", "values", "fused")
# Operations of PyTorch on a CPU, whose names are no kernels'.
OPERATIONS = {
    "matmul": ("mm", "bmm", "addmm"),
    "softmax": ("softmax",),
    "reduction": ("sum", "mean", "amax", "max", "norm"),
    "memory": ("copy_", "fill_", "zero_", "empty", "empty_strided"),
    "elementwise": ("mul", "add", "sub", "div", "exp", "neg", "rsqrt", "sqrt", "sigmoid", "pow", "where"),
}


def cases(profile, device):
    for keys in grid(dtype=["f32", "bf16_mixed"], context=[16, 48]):
        shape = dict(d_model=64, d_ff=96, layers=3, heads=4, vocab=64, batch=2)
        yield Case("nsys_profile", part="flops", size="tiny", seconds=0.3, **shape, **keys)
    if device == "cuda":
        sizes = list(SIZES)[:5] if profile == "full" else ["small"]
        for keys in grid(size=sizes, context=CONTEXTS if profile == "full" else [512]):
            yield profile_case(device, dtype="f32", **keys)
        for size in sizes:
            yield profile_case(device, dtype="bf16_mixed", size=size, context=512)
        return
    contexts = [64, 128, 256] if profile == "full" else [64]
    for context in contexts:
        size = "laptop" if profile == "quick" else "small"
        yield profile_case(device, size=size, context=context, dtype="f32", batch=1)


def profile_case(device, size, context, dtype, batch=BATCH):
    shape, numel = extents(size)
    step = batch * context * 6 * numel / RATES[dtype if device == "cuda" else device]
    # PyTorch keeps three matrices of scores a layer for backward, and makes more.
    scores = 16 * shape["layers"] * batch * shape["heads"] * context**2
    phases = {"timed": "phases"}
    config = {
        "c": {"attention": "naive"} | c_switches(keep="all", gradients="transient") | phases,
        "torch_eager": torch_switches(dtype) | {"attention": "scores", "optimizer": "loop"} | phases,
    }
    if device == "cuda" and dtype == "bf16_mixed":
        # First: launches of graphs are told apart in the first session of a process alone (CUDA 13.0).
        flash = {"attention": "flash"} | c_switches(graph=True, keep="all", gradients="transient")
        config = {"c_graph": flash | phases} | config
    return Case(
        "nsys_profile",
        measure="memory",
        seconds=(10 if device == "cuda" else 2) + numel / 1e9 + len(config) * 8 * step,
        in_turn=True,
        alone=True,
        config=config,
        needs_bytes=numel * 18 + scores,
        part="profile",
        size=size,
        **shape,
        batch=batch,
        context=context,
        dtype=dtype,
        warmup=2 if device == "cuda" else 1,
        **{"pass": "step"},
    )


def runs(case):
    return ["bench"]


def run(case, draw, c):
    return flops(case, draw, c) if case.part == "flops" else profiles(case, draw, c)


# ---- FLOPs: what a trace counts is what PyTorch counts ----


def flops(case, draw, c):
    tokens = draw.integers("tokens", (case.batch, case.context), high=case.vocab)

    def tandem():
        traced = Traced(
            case, c, {"attention": "naive", "graph": False, "keep": "all", "gradients": "held"}, 0, 1
        )
        try:
            forward, step = traced.total(("forward",)), traced.total(PHASES)
            attention = c.value("td_trace_attention_of", traced.trace)
            return {
                "forward": forward.flops[traced.matmul],
                "step": step.flops[traced.matmul],
                "scores": attention.flops[1],
                "values": attention.flops[3],
            }
        finally:
            traced.close()

    def eager():
        state = initial_state(case, draw.normal)
        model = torch_model(case, state, dtype=torch.float32)
        return {name: float(count) for name, count in ref.flops(model, tokens, tokens).items()}

    return {"c": tandem, "torch_eager": eager, "rule": {"*": equal()}}


# ---- C's trace ----

timer = namedtuple("timer", "median mean")


def timers(name, plain, events, traced):
    """What timers say of a pass: the host's, the device's events without a trace and beside it, as medians; and of the
    last the mean that a trace's means are to be held against."""
    return {
        f"{name} timer": plain.median,
        f"{name} events": events.median,
        f"{name} traced": traced.median,
        f"{name} traced mean": traced.mean,
    }


class Traced:
    """Steps of libtandem: each phase until the device is done, then by events without a trace and with one."""

    def __init__(self, case, c, switches, warmup, steps):
        self.c, self.steps = c, steps
        model = {
            "size": {},
            "attention": switches["attention"],
            "keep": switches["keep"],
            "transient_gradients": switches["gradients"] == "transient",
        }
        config = c.struct(
            "td_bench_config",
            case,
            model=model,
            mode="train",
            warmup=warmup,
            steps=steps,
            graph=switches["graph"],
        )
        self.classes = [c.ffi.string(c.td_op_class_name(i)).decode() for i in range(9)]
        self.matmul = self.classes.index("matmul")
        self.plain = self.bench(config)
        config.timed = c.TD_TIMED_EVENTS
        self.events = self.bench(config)
        self.trace = c.value("td_trace_begin", c.device)
        self.traced = self.bench(config)
        c.td_trace_end(self.trace)
        self.info = c.value("td_trace_info_of", self.trace)

    def bench(self, config):
        """The times of each pass, as td_stats."""
        with quick_start(self.c):
            result = self.c.value("td_bench_run", self.c.device, config, None, None)
        summary = self.c.value("td_bench_summary_of", result)
        found = {
            name: timer(getattr(summary, name).ms.median, getattr(summary, name).ms.mean) for name in PASSES
        }
        self.c.td_bench_result_destroy(result)
        return found

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

    def series(self):
        """Begin and end, in ms, of the last step's kernels by class; neighbours of a class that touch are one."""
        rows, count = self.c.ffi.new("td_trace_activity **"), self.c.ffi.new("int64_t *")
        self.c.td_trace_activities(self.trace, rows, count)
        found, first = {}, None
        for i in range(count[0]):
            row = rows[0][i]
            if row.step != self.info.steps - 1:
                continue
            first = row.begin_ns if first is None else first
            name = self.classes[row.op_class]
            begins, ends = (found.setdefault(f"{name} {what}", []) for what in ("begin", "end"))
            begin, end = ((ns - first) / 1e6 for ns in (row.begin_ns, row.end_ns))
            if ends and begin - ends[-1] < APART_MS:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
        return {name: [round(ms, 4) for ms in times] for name, times in found.items()}

    def values(self):
        info = self.info
        without = self.c.ffi.string(info.cupti).decode()
        values = {"without kernels": without} if without else {}
        values |= {"cupti": info.cupti_version, "dropped": info.dropped, "without times": info.without_times}
        values |= {"unattributed": info.unattributed}
        for name, phases in PASSES.items():
            total = self.total(phases)
            values |= timers(name, self.plain[name], self.events[name], self.traced[name])
            values |= {f"{name} window": total.window_ms, f"{name} busy": total.busy_ms}
            values |= {f"{name} sum": total.sum_ms, f"{name} activities": total.activities}
        for scope, phases in SCOPES.items():
            total = self.total(phases)
            values |= {f"{scope} products": total.operations[self.matmul]}
            values |= {f"{scope} ms {name}": total.by_class_ms[i] for i, name in enumerate(self.classes)}
            values |= numbered(scope, self.kernels(phases))
        attention = self.c.value("td_trace_attention_of", self.trace)
        for i, part in enumerate(PARTS, 1):
            if attention.ms[i] > 0:
                values |= {f"attention ms {part}": attention.ms[i]}
                values |= {f"attention flops {part}": attention.flops[i]}
        return values


def numbered(scope, kernels):
    found = {}
    for i, (name, op_class, share, calls) in enumerate(kernels, 1):
        found |= {f"{scope} {i} name": name, f"{scope} {i} class": op_class}
        found |= {f"{scope} {i} share": share, f"{scope} {i} calls": calls}
    return found


# ---- PyTorch's profile ----


def class_of(c, name):
    """By the same list for both sides; operations of a CPU, which are no kernels, by their own."""
    if name.startswith("aten::"):
        short = name.removeprefix("aten::").removeprefix("_")
        return next(
            (found for found, words in OPERATIONS.items() if short.rstrip("_") in words or short in words),
            "other",
        )
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
    steps, values = profiled.steps, {}
    classes = {name: class_of(c, name) for name in {found.name for found in profiled.activities}}

    def steps_of(times, phases):
        return [sum(parts) for parts in zip(*(times[p] for p in phases if p in times), strict=True)]

    for name, phases in PASSES.items():
        mine = [found for found in profiled.activities if found.phase in phases]
        clocks = [steps_of(times, phases) for times in (profiled.timer, profiled.events, profiled.traced)]
        values |= timers(name, *(timer(median(times), mean(times)) for times in clocks))
        values |= {f"{name} window": window(mine, steps), f"{name} busy": busy(mine) / steps}
        values |= {f"{name} sum": sum(a.end - a.begin for a in mine) / 1e3 / steps}
        values |= {f"{name} activities": len(mine) / steps}
    for scope, phases in SCOPES.items():
        by_class, by_name, calls = defaultdict(float), defaultdict(float), defaultdict(int)
        for found in profiled.activities:
            if found.phase in phases:
                by_class[classes[found.name]] += (found.end - found.begin) / 1e3 / steps
                by_name[found.name] += (found.end - found.begin) / 1e3 / steps
                calls[found.name] += 1
        total = sum(by_name.values())
        products = sum(
            count for name, count in calls.items() if classes[name] == "matmul" and "splitK" not in name
        )
        values |= {f"{scope} products": products / steps}
        values |= {f"{scope} ms {name}": ms for name, ms in sorted(by_class.items())}
        top = sorted(by_name, key=by_name.get, reverse=True)[:KERNELS]
        values |= numbered(scope, ((n, classes[n], by_name[n] / total, calls[n] / steps) for n in top))
    for part in PARTS:
        ms = sum(a.end - a.begin for a in profiled.activities if a.part == part) / 1e3 / steps
        values |= {f"attention ms {part}": ms} if ms > 0 else {}
    return values


# ---- sides ----

STEPS = {"cuda": 5, "cpu": 3}


def profiles(case, draw, c):
    steps = STEPS[draw.device.type]
    return {
        impl: eager_side(case, draw, c, steps)
        if impl.startswith("torch")
        else tandem_side(case, c, impl, steps)
        for impl in case.config
    }


def tandem_side(case, c, impl, steps):
    session, found = c.side(impl), {}

    def call():
        traced = Traced(case, session, case.config[impl], case.warmup, steps)
        try:
            found["values"], found["series"] = traced.values(), traced.series()
        finally:
            traced.close()
        return {}

    # C keeps one matrix of scores a layer.
    rest = case.needs_bytes - 8 * case.layers * case.batch * case.heads * case.context**2
    return Side(call, record=lambda: found, needs_bytes=rest)


def eager_side(case, draw, c, steps):
    made, found = {}, {}

    def open():
        tokens = draw.integers("tokens", (case.batch, case.context + 1), high=case.vocab)
        ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        dtype = DTYPES[case.dtype]
        with torch.device("meta"):
            model = ref.Transformer(*sizes_of(case))
        model = model.to(dtype).to_empty(device=draw.device)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0.0, 0.02)
        autocast = case.dtype == "bf16_mixed"
        made["profiler"] = ref.Profiler(model, ids, targets, autocast, c.on.synchronize)

    def call():
        found["values"] = torch_values(made["profiler"].run(case.warmup, steps), c)
        return {}

    def holds():
        return list(made["profiler"].model.parameters())

    return Side(call, open=open, close=made.clear, holds=holds, record=lambda: found)


# ---- the page ----

KEYS = ("size", "context")
BOTH = ("c", "torch_eager")
CLASSES = ("matmul", "attention", "softmax", "reduction", "elementwise", "optimizer", "memory", "other")


def report(page, records):
    profiled = records.only(part="profile")
    found = [r for r in profiled.records if "step busy" in r.get("values", {})]
    ended = type(records)(in_order(r for r in profiled.records if r["impl"] in BOTH))
    asked = {dtype: by_case(ended.only(dtype=dtype), KEYS) for dtype in ("f32", "bf16_mixed")}
    shown = [r for r in in_order(found) if r["case"]["dtype"] == "f32" and r["impl"] in BOTH]
    last = list(by_case(type(records)(shown), KEYS).values())[-1] if shown else {}
    mine, theirs = last.get("c"), last.get("torch_eager")
    report_times(page, asked["f32"], mine, theirs)
    report_top(page, shown, mine, theirs)
    report_others(page, shown, mine, theirs)
    report_share(page, asked["f32"], mine, theirs)
    report_softmax(page, asked["f32"], mine, theirs)
    rows = [case_of(r) | {"side": r["impl"]} | class_times(r, "step") for r in in_order(found)]
    page.table(pd.DataFrame(rows), "classes", more=True)
    wrong = [r for r in records.only(part="flops", impl="c").records if r["status"] != "ok"]
    counted = len(records.only(part="flops")) and not wrong
    tool = (
        "C's kernels are records of CUPTI, also inside captured graphs"
        if on_gpu(profiled)
        else "C's operations are timed by the host's clock"
    )
    page.method(
        f"Steps run without a trace and with it. {tool}; PyTorch's are its profiler's. A kernel belongs to "
        f"the operation "
        "that launched it in C, and is classified by its name in PyTorch. The clock waits for the device "
        "after each phase; "
        "a traced window goes from a phase's first kernel to its last. "
        + ("The FLOPs of attention and of a step are those that PyTorch counts. " if counted else "")
        + ran_with(profiled)
    )


def in_order(records):
    return sorted(records, key=lambda r: (r["case"]["dtype"], *extent(r["case"])))


def case_of(record):
    return {name: record["case"][name] for name in ("size", "dtype", "context")}


def values_of(record):
    found = (record or {}).get("values", {})
    return found if "step busy" in found else {}


def rows_of(sides_of, cells):
    """A row a case: what `cells` makes of each side's values, under "side what"."""
    rows = []
    for key, sides in sides_of.items():
        row = dict(zip(KEYS, key, strict=True))
        for impl in BOTH:
            values = values_of(sides.get(impl))
            if values:
                row |= {f"{impl} {name}": cell for name, cell in cells(sides[impl], values).items()}
            elif impl in sides:
                row[f"{impl} status"] = sides[impl]["status"]
        rows.append(row)
    frame = pd.DataFrame(rows)
    firsts = [name for name in frame if not name.endswith(" status")]
    return frame[[*firsts, *(name for name in frame if name.endswith(" status"))]]


def report_times(page, cases, mine, theirs):
    page.section("nsys_profile (a)")

    def cells(_, values):
        clock = values["forward timer"]
        apart = 100 * (values["forward window"] / clock - 1)
        return {
            "clock (ms)": clock,
            "profiler (ms)": values["forward window"],
            "difference": f"{apart:+.1f} %",
        }

    page.note(
        "f32, batch 4, the forward pass with its loss. clock: without a profiler, to the end of the device's work."
    )
    page.table(rows_of(cases, cells), "forward", expected=20)
    sides = {"mine": values_of(mine), "theirs": values_of(theirs)}
    of_torch = [values_of(case.get("torch_eager")) for case in cases.values()]
    page.say(
        **(case_of(mine) if mine else {}),
        **{
            name: {"clock": v["forward timer"], "profiler": v["forward window"]}
            for name, v in sides.items()
            if v
        },
        most=max(
            (abs(v["forward window"] / v["forward timer"] - 1) for v in sides.values() if v), default=None
        ),
        slowed=max((v["forward window"] / v["forward timer"] - 1 for v in of_torch if v), default=0.0),
    )
    lanes = series_of(mine)
    if lanes:
        title = (
            f"Kernels of one training step, {mine['case']['size']}, context {mine['case']['context']}, f32"
        )
        page.timeline("timeline", {"C": lanes}, x="ms since the step began", title=title)
    else:
        page.lacks("a timeline of single kernels: records have sums by phase and class only")
    parts = {}
    for name, record in (("C", mine), ("PyTorch", theirs)):
        if record:
            for phase, times in by_phase(record).items():
                parts[f"{name}, {phase}"] = {k: ms for k, ms in times.items() if ms > 0}
    if parts:
        case = (mine or theirs)["case"]
        where = f"{case['size']}, context {case['context']}, f32"
        page.bars("phases", parts, y="ms of kernels", title=f"Time of kernels by phase and class, {where}")


def by_phase(record):
    """{phase: {class: ms}} from the sums of nested scopes."""
    scopes = [class_times(record, scope) for scope in SCOPES]
    names = ("forward", "backward", "optimizer")
    found, before = {}, {}
    for name, times in zip(names, scopes, strict=True):
        found[name] = {k: ms - before.get(k, 0.0) for k, ms in times.items()}
        before = times
    return found


def class_times(record, scope):
    values = values_of(record)
    return {name: values[f"{scope} ms {name}"] for name in CLASSES if f"{scope} ms {name}" in values}


def series_of(record):
    """{class: {fill: intervals}} of a step's kernels, where they were recorded."""
    series = (record or {}).get("series", {})
    return {
        name: {name: list(zip(series[f"{name} begin"], series[f"{name} end"], strict=True))}
        for name in CLASSES
        if series.get(f"{name} begin")
    }


def short(name):
    """A kernel's name that fits a table: without arguments, templates and what every GEMM's name has."""
    functors = [found for found in re.findall(r"(\w+?)Functor", name) if found not in ("Binary", "Unary")]
    name = re.sub(
        r"^void |\(anonymous namespace\)::|at::native::|f32f32_f32f32_f32_|tilesize|_stage\d.*", "", name
    )
    inner = re.search(r"Kernel2?<(cutlass\w+)", name)
    name = inner.group(1) if inner else re.split(r"[<(]", name)[0]
    name = name if len(name) <= 44 else f"{name[:43]}…"
    return f"{name} ({functors[0]})" if functors else name


def report_top(page, shown, mine, theirs):
    page.section("nsys_profile (b)")
    rows = []
    for record in shown:
        values = values_of(record)
        for scope in SCOPES:
            if f"{scope} 1 name" in values:
                rows.append(
                    case_of(record)
                    | {"side": record["impl"], "pass": scope, "kernel": short(values[f"{scope} 1 name"])}
                    | {
                        "class": values[f"{scope} 1 class"],
                        "share": f"{100 * values[f'{scope} 1 share']:.1f} %",
                    }
                    | {"calls a pass": round(values[f"{scope} 1 calls"])}
                )
    frame, stays = pd.DataFrame(rows), []
    if len(frame):
        longest = frame["context"].max()
        page.note(f"f32, context {longest}: the kernel with the most time.")
        top = frame[(frame["context"] == longest) & (frame["pass"] != "step")]
        page.table(top, "top_kernel")
        kernels = (
            top.groupby(["size", "side"], sort=False)["kernel"].nunique().groupby("size", sort=False).max()
        )
        stays = list(kernels[kernels == 1].index)
    page.table(frame, "top_kernel_of_all", more=True)
    five = []
    for record in (mine, theirs):
        values = values_of(record)
        for i in range(1, KERNELS + 1):
            if f"forward {i} name" in values:
                five.append(
                    {"side": record["impl"], "kernel": short(values[f"forward {i} name"])}
                    | {
                        "class": values[f"forward {i} class"],
                        "share": f"{100 * values[f'forward {i} share']:.1f} %",
                    }
                    | {"calls a pass": round(values[f"forward {i} calls"])}
                )
    page.note("The five kernels with the most time in the forward pass of the largest case:")
    page.table(pd.DataFrame(five), "five_kernels")
    told = {}
    for name, values in (("mine", values_of(mine)), ("theirs", values_of(theirs))):
        if "forward 1 name" in values and "forward and backward 1 name" in values:
            first, both = (short(values[f"{scope} 1 name"]) for scope in ("forward", "forward and backward"))
            told[name] = {
                "kernel": first,
                "calls": values["forward 1 calls"],
                "share": values["forward 1 share"],
            }
            told[name] |= {"both": both, "class": values["forward 1 class"]}
            told[name]["part"] = values["forward and backward 1 share"]
    page.say(**told, stays=stays, **(case_of(mine) if mine else {}))


def report_others(page, shown, mine, theirs):
    page.section("nsys_profile (c)")
    rows = []
    for record in shown:
        times = class_times(record, "forward")
        total = sum(times.values())
        for name, ms in times.items():
            if name != "matmul" and total and ms >= 0.001 * total:
                numbers = range(1, KERNELS + 1)
                values = values_of(record)
                largest = next((i for i in numbers if values.get(f"forward {i} class") == name), None)
                kernel = short(values[f"forward {largest} name"]) if largest else ""
                rows.append(
                    case_of(record)
                    | {"side": record["impl"], "class": name, "ms": ms, "share": f"{100 * ms / total:.1f} %"}
                    | {"largest kernel among the first five": kernel}
                )
    frame = pd.DataFrame(rows)
    if len(frame) and mine:
        case = case_of(mine)
        same = (frame["size"] == case["size"]) & (frame["context"] == case["context"])
        page.note(f"{case['size']}, context {case['context']}, f32, the forward pass:")
        page.table(frame[same], "others")
    page.table(frame, "others_of_all", more=True)
    told = {}
    for name, record in (("mine", mine), ("theirs", theirs)):
        times = class_times(record, "forward") if record else {}
        total, others = sum(times.values()), {k: ms for k, ms in times.items() if k != "matmul"}
        if others and total:
            most = max(others, key=others.get)
            told[name] = {"class": most, "ms": others[most], "share": others[most] / total}
            told[name]["all"] = sum(others.values()) / total
    page.say(**told)


def shares(record):
    """The share of matrix products in forward and in the step."""
    found = []
    for scope in ("forward", "step"):
        total = sum(ms for name, ms in record["values"].items() if name.startswith(f"{scope} ms "))
        found.append(record["values"].get(f"{scope} ms matmul", 0) / total if total else 0)
    return found


def report_share(page, cases, mine, theirs):
    page.section("nsys_profile (d)")

    def cells(record, values):
        forward, step = shares(record)
        words = {"in forward": f"{100 * forward:.1f} %", "in a step": f"{100 * step:.1f} %"}
        return words | {"optimizer (ms)": values["optimizer busy"]}

    page.note("f32: time of matrix products over the time of all kernels.")
    page.table(rows_of(cases, cells), "share", expected=20)
    told = {}
    for name, record in (("mine", mine), ("theirs", theirs)):
        if record:
            forward, step = shares(record)
            told[name] = {"forward": forward, "step": step, "optimizer": record["values"]["optimizer busy"]}
            key = min(key for key in cases if key[0] == record["case"]["size"])
            least, told["least"] = cases[key].get(record["impl"]), key[1]
            told[name]["short"] = shares(least) if values_of(least) else None
    page.say(**told, **(case_of(mine) if mine else {}))


def softmax_ratio(record):
    """Softmax over both products, in time and in FLOPs; None where attention is one kernel."""
    values = record["values"]
    parts = [values.get(f"attention ms {part}") for part in ("scores", "softmax", "values")]
    if None in parts:
        return None
    case = record["case"]
    rows = case["batch"] * case["heads"] * case["context"] * case["layers"]
    products = 4 * rows * case["context"] * case["d_model"] / case["heads"]
    return parts[1] / (parts[0] + parts[2]), rows * (5 * case["context"] - 2) / products


def report_softmax(page, cases, mine, theirs):
    page.section("nsys_profile (e)")

    def cells(record, values):
        found = {
            f"{part} (ms)": values.get(f"attention ms {part}") for part in ("scores", "softmax", "values")
        }
        ratio = softmax_ratio(record)
        return found | ({"softmax / products": ratio[0]} if ratio else {})

    frame = rows_of(cases, cells)
    flops = []
    for sides in cases.values():
        found = [softmax_ratio(r) for r in sides.values() if values_of(r) and softmax_ratio(r)]
        flops.append(found[0][1] if found else None)
    if len(frame):
        frame["FLOPs, softmax / products"] = flops
    page.note("f32, one forward pass. products: QK^T (scores) and PV (values).")
    page.table(frame, "attention", expected=20)
    panels = {}
    for (size, context), sides in cases.items():
        for impl in BOTH:
            ratio = softmax_ratio(sides[impl]) if values_of(sides.get(impl)) else None
            if ratio:
                panel = panels.setdefault(size, {})
                for name, value in ((impl, ratio[0]), ("FLOPs", ratio[1])):
                    panel.setdefault(name, {})[context] = value
    drawn = {
        size: {name: tuple(zip(*sorted(points.items()), strict=True)) for name, points in panel.items()}
        for size, panel in panels.items()
        if any(len(points) > 1 for points in panel.values())
    }
    chosen = [size for size in drawn if size in (next(iter(drawn)), list(drawn)[-1])]
    page.plot(
        "softmax",
        {size: drawn[size] for size in chosen},
        x="context",
        y="softmax / (QK^T and PV)",
        title="Softmax over both products of attention: time of C and PyTorch, and FLOPs",
    )
    told = {}
    for name, record in (("mine", mine), ("theirs", theirs)):
        ratio = softmax_ratio(record) if record else None
        if ratio:
            told |= {name: ratio[0], "flops": ratio[1]}
    page.say(**told, **(case_of(mine) if mine else {}))
