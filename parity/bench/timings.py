"""What is measured of a driver's step: its phases, or the whole."""

from parity.bench.steps import PHASES
from parity.core import Side
from parity.core.clock import statistics


def side_of(driver, case, timed, values, flops, needs_bytes=None):
    """timed: "phases", the device synchronised after each; or "whole", steps without a look at the clock inside.
    `values` stand in the record as they are."""
    whole = timed == "whole"

    def call():
        if whole:
            driver.whole()
        else:
            driver.phased()
        return {}

    def record():
        if whole:
            return driver.peaks | {"values": values}
        # Of the timed calls: those after the warm-up, without the one that weighs the memory.
        timed_calls = slice(case.warmup, case.warmup + case.repeats)
        found = {phase: getattr(driver.times, phase)[timed_calls] for phase in PHASES}
        phases = {phase: statistics(samples) for phase, samples in found.items() if samples}
        return {"phases": phases, "values": values}

    how = dict(open=driver.open_whole if whole else driver.open, close=driver.close, holds=driver.holds)
    return Side(call, flops=flops, needs_bytes=needs_bytes, record=record, **how)
