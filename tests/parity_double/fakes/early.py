"""Cases in another order. Two of them have a call of ahead(): one fails, and one takes as long as the cases that need
not wait for it. Writes the same log as scale.py."""

import os
import time

from parity.core import Case


def cases(profile, device):
    yield Case("early", n=1, stage=1)
    yield Case("early", n=2, measure="time", repeats=1, ahead=True)
    yield Case("early", n=3, measure="time", repeats=1, ahead=True, stage=-1)
    yield Case("early", n=4)


def log(words):
    with open(os.environ["FAKES_LOG"], "a") as file:
        file.write(words + "\n")


def read_log():
    with open(os.environ["FAKES_LOG"]) as file:
        return file.read()


def ahead(case, draw):
    log(f"ahead of {case.n} on {draw.device}")
    if case.n == 3:
        raise ValueError("there is no disk to put it on")
    deadline = time.monotonic() + 60
    while "run 1\n" not in read_log() and time.monotonic() < deadline:
        time.sleep(0.01)


def run(case, draw, c):
    log(f"run {case.n}")
    return {"c": lambda: {"y": 1.0}, "torch_eager": lambda: {"y": 1.0}, "truth": {"y": 1.0}}


def report(page, records):
    page.question("When?")
    page.table([{"when": "early"}], "when")
