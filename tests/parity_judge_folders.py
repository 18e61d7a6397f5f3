"""Solutions that are wrong in one place. Each is PyTorch's own parts with one small change, and must be found for its
own reason. PyTorch's parts and the bridge are right.

With TANDEM_ZOO=all every case runs, in processes of its own (about 5 minutes on two cores). Without it attention is
called in this process, and few cases of ranks run."""

import contextlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

import torch

from parity.core import command
from parity.judge import examinee, right
from tandem.library import ROOT, default_library

ALL = os.environ.get("TANDEM_ZOO") == "all"
LIBRARY = str(default_library())
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes; the tensors are small
torch.set_num_threads(1)
ATTENTION = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

aten = torch.ops.aten


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        mask, heads = None, [x[:, None].contiguous() for x in (q, k, v)]
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, is_causal, attn_mask=mask)
        o, lse = o[:, 0], lse[:, 0].reshape(q.shape[:2])
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        Attention.o = o
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        is_causal = ctx.is_causal
        heads = [x[:, None].contiguous() for x in (do, q, k, v, o, lse)]
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = (x[:, 0] for x in backward(*heads, 0.0, is_causal))
        return dq, dk, dv, None


def get_flashattention_autograd_function_pytorch():
    return Attention


def get_flashattention_autograd_function_triton():
    raise NotImplementedError
"""
HEAD = ATTENTION.partition("class")[0]
RANKS = """

def hook(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def get_ddp(module):
    model = DistributedDataParallel(module, init_sync=True, bucket_cap_mb=0.0005)
    model.register_comm_hook(None, hook)
    return model


def ddp_on_after_backward(model, optimizer):
    CACHE.clear()


def get_sharded_optimizer(params, cls, **how):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, optimizer_class=cls, **how)


def get_fsdp(module, compute_dtype=None):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in module.modules():
        if type(layer).__name__ in ("Linear", "Embedding"):
            fully_shard(layer, mp_policy=policy)
    return module


def fsdp_on_after_backward(model, optimizer):
    for parameter in model.parameters():
        if not hasattr(parameter, "to_local"):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def fsdp_gather_full_params(model):
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
"""
BRIDGE = f"""
import sys

sys.path.append({str(ROOT)!r})
from tandem import DataParallel, FlashAttention, ShardedOptimizer
from tandem.fsdp import FullyShardedDataParallel


def get_flashattention_autograd_function_pytorch():
    return FlashAttention


def finish(model, optimizer):
    model.finish_gradient_synchronization()


get_flashattention_autograd_function_triton = get_flashattention_autograd_function_pytorch
get_ddp = get_ddp_individual_parameters = DataParallel
ddp_on_after_backward = ddp_individual_parameters_on_after_backward = finish
ddp_bucketed_on_after_backward = fsdp_on_after_backward = finish
get_sharded_optimizer, get_fsdp = ShardedOptimizer, FullyShardedDataParallel


def get_ddp_bucketed(module, bucket_size_mb):
    return DataParallel(module, "bucketed", bucket_mb=bucket_size_mb)


def ddp_bucketed_on_train_batch_start(model, optimizer):
    model.on_train_batch_start()


def fsdp_gather_full_params(model):
    return model.gather_full_parameters()
"""
# A kernel in TF32 on this processor. Triton's reads f32 without its last bits; others round them.
TF32 = (
    HEAD
    + """
def read(x):
    return (x.contiguous().view(torch.int32) + HALF & ~0x1FFF).view(torch.float32)


def product(a, b):
    return (read(a)[..., None] * read(b)[..., None, :, :]).sum(-2)


def scores(q, k, causal):
    return product(q, k.mT) / q.shape[-1] ** 0.5 + torch.full((len(k[0]),) * 2, -torch.inf if causal else 0).triu(1)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        s = scores(q, k, is_causal)
        top = s.amax(-1, keepdim=True)
        p = (s - top).exp()
        total = p.sum(-1, keepdim=True)
        o, ctx.causal = product(p, v) / total, is_causal
        ctx.save_for_backward(q, k, v, o, (top + total.log())[..., 0])
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        p = (scores(q, k, ctx.causal) - lse[..., None]).exp()
        ds = p * (product(do, v.mT) - (o * do).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        return product(ds, k), product(ds.mT, q), product(p.mT, do), None


def get_flashattention_autograd_function_triton():
    return Attention
"""
)
WRONG_TF32 = [
    (
        "s.amax(-1, keepdim=True)",
        "torch.zeros(1)",
        "large|far",
        "wrong .*large(.|\n)*o: NaN(.|\n)*wrong .* far",
    ),
    (
        "product(ds.mT, q)",
        "product(ds.mT, q) * 4",
        "course, causal",
        "dtype tf32 .*\n    dk: [^;]*; all are about [34][.]\\d* times the truth\n",
    ),
]


def row(*parts):
    return parts


def forward(change, *rest):
    return "ctx.is_causal = is_causal", f"ctx.is_causal = is_causal\n        {change}", *rest


def backward(change, *rest):
    return "is_causal = ctx.is_causal", f"is_causal = ctx.is_causal\n        {change}", *rest


# What a submission changes: (text, replacement) of the adapters, and what must be said of which kind of case.
LEAVES = "return dq, dk, dv, None"
WRONG_ATTENTION = {
    "a layer's output is kept on the class": row(
        "q, k, v, o, lse = ctx.saved_tensors\n",
        "q, k, v, o, lse = ctx.saved_tensors\n        o = Attention.o\n",
        "course, without a mask",
        "dq: ",
    ),
    "each call leaves a tensor": forward("COUNT.append(lse)", "course, memory", "grows with each call by"),
    "causal is ignored in backward": row(
        "is_causal = ctx.is_causal", "is_causal = False", "causal", "d[qkv]: rel_l2"
    ),
    "the mask is off by one at multiples of 16": row(
        "mask, heads = None, [x[:, None].contiguous() for x in (q, k, v)]",
        "heads = [x[:, None] for x in (q, k, v)]\n"
        "        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()\n"
        "        seen |= (torch.arange(q.shape[1])[:, None] % 16 == 0) & seen.roll(-1, 0)\n"
        "        mask = torch.where(seen, 0.0, -torch.inf) if is_causal else None\n"
        "        is_causal = False",
        "causal",
        "o: rel_l2",
    ),
    "D is left out": ("(do, q, k, v, o, lse)", "(do, q, k, v, 0 * o, lse)", "without a mask", "dq: rel_l2"),
    "sequences of a batch are swapped": row(
        "o, lse = o[:, 0]", "o, lse = o[:, 0].flip(0)", "without a mask", "batch 2"
    ),
    "dK lacks its scale": row(
        LEAVES, "return dq, dk * q.shape[-1] ** 0.5, dv, None", "without a mask", "times the truth"
    ),
    "the maximum starts at 0": forward(
        "o = o * ((q @ k.mT).amax(-1, keepdim=True) > -500)", "far below", "o: rel_l2"
    ),
    "probabilities are kept on ctx": forward(
        "ctx.kept = [q[:, i : i + 64] @ k.mT for i in range(0, q.shape[1], 64)]",
        "course, memory",
        "memory: is 'grows with the square",
    ),
    "scores are stored": row(
        "ctx.is_causal = is_causal",
        "ctx.is_causal, ctx.scores = is_causal, q @ k.mT",
        "memory",
        "square of the length: .* KiB",
    ),
    "the answer is cached by its address": row(
        "        return o\n",
        "        return CACHE.setdefault((q.data_ptr(), k.data_ptr()), o)\n",
        "without a mask",
        "o: rel_l2",
    ),
    "only the first call is right": row(
        "        return o\n",
        "        COUNT.append(1)\n        return o if len(COUNT) < 2 else o * 1.01\n",
        "without a mask",
        "o: rel_l2",
    ),
    "the first call of a shape is wrong": row(
        "        return o\n",
        "        COUNT.append(q.shape)\n        return o if COUNT.count(q.shape) > 1 else 2 * o\n",
        "without a mask",
        "first call: is .o is unlike",
    ),
    "a graph keeps the gradient of its first backward pass": backward(
        "ctx.do = do = getattr(ctx, 'do', do)", "two backward passes", "dv: rel_l2"
    ),
    "the gradient is read like the output": backward(
        "do = do.as_strided(o.shape, o.stride())", "not contiguous", "dv: rel_l2"
    ),
    "a later tile of keys is not rescaled": row(
        "        return o\n",
        "        s = q @ k.mT\n"
        "        return o * (1 + (s[..., -128:].amax(-1) > 50 + s[..., :128].amax(-1))[..., None])\n",
        "large scores",
        "o: rel_l2",
    ),
    "scores overflow": row(
        "        return o\n",
        "        return o + 0 * (q @ k.mT / q.shape[-1] ** 0.5).exp().sum()\n",
        "large scores",
        "o: NaN at",
    ),
    "the largest head size is wrong": row(
        "        return o\n",
        "        return o * (1.01 if q.shape[2] == 128 else 1)\n",
        "course, without a mask",
        "head_dim 128",
    ),
    "a causal mask has all keys of all queries": forward(
        "is_causal and torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()",
        "course, memory",
        "memory: is 'grows with the square",
    ),
    "the output's gradient is scaled in place": backward(
        "do.mul_(1.5)", "without a mask", "inputs: is 'do changed'"
    ),
    "inputs are scaled in place": row(
        "mask, heads = None",
        "q.data.mul_(1.5)\n        mask, heads = None",
        "without a mask",
        "inputs: is 'q changed'",
    ),
    "the mask's flag is on the class": ("ctx.is_causal", "Attention.flag", "course, causal", "dq: rel_l2"),
    "a mask's number is not small enough": row(
        "mask, heads = None, [x[:, None].contiguous() for x in (q, k, v)]",
        "heads = [x[:, None] for x in (q, k, v)]\n"
        "        mask = torch.full((q.shape[1],) * 2, -50.0).triu(1) if is_causal else None\n"
        "        is_causal = False",
        "large scores",
        "causal True(.|\n)*o: rel_l2",
    ),
    "the fifth sequence is the first": row(
        "o, lse = o[:, 0]",
        "o, lse = o[torch.arange(len(o)) % 4, 0]",
        "without a mask",
        "batch 5 (.|\n)*o: rel_l2",
    ),
    "queries end with the keys": row(
        "o, lse = o[:, 0]",
        "o, lse = o[:, 0] * (torch.arange(o.shape[2]) < k.shape[1])[:, None]",
        "other lengths",
        "seq_k 32 (.|\n)*o: rel_l2",
    ),
    "gradients are of f16": backward(
        "do, v = do.half().float(), v.half().float()", "course, without a mask", "d[qkv]: rel_l2"
    ),
    "k is read like q": row(
        "mask, heads",
        "k = k.as_strided(k.shape, q.stride())\n        mask, heads",
        "not contiguous",
        "o: rel_l2",
    ),
    "a gradient's batch has steps": backward(
        "do = do if do.stride(0) else 0 * do", "not contiguous", "dv: rel_l2"
    ),
    "gradients in bf16 grow worse with the length": row(
        LEAVES,
        "return dq, dk * (1 + (k.shape[1] > 512) / 32), dv, None",
        "bf16",
        "seq 1024 (.|\n)*dk: rel_l2",
    ),
    "is_causal is True by default": row(
        "is_causal=False", "is_causal=True", "course, causal", "is 'True by default'"
    ),
    "a Triton function calls PyTorch's attention": row(
        "raise NotImplementedError",
        "return Attention",
        "triton, course, without a mask",
        "kernel: is .*scaled_dot_product",
    ),
}


def judged(text, *options, strict=False):
    """(exit status, what was printed, {(adapter, what): record})."""
    with tempfile.TemporaryDirectory() as folder:
        (tests := Path(folder, "tests")).mkdir()
        (tests / "adapters.py").write_text("CACHE, COUNT = {}, []\n" + text)
        out = Path(folder, "out.json")
        how = {"library": LIBRARY, "json": out, "seed": 7, "seconds": 900}
        arguments = ["judge", folder, *(f"--{name}={value}" for name, value in how.items())]
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            status = command.main("parity", [*arguments, *options] + ["--strict"] * strict)
        written = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
        if {*written} - {"out.json"} != {"tests", "tests/adapters.py"}:
            raise AssertionError(f"judge wrote {written}")
        records = json.loads(out.read_text())["verdicts"] if out.exists() else []
    return status, said.getvalue(), {(r["deliverable"], r["case"]["what"]): r for r in records}


class InThisProcess:
    """In the place of right.Processes, for one rank."""

    def __init__(self, folder):
        self.adapters = adapters_of((folder / "tests/adapters.py").read_text())

    def ask(self, request, tensors):
        x = {name: tensor.clone() for name, tensor in tensors.items()}
        return [getattr(examinee, request["call"])(self.adapters, request, x, "cpu")]

    def __exit__(self, *_):
        pass


def a_rank(source, arguments, how, ends):
    """In a process of a server that has imported PyTorch and its compiler, which takes most of a rank's time."""
    os.setsid()
    os.chdir(how["cwd"])
    os.environ |= how["env"]
    sys.dont_write_bytecode = True
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
    sys.argv, sys.stdin = ["-c", *arguments], os.fdopen(0)
    exec(compile(source, "examinee", "exec"), {"__name__": "__main__"})


def forked(command, **how):
    """In the place of subprocess.Popen."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "parity_judge_folders"])
    (given, mine), (answers, its) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    arguments = command[command.index("-c") + 1 :]
    process = context.Process(target=a_rank, args=(arguments[0], arguments[1:], how, (given, its)))
    process.start()
    given.close(), its.close()
    stdin, stdout = os.fdopen(os.dup(mine.fileno()), "w"), os.fdopen(os.dup(answers.fileno()))
    mine.close(), answers.close()
    return types.SimpleNamespace(pid=process.pid, stdin=stdin, stdout=stdout, wait=process.join)


def started(folder, *how, ranks, processes=right.Processes, **more):
    if ranks == 1:
        return InThisProcess(folder)
    with mock.patch.object(
        right, "subprocess", types.SimpleNamespace(**vars(subprocess) | {"Popen": forked})
    ):
        return processes(folder, *how, ranks=ranks, **more)


def adapters_of(text):
    found = types.ModuleType("adapters")
    exec(text, vars(found))
    return found


def here():
    return contextlib.nullcontext() if ALL else mock.patch.object(right, "Processes", started)


def sampled(zoo, *names):
    return zoo if ALL else {name: zoo[name] for name in names}


class AttentionZoo(unittest.TestCase):
    def test_pytorch_s_own_attention_is_right(self):
        with here():
            status, said, records = judged(ATTENTION, "--only", "" if ALL else "course|beyond")
        self.assertEqual(status, 0, said)
        verdicts = {r["verdict"] for (adapter, _), r in records.items() if "pytorch" in adapter}
        self.assertEqual(verdicts, {"right"}, said)
        self.assertIn("not there  get_flashattention_autograd_function_triton", said)

    def test_products_in_tf32(self):
        for half in ("0", "0x1000"):
            with self.subTest(half), here():
                text, only = TF32.replace("HALF", half), "course, (without|causal|large|scores)"
                status, said, _ = judged(text, "--only", only)
                self.assertEqual((status, said.count("as TF32 ")), (0, 4), said)
                for old, new, what, words in WRONG_TF32:
                    status, said, _ = judged(text.replace(old, new), "--only", what)
                    self.assertEqual(status, 1, said)
                    self.assertRegex(said, words)

    def test_the_first_causal_row_s_gradient_is_0_but_for_rounding(self):
        for seed in ("1", "2", "4", "5"):
            with here():
                status, said, _ = judged(ATTENTION, "--only", "course, causal", "--seed", seed)
            self.assertEqual(status, 0, said)

    def test_each_mistake_is_found_for_its_reason(self):
        for name, (text, new, what, words) in WRONG_ATTENTION.items():
            with self.subTest(name):
                self.assertIn(text, ATTENTION)
                with here():
                    status, said, _ = judged(ATTENTION.replace(text, new), "--only", what, strict=True)
                self.assertEqual(status, 1, said)
                self.assertRegex(said, words)


HOOK = "    work = dist.all_reduce("
WAITED = "    return work.get_future().then(lambda done: done.value()[0])"
UNWAITED = "done = torch.futures.Future()\n    done.set_result(bucket.buffer())\n    return done"
EARLY = UNWAITED.replace("    ", "        ") + "\n" + HOOK
ZERO, ADAMW = (
    "ZeroRedundancyOptimizer(params, optimizer_class=cls, **how)",
    "get_sharded_optimizer, course, adamw",
)
DDP, ANOTHER = "get_ddp, course, sgd", "ranks: is 'rank 1 has another"


def made(change, only, words):
    """A row of a sharded optimizer that changes after its construction."""
    lines = f"    made = {ZERO}\n    {change}\n    return made"
    return f"    return {ZERO}", lines, f"get_sharded_optimizer, {only}", words


def by_buckets(buckets):
    """A row of get_ddp_bucketed, which sends a bucket only if it has all gradients."""
    return (
        "def get_ddp(module):\n",
        f"""def get_ddp_bucketed(module, mb):
    for x in module.state_dict().values():
        dist.broadcast(x, 0)
    own = [p for p in module.parameters() if p.requires_grad]
    module.buckets = {buckets}
    return module


def ddp_bucketed_on_train_batch_start(model, optimizer):
    pass


def ddp_bucketed_on_after_backward(model, optimizer):
    for bucket in model.buckets:
        for p in bucket if all(p.grad is not None for p in bucket) else ():
            dist.all_reduce(p.grad.div_(dist.get_world_size()))


def get_ddp(module):
""",
    )


# The same, with the cases to run in full.
WRONG_RANKS = {
    "the average is forgotten": row(
        "bucket.buffer().div_(dist.get_world_size())", "bucket.buffer()", DDP, "p.fc1"
    ),
    "nobody waits for the handle": row(WAITED, f"    {UNWAITED}", DDP, ANOTHER),
    "the last bucket is lost": (HOOK, f"    if bucket.is_last():\n        {EARLY}", DDP, ANOTHER),
    "one of three ranks goes astray": row(
        "CACHE.clear()",
        "CACHE.clear()\n    if dist.get_rank() == 1:\n        next(model.parameters()).data.mul_(2)",
        "get_ddp, beyond, three ranks",
        ANOTHER,
    ),
    "frozen parameters are not sent": row(
        "init_sync=True, bucket_cap_mb=0.0005)",
        "init_sync=False, bucket_cap_mb=0.0005)\n    for p in module.parameters():\n"
        "        p.requires_grad and dist.broadcast(p.data, 0)",
        DDP,
        "after the wrap: is .fixed is not rank 0's|after the wrap: is .fc2.bias",
    ),
    "nothing is sent at the wrap": row(
        "init_sync=True", "init_sync=False", DDP, "after the wrap: is .* not rank 0's"
    ),
    "reduced before accumulation ends": row(
        HOOK,
        f"    if CACHE.setdefault(bucket.index(), bucket) is not bucket:\n        {EARLY}",
        "get_ddp, beyond, two backward passes",
        ANOTHER,
    ),
    "timed steps are not reduced": row(
        HOOK,
        f"    COUNT.append(1)\n    if len(COUNT) > 60:\n        {EARLY}",
        "get_ddp, (course, sgd|times)",
        ANOTHER,
    ),
    "state is not sharded": row(
        "ZeroRedundancyOptimizer(params, optimizer_class=cls, **how)",
        "cls(params, **how)",
        "get_sharded_optimizer, course, adamw",
        "state of a rank: is 'of 496 of 496 weights'",
    ),
    "options of a group are dropped": row(
        "ZeroRedundancyOptimizer(params,",
        "ZeroRedundancyOptimizer([p for g in params for p in (g['params'] if isinstance(g, dict) else [g])],",
        "get_sharded_optimizer, course, parameter groups",
        "p.fc1",
    ),
    "a new learning rate is not heard": made(
        "made.register_step_pre_hook(lambda *_: [g.update(lr=0.05) for g in made.param_groups].clear())",
        "beyond, a learning rate that changes",
        "p.fc1",
    ),
    "zero_grad clears the rank's own part": made(
        "made.zero_grad = made.optim.zero_grad", "beyond, gradients that ranks average", "p.fc1"
    ),
    "a tied parameter is reduced twice": row(
        "    return model\n\n\ndef ddp_on_after_backward(model, optimizer):\n",
        "    model.require_backward_grad_sync = False\n"
        "    for layer in module.children():\n"
        "        layer.weight.register_post_accumulate_grad_hook(\n"
        "            lambda p: CACHE.update({len(CACHE): dist.all_reduce(p.grad, async_op=True)}))\n"
        "    return model\n\n\ndef ddp_on_after_backward(model, optimizer):\n"
        "    for work in CACHE.values():\n        work.wait()\n"
        "    for p in model.parameters():\n"
        "        p.grad = None if p.grad is None else p.grad / dist.get_world_size()\n",
        DDP,
        "p.fc2",
    ),
    "handles of earlier steps stay": row(
        "    return model\n\n\ndef ddp_on_after_backward(model, optimizer):\n",
        "    model.require_backward_grad_sync = False\n"
        "    for p in module.parameters():\n"
        "        p.requires_grad and p.register_post_accumulate_grad_hook(\n"
        "            lambda p: CACHE.update({len(CACHE): (dist.all_reduce(p.grad, async_op=True), p)}))\n"
        "    return model\n\n\ndef ddp_on_after_backward(model, optimizer):\n"
        "    for work, p in CACHE.values():\n"
        "        work.wait()\n"
        "        p.grad /= dist.get_world_size()\n"
        "    return\n",
        "get_ddp, course, adamw",
        "p.fc1",
    ),
    "a bucket without each gradient is not sent": row(
        *by_buckets("[own] if mb == 1 else [[p] for p in own]"),
        "get_ddp_bucketed, beyond, parameters without",
        ANOTHER,
    ),
    "buckets of no size have a gradient each": row(
        *by_buckets("[[p] for p in own]"),
        "get_ddp_bucketed, beyond, one bucket",
        "all-reduces: is '3 for 3 parameters'",
    ),
    "a bucket is sent after backward": row(
        *by_buckets("[own]"), "get_ddp_bucketed, beyond, communication", "all-reduces: is 'after backward'"
    ),
    "one bucket has all gradients": row(
        "bucket_cap_mb=0.0005",
        "bucket_cap_mb=25",
        "get_ddp, beyond, communication",
        "is '1 for 3 parameters'",
    ),
    "backward waits for each bucket": row(
        f"async_op=True)\n{WAITED}",
        f"async_op=False)\n    {UNWAITED}",
        "get_ddp, beyond, communication",
        "is 'waited for in backward'",
    ),
    "gradients of earlier steps stay": row(
        "CACHE.clear()",
        "CACHE[len(CACHE)] = [p.grad.clone() for p in model.parameters() if p.requires_grad]",
        DDP,
        "after a step: is '[0-9]+ numbers more stay'",
    ),
    "nobody waits for the broadcast": row(
        "    return ZeroRedundancyOptimizer(",
        "    broadcast, done = dist.broadcast, type('', (), {'wait': lambda self: True})()\n"
        "    dist.broadcast = lambda *to, **how: (CACHE.setdefault(len(CACHE), broadcast(*to, **how)), done)[1]\n"
        "    return ZeroRedundancyOptimizer(",
        "get_sharded_optimizer, course, sgd",
        ANOTHER,
    ),
    "keywords are dropped": row(
        "    return model\n",
        "    forward = model.forward\n    model.forward = lambda x, **_: forward(x)\n    return model\n",
        DDP,
        "p.fc1",
    ),
    "betas are dropped": row(
        ZERO, ZERO.replace("how)", "{n: how[n] for n in how if n != 'betas'})"), ADAMW, "p.fc1"
    ),
    "parameters are read twice": (ZERO, f"len([*params]) and {ZERO}", ADAMW, "fails(.|\n)*empty"),
    "a later group is not trained": made(
        "made.add_param_group = lambda group: None", "course, parameter groups", "p.fc1"
    ),
    "a closure is not called": made(
        "step, made.step = made.step, lambda *_: step()", "beyond, a learning rate", "p.fc1"
    ),
    "a closure's loss is lost": made(
        "step, made.step = made.step, lambda *closure: [None, step(*closure)][dist.get_rank()]",
        "beyond, a learning rate",
        "a closure's loss: is 'lost'",
    ),
    "it only acts like an optimizer": made(
        "CACHE[0] = made\n    made = type('Plain', (), {'__getattr__': lambda self, name: getattr(CACHE[0], name)})()",
        "course, sgd",
        "Plain is no torch.optim.Optimizer",
    ),
    "a missing gradient is 0": made(
        "made.register_step_pre_hook(lambda *_: [setattr(p, 'grad', torch.zeros_like(p))\n"
        "        for g in made.param_groups for p in g['params'] if p.grad is None].clear())",
        "beyond, parameters without",
        "p.fixed",
    ),
    "the last layer stays whole": row(
        '("Linear", "Embedding")',
        '("Linear", "Embedding") and layer is not module.head',
        "get_fsdp, course, sgd",
        "weights of a rank: is 'of 39[0-9]+ of 6784 weights'",
    ),
    "the first gathered weights stay": row(
        "p.full_tensor() if",
        "CACHE.setdefault(n, p.full_tensor()) if",
        "get_fsdp, course, sgd",
        "p.embedding",
    ),
    "norms are averaged in three steps": row(
        "    for parameter in model.parameters():",
        "    COUNT.append(1)\n    for parameter in [*model.parameters()] * (len(COUNT) < 4):",
        "get_fsdp, course, sgd",
        ANOTHER + " norm",
    ),
    "a whole copy stays": row(
        "    for layer in module.modules():",
        "    module.whole = [p.detach().clone() for p in module.parameters()]\n    for layer in module.modules():",
        "get_fsdp, course, sgd",
        "weights of a rank: is 'of [0-9]+ of 6784 weights'",
    ),
    "weights stay in f32": row(
        "param_dtype=compute_dtype",
        "param_dtype=None",
        "get_fsdp, course, compute",
        "computed in: is 'float32'",
    ),
    "norms are not averaged": row(
        "dist.all_reduce(parameter.grad)", "pass", "get_fsdp, course, sgd", ANOTHER + " norm"
    ),
}


class RanksZoo(unittest.TestCase):
    def test_pytorch_s_own_parts_are_right(self):
        with here():
            status, said, records = judged(HEAD + RANKS, "--only", "" if ALL else "course, sgd")
        self.assertEqual(status, 0, said)
        self.assertEqual(
            {r["verdict"] for r in records.values() if r["case"]["level"] == "course"}, {"right"}
        )
        self.assertEqual({key[0] for key in records}, {"get_ddp", "get_sharded_optimizer", "get_fsdp"})

    def test_each_mistake_is_found_for_its_reason(self):
        for name, (text, new, only, words) in sampled(WRONG_RANKS, "nobody waits for the handle").items():
            with self.subTest(name):
                self.assertIn(text, RANKS)
                with here():
                    status, said, _ = judged(HEAD + RANKS.replace(text, new), "--only", only, strict=True)
                self.assertEqual(status, 1, said)
                self.assertRegex(said, words)


class Model(unittest.TestCase):
    def test_gradients_come_in_another_order_than_parameters(self):
        model, came = examinee.Toy(), []
        trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(came.append)
        model(torch.randn(4, 10)).sum().backward()
        self.assertNotEqual([*map(id, came)], [*map(id, reversed(trained))])


class TheBridge(unittest.TestCase):
    def test_it_is_right_in_both_editions(self):
        with here():
            only = "" if ALL else "pytorch, course, causal|bucketed, course, sgd|fsdp, beyond, tied"
            status, said, records = judged(BRIDGE, "--only", only)
        self.assertEqual(status, 0, said)
        self.assertEqual({r["verdict"] for r in records.values()}, {"right"}, said)
        self.assertEqual(len({key[0] for key in records}), 7 if ALL else 3)

    def test_a_frozen_weight_that_is_trained_is_found(self):
        trains = "get_fsdp = lambda module, *how: FullyShardedDataParallel(module.requires_grad_(), *how)\n"
        with here():
            status, said, _ = judged(BRIDGE + trains, "--only", "fsdp, beyond, tied", strict=True)
        self.assertEqual(status, 1, said)
        self.assertRegex(said, "wrong +get_fsdp, beyond, tied(.|\n)*p.embedding")


OLD = "pytorch, (course|beyond)|sharded.*course"  # what PyTorch 2.6 has on a CPU, of the parts above


class Input(unittest.TestCase):
    def test_a_folder_that_is_none_and_one_that_cannot_be_imported(self):
        status, said, _ = judged("import nothing_of_this_name")
        self.assertEqual(status, 2, said)
        self.assertRegex(said, "adapters.py cannot be imported: ModuleNotFoundError: .*adapters.py:")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(command.main("parity", ["judge", "/nowhere"]), 2)
            self.assertEqual(command.main("parity", ["judge"]), 2)
        self.assertIn("/nowhere: there is no tests/adapters.py", said.getvalue())
        self.assertIn("judge needs a FOLDER or --numbers FILE", said.getvalue())

    def test_an_exception_is_one_line_with_its_place(self):
        wrong = ATTENTION.replace("mask, heads = None", "1 / 0\n        mask, heads = None")
        status, said, _ = judged(wrong, "--only", "pytorch, course, causal")
        self.assertEqual(status, 1)
        self.assertRegex(said, r"ZeroDivisionError: division by zero \(tests/adapters.py:\d+\)")

    def test_another_interpreter_with_another_pytorch(self):
        """TANDEM_JUDGE_PYTHONS has commands of interpreters, by commas. docs/judge.md says how to make one."""
        pythons = os.environ.get("TANDEM_JUDGE_PYTHONS")
        if not pythons:
            self.skipTest("TANDEM_JUDGE_PYTHONS names no interpreter with another PyTorch")
        for python in pythons.split(","):
            with self.subTest(python):
                status, said, records = judged(ATTENTION + RANKS, "--python", python, "--only", OLD)
                self.assertEqual(status, 0, said)
                self.assertNotIn(f"PyTorch {torch.__version__}", said)
                self.assertEqual(
                    {r["verdict"] for r in records.values()} - {"right", "not there"}, set(), said
                )


if __name__ == "__main__":
    unittest.main()
