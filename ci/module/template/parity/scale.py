"""scale: an elementwise operation, forward and backward."""

from parity.core import Case, grid
from parity.core.comparison import geomean
from parity.shared.pages import errors_by, held
from ref import scale as ref

TIMED = [2**20, 2**24]


def cases(profile, device):
    if device == "cuda":
        return  # C has no kernel for CUDA
    # One number, around the length of a vector, and a long prime, which several threads share.
    for keys in grid(count=[1, 15, 16, 17, 20011], dtype=["f32", "bf16"]):
        for way in ("forward", "backward"):
            yield Case("scale", **keys, **{"pass": way})
    for count in TIMED if profile == "full" else TIMED[:1]:
        for way in ("forward", "backward"):
            yield Case("scale", measure="time memory", seconds=2, count=count, dtype="f32", **{"pass": way})


def run(case, draw, c):
    x = draw.normal("x", (case.count,), case.dtype)
    dy = draw.normal("dy", (case.count,), case.dtype)
    out = draw.poisoned((case.count,), case.dtype)
    dtype = c.enum("td_dtype", case.dtype)

    def forward():
        c.td_scale_forward(c.device, case.count, dtype, x, out)
        return {"y": out}

    def backward():
        c.td_scale_backward(c.device, case.count, dtype, x, dy, out)
        return {"dx": out}

    if case["pass"] == "forward":
        return {
            "c": forward,
            "torch_eager": lambda: {"y": ref.forward(x)},
            "truth": lambda: {"y": ref.forward(x.double())},
        }
    return {
        "c": backward,
        "torch_eager": lambda: {"dx": ref.backward(x, dy)},
        "truth": lambda: {"dx": ref.backward(x.double(), dy.double())},
    }


def report(page, records):
    page.section("scale", "Is C as exact as PyTorch, and how fast is it?")
    judged = records.only(count=[count for count in records.values("count") if count not in TIMED])
    timed = records.only(count=TIMED)
    page.say(**held(judged), time=geomean(timed.ratio("ms")))
    page.table(errors_by(judged, ["pass", "dtype"]), "errors")
    units = dict.fromkeys(timed.impls(), "ms")
    page.table(timed.wide(["pass", "count"], "ms", base="torch_eager"), "times", units=units)
