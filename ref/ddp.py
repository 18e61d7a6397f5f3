"""Data parallelism in PyTorch: the course's toy models, the averaging of gradients that the assignment asks for, and
the same training in one process."""

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel


class Toy(nn.Module):
    """Three layers, one of them with a frozen bias, and a frozen matrix that nothing reads."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 10, bias=False)
        self.fc2 = nn.Linear(10, 50)
        self.fc3 = nn.Linear(50, 5, bias=False)
        self.unused = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.fc2.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class TiedToy(nn.Module):
    """Five layers; the fourth shares its weight with the second."""

    def __init__(self):
        super().__init__()
        widths = (10, 10, 50, 10, 50, 5)
        layers = [nn.Linear(i, o, bias=False) for i, o in itertools.pairwise(widths)]
        self.layers = nn.ModuleList(layers)
        self.layers[3].weight = self.layers[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


TOYS = {"toy": Toy, "tied": TiedToy}


def last_alone(model: nn.Module, x: Tensor) -> Tensor:
    """The model's output, from which only the last layer gets a gradient."""
    *_, last = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    hook = last.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),))
    try:
        return model(x)
    finally:
        hook.remove()


def trained(model: nn.Module) -> list[Tensor]:
    """The model's parameters with gradients, each once."""
    return [p for p in model.parameters() if p.requires_grad]


# ---- gradients of all ranks ----


def average_each(parameters: Iterable[Tensor]) -> None:
    """naive: one all-reduce for each gradient, after the backward pass."""
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def average_flat(parameters: Sequence[Tensor]) -> None:
    """flat: copies all gradients into one tensor, reduces it in one call, and copies the result back."""
    grads = [p.grad for p in parameters]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for grad, part in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(part)


class Overlap:
    """overlap: the all-reduce of each gradient begins as soon as the gradient is final."""

    def __init__(self, parameters: Sequence[Tensor]):
        self.handles: list = []
        self.removable = [p.register_post_accumulate_grad_hook(self.send) for p in parameters]

    def send(self, p: Tensor) -> None:
        self.handles.append((p, dist.all_reduce(p.grad, async_op=True)))

    def finish(self) -> None:
        for p, handle in self.handles:
            handle.wait()
            p.grad.div_(dist.get_world_size())
        self.handles.clear()

    def remove(self) -> None:
        for hook in self.removable:
            hook.remove()


class DataParallel:
    """A model and a strategy by which finish() averages its gradients. `bucketed` is PyTorch's DDP."""

    def __init__(self, model: nn.Module, strategy: str, bucket_mb: float = 25.0):
        self.model = self.forward = model
        self.parameters = trained(model)
        self.overlap = Overlap(self.parameters) if strategy == "overlap" else None
        self.finish = {"naive": self.naive, "flat": self.flat, "overlap": self.wait}.get(
            strategy, lambda: None
        )
        if strategy == "bucketed":
            every = sum(p.nbytes for p in self.parameters) / 2**20 + 1
            self.forward = DistributedDataParallel(
                model, bucket_cap_mb=bucket_mb or every, gradient_as_bucket_view=True
            )

    def compress(self) -> None:
        """Makes `bucketed` send gradients in bf16."""
        self.forward.register_comm_hook(None, bf16_compress_hook)

    def naive(self) -> None:
        average_each(self.parameters)

    def flat(self) -> None:
        average_flat(self.parameters)

    def wait(self) -> None:
        self.overlap.finish()

    def close(self) -> None:
        if self.overlap:
            self.overlap.remove()


# ---- one process ----


@torch.no_grad()
def sgd(parameters: Iterable[Tensor], lr: float) -> None:
    for p in parameters:
        p.sub_(p.grad, alpha=lr)


def average_alone(model: nn.Module, losses: Iterable[Tensor]) -> list[float]:
    """Runs backward for each rank's loss in one process and sets the parameters' gradients to their average. Returns
    the losses."""
    found = []
    total: list[Tensor] | None = None
    for loss in losses:
        grads = torch.autograd.grad(loss, trained(model))
        total = [*grads] if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        found.append(float(loss.detach()))
    for p, grad in zip(trained(model), total or (), strict=True):
        p.grad = grad / len(found)
    return found
