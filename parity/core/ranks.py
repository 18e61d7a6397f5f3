"""Cases of several ranks: a group of processes on this host, each a rank, that compute a case together.

The processes are started once for a number of ranks, by mpirun if it is installed, and take case after case. Every
wait has an end: if a rank dies or does not answer, that is the result of the case, and the group is ended.
"""

import contextlib
import multiprocessing.connection
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from parity.core.case import Case, ParityError
from parity.core.device import is_shared, kind_of
from tandem.library import ROOT

START_S = 120.0  # until all ranks have come, each of which imports PyTorch
CASE_S = 300.0  # for a case, beyond ten times what it is expected to take
REST_S = 5.0  # for the other ranks to answer, once one of them has died
END_S = 5.0  # for the group to end by itself
MPIRUN_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class GroupError(ParityError):
    """The ranks could not start, or one is gone; the message names it."""


def runs_ranks(module, case: Case) -> bool:
    """Whether processes run the case, one a rank: it says `ranks`, and the module starts none itself."""
    return "ranks" in case and not getattr(module, "RUNS_RANKS", False)


def missing(case: Case, device: str) -> str:
    """What the machine lacks for the case's ranks; "" for nothing."""
    if kind_of(device) != "cuda":
        return ""
    ranks, gpus = case.ranks, torch.cuda.device_count()
    if is_shared():
        return "ranks share a GPU: times would say nothing" if "time" in case.measure else ""
    return f"{ranks} ranks need {ranks} GPUs, here are {gpus}" if gpus < ranks else ""


class Group(contextlib.AbstractContextManager):
    """So many ranks, started and connected. A context manager."""

    def __init__(self, ranks: int, settings, module: str = "parity.core.rank"):
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-ranks-")
        self._processes: list[subprocess.Popen] = []
        self._pipes: dict[int, multiprocessing.connection.Connection] = {}
        self._lost = True  # until all have started, and again when one is gone
        try:
            self._start(settings, module)
        except BaseException:
            self.close()
            raise
        self._lost = False

    def __exit__(self, *_) -> None:
        self.close()

    def run(self, module: str, case: Case) -> list[list[dict]]:
        """The records of every rank. GroupError if a rank died or did not answer in time; the group is useless then."""
        answers: dict[int, list[dict]] = {}
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):  # a rank that is gone is seen below
                pipe.send((module, case))
        end = time.monotonic() + CASE_S + 10 * case.seconds
        lost: dict[int, str] = {}
        while len(answers) + len(lost) < self.ranks:
            waited = {pipe: rank for rank, pipe in self._pipes.items() if rank not in answers | lost}
            ready = multiprocessing.connection.wait([*waited], timeout=max(0.0, end - time.monotonic()))
            if not ready:
                lost |= dict.fromkeys(waited.values(), "did not answer in time")
            for pipe in ready:
                rank = waited[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    lost[rank] = "died"
                    end = min(end, time.monotonic() + REST_S)
        if lost:
            self._lost = True
            rank = min(lost, key=lambda rank: (lost[rank] != "died", rank))
            raise GroupError(f"rank {rank} of {self.ranks} {lost[rank]}")
        return [answers[rank] for rank in range(self.ranks)]

    def close(self) -> None:
        """Ends every process: in order where nothing went wrong, else at once."""
        for pipe in self._pipes.values() if not self._lost else ():
            with contextlib.suppress(OSError):
                pipe.send(None)
        end = time.monotonic() + (0 if self._lost else END_S)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for pipe in self._pipes.values():
            pipe.close()  # which ends the rank
        self._pipes = {}
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what mpirun has started is of its process group
            process.wait()
        self._processes = []
        self._folder.cleanup()

    def _start(self, settings, module: str) -> None:
        folder = Path(self._folder.name)
        listener = multiprocessing.connection.Listener(str(folder / "parent"), "AF_UNIX", backlog=self.ranks)
        command = [sys.executable, "-m", module, str(folder)]
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
        environment = kept | {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": os.pathsep.join(sys.path)}
        mpirun = shutil.which("mpirun") if kind_of(settings.device) == "cpu" else None
        with listener:
            if mpirun:
                launcher = [mpirun, "-n", str(self.ranks), "--oversubscribe", "--bind-to", "none", *command]
                self._launch(launcher, environment | MPIRUN_AS_ROOT)
            for rank in range(0 if mpirun else self.ranks):
                self._launch(command, environment | rank_variables(rank, self.ranks))
            self._accept(listener, settings)

    def _launch(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with self._said().open("ab") as said:
            how = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, cwd=ROOT)
            process = subprocess.Popen(command, env=dict(environment), start_new_session=True, **how)
        self._processes.append(process)

    def _said(self) -> Path:
        return Path(self._folder.name) / "stderr"

    def _accept(self, listener, settings) -> None:
        """Waits for every rank to connect and to say that it is ready."""
        end = time.monotonic() + START_S
        processes: set[int] = set()
        waited = listener._listener._socket  # which alone can be waited for
        while len(self._pipes) < self.ranks:
            if not multiprocessing.connection.wait([waited], timeout=0.2):
                self._check_starting(end)
                continue
            pipe = listener.accept()
            rank, process = pipe.recv(), _process_of(pipe)
            if rank in self._pipes or process in processes or not 0 <= rank < self.ranks:
                words = "came twice, or its process is another rank too"
                raise GroupError(f"rank {rank} of {self.ranks} {words}")
            processes.add(process)
            self._pipes[rank] = pipe
            pipe.send(settings)
        for rank, pipe in sorted(self._pipes.items()):
            while not pipe.poll(0.2):
                self._check_starting(end)
            try:
                said = pipe.recv()
            except (EOFError, OSError):
                said = "it ended at once"
            if said:
                raise GroupError(f"rank {rank} of {self.ranks} could not start: {said}")

    def _check_starting(self, end: float) -> None:
        ended = [process.poll() for process in self._processes if process.poll() is not None]
        if ended:
            lines = self._said().read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip(" -")), "it said nothing")
            raise GroupError(f"a rank ended with status {ended[0]} before it was ready: {last}")
        if time.monotonic() > end:
            missing = sorted(set(range(self.ranks)) - set(self._pipes))
            words = f"rank {missing[0]} has not come" if missing else "not all were ready"
            raise GroupError(f"of {self.ranks} ranks, {words} in {START_S:.0f} s")


def _process_of(pipe) -> int:
    """The id of the process at the other end, from the kernel."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        return struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def rank_variables(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun would set for a rank of one host; of ranks that share a GPU, what makes NCCL take them."""
    found = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    found |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    return found | ({"NCCL_HOSTID": f"rank-{rank}"} if is_shared() else {})


def gpu_of(rank: int) -> str:
    """The name of the rank's GPU; where ranks share GPUs, they take turns."""
    return f"cuda:{rank % torch.cuda.device_count() if is_shared() else rank}"


def combined(of_ranks: Sequence[Sequence[dict]]) -> list[dict]:
    """One record a side: rank 0's, whose times are the slowest rank's, with the worst status and the largest error."""
    found = []
    for records in zip(*of_ranks, strict=True):
        worst = max(range(len(records)), key=lambda rank: (_badness(records[rank]), -rank))
        record = dict(records[0])
        if _badness(records[worst])[0] > 0:
            record["status"] = records[worst]["status"]
        if "message" in records[worst]:
            record["message"] = f"rank {worst}: {records[worst]['message']}"
        if "error" in records[worst]:
            record["error"] = records[worst]["error"]
        record["seconds"] = max(of_rank["seconds"] for of_rank in records)
        found.append(record)
    return found


def _badness(record: Mapping) -> tuple[int, float]:
    order = ("ok", "unsupported", "not run", "oom", "failed", "error")
    error = record.get("error", {}).get("rel_l2")
    return order.index(record["status"]), error if error is not None else -1.0
