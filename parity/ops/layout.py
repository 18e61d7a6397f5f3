"""Operations that move numbers, embedding, heads and rotary positions, with the sides of each."""

import torch

from parity.core import equal
from parity.ops.sides import GAP, backward_sides, forward_sides, padded
from ref import ops as ref


def copy(case, draw, c):
    """No operation of a model, but what all others are measured by: the bytes that the device moves at best."""
    x = draw.normal("x", (case.count,), case.dtype)
    y = draw.poisoned(x.shape, case.dtype)

    def tandem():
        c.td_device_copy(c.device, y, x, x.nbytes)
        return {"y": y}

    other = torch.empty_like(x)
    return {"c": tandem, "torch_eager": lambda: {"y": other.copy_(x)}}


def embedding_forward(case, draw, c):
    ids = draw.integers("ids", (case.tokens,), high=case.vocab)
    weight = draw.normal("weight", (case.vocab, case.d_model), case.dtype)
    y = draw.poisoned((case.tokens, case.d_model), case.dtype)
    desc = c.struct("td_embedding_shape", case)

    def tandem():
        c.td_embedding_forward(c.device, desc, ids, weight, y)
        return {"y": y}

    def torch_embedding(weight):
        return {"y": ref.embedding(ids, weight)}

    return forward_sides(tandem, torch_embedding, weight, rule={"y": equal("truth")})


def embedding_backward(case, draw, c):
    ids = draw.integers("ids", (case.tokens,), high=case.vocab)
    weight = draw.normal("weight", (case.vocab, case.d_model), case.dtype)
    dy = draw.normal("dy", (case.tokens, case.d_model), case.dtype)
    before = draw.normal("before", weight.shape, case.dtype)
    dweight = draw.poisoned(weight.shape, case.dtype)
    desc = c.struct("td_embedding_shape", case)
    work = c.work(c.value("td_embedding_backward_work_bytes", c.device, desc))
    accumulate = case.get("accumulate", False)

    def tandem():
        if accumulate:
            dweight.copy_(before)
        c.td_embedding_backward(c.device, desc, ids, dy, accumulate, dweight, work)
        return {"dweight": dweight}

    def finish(grads):
        return {"dweight": grads["dweight"] + before} if accumulate else grads

    def function(weight):
        return ref.embedding(ids, weight)

    return backward_sides(tandem, ["dweight"], function, [weight], dy, finish=finish)


def heads_shapes(case):
    width = case.heads * case.head_dim
    split = (case.batch, case.heads, case.seq, case.head_dim)
    return width, (case.batch, case.seq, case.get("pitch", width)), split


def packed_output(case, draw):
    width, packed_shape, _ = heads_shapes(case)
    packed = draw.poisoned(packed_shape, case.dtype)
    packed[..., width:] = GAP
    return packed


def packed_by_torch(case, merged):
    return padded(merged, heads_shapes(case)[1][-1])


def heads_split(case, draw, c):
    width, packed_shape, split_shape = heads_shapes(case)
    packed = draw.normal("packed", packed_shape, case.dtype)
    split = draw.poisoned(split_shape, case.dtype)
    desc = c.struct("td_heads_shape", case)

    def tandem():
        c.td_heads_split(c.device, desc, packed, split)
        return {"split": split}

    def torch_split(packed):
        return {"split": ref.heads_split(packed[..., :width], case.heads)}

    return forward_sides(tandem, torch_split, packed, rule={"split": equal("truth")})


def heads_merge(case, draw, c):
    split = draw.normal("split", heads_shapes(case)[2], case.dtype)
    packed = packed_output(case, draw)
    desc = c.struct("td_heads_shape", case)

    def tandem():
        c.td_heads_merge(c.device, desc, split, packed)
        return {"packed": packed}

    def torch_merge(split):
        return {"packed": packed_by_torch(case, ref.heads_merge(split))}

    return forward_sides(tandem, torch_merge, split, rule={"packed": equal("truth")})


def rope_table(case, draw, c):
    cos, sin = (draw.poisoned((case.positions, case.head_dim // 2), "f32") for _ in "cs")

    def tandem():
        c.td_rope_table(c.device, case.positions, case.head_dim, 10_000.0, cos, sin)
        return {"cos": cos, "sin": sin}

    def torch_table(dtype):
        return dict(
            zip(
                ("cos", "sin"),
                ref.rope_table(case.positions, case.head_dim, dtype=dtype, device=draw.device),
                strict=True,
            )
        )

    return {
        "c": tandem,
        "torch_eager": lambda: torch_table(torch.float32),
        "truth": lambda: torch_table(torch.float64),
    }


def rope_forward(case, draw, c):
    width, packed_shape, split_shape = heads_shapes(case)
    packed = draw.normal("packed", packed_shape, case.dtype)
    split = draw.poisoned(split_shape, case.dtype)
    cos, sin = ref.rope_table(case.seq, case.head_dim, device=draw.device)
    desc = c.struct("td_heads_shape", case)

    def tandem():
        c.td_rope_forward(c.device, desc, packed, cos, sin, split)
        return {"split": split}

    def torch_rope(packed, cos, sin):
        return {"split": ref.rope(ref.heads_split(packed[..., :width], case.heads), cos, sin)}

    return forward_sides(tandem, torch_rope, packed, cos, sin)


def rope_backward(case, draw, c):
    width, packed_shape, split_shape = heads_shapes(case)
    packed = draw.normal("packed", (*packed_shape[:2], width), case.dtype)
    dsplit = draw.normal("dsplit", split_shape, case.dtype)
    dpacked = packed_output(case, draw)
    cos, sin = ref.rope_table(case.seq, case.head_dim, device=draw.device)
    desc = c.struct("td_heads_shape", case)

    def tandem():
        c.td_rope_backward(c.device, desc, dsplit, cos, sin, dpacked)
        return {"dpacked": dpacked}

    def function(packed):
        tables = (cos.double(), sin.double()) if packed.dtype == torch.float64 else (cos, sin)
        return ref.rope(ref.heads_split(packed, case.heads), *tables)

    def finish(grads):
        return {"dpacked": packed_by_torch(case, grads["dpacked"])}

    return backward_sides(tandem, ["dpacked"], function, [packed], dsplit, finish=finish)
