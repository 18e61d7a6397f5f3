"""What communication takes of C's step, by td_bench_ranks_run of every rank."""

from parity.core import Side, equal
from parity.shared.bench_ranks import BenchRanks, gradient_bytes
from parity.shared.ranked import sides_of

STEPS = {"cpu": 10, "cuda": 5}
WARMUP = 3


def run(case, draw, c, usual_mb):
    """Judges the bytes of a step's collectives."""
    sides = {
        side: measured(case, draw, c, backend, usual_mb) for side, backend in sides_of(draw.device).items()
    }
    return sides | {"truth": {"bytes": float(gradient_bytes(case))}, "rule": {"*": equal("truth")}}


def measured(case, draw, c, backend, usual_mb):
    """The record has timelines of naive, overlap and the usual bucket."""
    found = {}

    def measure():
        run = BenchRanks(case, c, backend, STEPS[draw.device.type], WARMUP)
        try:
            found["values"] = run.values()
            if case.strategy in ("naive", "overlap") or case.get("bucket_mb") == usual_mb:
                found["series"] = run.timelines()
        finally:
            run.close()

    # Measured once, when the side is opened, because a judged call runs twice.
    return Side(lambda: {"bytes": float(found["values"]["bytes"])}, open=measure, record=lambda: found)
