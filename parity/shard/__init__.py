"""Optimizer state split among ranks: libtandem's, by tensors and flat, against PyTorch's ZeroRedundancyOptimizer."""

from functools import partial
from itertools import product

import torch

from parity.core import Case, Side, within
from parity.shard import full, memory
from parity.shard.page import report
from parity.shared import ranked
from parity.shared.sizes import extents
from ref import ddp as toys
from ref import shard as ref

__all__ = ["cases", "report", "run"]

IMPL = "torch_zero"
FUSED = {"fused": True}  # its AdamW
KINDS = ("tensors", "flat")
STATES = ("whole", *KINDS)
ACCOUNTING = "optimizer_state_sharding_accounting"
TOY_STEPS, SAMPLES = 10, 32
TOY = dict(lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
BUCKET_MB = 25
LAPTOP_MB = 4  # of the cases that count sent bytes: several calls a step
XL_WAYS = {"f32": (25,), "bf16_mixed": (100, 200)}  # buckets, in the steps that are timed
# AdamW divides by the root of a mean square: if a gradient is noise, so is its update. So updates are held to
# float64's as a whole. The largest error of PyTorch is 1.2e-4; one weight that is not updated is more.
UPDATES_WITHIN = 1e-3


def cases(profile, device):
    # The quick profile starts processes for these numbers of ranks alone, which ddp and comm have as well.
    every = {"full": (1, 2, 3, 4, 6), "standard": (2, 3), "quick": ranked.QUICK_RANKS[device]}
    for ranks in every[profile]:
        for model in ["tied"] if profile == "quick" and ranks > 2 else toys.TOYS:
            keys = dict(model=model, ranks=ranks, steps=TOY_STEPS, samples=SAMPLES)
            yield Case("optimizer_state_sharding", seconds=0.2, shard="tensors", **keys)
        if ranks not in (2, 3, 4):
            continue
        for shard in KINDS if ranks == 2 or profile == "full" else KINDS[-1:]:
            keys = full.TINY | ways(shard, 0.05) | dict(ranks=ranks, steps=3, dtype="f32", optimizer="adamw")
            yield Case("optimizer_state_sharding", seconds=1.0, config=configs_of(device), **keys)
    for shard in KINDS:  # three ranks leave a rest of each bucket
        keys = full.TINY | ways(shard, 0.05) | dict(ranks=3 if device == "cpu" else 2)
        yield from ranked.options_alone("optimizer_state_sharding", device, "torch_ddp", **keys)
    yield from full.cases(profile, device)
    yield from memory_cases(profile, device)
    yield from xl_cases(profile) if device == "cuda" else laptop_cases(profile)


def laptop_cases(profile):
    for ranks in (2, 4) if profile == "full" else (2,):
        for shard in KINDS:
            keys = ranked.LAPTOP | ways(shard, BUCKET_MB) | dict(ranks=ranks, dtype="f32", optimizer="adamw")
            yield Case(ACCOUNTING, **ranked.timed("cpu", profile, keys), **keys, config=configs_of("cpu"))


def xl_cases(profile):
    for ranks, (dtype, sizes) in product(ranked.XL_RANKS[profile], XL_WAYS.items()):
        mine = ranked.switches_of("cuda", dtype)
        whole = {ranked.whole_of(side): switches for side, switches in mine.items()}
        for mb, shard in product(sizes if ranks == 2 else sizes[:1], KINDS):
            config = configs_of("cuda", dtype, shard) | whole
            for size in ("xl", "2.7B") if (profile, ranks, dtype) == ("full", 2, "f32") else ("xl",):
                keys = (
                    {"dtype": dtype} | xl_size(size) | ways(shard, mb) | dict(ranks=ranks, optimizer="adamw")
                )
                yield Case(ACCOUNTING, **ranked.timed("cuda", profile, keys), **keys, config=config)


def memory_cases(profile, device):
    """Where memory goes, and what is sent: with state that every rank has, and split both ways."""
    gpu = device == "cuda"
    kinds = [(xl_size(), dtype) for dtype in XL_WAYS] if gpu else [(ranked.LAPTOP, "f32")]
    kinds += [(xl_size("2.7B"), "f32")] if gpu and profile == "full" else []
    counts = (2, 4) if profile == "full" and not gpu else (2,)
    for ranks, (size, dtype), shard in product(counts, kinds, STATES):
        keys = size | ways(shard, BUCKET_MB if gpu else LAPTOP_MB)
        keys |= dict(ranks=ranks, dtype=dtype, optimizer="adamw", part="memory")
        how = dict(seconds=20.0 if gpu else ranks) | ranked.in_turn(device, keys)
        # What a step's operations find there: graphs have memory of CUDA's own.
        config = configs_of(device, dtype, shard, queued=True)
        yield Case(ACCOUNTING, config=config, **keys, **how)


def xl_size(size="xl"):
    """The assignment's: xl on two GPUs, batch 2 a rank. The xl of 2026 is 2.7B here."""
    return {"size": size} | extents(size)[0] | {"batch": 2, "context": 512 if size == "2.7B" else 128}


def configs_of(device, dtype="f32", shard=None, queued=False):
    if shard == "whole":
        return ranked.configs(device, "torch_ddp", dtype, queued, shard)
    found = ranked.configs(device, IMPL, dtype, queued, shard)
    return found | {IMPL: found[IMPL] | FUSED}


def ways(shard, mb):
    """By tensors gradients are reduced in buckets as well, and owners broadcast."""
    return dict(shard=shard, bucket_mb=mb) | ({"strategy": "bucketed"} if shard != "flat" else {})


def runs(case):
    return ["bench"]


def run(case, draw, c):
    if case.deliverable == full.PROOF and "model" in case:
        return full.on_toy(case, draw, c)
    if "model" in case:
        return on_toys(case, draw, c)
    if case.deliverable == full.LEADERBOARD:
        return full.leaderboard(case, draw, c)
    if "part" in case:
        return memory.run(case, draw, c)
    if "warmup" in case:
        return ranked.timed_step(case, draw, c, None if case.shard == "full" else memory.zero)
    if case.deliverable == full.PROOF:
        return ranked.judged_step(case, draw, c, full.IMPL, {})
    if case.optimizer == "sgd":  # which has no state to split
        return ranked.judged_step(case, draw, c, "torch_ddp", {})
    return ranked.judged_step(case, draw, c, IMPL, {"update.*": within(rel_l2=UPDATES_WITHIN)}, memory.zero)


class Sharded:
    """libtandem's AdamW around the parameters of a torch module, each updated by one rank."""

    def __init__(self, c, backend, model):
        self.c, self.parameters = c.ranks.session, toys.trained(model)
        ffi = self.c.ffi
        tensors = ffi.new("td_shard_tensor[]", len(self.parameters))
        for tensor, p in zip(tensors, self.parameters, strict=True):
            p.grad = torch.zeros_like(p)
            tensor.elements = p.numel()
            tensor.dtype = tensor.grad_dtype = self.c.enum("td_dtype", "f32")
            tensor.data, tensor.grad = (ffi.cast("void *", t.data_ptr()) for t in (p, p.grad))
        self.list = self.c.create("td_shard_list_create", self.c.device, c.ranks.comm(backend))
        beta1, beta2 = TOY["betas"]
        rest = {name: TOY[name] for name in ("lr", "eps", "weight_decay")}
        adamw = {"variant": "torch", "beta1": beta1, "beta2": beta2, **rest}
        hyper = self.c.struct("td_hyperparameters", {}, adamw=adamw)
        hyper.kind = self.c.enum("td_optimizer_kind", "adamw")
        self.c.td_shard_list_add(self.list, len(self.parameters), tensors, hyper)

    def state_bytes(self):
        return self.c.value("td_shard_list_bytes", self.list)

    def step(self):
        self.c.td_shard_list_step(self.list, 1.0)

    def close(self):
        self.c.destroy(self.list)


def on_toys(case, draw, c):
    """AdamW on the sum of squared errors, every rank with the same data."""
    make = toys.TOYS[case.model]
    shapes = {name: p.shape for name, p in make().named_parameters()}
    state = {name: draw.normal(name, shape, "f32", std=0.3) for name, shape in shapes.items()}
    steps = [
        (draw.uniform(f"x {i}", (case.samples, 10), "f32"), draw.uniform(f"y {i}", (case.samples, 5), "f32"))
        for i in range(case.steps)
    ]
    made = partial(ranked.toy, make, state, draw.device)

    def trained(model, optimizer, dtype=torch.float32):
        losses = []
        for x, y in steps:
            for p in toys.trained(model):
                if p.grad is not None:
                    p.grad.zero_()
            loss = ((model(x.to(dtype)) - y.to(dtype)) ** 2).sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return losses

    def tandem(backend):
        values = {}

        def call():
            model = made()
            optimizer = Sharded(c, backend, model)
            losses = trained(model, optimizer)
            values["state_bytes"] = optimizer.state_bytes()
            optimizer.close()
            return ranked.toy_outputs(dict(model.named_parameters()), losses, c)

        return Side(call, record=lambda: {"values": values})

    theirs = {}

    def zero():
        model = made()
        optimizer = ref.adamw(toys.trained(model), **TOY)
        losses = trained(model, optimizer)
        theirs["state_bytes"] = ref.state_bytes(optimizer)
        return ranked.toy_outputs(dict(model.named_parameters()), losses, c)

    def in_one(dtype=torch.float32):
        model = made(dtype=dtype)
        losses = trained(model, torch.optim.AdamW(toys.trained(model), **TOY), dtype)
        return [ranked.toy_outputs(dict(model.named_parameters()), losses, dtype=dtype)] * case.ranks

    sides = ranked.sides_of(draw.device.type, tandem)
    sides[IMPL] = Side(zero, record=lambda: {"values": theirs})
    return ranked.judged_by_one(c, sides, in_one)
