"""Effects of low precision: the handout's accumulation loops, and its toy model under autocast."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def running_sums(
    count: int,
    value: float,
    addend: torch.dtype,
    accumulator: torch.dtype,
    cast_first: bool = False,
) -> list[float]:
    """The total after each addition. Without cast_first the addition itself promotes the addend."""
    total = torch.tensor(0, dtype=accumulator)
    totals = []
    for _ in range(count):
        x = torch.tensor(value, dtype=addend)
        total += x.to(accumulator) if cast_first else x
        totals.append(total.item())
    return totals


def accumulate(*args, **kwargs) -> float:
    return running_sums(*args, **kwargs)[-1]


def handout_loops(count: int = 1000, value: float = 0.01) -> list[float]:
    f32, f16 = torch.float32, torch.float16
    return [
        accumulate(count, value, addend=f32, accumulator=f32),
        accumulate(count, value, addend=f16, accumulator=f16),
        accumulate(count, value, addend=f16, accumulator=f32),
        accumulate(count, value, addend=f16, accumulator=f32, cast_first=True),
    ]


def kahan(count: int, value: float, addend: torch.dtype, accumulator: torch.dtype) -> float:
    total = torch.tensor(0, dtype=accumulator)
    lost = torch.tensor(0, dtype=accumulator)
    for _ in range(count):
        x = torch.tensor(value, dtype=addend).to(accumulator) - lost
        bigger = total + x
        lost = (bigger - total) - x
        total = bigger
    return total.item()


def pairwise(count: int, value: float, addend: torch.dtype, accumulator: torch.dtype) -> float:
    """The sum of recursive halves. Two parts of the same length have the same sum, so each length is summed once."""
    x = torch.tensor(value, dtype=addend).to(accumulator)

    def total(n: int) -> Tensor:
        if n <= 1:
            return x if n else torch.zeros_like(x)
        if n not in known:
            known[n] = total(n // 2) + total(n - n // 2)
        return known[n]

    known: dict[int, Tensor] = {}
    return total(count).item()


class ToyModel(nn.Module):
    def __init__(self, d_in: int = 5, d_out: int = 3):
        super().__init__()
        self.fc1 = nn.Linear(d_in, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


def losses(logits: Tensor, loss: str) -> Tensor:
    if loss == "cross_entropy_loss":
        return F.cross_entropy(logits, rows(logits))
    if loss == "mse_loss":
        return F.mse_loss(logits, torch.zeros_like(logits, dtype=torch.float32))
    return logits.mean()


@contextlib.contextmanager
def autocast(device: str, low: torch.dtype):
    """torch.autocast. For "cuda" it also works without a GPU.

    Fake tensors have shape, dtype and device but no data, and use the dispatcher like real ones. Setting the state
    directly avoids torch.autocast's check for a GPU.
    """
    if device == "cpu":
        with torch.autocast("cpu", low):
            yield
        return
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, low)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()


def toy_dtypes(device: str, low: torch.dtype, loss: str) -> dict[str, torch.dtype]:
    """The dtype of each component of the toy model under autocast, seen by hooks.

    A fake device has no autograd. Its gradients get the dtypes of their parameters, by autograd's rule.
    """
    with autocast(device, low):
        model = without_values(ToyModel, device)
        parameter = model.fc1.weight
        seen = {"parameters": parameter.dtype}

        def watch(name: str):
            return lambda module, inputs, output: seen.update({name: output.dtype})

        named = {"fc1": model.fc1, "relu": model.relu, "ln": model.ln, "logits": model.fc2}
        for name, module in named.items():
            module.register_forward_hook(watch(name))
        value = losses(model(torch.ones(4, 5, device=device)), loss)
        seen["loss"] = value.dtype
        if value.requires_grad:
            value.backward()
        seen["gradients"] = parameter.dtype if parameter.grad is None else parameter.grad.dtype
    return seen


def without_values(build, device: str) -> nn.Module:
    """A model without initial values, because a fake device has no random numbers."""
    with torch.device("meta"):
        model = build()
    for module in model.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            p = nn.Parameter(torch.empty(meta.shape, device=device), requires_grad=device == "cpu")
            setattr(module, name, p)
    return model


def op_dtype(device: str, low: torch.dtype, op: str, inputs: list[torch.dtype]) -> torch.dtype | None:
    """The dtype of an operation's result for 4 x 4 matrices under autocast; None: autocast refuses to run it."""
    try:
        with autocast(device, low):
            tensors = [torch.full((4, 4), 0.5, dtype=dtype, device=device) for dtype in inputs]
            return OPS[op][1](*tensors).dtype
    except RuntimeError as error:
        if "unsafe to autocast" in str(error):
            return None
        raise


def registered(device: str) -> set[str]:
    """The operators, without overloads, for which this PyTorch has an autocast kernel.

    Builds with cuDNN have one more, _cudnn_rnn. It is left out, because it runs in f16 even under autocast to bf16.
    """
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
    found = {name.removeprefix("aten::").split(".")[0] for name in names if name.startswith("aten::")}
    return found - {"_cudnn_rnn"}


def rows(x: Tensor) -> Tensor:
    """The class 0 for each row of x."""
    return torch.zeros(x.shape[0], dtype=torch.long, device=x.device)


def indices(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)


def matrices(*tensors: Tensor) -> list[Tensor]:
    """Each tensor as a batch of one matrix."""
    return [x.unsqueeze(0) for x in tensors]


def images(*tensors: Tensor) -> list[Tensor]:
    return [x.unsqueeze(0).unsqueeze(0) for x in tensors]


def row(x: Tensor) -> Tensor:
    return x.select(0, 0)


UNARY = "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan sum prod trace norm"
UNLISTED = "relu sigmoid tanh sqrt mean abs"
ALONG = "softmax log_softmax cumsum cumprod logsumexp"
BINARY = "matmul mm atan2 add mul sub cdist dist"
PAIRED = """linear mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    poisson_nll_loss soft_margin_loss hinge_embedding_loss cosine_similarity"""

# Listed and unlisted operations by the dispatcher's names: the number of matrices of each, and a call.
OPS = {
    **{op: (1, getattr(torch, op)) for op in f"{UNARY} {UNLISTED}".split()},
    **{op: (1, lambda x, op=op: getattr(torch, op)(x, -1)) for op in ALONG.split()},
    **{op: (2, getattr(torch, op)) for op in BINARY.split()},
    **{op: (2, getattr(F, op)) for op in PAIRED.split()},
    **{op: (3, getattr(torch, op)) for op in ("addmm", "addcmul", "addcdiv")},
    "addbmm": (3, lambda c, a, b: torch.addbmm(c, *matrices(a, b))),
    "addmv": (3, lambda c, a, b: torch.addmv(row(c), a, row(b))),
    "addr": (3, lambda c, a, b: torch.addr(c, row(a), row(b))),
    "baddbmm": (3, lambda *cab: torch.baddbmm(*matrices(*cab))),
    "bmm": (2, lambda *ab: torch.bmm(*matrices(*ab))),
    "conv1d": (2, lambda *ab: F.conv1d(*matrices(*ab))),
    "conv2d": (2, lambda *ab: F.conv2d(*images(*ab))),
    "dot": (2, lambda a, b: torch.dot(row(a), row(b))),
    "einsum": (2, lambda a, b: torch.einsum("ij,jk->ik", a, b)),
    "linalg_multi_dot": (2, lambda *ab: torch.linalg.multi_dot(ab)),
    "linalg_vecdot": (2, torch.linalg.vecdot),
    "mv": (2, lambda a, b: torch.mv(a, row(b))),
    "prelu": (2, lambda a, b: F.prelu(a, row(b))),
    "scaled_dot_product_attention": (3, lambda *qkv: F.scaled_dot_product_attention(*images(*qkv))),
    "vdot": (2, lambda a, b: torch.vdot(row(a), row(b))),
    "group_norm": (1, lambda x: F.group_norm(x, 2)),
    "layer_norm": (1, lambda x: F.layer_norm(x, (4,))),
    "linalg_vector_norm": (1, torch.linalg.vector_norm),
    "pow": (1, lambda x: x.pow(2)),
    "renorm": (1, lambda x: x.renorm(2, 0, 1.0)),
    "rms_norm": (1, lambda x: F.rms_norm(x, (4,))),
    "softplus": (1, F.softplus),
    "cosine_embedding_loss": (2, lambda a, b: F.cosine_embedding_loss(a, b, rows(a) + 1)),
    "cross_entropy_loss": (1, lambda x: F.cross_entropy(x, rows(x))),
    "kl_div": (2, lambda a, b: F.kl_div(a, b, reduction="batchmean")),
    "margin_ranking_loss": (2, lambda a, b: F.margin_ranking_loss(row(a), row(b), rows(a) + 1)),
    "multi_margin_loss": (1, lambda x: F.multi_margin_loss(x, rows(x))),
    "nll_loss": (1, lambda x: F.nll_loss(x, rows(x))),
    "triplet_margin_loss": (3, F.triplet_margin_loss),
    "cat": (2, lambda *ab: torch.cat(ab)),
    "cross": (2, lambda a, b: torch.cross(a.narrow(0, 0, 3), b.narrow(0, 0, 3), dim=0)),
    "index_copy": (2, lambda a, b: a.index_copy(0, indices(a), b)),
    "scatter_add": (2, lambda a, b: a.scatter_add(0, rows(a).expand(4, 4), b)),
    "stack": (2, lambda *ab: torch.stack(ab)),
    "tensordot": (2, lambda a, b: torch.tensordot(a, b, 1)),
    "dropout": (1, F.dropout),
    "embedding": (1, lambda weight: F.embedding(rows(weight), weight)),
    "gelu": (1, F.gelu),
    "silu": (1, F.silu),
}
