"""The bridge: what PyTorch programs make of libtandem, in the shapes of the course's tests. On GPUs too, where there
are two, or ranks may share one (TD_SHARE_GPU): as a program it exits with 77 where they have none; if TD_REQUIRE_GPU
is set, it fails."""

import contextlib
import copy
import functools
import gc
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import weakref
from multiprocessing.util import _run_finalizers
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from parity import bridge
from parity.core.device import is_shared
from parity.core.ranks import gpu_of

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", *(["cuda"] if CUDA else [])]
RANKS = 2
STEPS = 5
ON_GPUS = torch.cuda.device_count() >= (1 if is_shared() else RANKS)


def attention(q, k, v, causal):
    """In float64: o, and L."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], device=q.device).tril().bool()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


class Attention(unittest.TestCase):
    def check(self, device, dtype, seq, seq_k, d, causal, bound, apply=bridge.FlashAttention.apply):
        make = torch.Generator(device).manual_seed(seq + d)
        sizes = [(3, seq, d), (3, seq_k, d), (3, seq_k, d), (3, seq, d)]
        drawn = [torch.randn(size, generator=make, device=device).to(dtype) for size in sizes]
        q, k, v = (x.requires_grad_() for x in drawn[:3])
        o = apply(q, k, v, causal)
        o.backward(drawn[3], retain_graph=True)  # which keeps what was saved
        wide = [x.detach().double().requires_grad_() for x in drawn[:3]]
        truth, lse = attention(*wide, causal)
        truth.backward(drawn[3].double())
        for name, mine, right in zip(
            "o dq dk dv".split(),
            [o, q.grad, k.grad, v.grad],
            [truth, *(x.grad for x in wide)],
            strict=True,
        ):
            error = ((mine.double() - right).norm() / right.norm()).item()
            self.assertLess(error, bound, f"{name} on {device}, {dtype}, {seq} x {seq_k} x {d}, {causal=}")
        return o, lse.detach()

    def test_values_gradients_and_what_is_saved(self):
        for device in DEVICES:
            for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3)):
                for seq, seq_k, d in ((128, 128, 64), (37, 101, 16)):
                    for causal in (False, True):
                        o, lse = self.check(device, dtype, seq, seq_k, d, causal, bound)
                        saved = [t for t in o.grad_fn.saved_tensors if t.shape == (3, seq)]
                        self.assertEqual(len(saved), 1)
                        torch.testing.assert_close(saved[0].double(), lse, rtol=1e-4, atol=1e-2)

    def test_inputs_of_any_strides(self):
        for device in DEVICES:
            packed = torch.randn(2, 33, 3, 24, device=device, requires_grad=True)
            q, k, v = packed.unbind(2)
            o = bridge.FlashAttention.apply(q, k, v)
            o.mT.contiguous().mT.backward(torch.ones_like(o).mT.contiguous().mT)
            wide = packed.detach().double().requires_grad_()
            truth, _ = attention(*wide.unbind(2), False)
            truth.backward(torch.ones_like(truth))
            torch.testing.assert_close(o.double(), truth, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(packed.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)

    def test_without_sequences_or_queries(self):
        for device in DEVICES:
            for batch, seq, seq_k in ((0, 4, 4), (2, 0, 4), (0, 4, 0)):
                shapes = [(batch, n, 8) for n in (seq, seq_k, seq_k)]
                sides = []
                for apply in (bridge.FlashAttention.apply, F.scaled_dot_product_attention):
                    inputs = [torch.ones(shape, device=device, requires_grad=True) for shape in shapes]
                    o = apply(*inputs)
                    o.sum().backward()
                    sides.append([o, *(x.grad for x in inputs)])
                for mine, theirs in zip(*sides, strict=True):
                    self.assertTrue(torch.equal(mine, theirs), (batch, seq, seq_k))

    def test_within_what_is_compiled(self):
        for device in DEVICES:

            @torch.compile(backend="aot_eager", fullgraph=True)
            def doubled(q, k, v, causal):
                return bridge.FlashAttention.apply(2 * q, k, v, causal) / 2

            def halved(q, k, v, causal):
                return 2 * doubled(q / 2, k, v, causal)

            self.check(device, torch.float32, 48, 48, 32, True, 2e-6, halved)

    def test_the_operators_keep_what_they_promise(self):
        q, k, v = (torch.randn(2, 19, 8) for _ in range(3))
        torch.library.opcheck(torch.ops.tandem.flash_forward.default, (q, k, v, True))
        o, lse = torch.ops.tandem.flash_forward(q, k, v, True)
        torch.library.opcheck(torch.ops.tandem.flash_backward.default, (q, k, v, o, o, lse, True))

    def test_what_cannot_be(self):
        x = torch.zeros(2, 4, 8)
        for arguments, words in (
            ((x[0], x[0], x[0]), r"\[batch, seq, d\], got \[4, 8\]"),
            ((x, x[:, :, :4], x), r"got \[2, 4, 8\], \[2, 4, 4\]"),
            ((x.double(),) * 3, "of one type, f32, bf16, f16: got torch.float64"),
            ((x, x.bfloat16(), x), "got torch.float32, torch.bfloat16"),
            ((x.half(),) * 3, "TD_UNSUPPORTED"),
            ((torch.zeros(1, 4, 300),) * 3, "head_dim is 300"),
            ((x, x[:, :0], x[:, :0]), r"k and v have no keys, for q \[2, 4, 8\]"),
        ):
            with self.assertRaisesRegex((TypeError, ValueError, RuntimeError), words):
                bridge.FlashAttention.apply(*arguments)


class Toy(nn.Module):
    """With a frozen bias, and a frozen parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10, bias=False)
        self.second = nn.Linear(10, 50)
        self.last = nn.Linear(50, 5, bias=False)
        self.second.bias.requires_grad_(False)
        self.no_grad_fixed_param = nn.Parameter(torch.tensor([[2.0, 2.0], [2.0, 2.0]]), requires_grad=False)
        self.register_buffer("counted", torch.tensor([3, 1, 4], dtype=torch.int32))

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [(10, 10), (10, 50), (50, 10), (10, 50), (50, 5)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.layers[3].weight = self.layers[1].weight

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


WAYS = [("naive", None), ("flat", None), ("overlap", None), ("bucketed", None)]
WAYS += [("bucketed", mb) for mb in (0.0016, 0.0001, 0.01)]


def said(words, call):
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error with {words}")


def examples(device):
    make = torch.Generator().manual_seed(7)
    return [torch.randn(20, size, generator=make).to(device) for size in (10, 5)]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def train_beside_one_process(rank, device):
    for model in (Toy, Tied):
        for strategy, mb in WAYS:
            torch.manual_seed(rank)
            drawn = model().to(device)
            torch.manual_seed(0)
            alone = model().to(device)
            if rank:
                drawn.load_state_dict({k: v + 1 for k, v in drawn.state_dict().items()})
                assert not torch.equal(next(drawn.parameters()), next(alone.parameters()))
            together = bridge.DataParallel(drawn, strategy, mb)
            for mine, theirs in zip(
                together.module.state_dict().values(), alone.state_dict().values(), strict=True
            ):
                assert torch.equal(mine, theirs)
            sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (together, alone)]
            x, y = examples(device)
            for step in range(STEPS):
                together.on_train_batch_start()
                order = torch.randperm(20, generator=torch.Generator().manual_seed(42 + step)).to(device)
                mine = order[rank * 10 : rank * 10 + 10]
                for optimizer in sgd:
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                nn.functional.mse_loss(alone(x[order]), y[order]).backward()
                if step == 2:  # an exception ends no_sync() too
                    with contextlib.suppress(ValueError), together.no_sync():
                        raise ValueError
                if step == 3:  # in two micro-batches
                    with together.no_sync():
                        (nn.functional.mse_loss(together(x[mine[:4]]), y[mine[:4]]) * 0.4).backward()
                    (nn.functional.mse_loss(together(x[mine[4:]]), y[mine[4:]]) * 0.6).backward()
                else:
                    nn.functional.mse_loss(together(x[mine]), y[mine]).backward()
                together.finish_gradient_synchronization()
                for optimizer in sgd:
                    optimizer.step()
                for (name, a), (other, b) in zip(
                    together.module.named_parameters(), alone.named_parameters(), strict=True
                ):
                    assert name == other
                    close(a, b)
            together.close()


class Broken(torch.autograd.Function):
    """The backward pass ends here, as where memory runs out."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError


def passes_that_end_by_themselves(rank, device):
    """Each case's gradients are the averages over both ranks, without and with the call that ends a pass."""

    def layers_twice(net, x, call=lambda layer, x: layer(x)):
        for layer in [*net, *net]:
            x = call(layer, x)
        return x.square().sum()

    def loss(net, x):
        return net(x).square().sum()

    def twice(model, net, x):
        for part in x.split(2):
            loss(model, part).backward()

    def fails_once(model, net, x):
        with contextlib.suppress(MemoryError):
            net[2](Broken.apply(model(x)[:, :6])).sum().backward()  # the last layer's gradients were ready
        model.zero_grad()
        loss(model, x).backward()

    def fails_in_no_sync(model, net, x):
        with contextlib.suppress(MemoryError), model.no_sync():
            net[2](Broken.apply(model(x)[:, :6])).sum().backward()
        model.zero_grad()
        loss(model, x).backward()

    def rank_0_alone(model, net, x):
        if rank == 0:
            loss(model, x).backward()
        model.finish_gradient_synchronization()

    def another_pass_of_the_same(model, net, x):  # as a generator's through a discriminator
        loss(model, x + 1).backward()
        model.zero_grad()
        loss(model, x).backward()

    def given(model, net, x):
        model.zero_grad()
        grads = torch.autograd.grad(loss(net, x), list(net.parameters()))
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            parameter.grad = grad
        model.finish_gradient_synchronization()

    def once(model, net, x):
        loss(model, x).backward()

    def recomputed(model, net, x):
        # Autograd adds to each gradient twice in one pass.
        layers_twice(net, x, functools.partial(checkpoint, use_reentrant=True)).backward()

    xs = [torch.randn(4, 6, generator=torch.Generator().manual_seed(r)).to(device) for r in range(2)]
    for strategy in ("overlap", "flat"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)).to(device)
        model = bridge.DataParallel(net, strategy)
        for case in (once, twice, fails_once, fails_in_no_sync, another_pass_of_the_same, recomputed, once):
            inputs = [x.clone().requires_grad_(case is recomputed) for x in xs]
            for finished in (False, True):
                net.zero_grad()
                case(model, net, inputs[rank])
                if finished:
                    model.finish_gradient_synchronization()
                same_as_mean(net, [layers_twice if case is recomputed else loss] * 2, inputs, case)
        for case in (rank_0_alone, given, rank_0_alone):
            net.zero_grad()
            case(model, net, xs[rank])
            none = lambda net, x: 0 * loss(net, x)  # noqa: E731
            same_as_mean(net, [loss, none if case is rank_0_alone else loss], xs, case)
        model.close()


def same_as_mean(net, losses, inputs, case):
    got = [p.grad.clone() for p in net.parameters()]
    of_ranks = [
        torch.autograd.grad(loss(net, x), list(net.parameters()))
        for loss, x in zip(losses, inputs, strict=True)
    ]
    for mine, *ranks in zip(got, *of_ranks, strict=True):
        torch.testing.assert_close(mine, sum(ranks) / 2, rtol=1e-5, atol=1e-5, msg=f"after {case.__name__}")


def parameters_that_change(rank, device):
    def unfreeze(net):
        net[0].bias.requires_grad_(True)

    def freeze(net):
        net[2].weight.requires_grad_(False)

    def assign(net):
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)

    def become_bf16(net):
        net.bfloat16()

    def there_and_back(net):  # the same type in the end, but gradients that are elsewhere
        net.double().float()

    def replace(net):
        net[2].weight = nn.Parameter(net[2].weight.detach().clone())

    def add(net):
        net.append(nn.Linear(6, 6, device=device))

    for change, words in (
        (unfreeze, "parameter 0.bias was unfrozen"),
        (freeze, "parameter 2.weight was frozen"),
        (assign, "parameter 0.weight is new, or has replaced another"),
        (become_bf16, "parameter 0.weight is another tensor now, torch.bfloat16 [6, 6] on"),
        (there_and_back, "parameter 0.weight is another tensor now, torch.float32"),
        (replace, "parameter 2.weight is new"),
        (add, "parameter 3.weight is new"),
    ):
        for wrapped in (True, False):  # as the wrapper is called, or the module within
            net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device)
            net[0].bias.requires_grad_(False)
            model = bridge.DataParallel(net)
            x = torch.randn(4, 6, device=device)
            model(x).sum().backward()
            if change is freeze:  # for a while, and in passes that use none: no harm
                net.requires_grad_(False)
                model((x + 0).requires_grad_()).sum().backward()
                net.requires_grad_(True)
                net[0].bias.requires_grad_(False)
                model(x).sum().backward()
            change(net)
            x = x.to(net[2].weight.dtype)
            said(
                words,
                lambda m=model if wrapped else net, model=model, x=x: [
                    m(x).sum().backward(),
                    model.finish_gradient_synchronization(),
                ],
            )
            model.close()


class Picture(nn.Module):
    """What PyTorch's DistributedDataParallel takes: another order in memory, buffers, and a parameter of nothing."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.nothing, self.head = nn.Parameter(torch.zeros(0, 5)), nn.Linear(4, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.norm(self.convolution(x)).relu().mean((2, 3))
        return self.head(x) + self.nothing.sum()


def step_of(model, x):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    if isinstance(model, bridge.DataParallel):
        model.finish_gradient_synchronization()
    sgd.step()
    sgd.zero_grad()


def same_state(a, b):
    for (name, mine), theirs in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


def beside_pytorchs(rank, device):
    assert not {"pandas", "matplotlib", "rich", "jinja2"} & {*sys.modules}, "the bridge needs none of them"
    xs = [
        torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * i + rank)).to(device)
        for i in range(5)
    ]
    torch.manual_seed(rank)
    mine = Picture().to(device)
    mine.norm.running_mean += rank
    theirs = copy.deepcopy(mine)
    mine, theirs = bridge.DataParallel(mine, "bucketed"), DistributedDataParallel(theirs)
    assert mine.module.convolution.weight.stride() == (27, 1, 9, 3)
    for x in xs[:3]:
        for model in (mine, theirs):
            step_of(model, x)
        same_state(mine.module, theirs.module)
    averaged = torch.optim.swa_utils.AveragedModel(mine)
    averaged.update_parameters(mine)
    with torch.no_grad():
        for model in (averaged, mine, theirs):  # before the other rank, which waits for nothing here
            model.eval()(xs[3] if rank == 0 else xs[4])
            model.train()
    saved = io.BytesIO()
    torch.save(mine, saved)
    saved.seek(0)
    copies = [copy.deepcopy(mine), torch.load(saved, weights_only=False)]
    for x in xs[3:]:
        for model in (theirs, mine, *copies):
            step_of(model, x)
        for model in (mine, *copies):
            same_state(model.module, theirs.module)
    for model in (mine, theirs):
        model.eval()(xs[0][:0]).sum().backward()  # a batch of nothing
    for a, b in zip(mine.module.parameters(), theirs.module.parameters(), strict=True):
        assert a.numel() == 0 or torch.equal(a.grad, b.grad)
    refused_or_freed(rank, device)


def refused_or_freed(rank, device):
    net = nn.Sequential(nn.Conv2d(4, 4, 4))  # of extents alike in any order
    if rank == 0:
        net.to(memory_format=torch.channels_last)
    said("parameter 0.weight lies in memory by dimensions [", lambda: bridge.DataParallel(net.to(device)))
    net = nn.Linear(6, 6).to(device)
    net.weight = nn.Parameter(torch.zeros(6, 12, device=device)[:, ::2])
    said("parameter weight has strides (12, 2), which leave gaps", lambda: bridge.DataParallel(net))
    said("no parameters", lambda: bridge.DataParallel(nn.ParameterList([torch.zeros(0)])))

    net = nn.Linear(6, 6).to(device)
    of_net = bridge.device.device_of(net.weight)

    def live():
        gc.collect()
        with of_net.calls() as c:
            return c.value("td_device_memory", c.device).live_blocks

    before = live()
    model = bridge.DataParallel(net)
    model(torch.ones(2, 6, device=device)).sum().backward()
    model.finish_gradient_synchronization()
    assert live() > before
    gone = weakref.ref(model)
    del model
    assert live() == before and gone() is None
    assert torch.equal(net.weight.grad, torch.full_like(net.weight, 2))  # the module's own by now
    net(torch.ones(1, 6, device=device)).sum().backward()
    assert torch.equal(net.weight.grad, torch.full_like(net.weight, 3))


def shard_beside_the_whole(rank, device):
    name_limits(device)
    for model in (Toy, Tied):
        torch.manual_seed(42)
        alone = model().to(device)
        torch.manual_seed(42)
        sharded = model().to(device)
        options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
        late = list(sharded.parameters())[-1:]
        early = [p for p in sharded.parameters() if p is not late[0]]
        whole = torch.optim.AdamW(list(alone.parameters())[:-1], **options)
        parts = bridge.ShardedOptimizer(early, torch.optim.AdamW, **options)
        for step in range(10):
            if step == 4:  # a group of its own, in mid-training
                whole.add_param_group({"params": list(alone.parameters())[-1:], "lr": 0.05})
                parts.add_param_group({"params": late, "lr": 0.05})
            if step == 7:  # as a scheduler does
                whole.param_groups[0]["lr"] = parts.param_groups[0]["lr"] = 0.01
            x, y = torch.rand(32, 10, device=device), torch.rand(32, 5, device=device)
            for net, optimizer in ((alone, whole), (sharded, parts)):
                optimizer.zero_grad()
                ((net(x) - y) ** 2).sum().backward()
                optimizer.step()
            for a, b in zip(sharded.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-7, atol=0)
        owned = [p for p in sharded.parameters() if p.requires_grad and parts.owner(p) == rank]
        held = [entry["exp_avg"].numel() for entry in parts.state_dict()["state"].values()]
        assert sum(held) == sum(p.numel() for p in owned), (held, owned)
        assert 0 < sum(held) < sum(p.numel() for p in sharded.parameters() if p.requires_grad)


class Gpt(nn.Module):
    """GPT-2's shape: learned positions, layer norms before attention and MLP, and a head tied to the embedding."""

    def __init__(self, vocab=29, seq=8, d=16, heads=2, layers=2):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, d), nn.Embedding(seq, d)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(d),
                    "qkv": nn.Linear(d, 3 * d),
                    "out": nn.Linear(d, d),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)
                    ),
                }
            )
            for _ in range(layers)
        )
        self.norm, self.head, self.heads = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False), heads
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            qkv = block["qkv"](block["norm"](x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
            mixed = F.scaled_dot_product_attention(*qkv.transpose(-2, -3), is_causal=True)
            x = x + block["out"](mixed.transpose(-2, -3).flatten(-2))
            x = x + block["mlp"](x)
        return self.head(self.norm(x))


def train_gpt(make, rank, ranks, begin=0, end=50, saved=None):
    """Steps begin to end, each rank on its part of 4 sequences. Returns the optimizer and the model's weights."""
    torch.manual_seed(rank if saved is None else 99 + rank)
    model = Gpt().double()
    if rank == 0 and saved is None:
        torch.manual_seed(0)
        model = Gpt().double()
    if saved is not None:
        model.load_state_dict(saved["model"])
    trained = bridge.DataParallel(model) if dist.is_initialized() else model
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == wide]} for wide in (True, False)]
    options = {}
    if saved is None:  # nothing that is a default: a resumed run has it from the saved state alone
        groups[0]["weight_decay"], groups[1]["lr"] = 0.2, 1e-2
        options = {"lr": 5e-3, "betas": (0.8, 0.95), "weight_decay": 0.0}
    optimizer = make(groups, **options)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step, last_epoch=begin - 1)
    for step in range(begin, end):
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(29, (4, 9), generator=drawn).chunk(ranks)[rank]
        optimizer.zero_grad()
        logits = trained(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        if trained is not model:
            trained.finish_gradient_synchronization()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    return optimizer, {name: value.clone() for name, value in model.state_dict().items()}


@contextlib.contextmanager
def ranks_of(folder, rank, ranks):
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=ranks)
    yield
    dist.barrier()
    _run_finalizers(1)  # the bridge's: a process can then be a rank of other ranks
    bridge.ranks.ranks_of.cache_clear()
    dist.destroy_process_group()


def resume_on_other_ranks(rank, folder):
    def same(got, expected):
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)

    def sharded(params, **options):
        return bridge.ShardedOptimizer(params, torch.optim.AdamW, **options)

    file = f"{folder}/whole"
    part = f"{folder}/part-of-{rank}"
    if rank < 2:
        with ranks_of(f"{folder}/a", rank, 2):
            optimizer, weights = train_gpt(sharded, rank, 2, end=25)
            assert optimizer.param_groups[1]["initial_lr"] == 1e-2
            assert "rank" in optimizer.state_dict()
            whole = optimizer.consolidate_state_dict(to=0)
            assert (whole is None) == (rank == 1)
            assert ("rank" in optimizer.state_dict()) == (rank == 1)
            if rank == 0:
                torch.save({"model": weights, "optimizer": optimizer.state_dict()}, file)
            optimizer.load_state_dict(optimizer.state_dict())
            torch.save({"model": weights, "optimizer": optimizer.state_dict()}, part)
            dist.barrier()
            other = torch.load(f"{folder}/part-of-{1 - rank}")["optimizer"]
            said(f"rank {1 - rank} of 2, this is rank {rank} of 2", lambda: optimizer.load_state_dict(other))
    dist.init_process_group("gloo", init_method=f"file://{folder}/4", rank=rank, world_size=4)
    dist.barrier()  # the file is there
    dist.destroy_process_group()
    alone = train_gpt(torch.optim.AdamW, 0, 1)[1]
    same(train_gpt(torch.optim.AdamW, 0, 1, 25, saved=torch.load(file))[1], alone)
    for ranks in (1, 2, 4):
        if rank >= ranks:
            continue
        with ranks_of(f"{folder}/b{ranks}", rank, ranks):
            same(train_gpt(sharded, rank, ranks, 25, saved=torch.load(file))[1], alone)
            if ranks == 2:
                same(train_gpt(sharded, rank, ranks, 25, saved=torch.load(part))[1], alone)
    with ranks_of(f"{folder}/c", rank, 4):  # each rank finds out by itself
        other = sharded(Gpt().double().named_parameters())
        if rank < 2:
            load = other.load_state_dict
            said(f"rank {rank} of 2, this is rank {rank} of 4", lambda: load(torch.load(part)["optimizer"]))
            said(
                "parameter 2: the state has torch.float64 [48, 16] of group 0",
                lambda: load(torch.load(file)["optimizer"]),
            )


def optimizers_that_differ(rank, device):
    """Each in ranks of its own, which an error of ranks ends."""

    def layers():
        torch.manual_seed(1)
        net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in "123")).to(device)
        net(torch.ones(2, 4, device=device)).square().sum().backward()
        return net, list(net.parameters())

    odd = rank == 1
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    zeros = [nn.Parameter(torch.zeros(3, device=device)) for _ in "12"]  # which gradients alone tell apart
    for number, p in enumerate(zeros):
        p.grad = torch.full_like(p, number + 1.0)

    def step(choose=lambda ps: ps, cls=adamw, **options):
        return lambda: bridge.ShardedOptimizer(choose(layers()[1]), cls, lr=0.1, **options).step()

    def schedule():
        optimizer = bridge.ShardedOptimizer(layers()[1], sgd, lr=0.1)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.2 if odd else 0.1
        optimizer.step()

    def passes():  # one more on rank 0, that no gradient of another pass may meet
        model = bridge.DataParallel(layers()[0])
        for _ in range(1 + (rank == 0)):
            model(torch.ones(2, 4, device=device)).sum().backward()
        model.finish_gradient_synchronization()
        model(torch.ones(2, 4, device=device)).sum().backward()

    another = "every rank gives the same parameters in the same order"
    for words, call in (
        (another, step(lambda ps: ps[::-1] if odd else ps)),
        (another, step(lambda ps: zeros[::-1] if odd else zeros)),
        (another, step(lambda ps: [(f"{i + odd}", p) for i, p in enumerate(ps)])),
        ("ranks have other numbers of parameters: [3, 2]", step(lambda ps: ps[1:] if odd else ps)),
        ("in another state than rank 0", step(cls=sgd if odd else adamw)),
        ("in another state than rank 0", step(weight_decay=0.1 + rank)),
        ("in another state than rank 0", schedule),
        ("in another state than rank 0", passes),
    ):
        said(words, call)
        with contextlib.redirect_stderr(io.StringIO()):  # the error again
            _run_finalizers(1)
        bridge.ranks.ranks_of.cache_clear()


def refuse(rank, device):
    said("no parameters", lambda: bridge.DataParallel(nn.ReLU()))
    said("naive, flat, overlap or bucketed", lambda: bridge.DataParallel(Tied().to(device), "fast"))
    said("int64, which is not sent", lambda: bridge.DataParallel(Whole().to(device)))
    model = bridge.DataParallel(Tied().to(device))
    x = torch.zeros(2, 10, device=device)
    if rank == 1:
        os.kill(os.getpid(), 9)
    said(
        "rank 1 (process",
        lambda: [(model(x).sum().backward(), model.finish_gradient_synchronization()) for _ in "12"],
    )
    os._exit(0)  # what is left of the communicator is the test of comm's


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)


def a_rank(rank, what, ranks, folder, cuda):
    device = gpu_of(rank) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    if is_shared():
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    torch.set_num_threads(1)
    if what is resume_on_other_ranks:  # which is one of several numbers of ranks
        what(rank, folder)
        return
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    what(rank, device)
    dist.barrier()
    dist.destroy_process_group()


def name_limits(device):
    try:
        bridge.FlashAttention.apply(*[torch.zeros(1, 4, 300, device=device)] * 3)
    except RuntimeError as error:  # of this rank alone, which does not end the others
        assert "head_dim is 300" in str(error)
    module = nn.Linear(2, 2).to(device)
    together = bridge.DataParallel(module, seconds=20.5, open_seconds=50)
    assert together._ranks.limits == {"open_seconds": 50, "seconds": 20.5}
    bridge.ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, seconds=20.5)
    try:
        bridge.ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, seconds=7)
    except ValueError as error:
        assert "seconds is 7: the ranks have met with 20.5" in str(error), error
    else:
        raise AssertionError("another limit was taken")
    together.close()


# Ranks of loops, forked from a process that has imported PyTorch. Each says in its file when its error was
# there. The first process interrupts some when they wait, and prints how all ended.
SCENARIOS = """
import json, os, signal, sys, threading, time
import torch
from parity import bridge

folder, started = sys.argv[1], {}
for scenario in ("alone", "waits", "thread", "limit", "raises", "leaves"):
    for rank in (0, 1) if scenario != "alone" else (0,):
        path = f"{folder}/{scenario}.{rank}"
        process = os.fork()
        if process == 0:
            sys.stderr.flush()
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": f"{scenario}-{os.getppid()}"}
            os.environ |= {"TANDEM_OPEN_SECONDS": "100", "TANDEM_SECONDS": "3" if scenario == "limit" else "100"}
            break
        started[process] = path
    else:
        continue
    break
if process:
    sent = {}
    ended = {}
    until = time.monotonic() + 100
    while started.keys() - ended.keys() and time.monotonic() < until:
        for name, word in (("alone.0", "waits: "), ("waits.0", "waits: all_"), ("thread.0", "waits: all_")):
            path = f"{folder}/{name}"
            if path not in sent and os.path.exists(path) and word in open(path).read():
                sent[path] = time.monotonic()
                os.kill(next(process for process, of in started.items() if of == path), signal.SIGINT)
        process, status = os.waitpid(-1, os.WNOHANG)
        ended |= {process: status} if process else {}
        time.sleep(0.01)
    for process in started.keys() - ended.keys():
        os.kill(process, signal.SIGKILL)
    json.dump({path: [ended.get(p, -1), sent.get(path)] for p, path in started.items()}, sys.stdout)
    sys.stdout.flush()
    os._exit(0)
try:
    model = bridge.DataParallel(torch.nn.Linear(2, 2))
    if rank == 1 and scenario in ("waits", "thread", "limit"):
        time.sleep(5)
    if rank == 1 and scenario == "raises":
        raise ValueError("mine")
    if rank == 1 and scenario == "leaves":
        sys.exit(0)
    def step():
        try:
            model(torch.ones(3, 2)).sum().backward()
            model.finish_gradient_synchronization()
        except RuntimeError:
            print("after", time.monotonic(), file=sys.stderr, flush=True)
            raise
    if rank == 0 and scenario == "thread":  # as autograd's of a GPU
        thread = threading.Thread(target=step)
        threading.excepthook = lambda _: None
        thread.start()
        thread.join()
    else:
        step()
finally:
    if scenario != "thread":
        print("after", time.monotonic(), file=sys.stderr, flush=True)
"""


class Ranks(unittest.TestCase):
    def start(self, what, statuses=(0, 0), on_gpus=ON_GPUS):
        for cuda in (False, True) if on_gpus else (False,):
            with self.subTest(cuda=cuda):
                folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tandem-bridge-"))
                context = torch.multiprocessing.get_context("forkserver")
                context.set_forkserver_preload(["torch._dynamo", "parity.bridge"])
                started = [
                    context.Process(target=a_rank, args=(rank, what, len(statuses), folder, cuda))
                    for rank in range(len(statuses))
                ]
                for process in started:
                    process.start()
                for process in started:
                    process.join(120)
                self.assertEqual([process.exitcode for process in started], [*statuses])

    def test_data_parallel_training_is_that_of_one_process(self):
        self.start(train_beside_one_process)

    def test_each_backward_pass_ends_its_reduction(self):
        self.start(passes_that_end_by_themselves)

    def test_what_pytorchs_takes_refuses_and_frees(self):
        self.start(beside_pytorchs)

    def test_parameters_that_change(self):
        self.start(parameters_that_change)

    def test_a_sharded_optimizer_is_the_whole_one(self):
        self.start(shard_beside_the_whole)

    def test_a_saved_run_goes_on_among_other_ranks(self):
        self.start(resume_on_other_ranks, (0,) * 4, on_gpus=False)

    def test_optimizers_that_differ(self):
        self.start(optimizers_that_differ)

    def test_what_cannot_be_and_a_rank_that_dies(self):
        self.start(refuse, (0, -9))

    def test_ranks_of_a_launcher(self):
        for variables, expected in (
            ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}, (1, 4)),
            ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "3"}, (0, 2)),
        ):
            with unittest.mock.patch.dict(os.environ, variables, clear=True):
                rank, ranks, run = bridge.ranks.who()
                self.assertEqual((rank, ranks), expected)
                self.assertRegex(run, "^[0-9a-f]{16}$")

    def test_the_example_of_the_readme(self):
        root = Path(__file__).resolve().parents[1]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        command = [*torchrun, str(root / "examples/bridge.py")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        self.assertEqual(done.returncode, 0, done.stderr)
        weights = re.findall(r"weights sum to (\S+\d{6})", done.stdout)
        self.assertEqual((len(weights), len(set(weights))), (RANKS, 1), done.stdout)  # the same on every rank

    def test_waits_limits_and_ends(self):
        """What ranks of a loop say, and how they end."""
        folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tandem-bridge-"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCENARIOS, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        self.assertEqual(done.returncode, 0, done.stderr)
        interrupted = 0
        said = {}
        for path, (status, sent) in json.loads(done.stdout).items():
            text = said[Path(path).name] = Path(path).read_text()
            with self.subTest(path):
                self.assertEqual(text.count("Traceback"), 1, text)
                self.assertTrue(status > 0, (status, text))
                if sent is not None:
                    interrupted += 1
                    self.assertIn("\nKeyboardInterrupt\n", text)
                    self.assertLess(float(re.search(r"after (\S+)", text)[1]) - sent, 1.0)
        self.assertEqual(interrupted, 3)
        for name, words in {
            "alone.0": ["tandem: rank 0 of 2 waits: rank 1 has not come"],
            "waits.0": [
                "tandem: rank 0 of 2 waits: all_reduce #",
                "of 64 f32 (average): rank 1 has not made it",
            ],
            "waits.1": ["gave up: its caller ended the wait"],
            "thread.1": ["gave up: its caller ended the wait"],
            "limit.0": ["is late", "; seconds is 3 (seconds= or TANDEM_SECONDS raises it)"],
            "limit.1": ["is late", "; seconds is 3 (seconds= or TANDEM_SECONDS raises it)"],
            "raises.0": ["rank 1 (process ", "gave up: its program failed"],
            "raises.1": ["ValueError: mine"],
            "leaves.0": ["made another call, close #"],
            "leaves.1": ["td_comm_close: TD_RANK_FAILED: "],
        }.items():
            for word in words:
                self.assertIn(word, said[name])

    def test_half_of_what_a_launcher_says(self):
        for variables in ({"RANK": "0"}, {"WORLD_SIZE": "2"}):
            with (
                unittest.mock.patch.dict(os.environ, variables, clear=True),
                self.assertRaisesRegex(
                    RuntimeError, "RANK and WORLD_SIZE belong together, and one is not set"
                ),
            ):
                bridge.ranks.who()

    def test_no_ranks(self):
        with self.assertRaisesRegex(
            RuntimeError, "no ranks: call torch.distributed.init_process_group first"
        ):
            bridge.DataParallel(Tied())


if __name__ == "__main__":
    if not ON_GPUS:
        print(f"skipped: PyTorch sees {torch.cuda.device_count()} CUDA devices, {RANKS} are needed")
        sys.exit(1 if os.environ.get("TD_REQUIRE_GPU") else 77)
    unittest.main(verbosity=2)
