"""How much memory a side needs, how much there is, and how a case that wants more is stopped in time."""

import contextlib
import itertools
import re
import resource
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

KEPT_FREE = 256 * 2**20  # for the rest of the machine
CGROUPS = Path("/sys/fs/cgroup")


def peak_of_torch(call: Callable[[], object]) -> int:
    """Peak bytes of PyTorch's CPU allocator during `call`, beyond what was allocated before it.

    PyTorch keeps no such statistics for the CPU, but its profiler reports each allocation and each free, so the peak
    is exact: bytes requested, as the recorder of libtandem counts them. Scratch that a library takes from malloc
    itself is in neither account.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as seen:
        result = call()
    events = sorted(_allocations(seen.profiler.kineto_results.experimental_event_tree()))
    del result
    current = peak = 0
    for _, size in events:
        current += size
        peak = max(peak, current)
    return peak


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroups: Path = CGROUPS) -> int:
    """What this process may still allocate: MemAvailable, or less where a control group allows less."""
    available = re.search(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    limits = [int(available[1]) * 1024]
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for folder, (limit, used) in itertools.product(_cgroup_folders(cgroups), names):
        # Version 2 writes "max" for no limit, version 1 a number beyond any machine.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
    return max(0, min(limits) - KEPT_FREE)


def oom_kills(vmstat: Path = Path("/proc/vmstat"), cgroups: Path = CGROUPS) -> int | None:
    """How many processes the kernel has killed so far because memory was out: of this control group if it counts
    them, else of the machine; None if neither is known. The kernel counts before it kills."""
    names = ("memory.events", "memory.oom_control")  # version 2 and version 1
    for file in [*(folder / name for folder in _cgroup_folders(cgroups) for name in names), vmstat]:
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                return int(found.group(1))
    return None


def limit_process() -> int:
    """Lets this process grow by the bytes that are available now, so that an allocation fails. Returns them."""
    room = available_bytes()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = size + room if hard == resource.RLIM_INFINITY else min(size + room, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return room


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception is the allocator's: Python's, PyTorch's, or libtandem's."""
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if known or getattr(error, "status", None) == "TD_NO_MEMORY":
        return True
    words = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")
    words += ("Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, (RuntimeError, OSError)) and any(word in str(error) for word in words)


def outside_bytes(tensors: Iterable[torch.Tensor], on_device: Callable[[torch.Tensor], bool]) -> int:
    """Bytes of the tensors that lie outside the device's blocks. Views of one storage count once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if not on_device(tensor):
            found[tensor.data_ptr()] = max(found.get(tensor.data_ptr(), 0), tensor.nbytes)
    return sum(found.values())


def _allocations(events):
    """(time, bytes) of every allocation (positive) and free (negative) in the profiler's tree of events."""
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)


def _cgroup_folders(root: Path):
    """Where the limits of this process may stand: its own group and, as containers see it, the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / controllers
            yield base / path.lstrip("/")
            yield base
