"""The handout's benchmarking_script: the model's forward, backward and optimizer, timed apart or as a whole."""

from collections.abc import Callable
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

    @property
    def step(self) -> list[float]:
        phases = [phase for phase in (self.forward, self.backward, self.optimizer) if phase]
        return [sum(parts) for parts in zip(*phases, strict=True)]


def random_batch(batch: int, context: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of context tokens, and the same shifted by one."""
    tokens = torch.randint(vocab, (batch, context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Trainer:
    """One model, one random batch, one step at a time: `mode` is forward, backward or train.

    `best` is PyTorch at its best: the loss compiled, and the fused AdamW; with `blocks` the model is compiled block by
    block, all from the code of one: seconds in place of minutes. `synchronize` waits for the device, between the phases
    that step() times.
    """

    def __init__(
        self,
        model: Transformer,
        ids,
        targets,
        mode: str = "train",
        autocast: bool = False,
        best: bool = False,
        blocks: bool = False,
        synchronize: Callable[[], None] = lambda: None,
    ):
        self.model, self.ids, self.targets = model, ids, targets
        self.mode, self.synchronize = mode, synchronize
        self.autocast = torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast)
        self.logits, self.loss = model, lambda ids, targets: cross_entropy(model(ids), targets)
        if best and blocks:
            for block in model.layers:
                block.compile(dynamic=False)
            entropy = torch.compile(cross_entropy, dynamic=False)
            self.loss = lambda ids, targets: entropy(model(ids), targets)
        elif best:
            self.logits, self.loss = (torch.compile(f, dynamic=False) for f in (self.logits, self.loss))
        self.optimizer = None
        if mode == "train" and best:
            # Capturable: the step counts are on the device, so that a graph may hold them.
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
        """A step without a look at the clock; its loss, or in the mode forward its logits."""
        result = self.forward()
        if self.mode != "forward":
            result.backward()
            result = result.detach()
        if self.optimizer:
            self.optimizer.step()
        return result

    def step(self, timed: bool = True) -> None:
        """A step with the device synchronised after each phase, as the handout asks for."""
        times = self.times if timed else Times()
        start = self.lap()
        result = self.forward()
        middle = self.lap()
        times.forward.append(1e3 * (middle - start))
        if self.mode == "forward":
            return
        result.backward()
        end = self.lap()
        times.backward.append(1e3 * (end - middle))
        if self.optimizer:
            self.optimizer.step()
            times.optimizer.append(1e3 * (self.lap() - end))

    def lap(self) -> float:
        self.synchronize()
        return perf_counter()

    def capture(self) -> Callable[[], None]:
        """The whole step as one CUDA graph: a function that replays it. Only for `best`, whose state is on the GPU."""
        for _ in range(3):  # what is compiled, loaded and allocated once must not happen inside the capture
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
