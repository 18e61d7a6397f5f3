"""The formula of scale, forward; autograd gives the backward."""

import torch
from torch import Tensor


def forward(x: Tensor) -> Tensor:
    """y = x / 2."""
    return 0.5 * x


def backward(x: Tensor, dy: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(forward(leaf), leaf, dy)
    return dx
