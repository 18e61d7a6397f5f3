"""What low precision does: the handout's accumulation loops and its toy model under autocast."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def accumulate(
    count: int,
    value: float,
    addend: torch.dtype,
    accumulator: torch.dtype,
    cast_first: bool = False,
) -> Tensor:
    """One addition after the other; without cast_first the addition itself promotes the addend."""
    total = torch.tensor(0, dtype=accumulator)
    for _ in range(count):
        x = torch.tensor(value, dtype=addend)
        total += x.to(accumulator) if cast_first else x
    return total


def handout_loops(count: int = 1000, value: float = 0.01) -> list[Tensor]:
    f32, f16 = torch.float32, torch.float16
    return [
        accumulate(count, value, addend=f32, accumulator=f32),
        accumulate(count, value, addend=f16, accumulator=f16),
        accumulate(count, value, addend=f16, accumulator=f32),
        accumulate(count, value, addend=f16, accumulator=f32, cast_first=True),
    ]


def kahan(count: int, value: float, addend: torch.dtype, accumulator: torch.dtype) -> Tensor:
    total = torch.tensor(0, dtype=accumulator)
    lost = torch.tensor(0, dtype=accumulator)
    for _ in range(count):
        x = torch.tensor(value, dtype=addend).to(accumulator) - lost
        bigger = total + x
        lost = (bigger - total) - x
        total = bigger
    return total


def pairwise(count: int, value: float, addend: torch.dtype, accumulator: torch.dtype) -> Tensor:
    """Halves, the first the smaller; a single number is itself, none is 0."""
    if count <= 1:
        return torch.tensor(value if count else 0, dtype=addend).to(accumulator)
    half = count // 2
    return pairwise(half, value, addend, accumulator) + pairwise(
        count - half, value, addend, accumulator
    )


class ToyModel(nn.Module):
    def __init__(self, d_in: int = 5, d_out: int = 3):
        super().__init__()
        self.fc1 = nn.Linear(d_in, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


LOSSES = {
    "cross_entropy_loss": lambda logits: F.cross_entropy(logits, torch.zeros(len(logits)).long()),
    "mse_loss": lambda logits: F.mse_loss(logits, torch.zeros(logits.shape)),
    "mean": lambda logits: logits.mean(),
}


def toy_dtypes(low: torch.dtype, loss: str, device: str = "cpu") -> dict[str, torch.dtype]:
    """The dtype of each component of the toy model under autocast, looked at by hooks."""
    torch.manual_seed(0)
    model = ToyModel().to(device)
    seen = {"parameters": model.fc1.weight.dtype}

    def watch(name: str):
        return lambda module, inputs, output: seen.update({name: output.dtype})

    for name, module in (("fc1", model.fc1), ("relu", model.relu), ("ln", model.ln)):
        module.register_forward_hook(watch(name))
    model.fc2.register_forward_hook(watch("logits"))
    with torch.autocast(device_type=device, dtype=low):
        value = LOSSES[loss](model(torch.randn(4, 5, device=device)))
    seen["loss"] = value.dtype
    value.backward()
    seen["gradients"] = model.fc1.weight.grad.dtype
    return seen


def op_dtype(op: str, low: torch.dtype, inputs: list[torch.dtype]) -> torch.dtype:
    """The dtype that an operation of two square matrices yields under autocast on the CPU."""
    tensors = [torch.rand(4, 4).to(dtype) for dtype in inputs]
    with torch.autocast(device_type="cpu", dtype=low):
        return OPS[op](*tensors).dtype


# Operations of both lists and of none, each a function of matrices with values in [0, 1).
OPS = {
    "linear": F.linear,
    "matmul": torch.matmul,
    "mm": torch.mm,
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "addmm": torch.addmm,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "mse_loss": F.mse_loss,
    "cross_entropy_loss": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "binary_cross_entropy": F.binary_cross_entropy,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "relu": torch.relu,
    "add": torch.add,
    "mul": torch.mul,
    "exp": torch.exp,
    "pow": lambda x: x.pow(2),
    "sum": torch.sum,
    "mean": torch.mean,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "cdist": torch.cdist,
    "index_copy": lambda a, b: a.index_copy(0, torch.arange(4), b),
}
