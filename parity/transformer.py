"""The model in C and in PyTorch from the same weights: logits, gradients, trained weights, and a training run.

`load_state_dict` and `state_dict` carry a PyTorch state dict into a td_transformer and back.
"""

import math
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import torch

from parity._pages import error_sentence, valued
from parity.core import Case, Side, grid, within
from ref import transformer as ref

DELIVERABLES = {
    "transformer_exactness": "The model: logits, loss, every gradient, and the weights after AdamW",
    "transformer_training": "Training a byte-level model on this repository's own text",
}

ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
SMALL_STEPS = 3
# Relative L2 of the loss and of each gradient tensor by itself. They are too few numbers for the rule of PyTorch's own
# error, which is that of another order of summation: the logits and all gradients together are held to that one.
EACH_WITHIN = {"f32": 1e-5, "bf16": 5e-2}
WEIGHTS_WITHIN = 1e-5  # relative L2, of every weight tensor after those steps
LOSSES_WITHIN = 1e-3  # of every loss of the training run
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ROOT = Path(__file__).resolve().parents[1]


def cases(profile, device):
    if device != "cpu":
        return
    tiny = [
        # head_dim 80; odd heads; an odd width of everything that may be odd.
        dict(d_model=160, d_ff=224, layers=2, heads=2, vocab=53, batch=3, context=40, seq=37),
        dict(d_model=48, d_ff=100, layers=3, heads=3, vocab=257, batch=2, context=64, seq=64),
        dict(d_model=18, d_ff=7, layers=2, heads=3, vocab=11, batch=5, context=9, seq=3),
    ]
    for keys in tiny:
        for way in grid(dtype=list(DTYPES), attention=["naive", "flash"]):
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
    steps = 200
    byte_level = dict(d_model=128, d_ff=512, layers=4, heads=4, vocab=256, batch=8, context=128)
    for attention in ["flash"] if profile == "quick" else ["flash", "naive"]:
        way = dict(dtype="f32", attention=attention)
        yield Case("transformer_training", size="bytes", steps=steps, seconds=45, **byte_level, **way)


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
        c.td_device_upload(c.device, parameter.data, tensor, tensor.nbytes)


def state_dict(c, model, dtype, what="data"):
    """The model's parameters, or with what="grad" their gradients, as new tensors by name."""
    state = {}
    for name, parameter in parameters(c, model).items():
        state[name] = torch.empty(shape_of(parameter), dtype=DTYPES[dtype])
        c.td_device_download(c.device, state[name], getattr(parameter, what), state[name].nbytes)
    return state


def shape_of(parameter):
    return torch.Size((parameter.rows, parameter.cols) if parameter.cols else (parameter.rows,))


class Tandem:
    """A td_transformer."""

    def __init__(self, case, c, attention, use="training"):
        self.c, self.case = c, case
        config = c.struct("td_transformer_config", case, size={}, attention=attention, use=use)
        self.model = c.create("td_transformer_create", c.device, config)
        self.adamw = c.struct("td_adamw", variant="course2025", **ADAMW)

    def restart(self, state):
        """These weights, no moments, step 0."""
        self.c.td_transformer_init(self.model, 0)
        load_state_dict(self.c, self.model, state)

    def forward(self, ids):
        logits = self.c.ffi.new("void **")
        self.c.td_transformer_forward(self.model, ids, *ids.shape, logits)
        return self.c.tensor(logits[0], (*ids.shape, self.case.vocab), self.case.dtype)

    def loss(self, targets):
        loss = torch.empty(1)
        self.c.td_transformer_loss(self.model, targets, loss)
        return loss

    def backward(self):
        self.c.td_transformer_backward(self.model, False, None, None)

    def update(self):
        self.c.td_transformer_adamw(self.model, self.adamw)


def sizes_of(case):
    return case.d_model, case.d_ff, case.layers, case.heads, case.vocab, case.context


def torch_model(case, state, dtype):
    """PyTorch's model with these weights. Drawing others first would take seconds at the size of `small`."""
    with patch.object(ref, "truncated_normal", lambda rows, cols, std: torch.empty(rows, cols)):
        model = ref.Transformer(*sizes_of(case))
    model.load_state_dict(state)
    return model.to(dtype)


def torch_adamw(model):
    betas = (ADAMW["beta1"], ADAMW["beta2"])
    rest = {name: ADAMW[name] for name in ("lr", "eps", "weight_decay")}
    return ref.AdamW(model.parameters(), betas=betas, variant="course2025", **rest)


def initial_state(case, draw):
    """Weights of the course's spread; those of the norms are spread too, so that none is the identity."""
    with torch.device("meta"):
        model = ref.Transformer(*sizes_of(case))
    state = {}
    for name, p in model.named_parameters():
        mean, std = (1.0, 0.1) if p.dim() == 1 else (0.0, math.sqrt(2 / sum(p.shape)))
        state[name] = draw.normal(
            name, p.shape, case.dtype, mean=mean, std=1.0 if "embeddings" in name else std
        )
    return state


# ---- exactness ----


def exactness(case, draw, c):
    """Logits, loss and gradients of the first step, and for f32 the weights after the last one."""
    state = initial_state(case, draw)
    tokens = [
        draw.integers(f"tokens {i}", (case.batch, case.seq + 1), high=case.vocab) for i in range(case.steps)
    ]
    batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
    model = Tandem(case, c, case.attention)
    kept = {"grad": {}, "weight": {}}

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
                kept["grad"]["c"] = state_dict(c, model.model, case.dtype, "grad")
                outputs |= {"loss": loss} | gradients(kept["grad"]["c"])
            model.update()
        if case.dtype == "f32":
            kept["weight"]["c"] = state_dict(c, model.model, case.dtype)
            outputs |= named("weight", kept["weight"]["c"])
        return outputs

    def eager():
        theirs = torch_model(case, state, DTYPES[case.dtype])
        optimizer = torch_adamw(theirs)
        outputs = {}
        for i, (ids, targets) in enumerate(batches):
            if i == 0:
                outputs = first_step(theirs, ids, targets)
                kept["grad"]["torch"] = {name: outputs[f"grad.{name}"] for name in state}
            else:
                theirs.zero_grad()
                ref.cross_entropy(theirs(ids), targets).backward()
            optimizer.step()
        if case.dtype == "f32":
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
        "c": Side(tandem, record=lambda: {"values": furthest(kept)}),
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


def first_step(model, ids, targets):
    logits = model(ids)
    loss = ref.cross_entropy(logits, targets)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
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
    """Both sides from the same weights through the same batches."""
    text = corpus()
    if len(text) <= case.context:
        raise ValueError(f"the Markdown files have {len(text)} bytes, a window needs {case.context + 1}")
    state = initial_state(case, draw)
    starts = draw.integers("starts", (case.steps, case.batch), high=len(text) - case.context)
    windows = starts[:, :, None] + torch.arange(case.context + 1)
    batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text[windows]]
    curves = {}

    def side(impl, losses_of):
        def call():
            curves[impl] = losses_of()
            return {"losses": curves[impl]}

        def record():
            off = (
                (curves[impl] - curves["torch_eager"]).abs().max().item() if "torch_eager" in curves else None
            )
            return {"series": {"loss": curves[impl].tolist()}, "values": {"bytes": len(text), "largest": off}}

        return Side(call, record=record)

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

    def eager():
        model = torch_model(case, state, torch.float32)
        optimizer = torch_adamw(model)
        found = []
        for ids, targets in batches:
            model.zero_grad()
            loss = ref.cross_entropy(model(ids), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.detach().reshape(1))
        return torch.cat(found)

    return {
        "c": side("c", tandem),
        "torch_eager": side("torch_eager", eager),
        "rule": {"losses": within(max_abs=LOSSES_WITHIN)},
    }


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
        "Logits, loss and gradients of the first step: relative L2 errors against the same model in float64 (of small "
        "the gradients in the full profile only). The last two columns are the largest relative L2 distances of a "
        "gradient and of a weight tensor from PyTorch's, the weights after the AdamW steps: one for the tiny models, "
        f"{SMALL_STEPS} for `small`, and f32 only, for a bf16 weight moves by its own rounding."
    )
    for row in valued(exact, size="small", steps=SMALL_STEPS):
        far = row["furthest_weight_rel_l2"]
        page.text(
            f"After {row['steps']} AdamW steps on the `small` model (128.6 M parameters, batch {row['batch']}, context "
            f"{row['context']}) the weight furthest from PyTorch's is {row['furthest_weight']}, at {far:.2g}: "
            f"{'within' if far <= WEIGHTS_WITHIN else 'beyond'} {WEIGHTS_WITHIN:g}. The furthest gradient of the first "
            f"step is {row['furthest_grad']}, at {row['furthest_grad_rel_l2']:.2g}."
        )
        page.verdict(
            "transformer_exactness", f"`small` after {row['steps']} steps: every weight within {far:.1g}."
        )

    page.question("Does it learn the same, step by step?")
    training = records.only("transformer_training")
    rows, curves = [], {}
    for impl, case, losses in training.series("loss"):
        label = f"{impl}, {case['attention']}" if impl == "c" else impl
        curves[label] = (list(range(1, len(losses) + 1)), losses)
        off = (
            training.value("values.largest", impl=impl, attention=case["attention"]) if impl == "c" else None
        )
        rows.append({"impl": label, "first": losses[0], "last": losses[-1], "largest difference": off})
    page.table(pd.DataFrame(rows), digits={"first": 6, "last": 6} if rows else None)
    page.plot("loss", curves, x="step", y="loss", log=False, caption="Loss of the byte-level model")
    theirs = curves.get("torch_eager", ([], []))[1]
    apart = {
        label: (steps, [abs(mine - other) or None for mine, other in zip(losses, theirs, strict=True)])
        for label, (steps, losses) in curves.items()
        if label != "torch_eager" and theirs
    }
    page.plot(
        "apart", apart, x="step", y="distance of the losses", caption="Distance of C's losses from PyTorch's"
    )
    for row in valued(training):
        page.text(
            f"A byte-level model (vocab {row['vocab']}, d_model {row['d_model']}, {row['layers']} layers, "
            f"{row['heads']} heads, context {row['context']}, batch {row['batch']}) trained {row['steps']} steps on "
            f"the {row['bytes']} bytes of this repository's hand-written Markdown files, from the same weights and "
            "with the same batches. "
            f"The largest difference of a loss is {row['largest']:.2g}; {LOSSES_WITHIN:g} is allowed."
        )
        page.verdict("transformer_training", f"{row['steps']} losses within {row['largest']:.1g}.")
