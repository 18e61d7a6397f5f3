"""The bridge: what PyTorch programs make of libtandem, in the shapes of the course's tests. On GPUs too, where there
are two, or ranks may share one (TD_SHARE_GPU): as a program it exits with 77 where they have none; if TD_REQUIRE_GPU
is set, it fails."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from parity import bridge
from parity.core.device import is_shared
from parity.core.ranks import gpu_of

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", *(["cuda"] if CUDA else [])]
RANKS = 2
STEPS = 5
ON_GPUS = torch.cuda.device_count() >= (1 if is_shared() else RANKS)


def attention(q, k, v, causal):
    """In float64: o, and L."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], device=q.device).tril().bool()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


class Attention(unittest.TestCase):
    def check(self, device, dtype, seq, seq_k, d, causal, bound, apply=bridge.FlashAttention.apply):
        make = torch.Generator(device).manual_seed(seq + d)
        sizes = [(3, seq, d), (3, seq_k, d), (3, seq_k, d), (3, seq, d)]
        drawn = [torch.randn(size, generator=make, device=device).to(dtype) for size in sizes]
        q, k, v = (x.requires_grad_() for x in drawn[:3])
        o = apply(q, k, v, causal)
        o.backward(drawn[3], retain_graph=True)  # which keeps what was saved
        wide = [x.detach().double().requires_grad_() for x in drawn[:3]]
        truth, lse = attention(*wide, causal)
        truth.backward(drawn[3].double())
        for name, mine, right in zip(
            "o dq dk dv".split(),
            [o, q.grad, k.grad, v.grad],
            [truth, *(x.grad for x in wide)],
            strict=True,
        ):
            error = ((mine.double() - right).norm() / right.norm()).item()
            self.assertLess(error, bound, f"{name} on {device}, {dtype}, {seq} x {seq_k} x {d}, {causal=}")
        return o, lse.detach()

    def test_values_gradients_and_what_is_saved(self):
        for device in DEVICES:
            for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3)):
                for seq, seq_k, d in ((128, 128, 64), (37, 101, 16)):
                    for causal in (False, True):
                        o, lse = self.check(device, dtype, seq, seq_k, d, causal, bound)
                        saved = [t for t in o.grad_fn.saved_tensors if t.shape == (3, seq)]
                        self.assertEqual(len(saved), 1)
                        torch.testing.assert_close(saved[0].double(), lse, rtol=1e-4, atol=1e-2)

    def test_inputs_of_any_strides(self):
        for device in DEVICES:
            packed = torch.randn(2, 33, 3, 24, device=device, requires_grad=True)
            q, k, v = packed.unbind(2)
            o = bridge.FlashAttention.apply(q, k, v)
            o.mT.contiguous().mT.backward(torch.ones_like(o).mT.contiguous().mT)
            wide = packed.detach().double().requires_grad_()
            truth, _ = attention(*wide.unbind(2), False)
            truth.backward(torch.ones_like(truth))
            torch.testing.assert_close(o.double(), truth, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(packed.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)

    def test_within_what_is_compiled(self):
        for device in DEVICES:

            @torch.compile(backend="aot_eager", fullgraph=True)
            def doubled(q, k, v, causal):
                return bridge.FlashAttention.apply(2 * q, k, v, causal) / 2

            def halved(q, k, v, causal):
                return 2 * doubled(q / 2, k, v, causal)

            self.check(device, torch.float32, 48, 48, 32, True, 2e-6, halved)

    def test_the_operators_keep_what_they_promise(self):
        q, k, v = (torch.randn(2, 19, 8) for _ in range(3))
        torch.library.opcheck(torch.ops.tandem.flash_forward.default, (q, k, v, True))
        o, lse = torch.ops.tandem.flash_forward(q, k, v, True)
        torch.library.opcheck(torch.ops.tandem.flash_backward.default, (q, k, v, o, o, lse, True))

    def test_what_cannot_be(self):
        x = torch.zeros(2, 4, 8)
        for arguments, words in (
            ((x[0], x[0], x[0]), r"\[batch, seq, d\], got \[4, 8\]"),
            ((x, x[:, :, :4], x), r"got \[2, 4, 8\], \[2, 4, 4\]"),
            ((x.double(),) * 3, "of one type, f32, bf16, f16: got torch.float64"),
            ((x, x.bfloat16(), x), "got torch.float32, torch.bfloat16"),
            ((x.half(),) * 3, "TD_UNSUPPORTED"),
            ((torch.zeros(1, 4, 300),) * 3, "head_dim is 300"),
        ):
            with self.assertRaisesRegex((TypeError, ValueError, RuntimeError), words):
                bridge.FlashAttention.apply(*arguments)


class Toy(nn.Module):
    """With a frozen bias, and a frozen parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10, bias=False)
        self.second = nn.Linear(10, 50)
        self.last = nn.Linear(50, 5, bias=False)
        self.second.bias.requires_grad_(False)
        self.no_grad_fixed_param = nn.Parameter(torch.tensor([[2.0, 2.0], [2.0, 2.0]]), requires_grad=False)
        self.register_buffer("counted", torch.tensor([3, 1, 4], dtype=torch.int32))

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [(10, 10), (10, 50), (50, 10), (10, 50), (50, 5)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.layers[3].weight = self.layers[1].weight

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


WAYS = [("naive", None), ("flat", None), ("overlap", None), ("bucketed", None)]
WAYS += [("bucketed", mb) for mb in (0.0016, 0.0001, 0.01)]


def examples(device):
    make = torch.Generator().manual_seed(7)
    return [torch.randn(20, size, generator=make).to(device) for size in (10, 5)]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def train_beside_one_process(rank, device):
    for model in (Toy, Tied):
        for strategy, mb in WAYS:
            torch.manual_seed(rank)
            drawn = model().to(device)
            torch.manual_seed(0)
            alone = model().to(device)
            if rank:
                drawn.load_state_dict({k: v + 1 for k, v in drawn.state_dict().items()})
                assert not torch.equal(next(drawn.parameters()), next(alone.parameters()))
            together = bridge.DataParallel(drawn, strategy, mb)
            for mine, theirs in zip(
                together.module.state_dict().values(), alone.state_dict().values(), strict=True
            ):
                assert torch.equal(mine, theirs)
            sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (together, alone)]
            x, y = examples(device)
            for step in range(STEPS):
                together.on_train_batch_start()
                order = torch.randperm(20, generator=torch.Generator().manual_seed(42 + step)).to(device)
                mine = order[rank * 10 : rank * 10 + 10]
                for optimizer in sgd:
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                nn.functional.mse_loss(alone(x[order]), y[order]).backward()
                if step == 2:  # an exception ends no_sync() too
                    with contextlib.suppress(ValueError), together.no_sync():
                        raise ValueError
                if step == 3:  # in two micro-batches
                    with together.no_sync():
                        (nn.functional.mse_loss(together(x[mine[:4]]), y[mine[:4]]) * 0.4).backward()
                    (nn.functional.mse_loss(together(x[mine[4:]]), y[mine[4:]]) * 0.6).backward()
                else:
                    nn.functional.mse_loss(together(x[mine]), y[mine]).backward()
                together.finish_gradient_synchronization()
                for optimizer in sgd:
                    optimizer.step()
                for (name, a), (other, b) in zip(
                    together.module.named_parameters(), alone.named_parameters(), strict=True
                ):
                    assert name == other
                    close(a, b)
            together.close()


def shard_beside_the_whole(rank, device):
    for model in (Toy, Tied):
        torch.manual_seed(42)
        alone = model().to(device)
        torch.manual_seed(42)
        sharded = model().to(device)
        options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
        late = list(sharded.parameters())[-1:]
        early = [p for p in sharded.parameters() if p is not late[0]]
        whole = torch.optim.AdamW(list(alone.parameters())[:-1], **options)
        parts = bridge.ShardedOptimizer(early, torch.optim.AdamW, **options)
        for step in range(10):
            if step == 4:  # a group of its own, in mid-training
                whole.add_param_group({"params": list(alone.parameters())[-1:], "lr": 0.05})
                parts.add_param_group({"params": late, "lr": 0.05})
            if step == 7:  # as a scheduler does
                whole.param_groups[0]["lr"] = parts.param_groups[0]["lr"] = 0.01
            x, y = torch.rand(32, 10, device=device), torch.rand(32, 5, device=device)
            for net, optimizer in ((alone, whole), (sharded, parts)):
                optimizer.zero_grad()
                ((net(x) - y) ** 2).sum().backward()
                optimizer.step()
            for a, b in zip(sharded.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-7, atol=0)
        owned = [p for p in sharded.parameters() if p.requires_grad and parts.owner(p) == rank]
        held = [entry["exp_avg"].numel() for entry in parts.state_dict()["state"].values()]
        assert sum(held) == sum(p.numel() for p in owned), (held, owned)
        assert 0 < sum(held) < sum(p.numel() for p in sharded.parameters() if p.requires_grad)


def refuse(rank, device):
    def said(words, call):
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no error with {words}")

    said("no parameters", lambda: bridge.DataParallel(nn.ReLU()))
    said("naive, flat, overlap or bucketed", lambda: bridge.DataParallel(Tied().to(device), "fast"))
    said("int64, which is not sent", lambda: bridge.DataParallel(Whole().to(device)))
    model = bridge.DataParallel(Tied().to(device))
    x = torch.zeros(2, 10, device=device)
    model(x).sum().backward()
    said("finish_gradient_synchronization", model.on_train_batch_start)
    model.finish_gradient_synchronization()
    if rank == 1:
        os.kill(os.getpid(), 9)
    said(
        "rank 1 (process",
        lambda: [(model(x).sum().backward(), model.finish_gradient_synchronization()) for _ in "12"],
    )
    os._exit(0)  # what is left of the communicator is the test of comm's


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)


def a_rank(rank, what, folder, cuda):
    device = gpu_of(rank) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    if is_shared():
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    what(rank, device)
    dist.barrier()
    dist.destroy_process_group()


class Ranks(unittest.TestCase):
    def start(self, what, statuses=(0, 0)):
        for cuda in (False, True) if ON_GPUS else (False,):
            with self.subTest(cuda=cuda):
                folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tandem-bridge-"))
                context = torch.multiprocessing.get_context("spawn")
                started = [
                    context.Process(target=a_rank, args=(rank, what, folder, cuda)) for rank in range(RANKS)
                ]
                for process in started:
                    process.start()
                for process in started:
                    process.join(120)
                self.assertEqual([process.exitcode for process in started], [*statuses])

    def test_data_parallel_training_is_that_of_one_process(self):
        self.start(train_beside_one_process)

    def test_a_sharded_optimizer_is_the_whole_one(self):
        self.start(shard_beside_the_whole)

    def test_what_cannot_be_and_a_rank_that_dies(self):
        self.start(refuse, (0, -9))

    def test_ranks_of_a_launcher(self):
        for variables, expected in (
            ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}, (1, 4)),
            ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "3"}, (0, 2)),
        ):
            with unittest.mock.patch.dict(os.environ, variables, clear=True):
                rank, ranks, run = bridge._who()
                self.assertEqual((rank, ranks), expected)
                self.assertRegex(run, "^[0-9a-f]{16}$")

    def test_the_example_of_the_readme(self):
        root = Path(__file__).resolve().parents[1]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        command = [*torchrun, str(root / "examples/bridge.py")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        self.assertEqual(done.returncode, 0, done.stderr)
        weights = re.findall(r"weights sum to (\S+\d{6})", done.stdout)
        self.assertEqual((len(weights), len(set(weights))), (RANKS, 1), done.stdout)  # the same on every rank

    def test_no_ranks(self):
        with self.assertRaisesRegex(
            RuntimeError, "no ranks: call torch.distributed.init_process_group first"
        ):
            bridge.DataParallel(Tied())


if __name__ == "__main__":
    if not ON_GPUS:
        print(f"skipped: PyTorch sees {torch.cuda.device_count()} CUDA devices, {RANKS} are needed")
        sys.exit(1 if os.environ.get("TD_REQUIRE_GPU") else 77)
    unittest.main(verbosity=2)
