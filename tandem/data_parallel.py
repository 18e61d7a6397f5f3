"""Gradients that are averaged over all ranks while backward runs."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor, nn

from . import replicas
from .device import Device, adder_of, check_type, check_unwrapped, device_of_all, is_sent
from .library import NAMES, Session
from .ranks import ranks_within

ALIGNMENT = 256  # TD_ALIGNMENT


def _weakly(method: Callable, *first: Any) -> Callable:
    """Calls the method with its first arguments, or does nothing after its object is gone."""
    found = weakref.WeakMethod(method)

    def call(*rest: Any) -> Any:
        living = found()
        return None if living is None else living(*first, *rest)

    return call


def _memory_order(name: str, tensor: Tensor) -> list[int]:
    """The dimensions as they lie in memory, the slowest first: of channels_last 0, 2, 3, 1."""
    order = list(range(tensor.dim()))
    if not tensor.is_contiguous():
        order.sort(key=tensor.stride, reverse=True)
    if not tensor.permute(order).is_contiguous():
        raise ValueError(f"parameter {name} has strides {tensor.stride()}, which leave gaps or overlap")
    return order


def _release(device: Device, ddp: Any, hooks: list, gradients: list) -> None:
    """Gives back what a DataParallel holds. The object itself may be gone. The memory of gradients stays as long as a
    tensor over it."""
    for hook in hooks:
        hook.remove()
    gradients[:] = [None] * len(gradients)
    with device.calls() as c:
        c.td_ddp_destroy(ddp)


class DataParallel(nn.Module):
    """A module whose gradients are averaged over all ranks while backward runs.

    strategy   "naive": one call per gradient after the backward pass; "flat": one call for all after it; "overlap":
               each gradient as soon as it is complete; "bucketed": each bucket as soon as its last gradient is complete
    bucket_mb  of "bucketed", in 2^20 bytes; None: one bucket
    broadcast_buffers   every forward pass with gradients begins with rank 0's buffers, except within no_sync()
    unused_as_zero      a parameter that no rank used gets the gradient 0. False: its `.grad` stays None

    Every rank gets rank 0's parameters and buffers. Parameters may lie in memory in any order of dimensions, without
    gaps. `.grad` is a view of the memory that is sent, also after zero_grad(set_to_none=True). A rank that did not use
    a parameter counts as a gradient of 0. If a GPU's rank did not use one, it waits for the GPU at the end of the pass.

    Each backward pass ends the reduction that it began. If this rank used no parameter in a pass, it must call
    finish_gradient_synchronization() before the optimizer. Gradients of forward passes within no_sync() only add up.
    The next forward pass drops a backward pass that an exception ended. If a parameter was replaced, frozen or
    unfrozen, or has another type, the next pass names it.

    Copies (copy.deepcopy, AveragedModel, torch.save) are of the module alone. They join the ranks in their first
    forward pass with gradients, all ranks together. close() or the end of the object gives back what the library
    holds."""

    wraps_for_ranks = True

    def __init__(
        self,
        module: nn.Module,
        strategy: str = "overlap",
        bucket_mb: float | None = None,
        *,
        broadcast_buffers: bool = True,
        unused_as_zero: bool = False,
        open_seconds: float | None = None,
        seconds: float | None = None,
    ):
        super().__init__()
        check_unwrapped(module)
        self.module = module
        self._options = {"strategy": strategy, "bucket_mb": bucket_mb, "broadcast_buffers": broadcast_buffers}
        self._options["unused_as_zero"] = unused_as_zero
        self._limits = {"open_seconds": open_seconds, "seconds": seconds}
        self._join()

    def __getstate__(self) -> dict:
        kept = {*vars(nn.Module()), "_options", "_limits"}
        return {name: value for name, value in vars(self).items() if name in kept}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._ddp, self._last, self._joins = None, True, True

    def _join(self) -> None:
        """All ranks together."""
        parameters = {name: p for name, p in self.module.named_parameters() if p.numel()}  # a shared one once
        device = device_of_all(parameters)
        fixed = {name: p for name, p in parameters.items() if not p.requires_grad and not is_sent(p)}
        parameters = {name: p for name, p in parameters.items() if name not in fixed}
        self._orders = [_memory_order(name, parameter) for name, parameter in parameters.items()]
        self._parameters_of = list(parameters.values())
        self._ranks = ranks_within(device, **self._limits)
        self._model = next(self._ranks.models)
        self._passes = self._finishes = 0  # that ended, and calls of finish_gradient_synchronization()
        self._numbers = {parameter: index for index, parameter in enumerate(self._parameters_of)}
        self._last = True  # outside of no_sync()
        self._decided: bool | None = None  # whether the last forward pass was
        self._sends = True  # the backward pass reduces
        self._running = False  # a backward pass has marked gradients
        self._ended = False  # one has since the last finish_gradient_synchronization()
        self._seen: set[int] = set()  # what it has marked
        self._lay_out()
        with self._ranks.device.calls() as c:
            self._ddp = self._create(c, parameters)
        self._send_buffers()
        self._ranks.broadcast((parameter, 0) for parameter in fixed.values())
        addresses = [None if g is None else g.data_ptr() for g in self._gradients]
        pairs = zip(self._parameters_of, addresses, strict=True)
        self._agreed = [(p.shape, p.dtype, p.device, address) for p, address in pairs]
        self._hooks = []
        self._adding = []
        for index, (name, parameter) in enumerate(parameters.items()):
            replicas.know(self._ranks, name, parameter)
            if parameter.requires_grad:
                before, after = (_weakly(f, index) for f in (self._before_adding, self._ready))
                self._adding.append(adder_of(parameter))
                self._hooks.append(self._adding[-1].register_prehook(before))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(after))
        held = (self._ranks.device, self._ddp, self._hooks, self._gradients)
        self._at_exit = Finalize(self, _release, held, exitpriority=2)
        self._compare_orders(list(parameters))
        self._joins = False

    def _compare_orders(self, names: list[str]) -> None:
        """The library has compared shapes as they lie in memory. Orders may differ still if extents are alike."""
        mine = bytes(dim for order in self._orders for dim in order)
        for rank, theirs in enumerate(map(iter, self._ranks.exchange(mine))):
            for name, order in zip(names, self._orders, strict=True):
                found = [*itertools.islice(theirs, len(order))]
                if found != order:
                    words = (
                        f"parameter {name} lies in memory by dimensions {order}, on rank {rank} by {found}"
                    )
                    raise ValueError(words)

    def _send_buffers(self) -> None:
        self._ranks.broadcast((buffer, 0) for buffer in self.module.buffers() if buffer.numel())

    def _lay_out(self) -> None:
        """Makes the gradients' memory, the last first, as they become ready. After each is a flag: 1 if this rank
        used the parameter, else 0. The flag is averaged with the gradient, so it tells whether a rank did."""
        trained = [(i, p) for i, p in enumerate(self._parameters_of) if p.requires_grad][::-1]
        sizes = [-(-(p.numel() + 1) * p.element_size() // ALIGNMENT) * ALIGNMENT for _, p in trained]
        self._block = self._ranks.device.block(sum(sizes)).zero_()
        self._parts: list[Tensor | None] = [None] * len(self._parameters_of)
        self._gradients: list[Tensor | None] = [None] * len(self._parameters_of)
        for (index, p), part in zip(trained, self._block.split(sizes), strict=True):
            self._parts[index] = part.view(p.dtype)
            self._gradients[index] = self._parts[index].as_strided(p.shape, p.stride())
        self._flags = {}  # by type, where they are in the block
        for dtype in {p.dtype for _, p in trained}:
            places = [self._flag(i).storage_offset() for i, p in trained if p.dtype == dtype]
            self._flags[dtype] = torch.tensor(places, device=self._block.device)

    def _flag(self, index: int) -> Tensor:
        return self._parts[index][self._parameters_of[index].numel()]

    def _create(self, c: Session, parameters: dict):
        tensors = c.ffi.new("td_ddp_tensor[]", len(parameters))
        names, of_each = [], zip(tensors, parameters.items(), self._orders, self._parts, strict=True)
        for tensor, (name, parameter), order, part in of_each:
            check_type(name, parameter)
            names.append(c.ffi.new("char[]", name.encode()))
            tensor.name, tensor.dims = names[-1], parameter.dim()
            for dim, extent in enumerate(parameter.permute(order).shape):
                tensor.shape[dim] = extent
            tensor.dtype = tensor.grad_dtype = c.enum("td_dtype", NAMES[parameter.dtype])
            tensor.data = c.ffi.cast("void *", parameter.data_ptr())
            tensor.frozen = part is None
            if part is not None:
                tensor.grad, tensor.grad_elements = c.ffi.cast("void *", part.data_ptr()), part.numel()
        strategy = c.value("td_ddp_strategy_parse", self._options["strategy"])
        how = dict(strategy=strategy, bucket_mb=self._options["bucket_mb"] or 0.0)
        config = c.struct("td_ddp_config", tensors=tensors, count=len(parameters), **how)
        return c.value("td_ddp_create", c.device, self._ranks.comm, config)

    def _place(self, index: int) -> None:
        """Puts a gradient into the memory that is sent, as 0 if there is none."""
        parameter, gradient = self._parameters_of[index], self._gradients[index]
        if parameter.grad is None:
            gradient.zero_()
        elif parameter.grad is not gradient:
            gradient.copy_(parameter.grad)
        parameter.grad = gradient

    def _check(self, ending: bool = False) -> None:
        """Nothing has changed since all ranks agreed. A frozen parameter matters only at the end of a pass."""
        for name, parameter in self.module.named_parameters():
            if not parameter.numel():
                continue
            index = self._numbers.get(parameter)
            gradient = None if index is None else self._gradients[index]
            change = None
            if parameter.requires_grad and gradient is None:
                change = "is new, or has replaced another" if index is None else "was unfrozen"
            elif gradient is not None:
                now = (parameter.shape, parameter.dtype, parameter.device, gradient.data_ptr())
                if ending and not parameter.requires_grad:
                    change = "was frozen"
                elif now != self._agreed[index]:
                    words = f"{parameter.dtype} {[*parameter.shape]} on {parameter.device}"
                    change = f"is another tensor now, {words}"
            if change:
                raise RuntimeError(
                    f"parameter {name} {change} since DataParallel(...): its gradient stays on this rank; call close() "
                    "and wrap the module again"
                )

    def forward(self, *inputs: Any, **named: Any) -> Any:
        # Not if a backward pass calls this, to compute activations again.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.on_train_batch_start()
            if self._ddp is not None and self._last and self._options["broadcast_buffers"]:
                self._send_buffers()
        return self.module(*inputs, **named)

    def _before_adding(self, index: int, _: tuple) -> None:
        """Autograd adds to a gradient. If the pass has marked it (reentrant checkpoints), its reduction ends first."""
        if index in self._seen:
            self._finish()
        self._place(index)

    def _ready(self, index: int, parameter: Tensor) -> None:
        """A gradient is complete. Autograd calls this within the backward pass."""
        self._place(index)  # with create_graph autograd has replaced it
        with self._ranks.device.calls() as c:
            if not self._running:
                self._begin(c)
                self._running = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
            c.td_ddp_ready(self._ddp, index)
        self._seen.add(index)

    def _begin(self, c: Session) -> None:
        self._sends = self._last if self._decided is None else self._decided
        c.td_ddp_begin(self._ddp, self._sends)
        if self._sends:  # the first gradients that are sent name the pass, so that it meets no other
            order, passes = (self._model, self._options["unused_as_zero"]), (self._passes, self._finishes)
            self._ranks.carry(self._ranks.state(order=order, passes=passes))
            for dtype, places in self._flags.items():
                self._block.view(dtype).index_fill_(0, places, 1)

    def _end(self) -> None:
        if self._running:
            self._finish()

    def _finish(self) -> None:
        self._check(ending=True)
        unused = []
        with self._ranks.device.calls() as c:
            if not self._running:
                self._begin(c)
            self._running = False
            for index, gradient in enumerate(self._gradients if self._sends else ()):
                if gradient is None or index in self._seen:
                    continue
                if self._parameters_of[index].grad is not None or self._options["unused_as_zero"]:
                    self._place(index)
                else:
                    gradient.zero_()
                    self._flag(index).zero_()
                    unused.append(index)
                c.td_ddp_ready(self._ddp, index)
            self._seen.clear()
            c.td_ddp_finish(self._ddp)
        if unused:
            used = torch.stack([self._flag(index).float() for index in unused]).tolist()
            for index in itertools.compress(unused, used):
                self._parameters_of[index].grad = self._gradients[index]
        self._ended = self._sends
        self._passes += self._sends
        if self._sends and self._passes % replicas.EVERY == 0:
            replicas.compare(self._ranks, self.module.named_parameters())
        self._decided = self._decided or None  # a later pass within no_sync() only adds up

    def finish_gradient_synchronization(self) -> None:
        """Takes part in the other ranks' reduction, if this rank's backward pass used no parameter."""
        if self._joins:
            self._join()
        self._check()
        self._decided = None
        if self._running or not self._ended:
            self._finish()
        self._ended = False
        self._finishes += 1

    def on_train_batch_start(self) -> None:
        """As forward(): drops a backward pass that an exception ended. The next one reduces, but not in no_sync()."""
        if self._joins:
            self._join()
        if self._ddp is None:  # closed
            return
        self._check()
        if self._running:
            with self._ranks.device.calls() as c:
                c.td_ddp_begin(self._ddp, False)  # waits for what is on its way
            self._running = False
            self._seen.clear()
        self._decided = self._last

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forward passes within it only add up, for all micro-batches but the last."""
        self._last = False
        try:
            yield
        finally:
            self._last = True

    def close(self) -> None:
        """Gives back what the library holds, but for the gradients. All ranks together."""
        if self._ddp is not None:
            self._ddp = None
            self._at_exit()
