"""Flash attention: answers at every edge of its tiles, times beside plain attention, and memory against length."""

import itertools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from parity.core import DTYPES as DTYPE_SIZES
from parity.core import Case, grid, within
from parity.core.comparison import Comparison, geomean, ms_of
from parity.core.view import number
from parity.shared import attend
from parity.shared.attend import HEAD_DIM, HEAD_DIMS
from parity.shared.pages import by_case, errors_by, held, mark, mib, on_gpu, peak_of, tabled, time_of
from ref import attention as naive
from ref import flash as ref
from ref.ops import tf32_matmul

PUBLISHED_MS = 5.364  # the leaderboard's verified record of 2025, on an H100

DTYPES = {"cpu": ["f32", "bf16"], "cuda": ["f32", "tf32", "bf16", "f16"]}
PHASES = ["forward", "backward", "both"]
SEQS = [2**power for power in range(7, 17)]
# The sequence lengths of the memory curves.
MEMORY_SEQS = {"cpu": [256, 512, 1024, 2048, 4096, 8192], "cuda": [1024, 2048, 4096, 8192, 16384, 32768]}


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
        def attention(*qkv):
            return naive.attention(*qkv, case.causal, case.mask, matmul=matmul)

        if not forward:
            return of_deliverable(attend.by_autograd(attention, q, k, v, dout))
        wide = (x.double() if x.dtype.itemsize == 8 else x.float() for x in (q, k))
        lse = naive.logsumexp(*wide, case.causal, case.mask, matmul=matmul)
        return {"o": attention(q, k, v), "lse": lse}

    def tiled(q, k, v, dout):
        if forward:
            return dict(zip(("o", "lse"), ref.flash(q, k, v, case.causal, case.mask), strict=True))
        tiles = attend.by_autograd(lambda *qkv: ref.flash(*qkv, case.causal, case.mask)[0], q, k, v, dout)
        return of_deliverable(tiles)

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
    rows = mib(tensors[0].nbytes)  # one of q, k, v, o
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
    for deliverable in ("flash_forward", "flash_backward"):
        page.section(deliverable)
        errors = records.only(deliverable)
        rows = errors_by(errors, ["dtype"])
        f32 = next((row for row in rows if row["dtype"] == "f32"), {})
        sides = {"c": "c", "torch": "torch_eager", "tiled": "torch_tiled"}
        told = held(errors)
        page.say(**told, f32={name: f32.get(f"relative error, {impl}") for name, impl in sides.items()})
        if len(rows) > 1:
            rows.append({"dtype": "all", "cases": told["judged"], "error ratio": told["ratio"]})
        page.note(
            "relative error: the largest relative L2 error of the cases, against float64. error ratio: C's over "
            "PyTorch's, the geometric mean of the cases. allowance: what an error may be at most by our own rule."
        )
        page.table(rows, f"{deliverable}_by_dtype")
        page.table(errors_by(errors, ["head_dim", "dtype"]), deliverable, more=True)
    report_grid(page, records.only("flash_benchmarking", **{"pass": PHASES}))
    report_leaderboard(page, records.only("leaderboard"))
    report_memory(page, records.only("flash_benchmarking", **{"pass": "memory"}))
    page.method()


def report_grid(page, timed):
    """A row a shape, with the three passes of each side."""
    page.section("flash_benchmarking")
    gpu = on_gpu(timed)
    grid, keys = timed.only(batch=1, heads=1), ("dtype", "head_dim", "seq")
    said, times = {}, {}
    for (*shape, phase), sides in by_case(grid, (*keys, "pass")).items():
        fused = [sides[i] for i in sides if i.startswith("torch") and i != "torch_eager" and "ms" in sides[i]]
        chosen = {"c": sides.get("c"), "eager": sides.get("torch_eager")}
        chosen["fused"] = min(fused, key=time_of, default=None)
        times[*shape, phase] = chosen
        if fused and "ms" in sides.get("c", {}):
            said[*shape, phase] = {n: Comparison.of(chosen["c"], chosen[n]) for n in ("fused", "eager")}
    lines = []
    for shape in sorted({key[:3] for key in times}, key=lambda k: (k[0] != "bf16", *k)):
        line = dict(zip(keys, shape, strict=True))
        for phase in PHASES:
            for name in ("c", "eager", "fused"):
                record = times.get((*shape, phase), {}).get(name)
                line[f"{phase} {name}"] = record and time_of(record)
                mark(line, record, f"{phase} {name}")
        nbytes = 8 * shape[1] * shape[2] * DTYPE_SIZES[shape[0]].itemsize  # q, k, v, o and their gradients
        both = times.get((*shape, "both"), {}).get("c")
        lines.append(line | {"% of the bound, both": page.rates.share(both, nbytes)})
    page.note(
        "Times in ms, causal, batch 1, one head. eager: plain attention; fused: the fastest fused attention "
        "of PyTorch. both: forward and backward in one call."
    )
    page.table(lines, "lengths", expected=80)
    if not lines and len(timed):
        page.lacks("the grid of lengths")
    headline, keys = (timed.only(heads=16), ["head_dim", "pass"]) if gpu else (timed.only(batch=8), ["pass"])
    pairs = zip(*(headline.wide(keys, "ms", base) for base in ("torch_eager", "torch_flash")), strict=True)
    rows = [row | more for row, more in pairs]
    shape = "batch 1, 16 heads, seq 16384, bf16" if gpu else "batch 8, one head, seq 2048, head_dim 64, f32"
    page.note(f"Causal, {shape}:")
    page.table(rows, "headline", units=dict.fromkeys(headline.impls(), "ms"))
    say_grid(page, said, headline, "bf16" if gpu else "f32")
    plot_speeds(page, grid, "bf16" if gpu else "f32", gpu)
    for phase in PHASES:
        part = grid.only(**{"pass": phase})
        units = dict.fromkeys(part.impls(), "ms")
        page.table(part.wide(["dtype", "head_dim", "seq"], "ms"), f"lengths_{phase}", units=units, more=True)


def say_grid(page, said, headline, dtype):
    """Of the longest length of head_dim 64 that plain attention has, and of the means over shapes."""
    usable = [key for key in said if key[1] == HEAD_DIM and key[3] == "both" and all(said[key].values())]
    best = max(usable, key=lambda key: (key[0] == dtype, key[2]), default=None)
    eager = [found["eager"].ratio for found in said.values() if found["eager"]]
    values, means = {}, []
    for name in dict.fromkeys(key[0] for key in said):
        ratios = [found["fused"].ratio for key, found in said.items() if key[0] == name and found["fused"]]
        if ratios:
            row = {"dtype": name, "comparisons": len(ratios), "C / fused": geomean(ratios)}
            means.append(row | {"C is slower in": sum(ratio > 1 for ratio in ratios)})
    page.note(
        "C's time over the fused kernel's, geometric means over lengths, head sizes and passes without noise:"
    )
    page.table(means, "means")
    if best:
        values = {"what": "forward and backward take", "dtype": best[0], "seq": best[2]}
        values |= {"eager": said[best]["eager"], "best": said[best]["fused"]}
        values["mean"] = next((row for row in means if row["dtype"] == best[0]), None)
    elif len(headline):
        sides = {r["impl"]: r for r in headline.only(**{"pass": "backward"}).records}
        for name, impl in (("eager", "torch_eager"), ("best", "torch_flash")):
            values[name] = Comparison.of(sides.get("c"), sides.get(impl))
        values |= {"what": "the backward pass takes", "seq": 2048, "dtype": "f32"}
    page.say(
        grid=bool(best),
        head_dim=HEAD_DIM,
        always=max(eager, default=0) < 1,
        **values,
    )


def report_leaderboard(page, records):
    page.section("leaderboard")

    def cells(record):
        row = {name: record["ms"][name] for name in ("median", "min", "max", "n")} if "ms" in record else {}
        row |= {"TFLOP/s": record.get("tflops"), "% of the bound": page.rates.share(record)}
        return {"side": record["impl"]} | row | {"status": record["status"]}

    rows = [row for record in records.records for row in tabled([record], (), cells)]
    page.table(rows, "leaderboard", units=dict.fromkeys(("median", "min", "max"), "ms"))
    found = {record["impl"]: ms_of(record) for record in records.records}
    if not found:
        return
    h100 = "H100" in page.machine
    if not h100:
        page.lacks("a time on an H100, the leaderboard's GPU")
    best = min(filter(None, (found.get("torch_flash"), found.get("torch_cudnn"))), default=None)
    over = found["c"] / PUBLISHED_MS if found.get("c") and h100 else None
    page.say(**found, best=best, h100=h100, published=PUBLISHED_MS, over=over, machine=page.machine)


def plot_speeds(page, grid, dtype, gpu):
    """TFLOP/s on a linear axis, from 1,024 tokens on, and the data sheet's peak as a line."""
    panels, peaks = {}, []
    for phase in PHASES:
        part = grid.only(head_dim=HEAD_DIM, dtype=dtype, **{"pass": phase})
        peaks += filter(None, map(peak_of, part.records))
        part = part.where(lambda r: r["case"]["seq"] >= 1024 or not gpu)
        for impl in part.impls():
            seqs, speeds = part.curve("seq", "tflops", impl)
            speeds = [speed * (1 if gpu else 1e3) if speed else None for speed in speeds]
            panels.setdefault(phase, {})[impl] = (seqs, speeds)
    page.plot(
        "speed",
        panels,
        x="seq",
        y="TFLOP/s" if gpu else "GFLOP/s",
        title=f"Causal attention, one head, head_dim {HEAD_DIM}, {dtype}",
        log="x",
        ceilings={"peak of the data sheet": peaks[0]} if peaks else None,
    )


def report_memory(page, records):
    page.question("How does memory grow with the sequence?")

    def cells(record):
        impl = record["impl"]
        return {impl: record.get("peak_mib"), f"{impl} arithmetic": number(record, "values.account_mib")}

    rows = tabled(records.records, ("seq",), cells, order=lambda key: key)
    names = [f"{impl}{end}" for impl in records.impls() for end in ("", " arithmetic")]
    page.table(rows, "memory", ["seq", *names], dict.fromkeys(names, "MiB"), more=True)
