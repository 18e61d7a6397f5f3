"""Where each rank's memory goes at three points of a step, and what a step sends, by the way state is split."""

import functools
import gc
from contextlib import closing

import torch
import torch.distributed as dist

from parity.core import Side, within
from parity.core.clock import others_running
from parity.shared.bench_ranks import BenchRanks, elements_of, gradient_bytes
from parity.shared.model import initial_state, torch_options
from parity.shared.pages import MIB
from parity.shared.ranked import TorchTrainer, draw_batches, sides_of
from ref import shard as ref

STEPS = 2  # memory is measured in the last one: PyTorch's optimizer has no state before its first step
# C's state is the arithmetic's; in mixed precision norms are aligned, which adds 3e-6 at xl.
STATE_WITHIN = 1e-5
FULL_WITHIN = 1e-3  # owners of fully sharded weights have whole cache lines
FULL_STEPS = {"cpu": (3, 1), "cuda": (5, 3)}  # that are timed, and before them


def run(case, draw, c):
    """Judged are the bytes of a rank's optimizer state, against the arithmetic."""
    predicted = sharded_bytes(case, c) if case.shard == "full" else None
    state = predicted["optimizer_state"] if predicted else state_bytes(case, elements_of(case))[c.ranks.rank]
    within_of = within(rel_l2=FULL_WITHIN if predicted else STATE_WITHIN)
    sides = sides_of(draw.device.type, lambda backend: tandem(case, c, backend, predicted))
    theirs = {impl: how for impl, how in case.config.items() if impl not in sides}
    begin = (initial_state(case, draw.quickly), draw_batches(case, draw, STEPS)) if theirs else ()
    sides |= {impl: torch_side(case, draw, c, *begin, **how) for impl, how in theirs.items()}
    return sides | {"truth": {"optimizer_state": float(state)}, "rule": {"optimizer_state": within_of}}


def tandem(case, c, backend, predicted):
    found, state = {}, {}
    # One step before the series whose memory is measured. With fully sharded weights it is timed, too.
    steps, warmup = FULL_STEPS[c.on.kind] if predicted else (1, STEPS - 2)

    def measure():
        found["others"] = max(0, others_running() - (case.ranks - 1))
        with closing(BenchRanks(case, c, backend, steps, warmup, state=case.shard)) as run:
            of_step = run.values()
            found.update(memory=run.memory(), collectives=of_step["calls"], collective_bytes=of_step["bytes"])
            if predicted:
                arithmetic = {f"predicted {name}": nbytes for name, nbytes in predicted.items()}
                found.update(series=run.timelines(), values=of_step | arithmetic)
            state["optimizer_state"] = float(run.ranks[c.ranks.rank].optimizer_state)

    # Once, when the side is opened: a call that is judged is made twice.
    return Side(lambda: state, open=measure, record=lambda: found)


class Account:
    """Memory of a trainer of PyTorch: on GPUs its allocator's, on a CPU tensors between steps and a call's peak."""

    def __init__(self, device):
        # What a case before this one left would be given back meanwhile: DDP's last buckets, which the group
        # of NCCL holds until its next call, and garbage.
        dist.all_reduce(torch.zeros((), device=device.torch))
        gc.collect()
        self.device, self.given = device, device.held_by_torch().get("peak")
        self.mib, self.peak = {}, 0

    def held(self, trainer):
        if self.given is None:
            return sum(parts_of(trainer).values())
        return self.device.held_by_torch()["peak"] - self.given

    def look(self, trainer, point):
        self.mib[f"{point}_mib"] = self.held(trainer) / MIB

    def during(self, trainer, call):
        """Calls it, and returns what it took at its peak, beyond what was there."""
        held = self.held(trainer)
        more = self.device.peak_of_torch(call)["peak"]
        self.peak = max(self.peak, held + more)
        return more

    def figures(self, trainer, activations):
        parts = parts_of(trainer)
        found = self.mib | {f"{part}_mib": nbytes / MIB for part, nbytes in parts.items()}
        found |= {"activations_mib": activations / MIB, "peak_mib": self.peak / MIB}
        if self.given is not None:  # copies that gradients do not live in, and workspaces
            found["buffers_mib"] = self.mib["before_update_mib"] - sum(parts.values()) / MIB
        return found


def torch_side(case, draw, c, state, batches, **how):
    found = {}

    def call():
        account = Account(c.on)
        optimizer = None if case.shard in ("whole", "full") else zero
        trainer = TorchTrainer(case, state, draw.device, optimizer, **how).open()
        account.look(trainer, "made")
        for batch in batches:
            backward = functools.partial(trainer.backward, *batch[c.ranks.rank])
            activations = account.during(trainer, backward)
            account.look(trainer, "before_update")
            account.during(trainer, trainer.update)
            account.look(trainer, "after_update")
        of_ranks = c.ranks.gathered(account.figures(trainer, activations))
        found["memory"] = {name: [figures[name] for figures in of_ranks] for name in of_ranks[0]}
        nbytes = parts_of(trainer)["optimizer_state"]
        trainer.close()
        return {"optimizer_state": float(nbytes)}

    return Side(call, record=lambda: found)


def zero(_case, parameters, fused):
    """PyTorch's optimizer whose state is split."""
    return ref.adamw(parameters, fused=fused, **torch_options())


def parts_of(trainer):
    """Bytes of the tensors that live on between steps."""
    parameters = trainer.parallel.parameters
    return {
        "parameters": sum(ref.own(p).nbytes for p in parameters),
        "gradients": sum(ref.own(p.grad).nbytes for p in parameters if p.grad is not None),
        "optimizer_state": ref.state_bytes(trainer.optimizer),
    }


def sharded_bytes(case, c):
    """C's prediction for fully sharded weights: of a rank, and of one without sharding."""
    mixed = case.dtype == "bf16_mixed"
    desc, sizes = c.struct("td_account_model", case), (4, 2 if mixed else 4, 4)
    found = c.value("td_account_fsdp_memory", desc, case.ranks, *sizes)
    parts = {name: getattr(found.rank, name) for name in ("parameters", "optimizer_state")}
    parts["gradients"] = found.shared  # updates come along
    whole = found.rank.total + found.saved
    return parts | {"total": sum(parts.values()), "whole": whole, "block": found.block}


def state_bytes(keys, parameters):
    """Of each rank's moments: 8 bytes an element."""
    elements, ranks = [count for count, _ in parameters], keys["ranks"]
    if keys["shard"] == "tensors":
        return [8 * load for load in ref.loads(elements, ranks)]
    return [8 * sum(elements) // (1 if keys["shard"] == "whole" else ranks)] * ranks


def memory_of(keys):
    """{part: MiB} of the rank that has most, of what arithmetic knows."""
    parameters = elements_of(keys)
    count, mixed = sum(n for n, _ in parameters), keys["dtype"] == "bf16_mixed"
    return {
        "parameters": sum(n * (6 if mixed and not wide else 4) for n, wide in parameters) / MIB,
        "gradients": count * (2 if mixed else 4) / MIB,
        "optimizer_state": max(state_bytes(keys, parameters)) / MIB,
    }


def sent_of(keys):
    """(bytes of gradients, bytes of new weights as they are read) that a step brings to all ranks."""
    parameters, mixed = elements_of(keys), keys["dtype"] == "bf16_mixed"
    weights = sum(n * (2 if mixed and not wide else 4) for n, wide in parameters)
    return gradient_bytes(keys), weights


def on_the_wire(keys, gradients, weights):
    """Mean bytes that a rank sends in rings: an all-reduce sends twice what the other collectives send."""
    share = (keys["ranks"] - 1) / keys["ranks"]
    if keys["shard"] == "whole":
        return 2 * share * gradients
    return share * ((2 if keys["shard"] == "tensors" else 1) * gradients + weights)
