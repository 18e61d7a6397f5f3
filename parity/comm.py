"""Collectives among ranks: libtandem's over MPI, Gloo and NCCL against torch.distributed, in the same processes."""

import functools
import itertools

import torch

from parity.core import DTYPES, Case, Side, equal, grid, parity, sampled, within
from parity.core.comparison import ms_of
from parity.shared.pages import MIB, number, tabled
from parity.shared.ranked import BACKENDS, QUICK_RANKS, sides_of
from ref import comm as ref

NAME = "distributed_communication_single_node"

TORCH = {"cuda": "torch_nccl", "cpu": "torch_gloo"}
RANKS = (2, 4, 6)
# MiB of a rank's buffer, and how many calls follow one another in a sample of the throughput.
SIZES = {1: 20, 10: 10, 100: 4, 1024: 2}
EVERY = ("f32", "f16", "bf16", "f64", "i64")
ROOT = 1
ROW = 1009  # elements of most error cases, which no number of ranks divides


def cases(profile, device):
    for ranks in QUICK_RANKS[device] if profile == "quick" else RANKS:
        if profile == "full" or ranks < max(RANKS):
            yield from error_cases(profile, ranks)
        else:
            yield from few_error_cases(ranks)
        yield from time_cases(profile, device, ranks)


def error_cases(profile, ranks):
    every = list(EVERY if profile == "full" or ranks == 2 else EVERY[:3])
    grids = [grid(collective=["all_reduce"], dtype=every, reduction=["sum", "average", "max"], count=[ROW])]
    counts = sorted({0, 1, ranks - 1, ranks} | {2**20 + 3})
    grids.append(grid(collective=["all_reduce"], dtype=["f32"], reduction=["sum"], count=counts))
    others = ["reduce_scatter", "all_gather", "broadcast"]
    grids.append(grid(collective=others, dtype=every, reduction=["sum"], count=[ROW]))
    grids.append(grid(collective=others, dtype=["f32"], reduction=["sum"], count=[2**18 + 1]))
    for keys in itertools.chain(*grids):
        if keys["dtype"] == "i64" and keys["reduction"] == "average":
            continue  # which C refuses
        yield Case(NAME, seconds=0.1, ranks=ranks, **keys)


def few_error_cases(ranks):
    for dtype in ("f32", "bf16"):
        keys = dict(ranks=ranks, dtype=dtype, count=ROW)
        yield Case(NAME, seconds=0.1, collective="all_reduce", reduction="average", **keys)
        yield Case(NAME, seconds=0.1, collective="reduce_scatter", reduction="sum", **keys)


def time_cases(profile, device, ranks):
    whole = profile == "full" or device == "cuda"
    for mib in [*SIZES][: len(SIZES) if whole else (3 if profile == "quick" else 4) - (ranks + 1) // 2]:
        for calls in (1, SIZES[mib]):
            yield time_case(device, ranks, mib * MIB, calls)


def time_case(device, ranks, nbytes, calls):
    slow = 1 if device == "cuda" else 60 * ranks**1.5
    repeats = 20 if nbytes < 512 * MIB else 5
    return Case(
        NAME,
        measure="time",
        seconds=0.3 + slow * nbytes / 2**40 * len(BACKENDS[device]) * (repeats + 5),
        repeats=repeats if calls == 1 else 5,
        together=calls,
        needs_bytes=2 * nbytes * (ranks if device == "cpu" else 1),
        collective="all_reduce",
        ranks=ranks,
        bytes=nbytes,
        dtype="f32",
        reduction="sum",
        calls=calls,
        warmup=5 if calls == 1 else 1,
    )


def run(case, draw, c):
    return timed(case, draw, c) if "bytes" in case else judged(case, draw, c)


def judged(case, draw, c):
    """Every backend from one poisoned buffer to another, PyTorch on copies."""
    ranks, rank = case.ranks, c.ranks.rank
    scattered = case.collective == "reduce_scatter"
    length = case.count * (ranks if scattered else 1)
    inputs = [drawn(draw, case, f"in {i}", length) for i in range(ranks)]
    shape = (ranks, case.count) if case.collective == "all_gather" else (case.count,)

    def answer(out):
        found = {"out": out.view(shape)}
        return found if scattered else found | {"ranks_apart": float(not c.ranks.same(out))}

    def tandem(backend):
        def call():
            out = draw.poisoned(shape, case.dtype)
            call_tandem(case, c, c.ranks.comm(backend), inputs[rank], out)
            return answer(out)

        return call

    def eager():
        x = inputs[rank].clone()
        if case.collective == "all_reduce":
            return answer(ref.all_reduce(x, case.reduction))
        if case.collective == "broadcast":
            return answer(ref.broadcast(x, ROOT % ranks))
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        return answer(ref.reduce_scatter(x, out) if scattered else ref.all_gather(x, out))

    truth, exact = truth_of(case, inputs, rank)
    rule = within(rel_l2=ranks * 2.0**-53) if case.dtype == "f64" else parity()
    kind = draw.device.type
    sides = sides_of(kind, tandem) | {TORCH[kind]: eager}
    orders = itertools.cycle(itertools.permutations(range(ranks)))
    return sides | {
        "truth": {"out": truth.double().view(shape)} | ({} if scattered else {"ranks_apart": 0.0}),
        "rule": {"out": equal("truth") if exact else rule, "ranks_apart": equal("truth")},
        "equal": lambda: {"out": in_order(case, inputs, rank, next(orders)).view(shape)},
    }


def drawn(draw, case, name, length):
    if case.dtype == "i64":
        return draw.integers(name, (length,), "i64", low=-1000, high=1000)
    return draw.normal(name, (length,), case.dtype)


def call_tandem(case, c, comm, x, out):
    if case.collective == "all_reduce":
        c.td_comm_all_reduce(comm, x, out, case.count, case.dtype, case.reduction, None)
    elif case.collective == "reduce_scatter":
        c.td_comm_reduce_scatter(comm, x, out, case.count, case.dtype, "sum", None)
    elif case.collective == "all_gather":
        c.td_comm_all_gather(comm, x, out, case.count, case.dtype, None)
    else:
        out.copy_(x)
        c.td_comm_broadcast(comm, out, case.count, case.dtype, ROOT % case.ranks, None)


def my_parts(case, inputs, rank):
    """What of the inputs this rank's output is made of."""
    if case.collective != "reduce_scatter":
        return inputs
    return [x.view(case.ranks, case.count)[rank] for x in inputs]


def truth_of(case, inputs, rank):
    """The true output, and whether it is known to the bit: if nothing, integers, or only two numbers are added."""
    if case.collective == "broadcast":
        return inputs[ROOT % case.ranks].clone(), True
    if case.collective == "all_gather":
        return torch.stack(inputs), True
    parts = my_parts(case, inputs, rank)
    if case.dtype == "i64" or case.reduction == "max":
        return ref.reduced(parts, case.reduction), True
    if case.ranks == 2 and case.dtype in ("f32", "f64"):
        return ref.in_order(parts, [0, 1], case.reduction), True
    return ref.reduced(parts, case.reduction), False


def in_order(case, inputs, rank, order):
    """The sum in an order of the ranks; of what is not summed, the answer itself."""
    if case.collective in ("broadcast", "all_gather") or case.reduction == "max":
        return truth_of(case, inputs, rank)[0].to(inputs[0].dtype)
    return ref.in_order(my_parts(case, inputs, rank), list(order), case.reduction)


def timed(case, draw, c):
    """All-reduces in place. Before each sample the buffer is filled anew, because a sum grows with every call. Before
    the last one each rank fills it with other numbers."""
    count = case.bytes // DTYPES[case.dtype].itemsize
    x = torch.empty(count, dtype=DTYPES[case.dtype], device=draw.device)
    several = case.calls > 1
    on_the_bus = case.bytes * (case.ranks - 1) / case.ranks * 2  # of each rank's link, as nccl-tests counts

    def numbers(rank):
        return torch.arange(count, out=x).remainder_(ROW).mul_(rank + 1)

    def truth():
        summed = sum(sampled(numbers(rank)).double() for rank in range(case.ranks))
        return {"x": summed * case.ranks ** (case.calls - 1)}

    def side(call, **how):
        renew = functools.partial(numbers, c.ranks.rank)
        how |= dict(before=lambda: x.fill_(1), renew=renew, answer=lambda: {"x": sampled(x)})
        return Side(call, nbytes=on_the_bus, **how)

    def tandem(backend):
        handle = c.ffi.new("td_work **")

        @functools.cache
        def start():
            how = (x, x, count, case.dtype, "sum", handle if several else None)
            return c.bound("td_comm_all_reduce", c.ranks.comm(backend), *how)

        def call():
            start()()
            if several:  # later work on the device waits, the host does not
                c.td_work_queue_wait(handle[0])

        return side(call, record=lambda: {"values": {"library": c.ranks.library(backend), "hosts": 1}})

    def eager():
        ref.all_reduce(x)

    kind = draw.device.type
    return sides_of(kind, tandem) | {TORCH[kind]: side(eager), "truth": truth}


JOINED = True  # the question asks for CPUs and GPUs: a write-up joins the machines
SIDES = ("c_mpi", "c_gloo", "torch_gloo", "c_nccl", "torch_nccl")


NO_ROOM = ("oom", "not run")  # a collective needs memory alone


def report(page, records):
    times = records.where(lambda r: "bytes" in r["case"])
    reduced = times.only(collective="all_reduce", impl=list(SIDES))
    single = reduced.where(lambda r: r["case"]["calls"] == 1)
    page.section(NAME)
    page.note("One all-reduce of f32 sums, in place: the time of the slowest rank.")
    gpus = gpus_of(single)
    if len({*gpus.values()}) > 1:
        page.note("NCCL ran on {}.".format("; ".join(f"{name} with {n} ranks" for n, name in gpus.items())))
    report_sizes(page, single, "single", "ms", "ms", expected=12)
    if not any("nccl" in impl for impl in single.impls()):
        page.lacks("NCCL")
    page.note("Calls that follow each other: bus bandwidth, bytes x 2 (ranks - 1) / ranks / time.")
    report_sizes(page, reduced.where(lambda r: r["case"]["calls"] > 1), "bandwidth", "gb_s", "GB/s")
    panels = {}
    for ranks in single.values("ranks"):
        mine = single.only(ranks=ranks)
        curves = {impl: mine.curve("bytes", "ms", impl) for impl in mine.impls()}
        lost = max((r["case"]["bytes"] // MIB for r in mine.records if r["status"] in NO_ROOM), default=0)
        title = f"{ranks} ranks" + (f"; {lost} MiB: too little memory" if lost else "")
        panels[title] = {impl: ([x / MIB for x in xs], ys) for impl, (xs, ys) in curves.items()}
    page.plot("time", panels, x="MiB", y="ms", title="One all-reduce by size, number of ranks and backend")
    report_answer(page, single)
    report_errors(page, records.where(lambda r: "count" in r["case"]))
    libraries = sorted({r["values"]["library"] for r in times.records if "library" in r.get("values", {})})
    page.method("errors")
    page.method("times", libraries=", ".join(libraries) or None)


def report_sizes(page, records, name, column, unit, expected=0):
    def cells(record):
        value = number(record, column)
        words = record["status"] if record["status"] != "ok" else None
        return {"MiB": record["case"]["bytes"] // MIB, record["impl"]: words if value is None else value}

    rows = tabled(records.records, ("ranks", "bytes"), cells, order=lambda key: key)
    page.table(rows, name, ["ranks", "MiB", *SIDES], dict.fromkeys(SIDES, unit), expected=expected)


def machine_of(records):
    return " and ".join(sorted({r["machine"] for r in records.records if "machine" in r}))


def gpus_of(single):
    """{ranks that NCCL has results of: the name of the GPUs}."""
    found = single.only(impl=["c_nccl", "torch_nccl"])
    return {ranks: machine_of(found.only(ranks=ranks)) for ranks in found.values("ranks")}


def report_answer(page, single):
    def ms(impl, ranks, *sizes):
        found = single.only(impl=impl, ranks=ranks)
        return {mib: next(map(ms_of, found.only(bytes=mib * MIB).records), None) for mib in sizes}

    ranks = single.values("ranks") or [None]
    few, many = ranks[0], ranks[-1]
    oom = next((r["case"] for r in single.records if r["status"] in NO_ROOM), None)
    if oom:
        oom = {"mib": oom["bytes"] // MIB, "ranks": oom["ranks"]}
        page.lacks("{mib} MiB among {ranks} ranks: the host has too little memory".format(**oom))
    both = {"c_nccl", "torch_gloo"} <= set(single.impls())
    of = gpus_of(single)
    gpus, alike = max(of, default=None), len(of) > 1 and len({*of.values()}) == 1
    above = [n for n in ranks if n and gpus and n > gpus]
    if above:
        counts = " and ".join(map(str, above))
        page.lacks(f"NCCL among {counts} ranks: no more than {gpus} GPUs were measured")
    page.say(
        both=both or None,
        machine={impl: machine_of(single.only(impl=impl, ranks=few)) for impl in TORCH.values()},
        gpu=ms("torch_nccl", few, 10, 1024),
        cpu=ms("torch_gloo", few, 1024),
        mpi=ms("c_mpi", few, 1, 100),
        few=few,
        many=many if many != few else None,
        steps=[ms("torch_gloo", n, 100)[100] for n in ranks],
        gpus=gpus,
        above=above,
        nccl=[ms("torch_nccl", n, 1024)[1024] for n in of] if alike else None,
        of=[f"`{n}`" for n in of],
        oom=oom,
    )


def report_errors(page, errors):
    page.question("Are the sums right, and the same on every rank?")
    rows = {}
    for record in errors.records:
        if not record["impl"].startswith("c_") or record["status"] not in ("ok", "failed"):
            continue
        key = (record["case"]["collective"], record["impl"])
        row = rows.setdefault(key, {"collective": key[0], "side": key[1], "results": 0, "hold": 0})
        row["results"] += 1
        row["hold"] += record["status"] == "ok"
        row["allowance used"] = max(row.get("allowance used", 0.0), number(record, "used") or 0.0)
    for row in rows.values():
        used = row["allowance used"]
        row["allowance used"] = f"{100 * used:.0f} %" if used else "none: every bit is right"
    page.table(rows.values(), "errors")
