"""What is split among ranks: optimizer state by PyTorch's own ZeroRedundancyOptimizer, all by its fully_shard."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from ref import transformer


def adamw(parameters: Iterable[Tensor], **options) -> torch.optim.Optimizer:
    """PyTorch's AdamW of this rank's parameters; a step sends each to all."""
    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **options)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the moments that this rank has."""
    inner = getattr(optimizer, "optim", optimizer)
    return sum(
        own(value).nbytes
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


# ---- weights, gradients and state: FSDP2 ----


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, if it is split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor of all ranks, if it is split: they make this call together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class FullySharded:
    """A Transformer that fully_shard splits, with the interface of ref.ddp.DataParallel. The embedding, each block, and
    the head with its norm are gathered one by one. `dtype`: what weights are cast to before they are gathered, and
    gradients before they are reduced; None: neither is cast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None):
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        how = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
        for unit in (model.token_embeddings, *model.layers):
            fully_shard(unit, **how)
        fully_shard(
            [model.ln_final, model.lm_head], reshard_after_forward=False, **how
        )  # backward begins there
        self.model = self.forward = fully_shard(model, **how)
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def finish(self) -> None:
        """Nothing: gradients are reduced when backward returns."""

    def close(self) -> None:
        """Nothing is left."""


class Toy(nn.Module):
    """The course's model for tests of fully sharded weights."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = transformer.Embedding(100, 64), transformer.Linear(64, 100)
        self.norm1, self.norm2 = transformer.RMSNorm(64), transformer.RMSNorm(128)
        self.up, self.down = transformer.Linear(64, 128), transformer.Linear(128, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm1(self.embedding(ids))
        return self.head(self.down(self.norm2(self.up(x).relu())))


def sharded_toy(model: Toy, compute: torch.dtype | None) -> Toy:
    """Every Linear and the Embedding is gathered by itself, cast to `compute`; gradients are reduced in f32."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    mesh = init_device_mesh(model.head.weight.device.type, (dist.get_world_size(),))
    for layer in (model.embedding, model.up, model.down, model.head):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh)


def loss_alone(model: Toy, ids: Tensor, targets: Tensor, compute: torch.dtype | None) -> Tensor:
    """Of the last position, in one process that casts as sharded_toy does."""
    weights = {
        name: p if compute is None or "norm" in name else p.to(compute)
        for name, p in model.named_parameters()
    }
    return last_loss(torch.func.functional_call(model, weights, ids), targets)


def last_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the last position."""
    return transformer.cross_entropy(logits[:, -1], targets)
