"""What every rank has alike is compared now and then, so that a difference is found soon after it arises."""

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .ranks import Ranks, as_words, digest

EVERY = 100  # backward passes, or steps of an optimizer
_known = WeakTensorKeyDictionary()  # the ranks and the name of each parameter that every rank has
_steps: Any = weakref.WeakKeyDictionary()  # a counter for each optimizer


def know(ranks: Ranks, name: str, parameter: Tensor) -> None:
    """From now on ranks compare the parameter's state in optimizers."""
    _known[parameter] = ranks, name


def compare(ranks: Ranks, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Fails on every rank if a tensor is not the same on all. All ranks together."""
    names, prints = [], []
    for name, tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel():
            words = as_words(tensor.detach())
            names.append(name)
            prints.append(torch.stack([words.sum(), words[::3].sum()]).to(ranks.device.torch))
    mine = torch.stack(prints).cpu().numpy().tobytes() if prints else b""
    everyone = ranks.exchange(digest(repr(names).encode()))
    words = "Give each rank the same hyperparameters and the same file"
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RuntimeError(
                f"rank {rank} has other parameters, buffers or optimizer state than rank 0. {words}"
            )
    everyone = ranks.exchange(mine)
    for at, name in enumerate(names):
        for rank, theirs in enumerate(everyone):
            if theirs[16 * at : 16 * at + 16] != everyone[0][16 * at : 16 * at + 16]:
                raise RuntimeError(f"{name} of rank {rank} differs from rank 0's. {words}")


def compare_state(optimizer: torch.optim.Optimizer) -> None:
    """The same for the state of parameters that every rank has."""
    if hasattr(optimizer, "split_among_ranks"):  # ShardedOptimizer's
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known = {p: _known[p] for p in parameters if p in _known}
    if known:
        state = [
            (f"the optimizer's {key} of {name}", value)
            for p, (_, name) in known.items()
            for key, value in sorted(optimizer.state.get(p, {}).items())
            if isinstance(value, Tensor)
        ]
        compare(next(iter(known.values()))[0], state)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():  # a counter would be compiled again in each step
        return
    if next(_steps.setdefault(optimizer, itertools.count(1))) % EVERY == 0:
        compare_state(optimizer)


register_optimizer_step_pre_hook(_before_step)
