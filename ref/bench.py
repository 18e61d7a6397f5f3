"""The handout's benchmarking_script: the model's forward, backward and optimizer, timed apart."""

from dataclasses import dataclass, field
from time import perf_counter

import torch

from ref.transformer import AdamW, Transformer, cross_entropy


@dataclass
class Times:
    """Milliseconds of the timed steps; a phase that the mode leaves out is empty."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def step(self) -> list[float]:
        phases = [phase for phase in (self.forward, self.backward, self.optimizer) if phase]
        return [sum(parts) for parts in zip(*phases, strict=True)]


def random_batch(batch: int, context: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of context tokens, and the same shifted by one."""
    tokens = torch.randint(vocab, (batch, context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Trainer:
    """One model, one random batch, one step at a time: `mode` is forward, backward or train."""

    def __init__(self, model: Transformer, ids, targets, mode: str = "train", autocast: bool = False):
        self.model, self.ids, self.targets = model, ids, targets
        self.mode, self.autocast = mode, autocast
        self.optimizer = AdamW(model.parameters()) if mode == "train" else None
        self.times = Times()

    def step(self, timed: bool = True) -> None:
        times = self.times if timed else Times()
        start = perf_counter()
        if self.mode == "forward":
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                self.model(self.ids)
            times.forward.append(1e3 * (perf_counter() - start))
            return
        self.model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = cross_entropy(self.model(self.ids), self.targets)
        middle = perf_counter()
        loss.backward()
        end = perf_counter()
        times.forward.append(1e3 * (middle - start))
        times.backward.append(1e3 * (end - middle))
        if self.optimizer:
            self.optimizer.step()
            times.optimizer.append(1e3 * (perf_counter() - end))
        times.losses.append(loss.item())


def benchmark(trainer: Trainer, warmup: int, steps: int) -> Times:
    for _ in range(warmup):
        trainer.step(timed=False)
    for _ in range(steps):
        trainer.step()
    return trainer.times
