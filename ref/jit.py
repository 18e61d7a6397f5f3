"""Attention as torch.compile makes it of ref/attention.py's formula, for one shape."""

import torch

from ref.attention import attention


class Compiled:
    """The formula, compiled when it is first called: importing the compiler alone takes seconds.

    Nothing that was kept in memory or on disk is used, so that the first call has all of the compiling: the compiler
    knows functions by their code, and gives one up after a few shapes. `swapped` says how often
    the compiler put a fused attention of PyTorch's own in the place of the formula; None before the first call.
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
    """A context with a folder of its own for what the compiler keeps."""
    from torch._inductor.utils import (
        fresh_inductor_cache,
    )  # with the compiler, which only those who compile wait for

    return fresh_inductor_cache()


def fused_so_far() -> int:
    """How many attentions Inductor has recognised in this process."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fuse_attention"]
