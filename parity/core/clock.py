"""One clock for every side of a case: calls interleaved A B A B ..., the same threads, no garbage collection.

On a GPU two events time a call, on the stream of both sides, after the L2 cache was overwritten and with the host ahead
of the device. Several calls in a row may share one pair of events, so that nothing waits between them.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from parity.core.case import Side
from parity.core.device import Cpu, Device

WARMUP = 2
FEWEST, MOST = 5, 200


@dataclass
class Timing:
    """The samples of one side, in ms and in order, and the exception that ended them."""

    samples: list[float] = field(default_factory=list)
    failure: Exception | None = None
    first_ms: float | None = None  # the host's time of the first call, which compiles, loads and allocates
    queue_ms: float = math.inf  # the host's time of the quickest call so far
    outputs: dict = field(default_factory=dict)  # of the last call, or before it of the call before


def others_running() -> int:
    """How many other tasks run or wait for a processor now."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1


def statistics(samples) -> dict:
    """The record's "ms": the same keys and definitions as base/stats.h."""
    values = np.asarray(samples, dtype=np.float64)
    return {
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "std": float(values.std(ddof=1)) if values.size > 1 else 0.0,
        "min": float(values.min()),
        "max": float(values.max()),
        "p95": float(np.percentile(values, 95)),
        "n": int(values.size),
    }


def time_sides(
    sides: Mapping[str, Side],
    *,
    warmup: int = WARMUP,
    repeats: int | None = None,
    budget: float = 1.0,
    calling: Callable[[str], None] = lambda impl: None,
    device: Device | None = None,
    together: int = 1,
    before_last: Callable[[Mapping[str, Timing]], None] = lambda timings: None,
) -> dict[str, Timing]:
    """Times each side `repeats` times, or as often as about `budget` seconds a side allow (5 to 200 times). A sample is
    the time of one of `together` calls in a row.

    A side that raises drops out with its exception; the others go on. `calling` hears which side runs next.
    `before_last` is called before the last round, with the outputs of the round before.
    """
    device = device or Cpu()
    timings = {impl: Timing() for impl in sides}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(warmup):
            _round(sides, timings, calling, device, 1, outputs=repeats == 1)
        if repeats is None:
            round_s = _round(sides, timings, calling, device, together, keep=True)
            done = max(len(timing.samples) for timing in timings.values())
            fit = int(budget * len(sides) / max(round_s, 1e-9))
            repeats = min(max(fit, FEWEST), MOST) - done
        for left in range(repeats, 0, -1):
            if left == 1:
                before_last(timings)
            _round(sides, timings, calling, device, together, keep=True, outputs=left <= 2)
    finally:
        if collecting:
            gc.enable()
    return timings


def ratio(samples, reference) -> dict:
    """samples / reference pair by pair: each pair ran back to back, so a busy machine slows both alike."""
    pairs = np.asarray(samples) / np.asarray(reference)
    low, middle, high = np.percentile(pairs, [25, 50, 75])
    return {"median": float(middle), "p25": float(low), "p75": float(high)}


def _round(sides, timings, calling, device: Device, together: int, keep=False, outputs=False) -> float:
    """Calls every side that still runs once (or `together` times), in order; returns the seconds of it all. `outputs`:
    keeps the outputs of each side, as its call left them."""
    started = time.perf_counter_ns()
    for impl, side in sides.items():
        timing = timings[impl]
        if timing.failure is not None:
            continue
        calling(impl)
        begun = time.perf_counter_ns()
        try:
            if side.before is not None:
                side.before()
            if together == 1:
                if keep:
                    device.get_ahead(timing.queue_ms)
                device.clear_caches()
            last = []
            call = (lambda side=side, last=last: last.append(side.call())) if outputs else side.call
            sample, queue_ms = device.timed_ms(call, together)
            timing.outputs = _detached(last[-1] or {}) if last else {}
            last.clear()
            if side.answer is not None:  # at once, because sides may share a buffer
                timing.outputs = side.answer()
        except Exception as error:  # any failure of a side is a result, never the end of the sweep
            # Its traceback would keep the side's tensors alive.
            timing.failure = error.with_traceback(None)
            device.check_alive()
            device.release()
            continue
        if timing.first_ms is None:
            timing.first_ms = (time.perf_counter_ns() - begun) / 1e6
        # A call that waits for the device waits for the host's lead too. The first call has no lead.
        timing.queue_ms = min(timing.queue_ms, queue_ms)
        if keep:
            timing.samples.append(sample)
    return (time.perf_counter_ns() - started) / 1e9


def _detached(outputs: Mapping) -> dict:
    """Without the tensors that autograd keeps for a backward pass: they would count as memory of the next call."""
    return {
        name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()
    }
