"""The sides of the matrix product."""

from parity.core import Side, equal
from parity.ops.sides import forward_sides
from ref import ops as ref


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
