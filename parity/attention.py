"""Attention with the score matrix materialised, beside compiled and fused attention: answers, times, memory."""

import itertools
import re
from statistics import median

import torch

from parity.core import Case, grid
from parity.core.comparison import Comparison, geomean, ms_of
from parity.shared import attend
from parity.shared.attend import BATCH, HEAD_DIM, PASSES
from parity.shared.pages import MIB, by_case, errors_by, grid_rows, plot_passes, valued
from ref import accounting
from ref import attention as ref

DTYPES = {"cpu": ["f32", "bf16"], "cuda": ["f32", "tf32", "bf16", "f16"]}
COURSE_MATRICES = 2  # that the course's four-step softmax keeps for backward
OUR_MATRICES = 1  # that libtandem keeps: the probabilities
# Score matrices that compiled attention held at once on a CPU. It does not run if memory lacks room for them.
COMPILED_MATRICES = {"forward": 2, "backward": 4}
# Each backward pass has a forward pass of its own before it, untimed, so that buffers may be given away.
CONFIG = {"torch_compile": {"mode": "default", "dynamic": False, "caches": False}}


def cases(profile, device):
    ends = dict(batch=4, heads=16, seq=1, head_dim=1), dict(batch=1, heads=2, seq=101, seq_k=37, head_dim=80)
    for shape in [ends[0], *attend.RAGGED, ends[1]]:
        for keys in grid(causal=[False, True], dtype=DTYPES[device]):
            if keys["dtype"] == "tf32" and shape["head_dim"] < 16:
                continue  # below what a matrix unit takes PyTorch multiplies in f32
            yield Case("pytorch_attention", **shape, **keys, mask="inf")
    for dtype in DTYPES[device]:
        shape = dict(batch=2, heads=2, seq=61, head_dim=80, causal=True)
        yield Case("pytorch_attention", **shape, dtype=dtype, mask="add_1e6")
    for nan, nan_row, dtype in itertools.product(["q", "k", "v", "dout"], [0, 77], DTYPES[device]):
        shape = dict(batch=1, heads=2, seq=130, head_dim=64, causal=True, mask="inf")
        yield Case("pytorch_attention", **shape, dtype=dtype, nan=nan, nan_row=nan_row)
    for keys in attend.handout_grid(profile, device):
        # PyTorch compiles each for seconds.
        yield attend.grid_case("pytorch_attention", profile, device, **keys, compiling=8.0, config=CONFIG)


def run(case, draw, c):
    if "nan" in case:
        scores = (case.batch, case.heads, case.seq, case.seq)
        return attend.nan_sides(case, draw, c, "naive", "p", scores, case.dtype, block=0)
    return timed_sides(case, draw, c) if "pass" in case else error_sides(case, draw, c)


def error_sides(case, draw, c):
    """Forward and backward in one case: o, the probabilities that backward reads, and three gradients."""
    tensors = attend.inputs(case, draw)
    scores = (case.batch, case.heads, case.seq, case.get("seq_k", case.seq))

    def eager(q, k, v, dout, matmul=torch.matmul):
        how = (case.causal, case.mask)
        outputs = attend.by_autograd(lambda *qkv: ref.attention(*qkv, *how, matmul=matmul), q, k, v, dout)
        return outputs | {"p": ref.probabilities(q, k, *how, matmul=matmul)}

    call = attend.judged(case, draw, c, "naive", tensors, "p", scores, case.dtype)
    return attend.error_sides(case, call, eager, tensors)


def timed_sides(case, draw, c):
    tensors = attend.inputs(case, draw)
    tandem = attend.TandemAttention(case, c, "naive", tensors, fleeting=case.alone)
    fused = attend.TandemAttention(case, c, "flash", tensors, fleeting=case.alone)
    eager = attend.Eager(lambda *qkv: ref.attention(*qkv, case.causal), tensors)
    compiled = ref.Compiled(case.causal)
    ours, theirs = (attend.account(case, c, matrices) for matrices in (OUR_MATRICES, COURSE_MATRICES))
    kept = accounting.attention_saved_bytes(case.batch * case.heads, case.seq, case.head_dim)["total"]
    # Autograd keeps q, k and v; o is the caller's, and counts as in the arithmetic.
    mine = {"saved": tandem.sizes.saved + 4 * tensors[0].nbytes, "account": ours.saved_naive}
    mine |= {"flash": ours.saved_flash}
    his = {"saved": kept + tensors[0].nbytes, "account": theirs.saved_naive, "matrix": theirs.matrix}
    his |= {"forward_peak": theirs.forward_peak, "backward_peak": theirs.backward_peak}
    flops = theirs.forward_flops if case["pass"] == "forward" else theirs.backward_flops_naive

    def side(made, counted, **more):
        values = {f"{name}_mib": nbytes / MIB for name, nbytes in counted.items()} | more
        return made.side(case["pass"], flops=flops, record={"values": values})

    def swapping():
        return {"values": {"swapped": compiled.swapped}} if compiled.swapped is not None else {}

    needs = COMPILED_MATRICES[case["pass"]] * attend.matrix_bytes(case.seq) if case.alone else None

    # The smallest power of two of queries whose backward does not fit into the 80 GiB of an H100.
    end = c.value("td_account_attention_oom", case.batch, case.head_dim, 4, 80 * 2**30)
    sides = {
        "c": side(tandem, mine),
        "c_flash": fused.side(case["pass"], flops=flops),
        "torch_eager": side(eager, his, end_80_gib=end),
        "torch_compile": attend.Eager(compiled, tensors).side(
            case["pass"], flops=flops, needs_bytes=needs, record=swapping
        ),
    }
    return sides | {"sample": attend.sampled(case, tensors)}


SIDES = ("c", "torch_eager")


def report(page, records):
    grid = records.where(lambda r: "pass" in r["case"])
    timed = grid.where(lambda r: r["impl"] in SIDES)
    page.section("pytorch_attention")
    report_grid(page, timed)
    report_ends(page, timed)
    answer(page, timed)
    curves = timed.only(head_dim=HEAD_DIM)
    forward = curves.only(**{"pass": "forward"})
    page.plot(
        "memory",
        {
            "c": forward.curve("seq", "values.saved_mib", "c"),
            "torch_eager": forward.curve("seq", "values.saved_mib", "torch_eager"),
            "c, arithmetic": forward.curve("seq", "values.account_mib", "c"),
            "torch_eager, arithmetic": forward.curve("seq", "values.account_mib", "torch_eager"),
            "flash, arithmetic": forward.curve("seq", "values.flash_mib", "c"),
        },
        x="tokens",
        y="MiB",
        title=f"Memory kept for backward, batch {BATCH}, head_dim {HEAD_DIM}, f32",
    )
    plot_passes(page, curves, f"Attention with its scores in memory, batch {BATCH}, head_dim {HEAD_DIM}, f32")
    page.table(errors_by(records, ["causal", "dtype"]), "errors", more=True)
    report_compiled(page, grid)
    page.method()


def report_grid(page, timed):
    """Times of both passes and both sides, memory before backward, and its arithmetic."""

    def more(record):
        side, values = record["impl"], record.get("values")
        if record["case"]["pass"] != "forward":
            return {}
        found = {f"{side} {what} (MiB)": values[key] for what, key in KEPT.items()} if values else {}
        if side == "c":
            # Scores, exponentials and their quotient are each written once, and read: five passes at least.
            nbytes = 5 * BATCH * record["case"]["seq"] ** 2 * 4
            found["forward c, % of the bound"] = page.rates.share(record, nbytes)
        return found

    times = [f"{phase} {impl}" for phase in PASSES for impl in SIDES]
    order = ["seq", "head_dim", *times, "forward c, % of the bound"]
    order += [f"{side} {what} (MiB)" for side in SIDES for what in KEPT]
    page.note(f"Batch {BATCH}, no head dimension, no mask, f32. Memory is what is kept when backward begins.")
    rows = grid_rows(timed, more)
    page.table(rows, "times", order, dict.fromkeys(times, "ms"), expected=asked_rows(rows))


def asked_rows(rows):
    """The handout's grid has 20; the length at which memory ends is ours."""
    return 20 + sum(row["seq"] == attend.END for row in rows)


# Of the allocator's error.
ASKED = re.compile(
    r"allocate (\S+ GiB).*capacity of (\S+ GiB).*memory (\S+ GiB) is allocated by PyTorch, and (\S+ GiB) is reserved"
)
KEPT = {"before backward": "saved_mib", "arithmetic": "account_mib"}


def report_ends(page, timed):
    rows = []
    eager = timed.only(impl="torch_eager", head_dim=HEAD_DIM).records
    for record in sorted(eager, key=lambda r: (r["case"]["seq"], r["case"]["pass"] == "backward")):
        values, phase, peak = record.get("values", {}), record["case"]["pass"], record.get("peak_mib")
        matrix = values.get("matrix_mib")
        row = {"seq": record["case"]["seq"], "pass": phase, "status": record["status"], "peak": peak}
        row |= {"all matrices": values.get(f"{phase}_peak_mib"), "matrix": matrix}
        if failed := ASKED.search(record.get("message", "")):
            row["error"] = "asked for {}; of {} it held {}, and {} in unused blocks".format(*failed.groups())
        rows.append(row | {"peak / matrix": peak / matrix if peak and matrix else None})
    page.note(
        f"Eager PyTorch, head_dim {HEAD_DIM}: the peak of a call, and the matrices of scores that the formula writes "
        "in it, without q, k, v and o."
    )
    page.table(rows, "ends", units=dict.fromkeys(("peak", "all matrices", "matrix"), "MiB"))


def answer(page, timed):
    eager = timed.only(impl="torch_eager", head_dim=HEAD_DIM)
    clean = {(r["case"]["seq"], r["case"]["pass"]): ms_of(r) for r in eager.records if ms_of(r)}
    seqs = [seq for seq in timed.values("seq") if {(seq, phase) for phase in PASSES} <= set(clean)]
    forward = timed.only(head_dim=HEAD_DIM, **{"pass": "forward"})
    theirs, mine = ({row["seq"]: row for row in valued(forward, impl)} for impl in SIDES[::-1])
    ended = timed.only(impl="torch_eager").where(lambda r: r["status"] == "oom")
    lost = min(ended.values("seq"), default=0)
    if not lost:
        page.lacks("a length at which memory ends")
    last = max((set(theirs) & set(mine)) - {lost}, default=None)
    kept = theirs.get(last, {})
    told = {name: kept.get(key) for name, key in (("end", "end_80_gib"), ("saved", "saved_mib"))}
    peak = eager.value("peak_mib", impl="torch_eager", seq=last, **{"pass": "backward"}) if last else None
    ends_in = "forward" if "forward" in ended.only(seq=lost).values("pass") else "backward"
    texts = [r["message"] for r in ended.only(seq=lost, head_dim=HEAD_DIM, **{"pass": ends_in}).records]
    failed = ASKED.search(texts[0]) if texts else None
    page.say(
        **told,
        **{phase: clean.get((seqs[-1], phase)) if seqs else None for phase in PASSES},
        seq=seqs[-1] if seqs else None,
        lost=lost,
        lost_matrix=BATCH * lost**2 * 4 / 2**30,
        ends_in=ends_in,
        failed=failed and dict(zip(("asked", "card", "held", "unused"), failed.groups(), strict=True)),
        **{f"lost_{r['case']['pass']}": ms_of(r) for r in timed.only(impl="c", seq=lost).records},
        last=last,
        flash=mine.get(last, {}).get("flash_mib"),
        batch=BATCH,
        matrix=kept.get("matrix_mib"),
        peak=peak if peak == peak else None,
        rows=BATCH * last * HEAD_DIM * 4 / MIB if last else None,
        end_matrix=BATCH * told["end"] ** 2 * 4 / 2**30 if told["end"] else None,
    )


def report_compiled(page, grid):
    """torch_compile (a): times of both passes and all sides, and whether the compiler put a fused attention in place
    of the formula."""
    page.section("torch_compile (a)")

    def more(record):
        return {"swapped": "*"} if record.get("values", {}).get("swapped") else {}

    impls = ("c", "c_flash", "torch_eager", "torch_compile")
    rows, times = grid_rows(grid, more), [f"{phase} {impl}" for phase in PASSES for impl in impls]
    swapped = " `*` under `swapped`: torch.compile put a fused attention in place of the formula."
    swapped = swapped if any("swapped" in row for row in rows) else ""
    page.note(f"Batch {BATCH}, no head dimension, no mask, f32; ms.{swapped}")
    order = ["seq", "head_dim", *times, "swapped"]
    asked = {f"forward {impl}" for impl in impls}
    missing = [f"{row['seq']:,} x {row['head_dim']}" for row in rows if not asked <= row.keys()]
    if missing:
        page.lacks(f"compiled or fused attention of {', '.join(missing)} (tokens x head_dim)")
    page.table(rows, "compiled", order, dict.fromkeys(times, "ms"), expected=asked_rows(rows))
    curves = grid.only(head_dim=HEAD_DIM)
    title = f"Attention, batch {BATCH}, head_dim {HEAD_DIM}, f32"
    plot_passes(page, curves, title, "compiled_time")
    compiled = grid.only(impl="torch_compile", **{"pass": "forward"}).records
    first = [r["first_ms"] for r in compiled if "first_ms" in r]
    page.say(**compared(grid), first=median(first) if first else None)


def compared(grid):
    """Of the longest length of one head size, and of all shapes in the mean."""
    gains, longest, backs = {phase: [] for phase in PASSES}, {}, {}  # passes are sorted: backward first
    for (seq, head_dim, phase), sides in sorted(by_case(grid, ("seq", "head_dim", "pass")).items()):
        gain = Comparison.of(sides.get("torch_compile"), sides.get("torch_eager"))
        if gain:
            gains[phase].append(gain.ratio)
            fused = Comparison.of(sides.get("c_flash"), sides.get("c"))
            if phase == "backward":
                backs[seq, head_dim] = {"back": gain, "fused_back": fused}
            else:
                found = {"seq": seq, "head_dim": head_dim, "gain": gain, "fused": fused}
                longest[head_dim] = found | backs.get((seq, head_dim), {})
    found = longest.get(HEAD_DIM) or next(iter(longest.values()), {})
    found |= {f"{phase}_count": len(ratios) for phase, ratios in gains.items()}
    return found | {f"{phase}_mean": geomean(ratios) for phase, ratios in gains.items()}
