"""Attention with the score matrix in memory, as in the course."""

import math

import torch
from torch import Tensor

from ref.ops import causal_mask, softmax


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    mask: str = "inf",
    scale: float | None = None,
    matmul=torch.matmul,
) -> Tensor:
    """softmax(scale q k^T + mask) v for q [..., seq, head_dim], k and v [..., seq_k, head_dim].

    mask "inf" replaces a masked score by -inf; "add_1e6" subtracts 1e6 from it.
    """
    return matmul(probabilities(q, k, causal, mask, scale, matmul), v)


def probabilities(
    q: Tensor,
    k: Tensor,
    causal: bool = False,
    mask: str = "inf",
    scale: float | None = None,
    matmul=torch.matmul,
) -> Tensor:
    scores = masked_scores(q, k, causal, mask, scale, matmul)
    return softmax(scores)


def masked_scores(
    q: Tensor,
    k: Tensor,
    causal: bool,
    mask: str = "inf",
    scale: float | None = None,
    matmul=torch.matmul,
) -> Tensor:
    scores = matmul(q, k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if not causal:
        return scores
    visible = causal_mask(q.shape[-2], k.shape[-2], q.device)
    if mask == "add_1e6":
        return scores + torch.where(visible, 0.0, -1e6).to(scores.dtype)
    return torch.where(visible, scores, float("-inf"))


def logsumexp(
    q: Tensor,
    k: Tensor,
    causal: bool = False,
    mask: str = "inf",
    scale: float | None = None,
    matmul=torch.matmul,
) -> Tensor:
    """Natural log of the row sums of exp(scores), which flash attention keeps for its backward."""
    return masked_scores(q, k, causal, mask, scale, matmul).logsumexp(dim=-1)


class Compiled:
    """The formula, compiled by torch.compile for one shape, at its first call.

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
