"""ShardedOptimizer compared with the whole optimizer, its states, and ranks that differ."""

import contextlib
import copy
import functools
import io
from multiprocessing.util import _run_finalizers

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn import functional as F

import tandem as bridge
from parity_bridge.started import OnRanks, Tied, Toy, said


def name_limits(rank, device):
    module = nn.Linear(2, 2).to(device)
    together = bridge.DataParallel(module, seconds=20.5, open_seconds=50)
    assert together._ranks.limits == {"open_seconds": 50, "seconds": 20.5}
    every = [bytes([r]) * 40000 for r in range(2)]  # more than one call takes
    assert together._ranks.exchange(every[rank]) == every
    many = torch.full((2000,), float(rank), device=device)  # more calls than the library has handles
    beside = torch.full((11,), rank, dtype=torch.uint8, device=device)[3:]  # 8 bytes, at no multiple of 8
    together._ranks.broadcast((one, 0) for one in (*many, beside))
    assert not many.any() and not beside.any()
    shard = functools.partial(bridge.ShardedOptimizer, [*module.parameters()], torch.optim.SGD, lr=0.1)
    shard(seconds=20.5, open_seconds=50)
    said("seconds is 7: the ranks have met with 20.5", lambda: shard(seconds=7))
    said("open_seconds is 7: the ranks have met with 50", lambda: shard(open_seconds=7))
    together.close()


def shard_beside_the_whole(rank, device):
    name_limits(rank, device)
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
            if step == 4:  # adds a group in the middle of training
                whole.add_param_group({"params": list(alone.parameters())[-1:], "lr": 0.05})
                parts.add_param_group({"params": late, "lr": 0.05})
            if step == 7:  # as a scheduler does
                whole.param_groups[0]["lr"] = parts.param_groups[0]["lr"] = 0.01
            x, y = torch.rand(32, 10, device=device), torch.rand(32, 5, device=device)
            for net, optimizer in ((alone, whole), (sharded, parts)):
                optimizer.zero_grad()
                ((net(x) - y) ** 2).sum().backward()
                optimizer.step()
            parts.consolidate_state_dict(to=step % 2)  # until the next step, state_dict() returns it
            for a, b in zip(sharded.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-7, atol=0)
        said("neither copied nor pickled", lambda parts=parts: copy.deepcopy(parts))
        parts.step()
        owned = [p for p in sharded.parameters() if p.requires_grad and parts.owner(p) == rank]
        held = [entry["exp_avg"].numel() for entry in parts.state_dict()["state"].values()]
        assert sum(held) == sum(p.numel() for p in owned), (held, owned)
    less, more = torch.zeros(10, device=device), torch.zeros(6, device=device).double()  # in bytes
    parts = bridge.ShardedOptimizer([less, more], torch.optim.SGD, lr=0.1)
    assert (parts.owner(less), parts.owner(more)) == (1, 0)


class Gpt(nn.Module):
    """GPT-2's shape: learned positions, layer norms before attention and MLP, and a head tied to the embedding."""

    def __init__(self, vocab=29, seq=8, d=16, heads=2, layers=2):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, d), nn.Embedding(seq, d)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(d),
                    "qkv": nn.Linear(d, 3 * d, bias=False),  # the gradient of a key's bias is only rounding
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


class Kept(torch.optim.SGD):
    def step(self, closure=None, kept=None):
        kept += [len(self.param_groups)]
        return super().step(closure)


def train_gpt(make, rank, ranks, begin=0, end=50, saved=None):
    """Runs steps begin to end, each rank on its part of 4 sequences. Returns the optimizer and the model's weights."""
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
    if saved is None:  # no defaults: a resumed run gets these values only from the saved state
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
    with ranks_of(f"{folder}/c", rank, 4):  # each rank finds the error itself
        other = sharded(Gpt().double().named_parameters())
        if rank < 2:
            load = other.load_state_dict
            said(f"rank {rank} of 2, this is rank {rank} of 4", lambda: load(torch.load(part)["optimizer"]))
            said(
                "parameter 2: the state has torch.float64 [48, 16] of group 0",
                lambda: load(torch.load(file)["optimizer"]),
            )


def optimizers_that_differ(rank, device):
    """Each case has its own ranks, because an error of ranks ends them."""

    def layers():
        torch.manual_seed(1)
        net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in "123")).to(device)
        net(torch.ones(2, 4, device=device)).square().sum().backward()
        return net, list(net.parameters())

    bridge.ShardedOptimizer(layers()[1], Kept, lr=0.1).step(kept=(kept := []))
    assert kept == [1]
    one = bridge.ShardedOptimizer(layers()[1], torch.optim.SGD, lr=0.1)
    one.consolidate_state_dict()
    one.add_param_group({"params": layers()[1]})
    part = one.state_dict()  # of both groups
    assert part["rank"] == rank and len(part["param_groups"]) == 2
    one.param_groups[1]["mine"] = 1
    one.load_state_dict(part)
    assert "mine" not in one.param_groups[1]
    odd = rank == 1
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    # the parameters differ only at the end of their gradients
    zeros = [nn.Parameter(torch.zeros(3000, device=device)) for _ in "12"]
    for number, p in enumerate(zeros):
        p.grad = torch.zeros_like(p)
        p.grad[-1] = number + 1.0

    def step(choose=lambda ps: ps, cls=adamw, **options):
        return lambda: bridge.ShardedOptimizer(choose(layers()[1]), cls, lr=0.1, **options).step()

    def schedule():
        optimizer = bridge.ShardedOptimizer(layers()[1], sgd, lr=0.1)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.2 if odd else 0.1
        optimizer.step()

    def load():  # parts of two saved states
        optimizer = bridge.ShardedOptimizer(layers()[1], adamw, lr=0.1)
        optimizer.step()
        early = copy.deepcopy(optimizer.state_dict())
        optimizer.step()
        optimizer.load_state_dict(early if odd else optimizer.state_dict())
        optimizer.step()

    def passes():  # one more on rank 0, which must not match a gradient of another pass
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
        ("in another state than rank 0: other hyperparameters or", step(cls=sgd if odd else adamw)),
        ("in another state than rank 0: other hyperparameters or", step(weight_decay=0.1 + rank)),
        ("in another state than rank 0: other hyperparameters or", schedule),
        ("in another state than rank 0: other seeds, restored files", load),
        ("in another state than rank 0: other number of passes", passes),
    ):
        said(words, call)
        with contextlib.redirect_stderr(io.StringIO()):  # the same error again
            _run_finalizers(1)
        bridge.ranks.ranks_of.cache_clear()


class ShardedOptimizer(OnRanks):
    def test_a_sharded_optimizer_is_the_whole_one(self):
        self.start(shard_beside_the_whole)

    def test_a_saved_run_goes_on_among_other_ranks(self):
        self.start(resume_on_other_ranks, (0,) * 4, on_gpus=False, joined=False)

    def test_optimizers_that_differ(self):
        self.start(optimizers_that_differ)
