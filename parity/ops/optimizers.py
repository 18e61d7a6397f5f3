"""Optimizers and the norm of the gradients, with the sides of each."""

import functools

import torch

from parity.core import Side, sampled, within
from parity.ops.sides import compiled, forward_sides, into, rounded, wide
from parity.shared.model import ADAMW, forget
from ref import ops as ref

# Of how far a timed step moves weights, in relative L2. In bf16 few moves are larger than a rounding.
MOVED_WITHIN = {"f32": 1e-3, "bf16": 0.05}


def adamw_of(case):
    return ADAMW | {key: case[key] for key in ADAMW if key in case}


def placed(c, struct):
    """A struct of C's in the device's memory, where updates read it."""
    nbytes = c.ffi.sizeof(struct[0])
    there = c.ffi.cast(c.ffi.typeof(struct), c.work(nbytes))
    c.td_assign(c.device, there, struct, nbytes)
    return there


def state_of(c, step):
    return c.struct("td_update_state", step=step, gain=1.0)


def addresses(c, tensors):
    return {name: c.ffi.cast("void *", x.data_ptr()) for name, x in tensors.items()}


def moments_of(case, draw):
    if case.step > 1:
        return draw.normal("m", (case.count,), "f32", std=0.3), draw.uniform("v", (case.count,), "f32")
    return tuple(torch.zeros(case.count, device=draw.device) for _ in range(2))


def sides_of(case, begin, step, answer, function, inputs, ways):
    """C's step from these inputs, and PyTorch's. If steps are timed, each goes on from the one before. After the last,
    moments and how far weights moved are judged, a sample of each. `ways`: PyTorch's optimizers by side."""
    if "time" not in case.measure:
        return forward_sides(lambda: begin() or step() or answer(), function, *inputs)
    p = inputs[0]

    def moved(found):
        return found | {"p": found["p"].double() - sampled(p).double()}

    def truth():
        found = function(*(wide(sampled(x)) for x in inputs))
        return moved(found | {"p": found["p"].to(p.dtype)})

    def mine():
        return moved({name: sampled(x) for name, x in answer().items()})

    sides = {"c": Side(step, open=begin, renew=begin, answer=mine), "truth": truth}
    for impl, way in ways.items():
        call, weight, again = torch_step(*inputs[:2], **way)
        theirs = functools.partial(lambda weight: moved({"p": sampled(weight)}), weight)
        sides[impl] = Side(call, renew=again, answer=theirs)
    return sides | {"rule": {"p": within(rel_l2=MOVED_WITHIN[case.dtype])}}


def torch_step(p, g, cls=torch.optim.AdamW, copy=None, compiling=False, **how):
    """PyTorch's step on weights and gradients of one type, its weights, and what begins again. `copy` gets the weights
    for the next forward."""
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g.to(p.dtype)
    optimizer = cls([weight], **how)
    step = compiled(optimizer.step) if compiling else optimizer.step

    def call():
        step()
        return {} if copy is None else {"copy": copy.copy_(weight.detach())}

    def begin():
        weight.data.copy_(p)
        weight.grad.copy_(g)
        forget(optimizer)

    return call, weight, begin


def adamw_step(case, draw, c):
    p, g = draw.normal("p", (case.count,), case.dtype), draw.normal("g", (case.count,), case.dtype)
    m, v = moments_of(case, draw)
    ours = {"p": p.clone(), "m": m.clone(), "v": v.clone()}
    tensors = c.struct("td_update_tensors", case, **addresses(c, {**ours, "g": g}))
    adamw, state = placed(c, c.struct("td_adamw", case, **adamw_of(case))), placed(c, state_of(c, case.step))

    def begin():
        for mine, before in zip(ours.values(), (p, m, v), strict=True):
            mine.copy_(before)

    def step():
        c.td_adamw_update(c.device, adamw, state, tensors)

    def function(p, g, m, v):
        found = ref.adamw_step(p, g, m, v, case.step, variant=case.variant, **adamw_of(case))
        return dict(zip("pmv", found, strict=True))

    ways = {"torch_eager": dict(foreach=True), "torch_library": dict(fused=True)}
    ways["torch_compile"] = dict(compiling=True, foreach=True, capturable=p.is_cuda)
    return sides_of(case, begin, step, lambda: ours, function, (p, g, m, v), ways)


def sgd_step(case, draw, c):
    p, g = draw.normal("p", (case.count,), case.dtype), draw.normal("g", (case.count,), case.dtype)
    ours, lr = p.clone(), float(torch.tensor(ADAMW["lr"]))  # as f32 holds it
    tensors = c.struct("td_update_tensors", case, **addresses(c, {"p": ours, "g": g}))
    settings, state = placed(c, c.struct("td_sgd", lr=lr)), placed(c, state_of(c, 1))

    def begin():
        ours.copy_(p)

    def step():
        c.td_sgd_update(c.device, settings, state, tensors)

    def function(p, g):
        return {"p": ref.sgd_step(p, g, lr)}

    ways = {"torch_eager": dict(cls=torch.optim.SGD, lr=lr, foreach=True)}
    return sides_of(case, begin, step, lambda: {"p": ours}, function, (p, g), ways)


def global_norm(case, draw, c):
    g = draw.normal("g", (case.count,), case.dtype)
    norm = draw.poisoned((1,), "f32")
    dtype = c.enum("td_dtype", case.dtype)
    work = c.work(c.value("td_global_norm_work_bytes", c.device, case.count, dtype))
    tandem = into(c, "td_global_norm", {"norm": norm}, case.count, dtype, g, norm, work)

    def function(g):
        return {"norm": torch.linalg.vector_norm(ref.at_least_f32(g)).reshape(1)}

    return forward_sides(tandem, function, g)


def update_clip(case, draw, c):
    """The norm of the gradients and the gain that clips them, which SGD from 0 with a rate of -1 shows."""
    g = draw.normal("g", (case.count,), case.dtype)
    norm, ours = draw.poisoned((1,), "f32"), draw.poisoned((case.count,), "f32")
    dtype = c.enum("td_dtype", case.dtype)
    work = c.work(c.value("td_global_norm_work_bytes", c.device, case.count, dtype))
    types = dict(count=case.count, dtype="f32", grad_dtype=case.dtype)
    tensors = c.struct("td_update_tensors", **types, **addresses(c, {"p": ours, "g": g}))
    sgd, state = placed(c, c.struct("td_sgd", lr=-1.0)), placed(c, state_of(c, 0))

    def tandem():
        ours.zero_()
        c.td_update_begin(c.device, state, 1.0)
        c.td_global_norm(c.device, case.count, dtype, g, norm, work)
        c.td_update_clip(c.device, case.max_norm, norm, state)
        c.td_sgd_update(c.device, sgd, state, tensors)
        return {"clipped": ours}

    def function(g):
        wide = ref.at_least_f32(g)
        # As torch.nn.utils.clip_grad_norm_ scales them.
        return {"clipped": wide * (case.max_norm / (torch.linalg.vector_norm(wide) + 1e-6)).clamp(max=1.0)}

    return forward_sides(tandem, function, g)


def adamw_update(case, draw, c):
    """AdamW on f32 weights as two planes. The upper plane is the bf16 copy. on_device: the device counts steps."""
    p, g = draw.normal("p", (case.count,), "f32"), draw.normal("g", (case.count,), case.grad_dtype)
    m, v = moments_of(case, draw)
    ours = {name: x.clone() for name, x in zip("pmv", (p, m, v), strict=True)}
    ours["copy"], low = draw.poisoned((case.count,), "bf16"), draw.poisoned((case.count,), "bf16")
    there = {"p": ours["copy"], "low": low, "g": g, "m": ours["m"], "v": ours["v"]}
    tensors = c.struct("td_update_tensors", case, **addresses(c, there))
    adamw = placed(c, c.struct("td_adamw", case, **adamw_of(case)))
    start = state_of(c, case.step - 1 if case.on_device else case.step)
    state = placed(c, start)

    def begin():
        c.td_assign(c.device, state, start, c.ffi.sizeof(start[0]))
        ours["m"].copy_(m)
        ours["v"].copy_(v)
        c.td_split(c.device, case.count, p, ours["copy"], low)

    def step():
        if case.on_device:
            c.td_update_begin(c.device, state, 1.0)
        c.td_adamw_update(c.device, adamw, state, tensors)

    def joined():
        c.td_join(c.device, case.count, ours["copy"], low, ours["p"])
        return ours

    def function(p, g, m, v):
        found = ref.adamw_step(p, g, m, v, case.step, variant=case.variant, **adamw_of(case))
        return {**dict(zip("pmv", found, strict=True)), "copy": rounded(found[0], torch.bfloat16)}

    ways = {"torch_eager": "foreach", "torch_library": "fused"}
    ways = {impl: {how: True, "copy": torch.empty_like(ours["copy"])} for impl, how in ways.items()}
    return sides_of(case, begin, step, joined, function, (p, g, m, v), ways)


def cosine_schedule(case, draw, c):
    """The learning rate of every step to beyond the end."""
    keys = (case.max, case.min, case.warmup, case.end)
    steps = range(case.end + 3)
    lrs = torch.tensor([c.value("td_cosine_schedule", t, *keys) for t in steps], dtype=torch.float64)
    exact = torch.tensor([ref.cosine_schedule(t, *keys) for t in steps], dtype=torch.float64)
    return {"c": {"lr": lrs}, "truth": {"lr": exact}, "rule": {"lr": within(max_abs=1e-15)}}
