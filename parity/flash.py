"""Flash attention: answers at every edge of its tiles, times beside plain attention, and memory against length."""

import itertools

import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from parity.core import Case, geomean, grid, within
from parity.core.tables import text
from parity.shared import attend
from parity.shared.pages import (
    error_answer,
    errors_by,
    largest_spread,
    launch_bound,
    mib,
    on_gpu,
    peak_of,
    ranged,
    units_of,
    without,
)
from ref import attention as naive
from ref import flash as ref
from ref.ops import tf32_matmul

DELIVERABLES = {
    "flash_forward": "Flash attention, forward: tiled, in plain tensor code and fused in C",
    "flash_backward": "Flash attention, backward from the logsumexp",
    "flash_benchmarking": "Flash attention beside plain attention: time and memory",
    "leaderboard": "One call, forward and backward: 16 heads, 16384 tokens, head_dim 64, bf16",
}
PUBLISHED_MS = 5.364  # the leaderboard's verified record of 2025, on an H100

DTYPES = {"cpu": ["f32", "bf16"], "cuda": ["f32", "tf32", "bf16", "f16"]}
PHASES = ["forward", "backward", "both"]
MIB = 2**20
SEQS = [2**power for power in range(7, 17)]
HEAD_DIMS = [16, 32, 64, 128]
# The sequence lengths of the memory curves, and the head size of all curves.
MEMORY_SEQS = {"cpu": [256, 512, 1024, 2048, 4096, 8192], "cuda": [1024, 2048, 4096, 8192, 16384, 32768]}
HEAD_DIM = 64


def cases(profile, device):
    yield from error_cases(DTYPES[device], few=(profile, device) == ("quick", "cpu"))
    yield from gpu_headline_cases(profile) if device == "cuda" else headline_cases(profile)
    for seq in MEMORY_SEQS[device]:
        keys = dict(batch=1, heads=1, seq=seq, head_dim=HEAD_DIM, dtype="f32", causal=True, mask="inf")
        seconds = 0.3 + 3 * (seq / 8192) ** 2
        yield Case("flash_benchmarking", measure="memory", seconds=seconds, **keys, **{"pass": "memory"})
    yield from gpu_grid_cases(profile) if device == "cuda" else grid_cases(profile)


def error_cases(dtypes, few=False):
    """Tiles are 64 queries by 64 keys and columns come in groups of 16: one row, both sides of each, and primes.
    `few`: every shape once, with fewer heads, the masks and dtypes in turn."""
    many = dict(batch=1, heads=4) if few else dict(batch=2, heads=16)
    shapes = []
    for batch, heads in [(1, 2), (4, 16)]:
        shapes.append(dict(batch=batch, heads=heads, seq=1, seq_k=1, head_dim=64))
    for seq in [15, 16, 17, 63, 64, 65, 127, 128, 129, 509]:
        shapes.append(dict(batch=1, heads=8, seq=seq, seq_k=seq, head_dim=64))
    for head_dim in [1, 3, 16, 33, 80, 127, 128, 256]:
        shapes.append(dict(**many, seq=129, seq_k=129, head_dim=head_dim))
    for seq, seq_k in [(37, 101), (101, 37), (1, 300), (300, 1), (64, 65)]:
        shapes.append(dict(**many, seq=seq, seq_k=seq_k, head_dim=80))
    for index, shape in enumerate(shapes):
        ways = [*grid(causal=[False, True], dtype=dtypes)]
        for keys in [ways[index % len(ways)]] if few else ways:
            if keys["dtype"] == "tf32" and shape["head_dim"] < 16:
                continue  # below what a matrix unit takes PyTorch multiplies in f32
            yield from both_deliverables(mask="inf", **shape, **keys)
    for seq, dtype in [(65, "f32"), (65, "bf16"), (257, "f32"), (257, "bf16")]:
        shape = dict(batch=1, heads=2, seq=seq, seq_k=seq, head_dim=64)
        yield from both_deliverables(mask="add_1e6", **shape, causal=True, dtype=dtype)
    # In the first block of 128 rows, inside a group of 16, and at the start of the second.
    rows = [77] if few else [0, 77, 128]
    for nan, nan_row, dtype in itertools.product(["q", "k", "v", "dout"], rows, dtypes):
        keys = dict(batch=1, heads=2, seq=260, seq_k=260, head_dim=64, causal=True, dtype=dtype, mask="inf")
        for deliverable in ("flash_forward", "flash_backward"):
            if deliverable == "flash_backward" or nan != "dout":
                yield Case(deliverable, **keys, nan=nan, nan_row=nan_row)


def both_deliverables(**keys):
    for deliverable in ("flash_forward", "flash_backward"):
        yield Case(deliverable, **keys, reference="torch_tf32" if keys["dtype"] == "tf32" else None)


def headline_cases(profile):
    """The comparison by which a change is judged, in every profile."""
    for phase in ("forward", "backward"):
        yield timed_case(
            3 if profile == "quick" else 5, batch=8, heads=1, seq=2048, head_dim=64, dtype="f32", phase=phase
        )


def grid_cases(profile):
    """The handout's grid: batch 1, one head, causal."""
    if profile == "quick":
        points = [(512, 64, "f32"), (512, 64, "bf16")]
    elif profile == "standard":
        points = [(seq, 64, "f32") for seq in (128, 512, 2048)]
        points += [(512, head_dim, "f32") for head_dim in (16, 32, 128)]
        points += [(512, 64, "bf16"), (2048, 64, "bf16")]
    else:
        points = [tuple(keys.values()) for keys in grid(seq=SEQS, head_dim=HEAD_DIMS, dtype=DTYPES["cpu"])]
    for seq, head_dim, dtype in points:
        for phase in PHASES:
            repeats = None if seq < 4096 else 5 if seq < 32768 else 3
            yield timed_case(repeats, batch=1, heads=1, seq=seq, head_dim=head_dim, dtype=dtype, phase=phase)


def timed_case(repeats, phase, **keys):
    scores = keys["batch"] * keys["seq"] ** 2
    seconds = 1.5 if scores < 2**24 else scores / 2**27 * (repeats + 2) * (0.3 if phase == "forward" else 1)
    how = dict(measure="time", seconds=seconds, repeats=repeats, alone=scores >= 2**28)
    return Case("flash_benchmarking", **how, **keys, causal=True, mask="inf", **{"pass": phase})


def gpu_headline_cases(profile):
    """The leaderboard's shape, and the same with heads of 128."""
    shape = dict(batch=1, heads=16, seq=16384, head_dim=64, dtype="bf16")
    yield gpu_timed_case(20, **shape, phase="both", deliverable="leaderboard")
    for head_dim in [64, 128] if profile == "full" else [64]:
        for phase in ("forward", "backward"):
            keys = dict(batch=1, heads=16, seq=16384, head_dim=head_dim, dtype="bf16", phase=phase)
            yield gpu_timed_case(20, **keys)


def gpu_grid_cases(profile):
    """The handout's grid, which asks for bf16 and f32; and TF32, which is how f32 runs fast, at one head size."""
    if profile != "full":
        points = [(seq, 64, "bf16") for seq in (512, 4096, 16384)] + [(4096, 128, "bf16"), (4096, 64, "f32")]
    else:
        points = [tuple(keys.values()) for keys in grid(seq=SEQS, head_dim=HEAD_DIMS, dtype=["bf16", "f32"])]
        points += [(seq, HEAD_DIM, "tf32") for seq in SEQS if seq <= 16384]
    for seq, head_dim, dtype in points:
        for phase in PHASES:
            repeats = None if seq < 16384 else 10 if seq < 32768 else 3
            yield gpu_timed_case(
                repeats, batch=1, heads=1, seq=seq, head_dim=head_dim, dtype=dtype, phase=phase
            )


def gpu_timed_case(repeats, phase, deliverable="flash_benchmarking", **keys):
    matrix = keys["batch"] * keys["heads"] * keys["seq"] ** 2 * (2 if keys["dtype"] == "bf16" else 4)
    seconds = 0.6 + (repeats or 0) * matrix / 2**33 * (0.1 if phase == "forward" else 0.4)
    # Plain attention's matrices may fill the GPU.
    how = dict(measure="time", seconds=seconds, repeats=repeats, in_turn=matrix >= 2**31)
    return Case(deliverable, **how, **keys, causal=True, mask="inf", **{"pass": phase})


def runs(case):
    return ["attention"] if case.get("pass") == "memory" else []  # plain attention too


def run(case, draw, c):
    if "nan" in case:
        return nan_sides(case, draw, c)
    if case.measure == ("error",):
        return error_sides(case, draw, c)
    return measured_sides(case, draw, c)


def error_sides(case, draw, c):
    """o and the logsumexp are flash_forward's, the gradients flash_backward's."""
    tensors = attend.inputs(case, draw)
    forward = case.deliverable == "flash_forward"

    def of_deliverable(outputs):
        return {name: value for name, value in outputs.items() if is_output_of(case, name)}

    def plain(q, k, v, dout, matmul=torch.matmul):
        outputs = attend.by_autograd(
            lambda *qkv: naive.attention(*qkv, case.causal, case.mask, matmul=matmul), q, k, v, dout
        )
        wide = (x.double() if x.dtype.itemsize == 8 else x.float() for x in (q, k))
        lse = naive.logsumexp(*wide, case.causal, case.mask, matmul=matmul)
        return of_deliverable(outputs | {"lse": lse})

    def tiled(q, k, v, dout):
        outputs = attend.by_autograd(lambda *qkv: ref.flash(*qkv, case.causal, case.mask)[0], q, k, v, dout)
        return of_deliverable(outputs | {"lse": ref.flash(q, k, v, case.causal, case.mask)[1]})

    call = attend.judged(case, draw, c, "flash", tensors, "lse", tensors[0].shape[:3], "f32")
    sides = {
        "c": lambda: of_deliverable(call()),
        "torch_eager": lambda: plain(*tensors),
        "torch_tiled": lambda: tiled(*tensors),
        "truth": lambda: plain(*(x.double() for x in tensors)),
    }
    if case.reference:
        sides["reference"] = case.reference
    if case.dtype == "tf32":
        sides["torch_tf32"] = lambda: plain(*tensors, matmul=tf32_matmul)
    if not forward and (case.seq_k == 1 or (case.seq == 1 and case.causal)):
        # A softmax over one key has no gradient: the truth is 0, and dP - D leaves the rounding of its two
        # sums.
        sides["rule"] = {"dq": within(max_abs=1e-5), "dk": within(max_abs=1e-5)}
    return sides


def nan_sides(case, draw, c):
    rows = (case.batch, case.heads, case.seq)
    sides = attend.nan_sides(case, draw, c, "flash", "lse", rows, "f32", block=128)

    def of_deliverable(side):
        return lambda: {name: value for name, value in side().items() if is_output_of(case, name)}

    return sides | {impl: of_deliverable(sides[impl]) for impl in ("c", "truth")}


def is_output_of(case, name):
    return (case.deliverable == "flash_forward") == (name in ("o", "lse"))


def measured_sides(case, draw, c):
    tensors = attend.inputs(case, draw)
    account = attend.account(case, c, matrices=1)
    weigh = case["pass"] == "memory"
    phase = "forward" if weigh else case["pass"]
    flops = attend.flops_of(account, phase)
    rows = tensors[0].nbytes / MIB  # one of q, k, v, o
    flash = attend.TandemAttention(case, c, "flash", tensors, fleeting=case.alone)
    eager = attend.Eager(lambda *qkv: naive.attention(*qkv, case.causal), tensors)
    sides = {
        "c": flash.side(
            phase, flops=flops, record={"values": {"account_mib": mib(account.saved_flash) - 3 * rows}}
        ),
        "torch_eager": eager.side(
            phase, flops=flops, record={"values": {"account_mib": mib(account.forward_peak + account.mask)}}
        ),
    }
    for impl, library in libraries(case, draw.device).items():
        sides[impl] = attend.Eager(library, tensors).side(phase, flops=flops)
    if weigh:
        plain = attend.TandemAttention(case, c.side("c_naive"), "naive", tensors)
        record = {"values": {"account_mib": mib(account.saved_naive) - 3 * rows}}
        sides["c_naive"] = plain.side(phase, flops=flops, record=record)
    return sides


def libraries(case, device):
    """PyTorch's own fused attention, by kernel where it has several: FlashAttention-2, cuDNN's, and for f32, which
    neither of them takes, its memory-efficient one."""

    def fused(*qkv):
        return F.scaled_dot_product_attention(*qkv, is_causal=case.causal)

    def of(backend):
        def call(*qkv):
            with sdpa_kernel(backend):
                try:
                    return fused(*qkv)
                except RuntimeError as error:
                    if "No available kernel" not in str(error):
                        raise
                    raise NotImplementedError(f"PyTorch has no {backend.name} for this") from error

        return call

    if device.type == "cpu":
        return {"torch_flash": fused}
    if case.dtype in ("f32", "tf32"):
        return {"torch_efficient": of(SDPBackend.EFFICIENT_ATTENTION)}
    return {
        "torch_flash": of(SDPBackend.FLASH_ATTENTION),
        "torch_cudnn": of(SDPBackend.CUDNN_ATTENTION),
    }


def report(page, records):
    page.question("Does the fused forward give o and the logsumexp, at every edge of its tiles?")
    report_errors(page, records.only("flash_forward"), "flash_forward")
    page.question("Does the backward from o, dO and the logsumexp give PyTorch's gradients?")
    report_errors(page, records.only("flash_backward"), "flash_backward")
    page.method(
        "Errors: sequences from 1 to 509 on both sides of tiles and vectors, unequal lengths, causal and not, both "
        "masks. torch_tiled is the tiled algorithm in plain tensor code."
    )
    timed = type(records)(record for record in records.only("flash_benchmarking").records if "ms" in record or
                          record["case"]["pass"] != "memory")  # fmt: skip
    libraries = ""
    if on_gpu(records):
        report_leaderboard(page, records.only("leaderboard"))
        libraries = report_gpu_headline(page, timed.only(heads=16))
    else:
        report_headline(page, timed.only(batch=8))
    report_grid(page, timed.only(batch=1, heads=1), libraries)
    report_memory(page, records.only("flash_benchmarking", **{"pass": "memory"}))


def report_errors(page, records, deliverable):
    answer, figure = error_answer(records)
    tiled = records.ratio("rel_l2", "torch_eager", "torch_tiled")
    if len(tiled):
        answer += f" The tiled algorithm in plain tensor code has {geomean(tiled):.2f} times plain attention's error."
    page.answer(deliverable, answer, figure)
    page.table(errors_by(records, ["dtype"]), f"{deliverable}_by_dtype")
    page.table(errors_by(records, ["head_dim", "dtype"]), deliverable)


def report_headline(page, timed):
    page.question(
        "How fast is it where one change is compared with the next (batch 8, seq 2048, head_dim 64, f32)?"
    )
    frame = timed.wide(["pass"], "ms", base="torch_eager")
    frame["c / torch_flash"] = timed.wide(["pass"], "ms", base="torch_flash").get("c / torch_flash")
    page.table(frame, "headline", units=units_of(frame, timed.impls(), "ms"))
    figures = {
        (phase, over): timed.only(**{"pass": phase}).ratio("ms", over)
        for phase in ("forward", "backward")
        for over in ("torch_eager", "torch_flash")
    }
    if all(len(found) for found in figures.values()):
        ratio = {key: found[0] for key, found in figures.items()}
        page.answer(
            "flash_benchmarking",
            f"Causal forward takes {ratio['forward', 'torch_eager']:.2f} times plain attention's time and "
            f"{ratio['forward', 'torch_flash']:.2f} times that of PyTorch's own fused attention "
            f"(scaled_dot_product_attention); backward {ratio['backward', 'torch_eager']:.2f} and "
            f"{ratio['backward', 'torch_flash']:.2f} times.",
            f"forward {ratio['forward', 'torch_flash']:.2f}, backward {ratio['backward', 'torch_flash']:.2f} x "
            "PyTorch's fused",
        )


def report_leaderboard(page, records):
    page.question("How long is one call at the leaderboard's shape, forward and backward?")
    frame = records.wide(["pass"], "ms", base="torch_eager").drop(columns="pass", errors="ignore")
    page.table(frame, "leaderboard", units=units_of(frame, records.impls(), "ms"))
    mine = records.only(impl="c").records
    if mine and "ms" in mine[0]:
        ms, low, high = (mine[0]["ms"][name] for name in ("median", "min", "max"))
        page.answer(
            "leaderboard",
            f"One call takes {ms:.3f} ms ({low:.3f} to {high:.3f}). The published "
            f"record of 2025 is {PUBLISHED_MS} ms, in Triton on an H100: {ms / PUBLISHED_MS:.2f} times that.",
            f"{ms:.3f} ms; published {PUBLISHED_MS}",
        )


def report_gpu_headline(page, timed):
    page.question("How fast is it beside the libraries (batch 1, 16 heads, seq 16384, bf16, causal)?")
    rows = []
    for head_dim in timed.values("head_dim"):
        for phase in ("forward", "backward"):
            part = timed.only(head_dim=head_dim, **{"pass": phase})
            if not len(part):
                continue
            row = {"head_dim": head_dim, "pass": phase}
            row |= {r["impl"]: r["ms"]["median"] if "ms" in r else r["status"] for r in part.records}
            mine = part.only(impl="c").records
            speed = mine[0].get("tflops") if mine else None
            row["TFLOP/s of c"] = speed
            peak = peak_of(mine[0]) if mine else None
            row["of the peak"] = f"{100 * speed / peak:.0f} %" if speed and peak else None
            for other in ("torch_flash", "torch_cudnn", "torch_eager"):
                ratio = part.ratio("ms", other)
                row[f"c / {other}"] = ratio[0] if len(ratio) else None
            rows.append(row | largest_spread(part.records))
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    page.table(frame, "libraries", units=units_of(frame, timed.impls(), "ms"))
    said = []
    for other, words in (("torch_flash", "FlashAttention-2's"), ("torch_cudnn", "cuDNN's")):
        found = [row[f"c / {other}"] for row in rows if row[f"c / {other}"]]
        if found:
            said.append(f"{ranged(found)} times {words}")
    page.method(
        "torch_flash is FlashAttention-2 and torch_cudnn cuDNN's kernel, as PyTorch has them, torch_efficient "
        "PyTorch's "
        "own for f32. With 16 heads torch_eager's score matrices may fill the GPU: there the sides ran one after the "
        "other, not interleaved."
    )
    return f"With 16 heads and 16384 tokens it takes {' and '.join(said)} time." if said else ""


def report_grid(page, timed, libraries=""):
    gpu = on_gpu(timed)
    keys = ["dtype", "head_dim", "seq"]
    page.question("How does it compare over lengths, head sizes and dtypes (batch 1, one head, causal)?")
    waiting = launch_bound(timed, "seq") if gpu else set()
    working = without(timed, waiting)
    fused = [impl for impl in timed.torches() if impl != "torch_eager"]
    rows = []
    for phase in PHASES:
        for dtype in timed.values("dtype"):
            part = timed.only(dtype=dtype, **{"pass": phase})
            eager, library = part.ratio("ms"), part.ratio("ms", fused)
            if not len(eager):
                continue
            busy = working.only(dtype=dtype, **{"pass": phase}).ratio("ms")
            rows.append(
                {
                    "pass": phase,
                    "dtype": dtype,
                    "shapes": len(eager),
                    "c / torch_eager": geomean(busy) if len(busy) else None,
                    "c / fastest fused": geomean(library) if len(library) else None,
                    "at worst": float(library.max()) if len(library) else None,
                    "ahead of plain from seq": wins_from(part, ["torch_eager"]),
                    "of fused from seq": wins_from(part, fused),
                }
            )
    page.table(pd.DataFrame(rows).dropna(axis="columns", how="all"), "lengths_by_dtype")
    page.text(
        "Geometric means over lengths and head sizes. fastest fused is the fastest of PyTorch's fused "
        "attentions in each "
        "shape; the last two columns are the lengths from which on C is behind in no shape."
        + (" Shapes in which torch_eager waits for its launches are not in its mean." if waiting else "")
    )
    for phase in PHASES:
        part = timed.only(**{"pass": phase})
        frame = part.wide(keys, "ms", base="torch_eager")
        cells = frame[keys].to_dict("records") if len(frame) else []
        fastest = [part.only(**cell).ratio("ms", part.torches()) for cell in cells]
        if any(len(found) for found in fastest):
            frame["c / fastest PyTorch"] = [found[0] if len(found) else None for found in fastest]
        speed = part.wide(keys, "tflops")
        if "c" in speed:
            scale = 1 if gpu else 1e3
            name = f"{'T' if gpu else 'G'}FLOP/s of c"
            frame[name] = [scale * x if isinstance(x, float) else None for x in speed["c"]]
        if gpu and len(frame):
            bound = {
                tuple(dict(case)[key] for key in keys) for case in waiting if dict(case)["pass"] == phase
            }
            frame["torch_eager waits for launches"] = [
                tuple(cell[k] for k in keys) in bound for cell in cells
            ]
        page.table(frame, f"lengths_{phase}", units=units_of(frame, part.impls(), "ms"))
    page.method(
        "FLOPs of attention are 4 batch heads seq^2 head_dim, half of it when causal, and 2.5 times that for backward, "
        "for both sides alike. Backward is measured, after an untimed forward, and not the difference of two times. "
        + (
            "The second-level cache is overwritten before each call. A side waits for its launches where a longer "
            "sequence, alike in all else, takes hardly longer."
            if gpu
            else "The inputs may stay in the caches between calls: on a CPU nothing flushes them."
        )
    )
    if gpu:
        report_gpu_answer(page, timed, working, fused, libraries)
    plot_speeds(page, timed, "bf16" if gpu else "f32")


def report_gpu_answer(page, timed, working, fused, libraries):
    eager, library = working.ratio("ms"), timed.ratio("ms", fused)
    if not len(eager) or not len(library):
        return
    page.answer(
        "flash_benchmarking",
        f"C takes {geomean(eager):.2f} times plain attention's time in the geometric mean of {len(eager)} shapes in "
        f"which that does not wait for launches, and {geomean(library):.2f} times that of PyTorch's fastest fused "
        f"attention in {len(library)} (slower in {sum(ratio > 1 for ratio in library)}, {library.max():.2f} times at "
        f"worst); ahead of plain attention it is from {wins_from(timed, ['torch_eager'])} tokens on. {libraries}",
        f"{geomean(eager):.2f} x plain, {geomean(library):.2f} x the fastest fused",
    )


def wins_from(records, over):
    """The length from which on C is behind the fastest of these sides in no shape; nothing where there is none."""
    behind = {}
    for seq in records.values("seq"):
        ratios = records.only(seq=seq).ratio("ms", over)
        if len(ratios):
            behind[seq] = bool((ratios > 1).any())
    since = None
    for seq in sorted(behind, reverse=True):
        if behind[seq]:
            break
        since = seq
    return str(since) if since else "at none" if behind else None


def plot_speeds(page, timed, dtype):
    """TFLOP/s against the length, a panel a pass, below the peak of the data sheet."""
    gpu = on_gpu(timed)
    panels, peaks = {}, []
    for phase in ("forward", "backward"):
        part = timed.only(head_dim=HEAD_DIM, dtype=dtype, **{"pass": phase})
        for impl in part.impls():
            seqs = part.only(impl=impl).values("seq")
            speeds = [known(part.value("tflops", impl=impl, seq=seq)) for seq in seqs]
            speeds = [speed * (1 if gpu else 1e3) if speed else None for speed in speeds]
            panels.setdefault(phase, {})[impl] = (seqs, speeds)
        peaks += [peak_of(record) for record in part.records if peak_of(record)]
    page.plot(
        "speed",
        panels,
        x="seq",
        y="TFLOP/s" if gpu else "GFLOP/s",
        title=f"Causal attention, head_dim {HEAD_DIM}, {dtype}",
        ceilings={"data sheet's peak": peaks[0]} if peaks else None,
    )


def report_memory(page, records):
    page.question("How does memory grow with the sequence?")
    rows, curves = [], {}
    impls = dict.fromkeys(("c", "c_naive", "torch_eager", *records.impls()))
    for seq in records.values("seq"):
        row = {"seq": seq}
        for impl in impls:
            row[impl] = known(records.value("peak_mib", impl=impl, seq=seq))
            row[f"{impl} arithmetic"] = known(records.value("values.account_mib", impl=impl, seq=seq))
        rows.append(row)
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    page.table(frame, "memory", units={name: "MiB" for name in frame if name != "seq"})
    for impl in impls:
        curves[impl] = ([row["seq"] for row in rows], [row[impl] for row in rows])
    page.plot(
        "memory",
        curves,
        x="seq",
        y="MiB",
        title=f"Forward's memory beyond its inputs, head_dim {HEAD_DIM}, f32",
    )
    whole = [row for row in rows if row["c"] and row["torch_eager"]]
    if len(whole) < 2:
        return
    first, last = whole[0], whole[-1]
    others = [impl for impl in impls if impl != "c" and last[impl]]
    ratios = ", ".join(f"{last['c'] / last[impl]:.2g} times {impl}'s" for impl in others)
    page.text(f"At seq {last['seq']} c takes {last['c']:.1f} MiB: {ratios} memory.")
    said = [grown(impl, first, last) for impl in impls if first[impl] and last[impl]]
    page.method(
        f"Memory from seq {first['seq']} to {last['seq']}, {last['seq'] / first['seq']:g} times the length: "
        f"{'; '.join(said)}. The arithmetic is that of o and the logsumexp for c, of o and one score matrix for "
        "c_naive, and of what the operations of plain attention hold at once for torch_eager; c is flash attention, "
        "c_naive plain attention in C."
    )


def grown(impl, first, last):
    """A side's memory at both ends, how often the one is in the other, and how far it is from its arithmetic."""
    words = f"{impl} {text(first[impl])} to {text(last[impl])} MiB, {text(last[impl] / first[impl])} times"
    expected = last[f"{impl} arithmetic"]
    if not expected:
        return words
    over = [text(row[impl] - row[f"{impl} arithmetic"]) for row in (first, last) if row[f"{impl} arithmetic"]]
    share = text(100 * (last[impl] / expected - 1))
    return f"{words} (over the arithmetic by {' and '.join(over)} MiB, at the end {share} %)"


def known(value):
    return None if value != value else value
