"""`python -m parity diverge`: the first output of a training step that is wrong.

C hands out what each operation writes (td_hook.output). PyTorch's model names the same tensors
(ref.transformer.listen). Each output is judged by the rule of docs/parity.md; the truth is the same step in float64.
The loss and its gradient are judged from C's own logits, because they would multiply the noise of a few numbers. New
weights are judged by an update with C's own gradients, averaged over the ranks.
"""

import math
import re
from contextlib import nullcontext

import torch

from parity.core import DTYPES, Case, Side
from parity.core.case import ParityError
from parity.core.device import kind_of
from parity.core.ranks import Group, missing
from parity.core.worker import Settings, Worker
from parity.shared.model import (
    ADAMW,
    TandemTrainer,
    autocast,
    c_switches,
    draw_batch,
    initial_state,
    state_dict,
    torch_model,
)
from parity.shared.ranked import SGD_LR, RankTrainer
from parity.shared.sizes import SIZES, extents
from ref import ops, transformer
from tandem.library import default_library

TINY = dict(d_model=48, d_ff=100, layers=2, heads=3, vocab=57)
AGAIN = " (recomputed)"  # of a name that comes a second time
SAID = 60  # seconds of a case that nobody times


class Outputs:
    """A td_hook that copies what each operation of C's model writes."""

    def __init__(self, c, case, shapes):
        self.c, self.case, self.shapes, self.found = c, case, shapes, {}
        self.call = c.ffi.callback("td_status(td_hook *, const td_output *)", self.copy, error=c.TD_BAD_STATE)
        self.hook = c.ffi.new("td_hook *", {"output": self.call})

    def copy(self, hook, output):
        c, name = self.c, self.c.ffi.string(output.name).decode()
        dtype = DTYPES[c.ffi.string(c.td_dtype_name(output.dtype)).decode()]
        value = torch.empty(self.shape(name, output.count), dtype=dtype, device=c.on.torch)
        c.td_device_copy(c.device, value, output.at, value.nbytes)
        self.found[name + AGAIN if name in self.found else name] = value
        return c.TD_OK

    def shape(self, name, count):
        """As PyTorch has it."""
        case, name = self.case, tensor_of(name)
        if name in self.shapes or count == 1:
            return self.shapes.get(name, (1,))
        if re.search(r"\.attn\.[qkv]$", name):
            return case.batch, case.heads, case.context, case.d_model // case.heads
        return case.batch, case.context, count // (case.batch * case.context)


def tensor_of(name):
    """The tensor, or the parameter, that an output is or is the gradient of."""
    return re.sub(r"(\.grad)?(\.rounded|\.again)?( \(recomputed\))?$", "", name)


def run(case, draw, c):
    state = initial_state(case, draw.normal)
    rank = c.ranks.rank if c.ranks else 0
    batch = draw_batch(case, draw, f"tokens {rank}")
    (side,) = case.config
    mine = c.ranks.session if c.ranks else c
    outputs = Outputs(mine, case, {name: weight.shape for name, weight in state.items()})
    if c.ranks:
        model = RankTrainer(case, c, side.removeprefix("c_"), first=outputs.hook)
    else:
        hyper = {"kind": case.optimizer, "adamw": {"variant": "torch", **ADAMW}, "sgd": {"lr": SGD_LR}}
        model = TandemTrainer(case, c, case.attention, case.config[side], hyper=hyper, hooks=outputs.hook)
    gradients = []  # of every rank, by name

    def tandem():
        model.begin(state)
        outputs.found.clear()
        mine.td_train_load(model.train, *batch, *batch[0].shape)
        mine.td_train_forward(model.train, None)
        if case.until != "loss":
            mine.td_train_backward(model.train)
        found = dict(outputs.found)
        if case.until == "update":
            mine.td_train_update(model.train)
            of_rank = {name: found[f"{name}.grad"].cpu() for name in state}
            gradients[:] = c.ranks.gathered(of_rank) if c.ranks else [of_rank]
            found |= weights_of(model, mine)
        return found

    def updated(name, dtype):
        """The weight after an update with C's gradients."""
        weight = state[name].to(dtype or state[name].dtype)
        gradient = sum(of[name].to(dtype or of[name].dtype) for of in gradients).to(weight.device)
        gradient = gradient if len(gradients) == 1 else ops.at_least_f32(gradient) / len(gradients)
        if case.optimizer == "sgd":
            return ops.sgd_step(weight, gradient, float(torch.tensor(SGD_LR)))
        zeros = torch.zeros_like(ops.at_least_f32(weight))
        return ops.adamw_step(weight, gradient, zeros, zeros, 1, variant="torch", **ADAMW)[0]

    def by_torch(dtype=None):
        """What C has handed out, of PyTorch's model in this dtype, or in the case's."""
        theirs, seen = torch_model(case, state, dtype), {}

        def hear(name, *parts):
            for part in parts:
                part.retain_grad()
            seen[name] = parts

        transformer.listen(theirs, hear)
        with nullcontext() if dtype else autocast(case, draw.device):
            loss = transformer.cross_entropy(theirs(batch[0]), batch[1])
        loss.backward()
        seen |= {name: (parameter,) for name, parameter in theirs.named_parameters()}
        logits = outputs.found["logits"].clone().to(dtype).requires_grad_()
        seen["loss"] = (transformer.cross_entropy(logits, batch[1]).reshape(1),)
        seen["loss"][0].backward()
        found = {}
        for name, value in outputs.found.items():
            if name == "logits.grad":
                seen["logits"] = (logits,)
            parts = [part.grad if ".grad" in name else part.detach() for part in seen[tensor_of(name)]]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            found[name] = whole.to(dtype or value.dtype)
        return found | ({name: updated(name, dtype) for name in state} if gradients else {})

    sides = {side: Side(tandem, open=model.open, close=model.close), "torch_eager": by_torch}
    return sides | {"truth": lambda: by_torch(torch.float64)}


def weights_of(model, c):
    if not isinstance(model, RankTrainer):
        return state_dict(c, model.model)
    if model.shard is not None:
        c.td_shard_link_finish(model.shard)
    return model.weights()


def case_of(options):
    sizes = {"tiny": TINY} | {size: extents(size)[0] for size in SIZES}
    if options.size not in sizes:
        raise ParityError(f"--size is {options.size!r}, needs one of: {', '.join(sizes)}")
    size = sizes[options.size] | ({"layers": options.layers} if options.layers else {})
    keep = "inputs" if options.checkpoint else options.keep
    how = dict(keep=keep, checkpoint_layers=options.checkpoint or 0)
    how |= {"update": "none"} if options.until == "loss" else {}
    backend = options.backend or ("gloo" if kind_of(options.device) == "cpu" else "nccl")
    names = ["batch", "context", "dtype", "attention", "optimizer", "until", "seed"]
    keys = size | {name: getattr(options, name) for name in names} | how
    if options.ranks > 1:
        keys |= dict(ranks=options.ranks, strategy=options.strategy)
        keys |= {"shard": options.shard} if options.shard else {}
    side = f"c_{backend}" if options.ranks > 1 else "c"
    return Case("diverge", size=options.size, seconds=SAID, config={side: c_switches(**how)}, **keys)


def main(options, console):
    case = case_of(options)
    library = options.library or default_library()
    settings = Settings(library, options.threads, 0.0, options.device)
    of_ranks = []
    for rank, records in enumerate(records_of(case, settings)):
        where = f"rank {rank}: " if options.ranks > 1 else ""
        mine, theirs = (next((r for r in records if r["impl"].startswith(x)), {}) for x in ("c", "torch"))
        if "error" not in mine:
            bad = next(r for r in records if r["status"] not in ("ok", "failed"))
            raise ParityError(f"{where}{bad['impl']} is {bad['status']}: {bad['message']}")
        of_ranks.append((mine, theirs["error"]["outputs"]))
    return say(of_ranks, options, console)


def records_of(case, settings):
    if "ranks" not in case:
        with Worker(settings) as worker:
            return [worker.run(__name__, case)]
    lacks = missing(case, settings.device)
    if lacks:
        raise ParityError(lacks)
    with Group(case.ranks, settings) as group:
        return group.run(__name__, case)


def say(of_ranks, options, console):
    """Prints the first output outside the rule, and returns the exit status."""
    rows = [
        (name, rank, found.get("used", math.inf), found, theirs.get(name, {}))
        for rank, (mine, theirs) in enumerate(of_ranks)
        for name, found in mine["error"]["outputs"].items()
    ]
    names = {name: place for place, name in enumerate(dict.fromkeys(row[0] for row in rows))}
    rows.sort(key=lambda row: (names[row[0]], row[1]))
    wide = max(map(len, names))
    for name, rank, used, mine, theirs in rows if options.all else ():
        where = f"rank {rank}  " if len(of_ranks) > 1 else ""
        errors = f"C {mine['rel_l2']:.2e}  PyTorch {theirs['rel_l2']:.2e}"
        mark = "" if used <= 1 else "  <--"
        console.print(f"{where}{name:<{wide}}  {errors}  {used:7.1%} of what is allowed{mark}")
    bad = [row for row in rows if not row[2] <= 1]
    what = f"{options.size} in {options.dtype}: {len(names)} outputs"
    if not bad:
        name, rank, used, *_ = max(rows, key=lambda row: row[2])
        words = f"The largest error is {used:.0%} of what is allowed: {name}"
        console.print(f"{what}, and all are within the rule. {words}")
        return 0
    name, rank, used, mine, theirs = bad[0]
    where = f" of rank {rank}" if len(of_ranks) > 1 else ""
    count = len({row[0] for row in bad})
    are = "is" if count == 1 else "are"
    console.print(f"{what}; {count} {are} outside the rule. The first{where}: {name}")
    for side, error in (("C", mine), ("PyTorch", theirs)):
        console.print(f"  {side:<8} rel_l2 {error['rel_l2']:.3g}, largest error {error['max_abs']:.3g}")
    said = of_ranks[rank][0]["message"].partition(f"{name}: ")[2]
    console.print(f"  {re.split('; [a-z0-9_.]+: |; and [0-9]+ more', said)[0]}")
    before = [row[0] for row in rows if names[row[0]] < names[name]]
    console.print(f"  the output before it: {before[-1] if before else 'none'}")
    return 1
