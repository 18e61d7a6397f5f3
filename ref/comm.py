"""Collectives of PyTorch among the ranks of the default process group, in the words of impl/comm/comm.h."""

import torch
import torch.distributed as dist
from torch import Tensor

OPERATIONS = {"sum": dist.ReduceOp.SUM, "average": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def all_reduce(x: Tensor, reduction: str = "sum") -> Tensor:
    """In place. Gloo has no average: the sum is divided, as PyTorch's own data parallelism does with gradients."""
    dist.all_reduce(x, OPERATIONS[reduction])
    if reduction == "average":
        x.div_(dist.get_world_size())
    return x


def reduce_scatter(x: Tensor, out: Tensor) -> Tensor:
    """x [ranks][count], out [count]. Gloo may have none: then all of it is reduced, and a rank takes its part."""
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
    """What all_reduce comes to, in float64, or exactly where elements are whole numbers."""
    wide = torch.stack([x.double() if x.is_floating_point() else x for x in inputs])
    if reduction == "max":
        return wide.amax(0)
    total = wide.sum(0)
    return total.div_(len(inputs)) if reduction == "average" else total


def in_order(inputs: list[Tensor], order: list[int], reduction: str) -> Tensor:
    """The same with a rounding at every addition, one after the other in this order."""
    total = inputs[order[0]].clone()
    for rank in order[1:]:
        total = total + inputs[rank]
    return total.div_(len(inputs)) if reduction == "average" else total
