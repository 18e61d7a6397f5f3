"""What runs in a training step, kernel by kernel, in C by its own trace and in PyTorch by its own profiler: the
handout's nsys_profile. On a CPU the same by operations."""

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
from parity.shared.pages import on_gpu, ran_with
from ref import trace as ref
from ref.transformer import SIZES

DELIVERABLES = {"nsys_profile": "What runs in a step: kernels, their classes, and attention's parts"}

BATCH = 4
CONTEXTS = [128, 256, 512, 1024]
RATES = {"cpu": 5e10, "f32": 5e13, "bf16_mixed": 2e14}  # FLOP/s to expect
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
TIMED = ("forward", "backward", "optimizer")  # phases that a timer has
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
    if device == "cuda":
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
        needs_bytes=numel * 20 + scores,
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
            found["values"] = traced.values()
        finally:
            traced.close()
        return {}

    return Side(call, record=lambda: found)


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

FORWARD = "(a) How long is the forward pass, and does the timer agree?"
TOP = "(b) Which kernel takes the most time?"
OTHERS = "(c) What else takes time in the forward pass?"
SHARE = "(d) How much of the time is matrix products, in forward and in a whole step?"
SOFTMAX = "(e) How does softmax compare with the products inside attention?"


def report(page, records):
    measured = records.only(part="profile")
    rows = [record for record in measured.records if "step busy" in record.get("values", {})]
    said = []
    for question, say, tables, shown_of in (
        (FORWARD, say_times, report_times, measured),
        (TOP, say_top, report_top, rows),
        (OTHERS, say_others, report_others, rows),
        (SHARE, say_share, report_share, rows),
        (SOFTMAX, say_softmax, report_softmax, rows),
    ):
        page.question(question)
        said.append(say(rows))
        if said[-1]:
            page.text(said[-1])
        tables(page, shown_of)
    answer = " ".join(words for words in (said[0], said[3], said[4]) if words)
    page.answer("nsys_profile", answer, figure(rows), FORWARD)
    method(page, records, measured)


def of(record):
    return record["case"] | {"side": record["impl"]}


KEYS = ("size", "dtype", "context", "side")


def keyed(record):
    case = of(record)
    return {name: case[name] for name in KEYS}


def ordered(rows):
    order = {size: i for i, size in enumerate(SIZES)}
    return sorted(
        rows, key=lambda row: (row["dtype"], order.get(row["size"], 9), row["context"], row["side"])
    )


def shown(records, impl="c"):
    """The record that the sentences are about: the largest model and context of a side."""
    mine = [record for record in records if record["impl"] == impl and record["case"]["dtype"] == "f32"]
    order = {size: i for i, size in enumerate(SIZES)}
    return max(
        mine,
        key=lambda r: (order.get(r["case"]["size"], 9) < 5, r["case"]["context"], r["case"]["d_model"]),
        default=None,
    )


def beside(records, record, impl):
    """The same case of another side."""
    return next((r for r in records if r["impl"] == impl and r["case"] == record["case"]), None)


def where(record):
    return f"{record['case']['size']} at context {record['case']['context']} in {record['case']['dtype']}"


def what(record):
    return "kernel" if record.get("device") == "cuda" else "operation"


def report_times(page, measured):
    rows = []
    for record in measured.records:
        row, values = keyed(record), record.get("values", {})
        if "step busy" not in values:
            rows.append(row | {"timer (ms)": record["status"]})
            continue
        row |= {"timer (ms)": values["forward timer"]}
        if "step events" in values:
            row |= {"events (ms)": values["forward events"], "traced events (ms)": values["forward traced"]}
        row |= {"window (ms)": values["forward window"], "busy (ms)": values["forward busy"]}
        row |= {
            "sum (ms)": values["forward sum"],
            "idle (ms)": values["forward window"] - values["forward busy"],
        }
        if "step events" in values:
            row |= {"cost of the trace": f"{100 * cost(values):.1f} %"}
        rows.append(row)
    page.table(pd.DataFrame(ordered(rows)), "forward")
    page.table(agreement(measured), "agreement")
    if said := costs(measured):
        page.text(said)
    page.text(
        "Agreement counts forward, backward and optimizer of every step: a trace's window, from the begin of the first "
        "to the end of the last that was launched in it, beside the time between events on the device ahead of the "
        "phase and behind it, in the same steps. The timer waits for the device behind every phase and so has the way "
        "through the host in it as well. The forward of all has the loss in it."
    )


def agreement(measured):
    """A row a side: how many phases' windows agree with the events beside the trace, and with the timer without."""
    rows = []
    for impl in measured.impls():
        found = [
            r["values"] for r in measured.only(impl=impl).records if "step events" in r.get("values", {})
        ]
        row = {"side": impl, "phases": sum(f"{name} window" in v for v in found for name in TIMED)}
        for timer, words in (("traced mean", "events"), ("timer", "timer without a trace")):
            apart = [
                (v[f"{name} window"] - v[f"{name} {timer}"], v[f"{name} {timer}"])
                for v in found
                for name in TIMED
                if v.get(f"{name} {timer}")
            ]
            row[f"within 3 %, {words}"] = sum(abs(ms) <= 0.03 * whole for ms, whole in apart)
            ms, whole = max(apart, key=lambda pair: abs(pair[0]) / pair[1], default=(0.0, 0.0))
            row[f"furthest, {words}"] = f"{ms:+.3f} of {whole:.3g} ms"
        rows += [row] if found else []
    return pd.DataFrame(rows)


def cost(values):
    """Of the trace, as a part of a whole step, by events."""
    return values["step traced"] / values["step events"] - 1


def costs(measured):
    """What the trace costs C at the most, by size."""
    found = defaultdict(list)
    for record in ordered(
        keyed(r) | r["values"] for r in measured.records if "step events" in r.get("values", {})
    ):
        if not record["side"].startswith("torch"):
            found[record["size"]].append(100 * cost(record))
    if not found:
        return ""
    order = [size for size in SIZES if size in found] + [size for size in found if size not in SIZES]
    words = ", ".join(f"{max(found[size]):.1f} % ({size})" for size in order)
    return f"By events, the trace makes a whole step of C's longer by {words} at the most."


def say_times(records):
    record = shown(records)
    if record is None:
        return ""
    values = record["values"]
    said = f"The forward pass of {where(record)} takes {values['forward timer']:.2f} ms by the timer"
    if "forward events" not in values:
        return f"{said} and {values['forward window']:.2f} by a trace of steps beside it."
    apart = 100 * (values["forward window"] / values["forward traced mean"] - 1)
    return (
        f"{said}; in steps with a trace {values['forward traced mean']:.2f} ms by events and "
        f"{values['forward window']:.2f} by the trace, {abs(apart):.1f} % {'less' if apart < 0 else 'more'}."
    )


def report_top(page, records):
    largest = shown(records)
    page.table(
        pd.DataFrame(top_rows([r for r in records if largest and r["case"] == largest["case"]])), "largest"
    )
    page.table(pd.DataFrame(top_rows(records)), "top")
    page.text(
        "Nine products a layer, as one writes them, give 9 L + 1 in the forward pass; C forms q, k and v as one and "
        "the gate and up projections as one."
    )


def top_rows(records):
    rows = []
    for record in records:
        values = record["values"]
        for scope in SCOPES:
            if f"{scope} 1 name" in values:
                rows.append(
                    keyed(record)
                    | {
                        "of": scope,
                        "name": values[f"{scope} 1 name"],
                        "class": values[f"{scope} 1 class"],
                        "share": f"{100 * values[f'{scope} 1 share']:.1f} %",
                        "calls a pass": values[f"{scope} 1 calls"],
                        "products of all names": values[f"{scope} products"],
                    }
                )
    return ordered(rows)


def say_top(records):
    record = shown(records)
    if record is None or "forward 1 name" not in record["values"]:
        return ""
    values = record["values"]
    with_backward = values["forward and backward 1 name"]
    same = values["forward 1 name"] == with_backward
    return (
        f"The {what(record)} with the most time of the forward pass is `{values['forward 1 name']}` "
        f"({values['forward 1 class']}, {100 * values['forward 1 share']:.0f} %, {values['forward 1 calls']:g} calls a "
        f"pass), and with backward it is {'the same' if same else f'`{with_backward}`'}."
    )


def report_others(page, records):
    rows = []
    for record in records:
        values = record["values"]
        total = sum(ms for name, ms in values.items() if name.startswith("forward ms "))
        for name, ms in values.items():
            op_class = name.removeprefix("forward ms ")
            if op_class == name or op_class == "matmul" or ms < 0.01 * total:
                continue
            numbers = range(1, KERNELS + 1)
            largest = next((i for i in numbers if values.get(f"forward {i} class") == op_class), None)
            rows.append(
                keyed(record)
                | {
                    "class": op_class,
                    "ms": ms,
                    "share": f"{100 * ms / total:.1f} %",
                    "largest of the five first": values[f"forward {largest} name"] if largest else "",
                }
            )
    page.table(pd.DataFrame(ordered(rows)), "others")


def say_others(records):
    record = shown(records)
    if record is None:
        return ""
    mine, theirs = other_classes(record), beside(records, record, "torch_eager")
    words = f" (PyTorch: {other_classes(theirs)})" if theirs and other_classes(theirs) else ""
    return f"Beside products forward spends time in {mine}{words}." if mine else ""


def other_classes(record):
    """Those beside matrix products that have a hundredth of forward or more, with their shares."""
    times = {
        name.removeprefix("forward ms "): ms
        for name, ms in record["values"].items()
        if name.startswith("forward ms ")
    }
    total = sum(times.values())
    others = sorted(((ms, name) for name, ms in times.items() if name != "matmul"), reverse=True)
    return ", ".join(f"{name} {100 * ms / total:.1f} %" for ms, name in others if ms >= 0.01 * total)


def shares(record):
    """The share of matrix products in forward and in the step, in percent."""
    found = []
    for scope in ("forward", "step"):
        total = sum(ms for name, ms in record["values"].items() if name.startswith(f"{scope} ms "))
        found.append(100 * record["values"].get(f"{scope} ms matmul", 0) / total if total else 0)
    return found


def report_share(page, records):
    rows = []
    for record in records:
        forward, step = shares(record)
        rows.append(
            keyed(record)
            | {
                "in forward": f"{forward:.1f} %",
                "in the step": f"{step:.1f} %",
                "difference": f"{step - forward:+.1f} points",
                "optimizer (ms)": record["values"]["optimizer busy"],
            }
        )
    page.table(pd.DataFrame(ordered(rows)), "share")
    page.text(
        "Forward alone is inference but for what is kept. The class of a kernel is that of the operation that launched "
        "it in C, and told by its name in PyTorch, where the loops of the optimizer are elementwise kernels."
    )


def say_share(records):
    record = shown(records)
    if record is None:
        return ""
    forward, step = shares(record)
    theirs = beside(records, record, "torch_eager")
    words = f" (PyTorch: {shares(theirs)[0]:.0f} and {shares(theirs)[1]:.0f} %)" if theirs else ""
    return (
        f"Matrix products are {forward:.0f} % of forward and {step:.0f} % of a whole step with AdamW{words}."
    )


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


def report_softmax(page, records):
    rows, curves = [], {}
    for record in records:
        values, ratio = record["values"], softmax_ratio(record)
        row = keyed(record) | {f"{part} (ms)": values.get(f"attention ms {part}", "") for part in PARTS}
        if ratio:
            row |= {"time, softmax / products": ratio[0], "FLOPs, softmax / products": ratio[1]}
            case = record["case"]
            panel = curves.setdefault(f"{case['size']}, {case['dtype']}", {})
            for impl, value in ((record["impl"], ratio[0]), ("c, arithmetic", ratio[1])):
                points = panel.setdefault(impl, {})
                points[case["context"]] = value
        rows.append(row)
    page.table(pd.DataFrame(ordered(rows)), "attention")
    drawn = {
        name: {impl: tuple(zip(*sorted(points.items()), strict=True)) for impl, points in panel.items()}
        for name, panel in curves.items()
        if any(len(points) > 1 for points in panel.values())
    }
    page.plot(
        "softmax",
        dict(list(drawn.items())[-2:]),
        x="context",
        y="softmax / both products",
        title="Softmax over both products inside attention, in time, and in FLOPs (dashed)",
    )


def say_softmax(records):
    record = shown(records)
    ratio = softmax_ratio(record) if record else None
    if not ratio:
        return ""
    return (
        f"Inside attention softmax takes {ratio[0]:.2f} of the time of both products and {ratio[1]:.3f} of their "
        "FLOPs."
    )


def figure(records):
    record = shown(records)
    return (
        f"products are {shares(record)[0]:.0f} % of forward, {shares(record)[1]:.0f} % of a step"
        if record
        else ""
    )


def method(page, records, measured):
    events = (
        "Events on the device stand between C's phases, which follow each other, and around PyTorch's, which are "
        "waited for"
        if on_gpu(measured)
        else "Events are the host's clock here as well, without a wait between C's phases"
    )
    tool = (
        "C's kernels are CUPTI's records, by the operation that launched them, also inside captured graphs; PyTorch's "
        "are its profiler's"
        if on_gpu(measured)
        else "C's operations are timed by the host's clock between their labels; PyTorch's are its profiler's"
    )
    wrong = [r for r in records.only(part="flops", impl="c").records if r["status"] != "ok"]
    exact = (
        " FLOPs of forward, of a step and of attention's products are PyTorch's own count to the last one."
        if len(records.only(part="flops")) and not wrong
        else ""
    )
    page.method(
        f"Steps are run without a trace and with it; a trace's times are means of its steps, others medians. The timer "
        f"waits for the device behind each phase. {events}. {tool}. {ran_with(measured)}{exact}"
    )
