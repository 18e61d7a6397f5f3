"""Operations that a training step fuses, with the sides of each."""

import torch
import torch.nn.functional as F

from parity.core import equal
from parity.ops.sides import EPS, GAP, backward_sides, forward_sides, into, padded, rounded
from ref import ops as ref


def residual_rmsnorm_forward(case, draw, c):
    wider = case.get("x_dtype", case.dtype)
    shape = (case.rows, case.cols)
    a, b = draw.normal("a", shape, wider), draw.normal("b", shape, case.dtype)
    weight = draw.normal("weight", (case.cols,), wider, mean=1.0, std=0.1)
    total, y = draw.poisoned(shape, wider), draw.poisoned(shape, case.dtype)
    rstd = draw.poisoned((case.rows,), "f32")
    desc = c.struct("td_rmsnorm_shape", case, eps=EPS)
    outputs = {"sum": total, "y": y}
    tandem = into(c, "td_residual_rmsnorm_forward", outputs, desc, a, b, weight, total, y, rstd)

    def function(a, b, weight):
        total = a + b
        return {"sum": total, "y": rounded(ref.rmsnorm(total, weight, EPS), y.dtype)}

    def library(a, b, weight):
        total = a + b
        return {"sum": total, "y": F.rms_norm(total, weight.shape, weight, EPS).to(y.dtype)}

    return forward_sides(tandem, function, a, b, weight, library=library)


def qkv_inputs(case, draw):
    """The extent of one of q, k and v in a token's row, the shape of the packed side, and the tables."""
    width = case.heads * case.head_dim
    packed = (case.batch, case.seq, case.get("pitch", 3 * width))
    return width, packed, ref.rope_table(case.seq, case.head_dim, device=draw.device)


def split(qkv, heads, tables):
    """q, k and v of [batch, seq, 3 * heads * head_dim], q and k rotated."""
    cos, sin = (table.double() for table in tables) if qkv.dtype == torch.float64 else tables
    q, k, v = (ref.heads_split(part, heads) for part in qkv.chunk(3, dim=-1))
    return ref.rope(q, cos, sin), ref.rope(k, cos, sin), v


def qkv_split_forward(case, draw, c):
    width, packed_shape, tables = qkv_inputs(case, draw)
    qkv = draw.normal("qkv", packed_shape, case.dtype)
    shape = (case.batch, case.heads, case.seq, case.head_dim)
    outputs = {name: draw.poisoned(shape, case.dtype) for name in "qkv"}
    desc = c.struct("td_heads_shape", case)
    tandem = into(c, "td_qkv_split_forward", outputs, desc, qkv, *tables, *outputs.values())

    def function(qkv):
        return dict(zip("qkv", split(qkv[..., : 3 * width], case.heads, tables), strict=True))

    return forward_sides(tandem, function, qkv)


def qkv_split_backward(case, draw, c):
    width, packed_shape, tables = qkv_inputs(case, draw)
    shape = (case.batch, case.heads, case.seq, case.head_dim)
    qkv = draw.normal("qkv", (*packed_shape[:2], 3 * width), case.dtype)
    grads = draw.normal("grads", (3, *shape), case.dtype)
    dqkv = draw.poisoned(packed_shape, case.dtype)
    dqkv[..., 3 * width :] = GAP
    desc = c.struct("td_heads_shape", case)
    tandem = into(c, "td_qkv_split_backward", {"dqkv": dqkv}, desc, *grads, *tables, dqkv)

    def function(qkv):
        return torch.stack(split(qkv, case.heads, tables))

    def finish(found):
        return {"dqkv": padded(found["dqkv"], packed_shape[-1])}

    return backward_sides(tandem, ["dqkv"], function, [qkv], grads, finish=finish)


def round(case, draw, c):
    x = draw.normal("x", (case.count,), case.dtype)
    y = draw.poisoned(x.shape, case.out_dtype)
    dtypes = [c.enum("td_dtype", dtype) for dtype in (case.dtype, case.out_dtype)]
    tandem = into(c, "td_round", {"y": y}, case.count, dtypes[0], x, dtypes[1], y)
    return forward_sides(tandem, lambda x: {"y": x.to(y.dtype)}, x, rule={"y": equal()})
