"""What every operation has in common: its sides, from one function."""

from functools import cache, partial

import torch
import torch.nn.functional as F

from parity.core import Side

EPS = float(torch.tensor(1e-5))  # RMSNorm's, as the f32 that C's struct holds
GAP = 7.0  # fills the gap between the heads and the pitch, which no operation may change


def compiled(function):
    """A function that torch.compile makes when it is first called: importing the compiler alone takes seconds."""

    @cache
    def made():
        return torch.compile(function, dynamic=False)

    return lambda *arguments: made()(*arguments)


def into(c, name, outputs, *arguments):
    """C's side of an operation that is one call, which writes the outputs."""

    def tandem():
        getattr(c, name)(c.device, *arguments)
        return outputs

    return tandem


def forward_sides(tandem, function, *inputs, rule=None, library=None):
    """Sides of a function that returns outputs by name; `library` is PyTorch's own fused form of it."""
    sides = {
        "c": tandem,
        "torch_eager": lambda: function(*inputs),
        "torch_compile": partial(compiled(function), *inputs),
        "truth": lambda: function(*map(wide, inputs)),
        "rule": rule or {},
    }
    if library:
        sides["torch_library"] = lambda: library(*inputs)
    return sides


def backward_sides(tandem, names, function, inputs, cotangent, library=None, finish=lambda grads: grads):
    """Sides of the gradients, called `names`, of a function of `inputs`; `finish` maps them to the outputs."""

    def side(function, inputs, cotangent):
        leaves = [x.detach().requires_grad_() for x in inputs]
        graph = []

        def forward():
            graph[:] = [function(*leaves)]

        def backward():
            grads = torch.autograd.grad(graph.pop(), leaves, cotangent)
            return finish(dict(zip(names, grads, strict=True)))

        return Side(backward, before=forward)

    def truth():
        exact = side(function, [wide(x) for x in inputs], wide(cotangent))
        exact.before()
        return exact.call()

    sides = {"c": tandem, "torch_eager": side(function, inputs, cotangent), "truth": truth}
    sides["torch_compile"] = side(compiled(function), inputs, cotangent)
    if library:
        sides["torch_library"] = side(library, inputs, cotangent)
    return sides


def padded(x, width):
    """Rows of x with the gap at their end. Without a gap x itself, because a copy would be timed."""
    gap = width - x.shape[-1]
    return F.pad(x, (0, gap), value=GAP) if gap else x


def wide(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def rounded(x, dtype):
    """As it is stored; the truth is not rounded."""
    return x if x.dtype == torch.float64 else x.to(dtype)
