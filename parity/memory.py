"""Where the memory of a pass goes: peaks of passes and steps, sizes of tensors, and what one block saves."""

import re
from contextlib import closing

import torch

from parity.core import DTYPES, Case, Side, equal, grid
from parity.shared.model import autocast, c_switches, noise_model, torch_switches, train_options
from parity.shared.pages import MIB, extent, tabled
from parity.shared.sizes import BATCH, extents, keys_of
from ref import memory as ref

CONTEXTS = [128, 256, 512]
LONGEST = 2048  # of the handout of 2026, for the size that it calls xl
POINTS = 200  # of a timeline in a record
CONTRIBUTORS = 5
PHASE_NAMES = ["create", "forward", "backward", "optimizer"]
CATEGORIES = ["weights", "gradients", "optimizer state", "activations", "scratch"]
# As `tandem memory` runs, and with all that PyTorch's formula holds: scores and every gradient.
WAYS = {
    "c": {"attention": "flash"} | c_switches(keep="all", gradients="transient", update="along"),
    "c_naive": {"attention": "naive"} | c_switches(keep="all"),
}


def cases(profile, device):
    for keys in grid(dtype=["f32", "bf16"], context=[64, 128]):
        # Extents whose tensors are multiples of the 256 bytes that C's begin on.
        shape = dict(d_model=64, d_ff=192, layers=2, heads=4, vocab=64, batch=4)
        yield Case("memory_profiling", part="sizes", size="tiny", seconds=0.5, **shape, **keys)
    if device == "cuda":
        sizes = ["2.7B"] if profile == "full" else ["small"]
        dtypes, contexts = ["f32", "bf16_mixed"], [*CONTEXTS, LONGEST] if profile == "full" else [128]
    else:
        sizes, dtypes = ["laptop" if profile == "quick" else "small"], ["f32"]
        dtypes += ["bf16_mixed"] if profile == "full" else []
        contexts = CONTEXTS if profile == "full" else [128]
    for keys in grid(size=sizes, dtype=dtypes, context=contexts, what=list(ref.PASSES)):
        yield peaks_case(device, **keys)
    if device == "cuda" and profile == "full":
        yield block_case("2.7B", LONGEST)


def peaks_case(device, size, dtype, context, what):
    shape, numel = extents(size)
    work = BATCH * context * 8 * numel / (2e13 if device == "cuda" else 1e11)
    # The hungriest side keeps: in f32 C's scores and 21 tensors of d_model columns a layer; in bf16 PyTorch's
    # scores in both dtypes and the like. Gradients are as large as weights, copies of weights in bf16 half as
    # large. PyTorch's loop of AdamW has four temporary tensors as large as a weight.
    scores, columns = (6, 82) if dtype == "bf16_mixed" else (4, 84)
    of_token = scores * shape["heads"] * context + columns * shape["d_model"]
    kept = shape["layers"] * BATCH * context * of_token
    weights, loop = 4 * numel, 16 * shape["d_ff"] * shape["d_model"]
    needs = {"inference": 2 * weights, "forward": 2 * weights + kept, "step": 4 * weights + kept}
    if dtype == "bf16_mixed":
        needs |= {"forward": 1.5 * weights + kept, "step": max(4 * weights + loop, 3.5 * weights + kept)}
    return Case(
        "memory_profiling",
        measure="memory",
        seconds=3 + numel / (1e9 if device == "cuda" else 1e8) + 4 * work,
        in_turn=True,
        alone=device == "cpu",
        config=config_of(dtype),
        needs_bytes=int(needs[what]),
        part="peaks",
        **keys_of(size, context, dtype, what),
    )


def config_of(dtype):
    return WAYS | {"torch_eager": torch_switches(dtype) | {"attention": "scores", "optimizer": "loop"}}


def block_case(size, context):
    """What one block keeps, of a model of one layer: the whole model does not fit at this context."""
    keys = keys_of(size, context, "f32", "forward") | {"layers": 1}
    how = dict(measure="memory", seconds=5, in_turn=True, config=config_of("f32"))
    return Case("memory_profiling", **how, part="block", **keys)


def run(case, draw, c):
    return sizes(case, draw, c) if case.part == "sizes" else peaks(case, draw, c)


def sizes(case, draw, c):
    """Bytes of the tensors that the handout asks for: from C's recording, and of PyTorch's own tensors."""
    tokens = draw.integers("tokens", (case.batch, case.context), high=case.vocab)

    def tandem():
        with closing(Recording(case, c, WAYS["c_naive"], "step")) as recorded:
            block = recorded.block
            forward = {name.split(".", 2)[-1]: nbytes for name, nbytes, _ in recorded.largest(20)}
            found = {"residual": block.residual_bytes, "scores": block.scores_bytes}
            return found | {"ffn": forward["ffn.hidden"], "logits": forward["logits"]}

    def eager():
        found = ref.sizes(noise_model(case, draw.device), tokens)
        return {name: found[name] for name in ("residual", "scores", "ffn", "logits")}

    return {"c": tandem, "torch_eager": eager, "rule": {"*": equal()}}


class Recording:
    def __init__(self, case, c, switches, what):
        self.c = c
        fields = {"model": train_options(switches)["model"], "time": switches["update"], "pass": what}
        config = c.struct("td_memory_config", case, **fields)
        self.handle = c.value("td_memory_record", c.device, config)
        self.summary = c.value("td_memory_summary_of", self.handle)
        self.block = c.value("td_memory_block_of", self.handle, 0)

    def close(self):
        self.c.td_memory_recording_destroy(self.handle)

    def largest(self, capacity):
        """[(name, bytes, count)] of the forward pass. Tensors that differ only in their layer are one."""
        found = self.c.ffi.new("td_memory_tensor[]", capacity)
        count = self.c.ffi.new("int64_t *")
        self.c.td_memory_largest(self.handle, PHASE_NAMES.index("forward"), capacity, found, count)
        return [(self.c.ffi.string(of.name).decode(), of.bytes, of.count) for of in list(found)[: count[0]]]

    def timeline(self):
        """The fullest moment of each of POINTS stretches, in MiB by category; and where phases end, as shares."""
        entries, count = self.c.ffi.new("td_memory_entry **"), self.c.ffi.new("int64_t *")
        self.c.td_memory_entries(self.handle, entries, count)
        live, moments, ends = [0] * len(CATEGORIES), [], {}
        signs = {self.c.TD_MEMORY_LIVE: 1, self.c.TD_MEMORY_DEAD: -1}
        for i in range(count[0]):
            entry = entries[0][i]
            live[entry.category] += signs.get(entry.event.action, 0) * entry.event.bytes
            moments.append((entry.live_bytes, *live))
            ends[entry.phase] = (i + 1) / count[0]
        stops = [len(moments) * (i + 1) // POINTS for i in range(POINTS)]
        stretches = [moments[begin:end] for begin, end in zip([0, *stops], stops, strict=False)]
        fullest = [[nbytes / MIB for nbytes in max(stretch)] for stretch in stretches if stretch]
        columns = list(zip(*fullest, strict=True))
        series = {"live_mib": list(columns[0])}
        series |= {f"live {name}": list(columns[i]) for i, name in enumerate(CATEGORIES, 1)}
        return series | {"phase ends": [ends.get(i, 0.0) for i in range(len(PHASE_NAMES))]}

    def values(self):
        """What a record says of it, in bytes but for names."""
        summary, block = self.summary, self.block
        values = {"live": summary.whole.live_bytes}
        for i, name in enumerate(CATEGORIES):
            values[f"live {name}"] = summary.whole.by_category[i]
            values[f"blocks {name}"] = summary.allocated[i]
        values |= {"residual": block.residual_bytes}
        values |= {"saved": block.saved_bytes, "block gradients": block.gradient_bytes}
        for i in range(min(CONTRIBUTORS, block.saved)):
            tensor = block.largest[i]
            values[f"saved {i + 1} name"] = self.c.ffi.string(tensor.name).decode()
            values[f"saved {i + 1}"] = tensor.bytes
        for i, (name, nbytes, count) in enumerate(self.largest(CONTRIBUTORS), 1):
            values |= {f"largest {i} name": name, f"largest {i}": nbytes, f"largest {i} count": count}
        return values


def peaks(case, draw, c):
    sides = {impl: tandem_side(case, c, impl, draw.device) for impl in WAYS}
    return sides | {"torch_eager": eager_side(case, draw)}


def tandem_side(case, c, impl, device):
    """On a GPU it is tried: C allocates the whole plan at once, and says so if there is no room."""
    session, found = c.side(impl), {}

    def call():
        with closing(Recording(case, session, case.config[impl], case["pass"])) as recorded:
            found["values"], found["series"] = recorded.values(), recorded.timeline()

    return Side(call, record=lambda: found, needs_bytes=0 if device.type == "cuda" else None)


def eager_side(case, draw):
    made, found = {}, {}

    def open():
        tokens = torch.zeros((case.batch, case.context), dtype=torch.int64, device=draw.device)
        mixed = case.dtype == "bf16_mixed"
        made["pass"] = ref.Recorded(noise_model(case, draw.device), tokens, tokens, autocast=mixed)
        if case["pass"] == "step":
            made["pass"].settle()

    def call():
        made["result"] = made["pass"].run(case["pass"])

    def weigh():
        """What one block saves, and how large a tensor of the residual stream is, after the pass was measured."""
        block = made["pass"].model.layers[0]
        shape = (case.batch, case.context, case.d_model)
        x = torch.zeros(shape, dtype=DTYPES[case.dtype], device=draw.device)
        with autocast(case, draw.device):
            saved = ref.saved_by(block, x.requires_grad_())
        found["values"] = {"saved": sum(nbytes for _, nbytes in saved), "residual": x.nbytes}
        for i, (shape, nbytes) in enumerate(saved[:CONTRIBUTORS]):
            found["values"] |= {f"saved {i + 1} name": "x".join(map(str, shape)), f"saved {i + 1}": nbytes}

    def close():
        try:
            if "result" in made and case["pass"] != "inference":
                weigh()
        finally:
            made.clear()

    # A GPU says itself that there is no room. What needs much more is not tried.
    least = int(case.needs_bytes / 1.5) if draw.device.type == "cuda" else None
    how = dict(holds=lambda: made["pass"].holds(), record=lambda: found, needs_bytes=least)
    return Side(call, open=open, close=close, **how)


# Where the code is that makes a tensor: of C's plan by its name, and of the reference by its shape's words.
MADE_IN = {
    "ffn.gate_up": "impl/transformer/forward.c: w1 x and w3 x, joined",
    "ffn.hidden": "impl/transformer/forward.c: silu(w1 x) * w3 x",
    "attn.qkv": "impl/transformer/forward.c: q, k and v, joined",
    "attn.scores": "impl/attention/attention.c: softmax(Q K^T)",
    "attn.work": "impl/attention/attention.c: scratch",
    "logits": "impl/transformer/forward.c: lm_head",
    "work": "impl/transformer/plan.c: scratch of GEMMs",
}
MADE_BY_TORCH = {  # by whether the tensor is a matrix of scores
    True: ("attention scores", "ref/attention.py: softmax(scores)"),
    False: ("FFN hidden tensor", "ref/transformer.py: w2(silu(w1 x) * w3 x)"),
}
BOTH = ("c", "c_naive", "torch_eager")
NAMES = {"c": "C, fused attention", "c_naive": "C, scores in memory", "torch_eager": "PyTorch"}


def report(page, records):
    measured = records.only(part="peaks").ordered(lambda r: r["case"]["context"])
    f32, mixed = (measured.only(dtype=dtype) for dtype in ("f32", "bf16_mixed"))
    report_timeline(page, f32)
    page.section("memory_profiling (b)")
    reserved = "reserved: what the device gave to C; tensors: the most that tensors took of it, and of PyTorch's memory"
    page.note(f"f32, batch 4, peaks in MiB. {reserved}. forward: all that backward needs is kept.")
    report_peaks(page, f32, "peaks_f32")
    untried = measured.where(lambda r: r["status"] == "not run").values("context")
    first, last = ends_of(f32)
    lost = f32.only(impl="torch_eager").where(lambda r: r["status"] == "oom").values("context")
    naive_lost = any(r["status"] == "oom" for r in f32.only(impl="c_naive").records) or None
    page.say(first=first, last=last, untried=untried, lost=lost, naive_lost=naive_lost)
    page.section("memory_profiling (c)")
    page.note("bf16 mixed precision, batch 4, peaks in MiB. Gradients are bf16 in C and f32 in PyTorch.")
    report_peaks(page, mixed, "peaks_bf16_mixed")
    (short_wide, wide), (short_low, low) = (ends_of(of, f32, mixed) for of in (f32, mixed))
    lost = not (wide and low and wide.get("torch_eager_step") and low.get("torch_eager_step"))
    page.say(wide=wide, low=low, short_wide=short_wide, short_low=short_low, lost_step=lost)
    report_residual(page, f32)
    report_largest(page, f32)
    report_saved(page, records.only(part=["peaks", "block"], dtype="f32"))
    sizes = records.only(part="sizes", impl="c").records
    same = bool(sizes) and all(record["status"] == "ok" for record in sizes)
    page.method(same=same)


def values_of(record):
    return (record or {}).get("values", {})


def in_mib(values, name):
    """None of what is missing or 0."""
    return values.get(name, 0) / MIB or None


def longest(records, **keys):
    """The record of the largest model and longest context that ran."""
    found = [r for r in records.only(**keys).records if values_of(r)]
    return max(found, key=lambda r: extent(r["case"]), default=None)


def report_timeline(page, f32):
    page.section("memory_profiling (a)")
    panels, whole, shown = {}, True, []
    for impl, what in (("c", "forward"), ("c", "step"), ("c_naive", "step")):
        record = longest(f32, impl=impl, **{"pass": what})
        shown.append(record)
        series = (record or {}).get("series", {})
        if not series:
            continue
        layers = {c: series[f"live {c}"] for c in CATEGORIES if f"live {c}" in series}
        bands = dict(zip(PHASE_NAMES, series.get("phase ends", ()), strict=False))
        whole = whole and bool(layers) and record["case"]["size"] == "2.7B"
        what = "forward pass" if what == "forward" else what
        title = "{} of {}, {size}, context {context}".format(what, impl, **record["case"])
        panels[title] = (layers or {"live tensors": series["live_mib"]}, bands)
    forward, step, naive = shown
    page.note("The axis counts allocations and frees in their order, because records have no time of them.")
    page.stack(
        "timeline",
        panels,
        x="allocations and frees so far (% of all)",
        y="MiB of live tensors",
        title="Memory over a forward pass and over training steps of C, f32",
    )
    if not panels or not whole:
        page.lacks("the memory timeline of 2.7B with categories and phases: its records have totals alone")
    live, series = values_of(step), (step or {}).get("series", {})
    moments, ends = series.get("live_mib", []), series.get("phase ends", [])
    peak = (moments.index(max(moments)) + 1) / len(moments) if moments else 2.0
    page.say(
        **(step["case"] if step else {}),
        during=next((name for name, end in zip(PHASE_NAMES, ends, strict=False) if end >= peak), None),
        gradients=max(series.get("live gradients", ()), default=None),
        weights=in_mib(live, "live weights"),
        forward=in_mib(values_of(forward), "live"),
        step=in_mib(live, "live"),
        naive=in_mib(values_of(naive), "live"),
        naive_context=(at := naive["case"]["context"] if naive else None),
        beside=in_mib(values_of(longest(f32, impl="c", context=at, **{"pass": "step"})), "live"),
    )


def report_peaks(page, records, name):
    def cells(record):
        impl, peak = record["impl"], record.get("peak_mib") or record["status"]
        if impl not in WAYS:
            return {f"{impl} tensors": peak}
        return {f"{impl} reserved": peak, f"{impl} tensors": in_mib(values_of(record), "live")}

    keys = ("size", "context", "pass")
    rows = tabled(records.records, keys, cells, order=lambda key: (*key[:2], ref.PASSES.index(key[2])))
    order = [f"{impl} {what}" for impl in BOTH for what in ("reserved", "tensors")]
    page.table(rows, name, [*keys, *order], expected=9)


def peak_values(records, context):
    """Peaks at a context by side and pass, for sentences, and of C also what its tensors took."""
    found = {}
    for record in records.only(impl=list(BOTH), context=context).where(lambda r: r.get("peak_mib")).records:
        name = f"{record['impl']}_{record['case']['pass']}"
        found |= {"size": record["case"]["size"], "context": context, name: record["peak_mib"]}
        found[f"{name}_tensors"] = in_mib(values_of(record), "live")
    return found


def ends_of(records, *parts):
    """Peaks at the shortest and the longest context at which C's step ran in every part, or in these records."""
    steps = (of.only(impl="c", **{"pass": "step"}) for of in parts or [records])
    ran = [of.where(lambda r: r.get("peak_mib")) for of in steps]
    contexts = set.intersection(*(set(of.values("context")) for of in ran))
    return [peak_values(records, end(contexts)) if contexts else {} for end in (min, max)]


def report_residual(page, f32):
    page.section("memory_profiling (d)")
    rows = []
    kept = f32.only(impl="c", **{"pass": "forward"}).where(lambda r: "residual" in values_of(r)).records
    for record in kept:
        case = record["case"]
        row = {"size": case["size"], "context": case["context"]}
        row["batch x context x d_model x 4 bytes"] = "{batch} x {context} x {d_model} x 4".format(**case)
        for side, of in (("C", record), ("PyTorch", f32.first(impl="torch_eager", **case))):
            row[side] = in_mib(values_of(of), "residual")
        rows.append(row)
    page.table(rows, "residual", units={"C": "MiB", "PyTorch": "MiB"}, expected=1)
    last = longest(f32, impl="c", **{"pass": "forward"})
    if last:
        values = values_of(last)
        page.say(**last["case"], bytes=values.get("residual"), mib=in_mib(values, "residual"))


def numbered(values, name, capacity=CONTRIBUTORS):
    """(prefix of the keys, MiB) of each of the largest tensors."""
    for i in range(1, capacity + 1):
        if f"{name} {i}" in values:
            yield f"{name} {i}", values[f"{name} {i}"] / MIB


def report_largest(page, f32):
    page.section("memory_profiling (e)")
    rows, theirs = [], []
    f32 = f32.only(**{"pass": "forward"})
    plain = f32.only(impl="c_naive").where(lambda r: "largest 1" in values_of(r))
    for record in plain.records:
        case, values = record["case"], values_of(record)
        for key, each in numbered(values, "largest"):
            tensor = values[f"{key} name"]
            row = {name: case[name] for name in ("size", "dtype", "context")} | {"tensor of c_naive": tensor}
            row |= {"each": each, "count": values[f"{key} count"]}
            rows.append(row | {"made in": MADE_IN.get(tensor.replace("layers.*.", ""), "")})
    page.table(rows, "largest", units={"each": "MiB"}, expected=3)
    for record in f32.only(impl="torch_eager").records:
        values, context = values_of(record), record["case"]["context"]
        for key, each in numbered(values, "saved", 1):
            shape = values[f"{key} name"]
            what, line = MADE_BY_TORCH[shape.endswith(f"x{context}x{context}")]
            row = {"context": context, "largest tensor of a block": shape, "what": what}
            theirs.append(row | {"each": each, "made in": line})
    page.note("PyTorch, the largest tensor that a block keeps:")
    page.table(theirs, "largest_of_pytorch", units={"each": "MiB"})
    last, told = longest(plain), {}
    if last:
        other = values_of(f32.first(impl="torch_eager", **last["case"]))
        told = last["case"] | {"name": values_of(last)["largest 1 name"].replace("layers.*.", "")}
        told |= {"mine": in_mib(values_of(last), "largest 1"), "theirs": in_mib(other, "saved 1")}
        told["what"] = next((row["what"] for row in theirs if row["context"] == told["context"]), None)
    page.say(**told)


def scores_of(record):
    """PyTorch's largest saved tensor, if it is a matrix of scores, in MiB, and what the formula says of it."""
    values = values_of(record)
    if not re.search(r"x(\d+)x\1$", values.get("saved 1 name", "")):
        return {}
    case = record["case"]
    expected = case["batch"] * case["heads"] * case["context"] ** 2 * 4 / MIB
    kept = [
        each for key, each in numbered(values, "saved") if kind_of(values[f"{key} name"], case) == "scores"
    ]
    found = {"matrices": len(kept), "scores": kept[0], "scores_share": MIB * sum(kept) / values["saved"]}
    return found | {"expected": expected}


def kind_of(name, case):
    """What one of a block's largest tensors is: C's by its name, PyTorch's by its shape."""
    if "scores" in name or re.search(r"x(\d+)x\1$", name):
        return "scores"
    feed_forward = "ffn" in name or name.endswith(f"x{case['d_ff']}")
    return "feed-forward" if feed_forward else "inputs of norms and attention"


def report_saved(page, f32):
    page.section("memory_profiling (f)")
    forward = f32.only(**{"pass": "forward"}).where(lambda r: values_of(r).get("saved"))
    context = max(forward.values("context"), default=None)
    at_longest = {r["impl"]: r for r in forward.only(context=context).records}
    steps = f32.only(impl="c_naive", **{"pass": "step"}).where(lambda r: "block gradients" in values_of(r))
    gradients = in_mib(values_of(longest(steps)), "block gradients")  # the same at every context
    rows, bars = [], {}
    for impl, record in sorted(at_longest.items()):
        values = values_of(record)
        parts = bars.setdefault(NAMES[impl], {})
        for key, each in numbered(values, "saved"):
            kind = kind_of(values[f"{key} name"], record["case"])
            parts[kind] = parts.get(kind, 0.0) + each
            row = {name: record["case"][name] for name in ("size", "dtype", "context")} | {"side": impl}
            row |= {"all of the block": in_mib(values, "saved"), "tensor": values[f"{key} name"]}
            row |= {"what": kind, "of it": each, "share": f"{100 * values[key] / values['saved']:.1f} %"}
            rows.append(row | {"gradients of the block": gradients if impl == "c_naive" else None})
        parts["other"] = values["saved"] / MIB - sum(parts.values())
    page.note(
        "2.7B is the xl of 2026. PyTorch's tensors have no names, so their shapes stand here."
        + (
            " The model has one layer, because all layers of PyTorch and `c_naive` do not fit at this context."
            * (context == LONGEST)
        )
    )
    units = dict.fromkeys(("all of the block", "of it", "gradients of the block"), "MiB")
    page.table(rows, "saved_at_the_longest", units=units)
    title = f"What one block keeps for its backward pass, batch 4, context {context}, f32"
    page.bars("block", bars, y="MiB", title=title)
    if context is not None and context < LONGEST:
        page.lacks(f"one block at context {LONGEST}")
    if "c" in at_longest:
        values = values_of(at_longest["c"])
        shape, numel = extents(at_longest["c"]["case"]["size"])
        layers = shape["layers"]
        page.say(
            size=at_longest["c"]["case"]["size"],
            context=context,
            saved=in_mib(values, "saved"),
            theirs=in_mib(values_of(at_longest.get("torch_eager")), "saved"),
            first=values["saved 1 name"].replace("layers.0.", ""),
            share=values["saved 1"] / values["saved"],
            gradients=gradients,
            layers=layers,
            whole=(layers * values["saved"] + 4 * numel) / MIB,
            **scores_of(at_longest.get("torch_eager")),
        )
