"""The model in C and in PyTorch from the same weights: logits, gradients, trained weights, and a training run.

`load_state_dict` and `state_dict` carry a PyTorch state dict into a td_transformer and back.
"""

import math
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import torch

from parity._pages import error_sentence, valued
from parity.core import DTYPES, NAMES, Case, Side, grid, within
from ref import transformer as ref

DELIVERABLES = {
    "transformer_exactness": "The model: logits, loss, every gradient, and the weights after AdamW",
    "transformer_training": "Training a byte-level model on this repository's own text",
}

ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
SMALL_STEPS = 3
# Relative L2 of the loss and of each gradient tensor by itself. They are too few numbers for the rule of PyTorch's own
# error, which is that of another order of summation: the logits and all gradients together are held to that one.
EACH_WITHIN = {"f32": 1e-5, "tf32": 1e-2, "bf16": 5e-2, "bf16_mixed": 5e-2}
WEIGHTS_WITHIN = 1e-5  # relative L2, of every weight tensor after those steps
LOSSES_WITHIN = {"f32": 1e-3, "bf16_mixed": 0.1}  # of every loss of the training run
TYPES = {"cpu": ["f32", "bf16"], "cuda": ["f32", "tf32", "bf16", "bf16_mixed"]}
ROOT = Path(__file__).resolve().parents[1]


def cases(profile, device):
    tiny = [
        # head_dim 80; odd heads; an odd width of everything that may be odd.
        dict(d_model=160, d_ff=224, layers=2, heads=2, vocab=53, batch=3, context=40, seq=37),
        dict(d_model=48, d_ff=100, layers=3, heads=3, vocab=257, batch=2, context=64, seq=64),
        dict(d_model=18, d_ff=7, layers=2, heads=3, vocab=11, batch=5, context=9, seq=3),
    ]
    for keys in tiny:
        for way in grid(dtype=TYPES[device], attention=["naive", "flash"]):
            yield Case("transformer_exactness", size="tiny", steps=1, seconds=0.5, **keys, **way)
    d_model, d_ff, layers, heads = ref.SIZES["small"]
    small = dict(
        d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, vocab=10_000, batch=4, context=128, seq=128
    )
    # With one step the gradients are held against float64 as well, which takes minutes at this size.
    for steps, seconds in [(SMALL_STEPS, 60), *([(1, 240)] if profile == "full" else [])]:
        how = dict(seconds=seconds, needs_bytes=12 * 2**30)
        yield Case(
            "transformer_exactness", size="small", steps=steps, dtype="f32", attention="naive", **small, **how
        )
    if device == "cuda":
        yield from gpu_cases(profile, small)
        return
    steps = 200
    byte_level = dict(d_model=128, d_ff=512, layers=4, heads=4, vocab=256, batch=8, context=128)
    for attention in ["flash"] if profile == "quick" else ["flash", "naive"]:
        way = dict(dtype="f32", attention=attention)
        yield Case("transformer_training", size="bytes", steps=steps, seconds=45, **byte_level, **way)


def gpu_cases(profile, small):
    """`small` in every dtype with its gradients; the largest model; and training in mixed precision from two "
    "seeds."""
    for keys in grid(dtype=["tf32", "bf16_mixed"], attention=["naive", "flash"]):
        yield Case("transformer_exactness", size="small", steps=1, seconds=8, **small, **keys)
    if profile == "full":
        d_model, d_ff, layers, heads = ref.SIZES["2.7B"]
        largest = dict(d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, vocab=10_000)
        for dtype in ["f32", "bf16_mixed"]:
            # The gradients of every side and of the truth are held at once: 4 + 4 + 8 bytes a parameter, and at worst
            # the truth's weights beside them.
            how = dict(seconds=90, needs_bytes=100 * 2**30, in_turn=True)
            keys = dict(batch=1, context=128, seq=128, dtype=dtype, attention="flash")
            yield Case("transformer_exactness", size="2.7B", steps=1, **how, **largest, **keys)
    byte_level = dict(d_model=512, d_ff=2048, layers=8, heads=8, vocab=256, batch=8, context=128)
    for seed in (1, 2):
        way = dict(dtype="bf16_mixed", attention="flash", seed=seed)
        yield Case("transformer_training", size="bytes", steps=200, seconds=25, **byte_level, **way)


def run(case, draw, c):
    return train(case, draw, c) if case.deliverable == "transformer_training" else exactness(case, draw, c)


# ---- a model of libtandem, by PyTorch's names ----


def parameters(c, model):
    """name: td_parameter, in state-dict order."""
    found = [
        c.value("td_transformer_parameter", model, index)
        for index in range(c.td_transformer_parameter_count(model))
    ]
    return {c.ffi.string(parameter.name).decode(): parameter for parameter in found}


def load_state_dict(c, model, state):
    """Uploads a PyTorch state dict; names, order and shapes must be the model's."""
    mine = parameters(c, model)
    if list(mine) != list(state):
        raise ValueError(f"state dict has {len(state)} tensors, the model {len(mine)}, or other names")
    for name, parameter in mine.items():
        tensor = state[name].detach().contiguous()
        if tensor.shape != shape_of(parameter):
            raise ValueError(f"{name} is {list(tensor.shape)}, the model's {list(shape_of(parameter))}")
        if c.enum("td_dtype", NAMES[tensor.dtype]) != parameter.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, the model's is another")
        c.td_device_copy(c.device, parameter.data, tensor, tensor.nbytes)
    c.td_transformer_refresh(model)


def state_dict(c, model, what="data"):
    """The model's parameters, or with what="grad" their gradients, as new tensors by name, as the model has them."""
    state = {}
    for name, parameter in parameters(c, model).items():
        dtype = c.ffi.string(c.td_dtype_name(parameter.grad_dtype if what == "grad" else parameter.dtype))
        state[name] = torch.empty(shape_of(parameter), dtype=DTYPES[dtype.decode()], device=c.on.torch)
        c.td_device_copy(c.device, state[name], getattr(parameter, what), state[name].nbytes)
    return state


def shape_of(parameter):
    return torch.Size((parameter.rows, parameter.cols) if parameter.cols else (parameter.rows,))


class Tandem:
    """A td_transformer. `options` are further fields of its configuration."""

    def __init__(self, case, c, attention, use="training", **options):
        self.c, self.case = c, case
        self.config = c.struct(
            "td_transformer_config", case, size={}, attention=attention, use=use, **options
        )
        self.adamw = c.struct("td_adamw", variant="course2025", **ADAMW)
        self.model = self.graph = self.on_device = None

    def open(self):
        self.model = self.c.create("td_transformer_create", self.c.device, self.config)
        return self

    def close(self):
        if self.graph is not None:
            self.c.td_graph_destroy(self.graph)
        if self.model is not None:
            self.c.destroy(self.model)
        self.model = self.graph = self.on_device = None

    def restart(self, state):
        """These weights, no moments, step 0."""
        self.c.td_transformer_init(self.model, 0)
        load_state_dict(self.c, self.model, state)

    def begin(self, state):
        """These weights and no moments in a new model, without drawing others first."""
        load_state_dict(self.c, self.model, state)
        for parameter in parameters(self.c, self.model).values():
            for moment in (parameter.exp_avg, parameter.exp_avg_sq):
                if moment != self.c.ffi.NULL:
                    self.c.td_device_fill(self.c.device, moment, 0, 4 * parameter.numel)
        self.upload_adamw()

    def upload_adamw(self):
        """Before the first step, where a captured one reads it."""
        if self.on_device is not None:
            nbytes = self.c.ffi.sizeof("td_adamw")
            self.c.td_device_upload(self.c.device, self.on_device, self.adamw, nbytes)

    def forward(self, ids):
        logits = self.c.ffi.new("void **")
        self.c.td_transformer_forward(self.model, ids, *ids.shape, logits)
        dtype = self.case.dtype.removesuffix("_mixed")  # of the products
        return self.c.tensor(logits[0], (*ids.shape, self.case.vocab), dtype)

    def loss(self, targets):
        loss = self.c.ffi.new("float *")
        self.c.td_transformer_loss(self.model, targets, loss)
        return torch.tensor([loss[0]], device=targets.device)

    def backward(self):
        self.c.td_transformer_backward(self.model, False, None, None)

    def update(self):
        self.c.td_transformer_adamw(self.model, self.adamw)

    def step(self, ids, targets, overlap=False):
        """A training step that waits for nothing: nobody asks for the loss. `overlap`: the weights are updated along
        the backward pass."""
        self.c.td_transformer_forward(self.model, ids, *ids.shape, None)
        self.c.td_transformer_loss(self.model, targets, None)
        if overlap:
            adamw = self.on_device or self.adamw
            self.c.td_transformer_backward_adamw(self.model, adamw, self.on_device is not None)
            return
        self.backward()
        if self.on_device is None:
            self.update()
        else:
            self.c.td_transformer_adamw_on_device(self.model, self.on_device)

    def capture(self, ids, targets, overlap=False):
        """Turns the step into a graph, to be replayed by `replay`. One step runs before, for what is done only once."""
        block = self.c.work(self.c.ffi.sizeof("td_adamw"))
        self.on_device = self.c.ffi.cast("td_adamw *", block)
        self.upload_adamw()
        self.step(ids, targets, overlap)
        self.c.td_device_synchronize(self.c.device)
        self.c.td_graph_begin(self.c.device)
        self.step(ids, targets, overlap)
        self.graph = self.c.value("td_graph_end", self.c.device)

    def replay(self):
        self.c.td_graph_launch(self.graph)

    def last_loss(self):
        loss = self.c.ffi.new("float *")
        self.c.td_transformer_last_loss(self.model, loss)
        return torch.tensor([loss[0]], device=self.c.on.torch)


def sizes_of(case):
    return case.d_model, case.d_ff, case.layers, case.heads, case.vocab, case.context


def torch_model(case, state, dtype=None, **options):
    """PyTorch's model with these weights, on their device, in the case's dtype or another. Drawing others first would
    take seconds at the size of `small`."""
    with torch.device("meta"):
        model = ref.Transformer(*sizes_of(case), **options)
    model = model.to(dtype or DTYPES[case.dtype]).to_empty(device=next(iter(state.values())).device)
    model.load_state_dict(state)
    return model


def autocast(case, device):
    """What PyTorch does for bf16_mixed, and nothing for any other dtype."""
    return torch.autocast(device.type, torch.bfloat16, enabled=case.dtype == "bf16_mixed")


def torch_adamw(model):
    betas = (ADAMW["beta1"], ADAMW["beta2"])
    rest = {name: ADAMW[name] for name in ("lr", "eps", "weight_decay")}
    return ref.AdamW(model.parameters(), betas=betas, variant="course2025", **rest)


def initial_state(case, normal):
    """Weights of the course's spread, from draw.normal; those of the norms are spread too, so that none is the
    identity."""
    with torch.device("meta"):
        model = ref.Transformer(*sizes_of(case))
    state = {}
    for name, p in model.named_parameters():
        mean, std = (1.0, 0.1) if p.dim() == 1 else (0.0, math.sqrt(2 / sum(p.shape)))
        state[name] = normal(name, p.shape, case.dtype, mean=mean, std=1.0 if "embeddings" in name else std)
    return state


# ---- exactness ----


def exactness(case, draw, c):
    """Logits, loss and gradients of the first step, and for f32 the weights after the last one."""
    state = initial_state(case, draw.normal)
    tokens = [
        draw.integers(f"tokens {i}", (case.batch, case.seq + 1), high=case.vocab) for i in range(case.steps)
    ]
    batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
    model = Tandem(case, c, case.attention, use="gradients" if case.in_turn else "training")
    kept = {"grad": {}, "weight": {}}
    updates = not case.in_turn  # where the model fills the GPU there is no room for moments

    def tandem():
        model.restart(state)
        outputs = {}
        for i, (ids, targets) in enumerate(batches):
            logits = model.forward(ids)
            if i == 0:
                outputs["logits"] = logits.clone()
            loss = model.loss(targets)
            model.backward()
            if i == 0:
                grads = state_dict(c, model.model, "grad")
                kept["grad"]["c"] = {name: g.to(DTYPES[case.dtype]) for name, g in grads.items()}
                outputs |= {"loss": loss} | gradients(kept["grad"]["c"])
            if updates:
                model.update()
        if updates and case.dtype == "f32":
            kept["weight"]["c"] = state_dict(c, model.model)
            outputs |= named("weight", kept["weight"]["c"])
        return outputs

    def eager():
        theirs = torch_model(case, state)
        optimizer = torch_adamw(theirs) if updates else None
        outputs = {}
        for i, (ids, targets) in enumerate(batches):
            if i == 0:
                outputs = first_step(theirs, ids, targets, autocast(case, draw.device))
                kept["grad"]["torch"] = {name: outputs[f"grad.{name}"] for name in state}
            else:
                theirs.zero_grad()
                with autocast(case, draw.device):
                    loss = ref.cross_entropy(theirs(ids), targets)
                loss.backward()
            if updates:
                optimizer.step()
        if updates and case.dtype == "f32":
            kept["weight"]["torch"] = theirs.state_dict()
            outputs |= named("weight", kept["weight"]["torch"])
        return outputs

    def truth():
        """In float64; of a step that is one of several only the logits and the loss, the rest being PyTorch's."""
        model = torch_model(case, state, torch.float64)
        if case.steps == 1:
            return first_step(model, *batches[0])
        with torch.no_grad():
            logits = model(batches[0][0])
            return {"logits": logits, "loss": ref.cross_entropy(logits, batches[0][1]).reshape(1)}

    return {
        "c": Side(tandem, open=model.open, close=model.close, record=lambda: {"values": furthest(kept)}),
        "torch_eager": eager,
        "truth": truth,
        "rule": {
            "loss": within(rel_l2=EACH_WITHIN[case.dtype]),
            "grad.*": within(rel_l2=EACH_WITHIN[case.dtype]),
            "weight.*": within(rel_l2=WEIGHTS_WITHIN),  # the truth has no weights: against PyTorch's
        },
    }


def furthest(kept):
    """Of the gradients and of the weights: the tensor furthest from PyTorch's, and how far in relative L2."""
    values = {}
    for what, sides in kept.items():
        if len(sides) == 2:
            mine, theirs = sides["c"], sides["torch"]
            far = {name: float((mine[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs}
            name = max(far, key=far.get)
            values |= {f"furthest_{what}": name, f"furthest_{what}_rel_l2": far[name]}
    return values


def first_step(model, ids, targets, context=None):
    with context or nullcontext():
        logits = model(ids)
        loss = ref.cross_entropy(logits, targets)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"logits": logits.detach(), "loss": loss.detach().reshape(1), **gradients(grads)}


def gradients(grads):
    """Each gradient and, of a model that is not large, all of them as one vector."""
    outputs = named("grad", grads)
    if sum(grad.numel() for grad in grads.values()) < 2**24:
        outputs["gradients"] = torch.cat([grad.flatten() for grad in grads.values()])
    return outputs


def named(prefix, tensors):
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


# ---- training on text ----


def corpus():
    """The bytes of the repository's hand-written Markdown files; reports are generated, and would change it."""
    found = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("[!.]*/**/*.md"))
    outside = [path for path in found if path.relative_to(ROOT).parts[0] not in ("build", "reports")]
    return torch.tensor(list(b"\n".join(path.read_bytes() for path in outside)), dtype=torch.int64)


def train(case, draw, c):
    """All sides from the same weights through the same batches. In mixed precision PyTorch in f32 shows what rounding
    alone does to a curve."""
    text = corpus()
    if len(text) <= case.context:
        raise ValueError(f"the Markdown files have {len(text)} bytes, a window needs {case.context + 1}")
    state = initial_state(case, draw.normal)
    starts = draw.integers("starts", (case.steps, case.batch), high=len(text) - case.context).cpu()
    windows = text[starts[:, :, None] + torch.arange(case.context + 1)].to(draw.device)
    batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in windows]
    curves = {}

    def side(impl, losses_of, **options):
        def call():
            curves[impl] = losses_of()
            return {"losses": curves[impl]}

        def record():
            values = {"bytes": len(text)}
            if "torch_eager" in curves:
                off = (curves[impl] - curves["torch_eager"]).abs()
                values |= {"largest": off.max().item(), "mean": off.mean().item()}
            return {"series": {"loss": curves[impl].tolist()}, "values": values}

        return Side(call, record=record, **options)

    model = Tandem(case, c, case.attention)

    def tandem():
        model.restart(state)
        found = []
        for ids, targets in batches:
            model.forward(ids)
            found.append(model.loss(targets))
            model.backward()
            model.update()
        return torch.cat(found)

    def by_graph():
        """The step captured on tensors that every batch is copied into."""
        ids, targets = (t.clone() for t in batches[0])
        graphed.begin(state)
        graphed.capture(ids, targets)
        graphed.begin(state)
        found = []
        for batch in batches:
            ids.copy_(batch[0])
            targets.copy_(batch[1])
            graphed.replay()
            found.append(graphed.last_loss())
        return torch.cat(found)

    def by_torch(context):
        model = torch_model(case, state)
        optimizer = torch_adamw(model)
        found = []
        for ids, targets in batches:
            model.zero_grad()
            with context:
                loss = ref.cross_entropy(model(ids), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.detach().reshape(1))
        return torch.cat(found)

    sides = {
        "c": side("c", tandem, open=model.open, close=model.close),
        "torch_eager": side("torch_eager", lambda: by_torch(autocast(case, draw.device))),
        "rule": {"losses": within(max_abs=LOSSES_WITHIN[case.dtype])},
    }
    if draw.device.type == "cuda":
        graphed = Tandem(case, c.side("c_graph"), case.attention, transient_gradients=True)
        sides["c_graph"] = side("c_graph", by_graph, open=graphed.open, close=graphed.close)
    if case.dtype == "bf16_mixed":
        sides["torch_eager_f32"] = side("torch_eager_f32", lambda: by_torch(nullcontext()))
    return sides


def report(page, records):
    exact = records.only("transformer_exactness")
    page.question("Does the model compute what PyTorch's does, from the same weights?")
    page.text(error_sentence(exact))
    rows = []
    for record in exact.only(impl="c").records:
        case, outputs = record["case"], record.get("error", {}).get("outputs", {})
        other = exact.only(impl="torch_eager", **case).records
        theirs = other[0].get("error", {}).get("outputs", {}) if other else {}
        row = {key: case[key] for key in ("size", "d_model", "heads", "layers", "seq", "dtype", "attention")}
        for name in ("logits", "loss"):
            row[name] = outputs.get(name, {}).get("rel_l2")
        mine, his = ({k: v for k, v in found.items() if k.startswith("grad.")} for found in (outputs, theirs))
        row["gradients"] = outputs.get("gradients", {}).get("rel_l2")
        row["PyTorch's"] = theirs.get("gradients", {}).get("rel_l2")
        row["worst gradient"] = max((v["rel_l2"] for v in mine.values()), default=None)
        row["PyTorch's worst"] = max((v["rel_l2"] for v in his.values()), default=None)
        for what, title in (("grad", "gradient"), ("weight", "weight")):
            row[f"{title} from PyTorch's"] = record.get("values", {}).get(f"furthest_{what}_rel_l2")
        rows.append(row)
    page.table(pd.DataFrame(rows))
    page.text(
        "Logits, loss and gradients of the first step: relative L2 errors against the same model in "
        "float64 (of small the gradients in the full profile only). The last two columns are the largest "
        "relative L2 distances of a gradient and of a weight tensor from PyTorch's, the weights after the "
        f"AdamW steps: one for the tiny models, {SMALL_STEPS} for `small`, and f32 only, for a bf16 weight "
        "moves by its own rounding."
    )
    for row in valued(exact, size="small", steps=SMALL_STEPS):
        far = row["furthest_weight_rel_l2"]
        page.text(
            f"After {row['steps']} AdamW steps on the `small` model (128.6 M parameters, batch "
            f"{row['batch']}, context {row['context']}) the weight furthest from PyTorch's is "
            f"{row['furthest_weight']}, at {far:.2g}: {'within' if far <= WEIGHTS_WITHIN else 'beyond'} "
            f"{WEIGHTS_WITHIN:g}. The furthest gradient of the first step is {row['furthest_grad']}, at "
            f"{row['furthest_grad_rel_l2']:.2g}."
        )
        page.verdict(
            "transformer_exactness", f"`small` after {row['steps']} steps: every weight within {far:.1g}."
        )

    report_training(page, records.only("transformer_training"))


def report_training(page, records):
    page.question("Does it learn the same, step by step?")
    runs = {}  # the case's keys: {impl: its record with a curve}
    for record in records.records:
        if "series" in record:
            runs.setdefault(tuple(record["case"].items()), {})[record["impl"]] = record
    rows, curves, apart = [], {}, {}
    for keys, sides in runs.items():
        case = dict(keys)
        name = f", seed {case['seed']}" if "seed" in case else ""
        theirs = sides["torch_eager"]["series"]["loss"] if "torch_eager" in sides else []
        for impl, record in sides.items():
            losses, values = record["series"]["loss"], record["values"]
            label = (f"{impl}, {case['attention']}" if impl == "c" else impl) + name
            curves[label] = (list(range(1, len(losses) + 1)), losses)
            row = {"side": label, "dtype": case["dtype"], "first": losses[0], "last": losses[-1]}
            if impl != "torch_eager" and theirs:
                row |= {"largest difference": values.get("largest"), "mean difference": values.get("mean")}
                distances = [abs(mine - other) or None for mine, other in zip(losses, theirs, strict=True)]
                apart[label] = (curves[label][0], distances)
            rows.append(row)
    page.table(pd.DataFrame(rows), digits={"first": 6, "last": 6} if rows else None)
    page.plot("loss", curves, x="step", y="loss", log=False, caption="Loss of the byte-level model")
    page.plot(
        "apart", apart, x="step", y="distance of the losses", caption="Distance of the losses from PyTorch's"
    )
    for row in valued(records):
        page.text(
            f"A byte-level model (vocab {row['vocab']}, d_model {row['d_model']}, {row['layers']} layers, "
            f"{row['heads']} heads, context {row['context']}, batch {row['batch']}) trained {row['steps']} steps on "
            f"the {row['bytes']} bytes of this repository's hand-written Markdown files, from the same weights and "
            f"with the same batches, in {row['dtype']}. "
            f"The largest difference of a loss is {row['largest']:.2g}; {LOSSES_WITHIN[row['dtype']]:g} is allowed."
            if row.get("largest") is not None
            else f"Of the run with {row['attention']} attention only C's side has ended."
        )
        if row.get("largest") is not None and row["dtype"] == "f32":
            page.verdict("transformer_training", f"{row['steps']} losses within {row['largest']:.1g}.")
    graphs = [sides for sides in runs.values() if {"c", "c_graph"} <= set(sides)]
    if graphs:
        same = sum(sides["c"]["series"]["loss"] == sides["c_graph"]["series"]["loss"] for sides in graphs)
        page.text(
            "c_graph replays a captured step: its losses are those of the steps queued one by one, bit for "
            f"bit, in {same} of {len(graphs)} runs."
        )
    report_noise(page, runs)


def report_noise(page, runs):
    """Mixed precision: C's distance from PyTorch's autocast beside that of PyTorch in f32, and of another seed."""
    mine, rounding, curves = [], [], []
    for sides in runs.values():
        if {"c", "torch_eager", "torch_eager_f32"} <= set(sides):
            mine.append(sides["c"]["values"]["mean"])
            rounding.append(sides["torch_eager_f32"]["values"]["mean"])
            curves.append(sides["torch_eager"]["series"]["loss"])
    if not mine:
        return
    figures = [f"C's curve is {m:.2g} from PyTorch's autocast in the mean of all steps, PyTorch's f32 curve {r:.2g}"
               for m, r in zip(mine, rounding, strict=True)]  # fmt: skip
    text = "; ".join(figures)
    if len(curves) > 1 and len(curves[0]) == len(curves[1]):
        seeds = sum(abs(a - b) for a, b in zip(*curves[:2], strict=True)) / len(curves[0])
        text += f". Two seeds of PyTorch's autocast are {seeds:.2g} apart"
    page.text(f"How much is noise: {text}.")
    page.verdict(
        "transformer_training",
        f"bf16_mixed: mean distance from autocast {max(mine):.1g}, that of PyTorch's f32 {max(rounding):.1g}.",
    )
