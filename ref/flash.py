"""FlashAttention-2 in plain tensor code (Dao 2023, algorithms 1 and 2): flash_forward (a).

q [..., seq, head_dim], k and v [..., seq_k, head_dim]. Forward returns o and the logsumexp of each query's scores.
Backward computes the probabilities from the logsumexp, without a second softmax.
"""

import math

import torch
from torch import Tensor

from ref.ops import at_least_f32

MASKED = {"inf": -math.inf, "add_1e6": -1e6}


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal=False, mask="inf", tile_q=64, tile_k=64):
        o, lse = tiled_forward(q, k, v, causal, mask, tile_q, tile_k)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = causal, mask
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _dlse):
        dq, dk, dv = backward(*ctx.saved_tensors, do, *ctx.options)
        return dq, dk, dv, None, None, None, None


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    mask: str = "inf",
    tile_q: int = 64,
    tile_k: int = 64,
) -> tuple[Tensor, Tensor]:
    """o and the logsumexp; o is differentiable in q, k and v."""
    return FlashAttention.apply(q, k, v, causal, mask, tile_q, tile_k)


def scores(q: Tensor, k: Tensor, causal: bool, mask: str, row: int = 0, col: int = 0) -> Tensor:
    """Scaled and masked scores, f32 or wider, of the tile that begins at (row, col)."""
    s = at_least_f32(q) @ at_least_f32(k).mT / math.sqrt(q.shape[-1])
    if causal:
        query = torch.arange(row, row + q.shape[-2], device=q.device)[:, None]
        key = torch.arange(col, col + k.shape[-2], device=q.device)[None, :]
        s = s + torch.where(key <= query, 0.0, MASKED[mask]).to(s.dtype)
    return s


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: str, tile_q: int, tile_k: int
) -> tuple[Tensor, Tensor]:
    outputs, logs = [], []
    for row, q_tile in tiles(tile_q, q):
        wide = at_least_f32(q_tile)
        o = torch.zeros_like(wide)
        m = torch.full_like(wide[..., 0], -math.inf)
        l = torch.zeros_like(m)  # noqa: E741  the paper's letter
        for col, k_tile, v_tile in tiles(tile_k, k, v):
            if causal and mask == "inf" and col >= row + q_tile.shape[-2]:
                break  # all keys of this tile and of later tiles are masked
            s = scores(q_tile, k_tile, causal, mask, row, col)
            m_new = torch.maximum(m, s.max(dim=-1).values)
            p = torch.exp(s - m_new[..., None])
            decay = torch.exp(m - m_new)
            l = decay * l + p.sum(dim=-1)  # noqa: E741
            o = decay[..., None] * o + at_least_f32(p.to(v.dtype)) @ at_least_f32(v_tile)
            m = m_new
        outputs.append((o / l[..., None]).to(q.dtype))
        logs.append(m + l.log())
    return torch.cat(outputs, dim=-2), torch.cat(logs, dim=-1)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool = False,
    mask: str = "inf",
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by the formulas, with whole score matrices."""
    wide_q, wide_k, wide_v, wide_o, wide_do = map(at_least_f32, (q, k, v, o, do))
    scale = 1 / math.sqrt(q.shape[-1])
    d = (wide_o * wide_do).sum(dim=-1, keepdim=True)
    p = torch.exp(scores(q, k, causal, mask) - lse[..., None])
    dv = p.mT @ wide_do
    dp = wide_do @ wide_v.mT
    ds = p * (dp - d)
    return (
        (ds @ wide_k * scale).to(q.dtype),
        (ds.mT @ wide_q * scale).to(k.dtype),
        dv.to(v.dtype),
    )


def tiles(rows: int, *tensors: Tensor):
    """(first row, a tile of each tensor) along the sequence; the last tile may be shorter."""
    for row in range(0, tensors[0].shape[-2], rows):
        yield row, *(x[..., row : row + rows, :] for x in tensors)
