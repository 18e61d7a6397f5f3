"""Optimizers and the norm of the gradients, with the sides of each."""

import torch

from parity.core import Side, within
from parity.ops.sides import compiled, forward_sides, into, rounded
from parity.shared.model import ADAMW
from ref import ops as ref


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


def adamw_step(case, draw, c):
    p, g = draw.normal("p", (case.count,), case.dtype), draw.normal("g", (case.count,), case.dtype)
    if case.step > 1:
        m, v = draw.normal("m", (case.count,), "f32", std=0.3), draw.uniform("v", (case.count,), "f32")
    else:
        m, v = (torch.zeros(case.count, device=draw.device) for _ in range(2))
    ours = {"p": p.clone(), "m": m.clone(), "v": v.clone()}
    tensors = c.struct("td_update_tensors", case, **addresses(c, {**ours, "g": g}))
    adamw, state = placed(c, c.struct("td_adamw", case, **adamw_of(case))), placed(c, state_of(c, case.step))

    def tandem():
        if "time" not in case.measure:
            for mine, before in zip(ours.values(), (p, m, v), strict=True):
                mine.copy_(before)
        c.td_adamw_update(c.device, adamw, state, tensors)
        return ours

    def torch_adamw(p, g, m, v):
        found = ref.adamw_step(p, g, m, v, case.step, variant=case.variant, **adamw_of(case))
        return dict(zip("pmv", found, strict=True))

    if "time" not in case.measure:
        return forward_sides(tandem, torch_adamw, p, g, m, v)
    return {
        "c": Side(tandem, steps=True),
        "torch_eager": torch_step(p, g, foreach=True),
        "torch_library": torch_step(p, g, fused=True),
        "torch_compile": torch_step(p, g, compiling=True, foreach=True, capturable=p.is_cuda),
    }


def torch_step(p, g, cls=torch.optim.AdamW, copy=None, compiling=False, **how):
    """PyTorch's optimizer on weights and gradients of one type. `copy` gets the weights for the next forward."""
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g.to(p.dtype)
    step = cls([weight], **how).step
    step = compiled(step) if compiling else step

    def call():
        step()
        return {"p": weight.detach()} | ({} if copy is None else {"copy": copy.copy_(weight.detach())})

    return call


def sgd_step(case, draw, c):
    p, g = draw.normal("p", (case.count,), case.dtype), draw.normal("g", (case.count,), case.dtype)
    ours, lr = p.clone(), float(torch.tensor(ADAMW["lr"]))  # as f32 holds it
    tensors = c.struct("td_update_tensors", case, **addresses(c, {"p": ours, "g": g}))
    settings, state = placed(c, c.struct("td_sgd", lr=lr)), placed(c, state_of(c, 1))

    def tandem():
        if "time" not in case.measure:
            ours.copy_(p)
        c.td_sgd_update(c.device, settings, state, tensors)
        return {"p": ours}

    if "time" not in case.measure:
        return forward_sides(tandem, lambda p, g: {"p": ref.sgd_step(p, g, lr)}, p, g)
    theirs = torch_step(p, g, torch.optim.SGD, lr=lr, foreach=True)
    return {"c": Side(tandem, steps=True), "torch_eager": theirs}


def global_norm(case, draw, c):
    g = draw.normal("g", (case.count,), case.dtype)
    norm = draw.poisoned((1,), "f32")
    dtype = c.enum("td_dtype", case.dtype)
    work = c.work(c.value("td_global_norm_work_bytes", c.device, case.count, dtype))
    tandem = into(c, "td_global_norm", {"norm": norm}, case.count, dtype, g, norm, work)
    return forward_sides(
        tandem, lambda g: {"norm": torch.linalg.vector_norm(ref.at_least_f32(g)).reshape(1)}, g
    )


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
    m, v = draw.normal("m", (case.count,), "f32", std=0.3), draw.uniform("v", (case.count,), "f32")
    ours = {name: x.clone() for name, x in zip("pmv", (p, m, v), strict=True)}
    ours["copy"], low = draw.poisoned((case.count,), "bf16"), draw.poisoned((case.count,), "bf16")
    there = {"p": ours["copy"], "low": low, "g": g, "m": ours["m"], "v": ours["v"]}
    tensors = c.struct("td_update_tensors", case, **addresses(c, there))
    adamw = placed(c, c.struct("td_adamw", case, **adamw_of(case)))
    start = state_of(c, case.step - 1 if case.on_device else case.step)
    state = placed(c, start)
    timed = "time" in case.measure

    def tandem():
        if not timed:
            c.td_assign(c.device, state, start, c.ffi.sizeof(start[0]))
            ours["m"].copy_(m)
            ours["v"].copy_(v)
            c.td_split(c.device, case.count, p, ours["copy"], low)
        if case.on_device:
            c.td_update_begin(c.device, state, 1.0)
        c.td_adamw_update(c.device, adamw, state, tensors)
        if not timed:
            c.td_join(c.device, case.count, ours["copy"], low, ours["p"])
        return ours

    def function(p, g, m, v):
        found = ref.adamw_step(p, g, m, v, case.step, variant=case.variant, **adamw_of(case))
        return {**dict(zip("pmv", found, strict=True)), "copy": rounded(found[0], torch.bfloat16)}

    if not timed:
        return forward_sides(tandem, function, p, g, m, v)
    sides = {"torch_eager": dict(foreach=True), "torch_library": dict(fused=True)}
    copies = (torch.empty_like(g, dtype=torch.bfloat16) for _ in sides)
    theirs = zip(sides.items(), copies, strict=True)
    return {"c": Side(tandem, steps=True)} | {
        impl: torch_step(p, g, copy=copy, **how) for (impl, how), copy in theirs
    }


def cosine_schedule(case, draw, c):
    """The learning rate of every step to beyond the end."""
    keys = (case.max, case.min, case.warmup, case.end)
    steps = range(case.end + 3)
    lrs = torch.tensor([c.value("td_cosine_schedule", t, *keys) for t in steps], dtype=torch.float64)
    exact = torch.tensor([ref.cosine_schedule(t, *keys) for t in steps], dtype=torch.float64)
    return {"c": {"lr": lrs}, "truth": {"lr": exact}, "rule": {"lr": within(max_abs=1e-15)}}
