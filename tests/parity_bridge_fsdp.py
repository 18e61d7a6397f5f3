"""Fully sharded data parallelism of the bridge: the contract of the course's tests, and common uses of FSDP.

Four processes are started once. They run the cases of one, two, three and four ranks one after the other. A case is
compared with one process that averages the gradients of all ranks' batches."""

import contextlib
import copy
import functools
import gc
import glob
import io
import re
import runpy
import tempfile
import unittest
import unittest.mock
import warnings
import weakref
from multiprocessing.util import _run_finalizers
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
import torch.multiprocessing
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tandem as bridge
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


def train(ranks, rank):
    """A plain model, and models whose weights are used in unusual ways, with and without checkpoints."""
    for options in (
        {},
        {"tied": True, "frozen": True, "reentrant": True},
        {"tied": True, "frozen": True, "reentrant": False},
    ):
        alone = seeded(lambda options=options: Gpt(**{**options, "reentrant": None}))
        model = get_fsdp(
            seeded(lambda options=options: Gpt(**options), rank)
        )  # all ranks get rank 0's weights
        assert torch.equal(fsdp_gather_full_params(model)["tokens.weight"], alone.tokens.weight)
        one, other = optimizers(model, alone)
        for step in range(3 if ranks <= 2 else 2):
            one.zero_grad()
            other.zero_grad()
            average_in_one_process(
                alone, ranks, lambda rank, step=step, alone=alone: loss_of(alone, step, rank)
            )
            with Watch() as watch:
                loss_of(model, step, rank).backward()
                assert watch.look() == 0, "weights are freed"
            fsdp_on_after_backward(model, one)
            assert model.module.unused.grad is None
            for optimizer in (one, other):
                optimizer.step()
            # Two ranks have one order of addition, more ranks the backend's. A reentrant checkpoint runs a
            # backward pass for each use of a block, and each gradient is averaged separately.
            check_same(model, alone, exact=ranks <= 2 and not options.get("reentrant"))
            with torch.no_grad(), Watch() as watch:
                mine, right = loss_of(model, step, 99), loss_of(alone, step, 99)
                assert watch.look() == 0
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=0)
        assert watch.most <= 2
        held = sum(p.numel() for p in model.parameters())
        whole = sum(p.numel() for p in alone.parameters())
        assert ranks == 1 or held < whole, (held, whole)
        assert watch.count("gather", "tokens.weight") == (2 if "tied" in options else 1)


def accumulate(ranks, rank):
    """Micro-batches, clipping by the norm over all ranks, and both ways to drop gradients."""
    alone, model = seeded(Gpt), get_fsdp(seeded(Gpt))
    one, other = optimizers(model, alone)
    for step in range(4):
        for micro in range(2):
            at = 10 * step + micro
            loss_of(model, at, rank).backward()
            average_in_one_process(alone, ranks, lambda rank, at=at: loss_of(alone, at, rank))
        each = [
            [p.grad.detach().norm() for p in net.parameters() if p.grad is not None] for net in (model, alone)
        ]
        torch.testing.assert_close(*each, rtol=1e-4, atol=1e-7)
        clip, kind = (
            functools.partial(nn.utils.clip_grad_norm_, foreach=step != 1),
            (2, 1, 2, torch.inf)[step],
        )
        mine = model.clip_grad_norm_(0.1) if step == 2 else clip(model.parameters(), 0.1, kind)
        norms = mine, clip(alone.parameters(), 0.1, kind)
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        assert norms[0] > 0.1
        for net in (model, alone):
            nn.utils.clip_grad_value_(net.parameters(), 0.01)
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        check_same(model, alone, exact=False)


def beside_data_parallel(ranks, rank):
    whole, model = seeded(Gpt), get_fsdp(seeded(Gpt))
    naive = bridge.DataParallel(whole, "naive")
    one, other = optimizers(model, naive)
    for step in range(10):
        for net, optimizer in ((model, one), (naive, other)):
            optimizer.zero_grad()
            loss_of(net, step, rank).backward()
            fsdp_on_after_backward(net, optimizer)
            optimizer.step()
    check_same(model, naive.module, exact=True)
    naive.close()


class CourseLinear(nn.Module):
    """The course's classes, by name."""

    def __init__(self, ins, outs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outs, ins) / ins**0.5)

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class CourseEmbedding(CourseLinear):
    def forward(self, x):
        return self.weight[x]


CourseLinear.__name__, CourseEmbedding.__name__ = "Linear", "Embedding"


class CourseNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * self.weight).to(x.dtype)


def course():
    layers = CourseEmbedding(16, 100), CourseNorm(16), CourseLinear(16, 32), nn.ReLU(), CourseNorm(32)
    return nn.Sequential(*layers, CourseLinear(32, 16), CourseLinear(16, 100))


def contract(ranks, rank):
    """As in the course's tests: parameters after each step, then shapes, types and equality of gradients."""
    for compute in (None, torch.float16):
        alone, model = seeded(course), get_fsdp(seeded(course), compute)
        one, other = optimizers(model, alone, kind=torch.optim.SGD)
        make = torch.Generator().manual_seed(123)
        x, y = (torch.randint(100, size, generator=make) for size in ((20, 8), (20,)))
        part = slice(rank * 20 // ranks, (rank + 1) * 20 // ranks)
        for _ in range(3):
            for net, optimizer, at in ((model, one, part), (alone, other, slice(None))):
                optimizer.zero_grad()
                F.cross_entropy(net(x[at])[:, -1].float(), y[at]).backward()
                if net is model:
                    fsdp_on_after_backward(model, one)
                optimizer.step()
            for name, whole in fsdp_gather_full_params(model).items():
                right = alone.get_parameter(name).detach()
                torch.testing.assert_close(whole, right, rtol=1e-4, atol=1e-4 if compute else 1e-7)
        one.zero_grad()
        with Watch() as watch:
            out = model(x[rank : rank + 4])
        assert watch.sent == {compute or torch.float32}
        assert out.dtype == (compute or torch.float32)
        out.sum().backward()
        fsdp_on_after_backward(model, one)
        for name, parameter in model.module.named_parameters():
            assert parameter.grad.shape == parameter.data.shape and parameter.grad.dtype == torch.float32, (
                name
            )
        for norm in (model.module[1], model.module[4]):
            everyone = [torch.zeros_like(norm.weight.grad) for _ in range(ranks)]
            dist.all_gather(everyone, norm.weight.grad)
            assert all(torch.equal(theirs, everyone[0]) for theirs in everyone)


def layers(count=6, size=8):
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count)))


def prefetch_and_memory(ranks, rank):
    """The next weight is gathered while this one is used, but not before the previous one is freed."""
    model = get_fsdp(layers())
    for step in range(2):
        with Watch() as watch:
            handles = [
                layer.register_forward_hook(
                    lambda m, i, o, at=at: watch.events.append(("ran", f"module.{at}.weight"))
                )
                for at, layer in enumerate(model.module)
            ]
            model(torch.ones(2, 8)).sum().backward()
            for handle in handles:
                handle.remove()
        assert watch.most <= 2 and watch.look() == 0, (step, watch.most)
    names = [f"{at}.weight" for at in range(6)]
    forward = [("gather", names[0])]
    for at, name in enumerate(names):
        forward += [("gather", names[at + 1])] if at < 5 else []
        forward += [("ran", "module." + name)]
    assert watch.events[: len(forward)] == forward, watch.events
    backward = [("gather", names[4]), ("reduce", names[5])]  # the first layer's input needs no gradient
    for at in (4, 3, 2, 1):
        backward += [("gather", names[at - 1])] if at > 1 else []
        backward += [("reduce", names[at])]
    assert watch.events[len(forward) :] == [("gather", names[5]), *backward, ("reduce", names[0])], (
        watch.events
    )


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpoint_and_memory(ranks, rank):
    """A checkpoint saves no tensors of its modules, which run again. It begins when the backward of the last layer
    already has its weight, which is one weight more."""
    model, runs = get_fsdp(Checkpointed(*layers())), []
    model.module[0].register_forward_hook(lambda *_: runs.append(1))
    for step in range(2):
        with Watch() as watch:
            model(torch.ones(2, 8)).sum().backward()
            assert watch.most <= 3 and watch.look() == 0, (step, watch.most)
        assert len(runs) == 2 * (step + 1), runs


class Boom(torch.autograd.Function):
    """Fails in forward or in backward."""

    where = None

    @staticmethod
    def forward(ctx, x):
        if Boom.where == "forward":
            raise OverflowError("boom")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Boom.where == "backward":
            raise OverflowError("boom")
        return gradient


class Exploding(nn.Module):
    def forward(self, x):
        return Boom.apply(x)


def fail(ranks, rank):
    """After a pass that fails no weight stays gathered, and the next step is right."""
    make = lambda: nn.Sequential(*layers(3), Exploding(), *layers(3))  # noqa: E731
    alone, model = seeded(make), get_fsdp(seeded(make))
    one, other = optimizers(model, alone)
    x = torch.ones(2, 8)
    for Boom.where in ("forward", None, "backward", None):
        one.zero_grad()
        other.zero_grad()
        with Watch() as watch:
            if Boom.where:
                out = None
                with contextlib.suppress(OverflowError):
                    out = model(x)
                    out.sum().backward()
                    raise AssertionError("no error")
                assert watch.most > 0 and watch.look() == 0, Boom.where
                continue
            model(x).sum().backward()
        alone(x).sum().backward()
        one.step()
        other.step()
        check_same(model, alone, exact=True)


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


def read_weights_of_others(ranks, rank):
    alone = seeded(Tail)
    for compute, close in ((None, 1e-6), (torch.bfloat16, 0.1)):
        model = get_fsdp(seeded(Tail), compute)
        alone.zero_grad()
        average_in_one_process(alone, ranks, lambda rank: loss_of(alone, 0, rank))
        loss_of(model, 0, rank).backward()
        for name, parameter in model.module.named_parameters():
            unit = model._units.get(name)
            right = alone.get_parameter(name).grad
            torch.testing.assert_close(
                parameter.grad, right[unit.own] if unit else right, rtol=close, atol=close
            )
    with torch.no_grad():  # in evaluation torch's layer reads the weights of all its modules together
        mine, right = (net.eval()(batch(0, 0)[0]) for net in (get_fsdp(seeded(Tail)), alone))
    torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def borrower(weight):
    """A module with the parameter of another one."""
    module = nn.Linear(8, 8)
    module.weight = weight
    return module


def misuse(ranks, rank):
    model = get_fsdp(seeded(layers))
    x = torch.ones(2, 8, requires_grad=True)

    def changed_in_between():
        out = model(x).sum()
        with torch.no_grad():
            model.module[3].weight.mul_(2)
        out.backward()

    def changed_in_place():
        y = x * 1
        out = model.module[0](y)
        y += 1
        out.sum().backward()

    says("3.weight was changed between forward and backward", changed_in_between)
    says("was modified by an inplace operation", changed_in_place)
    model(x).sum().backward()
    part = model.state_dict()
    model.load_state_dict(part)
    part["_extra_state"] = torch.tensor([1 - rank, 2])
    says(
        f"this is the part of rank {1 - rank} of 2, and rank {rank} of 2 loads it",
        lambda: model.load_state_dict(part),
    )
    says(
        "0.weight is [4, 8], the module's is [8, 8]",
        lambda: model.load_full_state_dict(model.module.state_dict()),
    )
    model.module[2].weight = nn.Parameter(torch.ones(8, 8))
    says("2.weight was replaced after the module was wrapped", lambda: model(x))
    says(
        "0.weight was split as [4, 8] of torch.float32 on cpu and is now [4, 8] of torch.float64",
        lambda: model.double()(x),
    )

    says("no parameters", lambda: get_fsdp(nn.ReLU()))
    says("compute_dtype is torch.int8", lambda: get_fsdp(layers(), torch.int8))
    says("1 is wrapped already", lambda: get_fsdp(nn.Sequential(nn.ReLU(), get_fsdp(layers()))))
    net = bridge.DataParallel(layers())
    inner, optimizer = get_fsdp(seeded(layers)), functools.partial(bridge.ShardedOptimizer, lr=0.1)
    before = fsdp_gather_full_params(inner)
    torchs, whole = nn.parallel.DistributedDataParallel, layers()
    early, late = optimizer(whole.parameters(), torch.optim.SGD), get_fsdp(whole)
    late(x).sum().backward()
    for words, wrap in (
        ("the module is wrapped already", lambda: bridge.DataParallel(inner)),
        ("0.0 is wrapped already", lambda: bridge.DataParallel(nn.Sequential(nn.Sequential(inner)))),
        ("0 is wrapped already", lambda: bridge.DataParallel(inner.module)),
        ("the module is wrapped already", lambda: torchs(inner)),
        ("0 is wrapped already", lambda: torchs(nn.Sequential(inner))),
        ("0.1 is wrapped already", lambda: torchs(nn.Sequential(nn.Sequential(nn.ReLU(), net)))),
        ("0 is wrapped already", lambda: get_fsdp(nn.Sequential(torchs(layers())))),
        (
            "0.0 is wrapped already",
            lambda: bridge.DataParallel(nn.Sequential(nn.Sequential(torchs(layers())))),
        ),
        ("parameter 0 of group 0 is split among", early.step),
        (
            "is ShardedOptimizer, which needs all",
            lambda: optimizer(layers().parameters(), bridge.ShardedOptimizer),
        ),
        ("is LBFGS, which needs all", lambda: optimizer(layers().parameters(), torch.optim.LBFGS)),
        ("the module is wrapped already", lambda: get_fsdp(inner)),
        ("weight is split among the ranks", lambda: get_fsdp(borrower(inner.module[0].weight))),
        ("weight is split among the ranks", lambda: bridge.DataParallel(borrower(inner.module[0].weight))),
        ("0.1 is wrapped already", lambda: get_fsdp(nn.Sequential(nn.Sequential(nn.ReLU(), net)))),
        ("0 is wrapped already", lambda: bridge.DataParallel(nn.Sequential(net))),
        ("parameter 0 of group 0 is split among", lambda: optimizer(inner.parameters(), torch.optim.SGD)),
    ):
        says(words, wrap)
    after = fsdp_gather_full_params(inner)
    assert all(torch.equal(before[name], after[name]) for name in before)
    says(
        "0.weight: an Embedding with max_norm",
        lambda: get_fsdp(nn.Sequential(nn.Embedding(4, 4, max_norm=1))),
    )
    says("0.weight: sparse gradients", lambda: get_fsdp(nn.Sequential(nn.Embedding(4, 4, sparse=True))))
    says("parameter 0.weight has no shape yet", lambda: get_fsdp(nn.Sequential(nn.LazyLinear(4))))
    says("parameter weight is of torch.complex64", lambda: get_fsdp(nn.Linear(4, 4, dtype=torch.complex64)))
    says("rank 1 has another module than rank 0", lambda: get_fsdp(layers(1 + rank)))
    used = layers()
    used(x).sum().backward()
    says("parameter 0.weight has a gradient", lambda: get_fsdp(used))


class Experts(nn.Module):
    """Runs the experts that have tokens, as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])

    def forward(self, x, chosen):
        return sum((self.experts[i](x) for i in chosen), x)


def other_modules(ranks, rank):
    """Weights of equal size are not taken for each other. Each case has its own ranks, because the error ends them."""
    x, odd = torch.ones(2, 8), rank % 2

    def train(chosen):
        model(x, chosen).sum().backward()

    def look(chosen):
        model(x, chosen)
        model(x, chosen)

    def another(chosen):
        (other if odd else model)(x, chosen)

    def load_part(late):
        early = model.state_dict()
        train((0, 1, 2))
        model.load_state_dict(model.state_dict() if late else early)
        model(x, (0,))

    def load_whole(other):
        model.load_full_state_dict({key: p + other for key, p in seeded(Experts).state_dict().items()})
        model(x, (0,))

    state = "in another state than rank 0: other order of parameters or modules"
    past, call = "in another state than rank 0: other seeds, restored files", "made another call"
    for words, chosen, run in (
        (state, ((0,), (1,)), look),
        (state, ((0, 1, 2), (0, 2)), look),
        ("order of parameters or modules", ((0,), (0,)), another),
        (state, ((0, 1), (1, 0)), train),
        (past, (False, True), load_part),
        (past, (0, 1), load_whole),
        (call, ((0, 1), (0,)), train),
    ):
        model, other = get_fsdp(seeded(Experts)), get_fsdp(seeded(Experts))
        for _ in range(2):
            load_whole(0)
        train((0, 1, 2))  # the next pass begins a gather before its module is called
        with torch.set_grad_enabled(run in (train, load_part)):
            says(words, lambda run=run, mine=chosen[odd]: run(mine))
            says("also an expert without tokens", lambda run=run, mine=chosen[odd]: run(mine))
        with contextlib.redirect_stderr(io.StringIO()):  # the same error again
            _run_finalizers(1)
        bridge.ranks.ranks_of.cache_clear()


def overflow(ranks, rank):
    """If a gradient overflows in the rows of one rank, a GradScaler skips the step on every rank: if FSDP computes in
    f16, if autocast does, if the module is of f16, and in f32."""

    def net(dtype=torch.float32):
        return seeded(
            lambda: nn.Sequential(nn.Linear(8, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 8))
        ).to(dtype)

    f16, f32 = torch.float16, torch.float32
    for model, cast, most in (
        (get_fsdp(net(), f16), None, 1e6),
        (get_fsdp(net()), f16, 1e6),
        (get_fsdp(net(f16)), None, 1e6),
        (get_fsdp(net()), None, 1e38),
    ):
        one = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        dtype = next(model.parameters()).dtype
        for weight, scale in ((most, 4.0), (1.0, 4.0)):
            before = fsdp_gather_full_params(model)
            one.zero_grad()
            with torch.autocast("cpu", cast or f16, enabled=cast is not None):
                out = model(torch.arange(16.0, dtype=dtype).view(2, 8))
            # The last row of the last weight overflows, and so do the gradients before it, on every rank.
            scaler.scale((out.to(f32) * torch.tensor([*[1.0] * 7, weight])).sum()).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(g.isnan().all() if weight > 1 else g.isfinite().all() for g in gradients)
            if dtype is f16:  # PyTorch's scaler refuses gradients of f16
                continue
            scaler.step(one)
            scaler.update()
            assert scaler.get_scale() == scale, (scaler.get_scale(), cast, dtype)
            moved = [not torch.equal(before[name], p) for name, p in fsdp_gather_full_params(model).items()]
            assert any(moved) if weight == 1 else not any(moved), moved
    for factors in torch.full((ranks, ranks), 1.0).fill_diagonal_(torch.inf):  # each rank in turn
        model = get_fsdp(net())
        model.module[2].weight.register_hook(functools.partial(torch.mul, factors[rank]))
        model(torch.arange(16.0).view(2, 8)).sum().backward()
        assert all(p.grad.isnan().all() for p in model.parameters())


def hooks_and_ends(ranks, rank):
    """Hooks run, on split parameters too, and see the averages. A wrapper that nobody uses any more is freed."""
    make, seen = lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), {}
    alone, inner = seeded(make), seeded(make)
    xs = [torch.arange(16.0).view(2, 8) * (rank + 1) for rank in range(ranks)]

    def see(name, p):
        seen[name] = p.grad.clone()

    def hook(name, p):
        p.register_hook(lambda grad: grad * 2)
        p.register_post_accumulate_grad_hook(functools.partial(see, name))

    hook("1.bias", inner[1].bias)  # before it is wrapped
    model = get_fsdp(inner)
    for name, p in inner.named_parameters():
        if name != "1.bias":
            hook(name, p)
    average_in_one_process(alone, ranks, lambda rank: 2 * alone(xs[rank]).square().sum())
    model(xs[rank]).square().sum().backward()
    for name, p in alone.named_parameters():
        unit = model._units.get(name)
        torch.testing.assert_close(seen[name], p.grad[unit.own] if unit else p.grad, rtol=1e-4, atol=1e-4)
        assert torch.equal(seen[name], inner.get_parameter(name).grad)
    anchors = [weakref.ref(unit.anchor) for unit in model._units.values()]
    del model, inner, unit, p
    gc.collect()
    assert anchors and all(anchor() is None for anchor in anchors)


def calls_of_pytorch(ranks, rank):
    """What cannot work with rows is refused by name. A module whose weights are not split is named in a warning."""
    with warnings.catch_warnings(record=True) as came:
        warnings.simplefilter("always")
        get_fsdp(nn.Sequential(nn.Conv2d(1 << 10, 1 << 11, 1, bias=False), nn.Linear(8, 8)))
    assert "2097160 of 2097224 parameters are whole on each rank" in str(came[0].message), came
    model = get_fsdp(seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))))
    words = "neither copied nor pickled, because each rank has a part"
    says(words, lambda: copy.deepcopy(model))
    says(words, lambda: torch.save(model, io.BytesIO()))
    says(words, lambda: torch.optim.swa_utils.AveragedModel(model))
    for make in (torch.optim.Adafactor, lambda p: torch.optim.Muon([x for x in p if x.dim() == 2])):
        says("needs whole parameters, and FullyShardedDataParallel", make(model.parameters()).step)
    model(torch.ones(2, 8)).sum().backward()
    gradient = model.module[0].weight.grad
    for norm in (
        lambda: gradient.norm(dim=0),
        lambda: torch.linalg.norm(gradient, 2),
        lambda: gradient.norm(-1),
    ):
        says("split among the ranks", norm)
    gradient.fill_(1e30)  # f32 does not hold the squares
    torch.testing.assert_close(gradient.norm(), torch.tensor(8e30))
    torch.save(model.state_dict(), part := io.BytesIO())
    part.seek(0)
    model.load_state_dict(torch.load(part))


def what_differs_by_rank(ranks, rank):
    """Whole parameters, buffers and their optimizer's state are compared. Statistics of batches may differ."""
    net = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    net[1].unused = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # not contiguous
    net[0].register_buffer("counted", torch.tensor([3, 1, 4], dtype=torch.int32))
    model, whole = get_fsdp(net), bridge.DataParallel(nn.Linear(8, 8))
    one = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 4], lr=0.01)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))

    def step(model=model):
        model(x).square().sum().backward()

    def differs(name, tensor, call):
        kept = tensor.clone()
        with torch.no_grad():
            tensor[2] += rank * tensor.new_tensor(1)
        says(f"{name} of rank 1 differs from rank 0's", call)
        tensor.data.copy_(kept)

    with unittest.mock.patch.object(bridge.replicas, "EVERY", 2):
        for _ in range(3):  # the first pass and the first step compare nothing
            step()
        one.step()
        differs("0.bias", net[0].bias, step)
        differs("the optimizer's exp_avg of 0.bias", one.state[net[0].bias]["exp_avg"], one.step)
        step(whole)
        differs("weight", whole.module.weight, lambda: step(whole))
    differs("0.bias", net[0].bias, model.full_state_dict)
    differs("0.counted", net[0].counted, model.full_state_dict)
    state = one.state[net[1].weight]["exp_avg_sq"]
    differs("the optimizer's exp_avg_sq of 1.weight", state, lambda: model.full_optimizer_state_dict(one))
    means = [torch.zeros(2, 8) for _ in range(2)]
    dist.all_gather(means, torch.stack([net[1].running_mean, model.full_state_dict()["1.running_mean"]]))
    assert not torch.equal(means[0][0], means[1][0]) and torch.equal(means[0][0], means[1][1])
    whole.close()


class Parts(nn.Module):
    """Reads a parameter that belongs to no unit."""

    def __init__(self):
        super().__init__()
        self.layer, self.parts = nn.Linear(8, 8), nn.ParameterList(torch.ones(8) for _ in range(3))

    def forward(self, part):
        return (self.layer(torch.ones(8)) * self.parts[part]).sum()


def use_other_parameters(ranks, rank):
    """The gradient of a rank without one counts as 0. If no rank has one, there is none."""
    alone, model = seeded(Parts), get_fsdp(seeded(Parts))
    model(rank).backward()
    average_in_one_process(alone, ranks, alone)
    gradients = [p.grad for p in model.module.parts]
    assert all(torch.equal(mine, p.grad) for mine, p in zip(gradients[:ranks], alone.parts, strict=False))
    assert gradients[ranks:] == [None]


def carry(ranks, rank, folder):
    """States from another number of ranks load with the same bits, and training continues."""
    make = lambda: Gpt(tied=True)  # noqa: E731
    model, alone = get_fsdp(seeded(make, 5)), seeded(make, 5)
    one, other = (torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, alone))
    if ranks > 1:
        state, moments = torch.load(f"{folder}/state.pt")
        taken = model.load_full_state_dict(state)
        assert not taken.missing_keys and not taken.unexpected_keys
        model.load_full_optimizer_state_dict(one, moments)
        mine = model.full_state_dict()
        assert list(mine) == list(state) and all(torch.equal(mine[key], state[key]) for key in state)
        alone.load_state_dict(state)
        other.load_state_dict(copy.deepcopy(moments))  # without a copy the two would share `step`
        says(
            "Missing key",
            lambda: model.load_full_state_dict({k: v for k, v in state.items() if k != "norm.bias"}),
        )
        part = one.state_dict()
        says("exp_avg of tokens.weight is [", lambda: model.load_full_optimizer_state_dict(one, part))
        through_checkpoints(rank, folder, state, moments)
    average_in_one_process(alone, ranks, lambda rank: loss_of(alone, ranks, rank))
    loss_of(model, ranks, rank).backward()
    for optimizer in (one, other):
        optimizer.step()
    check_same(model, alone, exact=ranks <= 2)
    states = model.full_state_dict(), model.full_optimizer_state_dict(one)
    if rank == 0:
        torch.save(states, f"{folder}/state.pt")
    saved, place = (
        {"model": model.state_dict(), "optimizer": one.state_dict()},
        f"{folder}/checkpoint-of-{ranks}",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.save(saved, checkpoint_id=place)
        checkpoints.async_save(copy.deepcopy(saved), checkpoint_id=place + "-async").result()
    dist.barrier()


def through_checkpoints(rank, folder, state, moments):
    """torch.distributed.checkpoint loads what another number of ranks saved."""
    for place in glob.glob(f"{folder}/checkpoint-of-{dist.get_world_size() - 1}*"):
        model = get_fsdp(seeded(lambda: Gpt(tied=True), 6))
        one = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss_of(model, 0, rank).backward()
        one.step()  # it has a state that can be loaded into
        saved = {"model": model.state_dict(), "optimizer": one.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoints.load(saved, checkpoint_id=place)
        model.load_state_dict(saved["model"])
        one.load_state_dict(saved["optimizer"])
        torch.testing.assert_close(model.full_state_dict(), state, rtol=0, atol=0)
        mine = model.full_optimizer_state_dict(one)["state"]
        torch.testing.assert_close(mine, moments["state"], rtol=0, atol=0)


def compiled(ranks, rank):
    """torch.compile of a wrapped module, with Dynamo's own warnings."""
    alone, inner = seeded(Tail), seeded(Tail)
    inner.layer = torch.compile(inner.layer, backend="aot_eager")
    model = get_fsdp(inner)
    with warnings.catch_warnings(), Watch() as watch:
        warnings.simplefilter("ignore")
        torch.compile(model, backend="aot_eager")(batch(0, rank)[0]).sum().backward()
    average_in_one_process(alone, ranks, lambda rank: alone(batch(0, rank)[0]).sum())
    assert watch.look() == 0
    for (name, parameter), right in zip(model.module.named_parameters(), alone.parameters(), strict=True):
        unit = model._units.get(name)
        right = right.grad[unit.own] if unit else right.grad
        torch.testing.assert_close(parameter.grad, right, rtol=1e-4, atol=1e-5)
    step = torch.compile(torch.optim.SGD(alone.parameters(), lr=0.1).step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at in range(5):  # Dynamo gives up if each step is compiled again
            with torch._dynamo.config.patch(error_on_recompile=at > 2):
                step()


def example(ranks, rank):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(Path(__file__).parents[1] / "examples/bridge_fsdp.py"))
    everyone = [None] * ranks
    dist.all_gather_object(everyone, re.findall(r"loss \S+, weights sum to (\S+\d{6})\n", said.getvalue()))
    assert len(everyone[0]) == 1 and all(theirs == everyone[0] for theirs in everyone), everyone


TRAINING = [train, accumulate, carry]
CASES = {
    1: TRAINING,
    2: [
        *TRAINING,
        beside_data_parallel,
        contract,
        prefetch_and_memory,
        checkpoint_and_memory,
        compiled,
        fail,
        read_weights_of_others,
        hooks_and_ends,
        misuse,
        calls_of_pytorch,
        what_differs_by_rank,
        overflow,
        use_other_parameters,
        example,
    ],
    3: TRAINING,
    4: [train, carry, other_modules],  # the last one: its errors end the ranks' communicators
}


def a_rank(rank, folder):
    warnings.simplefilter("error")  # as in the course's tests
    torch.set_num_threads(1)
    for ranks, cases in CASES.items():
        if rank >= ranks:
            continue
        dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
        for case in cases:
            try:
                case(ranks, rank, folder) if case is carry else case(ranks, rank)
            except BaseException as error:
                error.add_note(f"in {case.__name__} of rank {rank} of {ranks}")
                raise
        dist.barrier()
        bridge.ranks.ranks_of.cache_clear()
        dist.destroy_process_group()


class FullySharded(unittest.TestCase):
    def test_all_cases_on_one_to_four_ranks(self):
        with tempfile.TemporaryDirectory(prefix="tandem-fsdp-") as folder:
            torch.multiprocessing.set_forkserver_preload(
                ["torch._dynamo", "torch.distributed.checkpoint", "tandem.fsdp"]
            )
            torch.multiprocessing.start_processes(a_rank, (folder,), max(CASES), start_method="forkserver")


if __name__ == "__main__":
    unittest.main(verbosity=2)
