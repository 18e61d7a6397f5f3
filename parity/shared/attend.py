"""What attention and flash have in common: the two sides of any way to attend."""

import math

import torch

from parity.core import Case, Side, equal, grid
from ref.ops import tf32_matmul

# C's ways to attend, by the prefix of their functions.
WAYS = {"naive": "td_attention_naive", "flash": "td_flash"}
GRADIENTS = ("dq", "dk", "dv")
PASSES = ("forward", "backward")
BATCH = 8  # the handout's, without a head dimension
HEAD_DIM = 64  # of curves, and of tables of one head size
HEAD_DIMS = [16, 32, 64, 128]
# Shapes that tiles do not divide, for the errors of naive and compiled attention.
RAGGED = (
    dict(batch=2, heads=3, seq=16, head_dim=16),
    dict(batch=1, heads=2, seq=127, head_dim=64),
    dict(batch=2, heads=2, seq=129, head_dim=80),
    dict(batch=1, heads=4, seq=37, seq_k=101, head_dim=33),
)
SEQS = {"cpu": [256, 1024], "cuda": [256, 1024, 4096], "full": [256, 1024, 4096, 8192, 16384]}
END = 32768  # tokens, at which a GPU's memory does not hold the formula's matrices; one head size


def handout_grid(profile, device):
    """The points of the handout's grid that a profile times: of the quick one on a CPU a quarter."""
    head_dims = [64] if (profile, device) == ("quick", "cpu") else HEAD_DIMS
    seqs = SEQS["full" if profile == "full" else device]
    end = grid(seq=[END], head_dim=[HEAD_DIM], phase=PASSES) if (profile, device) == ("full", "cuda") else []
    return [*grid(seq=seqs, head_dim=head_dims, phase=PASSES), *end]


def matrix_bytes(seq):
    """Of a score matrix: how a case is run, not what it reports."""
    return 4 * BATCH * seq**2


def grid_case(deliverable, profile, device, seq, head_dim, phase, *, compiling=0.5, **how):
    """A point of the handout's grid: 100 calls, on a CPU fewer for long ones."""
    keys = dict(batch=BATCH, heads=1, seq=seq, head_dim=head_dim, dtype="f32", causal=False, mask="inf")
    matrix, slow = matrix_bytes(seq), 3 if phase == "backward" else 1
    how["measure"] = "time memory"
    if device == "cuda":
        repeats = 100 if profile == "full" else 20
        seconds = compiling + repeats * matrix / 2**33 * 0.1 * slow
        how |= dict(in_turn=matrix >= 2**33, stage=3)
    else:
        repeats = {"quick": 10, "standard": 20, "full": 100}[profile] if seq <= 1024 else 3
        seconds = compiling + (repeats + 3) * 2 * slow * max(matrix, 2**23) / 2**28
        how["alone"] = matrix >= 2**28
    return Case(deliverable, seconds=seconds, repeats=repeats, **how, **keys, **{"pass": phase})


def inputs(case, draw):
    queries = (case.batch, case.heads, case.seq, case.head_dim)
    keys = (case.batch, case.heads, case.get("seq_k", case.seq), case.head_dim)
    q = draw.normal("q", queries, case.dtype)
    k, v = draw.normal("k", keys, case.dtype), draw.normal("v", keys, case.dtype)
    return q, k, v, draw.normal("dout", queries, case.dtype)


def judged(case, draw, c, way, tensors, name, shape, dtype):
    """C's forward and backward into poisoned outputs. Name, shape and dtype are of what forward saves."""
    tandem = TandemAttention(case, c, way, tensors, empty=lambda x: draw.poisoned(x.shape, case.dtype))
    tandem.blocks["saved"] = draw.poisoned(shape, dtype)
    return lambda: tandem.forward() | {name: tandem.blocks["saved"]} | tandem.backward()


def error_sides(case, call, formula, tensors):
    """C's call and PyTorch's formula. In TF32 the reference is a side that rounds the inputs of each product."""
    sides = {
        "c": call,
        "torch_eager": lambda: formula(*tensors),
        "truth": lambda: formula(*(x.double() for x in tensors)),
    }
    if case.dtype == "tf32":
        tf32 = {"torch_tf32": lambda: formula(*tensors, matmul=tf32_matmul), "reference": "torch_tf32"}
    return sides | (tf32 if case.dtype == "tf32" else {})


def by_autograd(attend, q, k, v, dout):
    """o and the gradients of o * dout."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(*leaves)
    grads = torch.autograd.grad(o, leaves, dout)
    return {"o": o.detach(), **dict(zip(GRADIENTS, grads, strict=True))}


def nan_sides(case, draw, c, way, saved_name, saved_shape, saved_dtype, block):
    """Where a NaN in row `nan_row` of the input `nan` arrives, as attention.h says. Of every output: [elements that
    depend on it and are no NaN, NaNs that could not depend on it even if the mask hid only whole blocks]."""
    clean = inputs(case, draw)
    of = dict(zip(("q", "k", "v", "dout"), clean, strict=True))
    head, column = (case.batch - 1, case.heads - 1), case.head_dim // 2
    poisoned = of | {case.nan: of[case.nan].clone()}
    poisoned[case.nan][(*head, case.nan_row, column)] = float("nan")
    call = judged(case, draw, c, way, tuple(poisoned.values()), saved_name, saved_shape, saved_dtype)
    least, most = (nan_reach(case, column, rows) for rows in (1, block))

    def placed():
        counts = {}
        for name, value in call().items():
            if name not in least:
                continue  # what naive attention saves is its own
            found = value.isnan().cpu()
            other = found.flatten(0, 1)[:-1]
            found = found[head]
            missing, stray = (least[name] & ~found).sum(), (found & ~most[name]).sum() + other.sum()
            counts[name] = torch.stack([missing, stray])
        return counts

    names = [name for name in least if name != "lse" or way == "flash"]
    nowhere = {name: torch.zeros(2, dtype=torch.float64) for name in names}
    return {"c": placed, "truth": nowhere, "rule": {"*": equal("truth")}}


def nan_reach(case, column, block):
    """Masks of the elements that depend on a NaN, where query i sees key j if j // block <= i // block; 0: no mask."""
    queries, keys = torch.arange(case.seq), torch.arange(case.get("seq_k", case.seq))
    sees = torch.ones(len(queries), len(keys), dtype=torch.bool)
    if case.causal and block:
        sees = keys[None, :] // block <= queries[:, None] // block
    from_query = case.nan in ("q", "dout")
    rows = queries == case.nan_row if from_query else sees[:, case.nan_row]
    seen = sees[rows].any(dim=0)
    all_columns = torch.ones(case.head_dim, dtype=torch.bool)
    own = torch.arange(case.head_dim) == column
    columns = {"v": (own, ~all_columns), "dout": (~all_columns, own)}
    o, dv = columns.get(case.nan, (all_columns, all_columns))
    return {
        "o": rows[:, None] & o,
        "lse": rows & (case.nan in ("q", "k")),
        "dq": rows[:, None] & all_columns,
        "dk": seen[:, None] & all_columns,
        "dv": seen[:, None] & dv,
    }


def sampled(case, tensors, rows=8):
    """Some queries of each head in float64: their rows of o and dq."""

    def sample(outputs):
        q, k, v, dout = tensors
        at = torch.linspace(0, case.seq - 1, min(rows, case.seq), device=q.device).round().long()
        few, keys, values, cotangent = (x.double() for x in (q[:, :, at], k, v, dout[:, :, at]))
        scores = few @ keys.mT / math.sqrt(case.head_dim)
        if case.causal:
            hidden = torch.arange(keys.shape[-2], device=q.device) > at[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        p = torch.softmax(scores, -1)
        o = p @ values
        dp = cotangent @ values.mT
        dq = p * (dp - (cotangent * o).sum(-1, keepdim=True)) @ keys / math.sqrt(case.head_dim)
        return {name: (outputs[name][:, :, at], x) for name, x in (("o", o), ("dq", dq)) if name in outputs}

    return sample


class TandemAttention:
    """C's forward and backward, to be timed and weighed. Blocks are allocated at the first call and kept until the side
    is closed; `fleeting`: until the call ends, so that sides can take turns which each need most of the memory.
    `empty` makes each output."""

    def __init__(self, case, c, way, tensors, fleeting=False, empty=torch.empty_like):
        self.c, self.prefix, self.fleeting, self.empty = c, WAYS[way], fleeting, empty
        self.q, self.k, self.v, self.dout = tensors
        self.desc = c.struct("td_attention_shape", case)
        self.sizes = c.value(f"{self.prefix}_sizes", c.device, self.desc)
        self.blocks = {}
        self.o = None

    def side(self, phase, **options):
        def call():
            forward = {} if phase == "backward" else self.forward()
            outputs = forward if phase == "forward" else forward | self.backward()
            if self.fleeting:
                self.close()
            return outputs

        before = self.forward if phase == "backward" else None
        return Side(call, before=before, close=self.close, **options)

    def forward(self):
        self.o = self.empty(self.q)
        saved, work = self.block("saved"), self.block("forward_work")
        forward = getattr(self.c, f"{self.prefix}_forward")
        forward(self.c.device, self.desc, self.q, self.k, self.v, self.o, saved, work)
        return {"o": self.o}

    def backward(self):
        inputs = (self.q, self.k, self.v)
        grads = [*map(self.empty, inputs)]
        saved, work = self.block("saved"), self.block("backward_work")
        backward = getattr(self.c, f"{self.prefix}_backward")
        backward(self.c.device, self.desc, *inputs, self.o, self.dout, saved, *grads, work)
        return dict(zip(GRADIENTS, grads, strict=True))

    def block(self, name):
        nbytes = getattr(self.sizes, name)
        if name not in self.blocks and nbytes:
            self.blocks[name] = self.c.work(nbytes)
        return self.blocks.get(name)

    def close(self):
        for block in self.blocks.values():
            self.c.free(block)
        self.blocks.clear()


class Eager:
    """PyTorch's forward, which keeps its graph, and backward."""

    def __init__(self, attend, tensors):
        *qkv, self.dout = tensors
        self.attend = attend
        self.leaves = [x.detach().requires_grad_() for x in qkv]
        self.graph = []

    def side(self, phase, **options):
        def call():
            if phase == "forward":
                return {"o": self.attend(*self.leaves)}
            if phase == "both":
                self.forward()
            return self.backward()

        before = self.forward if phase == "backward" else None
        return Side(call, before=before, close=self.graph.clear, **options)

    def forward(self):
        self.graph[:] = [self.attend(*self.leaves)]

    def backward(self):
        o = self.graph.pop()
        grads = torch.autograd.grad(o, self.leaves, self.dout)
        return {"o": o.detach(), **dict(zip(GRADIENTS, grads, strict=True))}


def account(case, c, matrices):
    element_bytes = c.td_dtype_size(c.enum("td_dtype", case.dtype))
    return c.value(
        "td_account_attention_memory", case.batch * case.heads, case.seq, case.get("seq_k", case.seq),
        case.head_dim, element_bytes, matrices, case.causal,
    )  # fmt: skip
