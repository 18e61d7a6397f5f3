"""The course's Transformer language model, its loss, initialisation and optimizer.

The state dict has the course's names in the course's order, without rotary tables.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ref import ops
from ref.attention import attention

# name: d_model, d_ff, layers, heads; vocabulary 10,000. "2.7B" is the 2026 handout's "xl".
SIZES = {
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7B": (2560, 10240, 32, 32),
    "10B": (4608, 12288, 50, 36),
}


class Named(nn.Module):
    """Names tensors of its forward pass with libtandem's names."""

    def see(self, name: str, *parts: Tensor) -> None:
        """Does nothing until listen() replaces it. In C the parts of a tensor lie next to each other in each row."""


def listen(model: nn.Module, hear) -> None:
    """Each forward pass calls hear(name, *parts) for each tensor, such as "layers.0.attn.q"."""
    for path, module in model.named_modules():
        if isinstance(module, Named):
            prefix = f"{path}." if path else ""
            module.see = lambda name, *parts, prefix=prefix: hear(prefix + name, *parts)


class Linear(nn.Module):
    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        std = math.sqrt(2 / (d_in + d_out))
        self.weight = nn.Parameter(truncated_normal(d_out, d_in, std))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


class Embedding(nn.Module):
    def __init__(self, vocab: int, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(truncated_normal(vocab, d_model, 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.weight)


class RMSNorm(Named):
    def __init__(self, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        y = ops.rmsnorm(x, self.weight)
        self.see("output", y)
        return y


class SwiGLU(Named):
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)
        self.see("gate_up", gate, up)
        hidden = ops.silu_mul(gate, up)
        self.see("hidden", hidden)
        y = self.w2(hidden)
        self.see("output", y)
        return y


def fused_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's fused attention, which never stores the scores. It is the fastest choice for a compiled model."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class CausalSelfAttention(Named):
    def __init__(self, d_model: int, heads: int, context: int, rope_theta: float, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.q_proj = Linear(d_model, d_model)
        self.k_proj = Linear(d_model, d_model)
        self.v_proj = Linear(d_model, d_model)
        self.output_proj = Linear(d_model, d_model)
        self.table = context, d_model // heads, rope_theta
        self.make_tables()

    def make_tables(self):
        """Makes an f32 and a float64 table on the weights' device. Models of any other dtype than float64 use the f32
        table."""
        self.tables = {
            dtype: ops.rope_table(*self.table, dtype, self.q_proj.weight.device)
            for dtype in (torch.float32, torch.float64)
        }

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.make_tables()
        return self

    def forward(self, x: Tensor) -> Tensor:
        qkv = [project(x) for project in (self.q_proj, self.k_proj, self.v_proj)]
        self.see("qkv", *qkv)
        q, k, v = (ops.heads_split(packed, self.heads) for packed in qkv)
        table = self.tables[torch.float64 if x.dtype == torch.float64 else torch.float32]
        cos, sin = (part[: x.shape[1]] for part in table)
        q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        for name, x in zip("qkv", (q, k, v), strict=True):
            self.see(name, x)
        o = ops.heads_merge(self.attend(q, k, v, causal=True))
        self.see("o", o)
        y = self.output_proj(o)
        self.see("output", y)
        return y


class Block(Named):
    def __init__(self, d_model: int, d_ff: int, heads: int, context: int, rope_theta: float, attend):
        super().__init__()
        self.attn = CausalSelfAttention(d_model, heads, context, rope_theta, attend)
        self.ffn = SwiGLU(d_model, d_ff)
        self.ln1 = RMSNorm(d_model)
        self.ln2 = RMSNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        self.see("input", x)
        x = x + self.attn(self.ln1(x))
        self.see("middle", x)
        return x + self.ffn(self.ln2(x))


class Transformer(Named):
    def __init__(
        self,
        d_model: int,
        d_ff: int,
        layers: int,
        heads: int,
        vocab: int,
        context: int,
        rope_theta: float = 10_000.0,
        attend=attention,
        checkpoint_layers: int = 0,
    ):
        """checkpoint_layers: the number of layers in a checkpoint, whose activations backward computes again from their
        input; 0: forward keeps all activations."""
        super().__init__()
        self.checkpoint_layers = checkpoint_layers
        self.token_embeddings = Embedding(vocab, d_model)
        self.layers = nn.ModuleList(
            Block(d_model, d_ff, heads, context, rope_theta, attend) for _ in range(layers)
        )
        self.ln_final = RMSNorm(d_model)
        self.lm_head = Linear(d_model, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, seq, vocab] for ids [batch, seq]."""
        x = self.token_embeddings(ids)
        span = self.checkpoint_layers or len(self.layers)
        for first in range(0, len(self.layers), span):
            layers = self.layers[first : first + span]
            # Layers use no random numbers. A graph's capture must not read the generator's state.
            keep = dict(use_reentrant=False, preserve_rng_state=False)
            x = checkpoint(run, layers, x, **keep) if self.checkpoint_layers else run(layers, x)
        self.see("ln_final.input", x)
        logits = self.lm_head(self.ln_final(x))
        self.see("logits", logits)
        return logits


def run(layers, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def truncated_normal(rows: int, cols: int, std: float) -> Tensor:
    weight = torch.empty(rows, cols)
    return nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over all tokens."""
    return ops.cross_entropy(logits.flatten(0, -2), targets.flatten())[0]


class AdamW(torch.optim.Optimizer):
    """`course2025` decays the weights after the Adam step, `course2026` before it.

    Moments and arithmetic are f32 or wider. The first step creates the moments. Parameters without a gradient are
    skipped.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        variant: str = "course2025",
    ):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, variant=variant)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            lr, decay = group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    wide = torch.promote_types(p.dtype, torch.float32)
                    state["t"] = 0
                    state["m"] = torch.zeros_like(p, dtype=wide)
                    state["v"] = torch.zeros_like(p, dtype=wide)
                state["t"] += 1
                m, v, t = state["m"], state["v"], state["t"]
                grad, weight = p.grad.to(m.dtype), p.to(m.dtype)  # weight is p itself, unless p is narrower
                m.mul_(beta1).add_(grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                if group["variant"] == "course2026":
                    weight.mul_(1 - lr * decay)
                rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
                weight.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-rate)
                if group["variant"] == "course2025":
                    weight.mul_(1 - lr * decay)
                if weight is not p:
                    p.copy_(weight)
