"""A module that works: y = 0.5 x. It counts its runs in the file that FAKES_LOG names. Each run takes FAKES_SLEEP
seconds."""

import os
import time

from parity.core import Case, Side, grid
from parity.core.comparison import geomean


def cases(profile, device):
    for keys in grid(count=[1, 15, 16, 17], dtype=["f32"]):
        how = {"torch_eager": {"compiled": False}} | ({"c": {"unroll": 16}} if keys["count"] == 17 else {})
        yield Case("scaling", seconds=0.1, config=how, **keys)
    yield Case("scaling", measure="time memory", repeats=5, count=4096, dtype="f32")
    if profile == "full":
        yield Case("scaling", alone=True, count=1009, dtype="f32")


def run(case, draw, c):
    if "FAKES_LOG" in os.environ:
        with open(os.environ["FAKES_LOG"], "a") as log:
            log.write(case.name + "\n")
    time.sleep(float(os.environ.get("FAKES_SLEEP", "0")))
    x = draw.normal("x", (case.count,), case.dtype)
    y = draw.poisoned((case.count,), case.dtype)
    shape = c.struct("td_fake_shape", case)

    def tandem():
        c.td_fake_scale(c.device, shape, x, y)
        return {"y": y}

    return {
        "c": Side(tandem, flops=case.count, record={"series": {"count": [1.0, 2.0]}}),
        "torch_eager": lambda: {"y": x * 0.5},
        "truth": lambda: {"y": x.double() * 0.5},
    }


def report(page, records):
    page.section("scaling", "Does C scale as exactly as PyTorch?")
    page.table(records.wide(["count"], "rel_l2", base="torch_eager"), "errors", units={"c": "relative L2"})
    if any("ms" in record for record in records.records):
        page.plot(
            "time",
            {impl: records.curve("count", "ms", impl) for impl in records.impls()},
            x="count",
            y="ms",
            title="Scaling, f32",
        )
        page.table([{"times": geomean(records.ratio("ms"))}], "ratio")
