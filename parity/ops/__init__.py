"""Every operation of impl/ops/ops.h, forward and backward, against PyTorch; times at the small model's shapes."""

from itertools import product

from parity.core import Case, grid
from parity.ops import fused, gemm, layout, optimizers, rows
from parity.ops.page import report
from ref.transformer import SIZES

__all__ = ["cases", "report", "run"]

DTYPES = {"cpu": ["f32", "bf16"], "cuda": ["f32", "bf16", "f16"]}
SMALL_NUMEL = 128_625_408
PARTS = (gemm, layout, rows, fused, optimizers)  # each operation is a function of one, by its name


def shaped(names, *extents):
    """Shapes: extents by these names."""
    return [dict(zip(names.split(), row, strict=True)) for row in extents]


# Per operation: a row of one, the model's own ratios, and ragged sizes on both sides of a vector register.
WAYS = ("forward", "backward")
TRANSPOSED = [*grid(trans_a=[False, True], trans_b=[False, True])]
GEMMS = shaped("batch m n k", (1, 1, 1, 1), (1, 128, 192, 64), (3, 37, 53, 80), (2, 17, 130, 1009))
RESIDUALS = shaped("rows cols", (33, 80), (127, 1009))
COUNTS = (1, 1009, 98_304)
SHAPES = {
    # With 257 tokens every row of the table is read several times.
    "embedding": shaped("tokens vocab d_model", (1, 1, 1), (512, 1000, 64), (257, 53, 83), (2049, 53, 16)),
    "rmsnorm": shaped("rows cols", (1, 3), (67, 3), (256, 80), (127, 1009)),
    "qkv_split": [
        *shaped("batch heads seq head_dim", (1, 1, 1, 2), (2, 12, 128, 64), (3, 5, 37, 80), (2, 1, 1037, 16)),
        dict(batch=2, heads=3, seq=19, head_dim=16, pitch=3 * 3 * 16 + 7),
    ],
    "silu_mul": [*shaped("rows cols", (1, 1), (128, 3072)), dict(rows=33, cols=1009, pitch=2018)],
    "softmax": [
        *shaped("rows cols", (1, 1), (256, 128), (33, 1009)),
        *shaped("rows cols causal_seq", (2 * 128, 128, 128), (3 * 37, 53, 37)),
    ],
    "cross_entropy": shaped("rows vocab", (1, 1), (128, 10_000), (37, 1009)),
}


def cases(profile, device):
    yield from error_cases(DTYPES[device])
    for shape, trans in product(GEMMS[1:3], TRANSPOSED) if device == "cuda" else ():
        yield operation("gemm", **shape, **trans, dtype="tf32")
    yield from timed_cases(profile, device)


def error_cases(dtypes):
    for dtype in dtypes:
        for shape, trans in product(GEMMS, TRANSPOSED):
            yield operation("gemm", **shape, **trans, dtype=dtype)
        yield operation("gemm", batch=2, m=33, n=65, k=80, trans_b=True, alpha=0.5, beta=1.0, dtype=dtype)
        yield operation("gemm", batch=1, m=64, n=80, k=512, trans_a=True, beta=1.0, dtype=dtype)
        yield operation("gemm", batch=2, m=31, n=47, k=63, exact=True, dtype=dtype)
        for name, shapes in SHAPES.items():
            for shape, way in product(shapes, WAYS):
                yield operation(f"{name}_{way}", **shape, dtype=dtype)
        yield operation("embedding_backward", tokens=100, vocab=53, d_model=80, accumulate=True, dtype=dtype)
        # In a single column dx is a difference of equal numbers: what eps leaves of it is noise.
        yield operation("rmsnorm_forward", rows=1, cols=1, dtype=dtype)
        yield operation("rmsnorm_backward", rows=33, cols=80, accumulate=True, dtype=dtype)
        for way in WAYS:
            apart = dict(rows=37, spread=True, dtype=dtype)
            yield operation(f"softmax_{way}", cols=53, **apart)
            yield operation(f"cross_entropy_{way}", vocab=53, **apart)
            yield operation(f"rmsnorm_{way}", cols=53, **apart)
        for shape in RESIDUALS:
            yield operation("residual_rmsnorm_forward", **shape, dtype=dtype)
        for count in COUNTS:
            yield from vector_cases(count, dtype)
        yield from mixed_cases(dtype) if dtype != "f32" else ()
    for name, function in [named for part in PARTS for named in vars(part).items()]:
        yield from (operation(name, **s, dtype=d) for s in getattr(function, "shapes", []) for d in dtypes)
    yield operation("gemm", batch=2, m=33, n=65, k=80, trans_b=True, dtype="bf16", out_dtype="f32")
    for way in WAYS:
        yield operation(f"softmax_{way}", rows=9, cols=4099, dtype="f32")
    for positions, head_dim in [(1, 2), (128, 64), (1009, 80), (2048, 128)]:
        yield operation("rope_table", positions=positions, head_dim=head_dim)
    for warmup, end in [(7, 21), (0, 1), (3, 3)]:
        yield operation("cosine_schedule", max=1.0, min=0.1, warmup=warmup, end=end)


def vector_cases(count, dtype):
    for name in ("sgd_step", "global_norm"):
        yield operation(name, count=count, dtype=dtype)
    for max_norm in (0.1, 1000.0):  # below every norm of them, and above
        yield operation("update_clip", count=count, max_norm=max_norm, dtype=dtype)
    further = (2, 1000, 10**6) if (count, dtype) == (1009, "f32") else ()
    for variant in ("course2025", "course2026", "torch"):
        for step in (1, 3, *further):
            yield operation("adamw_step", count=count, variant=variant, step=step, dtype=dtype)
        for other in (dict(weight_decay=0.0), dict(beta1=0.0), dict(lr=0.0)) if further else ():
            yield operation("adamw_step", count=count, variant=variant, step=3, dtype=dtype, **other)


def mixed_cases(dtype):
    """Of 16 bits, with f32 beside them."""
    wide = dict(x_dtype="f32", dweight_dtype="f32")  # gradients of many micro-batches
    yield operation("rmsnorm_backward", rows=257, cols=768, accumulate=True, dtype=dtype, **wide)
    for shape in RESIDUALS:
        for name in ("rmsnorm_forward", "rmsnorm_backward", "residual_rmsnorm_forward"):
            yield operation(name, **shape, dtype=dtype, x_dtype="f32")
        yield operation("rmsnorm_backward", **shape, dtype=dtype, x_dtype="f32", accumulate=True)
    for count in COUNTS:
        yield operation("round", count=count, dtype="f32", out_dtype=dtype)
        yield operation("round", count=count, dtype=dtype, out_dtype="f32")
        for on_device, step in product([False, True], (3, 1000) if count == 1009 else (3,)):
            keys = dict(variant="course2025", step=step, grad_dtype=dtype, on_device=on_device)
            yield operation("adamw_update", count=count, dtype="f32", **keys)


def timed_cases(profile, device):
    """The operations of `small` at 512 tokens on a CPU. On a GPU those of the largest and the smallest model at 2,048
    tokens, and what the GPU can do at best. Profiles that are not full have fewer shapes and dtypes."""
    gpu, full = device == "cuda", profile == "full"
    quick = profile == "quick" and not gpu
    batch, seq, vocab = 4, 512 if gpu else 128, 10_000
    tokens = batch * seq
    if gpu:
        for power in [20, 22, 24, 26, 28]:
            yield operation("copy", measure="time", seconds=0.3, count=2**power, dtype="f32")
        for dtype in ["bf16", "f16", "tf32", "f32"]:
            square = dict(batch=1, m=8192, n=8192, k=8192, trans_a=False, trans_b=True)
            yield operation("gemm", measure="time", seconds=1.5, **square, dtype=dtype)
    for size in ["small"] if not gpu else ["2.7B", "small"] if full else ["2.7B"]:
        d_model, d_ff, _, heads = SIZES[size]
        if gpu:
            of_gemms = ["bf16", "tf32", "f32"] if full else ["bf16"]
            dtypes = ["bf16", "f32"] if full and size == "2.7B" else ["bf16"]
        else:
            of_gemms = dtypes = ["f32"] if quick else DTYPES["cpu"]
        gemms = [*products(tokens, d_model, d_ff, vocab)]
        for dtype in of_gemms:
            for shape in (gemms[1], gemms[-1]) if quick else gemms:
                yield timed("gemm", measure="time" if gpu else "error time", **shape, dtype=dtype)
        norm = dict(rows=tokens, cols=d_model)
        both = {
            "embedding": dict(tokens=tokens, vocab=vocab, d_model=d_model),
            "rmsnorm": norm,
            "silu_mul": dict(rows=tokens, cols=d_ff),
            "softmax": dict(rows=batch * heads * seq, cols=seq, causal_seq=seq),
            "cross_entropy": dict(rows=tokens, vocab=vocab),
        }
        split = dict(batch=batch, heads=heads, seq=seq, head_dim=d_model // heads)
        rest = {"residual_add": dict(count=tokens * d_model)}
        if quick:  # without the operations that take the longest to judge
            del both["embedding"], both["cross_entropy"]
        else:
            rest |= {"qkv_split_forward": split, "qkv_split_backward": split}
        if gpu:
            rest["residual_rmsnorm_forward"] = norm
            if size == "small":
                del both["cross_entropy"]  # which has the same shape in every size
        for dtype in dtypes:
            for name, shape in both.items():
                yield timed(f"{name}_forward", **shape, dtype=dtype)
                yield timed(f"{name}_backward", **shape, dtype=dtype)
            for name, shape in rest.items():  # keys in the order of the records
                yield timed(name, **({"dtype": dtype} | shape if gpu else shape | {"dtype": dtype}))
            if gpu and dtype != "f32":  # as a step in mixed precision has them
                for name in ("residual_rmsnorm_forward", "rmsnorm_backward"):
                    yield timed(name, dtype=dtype, x_dtype="f32", **norm)
    yield from timed_updates(gpu, quick)


def products(tokens, d_model, d_ff, vocab):
    """Forward of the projections, both sides of the feed-forward and the head; then the two gradients of w1."""
    for n, k in [(d_model, d_model), (d_ff, d_model), (d_model, d_ff), (vocab, d_model)]:
        yield dict(batch=1, m=tokens, n=n, k=k, trans_a=False, trans_b=True)
    yield dict(batch=1, m=tokens, n=d_model, k=d_ff, trans_a=False, trans_b=False)
    yield dict(batch=1, m=d_ff, n=d_model, k=tokens, trans_a=True, trans_b=False)


def timed_updates(gpu, quick):
    """Of all weights of `small`; quick: of fewer."""
    count = 2**22 if quick else SMALL_NUMEL
    adamw = dict(variant="torch", step=1)
    if not gpu:
        how = dict(measure="time", seconds=count / 5e6, repeats=5, needs_bytes=56 * count)
        yield operation("adamw_step", **how, count=count, dtype="f32", **adamw)
        yield operation("sgd_step", **how, count=count, dtype="f32")
        return
    how = dict(measure="time", seconds=6, needs_bytes=80 * count)
    for dtype in ["f32", "bf16"]:
        yield operation("adamw_step", **how, count=count, dtype=dtype, **adamw)
    yield operation(
        "adamw_update", **how, count=count, dtype="f32", **adamw, grad_dtype="bf16", on_device=True
    )
    yield operation("global_norm", measure="error time", seconds=3, count=count, dtype="bf16")


def operation(op, seconds=0.1, **keys):
    return Case("operations", seconds=seconds, op=op, **keys)


def timed(op, measure="error time", **keys):
    return operation(op, measure=measure, seconds=0.7, **keys)


def run(case, draw, c):
    sides = next(getattr(part, case.op) for part in PARTS if hasattr(part, case.op))(case, draw, c)
    # Compiling takes seconds, and needs a C++ compiler on a CPU: only timed cases of a GPU have it.
    if draw.device.type == "cpu" or "time" not in case.measure:
        sides.pop("torch_compile", None)
    return sides
