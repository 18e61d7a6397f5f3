"""What this rank has of tensors that are split by rows among the ranks: in a state_dict(), and as gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .ranks import Ranks

# These look at all elements of a parameter at once, so they are wrong on a part of its rows.
JOINT = {"Adafactor", "LAMB", "LARS", "LBFGS", "Lamb", "Muon", "SOAP", "Shampoo"}


class Place(NamedTuple):
    """Where this rank's rows are in the whole tensor."""

    ranks: Ranks
    shape: torch.Size
    first: int


class Shard(Tensor):
    """This rank's rows in a state_dict(). torch.distributed.checkpoint saves each rank's rows, and loads them from
    files of any number of ranks; it asks for the size of the whole tensor. Copies are shards too. torch.save saves a
    plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(tensor: Tensor, whole: torch.Size, first: int, reads: bool = True) -> "Shard":
        shard = tensor.detach().as_subclass(Shard)
        shard._about = torch.Size(whole), first, reads
        return shard

    def plain(self) -> Tensor:
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:
        return self._about[0] if dim is None else self._about[0][dim]

    def to(self, *arguments: Any, **named: Any) -> "Shard":
        return Shard.of(self.plain().to(*arguments, **named), *self._about)

    def __deepcopy__(self, memo: dict) -> "Shard":
        memo[id(self)] = copied = Shard.of(self.plain().clone(), *self._about)
        return copied

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def new_empty(self, *size: Any, **named: Any) -> "Shard":
        """async_save() copies a tensor so: new_empty(), set_() with the whole size, then the attributes."""
        return Shard.of(self.plain().new_empty(self.shape, **named), *self._about)

    def set_(self, storage: Any, offset: int, size: torch.Size, stride: tuple) -> "Shard":
        return super().set_(storage, offset, self.shape, stride)

    def _chunks(self) -> list[tuple]:
        """Where its elements are in the whole tensor: none, or one block."""
        whole, first, _ = self._about
        return [(torch.Size([first, *[0] * (len(whole) - 1)]), self.shape)] if self.numel() else []

    def __create_chunk_list__(self) -> list:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # needs seconds to import

        return [ChunkStorageMetadata(*chunk) for chunk in self._chunks() if self._about[2]]

    def __create_write_items__(self, name: str, _: Any) -> list:
        from torch.distributed.checkpoint import metadata, planner

        kind, items = metadata.TensorProperties.create_from_tensor(self.plain()), []
        for offsets, sizes in self._chunks():
            data = planner.TensorWriteData(metadata.ChunkStorageMetadata(offsets, sizes), kind, self.size())
            index = metadata.MetadataIndex(name, offsets)
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, _: Any) -> Tensor:
        return self.plain()


class Rows(Tensor):
    """This rank's rows of a gradient. PyTorch's norms of it, as in clip_grad_norm_, are norms of the whole gradient:
    all ranks together."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function in NORMS:
                return NORMS[function](*arguments, **named or {})
            result = function(*arguments, **named or {})
            return as_rows(result, arguments[0]._place) if function in SAME else result


def as_rows(tensor: Tensor, place: Place) -> Rows:
    rows = tensor.as_subclass(Rows)
    rows._place = place
    return rows


def _foreach_norm(tensors: list[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    power = float(ord)
    if power < 0:
        raise ValueError(f"the norm of order {power} of rows that are split among the ranks is not known")
    filled = [t if t.numel() else t.new_zeros(1) for t in tensors]  # an empty one has no maximum
    norms = [*torch._foreach_norm(filled, power, dtype=torch.float64)]
    split = [i for i, tensor in enumerate(tensors) if isinstance(tensor, Rows)]
    ranks, total = tensors[split[0]]._place.ranks, torch.stack([norms[i] for i in split])
    finite = 0 < power < torch.inf
    total = ranks.all_reduce(total.pow(power) if finite else total, "max" if power == torch.inf else "sum")
    for i, norm in zip(split, total.pow(1 / power) if finite else total, strict=True):
        norms[i] = norm
    return [norm.to(dtype or tensor.dtype) for norm, tensor in zip(norms, tensors, strict=True)]


def _vector_norm(
    x: Tensor, ord: float | str | None = 2, dim: Any = None, keepdim: bool = False, **named: Any
) -> Tensor:
    if dim is not None or keepdim or (isinstance(ord, str) and ord != "fro") or named.get("out") is not None:
        raise ValueError(
            "of rows that are split among the ranks only the norm of all elements is known: dim=None"
        )
    return _foreach_norm([x], 2 if ord in (None, "fro") else ord, named.get("dtype"))[0]


def _norm(x: Tensor, p: float | str | None = "fro", *rest: Any, **named: Any) -> Tensor:
    return _vector_norm(x, p, *rest, **named)


def _linalg_norm(x: Tensor, ord: float | str | None = None, *rest: Any, **named: Any) -> Tensor:
    return _vector_norm(x, "of a matrix" if ord is not None and x.dim() > 1 else ord, *rest, **named)


NORMS = {
    torch._foreach_norm: _foreach_norm,
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
}
SAME = {Tensor.detach, Tensor.data.__get__, Tensor.float, Tensor.double, Tensor.to}
torch.utils._foreach_utils._foreach_supported_types.append(Rows)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before each step of every optimizer."""
    if not any(hasattr(p, "split_among_ranks") for group in optimizer.param_groups for p in group["params"]):
        return
    if {kind.__name__ for kind in type(optimizer).__mro__} & JOINT:
        raise TypeError(
            f"{type(optimizer).__name__} needs whole parameters, and FullyShardedDataParallel has split them by rows: "
            "use an optimizer that treats each element by itself, or DataParallel"
        )
    if _after_state_dict not in optimizer._optimizer_state_dict_post_hooks.values():
        optimizer.register_state_dict_post_hook(_after_state_dict)


def _after_state_dict(optimizer: torch.optim.Optimizer, state: dict) -> dict:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def part(parameter: Tensor, value: Any) -> Any:
        place = getattr(parameter, "split_among_ranks", None)
        alike = place and isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
        return Shard.of(value, *place[1:]) if alike else value

    entries = {}
    for at, entry in state["state"].items():
        entries[at] = {name: part(parameters[at], value) for name, value in entry.items()}
    return state | {"state": entries}


register_optimizer_step_pre_hook(_before_step)
