"""One process of somebody's interpreter in somebody's folder: `python -c THIS WORK RANK RANKS DEVICE`.

It needs the standard library and torch only. Requests come as lines of JSON, tensors as raw bytes in files of WORK. It
calls the functions of tests/adapters.py and hands back what they gave; it judges nothing. parity.judge imports the
models and the training loop for its own side.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
import traceback
from collections import deque
from datetime import timedelta
from time import perf_counter, sleep  # their code may replace time's

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

WAIT_S = 600  # of a collective; the parent ends a rank before
TURNS = 3  # calls with other values in the same memory before the one that is judged
RESULTS = ("o", "dq", "dk", "dv", "lse")
NEAR = 0.05  # relative: sums in another order are nearer, a kernel that wrote before others cleared is not
SYNCHRONIZE, BARRIER = torch.cuda.synchronize, dist.barrier  # their code may replace torch's
CLOCKS = "nvidia-smi --query-gpu=clocks.sm --format=csv,noheader,nounits --id=0".split()
PERSISTING_L2 = 6  # cudaLimitPersistingL2CacheSize
# Timed calls: at least and at most so many, untimed ones before, and how many outputs wait for a late change.
FEWEST, MOST, WARMUP, KEPT = 5, 1000, 2, 8
PAUSE = 0.2  # seconds after the last call: work that goes on shows in its outputs
SETTLED = 0.01  # of the median, in which it lies with about 95 %
UNLIKE = {torch.float32: 5e-3}  # relative, from PyTorch's answer in f32; 16 bits: 10 times as much
PLAIN = r"scaled_dot_product|^aten\.(mm|bmm|baddbmm|\w*softmax)\."  # no forward in Triton calls these
PROMISED = "in buckets, while backward runs"
OPTIMIZERS = {"sgd": (torch.optim.SGD, dict(lr=0.1))}
# With an eps of 1e-8 rounding decides the sign of a first update: one process in f32 is off by up to 5e-5.
ADAMW = dict(lr=0.01, weight_decay=0.1, eps=1e-4, betas=(0.8, 0.95), amsgrad=True)
OPTIMIZERS["adamw"] = torch.optim.AdamW, ADAMW


def load(path, dtype, shape):
    numel = torch.Size(shape).numel()
    return torch.from_file(path, size=max(1, numel), dtype=getattr(torch, dtype))[:numel].view(shape).clone()


def store(path, tensor):
    """Writes the bytes, without numpy; returns what load() needs."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    torch.from_file(path, shared=True, size=max(1, len(data)), dtype=torch.uint8)[: len(data)].copy_(data)
    return path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


PENDING = {}  # by address: the last collective that nobody has waited for
CALLS = []  # of all_reduce: whether backward ran, and whether the call waited


class Late(dist.Work):
    """An asynchronous collective whose result is not there until somebody waits for it. The next collective on the same
    memory reads that result, as on a GPU's stream."""

    on = True  # but not in timed steps and with AdamW
    backward = False  # it runs

    def __init__(self, work, into, value):
        super().__init__()
        self.work, self.into, self.value = work, into, value
        PENDING[into.data_ptr()] = self

    def arrive(self, *_):
        if PENDING.get(self.into.data_ptr()) is self:
            del PENDING[self.into.data_ptr()]
        if self.value is not None:
            self.into.data.copy_(self.value)
        self.value = None  # who waits twice finds what was written since
        return [self.into.data]

    def wait(self, *limits):
        return self.work.wait(*limits) and bool(self.arrive())

    def get_future(self):
        return self.work.get_future().then(self.arrive)


def late(real):
    """An all-reduce or a broadcast."""

    def call(*arguments, **names):
        how = inspect.signature(real).bind(*arguments, **names).arguments
        CALLS.append((Late.backward, not how.get("async_op")))
        if not how.get("async_op") or not Late.on:
            return real(**how)
        into = how["tensor"]
        earlier = PENDING.get(into.data_ptr())
        value = (earlier.value if earlier and earlier.work.wait() else into.detach()).clone()
        return Late(real(**how | {"tensor": value}), into, value)

    return call


# ---- attention ----


class Calls(TorchDispatchMode):
    """The operations that were called, and the bytes of the largest result."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        found = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, getattr(found, "nbytes", 0))
        return found


def attention(adapters, request, x, device):
    apply, causal = getattr(adapters, request["adapter"])().apply, request["causal"]
    # Strided: no two tensors have the same strides. Each order is its own inverse.
    orders = ((0, 2, 1), (1, 0, 2), (2, 1, 0)) if request["strided"] else [(0, 1, 2)] * 3
    pairs = zip("qkv", orders, strict=True)
    leaves = [torch.empty_like(x[n], device=device).permute(o).contiguous().permute(o) for n, o in pairs]
    calls_of = {}  # the results of each turn: the first call of a shape may choose a kernel
    for turn in (*range(TURNS, 0, -1), TURNS, 0):
        for name, leaf in zip("qkv", leaves, strict=True):
            leaf.requires_grad_().data.copy_(x[name].flatten().roll(turn).view_as(leaf))
        freed = [torch.full_like(leaf, torch.nan) for leaf in leaves]
        del freed
        o = apply(*leaves, causal)
        logs = [saved for saved in o.grad_fn.saved_tensors if saved.shape == leaves[0].shape[:2]]
        do, kept = x["do"].to(device, copy=True), o.detach().clone()
        if request["strided"]:  # rows as far apart as in no other tensor
            do = torch.cat([do, do], -1)[:1, :, : do.shape[-1]].expand_as(do)
        apply(*(leaf.flip(0, 1) for leaf in leaves), causal)  # as the next layer of a model does
        apply(*(leaf.flip(0, 1)[:1, :16] for leaf in leaves), not causal)
        if request["twice"]:
            torch.autograd.grad(o, leaves, do.flip(0, 1), retain_graph=True)
        grads = torch.autograd.grad(o, leaves, do)
        found = dict(zip(RESULTS, [kept, *grads, *logs[:1]], strict=False))
        calls_of.setdefault(turn, []).append({name: tensor.clone() for name, tensor in found.items()})
    pairs = zip(("q", "k", "v", "do"), (*leaves, do), strict=True)
    changed = [name for name, tensor in pairs if not torch.equal(tensor.cpu(), x[name])]
    with Calls() as calls:
        whole = apply(*leaves, False)
        flag = "ignored" if causal and torch.equal(whole, kept) else "used"
        with contextlib.suppress(TypeError):  # it may have no default
            flag = "True by default" if (apply(*leaves) - whole).norm() > NEAR * whole.norm() else flag
    theirs = [name for name in sorted(calls.names) if re.search(PLAIN, name)]
    first, later = calls_of[TURNS]
    unlike = [name for name in found if (first[name] - later[name]).norm() > NEAR * later[name].norm()]
    facts = {
        "first call": f"{unlike[0]} is unlike a later call's" if unlike else "like a later one",
        "inputs": f"{', '.join(changed)} changed" if changed else "unchanged",
        "saved": "one logsumexp" if len(logs) == 1 else f"{len(logs)} tensors [batch, queries]",
        "is_causal": flag,
        "after a call": "outputs stay" if torch.equal(o, kept) else "another call changed the output",
        "kernel": f"PyTorch's {theirs[0]}" if theirs and "triton" in request["adapter"] else "own",
    }
    return found, facts


def memory(adapters, request, x, device):
    """What forward saves and its largest tensor, for a length and twice the length."""
    apply, sizes = getattr(adapters, request["adapter"])().apply, []
    for seq in (request["seq"], 2 * request["seq"]):
        q, k, v = (torch.randn(1, seq, 16, device=device, requires_grad=True) for _ in range(3))
        # A class may keep the outputs of its last call: let them be small.
        apply(*(x[:, :16] for x in (q, k, v)), False)
        before = held_numbers()
        with Calls() as calls:
            o = apply(q, k, v, True)
        kept = 4 * (held_numbers() - before)  # also outside saved_tensors
        sizes.append(calls.largest + kept + sum(saved.nbytes for saved in o.grad_fn.saved_tensors))
        del o
    held = []
    for _ in range(3):
        torch.autograd.grad(apply(q, k, v, True).sum(), (q, k, v))
        held.append(held_numbers())
    if held[0] < held[1] < held[2]:
        return {}, {"memory": f"grows with each call by {(held[2] - held[1]) / 256:.0f} KiB"}
    kib = " and ".join(f"{nbytes / 1024:.0f} KiB" for nbytes in sizes)
    words = f"grows with the square of the length: {kib} for {request['seq']} and {2 * request['seq']} tokens"
    return {}, {"memory": words if sizes[1] > 3 * sizes[0] else "grows with the length"}


# ---- times ----


def plain(q, k, v, causal):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def fused(q, k, v, causal):
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=causal)[:, 0]


@functools.cache
def compiled():
    return torch.compile(plain, dynamic=False)


class Clock:
    """Times one pass of an attention function. Each call finds values that no call before had."""

    def __init__(self, request, x, device):
        self.request, self.device = request, device
        self.x = [x[name].to(device) for name in ("q", "k", "v", "do")]
        self.sets = [self.values(turn) for turn in range(request["sets"])]

    def values(self, turn):
        return [x.flatten().roll(turn).view_as(x) for x in self.x]

    def fill(self, turn, values):
        for tensor, value in zip(self.sets[turn % len(self.sets)], values, strict=True):
            tensor.data.copy_(value)

    def wait(self):
        if self.device != "cpu":
            SYNCHRONIZE()

    def call(self, apply, turn, waits=True):
        """ms, what the call returned, and a copy. Without `waits` the copy lacks work of other streams."""
        *qkv, do = self.sets[turn % len(self.sets)]
        qkv, phase = [x.requires_grad_() for x in qkv], self.request["pass"]
        o = apply(*qkv, self.request["causal"]) if phase == "backward" else None
        self.wait()
        began = perf_counter()
        o = apply(*qkv, self.request["causal"]) if o is None else o
        grads = () if phase == "forward" else torch.autograd.grad(o, qkv, do)
        if waits:
            self.wait()
        ms = 1e3 * (perf_counter() - began)
        found = [o.detach(), *grads]
        return ms, found, [tensor.clone() for tensor in found]

    def unlike(self, values, found):
        """Whether an output is far from PyTorch's in f32."""
        *qkv, do = (x.float() for x in values)
        o = fused(*(x.requires_grad_() for x in qkv), self.request["causal"])
        answers, bound = [o, *torch.autograd.grad(o, qkv, do)], UNLIKE.get(found[0].dtype, 5e-2)
        return not all(
            type(mine) is torch.Tensor and (mine.float() - right).norm() <= bound * right.norm()
            for mine, right in zip(found, answers, strict=False)
        )

    def samples(self, apply, pause=PAUSE):
        """Statistics, what became of the calls, and the outputs of the last one, whose inputs the request names."""
        kept, times, wrong, moved, late, last = deque(), [], 0, 0, 0, False
        while not last:
            turn = len(times)
            if turn == 1 + WARMUP:
                files, mhz, began = cached_files(), clock_mhz(self.device), perf_counter()
            last = turn > WARMUP and self.enough(times[1 + WARMUP :], perf_counter() - began)
            values = self.values(self.request["turn"] if last else turn)
            if last:
                self.fill(turn, values)
            ms, found, copies = self.call(apply, turn, waits=turn > WARMUP)
            times.append(ms)
            kept.append((found, copies))
            wrong += self.unlike(values, copies)
            moved += changed(self.sets[turn % len(self.sets)], values)
            self.fill(turn, self.values(turn + len(self.sets)))
            late += len(kept) > KEPT and changed(*kept.popleft())
        self.wait()
        sleep(pause)
        late += sum(changed(*pair) for pair in kept)
        timed = statistics_of(times[1 + WARMUP : -1], times[0], mhz, self.device)
        return timed | {"compiled": cached_files() - files}, (wrong, late, moved), copies

    def enough(self, times, seconds):
        late = seconds > self.request["budget"] or len(times) == MOST
        return len(times) >= FEWEST and (late or settled(times))


def spread(times):
    """The standard deviation by the quartiles, because a busy machine has outliers."""
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / 1.35


def settled(times):
    return 2.2 * spread(times) < SETTLED * statistics.median(times) * len(times) ** 0.5


def changed(found, copies):
    """Whether a bit differs."""
    bits = [[x.detach().contiguous().view(torch.uint8) for x in tensors] for tensors in (found, copies)]
    return not all(map(torch.equal, *bits))


def statistics_of(times, first, mhz, device):
    """`mhz`: the clock before the calls."""
    found = {"ms": statistics.median(times), "std": spread(times), "n": len(times), "first_ms": first}
    clocks = [mhz, clock_mhz(device)]
    return found | {"settled": settled(times), "mhz": clocks, "persisting": persisting_bytes(device)}


def cached_files():
    """How many files compilers have written."""
    return sum(len(files) for *_, files in os.walk(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")))


def clock_mhz(device):
    """The clock of the GPU's SMs now. None on a CPU, and if the driver does not say."""
    try:
        return int(subprocess.run(CLOCKS, capture_output=True, text=True).stdout) if device != "cpu" else None
    except (OSError, ValueError):
        return None


def persisting_bytes(device):
    """How much of the L2 cache this process has set aside for data that stays there."""
    with open("/proc/self/maps") as maps:
        runtimes = [line.split()[-1] for line in maps if "/libcudart" in line and device != "cpu"]
    size = ctypes.c_size_t()
    for runtime in runtimes[:1]:
        ctypes.CDLL(runtime).cudaDeviceGetLimit(ctypes.byref(size), PERSISTING_L2)
    return size.value


def times(adapters, request, x, device):
    """One pass of their function, and of three ways that PyTorch has."""
    apply = getattr(adapters, request["adapter"])().apply
    timed, (wrong, late, moved), outputs = Clock(request, x, device).samples(apply)
    calls, beside = timed["n"] + WARMUP + 2, {}
    quick = request | {"budget": request["budget"] / 4}
    facts = {"inputs": f"changed in {moved} calls" if moved else "unchanged"}
    facts["timed calls"] = f"{wrong} of {calls} unlike PyTorch's" if wrong else "like PyTorch's"
    facts["after a call"] = f"{late} outputs changed" if late else "outputs stay"
    for name in request["beside"]:
        try:
            side = compiled() if name == "compiled" else {"eager": plain, "fused": fused}[name]
            beside[name] = Clock(quick, x, device).samples(side, pause=0)[0]["ms"]
        except Exception as error:
            beside[name] = one_line(error)
    names = ("o", "dq", "dk", "dv")
    return dict(zip(names, outputs, strict=False)), facts | {"timed": timed | {"beside": beside}}


# ---- training among ranks ----


class Toy(nn.Module):
    """Tied and frozen parameters, a buffer and (with `unused`) parameters that one step uses. Gradients come in another
    order than the parameters."""

    def __init__(self, width=16, unused=False):
        super().__init__()
        self.fc4, self.fc1 = nn.Linear(width, 5, bias=False), nn.Linear(10, width, bias=False)
        self.fc2, self.fc3 = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.fc2.bias.requires_grad_(False)
        self.fc3.weight = self.fc2.weight
        self.fixed = nn.Parameter(torch.full((2,), 2.0), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, 5))
        if unused:
            self.spare = nn.Linear(5, 5)

    def forward(self, x, step=0):
        x = F.silu(self.fc2(F.silu(self.fc1(x))))  # smooth: rounding would turn a ReLU on or off
        x = self.fc4(torch.tanh(self.fc3(x))) + self.shift * (1 + step % 3)
        return x + self.spare(x) if step == 1 and hasattr(self, "spare") else x


class Language(nn.Module):
    """A model of linear, embedding and norm layers: PyTorch's, or the classes of `package`, as the course has them.
    `tied`: with a tied and a frozen parameter."""

    def __init__(self, package=None, tied=False):
        super().__init__()
        linear = package.Linear if package else lambda d_in, d_out: nn.Linear(d_in, d_out, bias=False)
        embedding = (package or nn).Embedding
        norm = package.RMSNorm if package else lambda d_model: nn.RMSNorm(d_model, eps=1e-5)
        self.embedding, self.norm1, self.linear1 = embedding(48, 32), norm(32), linear(32, 64)
        self.norm2, self.linear2, self.head = norm(64), linear(64, 32), linear(32, 33)
        self.tied = tied
        if tied:
            self.linear3, self.linear4 = linear(32, 64), linear(64, 32)
            self.linear3.weight = self.linear1.weight
            self.linear4.weight.requires_grad_(False)

    def forward(self, x, step=0):
        x = F.silu(self.linear1(self.norm1(self.embedding(x)))) / (1 + step)
        x = self.linear2(self.norm2(x))
        return self.head(x + self.linear4(F.silu(self.linear3(x))) if self.tied else x)


def model_of(request, x, package=None):
    """The model with the weights that x has, in their dtype."""
    full = request["adapter"] == "get_fsdp"
    model = Language(package, request["tied"]) if full else Toy(request["width"], request["unused"])
    for name, parameter in model.named_parameters():
        parameter.data = x[f"w.{name}"].clone() if f"w.{name}" in x else parameter.data
    return model.to(x["y"].dtype) if "y" in x else model


def loss_of(model, x, *where):
    return (model(x["x"][where], step=where[1]).to(x["y"].dtype) - x["y"][where]).square().mean()


def groups_of(request, module):
    """The parameters in their order, or two groups. One parameter makes the first, so a rank owns nothing of it."""
    if not request["groups"]:
        return module.parameters()
    first, last = module.fc4.weight, module.fc1.weight
    rest = [p for p in module.parameters() if p is not first and p is not last]
    more = {"momentum": 0.9, "betas": (0.5, 0.9)}
    return [{"params": [first], "lr": 0.02, "weight_decay": 0.5} | more, {"params": rest}]


def after_step(request, optimizer, module, step):
    """A third group comes, as if a layer was frozen so far. Options change, as PyTorch's schedulers change them; the
    next step has a learning rate of 0."""
    if request["groups"] and not step:
        optimizer.add_param_group({"params": [module.fc1.weight], "lr": 0.05, "weight_decay": 0.0})
    for index, group in enumerate(optimizer.param_groups if request["schedule"] else ()):
        group.update(lr=0.02 * step + 0.01 * index, weight_decay=0.2 * step)


def alone(request, x, package, compute=None):
    """One process that averages the ranks' gradients: what the ranks must give. `compute`: the dtype in which the model
    computes with its weights."""
    model, (make, how) = model_of(request, x, package), OPTIMIZERS[request["optimizer"]]

    def called(x, **more):
        narrow = {name: parameter.to(compute) for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, narrow, x, more)

    optimizer = make(groups_of(request, model), **how)
    ranks = range(1 if request["one_batch"] else request["ranks"])
    for step in range(request["steps"]):
        optimizer.zero_grad()
        for micro in range(request["micro"]):
            losses = (loss_of(called if compute else model, x, micro, step, rank) for rank in ranks)
            sum(losses).div(len(ranks)).backward()
        optimizer.step()
        after_step(request, optimizer, model, step)
    return {f"p.{name}": parameter.detach() for name, parameter in model.named_parameters()}


class PyTorchs:
    """PyTorch's own wrappers and optimizer. They need no call after backward."""

    def __getattr__(self, name):
        return lambda *_: None

    def get_ddp(self, module, *bucket_mb):
        return DistributedDataParallel(module, bucket_cap_mb=[*bucket_mb, 25][0])

    get_ddp_individual_parameters = get_ddp_bucketed = get_ddp

    def get_sharded_optimizer(self, params, cls, **how):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(params, optimizer_class=cls, **how)


def average(module):
    """The gradients, among the ranks."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def communication(request, module):
    """How a step's all-reduces, which are in CALLS, came: with several buckets, or all gradients in one."""
    parameters = sum(p.requires_grad for p in module.parameters())
    count = f"{len(CALLS)} for {parameters} parameters"
    if request["bucket_mb"] is None or not CALLS:  # of PyTorch's own all-reduces Python sees none
        return count if len(CALLS) >= parameters else PROMISED
    if not any(during for during, _ in CALLS):
        return "after backward"
    if any(during and waits for during, waits in CALLS):
        return "waited for in backward"
    return count if len(CALLS) == 1 else PROMISED


def train(adapters, request, x, device):
    """This rank's steps with their wrapper or optimizer."""
    adapter, rank, timed, package = request["adapter"], dist.get_rank(), request["timed"], None
    times, kept = [], []  # kept: numbers in memory after each step
    full, sharded = adapter == "get_fsdp", adapter == "get_sharded_optimizer"
    Late.on = not timed and request["optimizer"] == "sgd"  # a late result hides what was written before
    with contextlib.suppress(ImportError):
        package = importlib.import_module("cs336_basics.model") if full else None
    module, make = model_of(request, x, package), getattr(adapters, adapter)
    (cls, how), compute = OPTIMIZERS[request["optimizer"]], request["compute"]
    total = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or full)
    before, state_before, facts = held_numbers(), state_numbers(), {}
    if sharded:
        model, optimizer = module, make(groups_of(request, module), cls, **how)
    else:
        with torch.no_grad():
            for parameter in () if full else module.parameters():  # the wrapper must send rank 0's
                parameter.add_(0.5 * rank)
        more = {"get_ddp_bucketed": [request["bucket_mb"]], "get_fsdp": [compute and getattr(torch, compute)]}
        model = make(module, *more.get(adapter, []))
        optimizer = cls(model.parameters(), **how)
    if not isinstance(optimizer, torch.optim.Optimizer):  # which a learning rate scheduler needs
        raise TypeError(f"{type(optimizer).__name__} is no torch.optim.Optimizer")
    named = [] if full else module.named_parameters()
    other = [name for name, parameter in named if not torch.equal(parameter, x[f"w.{name}"])]
    facts["after the wrap"] = f"{other[0]} is not rank 0's" if other else "rank 0's weights"
    for step in range(request["steps"]):
        BARRIER()
        began = perf_counter()
        if adapter == "get_ddp_bucketed":
            adapters.ddp_bucketed_on_train_batch_start(model, optimizer)

        def backward(step=step):
            optimizer.zero_grad()
            for micro in range(request["micro"]):
                loss = loss_of(model, x, micro, step, 0 if request["one_batch"] else rank)
                Late.backward = True
                loss.backward()
                Late.backward = False
            return loss

        CALLS.clear()
        request["closure"] or backward()
        if not sharded:
            getattr(adapters, f"{adapter[4:]}_on_after_backward")(model, optimizer)
        elif not request["one_batch"]:
            average(module)
        given = optimizer.step(*[backward] * request["closure"])
        if request["closure"]:
            facts["a closure's loss"] = "lost" if given is None else "returned"
        after_step(request, optimizer, module, step)
        times.append(1e3 * (perf_counter() - began))
        if request["what"] == "sgd" and step > 1:
            sleep(0.05)  # until the threads of the collectives have dropped their tensors
            kept.append(held_numbers())
        if not step:  # a checkpoint and a look at the loss
            full and adapters.fsdp_gather_full_params(model)
            with torch.no_grad():
                loss_of(model, x, 0, 0, rank)
    if kept:
        grows = kept[-3] < kept[-2] < kept[-1]
        facts["after a step"] = f"{kept[-1] - kept[-2]} numbers more stay" if grows else "no more memory"
    if request["what"] in ("communication", "one bucket"):
        facts["all-reduces"] = communication(request, module)
    held = {"weights": 0, "state": 0}
    if full:
        held["weights"] = sum(local(parameter).numel() for parameter in model.parameters())
        if request["optimizer"] == "sgd":  # which has no state
            model.zero_grad(set_to_none=True)
            held["weights"] = max(held["weights"], total + held_numbers() - before)
    elif sharded and not timed:  # most of a wide model is one parameter
        held["state"] = (state_numbers() - state_before) / 3  # with amsgrad
    # The course shards linear and embedding layers; an optimizer may give a rank whole parameters.
    most = {"weights": 1.1 / dist.get_world_size(), "state": 0.75}
    for what, numbers in held.items():
        part = numbers <= most[what] * total
        facts[f"{what} of a rank"] = "its part" if part else f"of {numbers:g} of {total} weights"
    if timed:
        facts["timed"] = statistics_of(times[1 + WARMUP :], times[0], None, "cpu") | {"compiled": 0}
        if not isinstance(adapters, PyTorchs):
            beside = train(PyTorchs(), request, x, device)[1]["timed"]["ms"]
            facts["timed"]["beside"] = {"eager": beside}
    weights = adapters.fsdp_gather_full_params(model) if full else dict(module.named_parameters())
    return {f"p.{name}": local(value) for name, value in weights.items() if f"w.{name}" in x}, facts


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def objects_of(*kinds):
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), kinds)]


def held_numbers():
    """How many f32 numbers fill the memory of all tensors here."""
    plainly = (torch.Tensor, nn.Parameter)
    storages = [x.untyped_storage() for x in objects_of(torch.Tensor) if type(x) in plainly]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) // 4


def state_numbers():
    """How many numbers the states of all optimizers have."""
    states = [state for found in objects_of(torch.optim.Optimizer) for state in found.state.values()]
    tensors = [local(x) for state in states for x in state.values() if isinstance(x, torch.Tensor)]
    return sum({x.data_ptr(): x.numel() for x in tensors if x.numel() > 1}.values())


# ---- the process ----


def names(adapters, request, x, device):
    versions = f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}"
    return {}, dict.fromkeys(dir(adapters), "") | {"": versions}


def one_line(error):
    """What happened, and the last place in the folder."""
    frames = [at for at in traceback.extract_tb(error.__traceback__) if at.filename.startswith(os.getcwd())]
    where = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0] + where


def main(work, rank, ranks, device):
    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what their code prints
    gc.freeze()  # held_numbers() and its like need not look at what is here
    sys.path[0] = os.getcwd()
    if ranks > 1:
        torch.set_num_threads(1)
        for name in ("all_reduce", "broadcast"):
            for module in (dist.distributed_c10d, dist):
                setattr(module, name, late(getattr(dist, name)))
        how = dict(init_method=f"file://{work}/store", timeout=timedelta(seconds=WAIT_S))
        dist.init_process_group("gloo", rank=rank, world_size=ranks, **how)
    try:
        adapters, failure = importlib.import_module("tests.adapters"), None
    except BaseException as error:
        failure = f"tests/adapters.py cannot be imported: {one_line(error)}"
    for line in sys.stdin:
        request, reply = json.loads(line), {}
        try:
            if failure:
                raise ImportError(failure)
            x = {name: load(*how) for name, how in request["tensors"].items()}
            calls = {"names": names, "attention": attention, "memory": memory, "times": times, "train": train}
            tensors, reply["facts"] = calls[request["call"]](adapters, request, x, device)
            files = {name: f"{work}/{rank}.{name}" for name in tensors}
            reply["tensors"] = {name: store(files[name], tensor) for name, tensor in tensors.items()}
        except Exception as error:
            reply = {"error": failure or one_line(error)}
            absent = isinstance(error, NotImplementedError) and "(tests/adapters.py:" in reply["error"]
            reply = {"absent": reply["error"]} if absent else reply
        say.write(json.dumps(reply) + "\n")
        say.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
