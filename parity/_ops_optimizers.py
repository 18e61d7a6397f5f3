"""Optimizers and the norm of the gradients, with the sides of each."""

import torch

from parity._ops_sides import Compiled, forward_sides, rounded
from parity.core import DTYPES
from ref import ops as ref

ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)


def adamw_step(case, draw, c):
    p, g = draw.normal("p", (case.count,), case.dtype), draw.normal("g", (case.count,), case.dtype)
    if case.step > 1:
        m, v = draw.normal("m", (case.count,), "f32", std=0.3), draw.uniform("v", (case.count,), "f32")
    else:
        m, v = (torch.zeros(case.count, device=draw.device) for _ in range(2))
    ours = [p.clone(), m.clone(), v.clone()]
    desc = c.struct("td_adamw", case, **ADAMW)
    dtype = c.enum("td_dtype", case.dtype)

    def tandem():
        if "time" not in case.measure:
            for mine, before in zip(ours, (p, m, v), strict=True):
                mine.copy_(before)
        c.td_adamw_step(c.device, desc, case.count, dtype, ours[0], g, ours[1], ours[2])
        return dict(zip("pmv", ours, strict=True))

    def torch_adamw(p, g, m, v):
        return dict(
            zip("pmv", ref.adamw_step(p, g, m, v, case.step, variant=case.variant, **ADAMW), strict=True)
        )

    if "time" not in case.measure:
        return forward_sides(tandem, torch_adamw, p, g, m, v)
    return {
        "c": tandem,
        "torch_eager": optimizer(p, g, foreach=True),
        "torch_library": optimizer(p, g, fused=True),
        "torch_compile": optimizer(p, g, compiled=True, foreach=True, capturable=p.is_cuda),
    }


def optimizer(p, g, compiled=False, **how):
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g
    adamw = torch.optim.AdamW([weight], **how)
    update = Compiled(adamw.step) if compiled else adamw.step

    def step():
        update()
        return {"p": weight.detach()}

    return step


def sgd_step(case, draw, c):
    p, g = draw.normal("p", (case.count,), case.dtype), draw.normal("g", (case.count,), case.dtype)
    ours, lr = p.clone(), float(torch.tensor(ADAMW["lr"]))  # an f32 argument
    dtype = c.enum("td_dtype", case.dtype)

    def tandem():
        if "time" not in case.measure:
            ours.copy_(p)
        c.td_sgd_step(c.device, lr, case.count, dtype, ours, g)
        return {"p": ours}

    if "time" not in case.measure:
        return forward_sides(tandem, lambda p, g: {"p": ref.sgd_step(p, g, lr)}, p, g)
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g
    sgd = torch.optim.SGD([weight], lr=lr, foreach=True)

    def torch_sgd():
        sgd.step()
        return {"p": weight.detach()}

    return {"c": tandem, "torch_eager": torch_sgd}


def global_norm(case, draw, c):
    g = draw.normal("g", (case.count,), case.dtype)
    norm = draw.poisoned((1,), "f32")
    dtype = c.enum("td_dtype", case.dtype)
    work = c.work(c.value("td_global_norm_work_bytes", c.device, case.count, dtype))

    def tandem():
        c.td_global_norm(c.device, case.count, dtype, g, norm, work)
        return {"norm": norm}

    def function(g):
        return {"norm": torch.linalg.vector_norm(ref.at_least_f32(g)).reshape(1)}

    return forward_sides(tandem, function, g)


def adamw_update(case, draw, c):
    """AdamW on f32 weights with gradients of 16 bits, which writes a copy of 16 bits along."""
    p, g = draw.normal("p", (case.count,), "f32"), draw.normal("g", (case.count,), case.grad_dtype)
    m, v = draw.normal("m", (case.count,), "f32", std=0.3), draw.uniform("v", (case.count,), "f32")
    ours = {name: x.clone() for name, x in zip("pmv", (p, m, v), strict=True)}
    ours["copy"] = draw.poisoned((case.count,), case.grad_dtype)
    addresses = {name: c.ffi.cast("void *", x.data_ptr()) for name, x in {**ours, "g": g}.items()}
    tensors = c.struct("td_adamw_tensors", case, **addresses)
    adamw = c.struct("td_adamw", case, **ADAMW)
    on_device = None
    if case.on_device:
        nbytes = c.ffi.sizeof("td_adamw")
        on_device = c.ffi.cast("td_adamw *", c.work(nbytes))
        adamw.step -= 1  # which td_adamw_advance adds
        c.td_device_upload(c.device, on_device, adamw, nbytes)
    timed = "time" in case.measure

    def tandem():
        if not timed:
            for mine, before in zip(ours.values(), (p, m, v), strict=False):
                mine.copy_(before)
        if case.on_device:
            c.td_adamw_advance(c.device, on_device)
        c.td_adamw_update(c.device, on_device or adamw, case.on_device, tensors)
        return ours

    def function(p, g, m, v):
        found = ref.adamw_step(p, g, m, v, case.step, variant=case.variant, **ADAMW)
        return {**dict(zip("pmv", found, strict=True)), "copy": rounded(found[0], DTYPES[case.grad_dtype])}

    if not timed:
        return forward_sides(tandem, function, p, g, m, v)
    return {
        "c": tandem,
        "torch_eager": torch_step(p, g, foreach=True),
        "torch_library": torch_step(p, g, fused=True),
    }


def linear_adamw_update(case, draw, c):
    """AdamW on the weight of a linear layer, from what its gradient is made of."""
    x = draw.normal("x", (case.tokens, case.d_in), case.dtype)
    dy = draw.normal("dy", (case.tokens, case.d_out), case.dtype, std=case.tokens**-0.5)
    weight = (case.d_out, case.d_in)
    p, m = draw.normal("p", weight, case.p_dtype), draw.normal("m", weight, "f32", std=0.3)
    v = draw.uniform("v", weight, "f32")
    ours = {name: value.clone() for name, value in zip("pmv", (p, m, v), strict=True)}
    if case.p_dtype != case.dtype:
        ours["copy"] = draw.poisoned(weight, case.dtype)
    addresses = {name: c.ffi.cast("void *", x.data_ptr()) for name, x in {**ours, "x": x, "dy": dy}.items()}
    layer, adamw = c.struct("td_linear_adamw", case, **addresses), c.struct("td_adamw", case, **ADAMW)
    timed = "time" in case.measure

    def tandem():
        if not timed:
            for mine, before in zip(ours.values(), (p, m, v), strict=False):
                mine.copy_(before)
        c.td_linear_adamw_update(c.device, adamw, False, 1, layer)
        return ours

    def function(x, dy, p, m, v):
        # The gradient of a layer in 16 bits is rounded to them.
        g = rounded(dy.T @ x, DTYPES[case.dtype]).to(
            torch.float64 if p.dtype == torch.float64 else torch.float32
        )
        found = ref.adamw_step(p, g, m, v, case.step, variant=case.variant, **ADAMW)
        found = dict(zip("pmv", found, strict=True))
        return found | ({"copy": rounded(found["p"], DTYPES[case.dtype])} if "copy" in ours else {})

    if not timed:
        return forward_sides(tandem, function, x, dy, p, m, v)
    return {
        "c": tandem,
        "torch_eager": torch_step(p, dy.T @ x, lambda: dy.T @ x, foreach=True),
        "torch_library": torch_step(p, dy.T @ x, lambda: dy.T @ x, fused=True),
    }


def torch_step(p, g, gradient=None, **how):
    """PyTorch's optimizer on f32 weights and gradients, as under autocast, and the copy for the next forward; with
    `gradient`, what computes the gradient too."""
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g.float()
    copy = torch.empty_like(g)
    adamw = torch.optim.AdamW([weight], **how)

    def step():
        if gradient:
            weight.grad = gradient().float()
        adamw.step()
        copy.copy_(weight.detach())
        return {"p": weight.detach(), "copy": copy}

    return step
