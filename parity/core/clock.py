"""One clock for every side of a case: calls interleaved A B A B ..., the same threads, no garbage collection."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from parity.core.case import Side

WARMUP = 2
FEWEST, MOST = 5, 200


@dataclass
class Timing:
    """The samples of one side, in ms and in order, and what ended them early (None: nothing)."""

    samples: list[float] = field(default_factory=list)
    failure: Exception | None = None

    def stats(self) -> dict:
        return statistics(self.samples)


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
) -> dict[str, Timing]:
    """Times each side `repeats` times, or as often as about `budget` seconds a side allow (5 to 200 times).

    A side that raises drops out with its exception; the others go on. `calling` hears which side runs next.
    """
    timings = {impl: Timing() for impl in sides}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        round_s = 0.0
        for _ in range(warmup):
            round_s = _round(sides, timings, calling, keep=False)
        if repeats is None:
            if warmup == 0:
                round_s = _round(sides, timings, calling, keep=True)
            done = max(len(timing.samples) for timing in timings.values())
            fit = int(budget * len(sides) / max(round_s, 1e-9))
            repeats = min(max(fit, FEWEST), MOST) - done
        for _ in range(repeats):
            _round(sides, timings, calling, keep=True)
    finally:
        if collecting:
            gc.enable()
    return timings


def ratio(samples, reference) -> dict:
    """samples / reference pair by pair: each pair ran back to back, so a busy machine slows both alike."""
    pairs = np.asarray(samples) / np.asarray(reference)
    low, middle, high = np.percentile(pairs, [25, 50, 75])
    return {"median": float(middle), "p25": float(low), "p75": float(high)}


def _round(sides, timings, calling, keep: bool) -> float:
    """Calls every side that still runs once, in order; returns the seconds of it all."""
    started = time.perf_counter_ns()
    for impl, side in sides.items():
        if timings[impl].failure is not None:
            continue
        calling(impl)
        try:
            if side.before is not None:
                side.before()
            start = time.perf_counter_ns()
            result = side.call()
            stop = time.perf_counter_ns()
        except Exception as error:  # any failure of a side is a result, never the end of the sweep
            timings[impl].failure = error
            continue
        del result  # after the clock was read: freeing is not part of the call
        if keep:
            timings[impl].samples.append((stop - start) / 1e6)
    return (time.perf_counter_ns() - started) / 1e9
