"""libtandem on a device of PyTorch, for programs that PyTorch runs."""

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .library import NAMES, Library, Session, TandemError

FLOATS = ("f64", "f32", "f16", "bf16")
SENT = (*FLOATS, "i64")  # types that collectives know
# Finalizers call these. They are looked up before, because the first look-up of a name takes a lock of cffi,
# and the garbage collector may run a finalizer while the same thread has this lock.
AT_ENDS = ("td_ddp_destroy", "td_device_free", "td_device_set_stream", "td_work_queue_wait")
PYTORCHS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
LIMITS = {"open_seconds": "TANDEM_OPEN_SECONDS", "seconds": "TANDEM_SECONDS"}


class Device:
    """libtandem on a device of PyTorch: what is called is queued on PyTorch's current stream. A Session asks for
    `torch`, `kind`, `name` and stream()."""

    def __init__(self, device: torch.device):
        self.torch, self.kind = device, device.type
        self.name = f"cuda:{device.index}" if self.kind == "cuda" else "cpu"
        self.c = Session(library(), self)
        self._lock, self._process = threading.RLock(), os.getpid()
        self.limits: dict[str, float] = {}  # that callers named
        self.stopped: BaseException | None = None  # what ended a wait in C: KeyboardInterrupt, mostly
        self.failed = False  # the ranks have; the error was raised
        for name in AT_ENDS:
            getattr(self.c, name)
        self._streams = {self.stream(): self.c._stream}

    def stream(self) -> int | None:
        return torch.cuda.current_stream(self.torch).cuda_stream if self.kind == "cuda" else None

    def block(self, nbytes: int) -> Tensor:
        """Bytes of the library's memory, which is freed with the last tensor over it."""

        def free(address: Any) -> None:
            # At the end of the process CUDA may have gone.
            with contextlib.suppress(TandemError), self.calls() as c:
                c.td_device_free(c.device, address)

        with self.calls() as c:
            address = c.ffi.gc(c.value("td_device_alloc", c.device, nbytes), free)
            return c.tensor(address, (nbytes,), "u8")

    @contextlib.contextmanager
    def calls(self) -> Iterator[Session]:
        """One thread at a time, on that thread's stream."""
        with self._lock:
            if os.getpid() != self._process:  # a child of fork() has no other threads
                self.c.td_cpu_set_threads(1)
            native = self.stream()
            if native is not None:
                if native not in self._streams:
                    pointer = self.c.ffi.cast("void *", native)
                    self._streams[native] = self.c.value("td_stream_wrap", self.c.device, pointer)
                self.c.td_device_set_stream(self.c.device, self._streams[native])
            try:
                yield self.c
            except TandemError as error:
                self.failed |= error.status == "TD_RANK_FAILED"
                stopped, self.stopped = self.stopped, None
                if stopped is not None:
                    raise stopped from None
                for name, variable in LIMITS.items():
                    if f"; {name} is " in error.message:
                        error.args = (f"{error} ({name}= or {variable} raises it)",)
                raise


@functools.cache
def library() -> Library:
    return Library()


@functools.cache
def _device(device: torch.device) -> Device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"a tensor on {device}: libtandem has kernels for cpu and cuda")
    return Device(device)


def device_of(tensor: Tensor) -> Device:
    return _device(torch.device("cpu") if tensor.device.type == "cpu" else tensor.device)


def device_of_all(parameters: dict[str, Tensor]) -> Device:
    if not parameters:
        raise ValueError("the module has no parameters")
    places = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(places) > 1:
        raise ValueError(f"parameters on {len(places)} devices: {', '.join(places)}")
    return device_of(next(iter(parameters.values())))


def adder_of(parameter: Tensor) -> torch.autograd.graph.Node:
    """Autograd's node that adds to the parameter's `.grad`. A caller that hooks the node must keep the node."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]


def is_sent(parameter: Tensor) -> bool:
    """Whether collectives add and average its type."""
    return NAMES.get(parameter.dtype) in FLOATS


def check_type(name: str, parameter: Tensor) -> None:
    """TypeError if gradients of the parameter's type cannot be sent."""
    if not is_sent(parameter):
        raise TypeError(f"parameter {name} is of {parameter.dtype}, which is not sent")


def is_wrapped(module: nn.Module) -> bool:
    """Whether a wrapper of this package has it."""
    return getattr(type(module), "wraps_for_ranks", False) or "_fsdp" in module.__dict__


def is_pytorchs(module: nn.Module) -> bool:
    """Whether it is a wrapper of PyTorch's, or fully_shard has it."""
    return any(k.__name__ in PYTORCHS and k.__module__.startswith("torch.") for k in type(module).__mro__)


def check_unwrapped(module: nn.Module) -> None:
    """ValueError if a wrapper has the module or a part of it: two would average one gradient, and a broadcast would
    replace this rank's rows of a split weight by rank 0's."""
    for name, inner in module.named_modules():
        if is_wrapped(inner) or is_pytorchs(inner):
            raise ValueError(f"{name or 'the module'} is wrapped already")
    for name, parameter in module.named_parameters():
        check_whole(name, parameter)


def _registered(parent: nn.Module, _: str, module: nn.Module | None) -> None:
    """PyTorch's wrappers do not ask what they wrap."""
    if module is not None and is_pytorchs(parent):
        for name, inner in module.named_modules():
            if is_wrapped(inner):
                raise ValueError(f"{name or 'the module'} is wrapped already: {type(parent).__name__} cannot")


torch.nn.modules.module.register_module_module_registration_hook(_registered)


def check_whole(name: str, parameter: Tensor) -> None:
    """ValueError if the parameter holds only this rank's rows."""
    if getattr(parameter, "split_among_ranks", False) or hasattr(parameter, "device_mesh"):
        raise ValueError(f"{name} is split among the ranks already")
