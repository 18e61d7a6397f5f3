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

In 16 bits a row has a limit for its rms, too: ten times the rms of all errors in it, and 2^-16 of a number of typical
size. The first row of dQ of causal attention is 0, as a difference of two equal sums in f32: exactly in PyTorch's
formula; a kernel that forms the sums in two ways leaves their roundings, 2^-18 for 256 columns.

A few equals say little of a number that alone in its row is noisy: one number in 32,768 may be off by 3 times the
largest error of PyTorch or an equal anywhere. Of fewer numbers none may.

In 16 bits a common factor of 1.001 hides in the last rounding. So 4096 numbers or more are compared with what rounding
alone explains: d is the answer less the truth rounded once. d may follow the truth by u / 8, and by 3 times what it
would by chance if rows are independent: f = sum(d t) / sum(t^2). Honest answers reach half of this limit (170 outputs
of C in 16 bits on a CPU), a factor of 1.003 at least 1.7 times it. An answer that is off by more than 1.3 roundings, as
one after many operations in 16 bits, is allowed 6 times the equals' std of f as well, or less if its error beyond one
rounding is smaller than that of the equals.

An answer of PyTorch is a measure only if it is one itself: not further from the truth than FAIR times what its equals
allow, and without a common factor. The equals share the formula, and must lie around the truth: their mean may be off
by as much as they differ, and by the roundings of the longest sum. On CPUs honest answers reach 0.6 and 0.4 of these
limits (2,354 outputs of the quick profile). In f32 the limits see a factor of 1.001, in 16 bits one of 1.01.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

SAME = 1.1  # times PyTorch's own error
NORM, SPREAD = 1.25, 4.0
NORM_16 = 1.1 * 0.5**0.5
ELEMENT, FLOOR, LONG_ROW, SMALL_ROW = 10.0, 5.0, 16, 2.0**-16
AROUND = 4
RARE, RARELY = 2**15, 3.0
ROUNDING = 2.0**-24
LEANING_NUMBERS = 4096
LEANING, CHANCE, LITTLE_MORE = 1 / 8, 3.0, 1.3
FAIR, UNORDERED = 2.0, 2.0**-5  # UNORDERED: the largest error of a PyTorch's whose equals are unknown
OFF, DIFFER, FACTORS = 2.0**-10, 4.0, 6.0  # OFF: f32 may hold what was computed in 16 bits
UNIT = 16  # terms of a sum that a matrix unit adds before it truncates


@dataclass
class Allowance:
    """The limits of one output, and what they were taken from."""

    norm: float
    elements: torch.Tensor
    rows: torch.Tensor | None  # by the rms of a row, of long rows in 16 bits
    rarely: float  # the limit of one number in RARE
    torch_rel_l2: float | None
    equals_rel_l2: float | None


class Orders:
    """The equals of one output: their errors, relative norms and common factors, less 1."""

    def __init__(self, equals: Sequence[torch.Tensor], truth: torch.Tensor):
        self.off = _off(torch.stack([*equals]), truth) if equals else truth.new_empty((0, *truth.shape))
        flat, size = self.off.reshape(len(equals), truth.numel()), torch.linalg.vector_norm(truth)
        norms = torch.linalg.vector_norm(flat, dim=1)
        self.rel = torch.where(norms == 0, 0.0, norms / size)
        self.factors = flat @ truth.flatten() / size**2 if size > 0 else torch.zeros_like(norms)
        self.apart = float(self.factors.std()) if len(norms) > 1 else 0.0  # the std of the common factors

    def __len__(self) -> int:
        return len(self.rel)

    def limit(self, narrow: bool) -> tuple[float, float]:
        """By norm, and the rms of the errors."""
        rms, std = float(self.rel.square().mean().sqrt()), float(self.rel.std()) if len(self) > 1 else 0.0
        return (NORM_16 if narrow else NORM) * rms + SPREAD * std, rms


def allow(
    truth: torch.Tensor, torchs: Sequence, orders: Orders, dtype: torch.dtype, eps: float | None = None
) -> Allowance:
    """For a finite `truth`, PyTorch's answers, the reference first, and its equals. `eps` replaces the dtype's own."""
    u = (torch.finfo(dtype).eps if eps is None else eps) / 2
    theirs = [_off(answer, truth) for answer in torchs]
    norms = [relative(e, truth) for e in theirs]
    norm = SAME * max(norms, default=0.0)
    elements = torch.stack([*theirs, torch.zeros_like(truth)]).abs().amax(0)
    off = torch.stack([*theirs, *orders.off]) if theirs or len(orders) else truth.new_zeros((1, *truth.shape))
    rms_equals = rows = None
    if len(orders):
        narrow = dtype.itemsize < 4
        limit, rms_equals = orders.limit(narrow)
        norm = max(norm, limit)
        elements = torch.maximum(elements, _noise(off, truth, torch.finfo(dtype).eps / 2, narrow))
        if narrow and truth.dim() > 1 and truth.shape[-1] >= LONG_ROW:
            least = SMALL_ROW * truth.square().mean().sqrt()
            rows = (
                ELEMENT * off.square().mean((0, -1)).sqrt() + 2 * u * truth.square().mean(-1).sqrt() + least
            )
    largest = float(off.abs().max()) if off.numel() else 0.0
    last = 2 * u if len(orders) and dtype.itemsize < 4 else u
    measures = (norms[0] if norms else None, rms_equals)
    return Allowance(norm + u, elements + last * truth.abs(), rows, RARELY * largest, *measures)


def no_measures(
    torchs: Mapping, orders: Orders, truth: torch.Tensor, eps: float | None, longest: int, apart: float
) -> dict[str, str]:
    """Why answers of PyTorch are no measure, by side; "" stands for the equals. `longest`: terms of a sum. `apart`: how
    far apart common factors of equals are at the least."""
    dtype = next(iter(torchs.values())).dtype
    narrow, u = dtype.itemsize < 4, (torch.finfo(dtype).eps if eps is None else eps) / 2
    if not truth.any():
        return {}
    if not len(orders):
        far = {impl: relative(_off(answer, truth), truth) for impl, answer in torchs.items()}
        over = {impl: e for impl, e in far.items() if not e <= UNORDERED}
        return {impl: f"rel_l2 {e:.3g} exceeds {UNORDERED:.3g}" for impl, e in over.items()}
    mean = orders.off.mean(0)
    differ = relative(orders.off - mean, truth) / math.sqrt(max(1, len(orders) - 1))
    rounding = longest / UNIT * ROUNDING
    between = FACTORS * max(apart, orders.apart)
    norm = FAIR * (orders.limit(narrow)[0] + u) + rounding
    few = float(torch.linalg.vector_norm(truth.square()) / truth.square().sum())  # 1 of a single number

    def wrong(e: torch.Tensor, limit: float) -> str:
        far, (common, spread) = relative(e, truth), _factor(e, truth)
        if not far <= limit:
            return f"rel_l2 {far:.3g} exceeds {limit:.3g}"
        chance = max(u / 2, u * few) if narrow else 4 * u + CHANCE * far * few
        most = chance + rounding + between + FACTORS * spread
        return f"all are about {1 + common:.5g} times the truth" if not abs(common) <= most else ""

    found = {impl: wrong(_off(answer, truth), norm) for impl, answer in torchs.items()}
    found[""] = wrong(mean, max(OFF, 2 * u) + DIFFER * differ + rounding)
    return {impl: words for impl, words in found.items() if words}


def _factor(off: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """By which common factor errors follow the truth, and how well that is known if rows are independent."""
    power = float(truth.square().sum())
    common = float((off * truth).sum()) / power
    rest = (off - common * truth) * truth
    rows = rest.sum(-1) if rest.dim() else rest
    return common, max(float(torch.linalg.vector_norm(x)) for x in (rest, rows)) / power


def relative(off: torch.Tensor, truth: torch.Tensor) -> float:
    """The norm of the errors over that of the truth."""
    size, error = float(torch.linalg.vector_norm(truth)), float(torch.linalg.vector_norm(off))
    return error / size if size > 0 else (0.0 if error == 0 else math.inf)


def leaning(
    value: torch.Tensor, truth: torch.Tensor, orders: Orders, apart: float = 0.0
) -> tuple[float, float]:
    """By which factor an answer in 16 bits differs from the truth rounded once, less 1, and its limit. `apart`: as in
    no_measures()."""
    rounded, wide = truth.to(value.dtype).double(), value.double()
    common, spread = _factor(wide - rounded, truth)
    most = LEANING * torch.finfo(value.dtype).eps / 2 + CHANCE * spread
    once = relative(rounded - truth, truth)

    def beyond(these: Orders) -> float:
        """The largest error apart from the common factor and one rounding."""
        rest = float((these.rel.square() - these.factors.square()).amax()) if len(these) else 0.0
        return math.sqrt(rest - once**2) if rest > (LITTLE_MORE * once) ** 2 else 0.0

    share = min(1.0, beyond(Orders([wide], truth)) / max(beyond(orders), 1e-300))
    return common, most + share * FACTORS * max(apart, orders.apart)


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
    limits = torch.broadcast_tensors(squares, _around(squares), row, share * truth.square())
    noise = torch.stack(limits).amax(0)
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


def _off(value: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    off = value.double() - truth
    return torch.where(off.isfinite(), off, 0.0)
