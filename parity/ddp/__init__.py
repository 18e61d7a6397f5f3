"""Data parallelism: gradients averaged over ranks in four ways, by libtandem and by PyTorch, in the same processes."""

import functools
from contextlib import closing
from itertools import product

import torch

from parity.core import Case, Side, equal
from parity.ddp.page import PROOFS, STRATEGIES, TIMES, report
from parity.shared import ranked
from parity.shared.bench_ranks import BenchRanks, gradient_bytes
from parity.shared.sizes import extents
from ref import ddp as ref

__all__ = ["cases", "report", "run"]

IMPL = "torch_ddp"
TOY_MB = (0.0016, 0.0001, 0.01)  # the buckets of the course's tests
TOY_STEPS, TOY_LR, SAMPLES = 5, 0.1, 24  # samples that 2, 4 and 6 ranks divide
TINY = dict(size="tiny", d_model=48, d_ff=100, layers=3, heads=3, vocab=57, batch=2, context=12)
LAPTOP_MB = (1, 4, 25)
XL_WAYS = (  # dtype, optimizer, sizes of buckets
    ("f32", "adamw", (1, 10, 25, 100, 1000)),
    ("bf16", "sgd", (25, 100, 200)),
    ("bf16_mixed", "adamw", (25, 100, 200)),
)
# 2026's xl, and its usual context.
NEW_XL = dict(batch=2, context=512, ranks=2, dtype="f32", optimizer="adamw")
BENCH_STEPS = {"cpu": 10, "cuda": 5}
USUAL_MB = {"cpu": 4, "f32": 25, "bf16": 100, "bf16_mixed": 100}  # the program's, but on a laptop


def cases(profile, device):
    every = {"full": (1, 2, 4, 6), "standard": (2, 4), "quick": ranked.QUICK_RANKS[device]}
    for ranks in every[profile]:
        few = profile != "full" and ranks > 2
        strategies = STRATEGIES[-1:] if few else STRATEGIES
        for model in ref.TOYS:
            for strategy, way in ways(TOY_MB[:1] if few else TOY_MB, strategies):
                yield toy_case(**way, model=model, strategy=strategy, ranks=ranks)
        if ranks == 2:
            yield toy_case(model="tied", strategy="bucketed", bucket_mb=TOY_MB[0], ranks=ranks, uses=2)
            for model in ref.TOYS:
                yield toy_case(model=model, strategy="overlap", ranks=ranks, micro_batches=2)
        judged = strategies if ranks == 2 or (ranks == 4 and profile != "quick") else ()
        for strategy, way in ways((0.05,), judged):
            keys = TINY | way | dict(ranks=ranks, strategy=strategy, steps=3)
            how = dict(seconds=1.0, config=ranked.configs(device, IMPL))
            yield Case(PROOFS[strategy], dtype="f32", optimizer="sgd", **keys, **how)
    keys = dict(strategy="bucketed", bucket_mb=0.05, ranks=2, **TINY)
    yield from ranked.options_alone(PROOFS["bucketed"], device, IMPL, **keys)
    for keys in xl_ways(profile) if device == "cuda" else laptop_ways(profile):
        yield timed_case(device, profile, **keys)
        drawn = keys["strategy"] == "naive" or keys.get("bucket_mb") == usual_mb(device, keys["dtype"])
        if (keys["ranks"] == 2 or device == "cuda") and (profile == "full" or drawn):
            yield communication_case(device, **keys)


def timed_case(device, profile, **keys):
    """The usual bucket has PyTorch's other steps too, but not in the quick profile: compiling takes long."""
    config, how = ranked.configs(device, IMPL, keys["dtype"]), ranked.timed(device, profile, keys)
    if profile != "quick" and keys.get("bucket_mb") == usual_mb(device, keys["dtype"]):
        config |= at_its_best(device, keys["dtype"])
        how["seconds"] += 30.0 if device == "cuda" else 20.0  # of compiling
    return Case(TIMES[keys["strategy"]], **how, **keys, config=config)


def at_its_best(device, dtype):
    """PyTorch's other steps: compiled; on GPUs captured as a graph; and with gradients in 16 bits if C's are."""
    mixed = dtype == "bf16_mixed"
    best = dict(compiled=True, compressed=mixed)
    sides = {"torch_ddp_compressed": dict(compiled=False, compressed=True)} if mixed else {}
    captured = {"torch_ddp_graph": best | dict(captured=True)} if device == "cuda" else {}
    return sides | {"torch_ddp_compiled": best} | captured


def communication_case(device, **keys):
    how = dict(seconds=10.0 if device == "cuda" else 3.0, config=ranked.switches_of(device, keys["dtype"]))
    return Case(TIMES[keys["strategy"]], part="communication", **keys, **how, **ranked.in_turn(device, keys))


def toy_case(**keys):
    """uses: of the tied weight, each of which marks it; the last of the micro_batches trains the last layer alone."""
    return Case(PROOFS[keys["strategy"]], seconds=0.2, samples=SAMPLES, steps=TOY_STEPS, **keys)


def laptop_ways(profile):
    sizes = [USUAL_MB["cpu"]] if profile == "quick" else LAPTOP_MB
    for ranks in (2, 4) if profile == "full" else (2,):
        for strategy, way in ways(sizes):
            yield ranked.LAPTOP | way | dict(ranks=ranks, strategy=strategy, dtype="f32", optimizer="adamw")


def xl_ways(profile):
    """The assignment's: xl on two GPUs, batch 2 a rank. On more GPUs: the usual buckets alone."""
    xl = {"size": "xl"} | extents("xl")[0]
    for ranks, (dtype, optimizer, sizes) in product(ranked.XL_RANKS[profile], XL_WAYS):
        for strategy, way in ways(sizes if ranks == 2 else [usual_mb("cuda", dtype)]):
            keys = dict(batch=2, context=128, ranks=ranks, strategy=strategy)
            yield xl | way | keys | dict(dtype=dtype, optimizer=optimizer)
    if profile == "full":
        for strategy in STRATEGIES[:3]:  # 2026 has no buckets
            yield {"size": "2.7B"} | extents("2.7B")[0] | NEW_XL | {"strategy": strategy}


def ways(sizes, strategies=STRATEGIES):
    """(strategy, keys of its bucket), with every size of bucket."""
    for strategy in strategies:
        for mb in sizes if strategy == "bucketed" else (None,):
            yield strategy, {} if mb is None else {"bucket_mb": mb}


def usual_mb(device, dtype):
    """The bucket of timelines, and of PyTorch's other steps."""
    return USUAL_MB["cpu" if device == "cpu" else dtype]


def runs(case):
    return ["bench"]


def run(case, draw, c):
    if "model" in case:
        return toys(case, draw, c)
    if "part" in case:
        return communication(case, draw, c)
    if "warmup" in case:
        return ranked.timed_step(case, draw, c)
    return ranked.judged_step(case, draw, c, IMPL, {})


def communication(case, draw, c):
    """What communication takes of C's step, by td_bench_run of every rank. The bytes of a step's collectives are
    judged. The records of naive, of overlap and of the usual bucket have timelines."""
    device = draw.device.type
    drawn = case.strategy in ("naive", "overlap") or case.get("bucket_mb") == usual_mb(device, case.dtype)

    def tandem(backend):
        found = {}

        def measure():
            with closing(BenchRanks(case, c, backend, BENCH_STEPS[device], warmup=3)) as run:
                found["values"] = run.values()
                if drawn:
                    found["series"] = run.timelines()

        # Measured once, when the side is opened, because a judged call runs twice.
        return Side(lambda: {"bytes": float(found["values"]["bytes"])}, open=measure, record=lambda: found)

    sides = ranked.sides_of(device, tandem)
    return sides | {"truth": {"bytes": float(gradient_bytes(case))}, "rule": {"*": equal("truth")}}


class Container:
    """libtandem's container around the gradients of a torch module."""

    def __init__(self, case, c, backend, model):
        self.c, self.parameters = c.ranks.session, ref.trained(model)
        names = {id(p): name for name, p in model.named_parameters()}
        every = [*dict.fromkeys(model.parameters())]
        ffi = self.c.ffi
        self.names = [ffi.new("char[]", names[id(p)].encode()) for p in every]
        tensors = ffi.new("td_ddp_tensor[]", len(every))
        for tensor, name, p in zip(tensors, self.names, every, strict=True):
            tensor.name, tensor.dims, tensor.frozen = name, p.dim(), not p.requires_grad
            tensor.dtype = tensor.grad_dtype = self.c.enum("td_dtype", "f32")
            for i, extent in enumerate(p.shape):
                tensor.shape[i] = extent
            tensor.data = ffi.cast("void *", p.data_ptr())
            if p.requires_grad:
                p.grad = torch.zeros_like(p)
                tensor.grad = ffi.cast("void *", p.grad.data_ptr())
        self.tied = None  # the index of a weight that is marked once before its gradient is there
        if "uses" in case:
            self.tied = next(i for i, p in enumerate(every) if p is model.layers[3].weight)
            tensors[self.tied].uses = case.uses
        config = self.c.struct("td_ddp_config", {}, count=len(every), tensors=tensors)
        config.strategy = self.c.enum("td_ddp_strategy", case.strategy)
        config.bucket_mb = case.get("bucket_mb", 0.0)
        self.ddp = self.c.create("td_ddp_create", self.c.device, c.ranks.comm(backend), config)
        for index, p in enumerate(every):
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.marking(index))

    def marking(self, index):
        return lambda _: self.c.td_ddp_ready(self.ddp, index)

    def begin(self, first=True, last=True):
        for p in self.parameters if first else ():
            p.grad.zero_()
        self.c.td_ddp_begin(self.ddp, last)
        if self.tied is not None:
            self.c.td_ddp_ready(self.ddp, self.tied)

    def finish(self):
        self.c.td_ddp_finish(self.ddp)

    def close(self):
        self.c.destroy(self.ddp)


def toys(case, draw, c):
    """Some steps of SGD on squared errors; ranks begin with different weights, and rank 0's count."""
    rank, each = c.ranks.rank, case.samples // case.ranks
    shapes = {name: p.shape for name, p in ref.TOYS[case.model]().named_parameters()}
    states = [
        {name: draw.normal(f"{name} {i}", shape, "f32", std=0.3) for name, shape in shapes.items()}
        for i in range(case.ranks)
    ]
    steps = [
        (draw.normal(f"x {i}", (case.samples, 10), "f32"), draw.normal(f"y {i}", (case.samples, 5), "f32"))
        for i in range(case.steps)
    ]

    made = functools.partial(ranked.toy, ref.TOYS[case.model], device=draw.device)

    def losses_of(model, step, part, dtype=torch.float32):
        mine = (values.to(dtype)[part * each : (part + 1) * each] for values in steps[step])
        micros = case.get("micro_batches", 1)
        for i, (x, y) in enumerate(zip(*(values.chunk(micros) for values in mine), strict=True)):
            found = ref.last_alone(model, x) if 0 < i == micros - 1 else model(x)
            yield torch.nn.functional.mse_loss(found, y) / micros

    def loss_of(model, step, part, dtype=torch.float32):
        return sum(losses_of(model, step, part, dtype))

    def tandem(backend):
        def call():
            model = made(states[rank])
            container = Container(case, c, backend, model)
            losses, micros = [], case.get("micro_batches", 1)
            for step in range(case.steps):
                parts = losses_of(model, step, rank)
                losses.append(0.0)
                for micro in range(micros):
                    container.begin(micro == 0, micro == micros - 1)
                    loss = next(parts)
                    loss.backward()
                    container.finish()
                    losses[-1] += float(loss.detach())
                ref.sgd(container.parameters, TOY_LR)
            container.close()
            return ranked.toy_outputs(dict(model.named_parameters()), losses, c)

        return call

    def eager():
        model = made(states[0])
        parallel = ref.DataParallel(model, case.strategy, case.get("bucket_mb", 0.0))
        losses = []
        for step in range(case.steps):
            for p in parallel.parameters:
                p.grad = None
            loss = loss_of(parallel.forward, step, rank)
            loss.backward()
            parallel.finish()
            ref.sgd(parallel.parameters, TOY_LR)
            losses.append(float(loss))
        parallel.close()
        return ranked.toy_outputs(dict(model.named_parameters()), losses, c)

    def in_one(dtype=torch.float32):
        model = made(states[0], dtype=dtype)
        losses = []
        for step in range(case.steps):
            by_rank = (loss_of(model, step, part, dtype) for part in range(case.ranks))
            losses.append(ref.average_alone(model, by_rank))
            ref.sgd(ref.trained(model), TOY_LR)
        weights = dict(model.named_parameters())
        return [ranked.toy_outputs(weights, of_rank, dtype=dtype) for of_rank in zip(*losses, strict=True)]

    sides = ranked.sides_of(draw.device.type, tandem) | {IMPL: eager}
    return ranked.judged_by_one(c, sides, in_one)
