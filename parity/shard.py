"""Optimizer state split among ranks: libtandem's, by tensors and flat, beside PyTorch's ZeroRedundancyOptimizer."""

import pandas as pd
import torch

from parity.core import Case, Side, equal, within
from parity.shared.ranked import configs, judged_step, sides_of, spread_of, timed_step, torch_options
from ref import ddp as toys
from ref import shard as ref
from ref.transformer import SIZES

DELIVERABLES = {
    "optimizer_state_sharding": "Each rank updates a part of the weights: those of one optimizer",
    "optimizer_state_sharding_accounting": "What it takes, and what it spares",
}
IMPL = "torch_zero"
KINDS = ("tensors", "flat")
TOY_STEPS, SAMPLES = 10, 32
TOY = dict(lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
TINY = dict(size="tiny", d_model=48, d_ff=100, layers=3, heads=3, vocab=57, batch=2, context=12)
LAPTOP = dict(size="laptop", d_model=256, d_ff=1024, layers=4, heads=4, vocab=2000, batch=2, context=64)
BUCKET_MB = 25
XL_WAYS = ("f32", "bf16_mixed")
XL_BYTES = 45 * 2**30
# AdamW divides by the root of a mean square: where a gradient is noise, its update is, too. All others agree
# to some digits, and updates as a whole are held to float64's.
UPDATES_WITHIN = 0.02


def cases(profile, device):
    for ranks in (2, 4):
        for model in toys.TOYS:
            keys = dict(model=model, ranks=ranks, steps=TOY_STEPS, samples=SAMPLES)
            yield Case("optimizer_state_sharding", seconds=0.2, shard="tensors", **keys)
        for shard in KINDS if ranks == 2 or profile == "full" else KINDS[-1:]:
            keys = TINY | ways(shard, 0.05) | dict(ranks=ranks, steps=3, dtype="f32", optimizer="adamw")
            yield Case("optimizer_state_sharding", seconds=1.0, config=configs_of(device), **keys)
    yield from xl_cases() if device == "cuda" else laptop_cases(profile)


def laptop_cases(profile):
    for ranks in (2, 4) if profile == "full" else (2,):
        for shard in KINDS:
            keys = LAPTOP | ways(shard, BUCKET_MB) | dict(ranks=ranks, dtype="f32", optimizer="adamw")
            how = dict(measure="time", seconds=4.0 * ranks, repeats=10, config=configs_of("cpu"))
            yield Case("optimizer_state_sharding_accounting", warmup=3, **keys, **how)


def xl_cases():
    """The assignment's: xl on two GPUs, batch 2 a rank."""
    d_model, d_ff, layers, heads = SIZES["xl"]
    xl = dict(size="xl", d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, vocab=10_000)
    for dtype in XL_WAYS:
        for shard in KINDS:
            keys = xl | ways(shard, BUCKET_MB) | dict(batch=2, context=128, ranks=2, optimizer="adamw")
            how = dict(measure="time", seconds=15.0, repeats=10, in_turn=True, needs_bytes=XL_BYTES)
            yield Case(
                "optimizer_state_sharding_accounting",
                warmup=5,
                dtype=dtype,
                **keys,
                **how,
                config=configs_of("cuda"),
            )


def configs_of(device):
    return configs(torch.device(device), IMPL)


def ways(shard, mb):
    """By tensors gradients are reduced in buckets as well, and owners broadcast."""
    return dict(shard=shard, bucket_mb=mb) | ({"strategy": "bucketed"} if shard == "tensors" else {})


def run(case, draw, c):
    if "model" in case:
        return on_toys(case, draw, c)
    if "warmup" in case:
        return timed_step(case, draw, c, IMPL, zero_of)
    return judged_step(case, draw, c, IMPL, {"update.*": within(rel_l2=UPDATES_WITHIN)}, zero_of)


def zero_of(_case, parameters):
    return ref.adamw(parameters, **torch_options())


# ---- the course's toy models ----


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

    def made(dtype=torch.float32):
        model = make().to(draw.device, dtype)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(state[name])
        return model

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
        return {f"weight.{name}": p.detach().clone() for name, p in model.named_parameters()} | {
            "losses": torch.tensor(losses, dtype=dtype)
        }

    def apart(model):
        return {
            "ranks_apart": float(not c.ranks.same(torch.cat([p.reshape(-1) for p in model.parameters()])))
        }

    def tandem(backend):
        values = {}

        def call():
            model = made()
            optimizer = Sharded(c, backend, model)
            found = trained(model, optimizer) | apart(model)
            values["state_bytes"] = optimizer.state_bytes()
            optimizer.close()
            return found

        return Side(call, record=lambda: {"values": values})

    theirs = {}

    def zero():
        model = made()
        optimizer = ref.adamw(toys.trained(model), **TOY)
        found = trained(model, optimizer) | apart(model)
        theirs["state_bytes"] = ref.state_bytes(optimizer)
        return found

    def in_one(dtype=torch.float32):
        model = made(dtype)
        found = trained(model, torch.optim.AdamW(toys.trained(model), **TOY), dtype)
        return found | {"ranks_apart": 0.0}

    sides = {side: tandem(backend) for side, backend in sides_of(draw.device).items()}
    return sides | {
        IMPL: Side(zero, record=lambda: {"values": theirs}),
        "truth": lambda: in_one(torch.float64),
        "equal": in_one,
        "rule": {"ranks_apart": equal("truth")},
    }


# ---- the page ----

RIGHT = "Are the weights those of one optimizer?"
HOW_LONG = "How long does a step take, and how much state has a rank?"


def report(page, records):
    errors = type(records)(r for r in records.records if "steps" in r["case"])
    times = type(records)(r for r in records.records if "warmup" in r["case"])
    page.question(RIGHT)
    rows, held = proofs(errors)
    page.table(rows, "proofs")
    page.question(HOW_LONG)
    frame, said = by_kind(times)
    page.table(frame, "steps")
    if held:
        text = f"{held}: no further from float64 than PyTorch's, the Transformer's updates within 2 %."
        page.answer("optimizer_state_sharding", text, held, question=RIGHT)
    if said:
        text, figure = spread_of(said)
        page.answer("optimizer_state_sharding_accounting", f"A step takes, times PyTorch's, {text}.", figure)
    page.method(
        "Every rank is a process of this host; all sides run in the same processes, call by call in turn, and a sample "
        "is the time of the slowest rank, until new weights are on all. `tensors`: a parameter has an owner, which "
        "updates and broadcasts it, behind gradients that are reduced in buckets. `flat`: buckets are reduced and "
        "scattered, and weights gathered. PyTorch's is ZeroRedundancyOptimizer behind DistributedDataParallel, over "
        "Gloo on the CPU and NCCL on GPUs; of state, moments are counted, on rank 0."
    )


def proofs(errors):
    rows, ok, of = {}, 0, 0
    for record in errors.records:
        if record["status"] == "unsupported":
            continue
        case, mine = record["case"], record["impl"].startswith("c_")
        key = (case.get("model", case.get("size")), case["shard"], case["ranks"], record["impl"])
        names = ("model", "split", "ranks", "side")
        row = rows.setdefault(key, dict(zip(names, key, strict=True)) | {"results": 0, "hold": 0})
        row["results"] += 1
        row["hold"] += record["status"] == "ok"
        row["state of rank 0 (bytes)"] = record.get("values", {}).get("state_bytes")
        ok, of = ok + (mine and record["status"] == "ok"), of + mine
    return pd.DataFrame([rows[key] for key in sorted(rows)]), f"{ok} of {of} results hold" if of else ""


def by_kind(times):
    rows, said = {}, []
    for record in times.records:
        if "ms" not in record:
            continue
        case = record["case"]
        key = (case["size"], case["dtype"], case["ranks"], case["shard"])
        names = ("size", "dtype", "ranks", "split")
        row = rows.setdefault(key, dict(zip(names, key, strict=True)))
        row[f"{record['impl']} (ms)"] = record["ms"]["median"]
        if "ratio" in record:
            words = (
                f"{case['shard']}, {record['impl'].removeprefix('c_')} ({case['size']}, {case['dtype']}, "
                f"{case['ranks']} ranks)"
            )
            said.append((record["ratio"]["median"], words))
    return pd.DataFrame([rows[key] for key in sorted(rows)]), said
