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
