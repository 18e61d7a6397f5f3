"""A timing says what is measured of a driver's step: its phases, or the whole.

`values` stand in the record as they are.
"""

from parity.bench.steps import PHASES
from parity.core import Side
from parity.core.clock import statistics

PHASE_STEPS = 5


class Phases:
    """Each phase by itself, the device synchronised at its end."""

    def __init__(self, driver, case, values):
        self.driver, self.case, self.values = driver, case, values
        self.open, self.close = driver.open, driver.close

    def call(self):
        self.driver.phased()
        return {}

    def record(self):
        """Of the timed calls: those after the warm-up, without the one that weighs the memory."""
        timed = slice(self.case.warmup, self.case.warmup + self.case.repeats)
        return {"phases": phases_of(self.driver.times, timed), "values": self.values}


class Whole:
    """Steps without a look at the clock inside; then, before the side is closed, a few by their phases."""

    def __init__(self, driver, case, values):
        self.driver, self.values = driver, values
        self.open = driver.open_whole
        self.called = False
        self.unphased = None  # why a side that has phases lacks them

    def call(self):
        self.driver.whole()
        self.called = True
        return {}

    def close(self):
        try:
            if self.called and self.driver.has_phases:
                for _ in range(PHASE_STEPS):
                    self.driver.phased()
        except Exception as error:  # the steps themselves are measured: that stays
            self.unphased = f"phases were not timed: {type(error).__name__}: {error}".splitlines()[0]
        finally:
            self.driver.close()

    def record(self):
        found = {"phases": phases_of(self.driver.times, slice(1, PHASE_STEPS)), "values": self.values}
        if self.unphased:
            found |= {"phases": {}, "message": self.unphased}
        return found | self.driver.peaks


def side_of(timing, flops, needs_bytes=None):
    how = dict(open=timing.open, close=timing.close, holds=timing.driver.holds)
    return Side(timing.call, flops=flops, needs_bytes=needs_bytes, record=timing.record, **how)


def phases_of(times, timed):
    found = {phase: getattr(times, phase)[timed] for phase in PHASES}
    return {phase: statistics(samples) for phase, samples in found.items() if samples}
