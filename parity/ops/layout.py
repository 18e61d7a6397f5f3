"""Operations that move numbers, embedding and the table of rotary positions, with the sides of each."""

from functools import partial

import torch

from parity.core import Side, equal
from parity.ops.sides import backward_sides, forward_sides, into
from ref import ops as ref


def copy(case, draw, c):
    """No operation of a model. It shows how many bytes a second the device moves at best."""
    x = draw.normal("x", (case.count,), case.dtype)
    y, other = draw.poisoned(x.shape, case.dtype), torch.empty_like(x)
    calls = {
        "c": into(c, "td_device_copy", {"y": y}, y, x, x.nbytes),
        "torch_eager": lambda: {"y": other.copy_(x)},
    }
    return {impl: Side(call, nbytes=2 * x.nbytes) for impl, call in calls.items()}


def embedding_forward(case, draw, c):
    ids = draw.integers("ids", (case.tokens,), high=case.vocab)
    weight = draw.normal("weight", (case.vocab, case.d_model), case.dtype)
    y = draw.poisoned((case.tokens, case.d_model), case.dtype)
    desc = c.struct("td_embedding_shape", case)
    tandem = into(c, "td_embedding_forward", {"y": y}, desc, ids, weight, y)
    rule = {"y": equal("truth")}
    return forward_sides(tandem, lambda weight: {"y": ref.embedding(ids, weight)}, weight, rule=rule)


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

    function = partial(ref.embedding, ids)
    return backward_sides(tandem, ["dweight"], function, [weight], dy, finish=finish)


def rope_table(case, draw, c):
    cos, sin = (draw.poisoned((case.positions, case.head_dim // 2), "f32") for _ in "cs")
    shape = (case.positions, case.head_dim)
    tandem = into(c, "td_rope_table", {"cos": cos, "sin": sin}, *shape, 10_000.0, cos, sin)

    def torch_table(dtype):
        return dict(zip(("cos", "sin"), ref.rope_table(*shape, dtype=dtype, device=draw.device), strict=True))

    return {
        "c": tandem,
        "torch_eager": lambda: torch_table(torch.float32),
        "truth": lambda: torch_table(torch.float64),
    }
