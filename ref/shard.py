"""Optimizer state split among ranks, by PyTorch's own ZeroRedundancyOptimizer."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer


def adamw(parameters: Iterable[Tensor], **options) -> torch.optim.Optimizer:
    """PyTorch's AdamW of this rank's parameters; a step sends each to all."""
    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **options)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the moments that this rank has."""
    inner = getattr(optimizer, "optim", optimizer)
    return sum(
        value.nbytes
        for state in inner.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    )


def loads(elements: Sequence[int], ranks: int) -> list[int]:
    """Elements of each rank, where whole tensors are given away: the largest first, to the rank that has least."""
    found = [0] * ranks
    for count in sorted(elements, reverse=True):
        found[found.index(min(found))] += count
    return found
