"""DataParallel compared with one process and with PyTorch's DDP."""

import contextlib
import copy
import functools
import gc
import io
import os
import sys
import weakref

import torch
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tandem as bridge
from parity_bridge.started import OnRanks, Tied, Toy, close, examples, said

STEPS = 5
WAYS = [("naive", None), ("flat", None), ("overlap", None), ("bucketed", None)]
WAYS += [("bucketed", mb) for mb in (0.0016, 0.0001, 0.01)]


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
            with together._ranks.device.calls() as c:
                buckets = c.value("td_ddp_describe", together._ddp).buckets
            assert (buckets == 1) == (strategy == "flat" or (strategy == "bucketed" and mb in (None, 0.01)))
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
    """The backward pass ends here, as when memory is exhausted."""

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

    def another_pass_of_the_same(model, net, x):  # as a generator needs a pass through a discriminator
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

    def there_and_back(net):  # the type is the same at the end, but gradients lie in another place
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
        for wrapped in (True, False):  # calls the wrapper, or the module inside it
            net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device)
            net[0].bias.requires_grad_(False)
            model = bridge.DataParallel(net)
            x = torch.randn(4, 6, device=device)
            model(x).sum().backward()
            if change is freeze:  # weights may be frozen for some passes
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
    """Properties that PyTorch's DistributedDataParallel accepts: another order in memory, buffers, an empty parameter,
    and a frozen one of whole numbers."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.nothing, self.head = nn.Parameter(torch.zeros(0, 5)), nn.Linear(4, 2)
        self.count = nn.Parameter(torch.randint(99, (3,)), requires_grad=False)
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
    assert not {"matplotlib", "rich", "jinja2"} & {*sys.modules}, "the bridge needs none of them"
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
        for model in (averaged, mine, theirs):  # before the other rank, for which this call does not wait
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
        model.eval()(xs[0][:0]).sum().backward()  # an empty batch
    for a, b in zip(mine.module.parameters(), theirs.module.parameters(), strict=True):
        assert a.grad is b.grad is None or a.numel() == 0 or torch.equal(a.grad, b.grad)
    kinds = (bridge.DataParallel, DistributedDataParallel)
    own = [kind(copy.deepcopy(mine.module).train(), broadcast_buffers=False) for kind in kinds]
    for x in xs[:2]:
        for model in own:
            step_of(model, x)
    same_state(own[0].module, own[1].module)
    refused_or_freed(rank, device)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, chosen):
        return sum(self.experts[i](x).square().sum() for i in chosen)


def unused_parameters_and_no_sync(rank, device):
    """Gradients, and which parameters have none, are as in PyTorch's DistributedDataParallel."""
    x = torch.arange(8.0, device=device).view(2, 4) + rank

    def same():
        model(x, (0,)).backward()

    def one_each():
        model(x, (rank,)).backward()

    def in_micro_batches():
        with model.no_sync():
            model(x, (1,)).backward()
        model(x, (2 * rank,)).backward()

    def forward_outside():
        loss = model(x, (0, 1))
        with model.no_sync():
            loss.backward()

    def forward_within():
        with model.no_sync():
            loss = model(x, (0, 1))
        loss.backward()

    for strategy in ("overlap", "flat"):
        nets = []
        torch.manual_seed(0)
        net = Experts().to(device)
        for make in (
            lambda net: bridge.DataParallel(net, strategy),  # noqa: B023
            lambda net: DistributedDataParallel(net, find_unused_parameters=True),
            lambda net: bridge.DataParallel(net, strategy, unused_as_zero=True),  # noqa: B023
        ):
            nets.append(copy.deepcopy(net))
            model = make(nets[-1])
            for case in (same, one_each, in_micro_batches, forward_outside, forward_within):
                model.zero_grad()
                case()
                nets[-1].seen = getattr(nets[-1], "seen", []) + [
                    (case.__name__, name, None if p.grad is None else p.grad.clone())
                    for name, p in nets[-1].named_parameters()
                ]
        for mine, theirs, zero in zip(*(net.seen for net in nets), strict=True):
            assert (mine[2] is None) == (theirs[2] is None), (mine, theirs)
            if theirs[2] is not None:
                torch.testing.assert_close(mine[2], theirs[2], msg=f"{mine}, {theirs}")
            assert mine[0] == "forward_within" or zero[2].any() == (mine[2] is not None), (zero, mine)


def refused_or_freed(rank, device):
    model = bridge.DataParallel(nn.Linear(6, 6).to(device))
    with model._ranks.device.c.ffi._lock:  # as if the garbage collector runs while cffi looks up a function
        del model
        gc.collect()
    net = nn.Sequential(nn.Conv2d(4, 4, 4))  # equal extents in any order
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
    assert live() > before and model._block.numel() == 2 * 256  # a weight and a bias, with their flags
    gone, held = weakref.ref(model), net.weight.grad[1:]
    del model
    assert live() > before and gone() is None
    assert torch.equal(net.weight.grad, torch.full_like(net.weight, 2))  # its memory is there yet
    net(torch.ones(1, 6, device=device)).sum().backward()
    assert torch.equal(held, torch.full_like(held, 3))
    net.zero_grad()
    del held
    assert live() == before


def refuse(rank, device):
    said("no parameters", lambda: bridge.DataParallel(nn.ReLU()))
    said("naive, flat, overlap or bucketed", lambda: bridge.DataParallel(Tied().to(device), "fast"))
    complex_one = nn.Linear(2, 2, dtype=torch.complex64, device=device)
    said("complex64, which is not sent", lambda: bridge.DataParallel(complex_one))
    odd = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + rank)).to(device)
    said("'1.weight' here: rank 1 has f32 [4, 2]", lambda: bridge.DataParallel(odd))
    model = bridge.DataParallel(Tied().to(device))
    x = torch.zeros(2, 10, device=device)
    if rank == 1:
        os.kill(os.getpid(), 9)
    said(
        "rank 1 (process",
        lambda: [(model(x).sum().backward(), model.finish_gradient_synchronization()) for _ in "12"],
    )
    os._exit(0)  # what is left of the communicator is the test of comm's


class DataParallel(OnRanks):
    def test_data_parallel_training_is_that_of_one_process(self):
        self.start(train_beside_one_process)

    def test_each_backward_pass_ends_its_reduction(self):
        self.start(passes_that_end_by_themselves)

    def test_what_pytorchs_takes_refuses_and_frees(self):
        self.start(beside_pytorchs)

    def test_unused_parameters_and_no_sync(self):
        self.start(unused_parameters_and_no_sync)

    def test_parameters_that_change(self):
        self.start(parameters_that_change)

    def test_what_cannot_be_and_a_rank_that_dies(self):
        self.start(refuse, (0, -9))
