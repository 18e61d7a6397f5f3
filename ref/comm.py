"""PyTorch's collectives on the default process group, with the names of impl/comm/comm.h."""

import torch
import torch.distributed as dist
from torch import Tensor

OPERATIONS = {"sum": dist.ReduceOp.SUM, "average": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_reduce(x: Tensor, reduction: str = "sum") -> Tensor:
    """In place. Gloo has no average, so the sum is divided, as in PyTorch's DistributedDataParallel."""
    dist.all_reduce(x, OPERATIONS[reduction])
    if reduction == "average":
        x.div_(dist.get_world_size())
    return x


def reduce_scatter(x: Tensor, out: Tensor) -> Tensor:
    """x [ranks][count], out [count]. Gloo may have no reduce-scatter, so on the CPU all of x is reduced and each rank
    takes its part."""
    if x.device.type == "cuda":
        dist.reduce_scatter_tensor(out, x)
    else:
        out.copy_(all_reduce(x.clone()).view(dist.get_world_size(), -1)[dist.get_rank()])
    return out


def all_gather(x: Tensor, out: Tensor) -> Tensor:
    """x [count], out [ranks][count]."""
    if x.device.type == "cuda":
        dist.all_gather_into_tensor(out, x)
    else:
        dist.all_gather([*out.view(dist.get_world_size(), -1).unbind()], x)
    return out


def broadcast(x: Tensor, root: int) -> Tensor:
    """In place."""
    dist.broadcast(x, root)
    return x


def reduced(inputs: list[Tensor], reduction: str) -> Tensor:
    """The result of all_reduce in float64; exact for integers."""
    wide = torch.stack([x.double() if x.is_floating_point() else x for x in inputs])
    if reduction == "max":
        return wide.amax(0)
    total = wide.sum(0)
    return total.div_(len(inputs)) if reduction == "average" else total


def in_order(inputs: list[Tensor], order: list[int], reduction: str) -> Tensor:
    """The result of all_reduce if ranks are added one by one in this order, with a rounding at every addition."""
    total = inputs[order[0]].clone()
    for rank in order[1:]:
        total = total + inputs[rank]
    return total.div_(len(inputs)) if reduction == "average" else total
