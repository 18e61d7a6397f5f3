"""Training and uses of FSDP, compared with one process that averages the gradients of all ranks' batches."""

import contextlib
import functools
import gc
import io
import re
import runpy
import warnings
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from bridge_fsdp.kit import (
    Gpt,
    Tail,
    Watch,
    average_in_one_process,
    batch,
    check_same,
    fsdp_gather_full_params,
    fsdp_on_after_backward,
    get_fsdp,
    loss_of,
    optimizers,
    seeded,
)
from torch import nn
from torch.nn import functional as F

import tandem as bridge


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
    inner[2].register_full_backward_hook(lambda module, *_: seen.update(part=module.weight.shape))
    model(xs[rank]).square().sum().backward()
    for name, p in alone.named_parameters():
        unit = model._units.get(name)
        torch.testing.assert_close(seen[name], p.grad[unit.own] if unit else p.grad, rtol=1e-4, atol=1e-4)
        assert torch.equal(seen[name], inner.get_parameter(name).grad)
    assert seen["part"] == (8 // ranks, 8)
    anchors = [weakref.ref(unit.anchor) for unit in model._units.values()]
    del model, inner, unit, p
    gc.collect()
    assert anchors and all(anchor() is None for anchor in anchors)


class Parts(nn.Module):
    """Reads a parameter that belongs to no unit."""

    def __init__(self):
        super().__init__()
        self.layer, self.parts = nn.Linear(8, 8), nn.ParameterList(torch.ones(8) for _ in range(3))
        self.own = nn.Parameter(torch.ones(8))

    def forward(self, part):
        self.saw = part
        return (self.layer(torch.ones(8)) * self.parts[int(part)] * self.own).sum()


def use_other_parameters(ranks, rank):
    """The gradient of a rank without one counts as 0. If no rank has one, there is none."""
    alone, model = seeded(Parts), get_fsdp(seeded(Parts))
    model(rank).backward()
    average_in_one_process(alone, ranks, alone)
    gradients = [p.grad for p in model.module.parts]
    assert all(torch.equal(mine, p.grad) for mine, p in zip(gradients[:ranks], alone.parts, strict=False))
    assert gradients[ranks:] == [None]
    low = get_fsdp(Parts(), torch.bfloat16)
    low(torch.zeros((), dtype=torch.float64))
    assert low.module.saw.dtype == torch.float64  # its own parameter does not change the inputs of others


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
        runpy.run_path(str(Path(__file__).parents[2] / "examples/bridge_fsdp.py"))
    everyone = [None] * ranks
    dist.all_gather_object(everyone, re.findall(r"loss \S+, weights sum to (\S+\d{6})\n", said.getvalue()))
    assert len(everyone[0]) == 1 and all(theirs == everyone[0] for theirs in everyone), everyone
