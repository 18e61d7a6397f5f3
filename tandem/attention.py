"""Attention as a function of autograd, also within what torch.compile compiles."""

import torch
from torch import Tensor

from .device import device_of
from .library import NAMES, Session

ALIGNMENT = 256  # of what C gets as scratch


def _shape(c: Session, q: Tensor, k: Tensor, causal: bool):
    batch, seq, head_dim = q.shape
    tf32 = q.dtype == torch.float32 and q.is_cuda and torch.backends.cuda.matmul.allow_tf32
    fields = {"seq": seq, "seq_k": k.shape[1], "head_dim": head_dim, "dtype": NAMES[q.dtype]}
    return c.struct("td_attention_shape", {}, batch=batch, heads=1, causal=causal, tf32=tf32, **fields)


def _scratch(like: Tensor, nbytes: int) -> Tensor | None:
    """So many bytes, aligned; None for none."""
    if not nbytes:
        return None
    block = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=like.device)
    return block[-block.data_ptr() % ALIGNMENT :]


def _check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
    if q.dim() != 3 or k.dim() != 3 or q.shape[::2] != k.shape[::2] or k.shape != v.shape:
        raise ValueError(f"q, k and v are [batch, seq, d], got {[*q.shape]}, {[*k.shape]} and {[*v.shape]}")
    if q.dtype not in names or not q.dtype == k.dtype == v.dtype:
        found = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise TypeError(f"q, k and v are of one type, {', '.join(names.values())}: got {found}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on one device, got {q.device}, {k.device} and {v.device}")
    if q.numel() and not k.numel():
        raise ValueError(f"k and v have no keys, for q {[*q.shape]}: the softmax of nothing is not defined")


@torch.library.custom_op("tandem::flash_forward", mutates_args=())
def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """o [batch, seq, d], and the logsumexp of every query [batch, seq], f32."""
    _check_attention(q, k, v)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    if not q.numel():  # no sequence, or no query
        return o, lse
    with device_of(q).calls() as c:
        shape = _shape(c, q, k, causal)
        work = _scratch(q, c.value("td_flash_sizes", c.device, shape).forward_work)
        c.td_flash_forward(c.device, shape, q, k, v, o, lse, work)
    return o, lse


@_flash_forward.register_fake
def _(q, k, v, causal):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("tandem::flash_backward", mutates_args=())
def _flash_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, dout: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, dout = (x.contiguous() for x in (q, k, v, o, dout))
    if not q.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with device_of(q).calls() as c:
        shape = _shape(c, q, k, causal)
        work = _scratch(q, c.value("td_flash_sizes", c.device, shape).backward_work)
        c.td_flash_backward(c.device, shape, q, k, v, o, dout, lse.contiguous(), dq, dk, dv, work)
    return dq, dk, dv


@_flash_backward.register_fake
def _(q, k, v, o, dout, lse, causal):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class FlashAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v, by tiles: `FlashAttention.apply(q, k, v, is_causal=False)`.

    q [batch, queries, d], k and v [batch, keys, d], of any strides; f32 or bf16, on GPUs f16 too; d up to 256. A batch
    may have no sequence, and a sequence no query. Saved are these, o, and L [batch, queries], the logsumexp of each
    query's scores. A causal mask is aligned top left. On a GPU f32 is multiplied as f32, or as TF32 where
    torch.backends.cuda.matmul.allow_tf32 says so."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o, lse = torch.ops.tandem.flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, dout):
        q, k, v, o, lse = ctx.saved_tensors
        return *torch.ops.tandem.flash_backward(q, k, v, o, dout, lse, ctx.is_causal), None
