"""A side that is timed in two processes and is faster in the second. The log has a line for each call: "c", or the
process that called PyTorch's side."""

import os
import time

from parity.core import Case


def cases(profile, device):
    yield Case("twice", measure="time memory", repeats=2, in_turn=True, again=["torch_eager"], warmup=0)


def run(case, draw, c):
    def quick():
        log("c")
        return {}

    def waits():
        process = str(os.getpid())
        first = next(line for line in log(process) if line != "c")
        time.sleep(0.03 if process == first else 0.005)
        return {}

    return {"c": quick, "torch_eager": waits}


def log(words):
    with open(os.environ["FAKES_LOG"], "a+") as file:
        file.write(words + "\n")
        file.seek(0)
        return file.read().splitlines()


def report(page, records):
    page.question("How often?")
    page.table([{"times": 2}], "times")
