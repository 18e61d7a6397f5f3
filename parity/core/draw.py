"""Inputs that are the same on every machine and in every order of cases, and outputs that start as poison."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from parity.core.case import seed_of
from tandem.library import DTYPES

POISON = 0xFF  # NaN in every float type, -1 in every signed one
FENCE = 0xA5
FENCE_BYTES = 256
PIECE = 2**20  # elements of a checksum at a time
FEW, APART = 2**16, 1021  # of more numbers a sample has each APART-th; a prime meets all lanes of a vector


class Draw:
    """Draws for one case, by PyTorch's CPU generator, seeded by names: the same numbers on every device."""

    def __init__(self, case_name: str, device: torch.device | None = None):
        self.case_name = case_name
        self.device = device or torch.device("cpu")
        self._inputs: dict[str, tuple[torch.Tensor, int]] = {}
        self._drawn: dict[str, Callable[[], torch.Tensor]] = {}
        self._fenced: list[tuple[torch.Tensor, int]] = []
        self._changed = False

    def normal(self, name, shape, dtype, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        values = torch.empty(shape, dtype=_wide(dtype)).normal_(mean, std, generator=self._generator(name))
        return self._keep(name, values.to(DTYPES[dtype]))

    def uniform(self, name, shape, dtype, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        values = torch.empty(shape, dtype=_wide(dtype)).uniform_(low, high, generator=self._generator(name))
        return self._keep(name, values.to(DTYPES[dtype]))

    def integers(self, name, shape, dtype="i64", low: int = 0, high: int = 2) -> torch.Tensor:
        """Whole numbers in [low, high)."""
        values = torch.randint(low, high, tuple(shape), generator=self._generator(name))
        return self._keep(name, values.to(DTYPES[dtype]))

    def quickly(self, name, shape, dtype, std: float = 1.0, mean: float = 0.0) -> Callable[[], torch.Tensor]:
        """A function that draws as normal(), by the device, with numbers of its own: for large tensors. Each call draws
        the same numbers again, so nothing is held while a side's memory is measured."""

        def drawn():
            generator = torch.Generator(self.device).manual_seed(seed_of(self.case_name, name))
            values = torch.empty(shape, dtype=DTYPES[dtype], device=self.device)
            values.normal_(mean, std, generator=generator)
            return values.flatten().roll(1).view_as(values) if self._changed else values

        self._drawn[name] = drawn
        return drawn

    def poisoned(self, shape, dtype) -> torch.Tensor:
        """An output that nobody has written yet, with fences on both sides."""
        kind = DTYPES[dtype]
        nbytes = math.prod(shape) * kind.itemsize
        # The fence in front keeps the 256-byte alignment that torch's own blocks (64 bytes) may lack.
        block = torch.full((nbytes + 3 * FENCE_BYTES,), FENCE, dtype=torch.uint8, device=self.device)
        start = FENCE_BYTES + -block.data_ptr() % FENCE_BYTES
        block[start : start + nbytes] = POISON
        self._fenced.append((block, start, nbytes))
        return block[start : start + nbytes].view(kind).view(tuple(shape))

    def kept(self) -> list[torch.Tensor]:
        """Copies of outputs and their fences, for restore()."""
        return [block.clone() for block, _, _ in self._fenced]

    def restore(self, kept: list[torch.Tensor], outputs: Iterable) -> None:
        """The `outputs` of poisoned() hold again what they held before. Others are poisoned."""
        outputs = list(outputs)
        self.poison(outputs)
        places = {value.data_ptr() for value in outputs if isinstance(value, torch.Tensor)}
        for (block, start, _), before in zip(self._fenced, kept, strict=False):  # a call may ask for more
            if block.data_ptr() + start in places:
                block.copy_(before)

    def change(self, changed: bool) -> None:
        """Moves all numbers of each floating-point input by one place, or back. quickly() draws them moved."""
        floating = (tensor for tensor, _ in self._inputs.values() if tensor.is_floating_point())
        for tensor in floating if changed != self._changed else ():
            tensor.copy_(tensor.flatten().roll(1 if changed else -1).view_as(tensor))
        self._changed = changed

    def poison(self, outputs: Iterable) -> None:
        """Overwrites outputs, whoever made them, unless they are inputs."""
        inputs = {tensor.untyped_storage().data_ptr() for tensor, _ in self._inputs.values()}
        for value in outputs:
            if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
                continue
            if value.untyped_storage().data_ptr() not in inputs:
                value.detach().fill_(math.nan)

    def inputs(self) -> dict[str, torch.Tensor]:
        kept = {name: tensor for name, (tensor, _) in self._inputs.items()}
        return kept | {name: drawn() for name, drawn in self._drawn.items()}

    def complaints(self) -> list[str]:
        """Inputs that were written, and outputs with broken fences."""
        written = (name for name, (tensor, was) in self._inputs.items() if _checksum(tensor) != was)
        found = [f"input {name} was written" for name in written]
        for block, start, nbytes in self._fenced:
            fences = torch.cat((block[:start], block[start + nbytes :]))
            if not bool((fences == FENCE).all()):
                found.append(f"an output of {nbytes} bytes was written beyond its bounds")
        return found

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed_of(self.case_name, name))

    def _keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in self._inputs:
            raise ValueError(f"{self.case_name} draws {name!r} twice")
        tensor = tensor.to(self.device)
        self._inputs[name] = (tensor, _checksum(tensor))
        return tensor


class Drawn(Mapping[str, torch.Tensor]):
    """Tensors by their names, each drawn when it is read."""

    def __init__(self, drawn: Mapping[str, Callable[[], torch.Tensor]]):
        self._drawn = drawn

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._drawn[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._drawn)

    def __len__(self) -> int:
        return len(self._drawn)


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of some elements of many, the last among them."""
    flat = tensor.detach().flatten()
    apart = APART if len(flat) > FEW else 1
    return flat[(len(flat) - 1) % apart :: apart].clone()


def left_poisoned(tensor: torch.Tensor) -> int:
    """How many elements still have every bit set, as poisoned() left them."""
    return int((bits(tensor) == -1).sum())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as whole numbers of the same size."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(width)


def _wide(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "f64" else torch.float32


def _checksum(tensor: torch.Tensor) -> int:
    """Of the bits and their places: each element is multiplied by another odd number."""
    pieces = bits(tensor).view(-1).split(PIECE)
    odd = torch.arange(1, 2 * min(PIECE, tensor.numel()) + 1, 2, device=tensor.device)
    sums = torch.stack([(piece * odd[: len(piece)]).sum() for piece in pieces])
    return int((sums * torch.arange(1, 2 * len(sums) + 1, 2, device=tensor.device)).sum())
