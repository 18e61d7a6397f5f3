"""Gathered weights in memory, also after a pass that fails."""

import contextlib

import torch
from bridge_fsdp.kit import Watch, check_same, get_fsdp, layers, optimizers, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint


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
