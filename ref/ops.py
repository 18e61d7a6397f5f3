"""The formula of every operation of impl/ops/ops.h, forward; autograd gives the backward.

bf16 inputs stay bf16 wherever eager PyTorch keeps bf16. float64 inputs stay float64. Casts to f32 in the course are
here casts to f32 or wider.
"""

import math

import torch
from torch import Tensor


def at_least_f32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_tf32(x: Tensor) -> Tensor:
    """f32 rounded to the nearest TF32 number, with 10 bits of fraction; ties away from 0."""
    bits = (x.view(torch.int32) + 0x1000) & ~0x1FFF
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


class _Tf32Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return as_tf32(a) @ as_tf32(b)

    @staticmethod
    def backward(ctx, grad):
        a, b = map(as_tf32, ctx.saved_tensors)
        grad = as_tf32(grad)
        return grad @ b.mT, a.mT @ grad


def tf32_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of f32 matrices of equal batches, and its gradients, from operands rounded to TF32, as tensor cores compute
    it. PyTorch's own matmul uses TF32 only for shapes that fit tensor cores, and f32 for others."""
    return _Tf32Product.apply(a.contiguous(), b.contiguous())


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """alpha op(a) op(b) + beta c, each [batch, rows, cols]. An operand of batch 1 is used for every batch."""
    if out_dtype is not None:
        a, b = a.to(out_dtype), b.to(out_dtype)
    product = (a.mT if trans_a else a) @ (b.mT if trans_b else b)
    if alpha != 1.0:
        product = alpha * product
    return product if beta == 0.0 else product + beta * c


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return weight[ids]


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Normalises and weights in f32 or wider, and casts the result to x's dtype."""
    wide = at_least_f32(x)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (wide * rstd)).to(x.dtype)


def heads_split(packed: Tensor, heads: int) -> Tensor:
    """[batch, seq, heads * head_dim] to [batch, heads, seq, head_dim]."""
    return packed.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()


def heads_merge(split: Tensor) -> Tensor:
    return split.transpose(1, 2).flatten(2)


def rope_table(
    positions: int,
    head_dim: int,
    theta: float = 10_000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """cos, sin [positions, head_dim / 2] of the float64 angles pos * theta^(-2i / head_dim), computed on the CPU."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64, device="cpu"), frequency)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the interleaved pairs of x [..., seq, head_dim]; tables [seq, head_dim / 2].

    The f32 table promotes the rotation to f32; the result is cast back to x's dtype.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def residual_add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def causal_mask(seq: int, seq_k: int, device: torch.device | str = "cpu") -> Tensor:
    """[seq, seq_k], True if query i may see key j: j <= i."""
    query, key = torch.arange(seq, device=device), torch.arange(seq_k, device=device)
    return query[:, None] >= key[None, :]


def softmax(x: Tensor) -> Tensor:
    """The course's separate steps: max, subtract, exp, sum, divide.

    max instead of amax: its backward keeps one index for each row, not all of x.
    """
    shifted = x - x.max(dim=-1, keepdim=True).values
    exp = torch.exp(shifted)
    return exp / exp.sum(dim=-1, keepdim=True)


def causal_softmax(x: Tensor, causal_seq: int) -> Tensor:
    """x [rows, cols]. Row r is query r mod causal_seq of its matrix."""
    mask = causal_mask(causal_seq, x.shape[-1], x.device)
    matrices = x.unflatten(0, (-1, causal_seq))
    return softmax(matrices.masked_fill(~mask, float("-inf"))).flatten(0, 1)


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss of logits [rows, vocab] and logsumexp [rows], in f32 as under autocast."""
    wide = at_least_f32(logits)
    peak = wide.max(dim=-1, keepdim=True).values
    lse = (wide - peak).exp().sum(dim=-1).log() + peak.squeeze(-1)
    return (lse - wide.gather(-1, targets[:, None]).squeeze(-1)).mean(), lse


def adamw_step(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    variant: str = "course2025",
) -> tuple[Tensor, Tensor, Tensor]:
    """The new p, m, v. m, v and the arithmetic are f32 or wider; p is rounded once."""
    grad, weight = at_least_f32(g), at_least_f32(p)
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad * grad  # from left to right, as torch.optim: grad^2 could overflow
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    if variant != "course2025":
        weight = weight - lr * weight_decay * weight
    if variant == "torch":
        weight = weight - lr / correction1 * m / ((v / correction2).sqrt() + eps)
    else:
        weight = weight - lr * correction2**0.5 / correction1 * m / (v.sqrt() + eps)
    if variant == "course2025":
        weight = weight - lr * weight_decay * weight
    return weight.to(p.dtype), m, v


def sgd_step(p: Tensor, g: Tensor, lr: float) -> Tensor:
    return (at_least_f32(p) - lr * at_least_f32(g)).to(p.dtype)


def cosine_schedule(t: int, most: float, least: float, warmup: int, end: int) -> float:
    """The course's learning rate of step t, counted from 0."""
    if t < warmup:
        return most * t / warmup
    angle = math.pi * (min(t, end) - warmup) / max(1, end - warmup)
    return least + (1 + math.cos(angle)) / 2 * (most - least) if t <= end else least
