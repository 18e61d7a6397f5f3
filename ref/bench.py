"""The handout's benchmarking_script: times forward, backward and optimizer of the model separately or together."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch

from ref.transformer import AdamW, Transformer, cross_entropy


@dataclass
class Times:
    """Milliseconds of the timed steps. The list of a phase that the mode leaves out is empty."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)

    @property
    def step(self) -> list[float]:
        phases = [phase for phase in (self.forward, self.backward, self.optimizer) if phase]
        return [sum(parts) for parts in zip(*phases, strict=True)]


def random_batch(batch: int, context: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [batch, context]; the targets are the inputs shifted by one token."""
    tokens = torch.randint(vocab, (batch, context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Trainer:
    """Steps of one model on one random batch. `mode` is forward, backward or train.

    compiled: the model with its loss is. fused: AdamW is one kernel of PyTorch, and a graph can contain it. blocks: the
    model is compiled block by block, and all blocks share one compiled code, which takes seconds instead of minutes.
    synchronize() waits for the device; step() calls it between phases.
    """

    def __init__(
        self,
        model: Transformer,
        ids,
        targets,
        mode: str = "train",
        autocast: bool = False,
        compiled: bool = False,
        fused: bool = False,
        blocks: bool = False,
        synchronize: Callable[[], None] = lambda: None,
    ):
        self.model, self.ids, self.targets = model, ids, targets
        self.mode, self.synchronize = mode, synchronize
        self.autocast = torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast)
        self.logits, self.loss = model, lambda ids, targets: cross_entropy(model(ids), targets)
        if compiled and blocks:
            for block in model.layers:
                block.compile(dynamic=False)
            entropy = torch.compile(cross_entropy, dynamic=False)
            self.loss = lambda ids, targets: entropy(model(ids), targets)
        elif compiled:
            self.logits, self.loss = (torch.compile(f, dynamic=False) for f in (self.logits, self.loss))
        self.optimizer = None
        if mode == "train" and fused:
            # capturable: the step counts are on the device, so a graph can contain them.
            self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=ids.is_cuda)
        elif mode == "train":
            self.optimizer = AdamW(model.parameters())
        self.times = Times()

    def forward(self) -> torch.Tensor:
        if self.mode == "forward":
            with torch.no_grad(), self.autocast:
                return self.logits(self.ids)
        self.model.zero_grad(set_to_none=True)
        with self.autocast:
            return self.loss(self.ids, self.targets)

    def whole(self) -> torch.Tensor:
        """Runs a step without timing; returns its loss, or in the mode forward its logits."""
        result = self.forward()
        if self.mode != "forward":
            result.backward()
            result = result.detach()
        if self.optimizer:
            self.optimizer.step()
        return result

    def step(self, timed: bool = True) -> torch.Tensor:
        """Runs a step as whole(), and synchronises the device after each phase, as the handout asks."""
        times = self.times if timed else Times()
        start = self.lap()
        result = self.forward()
        middle = self.lap()
        times.forward.append(1e3 * (middle - start))
        if self.mode == "forward":
            return result
        result.backward()
        end = self.lap()
        times.backward.append(1e3 * (end - middle))
        if self.optimizer:
            self.optimizer.step()
            times.optimizer.append(1e3 * (self.lap() - end))
        return result.detach()

    def lap(self) -> float:
        self.synchronize()
        return perf_counter()

    def capture(self) -> Callable[[], None]:
        """Captures the whole step as a CUDA graph; returns a function that replays it. It needs `fused`, whose state is
        on the GPU."""
        for _ in range(3):  # compiles, loads and allocates, which a capture must not do
            self.whole()
        self.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.whole()
        return graph.replay


def benchmark(trainer: Trainer, warmup: int, steps: int) -> Times:
    for _ in range(warmup):
        trainer.step(timed=False)
    for _ in range(steps):
        trainer.step()
    return trainer.times
