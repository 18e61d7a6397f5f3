"""Attention compiled at run time for its shape, in C and by torch.compile: answers, times, and the first call."""

from statistics import median

from parity.core import Case, grid
from parity.core.comparison import Comparison, geomean
from parity.core.view import number
from parity.shared import attend
from parity.shared.attend import BATCH, HEAD_DIM, PASSES
from parity.shared.pages import by_case, errors_by, grid_rows, plot_passes
from ref import attention as ref
from ref import jit

DTYPES = ["f32", "bf16"]
# On a GPU: the largest tiles, and products by cuBLASLt.
JUDGED = [dict(seq=2048, head_dim=32), dict(seq=1024, head_dim=64), dict(seq=1024, head_dim=128)]
LONG = 8192  # from this length on a CPU takes minutes a cell: one call, after the one that compiles
# Score matrices that PyTorch held at once on a CPU. If memory lacks room for them, it does not run.
MATRICES = {"torch_eager": {"forward": 4, "backward": 6}, "torch_compile": {"forward": 2, "backward": 4}}
# A fused attention that the compiler recognises has its own arithmetic; every backward has a forward of its
# own before it, untimed, so that buffers may be given away.
CONFIG = {"torch_compile": {"mode": "default", "dynamic": False, "caches": False}}


def cases(profile, device):
    quick = (profile, device) == ("quick", "cpu")
    for shape in [*attend.RAGGED, dict(batch=1, heads=2, seq=300, head_dim=128)]:
        for keys in grid(causal=[False, True], dtype=DTYPES):
            if not quick or keys["causal"] == (keys["dtype"] == "bf16"):
                yield judged_case(device, **shape, **keys)
    if device == "cuda":
        for shape in JUDGED:
            yield judged_case(device, batch=1, heads=2, **shape, causal=False, dtype="f32")
    cells = list(attend.handout_grid(profile, device))
    for keys in cells[:2] if quick else cells:  # PyTorch compiles each for seconds
        config = CONFIG | ({"c": {"caches": False}} if device == "cuda" else {})
        how = dict(compiling=8.0, longest=LONG, config=config)
        yield attend.grid_case("torch_compile", profile, device, **keys, **how)


def judged_case(device, **keys):
    return Case("torch_compile", seconds=1.0 if device == "cpu" else 4.0, **keys, mask="inf")


def run(case, draw, c):
    return timed_sides(case, draw, c) if "time" in case.measure else error_sides(case, draw, c)


def error_sides(case, draw, c):
    """Forward and backward in one case: o and three gradients."""
    tensors = attend.inputs(case, draw)

    def eager(*tensors):
        return attend.by_autograd(lambda *qkv: ref.attention(*qkv, case.causal), *tensors)

    return attend.error_sides(case, attend.judged(case, draw, c, "jit", tensors), eager, tensors)


def timed_sides(case, draw, c):
    tensors = attend.inputs(case, draw)
    phase = case["pass"]
    tandem = attend.TandemAttention(case, c, "jit", tensors, fleeting=case.alone)
    eager = attend.Eager(lambda *qkv: ref.attention(*qkv, case.causal), tensors)
    compiled = jit.Compiled(case.causal)
    found = attend.account(case, c, 1)
    flops = found.forward_flops if phase == "forward" else found.backward_flops_naive

    def compiling():
        info = c.value("td_jit_info_of", c.device)
        return {"values": {"compile_ms": info.compile_ms, "find_ms": info.find_ms}}

    def needs(impl):
        return MATRICES[impl][phase] * attend.matrix_bytes(case.seq) if case.alone else None

    def swapping():
        return {"values": {"swapped": compiled.swapped}} if compiled.swapped is not None else {}

    return {
        "c": tandem.side(phase, flops=flops, record=compiling),
        "torch_eager": eager.side(phase, flops=flops, needs_bytes=needs("torch_eager")),
        "torch_compile": attend.Eager(compiled, tensors).side(
            phase, flops=flops, needs_bytes=needs("torch_compile"), record=swapping
        ),
    }


SIDES = ("c", "torch_eager", "torch_compile")


def report(page, records):
    timed = records.where(lambda r: "pass" in r["case"])
    page.section("torch_compile (a)")
    report_grid(page, timed)
    curves = timed.only(head_dim=HEAD_DIM)
    plot_passes(page, curves, f"Attention, batch {BATCH}, head_dim {HEAD_DIM}, f32")
    first = report_first(page, timed)
    page.say(**answer(timed), **first)
    page.table(errors_by(records, ["causal", "dtype"]), "errors", more=True)
    page.method()


def report_grid(page, timed):
    """Times of both passes and all sides, and whether the compiler swapped the formula for a fused attention."""

    def more(record):
        return {"swapped": "*"} if record.get("values", {}).get("swapped") else {}

    rows, times = grid_rows(timed, more), [f"{phase} {impl}" for phase in PASSES for impl in SIDES]
    swapped = " `*` under `swapped`: torch.compile put a fused attention in place of the formula."
    swapped = swapped if any("swapped" in row for row in rows) else ""
    page.note(f"Batch {BATCH}, no head dimension, no mask, f32; ms.{swapped}")
    order = ["seq", "head_dim", *times, "swapped"]
    page.table(rows, "times", order, dict.fromkeys(times, "ms"), expected=20)


def answer(timed):
    """Of the longest length of one head size, and of all shapes in the mean."""
    gains, found = {phase: [] for phase in PASSES}, {}
    for (seq, head_dim, phase), sides in sorted(by_case(timed, ("seq", "head_dim", "pass")).items()):
        gain = Comparison.of(sides.get("torch_compile"), sides.get("torch_eager"))
        if gain:
            gains[phase].append(gain.ratio)
            if head_dim == HEAD_DIM and phase == "forward":
                mine = Comparison.of(sides.get("c"), sides.get("torch_compile"))
                found = {"seq": seq, "gain": gain, "mine": mine}
    return found | {f"{phase}_mean": geomean(ratios) for phase, ratios in gains.items()}


def is_first(record):
    """Whether a first call had to compile. Unless told not to, NVRTC 12.9 and later use the driver's cache: a backward
    pass finds its forward pass's code, and a shape of JUDGED the code that its errors were measured with."""
    case = record["case"]
    before = case["pass"] == "backward" or dict(seq=case["seq"], head_dim=case["head_dim"]) in JUDGED
    kept = record.get("config", {}).get("caches", True)
    return "first_ms" in record and not (
        before and kept and record["impl"] == "c" and record.get("device") == "cuda"
    )


def report_first(page, timed):
    """The first call of each side, compiling included: the table, and the medians of the forward pass."""
    rows, first = [], {}
    for impl in timed.impls():
        for phase in PASSES:
            found = timed.only(impl=impl, **{"pass": phase}).where(is_first).records
            calls = [r["first_ms"] for r in found]
            if not calls:
                continue
            first.setdefault(f"first_{impl}", median(calls))  # forward's comes first
            row = {"side": impl, "pass": phase, "cells": len(calls), "median": median(calls)}
            row |= {"shortest": min(calls), "longest": max(calls)}
            compiling = [ms for ms in (number(r, "values.compile_ms") for r in found) if ms is not None]
            rows.append(row | ({"of it compiling": median(compiling)} if compiling else {}))
    page.note("The first call for a shape, with compiling; calls that found code in a cache are left out:")
    names = ("median", "shortest", "longest", "of it compiling")
    page.table(rows, "first", units=dict.fromkeys(names, "ms"))
    return first
