"""Fully sharded data parallelism for PyTorch modules, over libtandem's collectives.

    model = FullyShardedDataParallel(model, torch.bfloat16)            # split among the ranks; computes in bf16
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)         # sees this rank's rows
    ...
    loss.backward()                                                    # gradients are averaged when it returns
    model.clip_grad_norm_(1.0)
    optimizer.step()
    torch.save(model.full_state_dict(), "model.pt")                    # every rank calls it; the names of one process

Each rank keeps a block of rows of each weight, with its gradient and its optimizer state. A weight is gathered before
its module runs, and again before its backward. At that moment the gather of the next weight begins.
"""

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from . import replicas
from .device import FLOATS, adder_of, check_type, check_unwrapped, device_of_all
from .library import NAMES
from .ranks import Call, Ranks, digest, identity, ranks_of
from .rows import Place, Shard, as_rows

if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):  # 2.6 lacks it
    words = f"FullyShardedDataParallel was tried with torch 2.11 and 2.13; {torch.__version__} is too old"
    raise ImportError(words)

SPLIT = {"Linear", "Embedding"}  # classes, by name: the course has its own
# MultiheadAttention reads the weight of this one and never calls it.
WHOLE = {"NonDynamicallyQuantizableLinear"}
COMPUTE = (None, torch.float32, torch.float16, torch.bfloat16)


class _Unit:
    """A weight that is split by rows. Rank r has `rows` of them from row r * rows on; the last ranks have fewer or
    none. `anchor` replaces the weight in autograd's graph: it has the shape, and no memory."""

    def __init__(self, number: tuple, name: str, weight: nn.Parameter, ranks: Ranks, compute: Any):
        self._number, self.name, self.weight, self._ranks = number, name, weight, ranks
        self.shape, self.dtype, self.compute = weight.shape, weight.dtype, compute or weight.dtype
        self.rows = -(-len(weight) // ranks.ranks)
        self.own = slice(ranks.rank * self.rows, (ranks.rank + 1) * self.rows)
        self.anchor = weight.new_empty((), dtype=self.compute).expand(self.shape).requires_grad_()
        weight.data = weight.data[self.own].clone(memory_format=torch.contiguous_format)
        first = min(self.own.start, len(self.anchor))
        weight.split_among_ranks = self.place = Place(ranks, self.shape, first)
        self._kept = weight.shape, weight.dtype, weight.device
        self._loaded: list | None = None  # as the ranks were told last
        self._state: Any = None

    def gather(self, dtype: torch.dtype) -> Call:
        """Begins to gather the whole weight. This rank's rows are cast first, so that only `dtype` is sent."""
        mine = self.weight.detach()
        if (mine.shape, mine.dtype, mine.device) != self._kept:
            raise RuntimeError(
                f"{self.name} was split as {self._words(*self._kept)} and is now "
                f"{self._words(mine.shape, mine.dtype, mine.device)}: convert or load a module before it is wrapped"
            )
        return self.gather_like(mine, dtype)

    def gather_like(self, mine: Tensor, dtype: torch.dtype) -> Call:
        """Begins to gather what is split as the weight is, such as a moment of its optimizer."""
        rows = mine.new_empty((self._ranks.ranks * self.rows, *self.shape[1:]), dtype=dtype)
        part = rows[self.own]
        part[: len(mine)] = mine
        return self._call("td_comm_all_gather", rows[: self.shape[0]], part, rows, part.numel(), NAMES[dtype])

    def reduce(self, gradient: Tensor) -> Call:
        """Begins to average the whole weight's gradient, in its master's type; the result is this rank's rows."""
        rows = gradient.detach().to(self.dtype).contiguous()
        if len(rows) < self._ranks.ranks * self.rows:
            padded = rows.new_zeros((self._ranks.ranks * self.rows, *self.shape[1:]))
            padded[: len(rows)] = rows
            rows = padded
        part = rows.new_empty((self.rows, *self.shape[1:]))
        count, kind = part.numel(), NAMES[self.dtype]
        result = part[: len(self.weight)]
        return self._call("td_comm_reduce_scatter", result, rows, part, count, kind, "average")

    def _call(self, name: str, *arguments: Any) -> Call:
        """Ranks compare which model's and which weight's call it is: another weight may be as large."""
        try:
            loaded = [*self._number[2].values()]
            if loaded != self._loaded:
                self._loaded, self._state = loaded, self._ranks.state(order=self._number[:2], past=loaded)
            return Call(self._ranks, name, *arguments, carried=self._state)
        except RuntimeError as error:
            words = "every rank calls the same modules in the same order, also an expert without tokens; states that "
            words += "ranks load are of one save"
            error.add_note(f"in the collective of {self.name}: {words}")
            raise

    @staticmethod
    def _words(shape, dtype, device) -> str:
        return f"{[*shape]} of {dtype} on {device}"


class _Use(torch.autograd.Function):
    """The gathered weight, as a function of its anchor. Autograd adds up the gradients of all uses in the anchor."""

    @staticmethod
    def forward(ctx, anchor, box):
        ctx.set_materialize_grads(False)
        return box[0].detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Saved(functools.partial):
    """What autograd saves in place of a gathered weight, or of a view of it: a call that gathers the weight again."""


class _Later(functools.partial):
    """A hook on a whole parameter, called at the end of the pass."""


class _Pass:
    """The weights that a pass has gathered: the one in use, and the one that was next in the last such pass."""

    def __init__(self, model: "FullyShardedDataParallel", kind: str):
        self._model, self._kind = model, kind
        self._order: list[_Unit] = []
        self._last = model._orders.get(kind, [])
        self._held: dict[_Unit, Call] = {}
        self._reducing: tuple[_Unit, Call] | None = None
        self.later: list[Callable[[], None]] = []  # hooks that need the averages

    def fetch(self, unit: _Unit) -> Tensor:
        """The whole weight. Gathers of earlier weights are dropped first, then the next weight's gather begins."""
        at = len(self._order)
        self._order.append(unit)
        if self._last[at : at + 1] != [unit]:
            self._last = []
        needed = [unit, *self._last[at + 1 : at + 2]]
        self._held = {u: call for u, call in self._held.items() if u in needed}
        for u in needed:
            if u not in self._held:
                self._held[u] = u.gather(u.compute)
        return self._held[unit].wait()

    def reduce(self, unit: _Unit, gradient: Tensor) -> None:
        """At most one reduction is on its way, next to the gradient that is being computed."""
        self._settle()
        self._reducing = unit, unit.reduce(gradient)

    def _settle(self) -> None:
        if self._reducing is None:
            return
        (unit, call), self._reducing = self._reducing, None
        part, weight = call.wait(), unit.weight
        for hook in (weight._backward_hooks or {}).values():
            changed = hook(part)
            part = part if changed is None else changed
        weight.grad = as_rows(part, unit.place) if weight.grad is None else weight.grad.add_(part)
        for hook in (weight._post_accumulate_grad_hooks or {}).values():
            hook(weight)

    @torch.no_grad()
    def finish(self) -> None:
        """At the end of a backward pass. Autograd owns the pass until then, so one that fails is dropped at once."""
        self._model._backward = _nothing
        self.complete()
        self.close()
        self._settle()
        self._model._average()
        for hook in self.later:
            hook()

    def complete(self) -> None:
        """The next pass of this kind expects this order."""
        self._model._orders[self._kind] = self._order

    def close(self) -> None:
        """Drops what was gathered."""
        self._held.clear()


def _nothing() -> None:
    """A weak reference to no pass."""


class _Part(NamedTuple):
    """What the wrapper knows of a module that has parameters of its own."""

    model: "FullyShardedDataParallel"
    forward: Callable
    units: dict[str, _Unit]  # by the names that the module has for them
    dtype: torch.dtype | None  # that it computes in; None: that of its inputs


def _forward(module: nn.Module, *inputs: Any, **named: Any) -> Any:
    return module._fsdp.model._run(module, inputs, named)


def _after_module_state(module: nn.Module, state: dict, prefix: str, _: dict) -> None:
    for name, unit in module._fsdp.units.items():
        value = state.get(prefix + name)
        if value is not None and not isinstance(value, nn.Parameter):
            state[prefix + name] = Shard.of(value, *unit.place[1:])


def _parameter(name: str) -> property:
    def get(module: nn.Module):
        if name in module._gathered:
            return module._gathered[name]
        model, unit = module._fsdp.model, module._fsdp.units.get(name)
        # A hook in a backward pass sees this rank's rows. In a forward of checkpoint gradients are enabled.
        reads = unit and (model._running or torch.is_grad_enabled()) and model._pass()
        return model._use(reads, unit) if reads else module._parameters[name]

    return property(torch.compiler.disable(get))


@functools.cache
def _class_of(kind: type, names: tuple[str, ...]) -> type:
    """The class with parameters that are whole while a module's forward runs, or where another module reads them."""
    forward = torch.compiler.disable(_forward)  # collectives stay in the order of the program
    return type(kind.__name__, (kind,), {"forward": forward} | {name: _parameter(name) for name in names})


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if _is_float(x) else x, tree)


class FullyShardedDataParallel(nn.Module):
    """A module whose Linear and Embedding weights are split by rows among the ranks.

    compute_dtype   of Linear and Embedding: their weights are cast to it and then sent, and their inputs are cast to
                    it. Other modules compute in the type of their parameters, and return the type of their inputs.
                    None: nothing is cast

    Every rank gets rank 0's parameters and buffers. Parameters stay the same objects, so an optimizer may be made
    before or after. Split parameters and their `.grad` hold this rank's rows, in the module's type; others are whole
    on every rank. The optimizer must treat each element by itself, as SGD and AdamW do. PyTorch's norms of `.grad` are
    of the whole gradient. torch.distributed.checkpoint saves and loads state_dict().

    loss.backward() averages gradients over all ranks and adds them to `.grad`: micro-batches are several backward
    passes. Every rank calls the same modules in the same order, also without gradients: a call of another module is an
    error on every rank before its weight is used. So a mixture of experts runs each expert on each rank, also an expert
    without tokens."""

    wraps_for_ranks = True

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None):
        super().__init__()
        self.module = module
        if compute_dtype not in COMPUTE:
            raise TypeError(f"compute_dtype is {compute_dtype}, needs one of {', '.join(map(str, COMPUTE))}")
        parameters = dict(module.named_parameters())  # a shared one once
        device = device_of_all(parameters)
        _check(module, parameters)
        self._ranks = ranks_of(device)
        self._orders: dict[str, list[_Unit]] = {}
        self._running: _Pass | None = None  # forward
        self._backward: Callable[[], _Pass | None] = _nothing
        described = [(name, [*p.shape], p.dtype, p.requires_grad) for name, p in parameters.items()]
        self._compare(repr((compute_dtype, described)).encode(), "has another module")
        self._ranks.broadcast((tensor, 0) for tensor in (*parameters.values(), *module.buffers()))
        number = next(self._ranks.models)
        self._id = int.from_bytes(self._ranks.exchange(os.urandom(7))[0])  # no other run's
        self._loaded: dict[str, Any] = {"module": None, "optimizer": None}  # of which all ranks need parts
        split = {id(m.weight) for m in module.modules() if _is_split(m)}
        self._units = {
            name: _Unit((number, index, self._loaded), name, parameter, self._ranks, compute_dtype)
            for index, (name, parameter) in enumerate(parameters.items())
            if id(parameter) in split
        }
        self._units_of = {unit.weight: unit for unit in self._units.values()}
        self._whole = [parameter for parameter in parameters.values() if parameter not in self._units_of]
        for name, parameter in parameters.items():
            if parameter not in self._units_of:
                replicas.know(self._ranks, name, parameter)
        whole, split = (sum(x.shape.numel() for x in some) for some in (self._whole, self._units.values()))
        if whole > max(split, 1 << 20):
            words = f"{whole} of {whole + split} parameters are whole on each rank: FullyShardedDataParallel splits "
            warnings.warn(words + "the weights of Linear and Embedding only", stacklevel=2)
        self._passes = 0  # backward passes
        self._hook()
        self.forward = torch.compiler.disable(self.forward)
        self._take_over(module, compute_dtype)

    def __reduce_ex__(self, protocol: int) -> Any:
        raise TypeError(
            "a FullyShardedDataParallel is neither copied nor pickled, because each rank has a part: "
            "use full_state_dict() and load_full_state_dict()"
        )

    def _hook(self) -> None:
        model = weakref.ref(self)

        def reduce(unit: Callable[[], _Unit], anchor: Tensor) -> None:
            gradient, anchor.grad = anchor.grad, None
            model()._backward_pass().reduce(unit(), gradient)

        def average(parameter: Callable[[], Tensor], _: tuple) -> None:
            """Begins the pass, at whose end it averages. Hooks on the parameter run after that."""
            if model() is not None:
                model()._backward_pass()
                hooks = parameter()._post_accumulate_grad_hooks or {}
                hooks |= {key: _Later(after, hook) for key, hook in hooks.items() if type(hook) is not _Later}

        def after(hook: Callable, parameter: Tensor) -> None:
            running = model() and model()._backward()
            if running:
                running.later.append(functools.partial(hook, parameter))
            else:
                hook(parameter)

        for unit in self._units.values():
            # The garbage collector does not see what a hook holds: the unit would keep itself alive.
            unit.anchor.register_post_accumulate_grad_hook(functools.partial(reduce, weakref.ref(unit)))
        self._adding = [adder_of(parameter) for parameter in self._whole if parameter.requires_grad]
        for adder in self._adding:
            adder.register_prehook(functools.partial(average, weakref.ref(adder.variable)))

    def _take_over(self, module: nn.Module, compute: torch.dtype | None) -> bool:
        """Modules with parameters of their own run through _run(). Returns whether one of them is split."""
        inner = [self._take_over(child, compute) for child in module.children()]
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        mine = {name: self._units_of[p] for name, p in own.items() if p in self._units_of}
        known = "_fsdp" in module.__dict__  # a module that is used in two places is met twice
        if (mine or (own and compute and not any(inner))) and not known:
            types = [parameter.dtype for parameter in own.values() if parameter.is_floating_point()]
            dtype = compute if mine else next(iter(types), None)
            module._fsdp = _Part(self, type(module).forward, mine, dtype)
            module._gathered = {}
            module.register_state_dict_post_hook(_after_module_state)
            module.__class__ = _class_of(type(module), tuple(own) if mine else ())
        return bool(mine) or any(inner)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        before, self._running = self._running, _Pass(self, "forward")
        try:
            result = self.module(*inputs, **named)
            self._running.complete()
            return result
        finally:
            self._running.close()
            self._running = before

    def _run(self, module: nn.Module, inputs: tuple, named: dict) -> Any:
        _, forward, units, dtype = module._fsdp
        kind = next((x.dtype for x in tree_leaves((inputs, named)) if _is_float(x)), None)
        if dtype is not None:
            inputs, named = _cast((inputs, named), dtype)
        if not units:
            result = forward(module, *inputs, **named)
            return result if kind is None else _cast(result, kind)
        before = module._gathered
        module._gathered = gathered = {}
        try:
            with self._passing() as running:
                for name, unit in units.items():
                    if module._parameters[name] is not unit.weight:
                        raise RuntimeError(f"{unit.name} was replaced after the module was wrapped")
                    gathered[name] = self._use(running, unit)
                saved = {_address(gathered[name]): unit for name, unit in units.items()}
                for name, parameter in module._parameters.items():
                    if dtype is not None and name not in units and _is_float(parameter):
                        gathered[name] = parameter.to(dtype)
                with self._saving(saved):
                    return forward(module, *inputs, **named)
        finally:
            module._gathered = before
            gathered.clear()

    def _use(self, running: _Pass, unit: _Unit) -> Tensor:
        whole = running.fetch(unit)
        if torch.is_grad_enabled() and unit.weight.requires_grad:
            return _Use.apply(unit.anchor, [whole])
        return whole

    def _saving(self, units: dict[int, _Unit]) -> contextlib.AbstractContextManager:
        """Autograd saves which weight it needs, not the weight. Other tensors go to the hooks around this module, as of
        checkpoint, or are saved as they are."""
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Any:
            unit = units.get(_address(tensor)) if tensor.layout is torch.strided else None
            if unit is not None and tensor.dtype == unit.compute:
                place = tensor.shape, tensor.stride(), tensor.storage_offset()
                return _Saved(self._regather, unit, unit.weight._version, place)
            return around[0](tensor) if around else (tensor, tensor._version)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, _Saved):
                return packed()
            if around:
                return around[1](packed)
            tensor, version = packed
            if tensor._version != version:  # autograd leaves this check to hooks
                raise RuntimeError(
                    f"a tensor of shape {[*tensor.shape]} that backward needs was modified by an inplace operation: "
                    f"it is at version {tensor._version}, expected version {version}"
                )
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _regather(self, unit: _Unit, version: int, place: tuple) -> Tensor:
        if unit.weight._version != version:
            raise RuntimeError(f"{unit.name} was changed between forward and backward")
        with self._passing() as running:
            return running.fetch(unit).as_strided(*place)

    def _pass(self) -> _Pass | None:
        """The pass that runs; None: a module is called by itself."""
        in_backward = torch._C._current_graph_task_id() >= 0
        return self._running or self._backward() or (self._backward_pass() if in_backward else None)

    @contextlib.contextmanager
    def _passing(self) -> Iterator[_Pass]:
        running = self._pass()
        alone = _Pass(self, "alone") if running is None else None
        try:
            yield running or alone
        finally:
            if alone:
                alone.close()

    def _backward_pass(self) -> _Pass:
        running = self._backward()
        if running is None:
            running = _Pass(self, "backward")
            self._backward = weakref.ref(running)
            torch.autograd.Variable._execution_engine.queue_callback(running.finish)
        return running

    def _compare(self, mine: bytes, words: str) -> None:
        """Fails on every rank if a rank has other bytes than rank 0."""
        everyone = self._ranks.exchange(digest(mine))
        other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if other is not None:
            raise RuntimeError(f"rank {other} {words} than rank 0")

    def _average(self) -> None:
        """Averages the gradients of parameters that every rank has. One that no rank used has none."""
        used = self._ranks.exchange(bytes(p.grad is not None for p in self._whole))
        parameters = [p for p, *flags in zip(self._whole, *used, strict=True) if any(flags)]
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            alike = [p for p in parameters if p.dtype == dtype]
            for p in alike:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            flat = torch.cat([p.grad.reshape(-1) for p in alike])
            self._ranks.all_reduce(flat, "average")
            for p, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
                p.grad.copy_(part.view_as(p))
        self._spread()
        self._passes += 1
        if self._passes % replicas.EVERY == 0:
            self._check_whole()

    def _check_whole(self) -> None:
        """Fails on every rank if a parameter or a buffer that every rank has is not the same on all. Statistics of
        batches are each rank's own. All ranks together."""
        names = {p: name for name, p in self.module.named_parameters()}
        whole = [(names.get(p, "a parameter that was replaced"), p) for p in self._whole]
        for name, module in self.module.named_modules():
            if not isinstance(module, nn.modules.batchnorm._NormBase):
                whole += [(f"{name}.{key}".lstrip("."), b) for key, b in module.named_buffers(recurse=False)]
        replicas.compare(self._ranks, whole)

    def _spread(self) -> None:
        """If a gradient is not finite on one rank, all become NaN on all: a GradScaler skips the step on each rank. A
        scaler may be in use with every type, so this does not depend on the types."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None and p.grad.numel()]
        poison = torch.zeros((), dtype=torch.float64, device=next(self.parameters()).device)
        for dtype in dict.fromkeys(g.dtype for g in gradients):  # one call needs one type
            alike = [g.as_subclass(Tensor) for g in gradients if g.dtype == dtype]  # this rank's norms
            poison += 0 * torch.stack(torch._foreach_norm(alike, torch.inf)).sum(dtype=torch.float64)
        self._ranks.all_reduce(poison, "sum")
        if poison.is_cuda or poison != 0:  # NaN is not 0; a GPU need not be waited for
            for gradient in gradients:
                gradient.add_(poison.to(gradient.dtype))

    def finish_gradient_synchronization(self) -> None:
        """Does nothing: gradients are complete when backward() returns. Programs for DataParallel call it."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """torch.nn.utils.clip_grad_norm_, which clips by the norm of the whole gradient. Every rank calls it."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Every parameter, whole, on every rank, by the names that the module had. Every rank calls it."""
        self._check_whole()
        whole = {}
        for name, p in self.module.named_parameters():
            unit = self._units.get(name)
            whole[name] = (unit.gather(p.dtype).wait() if unit else p.detach()).clone()
        return whole

    def full_state_dict(self) -> dict[str, Any]:
        """The state_dict() that the module would have in one process, on every rank. Statistics of batches are
        rank 0's. Every rank calls it."""
        whole = self.gather_full_parameters()
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        state = self.module.state_dict(keep_vars=True)
        for key, value in state.items():
            if isinstance(value, nn.Parameter):
                state[key] = whole[names[value]]
            elif isinstance(value, Tensor):
                state[key] = value.detach().clone()
        buffers = self.module.named_buffers(remove_duplicate=False)
        self._ranks.broadcast((state[key], 0) for key, x in buffers if key in state and x.numel())
        return dict(state)

    def load_full_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        """Takes this rank's part of a full_state_dict(), or of the state_dict() of a module in one process."""
        mine = dict(state)
        for key, value in self.module.state_dict(keep_vars=True).items():
            unit = self._units_of.get(value) if isinstance(value, nn.Parameter) else None
            if unit is None or key not in state:
                continue
            if state[key].shape != unit.shape:
                raise ValueError(f"{key} is {[*state[key].shape]}, the module's is {[*unit.shape]}")
            mine[key] = state[key][unit.own]
        self._loaded["module"] = identity(state)
        return self.module.load_state_dict(mine, strict)

    @torch.no_grad()
    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state_dict() that the optimizer would have in one process, on every rank. Every rank calls it."""

        def whole(unit: _Unit, part: Tensor) -> Tensor:
            return unit.gather_like(part.as_subclass(Tensor), part.dtype).wait().clone()

        replicas.compare_state(optimizer)
        return self._map_state(optimizer, optimizer.state_dict(), lambda unit: unit.weight.shape, whole)

    def load_full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Takes this rank's part of a full_optimizer_state_dict(), or of a state_dict() of one process."""

        def part(unit: _Unit, whole: Tensor) -> Tensor:
            return whole[unit.own].clone()

        optimizer.load_state_dict(self._map_state(optimizer, state, lambda unit: unit.shape, part))
        self._loaded["optimizer"] = identity(state["state"])

    def _map_state(self, optimizer: Any, state: dict, shape_of: Callable, change: Callable) -> dict:
        """The state with every tensor changed that is as large as its weight."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        changed = {}
        for at, entries in state["state"].items():
            unit, changed[at] = self._units_of.get(parameters[at]), dict(entries)
            for name, value in entries.items() if unit else ():
                if isinstance(value, Tensor) and value.dim() > 0:
                    if value.shape != shape_of(unit):
                        words = f"is {[*value.shape]}, the weight is {[*shape_of(unit)]}"
                        raise ValueError(f"the optimizer's {name} of {unit.name} {words}")
                    changed[at][name] = change(unit, value)
        return state | {"state": changed}

    def get_extra_state(self) -> Tensor:
        about = torch.tensor([self._ranks.rank, self._ranks.ranks, self._id, self._passes])
        return Shard.of(about, about.shape, 0, reads=False)

    def set_extra_state(self, state: Tensor) -> None:
        theirs, mine = state.tolist(), self.get_extra_state().tolist()
        if theirs[:2] != mine[:2]:
            raise ValueError(
                f"this is the part of rank {theirs[0]} of {theirs[1]}, and rank {mine[0]} of {mine[1]} loads it: "
                "full_state_dict() and load_full_state_dict() are for any number of ranks"
            )
        self._loaded["module"] = theirs[2:]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _is_split(module: nn.Module) -> bool:
    names = {kind.__name__ for kind in type(module).__mro__}
    weight = module._parameters.get("weight")
    if weight is None or not names & SPLIT or names & WHOLE:
        return False
    return weight.dim() > 1 and weight.numel() > 0 and NAMES.get(weight.dtype) in FLOATS


def _check(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    check_unwrapped(module)
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet: run the module once before it is wrapped")
        if parameter.requires_grad:
            check_type(name, parameter)
        if parameter.grad is not None:
            raise ValueError(f"parameter {name} has a gradient: set it to None before the module is wrapped")
    for name, inner in module.named_modules():
        if _is_split(inner):
            if getattr(inner, "max_norm", None) is not None:
                raise ValueError(f"{name}.weight: an Embedding with max_norm writes to its weight in forward")
            if getattr(inner, "sparse", False):
                raise ValueError(
                    f"{name}.weight: sparse gradients cannot be split; make it with sparse=False"
                )
