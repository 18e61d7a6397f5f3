"""One rank of a group: `python -m parity.core.rank FOLDER`, started by ranks.py.

A case runs as in a process of its own, in step with the other ranks: all call the same side at the same time. A
sample begins when every rank has come to it, and is the time of the slowest.
"""

import hashlib
import importlib
import mmap
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parity.core.device import open_device
from parity.core.measure import measure_case
from parity.core.ranks import gpu_of
from parity.core.worker import open_library, serve
from tandem.library import Library, Session

MOST = 128  # ranks
SPINS = 1000  # between two looks at the clock, and before the first sleep
SLEEP_S = 0.0005


class Together:
    """A barrier and a maximum among the ranks of a host, by a page of shared memory: within a microsecond."""

    def __init__(self, path: Path, rank: int, ranks: int, wait: float):
        self.rank, self.ranks, self.wait, self.count = rank, ranks, wait, 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, 3 * MOST * 64)
        self._page = mmap.mmap(self._file, 3 * MOST * 64)
        words = np.frombuffer(self._page, dtype=np.int64).reshape(3, MOST, 8)
        self._arrived = words[0, :, 0]  # a cache line each
        self._values = words[1:, :, 0].view(np.float64)

    def barrier(self, exact: bool = False) -> None:
        """Waits for all ranks. `exact`: they leave it within a microsecond; else a rank sleeps if the others take long,
        because they may need its processor."""
        self.count += 1
        self._arrived[self.rank] = self.count
        end = time.monotonic() + self.wait
        for rank in range(self.ranks):
            spins = 0
            while self._arrived[rank] < self.count:
                os.sched_yield()
                spins += 1
                if not exact and spins > SPINS:
                    time.sleep(SLEEP_S)
                if spins % SPINS == 0 and time.monotonic() > end:
                    words = f"did not come to a call in {self.wait:g} s"
                    raise TimeoutError(f"rank {rank} of {self.ranks} {words}")

    def largest(self, value: float) -> float:
        """Of all ranks. Two places take turns, so that no rank writes what another still reads."""
        values = self._values[self.count % 2]
        values[self.rank] = value
        self.barrier()
        return float(values[: self.ranks].max())


class RankDevice:
    """A device among others: timed from when all have come until the slowest is done, by the host's clock."""

    def __init__(self, device, together: Together):
        self._device, self._together = device, together

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def get_ahead(self, queue_ms: float) -> None:
        """Nothing: the host's part is in the time."""

    def clear_caches(self) -> None:
        """Nothing, as in nccl-tests."""

    def timed_ms(self, call, together: int = 1) -> tuple[float, float]:
        self._device.synchronize()
        self._together.barrier(exact=True)
        start = time.perf_counter_ns()
        for _ in range(together):
            call()
        self._device.synchronize()
        ms = (time.perf_counter_ns() - start) / 1e6
        return self._together.largest(ms) / together, 0.0


class Ranks:
    """What run() gets as `c.ranks`: who this rank is, and the communicators, which live as long as the group."""

    def __init__(self, folder: Path, rank: int, ranks: int, library: Library, device, together: Together):
        self.rank, self.ranks, self._folder, self._together = rank, ranks, folder, together
        # Of the communicators: what shares streams with collectives uses it.
        self.session = Session(library, device)
        self._comms: dict[tuple[str, int], Any] = {}
        self.wanted = ranks  # answers with sums in another order that the judge still wants

    def comm(self, backend: str, nccl_ctas: int = 0):
        """libtandem's communicator over "mpi", "gloo" or "nccl". nccl_ctas: SMs of NCCL at least; 0: its own choice."""
        if (backend, nccl_ctas) not in self._comms:
            if backend == "mpi" and "OMPI_COMM_WORLD_SIZE" not in os.environ:
                raise NotImplementedError("MPI needs mpirun, which is not installed here")
            fields = dict(backend=backend, rank=self.rank, ranks=self.ranks, local_ranks=self.ranks)
            fields |= dict(nccl_host=os.environ.get("NCCL_HOSTID"), nccl_ctas=nccl_ctas)
            fields |= dict(run=f"{self._folder.name}-{backend}-{nccl_ctas}", seconds=self._together.wait)
            options = self.session.struct("td_comm_options", **fields)
            opened = self.session.value("td_comm_open", self.session.device, options)
            self._comms[backend, nccl_ctas] = opened
        return self._comms[backend, nccl_ctas]

    def library(self, backend: str) -> str:
        """Its name and version: "Open MPI 4.1.4"."""
        found = self.session.value("td_comm_describe", self.comm(backend))
        return self.session.ffi.string(found.library).decode()

    def barrier(self) -> None:
        self._together.barrier()

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether all ranks have the same bits in it."""
        mine = tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
        return len(set(self.gathered(hashlib.sha256(mine).digest()))) == 1

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's, on all of them."""
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, value)
        return everyone

    def close(self) -> None:
        """Together with the other ranks."""
        while self._comms:
            self.session.td_comm_close(self._comms.popitem()[1])
        dist.destroy_process_group()


def main(folder: Path) -> None:
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    pipe = Client(str(folder / "parent"), "AF_UNIX")
    pipe.send(rank)
    settings = pipe.recv()
    opened: list[Ranks] = []

    def start() -> tuple[str, Callable]:
        warnings.filterwarnings("ignore", module="torch")
        library = open_library(settings)
        cuda = settings.device.startswith("cuda")
        together = Together(folder / "together", rank, ranks, settings.wait)
        # PyTorch's passes have the priority of its collectives, which is what its users have.
        device = RankDevice(open_device(gpu_of(rank) if cuda else "cpu", priority=0), together)
        how = dict(rank=rank, world_size=ranks, timeout=timedelta(seconds=settings.wait))
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", **how)
        mine = Ranks(folder, rank, ranks, library, device, together)
        together.barrier()
        opened.append(mine)
        how = dict(budget=settings.budget, device=device, ranks=mine, dump=settings.dump)
        return "", lambda name, case: measure_case(importlib.import_module(name), case, library, **how)

    serve(pipe, start)
    for mine in opened:
        mine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
