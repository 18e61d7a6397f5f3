"""Shared by the tests of the bridge: models, and ranks that are started as processes."""

import os
import tempfile
import time
import unittest
import unittest.mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from parity.core.device import is_shared
from parity.core.ranks import gpu_of

CUDA = torch.cuda.is_available()
RANKS = 2
ON_GPUS = torch.cuda.device_count() >= (1 if is_shared() else RANKS)


class Toy(nn.Module):
    """With a frozen bias, and a frozen, unused parameter."""

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


def said(words, call):
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error with {words}")


def examples(device):
    make = torch.Generator().manual_seed(7)
    return [torch.randn(20, size, generator=make).to(device) for size in (10, 5)]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def a_rank(rank, what, ranks, folder, cuda, joined):
    device = gpu_of(rank) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    if is_shared():
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    torch.set_num_threads(1)
    if not joined:  # the processes run several numbers of ranks
        what(rank, folder)
        return
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    what(rank, device)
    dist.barrier()
    dist.destroy_process_group()


def preload():
    """The context of processes that have imported PyTorch when they start."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "tandem"])
    return context


def ends(started, statuses):
    """Their exit codes. After one that is wrong the others have 5 s."""
    until = time.monotonic() + 120
    while any(process.is_alive() for process in started) and time.monotonic() < until:
        time.sleep(0.05)
        codes = [process.exitcode for process in started]
        if any(code not in (None, status) for code, status in zip(codes, statuses, strict=True)):
            until = min(until, time.monotonic() + 5)
    for process in started:
        process.kill()
        process.join()
    return [process.exitcode for process in started]


class OnRanks(unittest.TestCase):
    def start(self, what, statuses=(0, 0), on_gpus=ON_GPUS, joined=True):
        for cuda in (False, True) if on_gpus else (False,):
            with self.subTest(cuda=cuda):
                folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tandem-bridge-"))
                started = [
                    preload().Process(target=a_rank, args=(rank, what, len(statuses), folder, cuda, joined))
                    for rank in range(len(statuses))
                ]
                for process in started:
                    process.start()
                self.assertEqual(ends(started, statuses), [*statuses])
