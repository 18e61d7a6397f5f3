"""The formula of ref/attention.py, compiled by torch.compile for one shape."""

import torch

from ref.attention import attention


class Compiled:
    """The formula, compiled at its first call.

    The first call compiles everything anew: it uses nothing that earlier calls kept in memory or on disk. Without this
    the compiler would recognise the function by its code, and stop compiling it after a few shapes.
    swapped: how often the compiler replaced the formula by PyTorch's fused attention; None before the first call.
    """

    def __init__(self, causal: bool = False):
        self.causal, self.compiled, self.swapped = causal, None, None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.compiled is not None:
            return self.compiled(q, k, v)
        torch._dynamo.reset()
        before = fused_so_far()
        causal = self.causal
        self.compiled = torch.compile(
            lambda q, k, v: attention(q, k, v, causal), dynamic=False, options={"fx_graph_cache": False}
        )
        with empty_cache():
            o = self.compiled(q, k, v)
        self.swapped = fused_so_far() - before
        return o


def empty_cache():
    """A context in which the compiler has an empty cache folder."""
    from torch._inductor.utils import (
        fresh_inductor_cache,
    )  # imported here, because the compiler's import takes seconds

    return fresh_inductor_cache()


def fused_so_far() -> int:
    """The number of attentions that Inductor has replaced by a fused one in this process."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fuse_attention"]
