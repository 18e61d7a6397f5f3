"""Programs that are refused, and ranks that differ."""

import contextlib
import copy
import functools
import io
import unittest.mock
import warnings
from multiprocessing.util import _run_finalizers

import torch
import torch.distributed as dist
from bridge_fsdp.kit import fsdp_gather_full_params, get_fsdp, layers, says, seeded
from torch import nn

import tandem as bridge


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
    for other in (lambda _: layers(2), nn.Module.double, lambda model: model.requires_grad_(False)):
        model = other(layers()) if rank else layers()
        says("rank 1 has another module than rank 0", lambda model=model: get_fsdp(model))
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

    def load_moments(other):
        moments = {i: {"momentum": p + other} for i, p in enumerate(seeded(Experts).parameters())}
        one = torch.optim.SGD(model.parameters())
        model.load_full_optimizer_state_dict(one, one.state_dict() | {"state": moments})
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
        (past, (0, 1), load_moments),
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

    def differs(name, tensor, call, moved=False):
        kept = tensor.clone()
        with torch.no_grad():
            tensor[2] += rank * (not moved)
            tensor[:4] = tensor[:4].roll(2 * rank * moved)
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
    differs("0.bias", net[0].bias, model.full_state_dict, moved=True)
    differs("0.counted", net[0].counted, model.full_state_dict)
    state = one.state[net[1].weight]["exp_avg_sq"]
    differs("the optimizer's exp_avg_sq of 1.weight", state, lambda: model.full_optimizer_state_dict(one))
    means = [torch.zeros(2, 8) for _ in range(2)]
    dist.all_gather(means, torch.stack([net[1].running_mean, model.full_state_dict()["1.running_mean"]]))
    assert not torch.equal(means[0][0], means[1][0]) and torch.equal(means[0][0], means[1][1])
    whole.close()
