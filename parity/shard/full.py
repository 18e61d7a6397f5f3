"""Fully sharded weights, next to PyTorch's fully_shard: C's trainer, and the bridge's wrapper of PyTorch modules."""

import os
from functools import partial
from itertools import product

import torch

from parity.core import DTYPES, Case, Side
from parity.shared import ranked
from parity.shared.model import quick_start
from parity.shared.sizes import extents
from ref import ddp, shard
from tandem.fsdp import FullyShardedDataParallel

IMPL, COMPILED, BRIDGE = "torch_fsdp", "torch_fsdp_compiled", "c_bridge"
PROOF, ACCOUNTING, LEADERBOARD = "fsdp", "fsdp_accounting", "leaderboard"
TOY_STEPS, TOY_LR, SAMPLES, SEQ, VOCAB = 3, 0.01, 24, 8, 100  # 24 samples: 2, 3 and 4 ranks divide them
# Three ranks and four leave a rest of each unit. With 55 rows of 36 weights it is not padding alone.
TINY = dict(size="tiny", d_model=36, d_ff=100, layers=3, heads=3, vocab=55, batch=2, context=12)
# Size, dtype, batch of a rank, context.
XL = ("xl", "f32", 2, 128), ("xl", "bf16_mixed", 4, 512), ("2.7B", "bf16_mixed", 4, 512)
BUCKET_MB = {"cpu": 4, "f32": 25, "bf16_mixed": 100}  # of C's steps without sharding
NEEDS_BYTES = 40 * 2**30
# The leaderboard's step of 2026: each of two GPUs has one of its two sequences. A layer computes for so
# long that few SMs for collectives and updates are enough. A step of 3 layers by SMs for NCCL (0: GEMMs
# have all) and for updates: 0 and 4 567 ms, 4 and 4 570, 4 and 12 579, 2 and 2 579; without the results of
# attention, 4 and 4 603 (two H100s, 26 November 2026).
EIGHT = dict(batch=1, context=32768, shard="full", ranks=2, dtype="bf16", optimizer="adamw")
EIGHT_SWITCHES = dict(keep="attention", checkpoint_layers=1, nccl_ctas=0, update_sms=4)
# The last layers that do not run again, and the memory that a GPU needs with them.
EIGHT_KEPT = {1: 75 * 2**30, 28: 138 * 2**30}


def cases(profile, device):
    for ranks in (2, 3, 4, 6) if profile == "full" else (2,):
        for compute in ("f32", "f16"):
            keys = dict(model="fsdp_toy", ranks=ranks, compute=compute, steps=TOY_STEPS, samples=SAMPLES)
            yield Case(PROOF, seconds=0.5, dtype="f32", **keys)
        for dtype in ("f32", "bf16_mixed"):
            keys = TINY | dict(shard="full", ranks=ranks, steps=3, dtype=dtype, optimizer="sgd")
            yield Case(PROOF, seconds=1.0, **keys, config=configs_of(device, dtype))
    keys = TINY | dict(shard="full", ranks=3 if device == "cpu" else 2)
    yield from ranked.options_alone(PROOF, device, IMPL, **keys)
    shapes = XL if device == "cuda" else (("laptop", "f32", 2, 64),)
    every = ranked.XL_RANKS[profile if device == "cuda" else "quick"]
    for ranks, (size, dtype, batch, context) in product(every, shapes):
        keys = {"size": size} | extents(size)[0] | dict(batch=batch, context=context)
        keys |= dict(shard="full", ranks=ranks, dtype=dtype, optimizer="adamw")
        yield from accounting_cases(keys, device, profile)
    if (profile, device) == ("full", "cuda"):
        yield from map(leaderboard_case, EIGHT_KEPT)


def accounting_cases(keys, device, profile):
    """Steps, also of C without sharding, and memory. The profile `full` has PyTorch's compiled blocks, too."""
    gpu, dtype = device == "cuda", keys["dtype"]
    best = {COMPILED: dict(compiled=True)} if profile == "full" else {}
    where = dict(in_turn=True, needs_bytes=NEEDS_BYTES) if gpu else {}
    bucket = {"bucket_mb": BUCKET_MB[dtype if gpu else "cpu"]}
    split = ranked.switches_of(device, dtype)
    whole = {ranked.whole_of(side): how | bucket for side, how in split.items()}
    how = dict(warmup=5 if gpu else 3, seconds=60.0 if gpu else 8.0)
    how["repeats"] = 5 if (profile, device) == ("quick", "cpu") else 10
    config = configs_of(device, dtype) | best | whole
    yield Case(ACCOUNTING, measure="time", **keys, **how, **where, config=config)
    config = configs_of(device, dtype, queued=True) | (best if gpu else {})
    weighed = dict(part="memory", seconds=30.0 if gpu else 4.0, **where)
    yield Case(ACCOUNTING, **weighed, **keys, config=config)
    if (profile, keys["size"], keys["ranks"]) == ("full", "2.7B", 2):  # the peak that sharding lowers
        config = ranked.configs(device, "torch_ddp", dtype, queued=True)
        keys |= {"shard": "whole", "strategy": "bucketed"} | bucket
        yield Case(ACCOUNTING, **weighed, **keys, config=config)


def leaderboard_case(kept):
    more = {"kept_layers": kept} if kept > 1 else {}
    keys = {"size": "8B"} | extents("8B")[0] | EIGHT | more
    switches = ranked.switches_of("cuda", EIGHT["dtype"], shard="full")
    config = {side: how | EIGHT_SWITCHES | more for side, how in switches.items()}
    how = dict(measure="time", seconds=60.0, repeats=4, in_turn=True, needs_bytes=EIGHT_KEPT[kept])
    return Case(LEADERBOARD, warmup=1, **keys, **how, config=config)


def configs_of(device, dtype, queued=False):
    return ranked.configs(device, IMPL, dtype, queued, shard="full")


def on_toy(case, draw, c):
    """SGD on the course's model, which computes in `compute` and keeps its weights in f32."""
    # The bridge's backend: of MPI a process has one communicator, which is C's.
    os.environ.setdefault("TANDEM_BACKEND", ranked.BACKENDS[draw.device.type][-1])
    rank, each = c.ranks.rank, case.samples // case.ranks
    compute = None if case.compute == "f32" else DTYPES[case.compute]
    state = {
        name: draw.normal(name, p.shape, "f32", mean=float("norm" in name), std=0.1)
        for name, p in shard.Toy().named_parameters()
    }
    steps = [
        (
            draw.integers(f"ids {i}", (case.samples, SEQ), high=VOCAB),
            draw.integers(f"targets {i}", (case.samples,), high=VOCAB),
        )
        for i in range(case.steps)
    ]

    made = partial(ranked.toy, shard.Toy, state, draw.device)

    def parts(step):
        return list(zip(*(tensor.split(each) for tensor in steps[step]), strict=True))

    def split(wrap, weights_of, seen=lambda weights: None):
        """The steps of a module that wrap() has split. `seen` gets the whole weights."""

        def call():
            model = wrap(made())
            parameters, losses = ddp.trained(model), []
            for step in range(case.steps):
                ids, targets = parts(step)[rank]
                for p in parameters:
                    p.grad = None
                loss = shard.last_loss(model(ids), targets)
                loss.backward()
                ddp.sgd(parameters, TOY_LR)
                losses.append(float(loss.detach()))
            weights = weights_of(model)
            seen(weights)
            return ranked.toy_outputs(weights, losses, c)

        return call

    def trained_alone(dtype=torch.float32, batches=parts):
        """(losses, weights) of one process that averages the gradients of these batches of a step."""
        model, losses = made(dtype=dtype), []
        for step in range(case.steps):
            how = compute if dtype == torch.float32 else None
            by_batch = (shard.loss_alone(model, *batch, how) for batch in batches(step))
            losses.append(ddp.average_alone(model, by_batch))
            ddp.sgd(ddp.trained(model), TOY_LR)
        return losses, dict(model.named_parameters())

    def in_one(dtype=torch.float32):
        losses, weights = trained_alone(dtype)
        return [ranked.toy_outputs(weights, of_rank, dtype=dtype) for of_rank in zip(*losses, strict=True)]

    values = {"weights": sum(tensor.numel() for tensor in state.values())}

    def compare(mine):
        """Counts weights with other bits than in one process that averages gradients, or takes whole batches."""
        for name, batches in (("apart_average", parts), ("apart_whole", lambda step: [steps[step]])):
            _, weights = trained_alone(batches=batches)
            values[name] = sum(int((mine[of] != weights[of]).sum()) for of in state)

    bridge = split(
        lambda model: FullyShardedDataParallel(model, compute),
        FullyShardedDataParallel.gather_full_parameters,
        compare,
    )
    theirs = split(
        lambda model: shard.sharded_toy(model, compute),
        lambda model: {name: shard.whole(p.detach()) for name, p in model.named_parameters()},
    )
    sides = {BRIDGE: Side(bridge, record=lambda: {"values": values}), IMPL: theirs}
    return ranked.judged_by_one(c, sides, in_one)


def leaderboard(case, draw, c):
    """The step of C alone: weights of its own, for all at once would not fit next to the trainer's."""
    ids, targets = ranked.draw_batches(case, draw, 1)[0][c.ranks.rank]
    size = c.struct("td_account_model", case)
    # The model asks of a rank: of attention what the mask leaves, and backward is twice forward.
    forward = c.value("td_account_model_flops", size, case.batch, case.context, True, False).forward_matmul

    def tandem(backend):
        trainer, values, found = ranked.RankTrainer(case, c, backend), {}, {}

        def begin():
            trainer.c.own_stream(True)
            trainer.c.td_device_reset_peak(trainer.c.device)
            trainer.open()
            with quick_start(trainer.c, case.ranks):
                trainer.begin()
            trainer.step(ids, targets)
            values["first_loss"] = float(trainer.loss())

        def close():
            if trainer.train is not None:
                values["last_loss"] = float(trainer.loss())
                found["peak_mib"] = max(c.ranks.gathered(trainer.c.bytes_peak())) / 2**20
            trainer.close()
            trainer.c.own_stream(False)

        how = dict(flops=3 * forward, record=lambda: found | {"values": values})
        return Side(lambda: trainer.step(ids, targets), open=begin, close=close, **how)

    return ranked.sides_of(draw.device.type, tandem)
