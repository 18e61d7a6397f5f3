"""Six models, trained with FullyShardedDataParallel, with PyTorch's fully_shard and in one process.

    PYTHONPATH=. build/venv/bin/python tests/parity_bridge_models.py            # 2, 3 and 4 ranks: 108 trainings
    PYTHONPATH=. build/venv/bin/python tests/parity_bridge_models.py vit lstm   # these models

The test runs each model and each configuration once.

A side's error is the distance of its parameters after 20 steps from the same training in f64, relative to their norm.
Ours may be 1.1 times the largest of PyTorch's errors: fully_shard's, one process's, and that of one process that gets
the examples of each batch in another order."""

import itertools
import sys
import tempfile
import unittest
import warnings
from multiprocessing.util import _run_finalizers
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tandem as bridge
from tandem.fsdp import FullyShardedDataParallel

D, VOCAB, SEQ, CLASSES = 16, 31, 8, 5
EXAMPLES, STEPS = 12, 20  # a micro-batch's of all ranks
CONFIGS = "f32", "bf16", "f16", "checkpoint", "compile", "resume"
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


class Feed(nn.Module):
    def __init__(self, gated):
        super().__init__()
        self.up, self.down = nn.Linear(D, 41, bias=not gated), nn.Linear(41, D, bias=not gated)
        self.gate = nn.Linear(D, 41, bias=False) if gated else None

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x) if self.gate else F.gelu(self.up(x)))


class Block(nn.Module):
    """A layer of GPT-2, or of Llama, or with three experts that all get each token."""

    def __init__(self, kind):
        super().__init__()
        self.gpt = kind in ("gpt2", "vit")
        self.norm1, self.norm2 = (nn.LayerNorm(D) if self.gpt else nn.RMSNorm(D) for _ in range(2))
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.experts = nn.ModuleList(Feed(not self.gpt) for _ in range(3 if kind == "moe" else 1))
        self.router = nn.Linear(D, 3, bias=False) if kind == "moe" else None

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        if not self.gpt:
            angle = torch.arange(x.shape[1], dtype=q.dtype)[:, None] * 0.1
            q, k = (t * angle.cos() + torch.cat([-t[..., 4:], t[..., :4]], -1) * angle.sin() for t in (q, k))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        shares = self.router(y).softmax(-1).split(1, -1) if self.router else [1]
        return x + sum(share * expert(y) for share, expert in zip(shares, self.experts, strict=True))


class Convolution(nn.Sequential):
    def __init__(self, channels):
        super().__init__(nn.Conv2d(channels, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


class Model(nn.Module):
    def __init__(self, kind, again=False):
        super().__init__()
        self.kind, self.again, self.tokens = kind, again, None
        if kind == "conv":
            self.blocks = nn.ModuleList(Convolution(channels) for channels in (3, 8))
        elif kind == "lstm":
            # In 16 bits PyTorch asks for oneDNN's LSTM, which a processor without AVX-512 does not have.
            torch.backends.mkldnn.set_flags(False)
            self.blocks = nn.ModuleList([Recurrent(D, D // 2, 2, batch_first=True, bidirectional=True)])
        else:
            self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        if kind == "vit":
            self.patch, self.first = nn.Conv2d(3, D, 4, 4), nn.Parameter(torch.zeros(1, 1, D))
        elif kind != "conv":
            self.tokens, self.places = nn.Embedding(VOCAB, D), nn.Embedding(SEQ, D)
        self.norm = nn.LayerNorm(8 if kind == "conv" else D)
        self.head = nn.Linear(*self.norm.normalized_shape, VOCAB if self.tokens else CLASSES, bias=False)
        if kind == "gpt2":
            self.head.weight = self.tokens.weight

    def forward(self, x):
        if self.tokens:
            x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        elif self.kind == "vit":
            x = self.patch(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.first.expand(len(x), -1, -1).to(x.dtype), x], 1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        if not self.tokens:
            x = x.flatten(2).mean(2) if self.kind == "conv" else x.mean(1)
        return self.head(self.norm(x))


MODELS = "gpt2", "llama", "moe", "vit", "lstm", "conv"


def loss_of(net, call, step, micro, rank, ranks, permuted):
    make = torch.Generator().manual_seed(100 * step + micro)
    ids = torch.randint(VOCAB, (EXAMPLES, SEQ + 1), generator=make)
    pictures = torch.randn(EXAMPLES, 3, 8, 8, generator=make).to(net.head.weight.dtype)
    mine = torch.arange(EXAMPLES).chunk(ranks)[rank]
    mine = mine.roll(1) if permuted else mine
    x, y = (ids[mine, :-1], ids[mine, 1:]) if net.tokens else (pictures[mine], ids[mine, 0] % CLASSES)
    return F.cross_entropy(call(x).float().flatten(0, -2), y.flatten()) / 2


def train(net, call, optimizer, config, span, rank=None, permuted=False):
    """Some steps of two micro-batches. If rank is None, one process computes the losses of all ranks. In f16 the loss
    of the last rank is not finite in one step."""
    ranks, begin, end = span
    exact = net.head.weight.dtype == torch.float64
    half = None if exact else HALVES.get(config)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5, enabled=half == torch.float16)
    for step in range(begin, end):
        optimizer.zero_grad()
        for micro in range(2):
            for at in range(ranks) if rank is None else [rank]:
                with torch.autocast("cpu", half, enabled=half is not None):
                    loss = loss_of(net, call, step, micro, at, ranks, permuted)
                if config == "f16" and step == 3 and at == ranks - 1:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if rank is None:
            for parameter in net.parameters():
                parameter.grad /= ranks
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        if not (exact and config == "f16" and step == 3):
            scaler.step(optimizer)
        scaler.update()


def make(kind, config, dtype=torch.float32):
    torch.manual_seed(0)
    return Model(kind, config == "checkpoint").to(dtype)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=3e-3, eps=1e-4)


def flat(parameters):
    return torch.cat([p.detach().double().flatten() for p in parameters])


def in_one_process(kind, config, plan, dtype=torch.float32, permuted=False):
    net = make(kind, config, dtype)
    optimizer = adamw(net)
    for span in plan:
        train(net, net, optimizer, config, span, permuted=permuted)
    return flat(net.parameters())


def keep(state, rank, saved):
    if rank == 0:
        torch.save(state, saved)


def ours(kind, config, span, rank, saved):
    net = make(kind, config)
    model = FullyShardedDataParallel(net)
    optimizer = adamw(model)
    if span[1]:
        state = torch.load(saved)
        model.load_full_state_dict(state[0])
        model.load_full_optimizer_state_dict(optimizer, state[1])
    train(
        net,
        torch.compile(model, backend="aot_eager") if config == "compile" else model,
        optimizer,
        config,
        span,
        rank,
    )
    if span[2] < STEPS:
        keep((model.full_state_dict(), model.full_optimizer_state_dict(optimizer)), rank, saved)
    return flat(model.gather_full_parameters().values())


def theirs(kind, config, span, rank, saved):
    net = make(kind, config)
    mesh = dist.init_device_mesh("cpu", (span[0],))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer, whole = adamw(net), StateDictOptions(full_state_dict=True)
    if span[1]:
        model_state, optimizer_state = torch.load(saved)
        set_state_dict(
            net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=whole
        )
    train(net, net, optimizer, config, span, rank)
    if span[2] < STEPS:
        keep(get_state_dict(net, optimizer, options=whole), rank, saved)
    return flat(p.full_tensor() for p in net.parameters())


def errors(kind, config, plan, span, rank, folder):
    """Each side's error and the allowed one; None before the end of the plan."""
    # oneDNN has no f16 LSTM on many processors, also without ranks.
    with torch.backends.mkldnn.flags(enabled=(kind, config) != ("lstm", "f16")):
        sides = {
            side.__name__: side(kind, config, span, rank, f"{folder}/{side.__name__}-{kind}")
            for side in (ours, theirs)
        }
        if span != plan[-1]:
            return None
        alone = {"truth": {"dtype": torch.float64}, "one": {}, "permuted": {"permuted": True}}
        mine = {side: in_one_process(kind, config, plan, **alone[side]) for side in [*alone][rank :: span[0]]}
    everyone = [None] * span[0]
    dist.all_gather_object(everyone, mine)
    for part in everyone:
        sides |= part
    truth = sides.pop("truth")
    found = {side: ((value - truth).norm() / truth.norm()).item() for side, value in sides.items()}
    return found | {"allowed": 1.1 * max(error for side, error in found.items() if side != "ours")}


def a_rank(rank, folder, stages):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for number, (ranks, cases) in enumerate(stages):
        if rank >= ranks:
            continue
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=ranks)
        for kind, config, plan, span in cases:
            found = errors(kind, config, plan, span, rank, folder)
            if found and rank == 0:
                wrong = "" if found["ours"] <= found["allowed"] else " WRONG"
                numbers = "  ".join(f"{side} {error:.2e}" for side, error in found.items())
                path = " to ".join(str(ranks) for ranks, *_ in plan)
                row = f"{path:6} ranks  {kind:5} {config:10}  {numbers}{wrong}"
                print(row, flush=True)
                with open(f"{folder}/table", "a") as table:
                    print(row, file=table)
        dist.barrier()
        _run_finalizers(1)  # the bridge's: a rank that is not in the next stage ends now
        bridge.ranks.ranks_of.cache_clear()
        dist.destroy_process_group()


def table(numbers, cases):
    """Runs the cases, each a model, a configuration and a number of ranks. After half of its steps `resume` goes on
    with the next number."""
    then = dict(zip(numbers, [*numbers[1:], numbers[0]], strict=True))
    stages = [(ranks, []) for ranks in [*numbers, numbers[0]]]
    for kind, config, ranks in cases:
        at = numbers.index(ranks)
        plan = [(ranks, 0, STEPS)]
        if config == "resume":
            plan = [(ranks, 0, STEPS // 2), (then[ranks], STEPS // 2, STEPS)]
        for (_, stage), span in zip(stages[at:], plan, strict=False):
            stage.append((kind, config, plan, span))
    with tempfile.TemporaryDirectory(prefix="tandem-models-") as folder:
        torch.multiprocessing.set_forkserver_preload(["torch._dynamo", "parity_bridge_models"])
        torch.multiprocessing.start_processes(
            a_rank, (folder, stages), max(numbers), start_method="forkserver"
        )
        return Path(folder, "table").read_text().splitlines()


class Models(unittest.TestCase):
    def test_each_model_and_each_configuration(self):
        cases = [("gpt2", "compile", 2), ("llama", "resume", 2), ("moe", "checkpoint", 3)]
        cases += [("vit", "f16", 3), ("lstm", "bf16", 3), ("conv", "f32", 3)]
        rows = table([2, 3], cases)
        self.assertEqual(len(rows), len(cases))
        self.assertEqual([row for row in rows if row.endswith("WRONG")], [])


if __name__ == "__main__":
    from parity_bridge_models import table  # the processes import it by this name

    models = sys.argv[1:] or MODELS
    rows = table([2, 3, 4], itertools.product(models, CONFIGS, [2, 3, 4]))
    wrong = sum(row.endswith("WRONG") for row in rows)
    print(f"{len(rows)} trainings, {wrong} wrong")
    sys.exit(wrong > 0)
