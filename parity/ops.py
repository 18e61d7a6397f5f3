"""Every operation of impl/ops/ops.h, forward and backward, against PyTorch; times at the small model's shapes."""

import torch
import torch.nn.functional as F

from parity import _ops_fused, _ops_pages
from parity._ops_fused import ADAMW, EPS, GAP, rounded
from parity._ops_sides import Compiled, backward_sides, forward_sides
from parity.core import DTYPES as DRAWN
from parity.core import Case, Side, equal, grid
from ref import ops as ref
from ref.transformer import SIZES

DELIVERABLES = {"operations": "The operations a model is made of, forward and backward"}

DTYPES = {"cpu": ["f32", "bf16"], "cuda": ["f32", "bf16", "f16"]}
SMALL = dict(d_model=768, d_ff=3072, heads=12, head_dim=64, vocab=10_000, batch=4, seq=128)
SMALL_NUMEL = 128_625_408


def cases(profile, device):
    yield from error_cases(DTYPES[device])
    if device == "cuda":
        for shape in [dict(batch=1, m=128, n=192, k=64), dict(batch=3, m=37, n=53, k=80)]:
            for trans in grid(trans_a=[False, True], trans_b=[False, True]):
                yield operation("gemm", **shape, **trans, dtype="tf32")
        yield from gpu_timed_cases(profile)
    else:
        yield from timed_cases()


def error_cases(dtypes):
    """Per operation: a row of one, the model's own ratios, ragged sizes on both sides of a vector register."""
    for dtype in dtypes:
        for shape in [
            dict(batch=1, m=1, n=1, k=1),
            dict(batch=1, m=128, n=192, k=64),
            dict(batch=3, m=37, n=53, k=80),
            dict(batch=2, m=17, n=130, k=1009),
        ]:
            for trans in grid(trans_a=[False, True], trans_b=[False, True]):
                yield operation("gemm", **shape, **trans, dtype=dtype)
        yield operation("gemm", batch=2, m=33, n=65, k=80, trans_b=True, alpha=0.5, beta=1.0, dtype=dtype)
        yield operation("gemm", batch=1, m=64, n=80, k=512, trans_a=True, beta=1.0, dtype=dtype)
        yield operation("gemm", batch=2, m=31, n=47, k=63, exact=True, dtype=dtype)
    yield operation("gemm", batch=2, m=33, n=65, k=80, trans_b=True, dtype="bf16", out_dtype="f32")

    for dtype in dtypes:
        for shape in [
            dict(tokens=1, vocab=1, d_model=1),
            dict(tokens=512, vocab=1000, d_model=64),
            dict(tokens=257, vocab=53, d_model=83),  # every row of the table several times
        ]:
            yield operation("embedding_forward", **shape, dtype=dtype)
            yield operation("embedding_backward", **shape, dtype=dtype)
        yield operation("embedding_backward", tokens=100, vocab=53, d_model=80, accumulate=True, dtype=dtype)

        # In one column alone dx is a difference of equal numbers: what eps leaves of it is noise on every side.
        yield operation("rmsnorm_forward", rows=1, cols=1, dtype=dtype)
        # The three numbers of a single row's dx would be judged by luck.
        yield operation("rmsnorm_forward", rows=1, cols=3, dtype=dtype)
        for shape in [dict(rows=67, cols=3), dict(rows=256, cols=80), dict(rows=127, cols=1009)]:
            yield operation("rmsnorm_forward", **shape, dtype=dtype)
            yield operation("rmsnorm_backward", **shape, dtype=dtype)
        yield operation("rmsnorm_backward", rows=33, cols=80, accumulate=True, dtype=dtype)

        for shape in [
            dict(batch=1, heads=1, seq=1, head_dim=2),
            dict(batch=2, heads=12, seq=128, head_dim=64),
            dict(batch=3, heads=5, seq=37, head_dim=80),
            dict(batch=2, heads=3, seq=19, head_dim=80, pitch=3 * 80 + 7),
            dict(batch=2, heads=4, seq=64, head_dim=16, pitch=3 * 4 * 16),  # one third of a fused QKV
        ]:
            for name in ("heads_split", "heads_merge", "rope_forward", "rope_backward"):
                yield operation(name, **shape, dtype=dtype)

        for shape in [dict(rows=33, cols=80), dict(rows=127, cols=1009)]:
            yield operation("residual_rmsnorm_forward", **shape, dtype=dtype)
            if dtype != "f32":
                for name in ("rmsnorm_forward", "rmsnorm_backward", "residual_rmsnorm_forward"):
                    yield operation(name, **shape, dtype=dtype, x_dtype="f32")
                keys = dict(dtype=dtype, x_dtype="f32", accumulate=True)
                yield operation("rmsnorm_backward", **shape, **keys)

        for shape in [
            dict(batch=1, heads=1, seq=1, head_dim=2),
            dict(batch=3, heads=5, seq=37, head_dim=80),
            dict(batch=2, heads=3, seq=19, head_dim=16, pitch=3 * 3 * 16 + 7),
        ]:
            yield operation("qkv_split_forward", **shape, dtype=dtype)
            yield operation("qkv_split_backward", **shape, dtype=dtype)

        for shape in [dict(rows=1, cols=1), dict(rows=128, cols=3072), dict(rows=33, cols=1009, pitch=2018)]:
            yield operation("silu_mul_forward", **shape, dtype=dtype)
            yield operation("silu_mul_backward", **shape, dtype=dtype)

        for count in [1, 1009, 98_304]:
            yield operation("residual_add", count=count, dtype=dtype)
            yield operation("sgd_step", count=count, dtype=dtype)
            yield operation("global_norm", count=count, dtype=dtype)
            for variant in ("course2025", "course2026", "torch"):
                for step in (1, 3):
                    yield operation("adamw_step", count=count, variant=variant, step=step, dtype=dtype)
            if dtype != "f32":
                yield operation("round", count=count, dtype="f32", out_dtype=dtype)
                yield operation("round", count=count, dtype=dtype, out_dtype="f32")
            for on_device in [False, True] if dtype != "f32" else []:
                keys = dict(variant="course2025", step=3, grad_dtype=dtype, on_device=on_device)
                yield operation("adamw_update", count=count, dtype="f32", **keys)

        for shape in [
            dict(rows=1, cols=1),
            dict(rows=256, cols=128),
            dict(rows=33, cols=1009),
            dict(rows=2 * 128, cols=128, causal_seq=128),
            dict(rows=3 * 37, cols=53, causal_seq=37),
        ]:
            yield operation("softmax_forward", **shape, dtype=dtype)
            yield operation("softmax_backward", **shape, dtype=dtype)

        for shape in [dict(rows=1, vocab=1), dict(rows=128, vocab=10_000), dict(rows=37, vocab=1009)]:
            for way in ("forward", "backward", "fused"):
                yield operation(f"cross_entropy_{way}", **shape, dtype=dtype)

    for positions, head_dim in [(1, 2), (128, 64), (1009, 80), (2048, 128)]:
        yield operation("rope_table", positions=positions, head_dim=head_dim)


def timed_cases():
    tokens = SMALL["batch"] * SMALL["seq"]
    d_model, d_ff, vocab = SMALL["d_model"], SMALL["d_ff"], SMALL["vocab"]
    heads = {key: SMALL[key] for key in ("batch", "heads", "seq", "head_dim")}
    scores = SMALL["batch"] * SMALL["heads"] * SMALL["seq"]
    for dtype in DTYPES["cpu"]:
        for shape in products(tokens, d_model, d_ff, vocab):
            yield timed("gemm", **shape, dtype=dtype)
        both = {
            "embedding": dict(tokens=tokens, vocab=vocab, d_model=d_model),
            "rmsnorm": dict(rows=tokens, cols=d_model),
            "rope": heads,
            "silu_mul": dict(rows=tokens, cols=d_ff),
            "softmax": dict(rows=scores, cols=SMALL["seq"], causal_seq=SMALL["seq"]),
            "cross_entropy": dict(rows=tokens, vocab=vocab),
        }
        for name, shape in both.items():
            yield timed(f"{name}_forward", **shape, dtype=dtype)
            yield timed(f"{name}_backward", **shape, dtype=dtype)
        yield timed("heads_merge", **heads, dtype=dtype)
        yield timed("residual_add", count=tokens * d_model, dtype=dtype)
    for name, keys in (("adamw_step", dict(variant="torch", step=1)), ("sgd_step", {})):
        keys = dict(count=SMALL_NUMEL, dtype="f32", **keys)
        yield operation(name, measure="time", seconds=25, repeats=5, needs_bytes=56 * SMALL_NUMEL, **keys)


def products(tokens, d_model, d_ff, vocab):
    """Forward of the projections, both sides of the feed-forward and the head; then the two gradients of w1."""
    for n, k in [(d_model, d_model), (d_ff, d_model), (d_model, d_ff), (vocab, d_model)]:
        yield dict(batch=1, m=tokens, n=n, k=k, trans_a=False, trans_b=True)
    yield dict(batch=1, m=tokens, n=d_model, k=d_ff, trans_a=False, trans_b=False)
    yield dict(batch=1, m=d_ff, n=d_model, k=tokens, trans_a=True, trans_b=False)


def gpu_timed_cases(profile):
    """The smallest and the largest model at batch 4, context 512; and what the GPU can do at best."""
    batch, seq, vocab = 4, 512, 10_000
    tokens = batch * seq
    for power in [20, 22, 24, 26, 28]:
        yield operation("copy", measure="time", seconds=0.3, count=2**power, dtype="f32")
    for dtype in ["bf16", "f16", "tf32", "f32"]:
        square = dict(batch=1, m=8192, n=8192, k=8192, trans_a=False, trans_b=True)
        yield operation("gemm", measure="time", seconds=1.5, **square, dtype=dtype)
    full = profile == "full"
    for size in ["small", "2.7B"] if full else ["2.7B"]:
        d_model, d_ff, _, heads = SIZES[size]
        for dtype in ["bf16", "tf32", "f32"] if full else ["bf16"]:
            for shape in products(tokens, d_model, d_ff, vocab):
                yield operation("gemm", measure="time", seconds=0.5, **shape, dtype=dtype)
        split = dict(batch=batch, heads=heads, seq=seq, head_dim=d_model // heads)
        both = {
            "embedding": dict(tokens=tokens, vocab=vocab, d_model=d_model),
            "rmsnorm": dict(rows=tokens, cols=d_model),
            "rope": split,
            "silu_mul": dict(rows=tokens, cols=d_ff),
            "softmax": dict(rows=batch * heads * seq, cols=seq, causal_seq=seq),
            "cross_entropy": dict(rows=tokens, vocab=vocab),
        }
        for dtype in ["bf16", "f32"] if full else ["bf16"]:
            for name, shape in both.items():
                yield operation(f"{name}_forward", measure="error time", seconds=4, **shape, dtype=dtype)
                yield operation(f"{name}_backward", measure="error time", seconds=4, **shape, dtype=dtype)
            once = dict(measure="error time", seconds=4, dtype=dtype)
            yield operation("residual_add", **once, count=tokens * d_model)
            yield operation("residual_rmsnorm_forward", **once, **both["rmsnorm"])
            if dtype != "f32":
                yield operation("residual_rmsnorm_forward", **once, x_dtype="f32", **both["rmsnorm"])
            yield operation("qkv_split_forward", **once, **split)
            yield operation("qkv_split_backward", **once, **split)
            yield operation("cross_entropy_fused", **once, **both["cross_entropy"])
    for dtype in ["f32", "bf16"]:
        keys = dict(count=SMALL_NUMEL, dtype=dtype, variant="torch", step=1)
        yield operation("adamw_step", measure="time", seconds=6, needs_bytes=80 * SMALL_NUMEL, **keys)
    keys = dict(count=SMALL_NUMEL, dtype="f32", variant="torch", step=1, grad_dtype="bf16", on_device=True)
    yield operation("adamw_update", measure="time", seconds=6, needs_bytes=80 * SMALL_NUMEL, **keys)
    yield operation("global_norm", measure="error time", seconds=3, count=SMALL_NUMEL, dtype="bf16")


def operation(op, measure="error", seconds=0.1, repeats=None, needs_bytes=0, **keys):
    how = dict(measure=measure, seconds=seconds, repeats=repeats, needs_bytes=needs_bytes)
    return Case("operations", **how, op=op, **keys)


def timed(op, **keys):
    return operation(op, measure="error time", seconds=0.7, **keys)


def run(case, draw, c):
    sides = OPERATIONS[case.op](case, draw, c)
    # Compiling takes seconds, and a C++ compiler on the CPU: only beside a time on a GPU.
    if draw.device.type == "cpu" or "time" not in case.measure:
        sides.pop("torch_compile", None)
    if "time" in case.measure:
        for impl in [impl for impl in sides if impl == "c" or impl.startswith("torch")]:
            side = sides[impl] if isinstance(sides[impl], Side) else Side(sides[impl])
            side.nbytes = moved_bytes(case, c)
            sides[impl] = side
    return sides


def moved_bytes(case, c):
    """The bytes an operation cannot do without, each element read or written once; None where arithmetic decides.

    Of a causal softmax the visible half is read, and all is written."""
    if case.op == "gemm":
        return None
    dtype = c.enum("td_dtype", case.dtype)
    if case.op == "adamw_step":
        return c.value("td_adamw_cost", case.count, dtype).bytes
    get, half = case.get, 0.5 if "causal_seq" in case else 1
    size = c.td_dtype_size(dtype)
    wider = c.td_dtype_size(c.enum("td_dtype", get("x_dtype", case.dtype)))
    count = get("count", 0)
    elements = get("rows", 0) * get("cols", get("vocab", 0))
    elements = elements or get("batch", 0) * get("heads", 0) * get("seq", 0) * get("head_dim", 0)
    rows = get("tokens", 0) * get("d_model", 0)
    return {
        "copy": 2 * count * size,
        "residual_add": 3 * count * size,
        "sgd_step": 3 * count * size,
        "global_norm": count * size,
        # p, m and v are read and written, the gradient is read and the copy written.
        "adamw_update": count * (6 * 4 + 2 * 2),
        "embedding_forward": 2 * rows * size,
        "embedding_backward": (rows + get("vocab", 0) * get("d_model", 0)) * size,
        "rmsnorm_forward": elements * (wider + size),
        "rmsnorm_backward": elements * (2 * wider + size),
        "residual_rmsnorm_forward": elements * 2 * (wider + size),
        "heads_merge": 2 * elements * size,
        "rope_forward": 2 * elements * size,
        "rope_backward": 2 * elements * size,
        "qkv_split_forward": 6 * elements * size,
        "qkv_split_backward": 6 * elements * size,
        "silu_mul_forward": 3 * elements * size,
        "silu_mul_backward": 5 * elements * size,
        "softmax_forward": (half + 1) * elements * size,
        "softmax_backward": (2 * half + 1) * elements * size,
        "cross_entropy_forward": elements * size,
        "cross_entropy_backward": 2 * elements * size,
        "cross_entropy_fused": 2 * elements * size,
    }[case.op]


# ---- both sides of each operation ----


def gemm(case, draw, c):
    trans_a, trans_b = case.get("trans_a", False), case.get("trans_b", False)
    alpha, beta = case.get("alpha", 1.0), case.get("beta", 0.0)
    out_dtype = case.get("out_dtype", case.dtype)
    rows, cols, inner = case.m, case.n, case.k
    shapes = {
        "a": (case.batch, inner, rows) if trans_a else (case.batch, rows, inner),
        "b": (case.batch, cols, inner) if trans_b else (case.batch, inner, cols),
    }
    exact = case.get("exact", False)
    if exact:  # whole numbers whose sums bf16 holds, times a few: any order of summation gives the same bits
        a, b = (draw.integers(name, shape, case.dtype, low=-1, high=2) for name, shape in shapes.items())
    else:
        a, b = (draw.normal(name, shape, case.dtype) for name, shape in shapes.items())
    before = draw.normal("c", (case.batch, rows, cols), out_dtype)
    result = draw.poisoned(before.shape, out_dtype)
    desc = c.struct(
        "td_gemm_shape", case, alpha=alpha, beta=beta, out_dtype=out_dtype,
        stride_a=rows * inner, stride_b=inner * cols, stride_c=rows * cols,
    )  # fmt: skip
    work = c.work(c.value("td_gemm_work_bytes", c.device, desc))

    def tandem():
        if beta:
            result.copy_(before)
        c.td_gemm(c.device, desc, a, b, result, work)
        return {"c": result}

    def torch_gemm(a, b, before):
        widen = before.dtype if before.dtype != a.dtype else None
        return {"c": ref.gemm(a, b, before, trans_a, trans_b, alpha, beta, widen)}

    sides = forward_sides(tandem, torch_gemm, a, b, before, rule={"c": equal("truth")} if exact else None)
    cost = c.value("td_gemm_cost", case.batch, rows, cols, inner, c.enum("td_dtype", case.dtype))
    for impl in ("c", "torch_eager"):
        sides[impl] = Side(sides[impl], flops=cost.flops)
    del sides["torch_compile"]  # which calls the same library
    return sides


def copy(case, draw, c):
    """No operation of a model, but what all others are measured by: the bytes that the device moves at best."""
    x = draw.normal("x", (case.count,), case.dtype)
    y = draw.poisoned(x.shape, case.dtype)

    def tandem():
        c.td_device_copy(c.device, y, x, x.nbytes)
        return {"y": y}

    other = torch.empty_like(x)
    return {"c": tandem, "torch_eager": lambda: {"y": other.copy_(x)}}


def embedding_forward(case, draw, c):
    ids = draw.integers("ids", (case.tokens,), high=case.vocab)
    weight = draw.normal("weight", (case.vocab, case.d_model), case.dtype)
    y = draw.poisoned((case.tokens, case.d_model), case.dtype)
    desc = c.struct("td_embedding_shape", case)

    def tandem():
        c.td_embedding_forward(c.device, desc, ids, weight, y)
        return {"y": y}

    def torch_embedding(weight):
        return {"y": ref.embedding(ids, weight)}

    return forward_sides(tandem, torch_embedding, weight, rule={"y": equal("truth")})


def embedding_backward(case, draw, c):
    ids = draw.integers("ids", (case.tokens,), high=case.vocab)
    weight = draw.normal("weight", (case.vocab, case.d_model), case.dtype)
    dy = draw.normal("dy", (case.tokens, case.d_model), case.dtype)
    before = draw.normal("before", weight.shape, case.dtype)
    dweight = draw.poisoned(weight.shape, case.dtype)
    desc = c.struct("td_embedding_shape", case)
    work = c.work(c.value("td_embedding_backward_work_bytes", c.device, desc))
    accumulate = case.get("accumulate", False)

    def tandem():
        if accumulate:
            dweight.copy_(before)
        c.td_embedding_backward(c.device, desc, ids, dy, accumulate, dweight, work)
        return {"dweight": dweight}

    def finish(grads):
        return {"dweight": grads["dweight"] + before} if accumulate else grads

    def function(weight):
        return ref.embedding(ids, weight)

    return backward_sides(tandem, ["dweight"], function, [weight], dy, finish=finish)


def rmsnorm_inputs(case, draw):
    """x and the weight, which in mixed precision are wider than the rest."""
    wider = case.get("x_dtype", case.dtype)
    x = draw.normal("x", (case.rows, case.cols), wider)
    return x, draw.normal("weight", (case.cols,), wider, mean=1.0, std=0.1)


def rmsnorm_function(x, weight):
    return ref.rmsnorm(x, weight, EPS)


def rmsnorm_library(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def rmsnorm_forward(case, draw, c):
    x, weight = rmsnorm_inputs(case, draw)
    y, rstd = draw.poisoned(x.shape, case.dtype), draw.poisoned((case.rows,), "f32")
    desc = c.struct("td_rmsnorm_shape", case, eps=EPS)

    def tandem():
        c.td_rmsnorm_forward(c.device, desc, x, weight, y, rstd)
        return {"y": y}

    def of(norm):
        return lambda x, weight: {"y": rounded(norm(x, weight), y.dtype)}

    return forward_sides(tandem, of(rmsnorm_function), x, weight, library=of(rmsnorm_library))


def rmsnorm_backward(case, draw, c):
    x, weight = rmsnorm_inputs(case, draw)
    wider, mixed = case.get("x_dtype", case.dtype), "x_dtype" in case
    dy = draw.normal("dy", x.shape, case.dtype)
    before_dx = draw.normal("before dx", x.shape, wider)
    before_dweight = draw.normal("before dweight", weight.shape, case.dtype)
    y, rstd = draw.poisoned(x.shape, case.dtype), draw.poisoned((case.rows,), "f32")
    dx, dweight = draw.poisoned(x.shape, wider), draw.poisoned(weight.shape, case.dtype)
    outputs = {"dx": dx, "dweight": dweight}
    if mixed:
        outputs["dx_rounded"] = draw.poisoned(x.shape, case.dtype)
    desc = c.struct("td_rmsnorm_shape", case, eps=EPS)
    work = c.work(c.value("td_rmsnorm_backward_work_bytes", c.device, desc))
    add = case.get("accumulate", False)
    c.td_rmsnorm_forward(c.device, desc, x, weight, y, rstd)

    def tandem():
        if add:
            dx.copy_(before_dx)
            dweight.copy_(before_dweight)
        dx_rounded = outputs.get("dx_rounded")
        c.td_rmsnorm_backward(c.device, desc, x, weight, rstd, dy, add, dx, dx_rounded, add, dweight, work)
        return outputs

    def finish(grads):
        dx, dweight = grads["dx"], rounded(grads["dweight"], before_dweight.dtype)
        if add:
            dx, dweight = dx + before_dx, dweight + before_dweight
        return {"dx": dx, "dweight": dweight} | ({"dx_rounded": rounded(dx, dy.dtype)} if mixed else {})

    def of(norm):
        return lambda x, weight: rounded(norm(x, weight), dy.dtype)

    names, inputs = ["dx", "dweight"], [x, weight]
    return backward_sides(tandem, names, of(rmsnorm_function), inputs, dy, of(rmsnorm_library), finish)


def heads_shapes(case):
    width = case.heads * case.head_dim
    split = (case.batch, case.heads, case.seq, case.head_dim)
    return width, (case.batch, case.seq, case.get("pitch", width)), split


def packed_output(case, draw):
    width, packed_shape, _ = heads_shapes(case)
    packed = draw.poisoned(packed_shape, case.dtype)
    packed[..., width:] = GAP
    return packed


def packed_by_torch(case, merged):
    width, packed_shape, _ = heads_shapes(case)
    return F.pad(merged, (0, packed_shape[-1] - width), value=GAP)


def heads_split(case, draw, c):
    width, packed_shape, split_shape = heads_shapes(case)
    packed = draw.normal("packed", packed_shape, case.dtype)
    split = draw.poisoned(split_shape, case.dtype)
    desc = c.struct("td_heads_shape", case)

    def tandem():
        c.td_heads_split(c.device, desc, packed, split)
        return {"split": split}

    def torch_split(packed):
        return {"split": ref.heads_split(packed[..., :width], case.heads)}

    return forward_sides(tandem, torch_split, packed, rule={"split": equal("truth")})


def heads_merge(case, draw, c):
    split = draw.normal("split", heads_shapes(case)[2], case.dtype)
    packed = packed_output(case, draw)
    desc = c.struct("td_heads_shape", case)

    def tandem():
        c.td_heads_merge(c.device, desc, split, packed)
        return {"packed": packed}

    def torch_merge(split):
        return {"packed": packed_by_torch(case, ref.heads_merge(split))}

    return forward_sides(tandem, torch_merge, split, rule={"packed": equal("truth")})


def rope_table(case, draw, c):
    cos, sin = (draw.poisoned((case.positions, case.head_dim // 2), "f32") for _ in "cs")

    def tandem():
        c.td_rope_table(c.device, case.positions, case.head_dim, 10_000.0, cos, sin)
        return {"cos": cos, "sin": sin}

    def torch_table(dtype):
        return dict(
            zip(
                ("cos", "sin"),
                ref.rope_table(case.positions, case.head_dim, dtype=dtype, device=draw.device),
                strict=True,
            )
        )

    return {
        "c": tandem,
        "torch_eager": lambda: torch_table(torch.float32),
        "truth": lambda: torch_table(torch.float64),
    }


def rope_forward(case, draw, c):
    width, packed_shape, split_shape = heads_shapes(case)
    packed = draw.normal("packed", packed_shape, case.dtype)
    split = draw.poisoned(split_shape, case.dtype)
    cos, sin = ref.rope_table(case.seq, case.head_dim, device=draw.device)
    desc = c.struct("td_heads_shape", case)

    def tandem():
        c.td_rope_forward(c.device, desc, packed, cos, sin, split)
        return {"split": split}

    def torch_rope(packed, cos, sin):
        return {"split": ref.rope(ref.heads_split(packed[..., :width], case.heads), cos, sin)}

    return forward_sides(tandem, torch_rope, packed, cos, sin)


def rope_backward(case, draw, c):
    width, packed_shape, split_shape = heads_shapes(case)
    packed = draw.normal("packed", (*packed_shape[:2], width), case.dtype)
    dsplit = draw.normal("dsplit", split_shape, case.dtype)
    dpacked = packed_output(case, draw)
    cos, sin = ref.rope_table(case.seq, case.head_dim, device=draw.device)
    desc = c.struct("td_heads_shape", case)

    def tandem():
        c.td_rope_backward(c.device, desc, dsplit, cos, sin, dpacked)
        return {"dpacked": dpacked}

    def function(packed):
        tables = (cos.double(), sin.double()) if packed.dtype == torch.float64 else (cos, sin)
        return ref.rope(ref.heads_split(packed, case.heads), *tables)

    def finish(grads):
        return {"dpacked": packed_by_torch(case, grads["dpacked"])}

    return backward_sides(tandem, ["dpacked"], function, [packed], dsplit, finish=finish)


def silu_mul_inputs(case, draw):
    shape = (case.rows, case.get("pitch", case.cols))
    return draw.normal("gate", shape, case.dtype, std=2.0), draw.normal("up", shape, case.dtype)


def silu_mul_forward(case, draw, c):
    gate, up = silu_mul_inputs(case, draw)
    y = draw.poisoned((case.rows, case.cols), case.dtype)
    desc = c.struct("td_rows_shape", case)

    def tandem():
        c.td_silu_mul_forward(c.device, desc, gate, up, y)
        return {"y": y}

    def torch_silu_mul(gate, up):
        return {"y": ref.silu_mul(gate[:, : case.cols], up[:, : case.cols])}

    def library(gate, up):
        return {"y": F.silu(gate[:, : case.cols]) * up[:, : case.cols]}

    return forward_sides(tandem, torch_silu_mul, gate, up, library=library)


def silu_mul_backward(case, draw, c):
    gate, up = silu_mul_inputs(case, draw)
    dy = draw.normal("dy", (case.rows, case.cols), case.dtype)
    dgate, dup = draw.poisoned(gate.shape, case.dtype), draw.poisoned(up.shape, case.dtype)
    dgate[:, case.cols :] = GAP
    dup[:, case.cols :] = GAP
    desc = c.struct("td_rows_shape", case)

    def tandem():
        c.td_silu_mul_backward(c.device, desc, gate, up, dy, dgate, dup, None)
        return {"dgate": dgate, "dup": dup}

    def finish(grads):
        pad = (0, gate.shape[1] - case.cols)
        return {name: F.pad(grad, pad, value=GAP) for name, grad in grads.items()}

    inputs = [x[:, : case.cols].contiguous() for x in (gate, up)]
    return backward_sides(
        tandem, ["dgate", "dup"], ref.silu_mul, inputs, dy, lambda gate, up: F.silu(gate) * up, finish
    )


def residual_add(case, draw, c):
    a, b = (draw.normal(name, (case.count,), case.dtype) for name in "ab")
    y = draw.poisoned((case.count,), case.dtype)
    dtype = c.enum("td_dtype", case.dtype)

    def tandem():
        c.td_residual_add(c.device, case.count, dtype, a, b, y)
        return {"y": y}

    return forward_sides(tandem, lambda a, b: {"y": ref.residual_add(a, b)}, a, b, rule={"y": equal()})


def softmax_function(case):
    causal_seq = case.get("causal_seq", 0)
    return (lambda x: ref.causal_softmax(x, causal_seq)) if causal_seq else ref.softmax


def softmax_forward(case, draw, c):
    x = draw.normal("x", (case.rows, case.cols), case.dtype, std=2.0)
    y = draw.poisoned(x.shape, case.dtype)
    desc = c.struct("td_softmax_shape", case)
    function = softmax_function(case)

    def tandem():
        c.td_softmax_forward(c.device, desc, x, y)
        return {"y": y}

    return forward_sides(
        tandem, lambda x: {"y": function(x)}, x, library=softmax_library(case, draw.device, True)
    )


def softmax_library(case, device, outputs=False):
    """PyTorch's fused softmax, of scores that were masked before."""
    if "causal_seq" in case:
        visible = ref.causal_mask(case.causal_seq, case.cols, device)
        bias = torch.zeros(visible.shape, device=device).masked_fill(~visible, float("-inf"))
        bias = bias.to(DRAWN[case.dtype]).repeat(case.rows // case.causal_seq, 1)

    def library(x):
        y = (x + bias if "causal_seq" in case else x).softmax(-1)
        return {"y": y} if outputs else y

    return library


def softmax_backward(case, draw, c):
    scale = 0.125
    x = draw.normal("x", (case.rows, case.cols), case.dtype, std=2.0)
    dy = draw.normal("dy", x.shape, case.dtype)
    y, dx = draw.poisoned(x.shape, case.dtype), draw.poisoned(x.shape, case.dtype)
    desc = c.struct("td_softmax_shape", case)
    c.td_softmax_forward(c.device, desc, x, y)

    def tandem():
        c.td_softmax_backward(c.device, desc, scale, y, dy, dx)
        return {"dx": dx}

    def finish(grads):
        return {"dx": grads["dx"] * scale}

    return backward_sides(
        tandem, ["dx"], softmax_function(case), [x], dy, softmax_library(case, draw.device), finish
    )


def cross_entropy_inputs(case, draw):
    logits = draw.normal("logits", (case.rows, case.vocab), case.dtype, std=2.0)
    return logits, draw.integers("targets", (case.rows,), high=case.vocab)


def cross_entropy_forward(case, draw, c):
    logits, targets = cross_entropy_inputs(case, draw)
    loss, lse = draw.poisoned((1,), "f32"), draw.poisoned((case.rows,), "f32")
    desc = c.struct("td_cross_entropy_shape", case)
    work = c.work(c.value("td_cross_entropy_work_bytes", c.device, desc))

    def tandem():
        c.td_cross_entropy_forward(c.device, desc, logits, targets, loss, lse, work)
        return {"loss": loss, "lse": lse}

    def torch_cross_entropy(logits):
        loss, lse = ref.cross_entropy(logits, targets)
        return {"loss": loss.reshape(1), "lse": lse}

    def library(logits):
        wide = logits.float()
        return {"loss": F.cross_entropy(wide, targets).reshape(1), "lse": wide.logsumexp(-1)}

    return forward_sides(tandem, torch_cross_entropy, logits, library=library)


def cross_entropy_backward(case, draw, c):
    logits, targets = cross_entropy_inputs(case, draw)
    loss, lse = draw.poisoned((1,), "f32"), draw.poisoned((case.rows,), "f32")
    dlogits = draw.poisoned(logits.shape, case.dtype)
    desc = c.struct("td_cross_entropy_shape", case)
    work = c.work(c.value("td_cross_entropy_work_bytes", c.device, desc))
    c.td_cross_entropy_forward(c.device, desc, logits, targets, loss, lse, work)

    def tandem():
        c.td_cross_entropy_backward(c.device, desc, logits, targets, lse, 1.0, dlogits)
        return {"dlogits": dlogits}

    def function(logits):
        return ref.cross_entropy(logits, targets)[0]

    def library(logits):
        return F.cross_entropy(logits.float(), targets)

    return backward_sides(
        tandem, ["dlogits"], function, [logits], torch.tensor(1.0, device=draw.device), library
    )


def adamw_step(case, draw, c):
    p, g = draw.normal("p", (case.count,), case.dtype), draw.normal("g", (case.count,), case.dtype)
    if case.step > 1:
        m, v = draw.normal("m", (case.count,), "f32", std=0.3), draw.uniform("v", (case.count,), "f32")
    else:
        m, v = (torch.zeros(case.count, device=draw.device) for _ in range(2))
    ours = [p.clone(), m.clone(), v.clone()]
    desc = c.struct("td_adamw", case, **ADAMW)
    dtype = c.enum("td_dtype", case.dtype)

    def tandem():
        if "time" not in case.measure:
            for mine, before in zip(ours, (p, m, v), strict=True):
                mine.copy_(before)
        c.td_adamw_step(c.device, desc, case.count, dtype, ours[0], g, ours[1], ours[2])
        return dict(zip("pmv", ours, strict=True))

    def torch_adamw(p, g, m, v):
        return dict(
            zip("pmv", ref.adamw_step(p, g, m, v, case.step, variant=case.variant, **ADAMW), strict=True)
        )

    if "time" not in case.measure:
        return forward_sides(tandem, torch_adamw, p, g, m, v)
    return {
        "c": tandem,
        "torch_eager": optimizer(p, g, foreach=True),
        "torch_library": optimizer(p, g, fused=True),
        "torch_compile": optimizer(p, g, compiled=True, foreach=True, capturable=p.is_cuda),
    }


def optimizer(p, g, compiled=False, **how):
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g
    adamw = torch.optim.AdamW([weight], **how)
    update = Compiled(adamw.step) if compiled else adamw.step

    def step():
        update()
        return {"p": weight.detach()}

    return step


def sgd_step(case, draw, c):
    p, g = draw.normal("p", (case.count,), case.dtype), draw.normal("g", (case.count,), case.dtype)
    ours, lr = p.clone(), float(torch.tensor(ADAMW["lr"]))  # an f32 argument
    dtype = c.enum("td_dtype", case.dtype)

    def tandem():
        if "time" not in case.measure:
            ours.copy_(p)
        c.td_sgd_step(c.device, lr, case.count, dtype, ours, g)
        return {"p": ours}

    if "time" not in case.measure:
        return forward_sides(tandem, lambda p, g: {"p": ref.sgd_step(p, g, lr)}, p, g)
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g
    sgd = torch.optim.SGD([weight], lr=lr, foreach=True)

    def torch_sgd():
        sgd.step()
        return {"p": weight.detach()}

    return {"c": tandem, "torch_eager": torch_sgd}


# Each function of ops.h and the cases that judge it.
OPERATIONS = {
    "copy": copy,
    "gemm": gemm,  # td_gemm
    "embedding_forward": embedding_forward,
    "embedding_backward": embedding_backward,
    "rmsnorm_forward": rmsnorm_forward,
    "rmsnorm_backward": rmsnorm_backward,
    "heads_split": heads_split,
    "heads_merge": heads_merge,
    "rope_table": rope_table,
    "rope_forward": rope_forward,
    "rope_backward": rope_backward,
    "silu_mul_forward": silu_mul_forward,
    "silu_mul_backward": silu_mul_backward,
    "residual_add": residual_add,
    "softmax_forward": softmax_forward,
    "softmax_backward": softmax_backward,
    "cross_entropy_forward": cross_entropy_forward,
    "cross_entropy_backward": cross_entropy_backward,
    "adamw_step": adamw_step,
    "sgd_step": sgd_step,
    # td_residual_rmsnorm_forward, td_qkv_split_forward, td_qkv_split_backward, td_round, td_cross_entropy_fused,
    # td_global_norm, td_adamw_update, td_adamw_advance
    **_ops_fused.OPERATIONS,
}


def report(page, records):
    _ops_pages.report(page, records)
