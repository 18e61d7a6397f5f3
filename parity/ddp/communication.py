"""What communication takes of C's step, by td_bench_ranks_run of every rank, and what an all-reduce by itself takes."""

import numpy as np

from parity.core import DTYPES, Side, equal
from parity.shared.bench_ranks import BenchRanks, gradient_bytes
from parity.shared.ranked import comm_of, sides_of

STEPS = {"cpu": 10, "cuda": 5}
WARMUP = 3
# Bytes of the all-reduces that o and w are fitted to, and how often each is timed.
FITTED = ((2**16, 50), (2**20, 30), (10 * 2**20, 10))
LARGER = ((100 * 2**20, 5), (400 * 2**20, 5))  # on GPUs as well


def run(case, draw, c, usual_mb):
    side = all_reduces if case.part == "fit" else communication
    sides = {impl: side(case, draw, c, backend, usual_mb) for impl, backend in sides_of(draw.device).items()}
    truth = {"sums": float(case.ranks)} if case.part == "fit" else {"bytes": float(gradient_bytes(case))}
    return sides | {"truth": truth, "rule": {"*": equal("truth")}}


def communication(case, draw, c, backend, usual_mb):
    """Judged are the bytes of a step's collectives. Kept are the timelines of naive, overlap and the usual bucket."""
    found = {}

    def measure():
        run = BenchRanks(case, c, backend, STEPS[draw.device.type], WARMUP)
        try:
            found["values"] = run.values()
            if case.strategy in ("naive", "overlap") or case.get("bucket_mb") == usual_mb:
                found["series"] = run.timelines()
        finally:
            run.close()

    # Once, when the side is opened: a call that is judged is made twice.
    return Side(lambda: {"bytes": float(found["values"]["bytes"])}, open=measure, record=lambda: found)


def all_reduces(case, draw, c, backend, _usual_mb):
    """Medians of all-reduces by size, one by one, each to its end; on GPUs also of how long they ran, one behind the
    other, as in a captured step, where no host waits for them. As steps have them: with their communicator, and in
    memory that goes from GPU to GPU directly where that can be."""
    found, sums, dtype = {}, {}, case.get("dtype", "f32")

    def measure():
        session = c.ranks.session
        gpu = draw.device.type == "cuda"
        comm = comm_of(case, c, backend) if case.config else c.ranks.comm(backend)
        sizes = [*FITTED, *LARGER] if gpu else FITTED
        largest = max(nbytes for nbytes, _ in sizes)
        block = session.work(largest)
        session.td_device_fill(session.device, block, 0, largest)
        window = session.create("td_comm_window_create", comm, block, largest)
        ms, device_ms = [], []
        for nbytes, times in sizes:
            count = nbytes // DTYPES[dtype].itemsize

            def reduce(count=count, work=None):
                session.td_comm_all_reduce(comm, block, block, count, dtype, "sum", work)

            for _ in range(5):
                c.on.timed_ms(reduce)
            ms.append(float(np.median([c.on.timed_ms(reduce)[0] for _ in range(times)])))
            if gpu:
                device_ms.append(float(np.median(watched_ms(session, comm, reduce, times))))
        found["series"] = {"bytes": [nbytes for nbytes, _ in sizes], "ms": ms}
        found["series"] |= {"device_ms": device_ms} if gpu else {}
        x = session.tensor(block, (count,), dtype)
        x.fill_(1.0)
        c.on.synchronize()
        reduce()
        session.td_device_synchronize(session.device)
        sums["sums"] = float(x.double().sum() / x.numel())
        session.destroy(window)
        session.free(block)

    return Side(lambda: sums, open=measure, record=lambda: found)


def watched_ms(session, comm, reduce, times):
    """How long each of so many calls ran, one behind the other."""
    work, spans, count = (session.ffi.new(kind) for kind in ("td_work **", "td_comm_span **", "int64_t *"))
    session.td_comm_watch(comm, times)
    for _ in range(times):
        reduce(work=work)
        session.td_work_queue_wait(work[0])
    session.td_device_synchronize(session.device)
    session.td_comm_watched(comm, spans, count)
    found = [(span.end_ns - span.begin_ns) / 1e6 for span in spans[0][0 : count[0]]]
    session.td_comm_watch(comm, 0)
    return found


# ---- the time of an all-reduce by its bytes ----


def times_of(series):
    """In ms: how long all-reduces ran where that was watched, else to their ends."""
    return series.get("device_ms", series["ms"])


def fitted(series):
    """(seconds a call, bytes a second): t = o + bytes / w, by least squares of relative errors; without o where that
    would be below 0."""
    ms, nbytes = np.array(times_of(series)), np.array(series["bytes"], dtype=float)
    rows = np.stack([1 / ms, nbytes / ms], axis=1)
    (o, slope), *_ = np.linalg.lstsq(rows, np.ones(len(ms)), rcond=None)
    if o < 0 or slope <= 0:
        o, slope = 0.0, (nbytes / ms).sum() / ((nbytes / ms) ** 2).sum()
    return float(o) / 1e3, 1e3 / float(slope)
