"""Operations on rows, norm, gate, softmax and loss, with the sides of each."""

import torch
import torch.nn.functional as F

from parity.core import DTYPES, Side, equal
from parity.ops.sides import EPS, GAP, backward_sides, forward_sides, into, padded, rounded
from ref import ops as ref


def rows_of(case, draw, name, cols, dtype, std=1.0):
    """Rows of one size; with `spread` each is much larger or smaller than the one before."""
    x = draw.normal(name, (case.rows, cols), dtype, std=std)
    if not case.get("spread"):
        return x
    sizes = torch.tensor([2.0**-12, 1.0, 2.0**6], dtype=x.dtype, device=x.device)
    return x * sizes[torch.arange(case.rows, device=x.device) % 3, None]


def rmsnorm_arguments(case, draw, c):
    """Of the forward call: the shape, x, weight, y and rstd. In mixed precision x and weight are f32."""
    wider = case.get("x_dtype", case.dtype)
    x = rows_of(case, draw, "x", case.cols, wider)
    weight = draw.normal("weight", (case.cols,), wider, mean=1.0, std=0.1)
    y, rstd = draw.poisoned(x.shape, case.dtype), draw.poisoned((case.rows,), "f32")
    return c.struct("td_rmsnorm_shape", case, eps=EPS), x, weight, y, rstd


def rmsnorm_function(x, weight):
    return ref.rmsnorm(x, weight, EPS)


def rmsnorm_library(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def rmsnorm_forward(case, draw, c):
    arguments = rmsnorm_arguments(case, draw, c)
    _, x, weight, y, _ = arguments
    tandem = into(c, "td_rmsnorm_forward", {"y": y}, *arguments)

    def of(norm):
        return lambda x, weight: {"y": rounded(norm(x, weight), y.dtype)}

    return forward_sides(tandem, of(rmsnorm_function), x, weight, library=of(rmsnorm_library))


def rmsnorm_backward(case, draw, c):
    arguments = rmsnorm_arguments(case, draw, c)
    desc, x, weight, _, rstd = arguments
    wider, mixed = case.get("x_dtype", case.dtype), "x_dtype" in case
    dy = draw.normal("dy", x.shape, case.dtype)
    before_dx = draw.normal("before dx", x.shape, wider)
    summed = case.get("dweight_dtype", case.dtype)
    before_dweight = draw.normal("before dweight", weight.shape, summed)
    dx, dweight = draw.poisoned(x.shape, wider), draw.poisoned(weight.shape, summed)
    outputs = {"dx": dx, "dweight": dweight}
    if mixed:
        outputs["dx_rounded"] = draw.poisoned(x.shape, case.dtype)
    work = c.work(c.value("td_rmsnorm_backward_work_bytes", c.device, desc))
    add = case.get("accumulate", False)

    def before():
        c.td_rmsnorm_forward(c.device, *arguments)

    def tandem():
        if add:
            dx.copy_(before_dx)
            dweight.copy_(before_dweight)
        dx_rounded = outputs.get("dx_rounded")
        c.td_rmsnorm_backward(c.device, desc, x, weight, rstd, dy, add, dx, dx_rounded, add, dweight, work)
        return outputs

    def finish(grads):
        dx, dweight = grads["dx"], rounded(grads["dweight"], before_dweight.dtype)
        if add:
            dx, dweight = dx + before_dx, dweight + before_dweight
        return {"dx": dx, "dweight": dweight} | ({"dx_rounded": rounded(dx, dy.dtype)} if mixed else {})

    def of(norm):
        return lambda x, weight: rounded(norm(x, weight), dy.dtype)

    names, inputs = ["dx", "dweight"], [x, weight]
    mine = Side(tandem, before=before)
    return backward_sides(mine, names, of(rmsnorm_function), inputs, dy, of(rmsnorm_library), finish)


def silu_mul_inputs(case, draw):
    shape = (case.rows, case.get("pitch", case.cols))
    return draw.normal("gate", shape, case.dtype, std=2.0), draw.normal("up", shape, case.dtype)


def silu_mul_library(gate, up):
    return F.silu(gate) * up


def silu_mul_forward(case, draw, c):
    gate, up = silu_mul_inputs(case, draw)
    y = draw.poisoned((case.rows, case.cols), case.dtype)
    desc = c.struct("td_rows_shape", case)
    tandem = into(c, "td_silu_mul_forward", {"y": y}, desc, gate, up, y)

    def of(silu_mul):
        return lambda gate, up: {"y": silu_mul(gate[:, : case.cols], up[:, : case.cols])}

    return forward_sides(tandem, of(ref.silu_mul), gate, up, library=of(silu_mul_library))


def silu_mul_backward(case, draw, c):
    gate, up = silu_mul_inputs(case, draw)
    dy = draw.normal("dy", (case.rows, case.cols), case.dtype)
    dgate, dup = draw.poisoned(gate.shape, case.dtype), draw.poisoned(up.shape, case.dtype)
    dgate[:, case.cols :] = GAP
    dup[:, case.cols :] = GAP
    desc = c.struct("td_rows_shape", case)
    outputs = {"dgate": dgate, "dup": dup}
    tandem = into(c, "td_silu_mul_backward", outputs, desc, gate, up, dy, dgate, dup, None)

    def finish(grads):
        return {name: padded(grad, gate.shape[1]) for name, grad in grads.items()}

    inputs = [x[:, : case.cols].contiguous() for x in (gate, up)]
    names = ["dgate", "dup"]
    return backward_sides(tandem, names, ref.silu_mul, inputs, dy, silu_mul_library, finish)


def residual_add(case, draw, c):
    a, b = (draw.normal(name, (case.count,), case.dtype) for name in "ab")
    y = draw.poisoned((case.count,), case.dtype)
    dtype = c.enum("td_dtype", case.dtype)
    tandem = into(c, "td_residual_add", {"y": y}, case.count, dtype, a, b, y)
    return forward_sides(tandem, lambda a, b: {"y": ref.residual_add(a, b)}, a, b, rule={"y": equal()})


residual_add.shapes = [dict(count=count) for count in (1, 1009, 98_304)]


def softmax_function(case):
    causal_seq = case.get("causal_seq", 0)
    return (lambda x: ref.causal_softmax(x, causal_seq)) if causal_seq else ref.softmax


def softmax_forward(case, draw, c):
    x = rows_of(case, draw, "x", case.cols, case.dtype, std=2.0)
    y = draw.poisoned(x.shape, case.dtype)
    desc = c.struct("td_softmax_shape", case)
    tandem = into(c, "td_softmax_forward", {"y": y}, desc, x, y)

    def of(softmax):
        return lambda x: {"y": softmax(x)}

    library = of(softmax_library(case, draw.device))
    return forward_sides(tandem, of(softmax_function(case)), x, library=library)


def softmax_library(case, device):
    """PyTorch's fused softmax, of scores that were masked before."""
    if "causal_seq" in case:
        visible = ref.causal_mask(case.causal_seq, case.cols, device)
        bias = torch.zeros(visible.shape, device=device).masked_fill(~visible, float("-inf"))
        bias = bias.to(DTYPES[case.dtype])

    def library(x):
        if "causal_seq" in case:
            x = (x.unflatten(0, (-1, case.causal_seq)) + bias).flatten(0, 1)
        return x.softmax(-1)

    return library


def softmax_backward(case, draw, c):
    scale = 0.125
    x = rows_of(case, draw, "x", case.cols, case.dtype, std=2.0)
    dy = draw.normal("dy", x.shape, case.dtype)
    y, dx = draw.poisoned(x.shape, case.dtype), draw.poisoned(x.shape, case.dtype)
    desc = c.struct("td_softmax_shape", case)
    c.td_softmax_forward(c.device, desc, x, y)
    tandem = into(c, "td_softmax_backward", {"dx": dx}, desc, scale, y, dy, dx)

    def of(softmax):
        return lambda scores: softmax(scores * scale)

    # A power of two: the scores, scaled, are x again.
    function, library = of(softmax_function(case)), of(softmax_library(case, draw.device))
    return backward_sides(tandem, ["dx"], function, [x / scale], dy, library)


def cross_entropy_arguments(case, draw, c):
    """Of the forward call: the shape, logits, targets, loss, lse and work."""
    logits = rows_of(case, draw, "logits", case.vocab, case.dtype, std=2.0)
    targets = draw.integers("targets", (case.rows,), high=case.vocab)
    loss, lse = draw.poisoned((1,), "f32"), draw.poisoned((case.rows,), "f32")
    desc = c.struct("td_cross_entropy_shape", case)
    work = c.work(c.value("td_cross_entropy_work_bytes", c.device, desc))
    return desc, logits, targets, loss, lse, work


def cross_entropy_forward(case, draw, c):
    arguments = cross_entropy_arguments(case, draw, c)
    _, logits, targets, loss, lse, _ = arguments
    tandem = into(c, "td_cross_entropy_forward", {"loss": loss, "lse": lse}, *arguments)

    def torch_cross_entropy(logits):
        loss, lse = ref.cross_entropy(logits, targets)
        return {"loss": loss.reshape(1), "lse": lse}

    def library(logits):
        wide = logits.float()
        return {"loss": F.cross_entropy(wide, targets).reshape(1), "lse": wide.logsumexp(-1)}

    return forward_sides(tandem, torch_cross_entropy, logits, library=library)


def cross_entropy_backward(case, draw, c):
    arguments = cross_entropy_arguments(case, draw, c)
    desc, logits, targets, _, lse, _ = arguments
    dlogits = draw.poisoned(logits.shape, case.dtype)
    inputs = (desc, logits, targets, lse, 1.0)
    call = into(c, "td_cross_entropy_backward", {"dlogits": dlogits}, *inputs, dlogits)
    tandem = Side(call, before=lambda: c.td_cross_entropy_forward(c.device, *arguments))

    one = torch.tensor(1.0, device=draw.device)
    function, library = (
        lambda logits: ref.cross_entropy(logits, targets)[0],
        lambda logits: F.cross_entropy(logits.float(), targets),
    )
    return backward_sides(tandem, ["dlogits"], function, [logits], one, library)
