"""Cases of several stages, not in their order. Logs as scale.py does."""

import os

from parity.core import Case


def cases(profile, device):
    yield Case("early", n=1, stage=1)
    yield Case("early", n=2, measure="time", repeats=1)
    yield Case("early", n=3, measure="time", repeats=1, stage=-1)
    yield Case("early", n=4)


def run(case, draw, c):
    with open(os.environ["FAKES_LOG"], "a") as file:
        file.write(f"run {case.n}\n")
    return {"c": lambda: {"y": 1.0}, "torch_eager": lambda: {"y": 1.0}, "truth": {"y": 1.0}}


def report(page, records):
    page.question("When?")
    page.table([{"when": "early"}], "when")
