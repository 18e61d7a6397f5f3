"""Another answer as good as PyTorch's: the same formula with every sum formed one term after the other in f32.

The order of a library's sums depends on the processor, and no order is the right one. So the errors of such answers are
measured: under the mode `Sequential`, PyTorch's products and sums add their terms one by one, in a random order. The
error of such a sum grows with the root of the sum of its squared partial sums, whatever the order (Hallman and Ipsen,
arXiv 2107.01604).
"""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ref.ops import as_tf32

PIECE = 4096  # terms of a longer sum are added in pieces of this many, and then the pieces' sums
BLOCK = 2**17  # elements of a product that are formed together: they fit the cache, and threads share them
LARGE = 2**27  # multiplications; a larger product is formed UNIT terms at a time
UNIT = 16  # terms that are added at once: by a GPU's matrix units, and in a large product
# Operations whose every result is rounded once.
ROUNDED = {*"add sub rsub mul div addcmul addcdiv exp log sqrt rsqrt reciprocal".split()}
ROUNDED |= {*"sigmoid pow sigmoid_backward lerp".split()}

aten = torch.ops.aten


class Sequential(TorchDispatchMode):
    """Inside it, matrix products and sums of floating-point tensors narrower than f64 are sequential f32 sums. Any
    other result is moved by at most half of its last place: another rounding of it.

    `tf32`: products of f32 round their inputs to TF32. `truncates`: products of 16 bits and of TF32 are formed as by a
    GPU's matrix units: UNIT terms are added exactly, and the sum so far is truncated."""

    def __init__(self, seed: int, tf32: bool = False, truncates: bool = False):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.tf32, self.truncates = tf32, truncates
        self.noise: torch.Generator | None = None
        self.longest = 1  # terms of a sum so far

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks. True would import its compiler, which takes seconds; nothing here is compiled."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        own = SUMS.get(func)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if own is not None and all(x.is_floating_point() and x.dtype != torch.float64 for x in tensors):
            return own(self, *args, **kwargs)
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__.rstrip("_") in ROUNDED and result.dtype != torch.float64:
            result.copy_(self.rounded(result, result.dtype))
        return result

    def rounded(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x in `dtype`, after each number was moved by at most half of its last place there."""
        if not x.is_floating_point() or x.is_meta:  # a shape alone, as of a model that is yet without weights
            return x
        if self.noise is None or self.noise.device != x.device:
            self.noise = torch.Generator(x.device).manual_seed(self.generator.initial_seed())
        half = torch.finfo(dtype).eps / 2
        wide = x.float()
        draws = torch.empty_like(wide).uniform_(-half, half, generator=self.noise)
        return torch.where(wide.isfinite(), torch.addcmul(wide, wide, draws), wide).to(dtype)

    def order(self, count: int) -> list[int]:
        self.longest = max(self.longest, count)
        return torch.randperm(count, generator=self.generator).tolist()

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[batch, m, k] x [batch, k, n] in f32, each element one term after the other."""
        if self.tf32 and a.dtype == torch.float32:
            a, b = as_tf32(a), as_tf32(b)
        if self.truncates and (self.tf32 or a.dtype.itemsize < 4):
            return self.truncated(a, b)
        a, b = a.float().contiguous(), b.float().contiguous()
        batch, m, k = a.shape
        order = self.order(k)
        if a.numel() * b.shape[2] > LARGE:
            return self.large(a, b, order)
        total = torch.zeros(batch, m, b.shape[2], device=a.device)
        terms = torch.tensor(order, dtype=torch.int64, device=a.device)
        right = b.permute(1, 0, 2)[terms].unsqueeze(-2).unbind()
        rows = m if a.is_cuda else max(1, BLOCK // max(1, batch * b.shape[2]))
        for first in range(0, m, rows):
            part = slice(first, first + rows)
            acc, left = total[:, part], a[:, part].permute(2, 0, 1)[terms].unsqueeze(-1).unbind()
            if a.is_cuda or not k:
                for pair in zip(left, right, strict=True):
                    acc.addcmul_(*pair)
            else:  # one after the other there
                torch._foreach_addcmul_([acc] * k, left, right)
        return total

    def large(self, a: torch.Tensor, b: torch.Tensor, order: list[int]) -> torch.Tensor:
        """UNIT terms at a time: a UNIT-th of the roundings. Their squares add up, so its root scales the error."""
        total = torch.zeros(a.shape[0], a.shape[1], b.shape[2], device=a.device)
        for terms in torch.tensor(order).split(UNIT):
            total += a[:, :, terms] @ b[:, terms]
        exact = a.double() @ b.double()
        return (exact + UNIT**0.5 * (total - exact)).float()

    def truncated(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = a.double(), b.double()
        order = torch.tensor(self.order(a.shape[2]), device=a.device)
        total = torch.zeros(a.shape[0], a.shape[1], b.shape[2], device=a.device)
        for terms in order.split(UNIT):
            exact = total.double() + a[:, :, terms] @ b[:, terms]
            nearest = exact.float()
            over = nearest.double().abs() > exact.abs()
            total = torch.where(over, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
        return total

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the last dimension in f32; longer sums in pieces."""
        x = x.float()
        count = x.shape[-1]
        if count > PIECE:  # all pieces at once; zeros fill the last one
            self.longest = max(self.longest, count)
            filled = torch.nn.functional.pad(x, (0, -count % PIECE))
            return self.total(self.total(filled.unflatten(-1, (-1, PIECE))))
        if count == 0:
            return x.sum(-1)
        terms = x.movedim(-1, 0).contiguous()
        order = self.order(count)
        if terms.numel() > count and not x.is_cuda:  # numpy adds one row after the other
            return torch.from_numpy(np.add.reduce(terms[torch.tensor(order)].numpy(), axis=0))
        acc = terms[order[0]].clone()
        for j in order[1:]:
            acc += terms[j]
        return acc

    def over(self, x: torch.Tensor, dims, keepdim: bool) -> torch.Tensor:
        """The sum over `dims`, all if none is named."""
        dims = sorted({d % x.dim() for d in dims}) if dims else list(range(x.dim()))
        if not dims:  # a number by itself
            return x.float()
        kept = [d for d in range(x.dim()) if d not in dims]
        flat = x.permute(*kept, *dims).reshape(*(x.shape[d] for d in kept), -1)
        found = self.total(flat)
        for d in dims if keepdim else ():
            found = found.unsqueeze(d)
        return found


def _mm(mode, a, b):
    return _bmm(mode, a[None], b[None])[0]


def _bmm(mode, a, b):
    return mode.rounded(mode.product(a, b), a.dtype)


def _addmm(mode, c, a, b, *, beta=1, alpha=1):
    return mode.rounded(beta * c.float() + alpha * mode.product(a[None], b[None])[0], a.dtype)


def _sum(mode, x, dims=None, keepdim=False, *, dtype=None):
    return mode.rounded(mode.over(x, dims, keepdim), dtype or x.dtype)


def _mean(mode, x, dims=None, keepdim=False, *, dtype=None):
    found = mode.over(x, dims, keepdim)
    return mode.rounded(found / (x.numel() // max(1, found.numel())), dtype or x.dtype)


def _norm(mode, x, order=2, dims=None, keepdim=False, *, dtype=None):
    if order != 2:
        return aten.linalg_vector_norm.default(x, order, dims, keepdim, dtype=dtype)
    return mode.rounded(mode.over(x.float().square(), dims, keepdim).sqrt(), dtype or x.dtype)


SUMS = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.mv.default: lambda mode, a, x: _mm(mode, a, x[:, None])[:, 0],
    aten.dot.default: lambda mode, x, y: _mm(mode, x[None], y[:, None])[0, 0],
    aten.addmm.default: _addmm,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.linalg_vector_norm.default: _norm,
}
