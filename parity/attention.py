"""Attention with the score matrix materialised: answers, times, and what it must hold in memory."""

import itertools

import pandas as pd
import torch

from parity.core import Case, grid
from parity.shared import attend
from parity.shared.pages import (
    error_answer,
    errors_by,
    launch_bound,
    mib,
    on_gpu,
    ranged,
    units_of,
    valued,
)
from ref import accounting
from ref import attention as ref
from ref.ops import tf32_matmul

DELIVERABLES = {
    "pytorch_attention": "Attention with the scores materialised: time, memory, and where it ends"
}

DTYPES = {"cpu": ["f32", "bf16"], "cuda": ["f32", "tf32", "bf16", "f16"]}
HEAD_DIM = 64  # of curves, and of tables of one head size
BATCH = 8  # the handout's, without a head dimension
COURSE_MATRICES = 2  # that the course's four-step softmax keeps for backward
OUR_MATRICES = 1  # that libtandem keeps: the probabilities


def cases(profile, device):
    for shape in [
        dict(batch=4, heads=16, seq=1, head_dim=1),
        dict(batch=2, heads=3, seq=16, head_dim=16),
        dict(batch=1, heads=2, seq=127, head_dim=64),
        dict(batch=2, heads=2, seq=129, head_dim=80),
        dict(batch=1, heads=4, seq=37, seq_k=101, head_dim=33),
        dict(batch=1, heads=2, seq=101, seq_k=37, head_dim=80),
    ]:
        for keys in grid(causal=[False, True], dtype=DTYPES[device]):
            if keys["dtype"] == "tf32" and shape["head_dim"] < 16:
                continue  # below what a matrix unit takes PyTorch multiplies in f32
            yield judged_case(**shape, **keys, mask="inf")
    for dtype in DTYPES[device]:
        shape = dict(batch=2, heads=2, seq=61, head_dim=80, causal=True)
        yield judged_case(**shape, dtype=dtype, mask="add_1e6")
    for nan, nan_row, dtype in itertools.product(["q", "k", "v", "dout"], [0, 77], DTYPES[device]):
        shape = dict(batch=1, heads=2, seq=130, head_dim=64, causal=True, mask="inf")
        yield Case("pytorch_attention", **shape, dtype=dtype, nan=nan, nan_row=nan_row)
    for keys in attend.handout_grid(profile, device):
        yield grid_case(profile, device, **keys)


def judged_case(**keys):
    return Case("pytorch_attention", **keys, reference="torch_tf32" if keys["dtype"] == "tf32" else None)


def grid_case(profile, device, seq, head_dim, phase):
    """A point of the handout's grid: 100 calls as it asks, fewer where they take minutes on a CPU."""
    matrix = 4 * BATCH * seq**2  # bytes of a score matrix: how a case is run, not what it reports
    keys = dict(batch=BATCH, heads=1, seq=seq, head_dim=head_dim, dtype="f32", causal=False, mask="inf")
    if device == "cuda":
        repeats = 100 if profile == "full" else 20
        seconds = 0.5 + repeats * matrix / 2**33 * (0.2 if phase == "backward" else 0.08)
        how = dict(measure="time memory", seconds=seconds, repeats=repeats, in_turn=matrix >= 2**33, stage=3)
        return Case("pytorch_attention", **how, **keys, **{"pass": phase})
    repeats = (100 if profile == "full" else 20) if seq <= 1024 else 3
    seconds = (repeats + 3) * (3 if phase == "backward" else 1) * max(matrix, 2**23) / 2**28
    how = dict(measure="time memory", seconds=seconds, repeats=repeats, alone=matrix >= 2**28)
    return Case("pytorch_attention", **how, **keys, **{"pass": phase})


def run(case, draw, c):
    if "nan" in case:
        scores = (case.batch, case.heads, case.seq, case.seq)
        return attend.nan_sides(case, draw, c, "naive", "p", scores, case.dtype, block=0)
    return timed_sides(case, draw, c) if "time" in case.measure else error_sides(case, draw, c)


def error_sides(case, draw, c):
    """Forward and backward in one case: o, the probabilities that backward reads, and three gradients."""
    q, k, v, dout = tensors = attend.inputs(case, draw)
    scores = (case.batch, case.heads, q.shape[2], k.shape[2])

    def eager(q, k, v, dout, matmul=torch.matmul):
        outputs = attend.by_autograd(
            lambda *qkv: ref.attention(*qkv, case.causal, case.mask, matmul=matmul), q, k, v, dout
        )
        return outputs | {"p": ref.probabilities(q, k, case.causal, case.mask, matmul=matmul)}

    sides = {
        "c": attend.judged(case, draw, c, "naive", tensors, "p", scores, case.dtype),
        "torch_eager": lambda: eager(q, k, v, dout),
        "truth": lambda: eager(q.double(), k.double(), v.double(), dout.double()),
    }
    if case.dtype == "tf32":
        sides["torch_tf32"] = lambda: eager(q, k, v, dout, tf32_matmul)
        sides["reference"] = "torch_tf32"
    return sides


def timed_sides(case, draw, c):
    tensors = attend.inputs(case, draw)
    tandem = attend.TandemAttention(case, c, "naive", tensors, fleeting=case.alone)
    eager = attend.Eager(lambda *qkv: ref.attention(*qkv, case.causal), tensors)
    theirs = attend.account(case, c, COURSE_MATRICES)
    ours = attend.account(case, c, OUR_MATRICES)
    kept = accounting.attention_saved_bytes(case.batch * case.heads, case.seq, case.head_dim)
    flops = theirs.forward_flops if case["pass"] == "forward" else theirs.backward_flops_naive
    return {
        "c": tandem.side(
            case["pass"],
            flops=flops,
            record={
                "values": {
                    "saved_mib": mib(tandem.sizes.saved + 4 * tensors[0].nbytes),
                    "account_mib": mib(ours.saved_naive),
                    "flash_mib": mib(ours.saved_flash),
                }
            },
        ),
        "torch_eager": eager.side(
            case["pass"],
            flops=flops,
            record={
                "values": {
                    # Autograd keeps q, k and v; o is the caller's, and counts as in the arithmetic.
                    "saved_mib": mib(kept["total"] + tensors[0].nbytes),
                    "account_mib": mib(theirs.saved_naive),
                    "matrix_mib": mib(theirs.matrix),
                    "forward_peak_mib": mib(theirs.forward_peak),
                    "backward_peak_mib": mib(theirs.backward_peak),
                    **ends_by_arithmetic(case, c),
                }
            },
        ),
    }


BUDGETS_GIB = (16, 24, 80)


def ends_by_arithmetic(case, c):
    """The smallest power of two of queries whose backward does not fit in so many GiB."""
    return {
        f"end_{gib}_gib": c.value("td_account_attention_oom", case.batch, case.head_dim, 4, gib * 2**30)
        for gib in BUDGETS_GIB
    }


HOW_LONG = "How long do forward and backward take, and what is in memory before the backward pass?"


def report(page, records):
    timed = type(records)(record for record in records.records if "pass" in record["case"])
    page.question(HOW_LONG)
    report_times(page, timed)
    page.question("Where does it run out of memory, and does the arithmetic say so?")
    report_ends(page, timed)
    page.question("How does the memory saved for backward grow, and what would remove it?")
    growth = report_growth(page, timed)
    page.question("Does attention, forward and backward, give PyTorch's answers?")
    held, figure = error_answer(records)
    page.text(held)
    page.table(errors_by(records, ["causal", "dtype"]), "errors")
    answer_all(page, timed, growth, figure)


def answer_all(page, timed, growth, figure):
    """Times, the length at which it ends, and what would help, in three sentences."""
    sides = [timed.only(**{"pass": phase}).ratio("ms") for phase in ("forward", "backward")]
    said = []
    if all(map(len, sides)):
        said.append(
            f"Forward takes {ranged(sides[0])} and backward {ranged(sides[1])} times eager PyTorch's time."
        )
        figure = f"forward {ranged(sides[0])}, backward {ranged(sides[1])} x PyTorch's"
    for arithmetic in valued(timed, "torch_eager", head_dim=64)[:1]:
        ends = sorted(
            {
                r["case"]["seq"]
                for r in timed.only(impl="torch_eager").records
                if r["status"] in ("oom", "error")
            }
        )
        limits = ", ".join(f"{arithmetic.get(f'end_{gib}_gib')} in {gib} GiB" for gib in BUDGETS_GIB)
        longest = max(timed.values("seq"))
        here = f"PyTorch ends at {ends[0]} tokens here" if ends else f"all lengths up to {longest} fit here"
        said.append(
            f"{here[0].upper()}{here[1:]}; by the arithmetic the first power of two that does not fit is {limits}."
        )
    page.answer("pytorch_attention", " ".join([*said, growth]), figure, HOW_LONG)


def report_times(page, timed):
    waiting = launch_bound(timed, "seq") if on_gpu(timed) else set()
    table = grid_table(timed)
    few = table[table["head_dim"] == HEAD_DIM].drop(columns="head_dim") if len(table) else table
    page.table(few, "times", units=units_of(few, TIMES, "ms"))
    page.table(table, "times_by_head_dim", units=units_of(table, TIMES, "ms"))
    page.plot(
        "time",
        {
            phase: {impl: curve(timed.only(**{"pass": phase}), impl, "ms") for impl in ("c", "torch_eager")}
            for phase in ("forward", "backward")
        },
        x="seq",
        y="ms",
        title=f"Attention with its scores, batch {BATCH}, head_dim {HEAD_DIM}, f32",
    )
    page.method(
        f"Batch {BATCH}, one head, no mask, f32; the table on this page has head_dim {HEAD_DIM}. Memory before "
        f"backward "
        "is what forward leaves behind: q, k, v, o and the score-sized matrices, for PyTorch counted by hooks on the "
        "tensors that autograd saves, for C the size of the block it asks for. Peaks are of the call alone, and "
        "forward's for backward included. `oom` and `error` rows are results."
    )
    if waiting:
        seqs = sorted({dict(case)["seq"] for case in waiting})
        page.text(
            f"torch_eager waits for the launch of its kernels at some head sizes of seq {', '.join(map(str, seqs))}: "
            "a longer sequence takes hardly longer there."
        )


TIMES = ("c forward", "torch forward", "c backward", "torch backward")


def grid_table(timed):
    """A row a shape: times of both passes and both sides, memory before backward, and its arithmetic."""
    rows = {}
    for record in timed.records:
        case, side = record["case"], "c" if record["impl"] == "c" else "torch"
        row = rows.setdefault(
            (case["seq"], case["head_dim"]), {"seq": case["seq"], "head_dim": case["head_dim"]}
        )
        row[f"{side} {case['pass']}"] = record["ms"]["median"] if "ms" in record else record["status"]
        if case["pass"] == "forward" and "values" in record:
            row[f"{side} before backward (MiB)"] = record["values"]["saved_mib"]
            row[f"{side} arithmetic (MiB)"] = record["values"]["account_mib"]
    order = ["seq", "head_dim", *TIMES]
    order += [f"{side} {what} (MiB)" for side in ("c", "torch") for what in ("before backward", "arithmetic")]
    table = pd.DataFrame([rows[key] for key in sorted(rows)])
    return table[[name for name in order if name in table]] if len(table) else table


def curve(records, impl, name, head_dim=HEAD_DIM):
    points = records.only(impl=impl, head_dim=head_dim)
    seqs = points.values("seq")
    values = [points.value(name, impl=impl, seq=seq) for seq in seqs]
    return seqs, [None if value != value else value for value in values]


def report_ends(page, timed):
    rows = []
    for record in timed.only(impl="torch_eager", head_dim=HEAD_DIM).records:
        values = record.get("values", {})
        phase = record["case"]["pass"]
        rows.append({"seq": record["case"]["seq"], "pass": phase, "status": record["status"],
                     "peak": record.get("peak_mib"), "predicted": values.get(f"{phase}_peak_mib"),
                     "matrix": values.get("matrix_mib")})  # fmt: skip
    for row in rows:
        row["peak / matrix"] = row["peak"] / row["matrix"] if row["peak"] and row["matrix"] else None
    frame = pd.DataFrame(sorted(rows, key=lambda row: (row["seq"], row["pass"] == "backward")))
    page.table(frame, "ends", units=units_of(frame, ("peak", "predicted", "matrix"), "MiB"))
    measured = [row for row in rows if row["peak"] and row["predicted"]]
    if measured:
        largest = max(measured, key=lambda row: row["predicted"])
        page.text(
            f"Eager PyTorch, head_dim {HEAD_DIM}. The arithmetic counts 4 score matrices at forward's peak and, as "
            f"measured on a GPU, 8 at backward's; here seq {largest['seq']} {largest['pass']} needed "
            f"{largest['peak / matrix']:.1f}, for PyTorch frees more of them early."
        )


def report_growth(page, timed):
    """The table's plot, and the sentence of the answer."""
    forward = timed.only(**{"pass": "forward"})
    page.plot(
        "memory",
        {
            "c": curve(forward, "c", "values.saved_mib"),
            "torch_eager": curve(forward, "torch_eager", "values.saved_mib"),
            "c, arithmetic": curve(forward, "c", "values.account_mib"),
            "torch_eager, arithmetic": curve(forward, "torch_eager", "values.account_mib"),
            "flash, arithmetic": curve(forward, "c", "values.flash_mib"),
        },
        x="seq",
        y="MiB",
        title=f"Memory kept for backward, batch {BATCH}, head_dim {HEAD_DIM}, f32",
    )
    kept = {row["seq"]: row for row in valued(forward, head_dim=HEAD_DIM)}
    theirs = {row["seq"]: row for row in valued(forward, "torch_eager", head_dim=HEAD_DIM)}
    both = sorted(set(kept) & set(theirs))
    if len(both) < 2:
        return ""
    first, last = both[0], both[-1]
    growth = theirs[last]["saved_mib"] / theirs[first]["saved_mib"]
    off = max(abs(row["saved_mib"] / row["account_mib"] - 1) for row in [*kept.values(), *theirs.values()])
    page.text(
        f"From seq {first} to {last}, {last // first} times longer, PyTorch's saved memory grows {growth:.1f} "
        f"times: with the square, once the matrices outweigh q, k, v and o. The arithmetic is within "
        f"{100 * off:.1f} % of what was counted. C keeps only the probabilities, one matrix where the course's "
        f"softmax keeps two."
    )
    return (
        f"Saved memory grows {growth:.0f} times over {last // first} times the length, to "
        f"{theirs[last]['saved_mib']:.0f} "
        f"MiB ({kept[last]['saved_mib']:.0f} in C): computing the probabilities again in backward, flash attention, "
        f"would leave {kept[last]['flash_mib']:.1f}."
    )
