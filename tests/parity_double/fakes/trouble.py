"""A module that fails in the way that the case's `way` names. A sweep must survive every way."""

import os
import signal

import torch

from parity.core import Case, Side
from parity.core.memory import available_bytes

WAYS = [
    *(
        "wrong",
        "unwritten",
        "nan",
        "infinite",
        "overrun",
        "input",
        "unsupported",
        "raises",
        "run_raises",
        "names",
        "truth_raises",
    ),
    *("torch_oom", "c_oom", "predicted", "killed", "crash", "ranks", "fine"),
]
RANKED = ("rank_wrong", "rank_late", "rank_dies", "ranks")  # two ranks compute these
ALONE = ("torch_oom", "killed")


def cases(profile, device):
    for way in WAYS:
        yield case_of(way)


def case_of(way):
    return Case("trouble", way=way, alone=way in ALONE, **({"ranks": 2} if way in RANKED else {}))


def run(case, draw, c):
    x = draw.normal("x", (64,), "f32")
    y = draw.poisoned((64,), "f32")
    shape = c.struct("td_fake_shape", count=64)
    if case.way == "run_raises":
        raise ValueError("run() is broken")

    def tandem():
        if case.way == "raises":
            raise ValueError("the C side is broken")
        if case.way in ("unsupported", "c_oom"):
            c.td_fake_fail("unsupported" if case.way == "unsupported" else "no_memory", False)
        if case.way == "crash":
            c.td_fake_fail("ok", True)
        c.td_fake_scale(c.device, shape, x, y)
        if case.way in RANKED:
            other(case.way, c.ranks)
        if case.way == "wrong" or (case.way == "rank_wrong" and c.ranks.rank == 1):
            y[3] += 0.001
        if case.way == "unwritten":
            y[7:9].view(torch.int32).fill_(-1)
        if case.way in ("nan", "infinite"):
            y[5] = float(case.way[:3])
        if case.way == "overrun":
            c.td_fake_scale(c.device, c.struct("td_fake_shape", count=65), torch.ones(65), y)
            c.td_fake_scale(c.device, shape, x, y)
        if case.way == "input":
            x.neg_()
        return {"z" if case.way == "names" else "y": y}

    def eager():
        if case.way == "torch_oom":
            torch.empty(available_bytes() + 2**33, dtype=torch.uint8)
        if case.way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return {"y": x * 0.5}

    def truth():
        if case.way == "truth_raises":
            raise ValueError("the truth is broken")
        return {"y": x.double() * 0.5}

    needs = 2**60 if case.way == "predicted" else None
    return {"torch_eager": Side(eager, needs_bytes=needs), "c": tandem, "truth": truth}


def other(way, ranks):
    """The calls of rank 1. Some of them also need rank 0."""
    if way == "rank_dies" and ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if way != "rank_late" or ranks.rank == 0:
        ranks.barrier()


def report(page, records):
    page.question("What may go wrong?")
    page.table([r["case"] | r for r in records.records], "ways", ["way", "impl", "status"])
