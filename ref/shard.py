"""PyTorch's sharding: optimizer state by ZeroRedundancyOptimizer; weights, gradients and state by fully_shard.

torch.distributed.fsdp and .optim take 1.4 s to import, so only the functions that need them do it."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ref import transformer


def adamw(parameters: Iterable[Tensor], **options) -> torch.optim.Optimizer:
    """AdamW whose state is split among ranks. A step sends each parameter from the rank that updates it to all."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **options)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the moments on this rank."""
    inner = getattr(optimizer, "optim", optimizer)
    return sum(
        own(value).nbytes
        for state in inner.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    )


def loads(elements: Sequence[int], ranks: int) -> list[int]:
    """Elements of each rank if whole tensors are assigned: the largest first, each to the rank with the fewest
    elements."""
    found = [0] * ranks
    for count in sorted(elements, reverse=True):
        found[found.index(min(found))] += count
    return found


# ---- weights, gradients and state: FSDP2 ----


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a split tensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a split tensor; all ranks must call this together. Any other tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "to_local") else tensor


class FullySharded:
    """A Transformer that fully_shard splits, with the interface of ref.ddp.DataParallel. Units are gathered one by one:
    the embedding, each block, and the head with its norm. Weights are cast to `dtype` before they are gathered, and
    gradients before they are reduced; None: no casts."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        how = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype))
        for unit in (model.token_embeddings, *model.layers):
            fully_shard(unit, **how)
        fully_shard(
            [model.ln_final, model.lm_head], reshard_after_forward=False, **how
        )  # stays gathered, because backward begins with it
        self.model = self.forward = fully_shard(model, **how)
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def finish(self) -> None:
        """Does nothing: gradients are reduced when backward returns."""

    def close(self) -> None:
        """Does nothing."""


class Toy(nn.Module):
    """The course's toy model for tests of fully sharded weights."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = transformer.Embedding(100, 64), transformer.Linear(64, 100)
        self.norm1, self.norm2 = transformer.RMSNorm(64), transformer.RMSNorm(128)
        self.up, self.down = transformer.Linear(64, 128), transformer.Linear(128, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm1(self.embedding(ids))
        return self.head(self.down(self.norm2(self.up(x).relu())))


def sharded_toy(model: Toy, compute: torch.dtype | None) -> Toy:
    """Splits the model. Every Linear and the Embedding is a unit that is cast to `compute` and gathered; gradients are
    reduced in f32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    mesh = init_device_mesh(model.head.weight.device.type, (dist.get_world_size(),))
    for layer in (model.embedding, model.up, model.down, model.head):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh)


def loss_alone(model: Toy, ids: Tensor, targets: Tensor, compute: torch.dtype | None) -> Tensor:
    """last_loss of the whole model in one process, with the casts of sharded_toy."""
    weights = {
        name: p if compute is None or "norm" in name else p.to(compute)
        for name, p in model.named_parameters()
    }
    return last_loss(torch.func.functional_call(model, weights, ids), targets)


def last_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the last position."""
    return transformer.cross_entropy(logits[:, -1], targets)
