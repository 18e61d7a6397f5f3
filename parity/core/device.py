"""What a run computes on: where tensors live, how calls are timed, and how memory is counted.

Cpu and Cuda have the same methods. CUDA is not touched before a Cuda is made.
"""

import contextlib
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from parity.core import memory
from tandem import library

FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any GPU so far
KEPT_BYTES = 2**30  # that PyTorch's allocator may keep from case to case
FLUSHES = 6  # about 0.4 ms on an H200: PyTorch queues about 30 operations in that time
LEAD_MS = 20.0  # the longest lead of the host
LEAD = 2.0  # times the host's time for the quickest call so far
CYCLES_PER_MS = 2_000_000  # of a data centre's GPU at its fastest clock


class DeviceError(RuntimeError):
    """The machine has no such device; the message says what it has."""


class DeviceLost(BaseException):
    """The GPU's context is broken, as after an access to unmapped memory: only a new process helps. It is no failure of
    a side, so what catches these lets it pass."""


class Cpu(library.Cpu):
    """The processor: a call is done when it returns."""

    def precision(self, dtype: str | None) -> None:
        """Sets how PyTorch multiplies f32 in a case of this dtype."""

    def get_ahead(self, queue_ms: float) -> None:
        """Called untimed before clear_caches(): the host then queues a call of `queue_ms` before it begins."""

    def clear_caches(self) -> None:
        """Called untimed before each timed call. A CPU's caches stay as they are."""

    def timed_ms(self, call: Callable[[], Any], together: int = 1) -> tuple[float, float]:
        """The device's and the host's ms of one of `together` calls in a row. The result is freed later."""
        start = time.perf_counter_ns()
        for _ in range(together - 1):
            call()
        result = call()
        stop = time.perf_counter_ns()
        del result
        ms = (stop - start) / 1e6 / together
        return ms, ms

    def synchronize(self) -> None:
        """Waits for queued work and raises its error."""

    def check_alive(self) -> None:
        """DeviceLost if nothing can run on the device any more."""

    def peak_of_torch(self, call: Callable[[], Any]) -> dict[str, int]:
        """By how many bytes the call raises the allocator's `peak`, and `requested` if the allocator rounds up."""
        return {"peak": memory.peak_of_torch(call)}

    def held_by_torch(self) -> dict[str, int]:
        """Bytes that PyTorch has allocated now, by the same names; none if it does not count them."""
        return {}

    def available_bytes(self) -> int:
        """How much a side may still allocate."""
        return memory.available_bytes()

    def limit_process(self) -> None:
        """Makes allocations beyond the machine's memory fail. A GPU needs no limit: nobody else uses its memory."""
        memory.limit_process()

    def release(self) -> None:
        """Returns unused memory, so that the next side can have it."""

    def end_case(self) -> None:
        """Called after each case."""

    def surroundings(self) -> dict[str, Any]:
        """Keys of records: `machine`, further `versions`, `device`."""
        return {}


class Cuda:
    """A GPU. PyTorch and C queue on one stream, and events on it time the calls. The host times steps of ranks, and C's
    calls on its own stream (Session.own_stream)."""

    kind = "cuda"

    def __init__(self, index: int, priority: int = -1):
        if not torch.cuda.is_available():
            words = "no GPU, no driver, or a build of PyTorch without CUDA"
            raise DeviceError(f"PyTorch sees no CUDA device: {words}")
        if index >= torch.cuda.device_count():
            raise DeviceError(f"cuda:{index} of {torch.cuda.device_count()} CUDA devices")
        gc.freeze()  # release() collects garbage between sides: not among what is imported so far
        self.name = f"cuda:{index}"
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(index)
        # The default stream cannot be captured, and waits for all others. This stream has the priority of C's
        # own: it runs before C's other streams, on which weights are updated during the backward pass.
        torch.cuda.set_stream(torch.cuda.Stream(priority=priority))
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Allocated now, so that it counts to no side.
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.torch)

    def stream(self) -> int | None:
        return torch.cuda.current_stream().cuda_stream

    def precision(self, dtype: str | None) -> None:
        tf32 = dtype == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32

    def get_ahead(self, queue_ms: float) -> None:
        """Keeps the GPU busy before the first event for longer than the host needs to queue the call. So small kernels
        have no gaps, which depend on the host alone. A call that keeps the host for more than LEAD_MS is bound by the
        host, and gets no lead."""
        if queue_ms <= LEAD_MS:
            torch.cuda._sleep(int(min(LEAD * queue_ms, LEAD_MS) * CYCLES_PER_MS))

    def clear_caches(self) -> None:
        """Overwrites the L2 cache several times, which also gives the host a lead."""
        for _ in range(FLUSHES):
            self._flush.zero_()

    def timed_ms(self, call: Callable[[], Any], together: int = 1) -> tuple[float, float]:
        self._start.record()
        begun = time.perf_counter_ns()
        for _ in range(together - 1):
            call()
        result = call()
        queue_ms = (time.perf_counter_ns() - begun) / 1e6
        self._stop.record()
        self._stop.synchronize()
        del result
        return self._start.elapsed_time(self._stop) / together, queue_ms / together

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def check_alive(self) -> None:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(str(error).splitlines()[0]) from None

    def peak_of_torch(self, call: Callable[[], Any]) -> dict[str, int]:
        """Blocks of the allocator are multiples of 512 bytes. PyTorch's workspace for cuBLAS is one of them."""
        before = self.held_by_torch()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peaks = _bytes_of_torch("peak")
        del result
        return {name: peak - before[name] for name, peak in peaks.items()}

    def held_by_torch(self) -> dict[str, int]:
        return _bytes_of_torch("current")

    def available_bytes(self) -> int:
        self.release()
        return torch.cuda.mem_get_info()[0]

    def limit_process(self) -> None:
        pass

    def release(self) -> None:
        """Also PyTorch's workspace for cuBLAS: each side that needs one allocates it, and counts it."""
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def end_case(self) -> None:
        """Drops compiled code: torch.compile would make code for all shapes at the second case."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        if torch.cuda.memory_reserved() > KEPT_BYTES:  # release() takes longer than a small case
            self.release()

    def surroundings(self) -> dict[str, Any]:
        versions = {"cuda": torch.version.cuda or "unknown", "driver": driver_version()}
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions["triton"] = metadata.version("triton")
        machine = torch.cuda.get_device_name(self.torch) + (", shared by ranks" if is_shared() else "")
        return {"machine": machine, "versions": versions, "device": self.kind}


def _bytes_of_torch(which: str) -> dict[str, int]:
    stats, names = torch.cuda.memory_stats(), {"peak": "allocated", "requested": "requested"}
    return {name: stats.get(f"{kind}_bytes.all.{which}", 0) for name, kind in names.items()}


Device = Cpu | Cuda


def open_device(name: str, priority: int = -1) -> Device:
    """The device "cpu", "cuda" or "cuda:1". priority: of its stream; PyTorch's own streams have 0, the last."""
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if not found:
        raise DeviceError(f"{name!r} is no device: cpu, cuda or cuda:INDEX")
    return Cpu() if name == "cpu" else Cuda(int(found.group(1) or 0), priority)


def kind_of(name: str) -> str:
    """ "cuda" for "cuda:1"."""
    return name.partition(":")[0]


def is_shared() -> bool:
    """Whether ranks share GPUs (TD_SHARE_GPU): their results and memory are valid, their times are not."""
    return "TD_SHARE_GPU" in os.environ


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", path.read_text()):
            return found[1]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return next(iter(done.stdout.strip().splitlines()), "unknown")
    return "unknown"
