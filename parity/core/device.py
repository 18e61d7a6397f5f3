"""What a run computes on: where its tensors live, how calls are timed there, and how memory is counted.

The CPU and a CUDA GPU answer the same questions. Nothing of CUDA is touched before a Cuda is made.
"""

import contextlib
import gc
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from parity.core import memory

FLUSH_BYTES = 256 * 2**20  # several times the second-level cache of any GPU so far
KEPT_BYTES = 2**30  # that PyTorch's allocator may keep from case to case
FLUSHES = 6  # about 0.4 ms on an H200: PyTorch queues some thirty operations in that time
LEAD_MS = 20.0  # that the host is put ahead of a call at most
LEAD = 2.0  # times what the quickest call so far took the host, which is not always as quick
CYCLES_PER_MS = 2_000_000  # of a data centre's GPU at its fastest; a slower one spins for longer


class DeviceError(RuntimeError):
    """The machine has no such device; the message says what it has."""


class DeviceLost(RuntimeError):
    """The GPU ended this process's work, as after an access to memory that is not there: only a new process helps."""


class Cpu:
    """The processor: a call is done when it returns."""

    kind = "cpu"
    name = "cpu"
    torch = torch.device("cpu")

    def stream(self) -> int | None:
        """PyTorch's current stream, for C to queue on; None where there are none."""
        return None

    def precision(self, dtype: str | None) -> None:
        """Sets how PyTorch multiplies f32 for a case of this dtype: what an earlier case left is no matter."""

    def get_ahead(self, queue_ms: float) -> None:
        """Called, untimed, before the caches are cleared for a timed call that takes the host `queue_ms` to queue: so
        that the host has queued all of it before the device begins. On a CPU nothing is queued."""

    def clear_caches(self) -> None:
        """Called, untimed, before each timed call. What the inputs' caches hold stays: nothing flushes a CPU's."""

    def timed_ms(self, call: Callable[[], Any], together: int = 1) -> tuple[float, float]:
        """Milliseconds of one of `together` calls in a row, and those that it kept the host. The result is freed after
        the clock was read."""
        start = time.perf_counter_ns()
        for _ in range(together - 1):
            call()
        result = call()
        stop = time.perf_counter_ns()
        del result
        ms = (stop - start) / 1e6 / together
        return ms, ms

    def synchronize(self) -> None:
        """Waits for queued work; an error of it is raised here."""

    def check_alive(self) -> None:
        """DeviceLost if nothing can run here any more."""

    def peak_of_torch(self, call: Callable[[], Any]) -> dict[str, int]:
        """Peak bytes of PyTorch's allocator during the call, beyond what was allocated before: `peak`, and where the
        allocator rounds what was requested up, `requested`."""
        return {"peak": memory.peak_of_torch(call)}

    def held_by_torch(self) -> dict[str, int]:
        """Bytes that PyTorch has allocated now, in the same terms; none where it keeps no account."""
        return {}

    def available_bytes(self) -> int:
        """What a side may still allocate."""
        return memory.available_bytes()

    def limit_process(self) -> None:
        """Makes allocations beyond what is there fail, instead of the machine."""
        memory.limit_process()

    def release(self) -> None:
        """Returns what nobody uses any more, so that the next side finds it."""

    def end_case(self) -> None:
        """Leaves nothing behind for the next case."""

    def surroundings(self) -> dict[str, Any]:
        """What records say of it beside the processor's: `machine`, further `versions`, `device`."""
        return {}


class Cuda:
    """A GPU: calls are queued on one stream, PyTorch's and C's alike, and timed by events on it. Steps of ranks are
    timed by the host, and C's on its own stream (Session.own_stream)."""

    kind = "cuda"

    def __init__(self, index: int, priority: int = -1):
        if not torch.cuda.is_available():
            raise DeviceError(
                "PyTorch sees no CUDA device: no GPU, no driver, or a build of PyTorch without CUDA"
            )
        if index >= torch.cuda.device_count():
            raise DeviceError(f"cuda:{index} of {torch.cuda.device_count()} CUDA devices")
        gc.freeze()  # what is imported so far: release() looks for garbage between sides
        self.name = f"cuda:{index}"
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(index)
        # The default stream cannot be captured in a graph, and waits for all others. This one goes ahead of
        # C's other streams, where updates run beside a backward pass, as C's own would.
        torch.cuda.set_stream(torch.cuda.Stream(priority=priority))
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Taken now, so that it is never counted among what a side has allocated.
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.torch)

    def stream(self) -> int | None:
        return torch.cuda.current_stream().cuda_stream

    def precision(self, dtype: str | None) -> None:
        tf32 = dtype == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32

    def get_ahead(self, queue_ms: float) -> None:
        """Keeps the GPU busy, before the first event, for longer than the host needs to queue the call: many small
        kernels are then timed without the gaps between their launches, which depend on the host alone. What clearing
        the caches takes comes on top, and is enough for a call of a few kernels.

        A call that keeps the host for longer than LEAD_MS is bound by the host by nature, and is timed as it is. One
        that waits for the GPU inside (a number read back) loses nothing: it waits for the lead as well, which ends
        before the first event, and then takes what it would have taken."""
        if queue_ms <= LEAD_MS:
            torch.cuda._sleep(int(min(LEAD * queue_ms, LEAD_MS) * CYCLES_PER_MS))

    def clear_caches(self) -> None:
        """Overwrites the second-level cache, several times over: for so long the host is ahead of any call."""
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
        """The allocator's account of allocated blocks, which are rounded up to 512 bytes, and of what was asked for.
        PyTorch's workspace for the matrix library is a block of it from its first use on."""
        before = self.held_by_torch()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        peaks = _bytes_of_torch("peak")
        del result
        return {name: peak - before[name] for name, peak in peaks.items()}

    def kernels(self, call: Callable[[], Any]) -> dict[str, float]:
        """Milliseconds of GPU time by kernel, whoever launched it, copies and fills among them. A process that has
        once done this may be slower ever after: only for cases that are alone."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=False) as seen:
            call()
            torch.cuda.synchronize()
        found: Counter = Counter()
        for event in seen.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation():
                found[event.name()] += event.duration_ns() / 1e6
        return dict(found.most_common())

    def held_by_torch(self) -> dict[str, int]:
        return _bytes_of_torch("current")

    def available_bytes(self) -> int:
        self.release()
        return torch.cuda.mem_get_info()[0]

    def limit_process(self) -> None:
        """Nothing to do: a GPU's memory has no other users to protect, and its driver reserves far more addresses than
        the machine has memory."""

    def release(self) -> None:
        """What PyTorch's allocator keeps for itself is memory that C lacks. Its workspace for the matrix library goes
        too: each side that needs one allocates it again, and counts it."""
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def end_case(self) -> None:
        """Compiled code goes too: for the shapes of a second case torch.compile would make one that fits all shapes."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        if torch.cuda.memory_reserved() > KEPT_BYTES:  # to look for it takes longer than a small case does
            self.release()

    def surroundings(self) -> dict[str, Any]:
        versions = {"cuda": torch.version.cuda or "unknown", "driver": driver_version()}
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions["triton"] = metadata.version("triton")
        return {
            "machine": torch.cuda.get_device_name(self.torch) + (", shared by ranks" if is_shared() else ""),
            "versions": versions,
            "device": self.kind,
        }


def _bytes_of_torch(which: str) -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    return {
        "peak": stats.get(f"allocated_bytes.all.{which}", 0),
        "requested": stats.get(f"requested_bytes.all.{which}", 0),
    }


Device = Cpu | Cuda


def open_device(name: str, priority: int = -1) -> Device:
    """The device that "cpu", "cuda" or "cuda:1" names. priority: of the stream that PyTorch and C queue on: lower
    goes first, and PyTorch's own streams have 0, the last."""
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if not found:
        raise DeviceError(f"{name!r} is no device: cpu, cuda or cuda:INDEX")
    return Cpu() if name == "cpu" else Cuda(int(found.group(1) or 0), priority)


def kind_of(name: str) -> str:
    """ "cuda" for "cuda:1", for whoever only lists cases."""
    return name.partition(":")[0]


def is_shared() -> bool:
    """Whether ranks share the GPUs that there are (TD_SHARE_GPU). Their results and their memory are those of ranks
    with a GPU each; their times are not."""
    return "TD_SHARE_GPU" in os.environ


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The GPU driver's own version, which decides what CUDA can run."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", path.read_text())
    except OSError:
        found = None
    if found:
        return found.group(1)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"
