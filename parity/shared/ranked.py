"""Steps of several ranks on both sides: C's trainer with its links, and PyTorch's model."""

import contextlib
import functools

import torch
import torch.distributed as dist

from parity.core import Case, Side, equal, sampled
from parity.shared.model import (
    ADAMW,
    TandemTrainer,
    autocast,
    c_switches,
    clip,
    draw_batch,
    initial_state,
    moved,
    state_dict,
    timed_rules,
    torch_model,
    torch_options,
    trained_alone,
    updates,
)
from parity.shared.sizes import extents
from ref import ddp as ref
from ref import shard, transformer

BACKENDS = {"cuda": ("nccl",), "cpu": ("mpi", "gloo")}
SGD_LR = 0.1
QUICK_RANKS = {"cpu": (2, 3), "cuda": (2, 4)}  # three leave rests, and their averages are rounded
XL_RANKS = {"full": (2, 4, 8), "standard": (2,), "quick": (2,)}  # GPUs of the timed steps of xl
NARROW = ("bf16", "f16", "bf16_mixed")  # gradients of 16 bits
NCCL_CTAS = {False: 0, True: 24}  # td_ddp_nccl_ctas, by whether gradients are NARROW
NCCL_CTAS_FLAT = {False: 16, True: 24}  # td_shard_nccl_ctas
LAPTOP = {"size": "laptop"} | extents("laptop")[0] | {"batch": 2, "context": 64}
XL_BYTES = {"xl": 45 * 2**30, "2.7B": 90 * 2**30}  # that a side needs, by size
EAGER_BEFORE_CAPTURE = 11  # steps: DistributedDataParallel times its first ten


def sides_of(device, make):
    """C's sides on a kind of device, by name: what make(backend) returns."""
    return {f"c_{backend}": make(backend) for backend in BACKENDS[device]}


def switches_of(device, dtype="f32", queued=False, shard=None):
    """The switches of C's sides: the defaults of `tandem ddp` and `tandem shard`. `queued`: as with --queued."""
    gpu, full = device == "cuda", shard == "full"
    gradients = "shared" if full else "transient"  # the link has memory for them
    keep = "most" if full else "all"
    how = c_switches(graph=gpu and not queued, keep=keep, gradients=gradients, update="along")
    ctas = (NCCL_CTAS_FLAT if shard in ("flat", "full") else NCCL_CTAS)[dtype in NARROW]
    if gpu and ctas > 0:
        how["nccl_ctas"] = ctas
    return sides_of(device, lambda backend: how)


def configs(device, impl, dtype="f32", queued=False, shard=None):
    """The switches of C's sides and of `impl`."""
    return switches_of(device, dtype, queued, shard) | {impl: dict(compiled=False)}


def in_turn(device, keys):
    """On GPUs one side after the other."""
    return dict(in_turn=device == "cuda", needs_bytes=XL_BYTES.get(keys["size"], 0))


def timed(device, profile, keys):
    """How steps of these keys are timed."""
    gpu, few = device == "cuda", (profile, device) == ("quick", "cpu")
    how = dict(measure="time", warmup=5 if gpu else 3, repeats=5 if few else 10)
    return how | dict(seconds=20.0 if gpu else 4.0 * keys["ranks"]) | in_turn(device, keys)


def options_alone(deliverable, device, impl, **keys):
    """Some steps of SGD with each option of a trainer alone. Clipping and AdamW hide a wrong factor of gradients."""
    config = configs(device, impl, shard=keys.get("shard"))
    for how in config.values():
        if "gradients" in how:
            how["gradients"] = "held"  # as micro-batches need it
    for option in (dict(micro_batches=3), dict(clip=0.5)):
        how = dict(seconds=1.0, dtype="f32", optimizer="sgd", steps=3, config=config)
        yield Case(deliverable, **keys, **how, **option)


def hyper_of(case):
    if case.optimizer == "sgd":
        return {"kind": "sgd", "sgd": {"lr": SGD_LR}}
    return {"kind": "adamw", "adamw": {"variant": "torch", **ADAMW}}


class RankTrainer(TandemTrainer):
    """A trainer of this rank with the case's links: `strategy`, `bucket_mb`, and `shard` unless it is left `whole`. Its
    device is the communicator's, so streams of links are in order with its own. `first`: a td_hook before all
    others."""

    def __init__(self, case, c, backend, whole=False, first=None):
        self.switches = case.config[whole_of(f"c_{backend}") if whole else f"c_{backend}"]
        fields = dict(hyper=hyper_of(case), gain=1 / case.ranks)
        super().__init__(case, c.ranks.session, case.get("attention", "flash"), self.switches, **fields)
        self.backend, self.ranks, self.first = backend, c.ranks, first
        self.split = None if whole else case.get("shard")
        self.ddp = self.shard = None
        self.joined = False

    def comm(self):
        return self.ranks.comm(self.backend, self.switches.get("nccl_ctas", 0))

    def open(self):
        case, c, config = self.case, self.c, self.config
        bucket_mb = self.switches.get("bucket_mb", case.get("bucket_mb", 0.0))
        config.hooks = c.ffi.NULL
        if self.split in (None, "tensors"):
            strategy = c.enum("td_ddp_strategy", case.get("strategy", "bucketed"))
            self.ddp = c.create("td_ddp_link_create", self.comm(), strategy, bucket_mb)
            config.hooks = c.td_ddp_link_hook(self.ddp)
        if self.split:
            options = c.struct("td_shard_options", bucket_mb=bucket_mb)
            options.kind = c.enum("td_shard_kind", self.split)
            self.shard = c.create("td_shard_link_create", self.comm(), options, config, config)
        if self.first is not None:
            self.first.next, config.hooks = config.hooks, self.first
        return super().open()

    def close(self):
        super().close()
        for link in (self.ddp, self.shard):
            if link is not None:
                self.c.destroy(link)
        self.ddp = self.shard = None
        self.joined = False

    def begin(self, state=None):
        """These weights, or C's own; no moments, step 0."""
        if self.joined:
            self.c.td_train_settle(self.train)
        if state is None:
            self.c.td_train_init(self.train, 0)
        else:
            super().begin(state)
        if not self.joined and self.ddp is not None:
            self.c.td_ddp_link_attach(self.ddp, self.c.device, self.train)
        if not self.joined and self.shard is not None:
            self.c.td_shard_link_attach(self.shard, self.c.device, self.train)
        self.joined = True

    def step(self, ids, targets):
        """Ends with new weights on every rank. But a captured step gathers the weights of the step before it."""
        super().step(ids, targets)
        if self.shard is not None and not self.switches["graph"]:
            self.c.td_shard_link_finish(self.shard)

    def weights(self, **how):
        """Whole, on every rank."""
        self.c.td_train_settle(self.train)
        read = functools.partial(self.c.td_shard_gather, self.shard) if self.split == "full" else None
        return state_dict(self.c, self.model, read=read, **how)

    def windows(self):
        """How many blocks of memory collectives go from GPU to GPU of."""
        return self.c.value("td_comm_describe", self.comm()).windows

    def state_bytes(self):
        """Of this rank's moments; None: they are not split."""
        return self.shard and self.c.value("td_shard_link_describe", self.shard).moment_bytes


class TorchTrainer:
    """PyTorch's model of this rank: the assignment's strategies, and `bucketed` by DistributedDataParallel.

    optimizer   makes the optimizer of the case, its parameters and `fused`; default: optimizer_of
    switches    compiled: block by block, with PyTorch's fused attention; compressed: gradients are sent in bf16;
                captured: after capture() steps replay a graph, with the batch of that call; fused: AdamW is"""

    def __init__(self, case, state, device, optimizer=None, **switches):
        self.case, self.state, self.device, self.optimizer_of = case, state, device, optimizer or optimizer_of
        self.compiled = switches.get("compiled", False)
        self.compressed = switches.get("compressed", False)
        self.captured = switches.get("captured", False)
        self.fused = switches.get("fused", True)
        self.mixed = case.dtype == "bf16_mixed"
        self.sharded = case.get("shard") == "full"
        self.stream = torch.cuda.Stream() if self.captured else None
        loss = transformer.cross_entropy
        self.loss = torch.compile(loss, dynamic=False) if self.compiled else loss
        self.graph = self.parallel = self.optimizer = None

    def open(self):
        if not self.captured:
            return self.make()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return self.make()

    def make(self):
        attend = {"attend": transformer.fused_attention} if self.compiled else {}
        model = torch_model(self.case, self.state, **attend)
        if self.compiled:
            for block in model.layers:
                block.compile(dynamic=False)
        if self.sharded:
            self.parallel = shard.FullySharded(model, torch.bfloat16 if self.mixed else None)
        else:
            strategy, bucket_mb = self.case.get("strategy", "bucketed"), self.case.get("bucket_mb", 0.0)
            self.parallel = ref.DataParallel(model, strategy, bucket_mb)
        if self.compressed:
            self.parallel.compress()
        self.optimizer = self.optimizer_of(self.case, self.parallel.parameters, self.fused)
        for group in self.optimizer.param_groups if self.captured else ():
            group["capturable"] = True
        return self

    def capture(self, ids, targets):
        """Captures the step. DistributedDataParallel must be made, and run eleven times, on the capturing stream."""
        with torch.cuda.stream(self.stream):
            for _ in range(EAGER_BEFORE_CAPTURE):
                self.step(ids, targets)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: NCCL's thread, which watches earlier collectives, may go on.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.step(ids, targets)
        self.graph = graph

    def close(self):
        if self.graph:
            # NCCL waits for graphs that have its calls, and frees their memory in its next call.
            self.graph.reset()
            dist.all_reduce(torch.zeros(1, device=self.device))
        if self.parallel:
            self.parallel.close()
        self.graph = self.parallel = self.optimizer = None

    def step(self, ids, targets):
        if self.graph:
            return self.graph.replay()
        loss = self.backward(ids, targets)
        self.update()
        return loss

    def backward(self, ids, targets):
        """Up to gradients of all ranks."""
        keeps = self.case.get("strategy", "bucketed") == "bucketed" and not self.sharded
        self.optimizer.zero_grad(set_to_none=not keeps)
        micros, total = self.case.get("micro_batches", 1), 0.0
        for part in zip(ids.chunk(micros), targets.chunk(micros), strict=True):
            # fully_shard casts weights itself.
            with contextlib.nullcontext() if self.sharded else autocast(self.case, self.device):
                loss = self.loss(self.parallel.forward(part[0]), part[1]) / micros
            loss.backward()
            total = total + loss.detach()
        self.parallel.finish()
        return total

    def update(self):
        clip(self.case, self.parallel.parameters)
        self.optimizer.step()

    def weights(self):
        """Whole, by name. All ranks call it."""
        return {name: shard.whole(p.detach()) for name, p in self.parallel.model.named_parameters()}


def optimizer_of(case, parameters, fused=True):
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=SGD_LR)
    return torch.optim.AdamW(parameters, fused=fused, **torch_options())


def draw_batches(case, draw, steps):
    """Of each step and rank, with all micro-batches."""
    return [
        [draw_batch(case, draw, f"tokens {step} {rank}") for rank in range(case.ranks)]
        for step in range(steps)
    ]


def by_turns(c, alone):
    """A case's "equal", where one process computes the answers of all ranks: alone() lists them, on each rank with its
    sums in another order. So each call of this is one of a rank's own turn, and all ranks get what it found. After the
    first turn ranks compute no more than the judge still wants."""
    found, devices = [], {}

    def equal():
        if not found:
            mine = []
            if not devices or c.ranks.rank < c.ranks.wanted:
                mine = [{name: torch.as_tensor(value) for name, value in of.items()} for of in alone()]
                devices.update((name, value.device) for name, value in mine[0].items())
            mine = [{name: value.cpu() for name, value in of.items()} for of in mine]
            found.extend(of_ranks[c.ranks.rank] for of_ranks in c.ranks.gathered(mine) if of_ranks)
        return {name: value.to(devices[name]) for name, value in found.pop().items()}

    return equal


def judged_by_one(c, sides, in_one, rules=None):
    """A plan with the sides of a rank. in_one(dtype) lists the answers of all ranks, as one process computes them."""
    return sides | {
        "truth": lambda: in_one(torch.float64)[c.ranks.rank],
        "equal": by_turns(c, in_one),
        "rule": {"ranks_apart": equal("truth")} | (rules or {}),
    }


def outputs_of(state, losses, weights, c=None, dtype=torch.float32):
    """What every proof compares, and how far each weight moved."""
    return losses_and_apart(losses, weights, c, dtype) | updates(state, weights, dtype)


def losses_and_apart(losses, weights, c, dtype):
    """This rank's losses, and whether the ranks of `c`, if it is given, have other bits in their weights."""
    apart = c is not None and not c.ranks.same(torch.cat([w.detach().reshape(-1) for w in weights.values()]))
    return {"losses": torch.tensor(losses, dtype=dtype), "ranks_apart": float(apart)}


def judged_step(case, draw, c, impl, rules, optimizer=None):
    """Some steps of the model on every side, from the same weights. `optimizer`: PyTorch's, by case and parameters."""
    state = initial_state(case, draw.normal)
    batches = draw_batches(case, draw, case.steps)
    rank = c.ranks.rank

    def tandem(backend):
        trainer, values = RankTrainer(case, c, backend), {}

        def call():
            trainer.begin(state)
            losses = []
            for batch in batches:
                trainer.step(*batch[rank])
                losses.append(float(trainer.loss()))
            if trainer.state_bytes():
                values["state_bytes"] = trainer.state_bytes()
            return outputs_of(state, losses, trainer.weights(), c)

        return Side(call, open=trainer.open, close=trainer.close, record=lambda: {"values": values})

    def eager():
        trainer = TorchTrainer(case, state, draw.device, optimizer).open()
        losses = [float(trainer.step(*batch[rank])) for batch in batches]
        weights = trainer.weights()
        trainer.close()
        return outputs_of(state, losses, weights, c)

    def in_one(dtype=None):
        losses, weights = trained_alone(case, state, batches, optimizer_of, dtype)
        of_ranks = zip(*losses, strict=True)
        return [outputs_of(state, found, weights, dtype=dtype or torch.float32) for found in of_ranks]

    sides = sides_of(draw.device.type, tandem) | {impl: eager}
    return judged_by_one(c, sides, in_one, rules)


def toy(make, state, device, dtype=torch.float32):
    """One of the course's models with these weights. A tied weight has one name."""
    model = make().to(device, dtype)
    model.load_state_dict(state, strict=False)
    return model


def toy_outputs(weights, losses, c=None, dtype=torch.float32):
    """What every proof compares, and the weights by name."""
    found = {f"weight.{name}": weight.detach().clone() for name, weight in weights.items()}
    return found | losses_and_apart(losses, weights, c, dtype)


def whole_of(side):
    """The name of C's side whose ranks all have the whole optimizer state, for `side`, whose ranks have a part."""
    return f"{side}_whole"


def timed_step(case, draw, c, optimizer=None):
    """A step of every side that the case's config names, on one random batch a rank. C's run on its own stream, as its
    users' do: a step's products go ahead of its updates, and its collectives ahead of both."""
    state = initial_state(case, draw.quickly if case.in_turn else draw.normal)
    batches = draw_batches(case, draw, 1)
    ids, targets = batches[0][c.ranks.rank]

    def tandem(backend, whole=False):
        trainer, found = RankTrainer(case, c, backend, whole), {}

        def begin():
            trainer.c.own_stream(True)
            trainer.open()
            trainer.begin(state)
            windows = trainer.windows()
            if windows:
                found["values"] = {"windows": windows}

        def renew():
            trainer.c.own_stream(False)  # in order with the changes of `state`
            trainer.begin(state)
            trainer.c.own_stream(True)

        def answer():
            trainer.c.own_stream(False)
            return {"loss": trainer.loss()} | moved(state, trainer.weights(take=sampled))

        def close():
            trainer.close()
            trainer.c.own_stream(False)

        how = dict(renew=renew, answer=answer, record=lambda: found)
        return Side(lambda: trainer.step(ids, targets), open=begin, close=close, **how)

    def torch_side(switches):
        trainer = TorchTrainer(case, state, draw.device, optimizer, **switches)

        def begin():
            trainer.open()
            if trainer.captured:
                trainer.capture(ids, targets)
            last = trainer.parallel.parameters[-1].detach()
            before = shard.whole(last).clone()
            trainer.step(ids, targets)
            if not c.ranks.same(shard.whole(last)):
                raise RuntimeError("a step leaves the ranks with other weights")
            if torch.equal(shard.whole(last), before):
                raise RuntimeError("a step leaves the weights as they were")

        def call():
            trainer.step(ids, targets)

        return Side(call, open=begin, close=trainer.close)

    def truth():
        """In turn models are large, and f64 might not fit."""
        dtype = None if case.in_turn else torch.float64
        losses, weights = trained_alone(case, state, batches, optimizer_of, dtype)
        samples = {name: sampled(weight) for name, weight in weights.items()}
        loss = torch.tensor([float(losses[0][c.ranks.rank])], device=draw.device)
        return {"loss": loss} | moved(state, samples)

    sides = sides_of(draw.device.type, tandem) | {"truth": truth, "rule": timed_rules(case)}
    unsplit = {whole_of(f"c_{backend}"): backend for backend in BACKENDS[draw.device.type]}
    sides |= {side: tandem(backend, whole=True) for side, backend in unsplit.items() if side in case.config}
    return sides | {side: torch_side(switches) for side, switches in case.config.items() if side not in sides}
