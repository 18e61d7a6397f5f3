"""Where the memory of a pass goes: peaks of inference, forward and a whole step in C and in PyTorch, sizes of tensors,
and what one block saves for its backward."""

import pandas as pd
import torch

from parity.core import DTYPES, Case, Side, equal, grid
from parity.shared.model import autocast, c_switches, extents, sizes_of, torch_switches
from parity.shared.pages import ran_with, units_of
from ref import memory as ref
from ref.transformer import Transformer

DELIVERABLES = {
    "memory_profiling": "Peaks, the timeline, the largest tensors, and what a block saves for backward"
}

BATCH = 4
CONTEXTS = [128, 256, 512]
LONGEST = 2048  # of the handout of 2026, for the size that it calls xl
MIB = 2**20
POINTS = 200  # of a timeline in a record
CONTRIBUTORS = 5
CATEGORIES = ["weights", "gradients", "optimizer state", "activations", "scratch"]
# As the command `tandem memory` runs it, and with all that PyTorch's formula holds: the scores, and every
# gradient until the update.
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


def peaks_case(device, size, dtype, context, what):
    shape, numel = extents(size)
    work = BATCH * context * 8 * numel / (2e13 if device == "cuda" else 1e11)
    # Scores are kept twice a layer by the course's softmax, and there are as many again at the peak.
    scores = 0 if what == "inference" else 16 * shape["layers"] * BATCH * shape["heads"] * context**2
    config = WAYS | {"torch_eager": torch_switches(dtype) | {"attention": "scores", "optimizer": "loop"}}
    return Case(
        "memory_profiling",
        measure="memory",
        seconds=3 + numel / (1e9 if device == "cuda" else 1e8) + 4 * work,
        in_turn=True,
        alone=device == "cpu",
        config=config,
        needs_bytes=numel * (20 if what == "step" else 8) + scores,
        part="peaks",
        size=size,
        **shape,
        batch=BATCH,
        context=context,
        dtype=dtype,
        **{"pass": what},
    )


def run(case, draw, c):
    return sizes(case, draw, c) if case.part == "sizes" else peaks(case, draw, c)


# ---- sizes ----


def sizes(case, draw, c):
    """Bytes of the tensors that the handout asks for: of C's from its recording, of PyTorch's from its own tensors, and
    by the arithmetic."""
    tokens = draw.integers("tokens", (case.batch, case.context), high=case.vocab)

    def tandem():
        recorded = Recording(case, c, WAYS["c_naive"], "step")
        try:
            block, forward = recorded.block(0), recorded.largest("forward")
            ffn = next(entry for entry in forward if entry.name.endswith(".ffn.hidden"))
            logits = next(entry for entry in forward if entry.name == "logits")
            return {
                "residual": block.residual_bytes,
                "scores": block.scores_bytes,
                "ffn": ffn.bytes,
                "logits": logits.bytes,
            }
        finally:
            recorded.close()

    def eager():
        found = ref.sizes(model_of(case, draw.device), tokens)
        return {name: found[name] for name in ("residual", "scores", "ffn", "logits")}

    return {"c": tandem, "torch_eager": eager, "rule": {"*": equal()}}


class Entry:
    """Tensors that differ in their layer alone."""

    def __init__(self, c, tensor):
        self.name, self.label = (c.ffi.string(text).decode() for text in (tensor.name, tensor.label))
        self.bytes, self.count = tensor.bytes, tensor.count
        self.category = c.ffi.string(c.td_memory_category_name(tensor.category)).decode()


class Recording:
    """One recorded pass of libtandem."""

    def __init__(self, case, c, switches, what):
        self.c = c
        model = {
            "size": {},
            "attention": switches["attention"],
            "keep": switches["keep"],
            "transient_gradients": switches["gradients"] == "transient",
        }
        config = c.struct("td_memory_config", case, model=model, time=switches["update"], **{"pass": what})
        self.handle = c.value("td_memory_record", c.device, config)
        self.summary = c.value("td_memory_summary_of", self.handle)

    def close(self):
        self.c.td_memory_recording_destroy(self.handle)

    def block(self, layer):
        return self.c.value("td_memory_block_of", self.handle, layer)

    def largest(self, phase, capacity=20):
        found = self.c.ffi.new("td_memory_tensor[]", capacity)
        count = self.c.ffi.new("int64_t *")
        phases = {"create": 0, "forward": 1, "backward": 2, "optimizer": 3}
        self.c.td_memory_largest(self.handle, phases[phase], capacity, found, count)
        return [Entry(self.c, found[i]) for i in range(count[0])]

    def timeline(self):
        """MiB of the live tensors over the events, the fullest moment of each of POINTS stretches."""
        entries, count = self.c.ffi.new("td_memory_entry **"), self.c.ffi.new("int64_t *")
        self.c.td_memory_entries(self.handle, entries, count)
        live = [entries[0][i].live_bytes / MIB for i in range(count[0])]
        ends = [len(live) * (i + 1) // POINTS for i in range(POINTS)]
        stretches = [live[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        return [max(stretch) for stretch in stretches if stretch]

    def values(self):
        """What a record says of it, in bytes but for names."""
        summary, block = self.summary, self.block(0)
        values = {"blocks": summary.peak_bytes, "live": summary.whole.live_bytes}
        for i, name in enumerate(CATEGORIES):
            values[f"live {name}"] = summary.whole.by_category[i]
            values[f"blocks {name}"] = summary.allocated[i]
        values |= {"residual": block.residual_bytes, "scores": block.scores_bytes}
        values |= {"saved": block.saved_bytes, "block gradients": block.gradient_bytes}
        for i in range(min(CONTRIBUTORS, block.saved)):
            entry = Entry(self.c, block.largest[i])
            values |= {f"saved {i + 1} name": entry.name, f"saved {i + 1}": entry.bytes}
        for i, entry in enumerate(self.largest("forward", CONTRIBUTORS)):
            values |= {f"largest {i + 1} name": entry.name, f"largest {i + 1} label": entry.label}
            values |= {f"largest {i + 1}": entry.bytes, f"largest {i + 1} count": entry.count}
        return values


# ---- peaks ----


def model_of(case, device):
    """A model whose weights are there: what they are changes no size."""
    with torch.device("meta"):
        model = Transformer(*sizes_of(case))
    model = model.to(DTYPES[case.dtype]).to_empty(device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.01)
    return model


def peaks(case, draw, c):
    return {impl: tandem_side(case, c, impl) for impl in WAYS} | {"torch_eager": eager_side(case, draw)}


def tandem_side(case, c, impl):
    session, found = c.side(impl), {}

    def call():
        recorded = Recording(case, session, case.config[impl], case["pass"])
        try:
            found["values"] = recorded.values()
            found["series"] = {"live_mib": recorded.timeline()}
        finally:
            recorded.close()
        return {}

    return Side(call, record=lambda: found)


def eager_side(case, draw):
    made, found = {}, {}

    def open():
        tokens = torch.zeros((case.batch, case.context), dtype=torch.int64, device=draw.device)
        mixed = case.dtype == "bf16_mixed"
        made["pass"] = ref.Recorded(model_of(case, draw.device), tokens, tokens, autocast=mixed)
        if case["pass"] == "step":
            made["pass"].settle()

    def call():
        made["result"] = made["pass"].run(case["pass"])
        return {}

    def weigh():
        """What one block saves, and how large a tensor of the residual stream is, after the pass was measured."""
        if case["pass"] == "inference":
            return found
        block = made["pass"].model.layers[0]
        x = torch.zeros(
            (case.batch, case.context, case.d_model), dtype=DTYPES[case.dtype], device=draw.device
        )
        with autocast(case, draw.device):
            saved = ref.saved_by(block, x.requires_grad_())
        found["values"] = {"saved": sum(nbytes for _, nbytes in saved), "residual": x.nbytes}
        for i, (shape, nbytes) in enumerate(saved[:CONTRIBUTORS]):
            found["values"] |= {f"saved {i + 1} name": "x".join(map(str, shape)), f"saved {i + 1}": nbytes}
        return found

    def close():
        try:
            if "result" in made:
                weigh()
        finally:
            made.clear()

    return Side(
        call,
        open=open,
        close=close,
        holds=lambda: made["pass"].holds(),
        record=lambda: found,
    )


# ---- the page ----

PEAKS = "What are the peaks of inference, forward and a whole step?"
TIMELINE = "What does memory look like over a step?"
SIZES_OF = "How large are the tensors, and which are the largest?"
SAVED = "What does one block save for its backward pass?"


def report(page, records):
    measured = records.only(part="peaks")
    page.question(PEAKS)
    first = report_peaks(page, measured)
    page.question(TIMELINE)
    report_timeline(page, measured)
    page.question(SIZES_OF)
    second = report_sizes(page, measured, records.only(part="sizes"))
    page.question(SAVED)
    third = report_saved(page, measured)
    said = [words for words in (first[0], second, third) if words]
    page.answer("memory_profiling", " ".join(said), first[1], PEAKS)
    page.method(
        "One pass of the model at batch 4; of a step the moments are there before it. C's blocks are what the device "
        "gave, and its tensors are what is alive in them from first write to last use, both by the device's own record "
        "(impl/memory/). PyTorch's peak is its allocator's, with weights and moments. " + ran_with(measured)
    )


def by_context(records):
    return sorted(records.records, key=lambda r: (r["case"]["context"], r["case"]["dtype"], r["impl"]))


def values_of(record):
    return record.get("values", {})


def report_peaks(page, measured):
    """The table; the sentence of the answer, and its figure."""
    rows = {}
    for record in measured.records:
        case = record["case"]
        row = rows.setdefault(
            (case["size"], case["dtype"], case["context"], case["pass"]),
            {name: case[name] for name in ("size", "dtype", "context", "pass")},
        )
        impl, peak = record["impl"], record.get("peak_mib")
        row[f"{impl} (MiB)" if not impl.startswith("c") else f"{impl} blocks (MiB)"] = (
            peak if peak is not None else record["status"]
        )
        if "live" in values_of(record):
            row[f"{impl} tensors (MiB)"] = values_of(record)["live"] / MIB
    order = {what: rank for rank, what in enumerate(ref.PASSES)}
    frame = pd.DataFrame(
        [rows[key] for key in sorted(rows, key=lambda key: (key[0], key[1], key[2], order.get(key[3], 9)))]
    )
    page.table(frame, "peaks")
    return peaks_sentence(measured)


def peaks_sentence(measured):
    """The peaks of the longest context that has them, by dtype: the sentence, and its figure."""

    def peak(impl, what, dtype, case):
        found = measured.only(
            impl=impl, size=case["size"], context=case["context"], dtype=dtype, **{"pass": what}
        )
        return next((r["peak_mib"] for r in found.records if "peak_mib" in r), None)

    steps = [r["case"] for r in measured.only(impl="c", **{"pass": "step"}).records if "peak_mib" in r]
    both = [case for case in steps if peak("torch_eager", "step", case["dtype"], case) is not None]
    if not steps:
        return "", ""
    case = max(both or steps, key=lambda case: case["context"])
    words = []
    for dtype in measured.values("dtype"):
        mine = [peak("c", what, dtype, case) for what in ref.PASSES]
        if None in mine:
            continue
        theirs = [peak("torch_eager", what, dtype, case) for what in ref.PASSES]
        beside = "" if None in theirs else " (PyTorch " + ", ".join(f"{mib:,.0f}" for mib in theirs) + ")"
        words.append(f"{', '.join(f'{mib:,.0f}' for mib in mine)} MiB in {dtype}{beside}")
    return (
        f"Inference, forward and a step of {case['size']} at context {case['context']} take {'; '.join(words)}.",
        f"{case['size']}: {peak('c', 'step', case['dtype'], case):,.0f} MiB for a step",
    )


def report_timeline(page, measured):
    curves = {}
    for impl, case, live in measured.only(**{"pass": "step"}).series("live_mib"):
        panel = f"{case['size']}, {case['dtype']}, context {case['context']}"
        curves.setdefault(panel, {})[impl] = ([100 * i / len(live) for i in range(len(live))], live)
    page.plot(
        "timeline",
        dict(list(curves.items())[-2:]),
        x="% of the events",
        y="MiB of live tensors",
        title="Live tensors over a step, from the first block taken to the last update",
        log=False,
    )
    page.text(
        "`tandem memory --timeline FILE` draws the same stacked by category with the phases as bands, and `--snapshot "
        "FILE` writes it for PyTorch's viewer."
    )


def report_sizes(page, measured, sizes):
    rows = []
    for record in by_context(measured.only(impl="c_naive", **{"pass": "forward"})):
        case, values = record["case"], values_of(record)
        for i in range(1, CONTRIBUTORS + 1):
            if f"largest {i}" in values:
                rows.append(
                    {
                        "size": case["size"],
                        "dtype": case["dtype"],
                        "context": case["context"],
                        "residual stream": values["residual"] / MIB,
                        "scores": values["scores"] / MIB,
                        "tensor": values[f"largest {i} name"],
                        "each": values[f"largest {i}"] / MIB,
                        "count": values[f"largest {i} count"],
                        "first under": values[f"largest {i} label"],
                    }
                )
    frame = pd.DataFrame(rows)
    page.table(frame, "largest", units=units_of(frame, ["residual stream", "scores", "each"], "MiB"))
    wrong = [r for r in sizes.only(impl="c").records if r["status"] != "ok"]
    if len(sizes) and not wrong:
        page.text(
            "Of small models every size (residual stream, scores, hidden tensor, logits) is the same number of bytes "
            "in C and in PyTorch."
        )
    if not rows:
        return ""
    return sizes_sentence(pd.DataFrame(rows))


def sizes_sentence(frame):
    """Of f32, where it was measured: a tensor of the residual stream and the largest tensor, by context."""
    frame = frame[frame["dtype"] == ("f32" if "f32" in set(frame["dtype"]) else frame["dtype"].iloc[0])]
    firsts = frame.sort_values("each", ascending=False, kind="stable").drop_duplicates("context")
    words = [
        f"{row['residual stream']:.1f} and {row['each']:.1f} MiB ({row['tensor']}) at {row['context']}"
        for _, row in firsts.sort_values("context").iterrows()
    ]
    return (
        f"In {frame['dtype'].iloc[0]} a tensor of the residual stream and the largest of forward have "
        f"{', '.join(words)} tokens."
    )


def report_saved(page, measured):
    rows = []
    for record in by_context(measured.only(**{"pass": "forward"})):
        case, values = record["case"], values_of(record)
        for i in range(1, CONTRIBUTORS + 1):
            if values.get("saved") and f"saved {i}" in values:
                rows.append(
                    {
                        "size": case["size"],
                        "dtype": case["dtype"],
                        "context": case["context"],
                        "side": record["impl"],
                        "all of the block": values["saved"] / MIB,
                        "tensor": values[f"saved {i} name"],
                        "of it": values[f"saved {i}"] / MIB,
                        "share": f"{100 * values[f'saved {i}'] / values['saved']:.1f} %",
                    }
                )
    frame = pd.DataFrame(rows)
    units = units_of(frame, ["all of the block", "of it"], "MiB")
    longest = frame[frame["side"] == "c"] if rows else frame
    if longest.empty:
        page.table(frame, "saved", units=units)
        return ""
    longest = longest[longest["context"] == longest["context"].max()]
    chosen = frame[
        (frame["context"] == longest["context"].iloc[0]) & (frame["dtype"] == longest["dtype"].iloc[0])
    ]
    page.table(chosen[chosen["side"] != "c_naive"], "saved_at_the_longest", units=units)
    page.table(frame, "saved", units=units)
    return saved_sentence(measured, longest)


def saved_sentence(measured, longest):
    """What a block saves in C's fastest way, the largest of it, and the gradients of its weights."""
    context, dtype = longest["context"].iloc[0], longest["dtype"].iloc[0]
    tensors = [f"{row['tensor'].removeprefix('layers.0.')} {row['share']}" for _, row in longest.iterrows()]
    tensors = tensors[:CONTRIBUTORS]
    held = measured.only(impl="c_naive", context=int(context), dtype=dtype, **{"pass": "step"}).records
    gradients = next(
        (values_of(r)["block gradients"] for r in held if "block gradients" in values_of(r)), None
    )
    behind = (
        ""
        if gradients is None
        else f"; in backward its weights' gradients are {gradients / MIB:.1f} MiB more"
    )
    return (
        f"One block saves {longest['all of the block'].iloc[0]:.1f} MiB for backward at context {context} in {dtype} "
        f"({', '.join(tensors)}){behind}."
    )
