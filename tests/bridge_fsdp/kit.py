"""The models and measures of these tests, and the adapters of the course."""

import unittest.mock

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tandem import fsdp
from tandem.fsdp import FullyShardedDataParallel

VOCAB, SEQ, D, FF = 29, 6, 10, 21  # no number of ranks divides all of them


# The course's adapters.
def get_fsdp(module, compute_dtype=None):
    return FullyShardedDataParallel(module, compute_dtype)


def fsdp_on_after_backward(model, optimizer):
    model.finish_gradient_synchronization()


def fsdp_gather_full_params(model):
    return model.gather_full_parameters()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, FF), nn.Linear(FF, D)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Uses the second block twice."""

    def __init__(self, tied=False, frozen=False, reentrant=None):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, D), nn.Embedding(SEQ, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)
        self.register_buffer("counted", torch.tensor([3, 1, 4]))
        self.unused = nn.Parameter(torch.ones(3))
        self.reentrant = reentrant
        if tied:
            self.head.weight = self.tokens.weight
        if frozen:
            self.places.weight.requires_grad_(False)
            self.blocks[0].up.requires_grad_(False)
            self.blocks[1].norm1.requires_grad_(False)

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(SEQ, device=x.device))
        for block in (self.blocks[0], self.blocks[1], self.blocks[1]):
            again = self.reentrant is not None and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=self.reentrant) if again else block(x)
        return self.head(self.norm(x))


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


def batch(step, rank):
    make = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCAB, (2, SEQ), generator=make), torch.randint(VOCAB, (2, SEQ), generator=make)


def loss_of(model, step, rank):
    x, y = batch(step, rank)
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def average_in_one_process(model, ranks, losses):
    """Adds the average of all ranks' gradients to the existing gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums = [None] * len(parameters)
    for rank in range(ranks):
        gradients = torch.autograd.grad(losses(rank), parameters, allow_unused=True)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                sums[i] = gradient if sums[i] is None else sums[i] + gradient
    for parameter, gradient in zip(parameters, sums, strict=True):
        if gradient is not None:
            gradient = gradient * torch.tensor(1 / ranks)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def check_same(model, alone, exact):
    whole = fsdp_gather_full_params(model)
    assert list(whole) == [name for name, _ in alone.named_parameters()]
    for name, right in alone.named_parameters():
        if exact:
            assert torch.equal(whole[name], right), name
        else:
            torch.testing.assert_close(whole[name], right.detach(), rtol=1e-4, atol=1e-6, msg=name)


def optimizers(*models, kind=torch.optim.AdamW):
    return [kind([p for p in model.parameters() if p.requires_grad], lr=0.01) for model in models]


class Watch:
    """Counts gathers and reductions, and the gathered weights in memory."""

    def __init__(self):
        self.events, self._storages, self.most, self.sent = [], [], 0, set()

    def __enter__(self):
        gather, reduce = fsdp._Unit.gather, fsdp._Unit.reduce

        def watched(unit, dtype):
            call = gather(unit, dtype)
            self._storages.append(StorageWeakRef(call.result.untyped_storage()))
            self.look()
            self.sent.add(call.result.dtype)
            self.events.append(("gather", unit.name))
            return call

        def also(unit, gradient):
            self.events.append(("reduce", unit.name))
            self.look()
            return reduce(unit, gradient)

        self._patches = [
            unittest.mock.patch.object(fsdp._Unit, name, function)
            for name, function in (("gather", watched), ("reduce", also))
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()

    def look(self):
        self._storages = [storage for storage in self._storages if not storage.expired()]
        self.most = max(self.most, len(self._storages))
        return len(self._storages)

    def count(self, what, name):
        return self.events.count((what, name))


def layers(count=6, size=8):
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count)))


def says(words, call):
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        text = " ".join([str(error), *getattr(error, "__notes__", [])])
        assert words in text, text
    else:
        raise AssertionError(f"no error with {words}")


class Tail(nn.Module):
    """Reads a weight of another module."""

    def __init__(self):
        super().__init__()
        self.tokens, self.wide = nn.Embedding(VOCAB, D), nn.Linear(D, D)
        self.layer = nn.TransformerEncoderLayer(D, 2, FF, 0.0, batch_first=True)

    def forward(self, x):
        return F.linear(self.layer(self.wide(self.tokens(x))), self.tokens.weight)
