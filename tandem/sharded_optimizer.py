"""Any optimizer of PyTorch, with its state split among the ranks."""

import io
import itertools
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .device import check_whole, device_of
from .ranks import digest, identity, ranks_within, sampled


class ShardedOptimizer(torch.optim.Optimizer):
    """Any optimizer of PyTorch, with its state split among the ranks: each parameter has an owner, which updates it and
    sends it to all. `ShardedOptimizer(params, torch.optim.AdamW, lr=..., ...)`.

    Groups of parameters may have options, and may be added at any time. The largest parameter goes first, to the rank
    that has the fewest bytes. step() needs the same gradients on every rank, as DataParallel leaves them. All ranks
    need the same parameters in the same order, and the same hyperparameters, else step() fails on all of them.

    state_dict() is this rank's part. consolidate_state_dict() makes the whole state, which any number of ranks and the
    plain optimizer can load."""

    def __init__(
        self,
        params: Iterable,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        open_seconds: float | None = None,
        seconds: float | None = None,
        **options: Any,
    ):
        names = {kind.__name__ for kind in optimizer_cls.__mro__}
        if names & {"LBFGS", "ShardedOptimizer", "ZeroRedundancyOptimizer"}:
            raise TypeError(
                f"optimizer_cls is {optimizer_cls.__name__}, which needs all parameters on each rank"
            )
        self._class, self._options = optimizer_cls, options
        self._limits = {"open_seconds": open_seconds, "seconds": seconds}
        self._inner: torch.optim.Optimizer | None = None
        self._owners: dict[Tensor, int] = {}  # in the order of all groups
        self._loads = None
        self._agreed = 0  # parameters that were compared among ranks
        self._steps = self._run = 0  # a number that all ranks have, and no other run
        self._loaded: Any = None  # which state; all ranks need parts of one
        self._whole: dict | None = None  # what consolidate_state_dict() made, until the state changes
        super().__init__(params, dict(options))

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        params = group["params"]
        self._check_whole()
        if self._loads is None:
            self._ranks = ranks_within(device_of(params[0]), **self._limits)
            with self._ranks.device.calls() as c:
                self._loads = c.ffi.new("int64_t[]", self._ranks.ranks)
        with self._ranks.device.calls() as c:
            bytes_of = c.ffi.new("int64_t[]", [p.numel() * p.element_size() for p in params])
            owners = c.ffi.new("int32_t[]", len(params))
            c.td_shard_assign(len(params), bytes_of, self._ranks.ranks, self._loads, owners)
        self._owners |= dict(zip(params, owners, strict=True))
        self._whole = None
        part = self._part(group)
        if self._inner is None:
            self._inner = self._class([part], **self._options)
            self.defaults = self._inner.defaults
            self._inner.split_among_ranks = True
        else:
            self._inner.add_param_group(part)
        for name, value in self._inner.param_groups[-1].items():
            group.setdefault(name, value)  # defaults of the class, for schedulers to see

    def _check_whole(self) -> None:
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                check_whole(f"parameter {index} of group {number}", parameter)

    def _part(self, group: dict) -> dict:
        """A group with this rank's parameters. step() copies hyperparameters from and to self.param_groups."""
        return _hyper(group) | {"params": [p for p in group["params"] if self._is_mine(p)]}

    def _is_mine(self, parameter: Tensor) -> bool:
        return self._owners[parameter] == self._ranks.rank

    @torch.no_grad()
    def step(self, closure=None, **named: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._whole = None
        self._check_whole()  # a module may be wrapped after the optimizer is made
        self._agree()
        groups = [[(k, _plain(value)) for k, value in _hyper(group).items()] for group in self.param_groups]
        is_now = self._ranks.state(hyperparameters=(self._class.__qualname__, groups), past=self._loaded)
        self._ranks.carry(is_now)
        self._steps += 1
        self._inner.param_groups = [self._part(group) for group in self.param_groups]
        self._inner.step(**named)
        for part, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            group.update(_hyper(part))
        updated = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
        self._ranks.broadcast((p, self._owners[p]) for p in updated)
        return loss

    def _agree(self) -> None:
        """All ranks have the same parameters in the same order. Weights and gradients stand for names."""
        described = self._described()
        if self._agreed == len(described):
            return
        first, self._agreed = self._agreed, len(described)
        new = [*self._owners][first:]
        words = [digest(repr(sorted(d.items())).encode()) for d in described[first:]]
        data, grads = ([sampled(x) for x in xs] for xs in (new, [p.grad for p in new]))
        counts = self._ranks.exchange(len(new).to_bytes(8, "little") + os.urandom(8))
        self._run = self._run or int.from_bytes(counts[0][8:], "little")
        found = [int.from_bytes(count[:8], "little") for count in counts]
        if len(set(found)) > 1:
            raise ValueError(f"ranks have other numbers of parameters: {found}")
        every = self._ranks.exchange(b"".join(map(b"".join, zip(words, data, grads, strict=True))))
        for i, described_here in enumerate(described[first:]):
            of_rank_0 = every[0][24 * i : 24 * i + 24]
            for rank, digests in enumerate(every):
                of_rank = digests[24 * i : 24 * i + 24]
                elsewhere = (every[0][24 * j + 16 : 24 * j + 24] for j in range(len(new)) if j != i)
                moved = any(of_rank[16:]) and of_rank[16:] in elsewhere
                if of_rank[:16] != of_rank_0[:16] or (of_rank[16:] != of_rank_0[16:] and moved):
                    raise ValueError(
                        f"parameter {first + i}, {_say(described_here)} here: rank {rank} has another than rank 0, or "
                        "other weights; every rank gives the same parameters in the same order"
                    )

    def owner(self, parameter: Tensor) -> int:
        """The rank that updates a parameter."""
        return self._owners[parameter]

    # A saved state numbers parameters through all groups, as the plain optimizer's does; "parameters"
    # describes each. A part also has "rank" and "ranks", and its groups name this rank's parameters only.

    def state_dict(self) -> dict:
        """This rank's part; or, after consolidate_state_dict() until the next step(), the whole state on rank `to`."""
        return self._whole or self._saved(whole=False)

    def _saved(self, whole: bool) -> dict:
        numbers = {p: number for number, p in enumerate(self._owners)}
        state = {numbers.get(key, key): value for key, value in self._inner.state.items()}
        saved = {"state": state, "param_groups": [], "parameters": self._described()}
        for group in self.param_groups:
            kept = [whole or self._is_mine(p) for p in group["params"]]
            some = {"params": [numbers[p] for p in itertools.compress(group["params"], kept)]}
            if "param_names" in group:
                some["param_names"] = [*itertools.compress(group["param_names"], kept)]
            saved["param_groups"].append(_hyper(group) | some)
        part = {"rank": self._ranks.rank, "ranks": self._ranks.ranks, "saved": (self._run, self._steps)}
        return saved if whole else saved | part

    def __reduce_ex__(self, protocol: int) -> Any:
        raise TypeError(
            "a ShardedOptimizer is neither copied nor pickled: use state_dict() and load_state_dict()"
        )

    def _described(self) -> list[dict]:
        found = []
        for number, group in enumerate(self.param_groups):
            for p, name in zip(group["params"], _names(group), strict=True):
                found.append({"group": number, "name": name, "shape": [*p.shape], "dtype": str(p.dtype)})
        return found

    def consolidate_state_dict(self, to: int = 0) -> dict | None:
        """The whole state, in the CPU's memory on rank `to`; None elsewhere. All ranks call it together. Until the next
        step(), state_dict() returns it too, as PyTorch's ZeroRedundancyOptimizer does."""
        if not 0 <= to < self._ranks.ranks:
            raise ValueError(f"to is rank {to} of {self._ranks.ranks}")
        saved = self._saved(whole=True)
        mine = io.BytesIO()
        torch.save(saved["state"], mine)
        self._whole = None
        for part in self._ranks.collect(mine.getvalue(), to):
            self._whole = self._whole or saved | {"state": {}}
            # Pickled by the ranks of this run.
            self._whole["state"] |= torch.load(io.BytesIO(part), map_location="cpu", weights_only=False)
        return self._whole

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads this rank's part, or a whole state of consolidate_state_dict() or of the plain optimizer. Each rank
        loads by itself. ValueError, and nothing is loaded: the part of another rank or of other parameters."""
        rank, ranks = self._ranks.rank, self._ranks.ranks
        whole = state_dict.get("ranks", 1) == 1
        if not whole and (state_dict["rank"], state_dict["ranks"]) != (rank, ranks):
            raise ValueError(
                f"the state is that of rank {state_dict['rank']} of {state_dict['ranks']}, this is rank {rank} of "
                f"{ranks}: load this rank's own, or one that consolidate_state_dict() made"
            )
        self._check_parameters(state_dict, whole)
        groups = []
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            kept = map(self._is_mine, group["params"]) if whole else itertools.repeat(True)
            groups.append(_hyper(saved) | {"params": [*itertools.compress(saved["params"], kept)]})
        mine = {key for group in groups for key in group["params"]}
        state = {key: value for key, value in state_dict["state"].items() if key in mine}
        self._inner.param_groups = [self._part(group) for group in self.param_groups]
        self._inner.load_state_dict({"state": state, "param_groups": groups})
        for part, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            for name in _hyper(group):
                del group[name]
            group.update(_hyper(part))
        self._whole = None
        self._loaded = state_dict.get("saved") or identity(state_dict["state"])

    def _check_parameters(self, state_dict: dict, whole: bool) -> None:
        mine = self._described()
        described = state_dict.get("parameters")
        if described is not None:
            if len(described) != len(mine):
                raise ValueError(f"the state has {len(described)} parameters, the optimizer has {len(mine)}")
            for number, (saved, here) in enumerate(zip(described, mine, strict=True)):
                if not (saved["name"] and here["name"]):
                    saved, here = saved | {"name": None}, here | {"name": None}
                if saved != here:
                    raise ValueError(f"parameter {number}: the state has {_say(saved)}, here is {_say(here)}")
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        here = [len(group["params"] if whole else self._part(group)["params"]) for group in self.param_groups]
        if sizes != here:
            raise ValueError(f"the state's groups have {sizes} parameters, the optimizer's have {here}")


def _hyper(group: dict) -> dict:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _plain(value: Any) -> Any:
    """A hyperparameter in words that are the same on every rank. One on a GPU is not read: that would wait."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else str(value.dtype)
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__qualname__


def _names(group: dict) -> Iterable[str | None]:
    return group.get("param_names") or [None] * len(group["params"])


def _say(described: dict) -> str:
    name = f"{described['name']!r}, " if described["name"] else ""
    return f"{name}{described['dtype']} {described['shape']} of group {described['group']}"
