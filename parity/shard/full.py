"""Fully sharded weights: PyTorch's fully_shard, and the bridge's wrapper of PyTorch modules, on the course's model."""

import torch

from parity.bridge_fsdp import FullyShardedDataParallel
from parity.core import DTYPES, Case, Side, equal
from parity.shared.ranked import by_turns
from ref import ddp, shard

IMPL, BRIDGE = "torch_fsdp", "c_bridge"
PROOF = "fsdp"
TOY_STEPS, TOY_LR, SAMPLES, SEQ, VOCAB = 3, 0.01, 24, 8, 100  # 24 samples: 2, 3 and 4 ranks divide them


def cases(profile):
    for ranks in (2, 3, 4) if profile == "full" else (2,):
        for compute in ("f32", "f16"):
            keys = dict(model="fsdp_toy", ranks=ranks, compute=compute, steps=TOY_STEPS, samples=SAMPLES)
            yield Case(PROOF, seconds=0.5, dtype="f32", **keys)


def on_toy(case, draw, c):
    """SGD on the course's model, which computes in `compute` and keeps its weights in f32."""
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

    def made(dtype=torch.float32):
        model = shard.Toy().to(draw.device, dtype)
        model.load_state_dict(state)
        return model

    def parts(step):
        """Each rank's batch."""
        return list(zip(*(tensor.split(each) for tensor in steps[step]), strict=True))

    def outputs(losses, weights, apart, dtype=torch.float32):
        found = {f"weight.{name}": weights[name].detach().clone() for name in state}
        return found | {"losses": torch.tensor(losses, dtype=dtype), "ranks_apart": float(apart)}

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
            every = torch.cat([weights[name].reshape(-1) for name in state])
            return outputs(losses, weights, not c.ranks.same(every))

        return call

    def trained_alone(dtype=torch.float32, batches=parts):
        """(losses, weights) of one process that averages the gradients of these batches of a step."""
        model, losses = made(dtype), []
        for step in range(case.steps):
            how = compute if dtype == torch.float32 else None
            by_batch = (shard.loss_alone(model, *batch, how) for batch in batches(step))
            losses.append(ddp.average_alone(model, by_batch))
            ddp.sgd(ddp.trained(model), TOY_LR)
        return losses, dict(model.named_parameters())

    def in_one(dtype=torch.float32):
        losses, weights = trained_alone(dtype)
        return [outputs(of_rank, weights, False, dtype) for of_rank in zip(*losses, strict=True)]

    values = {"weights": sum(tensor.numel() for tensor in state.values())}

    def compare(mine):
        """How many weights have other bits than in one process: if that averages the ranks' gradients, and if it takes
        the whole batch at once, as the course's test does."""
        for name, batches in (("apart_average", parts), ("apart_whole", lambda step: [steps[step]])):
            _, weights = trained_alone(batches=batches)
            values[name] = sum(int((mine[of] != weights[of]).sum()) for of in state)

    return {
        BRIDGE: Side(
            split(
                lambda model: FullyShardedDataParallel(model, compute),
                lambda model: model.gather_full_parameters(),
                compare,
            ),
            record=lambda: {"values": values},
        ),
        IMPL: split(
            lambda model: shard.sharded_toy(model, compute),
            lambda model: {name: shard.whole(p.detach()) for name, p in model.named_parameters()},
        ),
        "truth": lambda: in_one(torch.float64)[rank],
        "equal": by_turns(draw, c, in_one),
        "rule": {"ranks_apart": equal("truth")},
    }
