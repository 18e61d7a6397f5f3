"""The model in C and in PyTorch from the same weights: logits, gradients, trained weights, and a training run."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from parity.core import DTYPES, Case, Side, amid, grid, within
from parity.shared.model import (
    ADAMW,
    AS_TIMED,
    TandemTrainer,
    autocast,
    c_switches,
    draw_batch,
    ids_and_targets,
    initial_state,
    state_dict,
    torch_adamw,
    torch_model,
    torch_options,
    torch_switches,
    trained_alone,
    updates,
)
from parity.shared.sizes import extents
from parity.transformer import rules
from parity.transformer.page import report
from ref import transformer as ref

__all__ = ["cases", "report", "run"]

TYPES = {"cpu": ["f32", "bf16"], "cuda": ["f32", "tf32", "bf16", "bf16_mixed"]}
ROOT = Path(__file__).resolve().parents[2]


def cases(profile, device):
    quick = (profile, device) == ("quick", "cpu")
    tiny = [
        # head_dim 80; odd heads; an odd width of everything that may be odd, and few tokens.
        dict(d_model=160, d_ff=224, layers=2, heads=2, vocab=53, batch=3, context=40, seq=37),
        dict(d_model=48, d_ff=100, layers=3, heads=3, vocab=257, batch=2, context=64, seq=64),
        dict(d_model=18, d_ff=7, layers=2, heads=3, vocab=11, batch=5, context=9, seq=3),
    ]
    for keys in tiny:
        for way in grid(dtype=TYPES[device], attention=["naive", "flash"]):
            if quick and (way["dtype"] == "bf16") != (way["attention"] == "flash"):
                continue
            how = dict(seconds=0.5 if device == "cpu" else 0.2, config=configs(way["dtype"]))
            yield Case("transformer_exactness", size="tiny", steps=1, **how, **keys, **way)
    yield from several_steps_cases()
    size = "laptop" if quick else "small"
    small = extents(size)[0] | dict(batch=4 if profile == "full" or device == "cuda" else 1, context=128)
    small["seq"] = 32 if quick else 128
    # One step has its gradients compared with float64 too, which takes minutes with `small` on a CPU.
    counts = [(1, 5)] if quick else [(rules.SMALL_STEPS, 15 * small["batch"])]
    for steps, seconds in counts + ([(1, 240)] if profile == "full" else []):
        how = dict(seconds=seconds if device == "cpu" else 5, needs_bytes=12 * 2**30, config=configs("f32"))
        keys = dict(size=size, steps=steps, dtype="f32", attention="naive", **small)
        yield Case("transformer_exactness", **keys, **how)
    if device == "cuda":
        yield from gpu_cases(profile, small)
        return
    steps = {"quick": 20, "standard": 100, "full": 200}[profile]
    byte_level = dict(d_model=128, d_ff=512, layers=4, heads=4, vocab=256, batch=8, context=128)
    for attention in ["flash", "naive"] if profile == "full" else ["flash"]:
        way = dict(dtype="f32", attention=attention, config=configs("f32"), seconds=0.22 * steps)
        yield Case("transformer_training", size="bytes", steps=steps, **byte_level, **way)


def several_steps_cases():
    """A group without decay, with an eps so large that AdamW makes no update of noise; micro-batches, and clipping,
    each alone, because clipping hides a wrong factor of gradients; and checkpoints of which the second begins after
    layer 0."""
    keys = dict(size="tiny", d_model=48, d_ff=100, heads=3, vocab=57, batch=2, context=12, seq=12, steps=3)
    for span, way in (
        (2, dict(optimizer="adamw", lr=0.01, eps=1e-3, weight_decay=0.5, decay_of_norms=0.0)),
        (3, dict(optimizer="sgd", lr=0.5, micro_batches=3)),
        (3, dict(optimizer="sgd", lr=0.5, clip=0.5)),
    ):
        update = "along" if span == 2 else "after"
        config = configs("f32") | {"c": c_switches(keep="inputs", checkpoint_layers=span, update=update)}
        how = dict(seconds=0.5, config=config, layers=2 * span + 1, dtype="f32", attention="flash")
        yield Case("transformer_exactness", **{"pass": "steps"}, **keys, **how, **way)


def gpu_cases(profile, small):
    """`small` in every dtype with its gradients; the largest model; and training in mixed precision."""
    for keys in grid(dtype=["tf32", "bf16_mixed"], attention=["naive", "flash"]):
        how = dict(seconds=5, config=configs(keys["dtype"]))
        yield Case("transformer_exactness", size="small", steps=1, **how, **small, **keys)
    # The step as it is timed: large weights are updated by the kernel that forms their gradients.
    timed = small | dict(context=512, seq=512, dtype="bf16_mixed", attention="flash") | {"pass": "step"}
    config = configs("bf16_mixed") | {"c_graph_overlap": AS_TIMED}
    yield Case("transformer_exactness", size="small", steps=1, seconds=10, config=config, **timed)
    if profile == "full":
        largest = extents("2.7B")[0]
        for dtype in ["f32", "bf16_mixed"]:
            # Gradients of all sides and the truth are held at once, 16 bytes a parameter, and its weights.
            how = dict(seconds=25, needs_bytes=100 * 2**30, in_turn=True)
            how["config"] = configs(dtype, updates=False)
            keys = dict(batch=1, context=128, seq=128, dtype=dtype, attention="flash")
            yield Case("transformer_exactness", size="2.7B", steps=1, **how, **largest, **keys)
    byte_level = dict(d_model=512, d_ff=2048, layers=8, heads=8, vocab=256, batch=8, context=128)
    way = dict(dtype="bf16_mixed", attention="flash", seed=1)
    config = configs("bf16_mixed") | {
        "c_graph": c_switches(graph=True, gradients="transient"),
        "c_graph_overlap": AS_TIMED,
        rules.ROUNDING: torch_switches("f32"),
        rules.OTHER_SEED: torch_switches("bf16_mixed"),
    }
    how = dict(seconds=45, config=config)
    yield Case("transformer_training", size="bytes", steps=200, **how, **byte_level, **way)


def configs(dtype, updates=True):
    """The switches of the two sides that every case has."""
    mine = c_switches() if updates else c_switches(update="none")
    return {"c": mine, "torch_eager": torch_switches(dtype)}


def runs(case):
    return ["train"]


def run(case, draw, c):
    if case.deliverable == "transformer_training":
        return train(case, draw, c)
    if case.get("pass") == "steps":
        return several_steps(case, draw, c)
    return one_step(case, draw, c) if case.get("pass") == "step" else exactness(case, draw, c)


def exactness(case, draw, c):
    """Logits, loss and gradients of the first step, and for f32 the weights after the last one."""
    # The CPU would draw the largest model for as long as everything else takes.
    state = initial_state(case, draw.quickly if case.in_turn else draw.normal)
    batches = [draw_batch(case, draw, f"tokens {i}") for i in range(case.steps)]
    model = TandemTrainer(case, c, case.attention, case.config["c"])
    kept = {"grad": {}, "weight": {}}
    gradients_by_rule = case.steps == 1 and not case.in_turn
    updates = not case.in_turn  # if the model fills the GPU, moments do not fit

    def tandem():
        model.begin(state)
        outputs = {}
        for i, (ids, targets) in enumerate(batches):
            logits = model.logits(ids, targets)
            if i == 0:
                outputs["logits"] = logits.clone()
            loss = model.loss()
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
            theirs.zero_grad()
            found = both_passes(theirs, ids, targets, autocast(case, draw.device))
            if i == 0:
                outputs = found
                kept["grad"]["torch"] = {name: outputs[f"grad.{name}"] for name in state}
            if updates:
                optimizer.step()
        if updates and case.dtype == "f32":
            kept["weight"]["torch"] = theirs.state_dict()
            outputs |= named("weight", kept["weight"]["torch"])
        return outputs

    def first(model, context, with_gradients):
        """The first step, or its logits and its loss alone."""
        if with_gradients:
            return both_passes(model, *batches[0], context)
        with torch.no_grad(), context:
            logits = model(batches[0][0])
            return {"logits": logits, "loss": ref.cross_entropy(logits, batches[0][1]).reshape(1)}

    def equal():
        """With its sums in another order."""
        return first(torch_model(case, state), autocast(case, draw.device), gradients_by_rule)

    def truth():
        """Of a step that is one of several the gradients are PyTorch's."""
        return first(torch_model(case, state, torch.float64), nullcontext(), case.steps == 1)

    sides = {
        "c": Side(tandem, open=model.open, close=model.close, record=lambda: {"values": furthest(kept)}),
        "torch_eager": eager,
        "truth": truth,
        "equal": equal,
        # The truth has no weights: they are held to PyTorch's.
        "rule": {"weight.*": within(rel_l2=rules.WEIGHTS_WITHIN)},
    }
    if not gradients_by_rule:
        sides["rule"]["grad.*"] = within(rel_l2=rules.EACH_WITHIN[case.dtype])
    return sides


def one_step(case, draw, c):
    """One whole step in mixed precision, each way: logits, loss, first moments, which show the gradients, and how far
    each weight moved. AdamW's first step moves a weight fully even if rounding decides the sign of its gradient. So
    updates are held to the truth's within UPDATES_WITHIN."""
    state = initial_state(case, draw.normal)
    batch = draw_batch(case, draw, "tokens 0")

    def outputs_of(logits, loss, moments, weights):
        return {"logits": logits, "loss": loss} | named("moment", moments) | updates(state, weights)

    def tandem(impl, session):
        model = TandemTrainer(case, session, case.attention, case.config[impl])

        def call():
            model.begin(state)
            logits = model.logits(*batch).clone()
            for _ in range(2):  # the second step is captured, if steps are
                model.step(*batch)
            model.begin(state)
            model.step(*batch)
            return outputs_of(logits, model.loss(), model.moments(), state_dict(session, model.model))

        return Side(call, open=model.open, close=model.close)

    def by_torch(dtype=None, context=None):
        model = torch_model(case, state, dtype)
        optimizer = torch_adamw(model)
        found = both_passes(model, *batch, context)
        optimizer.step()
        moments = {name: optimizer.state[p]["m"] for name, p in model.named_parameters()}
        return outputs_of(found["logits"], found["loss"], moments, model.state_dict())

    sides = {impl: tandem(impl, c.side(impl)) for impl in case.config if not impl.startswith("torch")}
    return sides | {
        "torch_eager": lambda: by_torch(context=autocast(case, draw.device)),
        "truth": lambda: by_torch(torch.float64),
        "rule": {"update.*": within(rel_l2=rules.UPDATES_WITHIN)},
    }


def several_steps(case, draw, c):
    """The losses of some whole steps, and how far each weight moved."""
    state = initial_state(case, draw.normal)
    batches = [draw_batch(case, draw, f"tokens {i}") for i in range(case.steps)]
    adamw = ADAMW | {"variant": "course2025"} | {key: case[key] for key in ADAMW if key in case}
    hyper = {"kind": case.optimizer, "adamw": adamw, "sgd": {"lr": case.lr}}
    model = TandemTrainer(case, c, case.attention, case.config["c"], hyper=hyper)
    if "decay_of_norms" in case:
        model.groups = groups_of(case, c, model.config)  # a struct owns no memory that it points to
        model.config.groups, model.config.group_count = model.groups, len(model.groups)

    def outputs_of(losses, weights, dtype):
        return {"losses": torch.tensor(losses, dtype=dtype)} | updates(state, weights, dtype)

    def tandem():
        model.begin(state)
        losses = []
        for batch in batches:
            model.step(*batch)
            losses.append(float(model.loss()))
        return outputs_of(losses, state_dict(c, model.model), torch.float32)

    def by_torch(dtype=torch.float32):
        of_one_rank, optimizer = [[batch] for batch in batches], partial(torch_optimizer, adamw=adamw)
        losses, weights = trained_alone(case, state, of_one_rank, optimizer, dtype)
        return outputs_of([loss for (loss,) in losses], weights, dtype)

    return {
        "c": Side(tandem, open=model.open, close=model.close),
        "torch_eager": by_torch,
        "truth": lambda: by_torch(torch.float64),
        "equal": by_torch,
    }


def groups_of(case, c, config):
    """Three of C's: the norms lie between the other weights and the head, and have a decay of their own."""
    ends = [
        c.value("td_transformer_parameter_of", c.ffi.addressof(config.model.size), config.model.precision, i)
        for i in (8, 9 * case.layers + 2)
    ]
    bounds = [0, *(p.offset for p in ends), ends[1].offset + ends[1].numel]
    groups = c.ffi.new("td_optimizer_group[]", 3)
    for group, begin, end in zip(groups, bounds, bounds[1:], strict=False):
        group.range.begin, group.range.end, group.hyper = begin, end, config.hyper
    groups[1].hyper.adamw.weight_decay = case.decay_of_norms
    return groups


def torch_optimizer(case, parameters, adamw):
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=case.lr)
    norms = [p for p in parameters if p.dim() == 1]
    others = [p for p in parameters if p.dim() > 1]
    groups = [{"params": others}, {"params": norms, "weight_decay": case.decay_of_norms}]
    return ref.AdamW(groups, variant=adamw["variant"], **torch_options(adamw))


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


def both_passes(model, ids, targets, context=None):
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


def corpus():
    """The bytes of the repository's hand-written Markdown files; reports are generated, and would change it."""
    found = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("[!.]*/**/*.md"))
    outside = [path for path in found if path.relative_to(ROOT).parts[0] not in ("build", "reports")]
    return torch.tensor(list(b"\n".join(path.read_bytes() for path in outside)), dtype=torch.int64)


def train(case, draw, c):
    """All sides from the same weights through the same batches. In mixed precision two further curves of PyTorch show
    how much is noise: from weights of another seed, within whose distance C has to stay, and in f32 from the same
    weights, which is what rounding does, within ROUNDINGS times whose distance it has to stay as well."""
    text = corpus()
    if len(text) <= case.context:
        raise ValueError(f"the Markdown files have {len(text)} bytes, a window needs {case.context + 1}")
    state = initial_state(case, draw.normal)
    starts = draw.integers("starts", (case.steps, case.batch), high=len(text) - case.context).cpu()
    windows = text[starts[:, :, None] + torch.arange(case.context + 1)].to(draw.device)
    batches = [*map(ids_and_targets, windows)]
    curves = {}
    mixed = case.dtype == "bf16_mixed"

    def side(impl, losses_of, **options):
        def call():
            curves[impl] = losses_of()
            outputs = {"losses": curves[impl]}
            if mixed:
                # The same curve once more, to be judged by the second rule; the side whose distance is that
                # rule's measure is moved away from PyTorch's autocast to the edge of the band.
                base = curves.get("torch_eager", curves[impl])
                edge = base + rules.ROUNDINGS * (curves[impl] - base)
                judged = edge if impl == rules.ROUNDING else curves[impl]
                outputs[f"losses_{rules.ROUNDINGS}_roundings"] = judged
            return outputs

        def record():
            values = {"bytes": len(text)}
            if "torch_eager" in curves:
                off = (curves[impl] - curves["torch_eager"]).abs()
                values |= {"largest": off.max().item(), "mean": off.mean().item()}
            return {"series": {"loss": curves[impl].tolist()}, "values": values}

        return Side(call, record=record, **options)

    def by_steps(impl, model):
        model.begin(state)
        found = []
        for ids, targets in batches:
            model.step(ids, targets)
            found.append(model.loss())
        return torch.cat(found)

    def by_torch(context, state):
        model = torch_model(case, state)
        optimizer = torch_adamw(model)
        found = []
        for batch in batches:
            model.zero_grad()
            found.append(both_passes(model, *batch, context)["loss"])
            optimizer.step()
        return torch.cat(found)

    def tandem(impl, session):
        model = TandemTrainer(case, session, case.attention, case.config[impl])
        return side(impl, lambda: by_steps(impl, model), open=model.open, close=model.close)

    sides = {
        "c": tandem("c", c),
        "torch_eager": side("torch_eager", lambda: by_torch(autocast(case, draw.device), state)),
        "rule": {
            f"losses_{rules.ROUNDINGS}_roundings": amid(rules.ROUNDING),
            "losses": amid(rules.OTHER_SEED) if mixed else within(max_abs=rules.LOSSES_WITHIN),
        },
    }
    if draw.device.type == "cuda":
        sides |= {impl: tandem(impl, c.side(impl)) for impl in ("c_graph", "c_graph_overlap")}
    if mixed:

        def anew(name, *how, **more):
            return draw.normal(f"{name} of seed {case.seed + 1}", *how, **more)

        other = initial_state(case, anew)
        sides[rules.ROUNDING] = side(rules.ROUNDING, lambda: by_torch(nullcontext(), state))
        sides[rules.OTHER_SEED] = side(rules.OTHER_SEED, lambda: by_torch(autocast(case, draw.device), other))
    return sides
