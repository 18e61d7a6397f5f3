"""How far from the truth an answer may be. docs/parity.md, "The rule", has the formulas; here is why they are so.

"Equals" are answers as good as PyTorch's: its formula under parity.core.equals.Sequential, each with its sums in
another order. Their errors e are measured. "Around" are 4 rows and columns to each side. PyTorch's other ways to the
answer, such as its fused softmax, count as PyTorch: maxima are over all, and by element their errors are among e.

Constants: the error of a sequential f32 sum has an rms of 0.4 u G for all signs and lengths, where G^2 is the sum of
its squared partial sums. The largest error of 100,000 such sums is 2.1 u G, five times that. 4 u G by element is ten
times the rms, 0.5 u G by norm is 1.25 times (theory: Hallman and Ipsen, arXiv 2107.01604). The std by norm, and the
terms after the first two by element, are there because the rms of a few numbers is itself noise.

Equals round each intermediate result up or down at random. In 16 bits this is most of their error, with twice the
variance of rounding to nearest: by norm 1.1 / sqrt(2) replaces 1.25. By element, e is what exceeds the last rounding,
2 u |t| in an equal, which C is allowed too, plus 5 roundings to f32 of a number of typical size.

A few equals say little of a number that alone in its row is noisy: one number in 32,768 may be off by 3 times the
largest error of PyTorch or an equal anywhere. Of fewer numbers none may.

In 16 bits a common factor of 1.001 hides in the last rounding. It shows in z = sum(e t) / sqrt(sum(e^2 t^2)), which is
small if errors are independent, as roundings are: |z| <= 5 is asked of 4096 numbers or more, if PyTorch keeps to it and
C, but for a common factor, is off by little more than its last rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

SAME = 1.1  # times PyTorch's own error
NORM, SPREAD = 1.25, 4.0
NORM_16 = 1.1 * 0.5**0.5
ELEMENT, FLOOR = 10.0, 5.0
AROUND = 4
RARE, RARELY = 2**15, 3.0
ROUNDING = 2.0**-24
LEANING = 5.0
LEANING_NUMBERS = 4096
LITTLE_MORE = 1.3


@dataclass
class Allowance:
    """The limits of one output, and what they were taken from."""

    norm: float
    elements: torch.Tensor
    rarely: float  # the limit of one number in RARE
    leaning: float | None  # the limit of |z|; None where it is no test
    torch_rel_l2: float | None
    equals_rel_l2: float | None


def allow(
    truth: torch.Tensor,
    torchs: Sequence[torch.Tensor],
    equals: Sequence[torch.Tensor],
    dtype: torch.dtype,
    eps: float | None = None,
) -> Allowance:
    """For a finite `truth`, PyTorch's answers, the reference first, and its equals. `eps` replaces the dtype's own."""
    u = (torch.finfo(dtype).eps if eps is None else eps) / 2
    theirs = [_off(answer, truth) for answer in torchs]
    off = [_off(equal, truth) for equal in equals]
    norms = [relative(e, truth) for e in theirs]
    norm = SAME * max(norms, default=0.0)
    elements = torch.stack([*theirs, torch.zeros_like(truth)]).abs().amax(0)
    rms_equals = None
    if off:
        narrow = dtype.itemsize < 4
        rel = torch.tensor([relative(e, truth) for e in off], dtype=torch.float64)
        rms_equals = float(rel.square().mean().sqrt())
        std = float(rel.std()) if len(rel) > 1 else 0.0
        norm = max(norm, (NORM_16 if narrow else NORM) * rms_equals + SPREAD * std)
        noise = _noise(torch.stack([*theirs, *off]), truth, torch.finfo(dtype).eps / 2, narrow)
        elements = torch.maximum(elements, noise)
    largest = max((float(e.abs().max()) for e in [*theirs, *off] if e.numel()), default=0.0)
    last = 2 * u if off and dtype.itemsize < 4 else u
    return Allowance(
        norm + u,
        elements + last * truth.abs(),
        RARELY * largest,
        LEANING if _leans_not(truth, [*theirs, *off], dtype) else None,
        norms[0] if norms else None,
        rms_equals,
    )


def relative(off: torch.Tensor, truth: torch.Tensor) -> float:
    """The norm of the errors over that of the truth."""
    size, error = float(torch.linalg.vector_norm(truth)), float(torch.linalg.vector_norm(off))
    return error / size if size > 0 else (0.0 if error == 0 else math.inf)


def leaning(off: torch.Tensor, truth: torch.Tensor) -> float:
    """z: by how many standard deviations the errors follow the truth."""
    products = (off * truth).flatten()
    spread = float(torch.linalg.vector_norm(products))
    return float(products.sum()) / spread if spread > 0 else 0.0


def only_rounded(value: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether an answer, but for a common factor, is off by little more than its last rounding."""
    rounding = torch.linalg.vector_norm(truth.to(value.dtype).double() - truth)
    wide = value.double()
    rest = torch.linalg.vector_norm(wide - factor(wide, truth) * truth)
    return bool(rest <= LITTLE_MORE * rounding)


def factor(value: torch.Tensor, truth: torch.Tensor) -> float:
    """The factor that brings the truth nearest to the answer."""
    power = float(truth.square().sum())
    return float((value * truth).sum()) / power if power > 0 else 1.0


def _noise(off: torch.Tensor, truth: torch.Tensor, u: float, narrow: bool) -> torch.Tensor:
    """What the errors `off` [equals, ...] allow each element."""
    if narrow:
        off = (off.abs() - 2 * u * truth.abs()).clamp(min=0)
    squares = off.square().mean(0)
    everywhere, size = squares.mean(), truth.square().mean()
    row = squares.mean(-1, keepdim=True) if truth.dim() else squares
    share = everywhere / size if float(size) > 0 else torch.zeros_like(size)
    noise = torch.stack(torch.broadcast_tensors(squares, _around(squares), row, share * truth.square())).amax(
        0
    )
    floor = max(float(everywhere.sqrt()), ROUNDING * float(size.sqrt()) if narrow else 0.0)
    return torch.clamp(ELEMENT * noise.sqrt(), min=FLOOR * floor)


def _around(squares: torch.Tensor) -> torch.Tensor:
    """The mean over the neighbours in a matrix of all rows."""
    if squares.dim() == 0 or squares.numel() == 0:
        return squares
    rows = squares.reshape(1, -1, squares.shape[-1])
    window = [min(2 * AROUND + 1, 2 * extent - 1) for extent in rows.shape[1:]]
    padding = [size // 2 for size in window]
    found = torch.nn.functional.avg_pool2d(rows, window, stride=1, padding=padding, count_include_pad=False)
    return found.reshape(squares.shape)


def _leans_not(truth: torch.Tensor, errors: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether PyTorch and its equals keep to |z| <= LEANING, so that C can be held to it."""
    if dtype.itemsize >= 4 or truth.numel() < LEANING_NUMBERS or not errors:
        return False
    return all(abs(leaning(off, truth)) <= LEANING for off in errors)


def _off(value: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    off = value.double() - truth
    return torch.where(off.isfinite(), off, 0.0)
