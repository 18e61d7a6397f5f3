"""Flash attention: answers at every edge of its tiles, and times next to plain attention."""

import itertools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from parity.core import DTYPES as DTYPE_SIZES
from parity.core import Case, grid, within
from parity.core.cards import peak_of
from parity.core.comparison import Comparison, geomean, ms_of
from parity.shared import attend
from parity.shared.attend import HEAD_DIM, HEAD_DIMS
from parity.shared.pages import by_case, errors_by, held, mark, on_gpu, tabled, time_of
from ref import attention as naive
from ref import flash as ref

PUBLISHED_MS = 5.364  # the leaderboard's verified record of 2025, on an H100

DTYPES = {"cpu": ["f32", "bf16"], "cuda": ["f32", "tf32", "bf16", "f16"]}
PHASES = ["forward", "backward", "both"]
SEQS = [2**power for power in range(7, 17)]


def cases(profile, device):
    yield from error_cases(DTYPES[device], few=(profile, device) == ("quick", "cpu"))
    yield from headline_cases(profile, device)
    yield from grid_cases(profile, device)


def error_cases(dtypes, few=False):
    """Tiles are 64 queries by 64 keys and columns come in groups of 16: one row, both sides of each, and primes.
    `few`: every square shape once, with fewer heads, the masks and dtypes in turn."""
    many = dict(batch=1, heads=4) if few else dict(batch=2, heads=16)
    one, seqs = dict(seq=1, seq_k=1, head_dim=64), [15, 16, 17, 63, 64, 65, 127, 128, 129, 509]
    shapes = [dict(batch=batch, heads=heads, **one) for batch, heads in [(1, 2), (4, 16)]]
    shapes += [dict(batch=1, heads=8, seq=seq, seq_k=seq, head_dim=64) for seq in seqs]
    shapes += [dict(**many, seq=129, seq_k=129, head_dim=size) for size in [1, 3, 16, 33, 80, 127, 128, 256]]
    for seq, seq_k in [(37, 101), (101, 37), (1, 300), (300, 1), (64, 65)]:
        shapes.append(dict(**many, seq=seq, seq_k=seq_k, head_dim=80))
    for index, shape in enumerate(shapes):
        ways = [*grid(causal=[False, True], dtype=dtypes)]
        if few and shape["seq"] == shape["seq_k"]:
            ways = [ways[index % len(ways)]]
        elif few:  # only a mask tells queries from keys
            ways = [way for way in ways if way["dtype"] == dtypes[index % len(dtypes)]]
        for keys in ways:
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
        both = both_deliverables(**keys, nan=nan, nan_row=nan_row)
        yield from (case for case in both if nan != "dout" or case.deliverable == "flash_backward")


def both_deliverables(**keys):
    for deliverable in ("flash_forward", "flash_backward"):
        yield Case(deliverable, **keys)


def headline_cases(profile, device):
    """The comparison by which a change is judged. On a GPU it has the leaderboard's shape, also with heads of 128."""
    if device == "cpu":
        shapes, repeats = [dict(batch=8, heads=1, seq=2048, head_dim=64, dtype="f32")], 5
    else:
        sizes, repeats = HEAD_DIMS[-2:] if profile == "full" else [64], 20
        shapes = [dict(batch=1, heads=16, seq=16384, head_dim=size, dtype="bf16") for size in sizes]
        yield timed_case(device, repeats, "both", "leaderboard", **shapes[0])
    for shape in shapes:
        for phase in ("forward", "backward"):
            yield timed_case(device, 3 if (profile, device) == ("quick", "cpu") else repeats, phase, **shape)


def grid_cases(profile, device):
    """The handout's grid: batch 1, one head, causal. A GPU also has TF32, the fast way of f32, with one head size."""
    gpu = device == "cuda"
    if profile == "full":
        dtypes = ["bf16", "f32"] if gpu else DTYPES["cpu"]
        points = [tuple(keys.values()) for keys in grid(seq=SEQS, head_dim=HEAD_DIMS, dtype=dtypes)]
        points += [(seq, HEAD_DIM, "tf32") for seq in SEQS if gpu and seq <= 16384]
    elif gpu:
        points = [(seq, 64, "bf16") for seq in (512, 4096, 16384)] + [(4096, 128, "bf16"), (4096, 64, "f32")]
    elif profile == "quick":
        points = [(512, 64, "f32"), (512, 64, "bf16")]
    else:
        points = [(seq, 64, "f32") for seq in (128, 512, 2048)]
        points += [(512, head_dim, "f32") for head_dim in (16, 32, 128)]
        points += [(512, 64, "bf16"), (2048, 64, "bf16")]
    few, several = (16384, 10) if gpu else (4096, 5)
    for seq, head_dim, dtype in points:
        for phase in PHASES:
            repeats = None if seq < few else several if seq < 32768 else 3
            keys = dict(batch=1, heads=1, seq=seq, head_dim=head_dim, dtype=dtype)
            yield timed_case(device, repeats, phase, **keys)


def timed_case(device, repeats, phase, deliverable="flash_benchmarking", **keys):
    scores = keys["batch"] * keys["heads"] * keys["seq"] ** 2
    if device == "cuda":
        matrix = scores * (2 if keys["dtype"] == "bf16" else 4)
        seconds = 0.6 + (repeats or 0) * matrix / 2**33 * (0.1 if phase == "forward" else 0.4)
        how = dict(in_turn=matrix >= 2**31)  # plain attention's matrices may fill the GPU
    else:
        work = (repeats or 0) + 2
        seconds = 1.5 if scores < 2**24 else scores / 2**27 * work * (0.3 if phase == "forward" else 1)
        how = dict(alone=scores >= 2**28)
    how |= dict(measure="time", seconds=seconds, repeats=repeats)
    return Case(deliverable, **how, **keys, causal=True, mask="inf", **{"pass": phase})


def run(case, draw, c):
    if "nan" in case:
        return nan_sides(case, draw, c)
    if case.measure == ("error",):
        return error_sides(case, draw, c)
    return timed_sides(case, draw, c)


def error_sides(case, draw, c):
    """o and the logsumexp are flash_forward's, the gradients flash_backward's."""
    tensors = attend.inputs(case, draw)
    forward = case.deliverable == "flash_forward"

    def plain(q, k, v, dout, matmul=torch.matmul):
        def attention(*qkv):
            return naive.attention(*qkv, case.causal, case.mask, matmul=matmul)

        if not forward:
            return of_deliverable(case, attend.by_autograd(attention, q, k, v, dout))
        wide = (x.double() if x.dtype.itemsize == 8 else x.float() for x in (q, k))
        lse = naive.logsumexp(*wide, case.causal, case.mask, matmul=matmul)
        return {"o": attention(q, k, v), "lse": lse}

    def tiled(q, k, v, dout):
        if forward:
            return dict(zip(("o", "lse"), ref.flash(q, k, v, case.causal, case.mask), strict=True))
        tiles = attend.by_autograd(lambda *qkv: ref.flash(*qkv, case.causal, case.mask)[0], q, k, v, dout)
        return of_deliverable(case, tiles)

    call = attend.judged(case, draw, c, "flash", tensors, "lse", tensors[0].shape[:3], "f32")
    sides = attend.error_sides(case, lambda: of_deliverable(case, call()), plain, tensors)
    sides["torch_tiled"] = lambda: tiled(*tensors)
    if not forward and (case.seq_k == 1 or (case.seq == 1 and case.causal)):
        # A softmax over one key has no gradient: the truth is 0, and dP - D is the rounding of its two sums.
        sides["rule"] = {"dq": within(max_abs=1e-5), "dk": within(max_abs=1e-5)}
    return sides


def nan_sides(case, draw, c):
    rows = (case.batch, case.heads, case.seq)
    sides = attend.nan_sides(case, draw, c, "flash", "lse", rows, "f32", block=128)
    mine = sides["c"]
    return sides | {"c": lambda: of_deliverable(case, mine()), "truth": of_deliverable(case, sides["truth"])}


def of_deliverable(case, outputs):
    forward = case.deliverable == "flash_forward"
    return {name: value for name, value in outputs.items() if (name in ("o", "lse")) == forward}


def timed_sides(case, draw, c):
    tensors = attend.inputs(case, draw)
    phase = case["pass"]
    found = attend.account(case, c, matrices=1)
    # Of the method, flash backward included. Both sides' speed is stated by it, whoever does more.
    flops = {"forward": found.forward_flops, "backward": found.backward_flops}
    flops = flops.get(phase) or sum(flops.values())
    flash = attend.TandemAttention(case, c, "flash", tensors, fleeting=case.alone)
    sides = {"torch_eager": lambda *qkv: naive.attention(*qkv, case.causal)} | libraries(case, draw.device)
    return {"c": flash.side(phase, flops=flops), "sample": attend.sampled(case, tensors)} | {
        impl: attend.Eager(attention, tensors).side(phase, flops=flops) for impl, attention in sides.items()
    }


def libraries(case, device):
    """PyTorch's own fused attention. On a GPU one side for each kernel: FlashAttention-2 and cuDNN's; for f32, which
    neither takes, the memory-efficient one."""

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
    return {"torch_flash": of(SDPBackend.FLASH_ATTENTION), "torch_cudnn": of(SDPBackend.CUDNN_ATTENTION)}


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
            "torch_eager's, in tf32 torch_tf32's, the geometric mean of the cases. allowance: what an error may be "
            "at most by our own rule. In tf32 PyTorch's sides may use TF32, too; for some short sequences they do not."
        )
        page.table(rows, f"{deliverable}_by_dtype")
        page.table(errors_by(errors, ["head_dim", "dtype"]), deliverable, more=True)
    report_grid(page, records.only("flash_benchmarking", **{"pass": PHASES}))
    report_leaderboard(page, records.only("leaderboard"))
    page.method()


def report_grid(page, timed):
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
    asked = [line for line in lines if line["dtype"] != "tf32"]
    page.table(asked, "lengths", expected=80)
    page.table([line for line in lines if line not in asked], "lengths_tf32", more=True)
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
            means.append(row | {"C is slower in": sum(ratio > 1 for ratio in ratios), "most": max(ratios)})
    page.note(
        "C's time over the fused kernel's, geometric means over lengths, head sizes and passes without noise. "
        "The machine's page has the times of tf32:"
    )
    page.table([row | {"most": None} for row in means], "means")
    if best:
        values = {"what": "forward and backward take", "dtype": best[0], "seq": best[2]}
        values |= {"eager": said[best]["eager"], "best": said[best]["fused"]}
        values["mean"] = next((row for row in means if row["dtype"] == best[0]), None)
    elif len(headline):
        sides = {r["impl"]: r for r in headline.only(**{"pass": "backward"}).records}
        for name, impl in (("eager", "torch_eager"), ("best", "torch_flash")):
            values[name] = Comparison.of(sides.get("c"), sides.get(impl))
        values |= {"what": "the backward pass takes", "seq": 2048, "dtype": "f32"}
    where = "long sequences" if best and said[best]["eager"].verdict == "faster" else None
    where = "every length" if eager and max(eager) < 1 else where
    slower = max(means, key=lambda row: row["C is slower in"], default=None)
    slower = slower if slower and slower["C is slower in"] else None
    page.say(grid=bool(best), head_dim=HEAD_DIM, where=where, slower=slower, **values)


def report_leaderboard(page, records):
    page.section("leaderboard")

    def cells(record):
        row = {name: record["ms"][name] for name in ("median", "min", "max", "n")} if "ms" in record else {}
        row |= {"TFLOP/s": record.get("tflops"), "% of the bound": page.rates.share(record)}
        return {"side": record["impl"]} | row | {"status": record["status"]}

    rows = [row for record in records.records for row in tabled([record], (), cells)]
    if records.records:
        page.note(
            "{dtype}, causal, batch {batch}, {heads} heads, {seq} tokens, head_dim {head_dim}; forward and backward in "
            "one call. TFLOP/s: the backward pass counts as 2.5 forward passes.".format(
                **records.records[0]["case"]
            )
        )
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
        x="tokens",
        y="TFLOP/s" if gpu else "GFLOP/s",
        title=f"Causal attention, one head, head_dim {HEAD_DIM}, {dtype}",
        log="x",
        ceilings={"peak of the data sheet": peaks[0]} if peaks else None,
    )
