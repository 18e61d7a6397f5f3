"""A process that measures cases, so that no crash, and no case that takes all memory, ends the sweep."""

import contextlib
import ctypes
import importlib
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity.core.case import Case, ParityError
from parity.core.device import DeviceLost, kind_of, open_device
from parity.core.measure import completed, measure_case
from parity.core.memory import oom_kills
from parity.core.ranks import Group, GroupError, combined, missing, runs_ranks
from parity.core.record import surroundings
from tandem.library import Library

NAME_BYTES = 64
LOST = 70  # exit status of a process whose GPU ended its context


@dataclass(frozen=True)
class Settings:
    """What holds for every case of a sweep."""

    library: Path
    threads: int
    budget: float  # seconds of timing a side
    device: str = "cpu"
    dump: Path | None = None  # a folder for the tensors of judged cases
    wait: float = 60.0  # seconds that a rank waits for the others, in a call or before it


class WorkerError(ParityError):
    """The worker could not start; the message says why."""


class Worker:
    """Runs cases one after the other in a process of its own, which is replaced when it dies."""

    def __init__(self, settings: Settings, timed: bool = False):
        """timed: cases are timed or weighed, some of them in a process of their own.

        A server that has imported PyTorch and done nothing else forks each process: as clean as a new one, and there at
        once. For timed cases it has PyTorch's compiler as well, which the first optimizer imports."""
        self.settings = settings
        self.surroundings: dict = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*["torch._dynamo"] * timed, "parity.core.worker"])
        self._process = None
        self._groups: dict[int, Group] = {}  # by their number of ranks

    def __enter__(self) -> "Worker":
        self._start()
        return self

    def __exit__(self, *_) -> None:
        self._stop()
        for ranks in [*self._groups]:
            self._end_group(ranks)

    def run(self, module: str, case: Case) -> list[dict]:
        """The records of a case; sides that wait for the host are timed in a second process as well."""
        if runs_ranks(importlib.import_module(module), case):
            return self._of_ranks(module, case)
        records = self._measured(module, case)
        timed = [record for record in records if record["impl"] in case.again and "ms" in record]
        if timed:
            self._stop()
            second = self._measured(module, case, tuple(record["impl"] for record in timed))
            for record in timed:
                with_second(record, next((r for r in second if r["impl"] == record["impl"]), None))
            for record in records:
                record["seconds"] = round(record["seconds"] + second[0].get("seconds", 0.0), 3)
        return records

    def _measured(self, module: str, case: Case, only: Sequence[str] = ()) -> list[dict]:
        """The records of a case from one process, or the times of the sides `only`. If the process dies, its side is
        `oom` if memory was full, else `error`, and the case runs again without that side."""
        if case.alone:
            self._stop()
        given_up: dict[str, tuple[str, str]] = {}
        while True:
            if self._process is None:
                self._start()
            kills = oom_kills()
            try:
                self._pipe.send((module, case, given_up, only))
            except OSError:  # it died while it had nothing to do, which is no case's fault
                self._bury()
                continue
            multiprocessing.connection.wait([self._pipe, self._process.sentinel])
            if self._pipe.poll():
                try:
                    records = self._pipe.recv()
                    break
                except (EOFError, OSError):
                    pass
            impl, end = self._called.value.decode(), self._bury(kills)
            if not impl or impl in given_up:
                return self._dead(module, case, impl or "c", *end)
            given_up[impl] = end
        if case.alone:
            self._stop()
        return records

    def _of_ranks(self, module: str, case: Case) -> list[dict]:
        """The records of a case of ranks, whose group stays. On a CPU the group of two stays when others come."""
        ranks = case.ranks
        lacks = missing(case, self.settings.device)
        if lacks:
            return self._dead(module, case, "c", "unsupported", lacks)
        try:
            for other in self._groups.keys() - {ranks}:
                if other > 2 or kind_of(self.settings.device) != "cpu":
                    self._end_group(other)
            if ranks not in self._groups:
                self._groups[ranks] = Group(ranks, self.settings)
            records = combined(self._groups[ranks].run(module, case))
        except GroupError as error:
            self._end_group(ranks)
            return self._dead(module, case, "c", "error", str(error))
        if any(record["status"] == "error" for record in records):
            self._end_group(ranks)  # what a call that failed has left behind is nobody's to know
        return records

    def _end_group(self, ranks: int) -> None:
        if ranks in self._groups:
            self._groups.pop(ranks).close()

    def _dead(self, module: str, case: Case, impl: str, status: str, message: str) -> list[dict]:
        """The records of a case that no process survives."""
        record = {"impl": impl, "status": status, "message": message}
        return completed([record], module, case, self.settings.threads)

    def _start(self) -> None:
        self._called = self._context.Array(ctypes.c_char, NAME_BYTES, lock=False)
        self._pipe, theirs = self._context.Pipe()
        how = dict(args=(theirs, self._called, self.settings), daemon=True, name="parity worker")
        process = self._context.Process(target=_serve, **how)
        try:
            process.start()
        except (EOFError, OSError) as error:  # the server was killed, or cannot fork
            why = str(error) or type(error).__name__
            raise WorkerError(f"no measuring process can be started: {why}") from error
        self._process = process
        theirs.close()
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerError(f"the measuring process ended at once: {self._bury()[1]}") from None
        if isinstance(answer, str):
            self._bury()
            raise WorkerError(answer)
        self.surroundings = answer

    def _stop(self) -> None:
        if self._process is not None:
            self._pipe.close()  # which ends the process
            self._bury()

    def _bury(self, kills: int | None = None) -> tuple[str, str]:
        """Waits for the end of the process; its status and message. `kills`: oom_kills() before the case."""
        self._process.join(timeout=5)
        hung = self._process.exitcode is None
        if hung:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        self._process = None
        self._pipe.close()
        if hung:
            return "error", "the process stopped answering, and was ended"
        if code == -signal.SIGKILL:
            return _killed(kills, oom_kills())
        if code < 0:
            return "error", f"the process died of {signal.Signals(-code).name}"
        if code == LOST:
            words = "an access to memory that is not there, or a failed launch"
            return "error", f"the GPU ended the process's work: {words}"
        return "error", f"the process ended with status {code}"


def with_second(record: dict, second: Mapping | None) -> None:
    """Puts the time of a second process into the record: the faster one's counts, both medians stay."""
    if second is None or "ms" not in second:
        why = (second or {}).get("message", "it left no result")
        record["message"] = f"timed in one process; in a second one: {why}"
        return
    record["processes"] = [record["ms"]["median"], second["ms"]["median"]]
    if second["ms"]["median"] < record["ms"]["median"]:
        for name in ("ms", "samples", "tflops", "gb_s", "phases"):
            if name in second:
                record[name] = second[name]


def _killed(before: int | None, after: int | None) -> tuple[str, str]:
    """SIGKILL is `oom` if the kernel has counted one more kill for memory, else anybody may have sent it."""
    if before is None or after is None:
        return "error", "the process was killed by SIGKILL: out of memory, or somebody"
    if after > before:
        return "oom", "the system killed the process: out of memory"
    return "error", "the process was killed by SIGKILL, but not because memory was full"


def serve(pipe, start: Callable[[], tuple[Any, Callable]]) -> None:
    """What a process that measures does. start() returns what the parent hears first, and a function that answers each
    item of the pipe; an error of start() is said to the parent. The item None ends it."""
    threading.Thread(target=_die_with_listener, args=(pipe.fileno(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    try:
        said, answer = start()
        pipe.send(said)
    except Exception as error:  # whatever it is, the parent says it
        pipe.send(f"{type(error).__name__}: {error}")
        return
    # An error of the pipe: the watching thread ends the process as well, a moment later.
    with contextlib.suppress(EOFError, OSError):
        while (item := pipe.recv()) is not None:
            pipe.send(answer(*item))


def open_library(settings: Settings) -> Library:
    library = Library(settings.library)
    library.set_threads(settings.threads)
    return library


def _serve(pipe, called, settings: Settings) -> None:
    def calling(impl: str) -> None:
        called.value = impl.encode()[: NAME_BYTES - 1]

    def start() -> tuple[dict, Callable]:
        library = open_library(settings)
        # PyTorch's threads warn at their first product, and its profiler at each of its single cycles.
        for words in ("Attempting to run cuBLAS", "Warning: Profiler clears events"):
            warnings.filterwarnings("ignore", message=words)
        device = open_device(settings.device)
        library.open(device).close()  # a build without CUDA, or an old driver, is an error of the whole run
        how = dict(budget=settings.budget, calling=calling, device=device, dump=settings.dump)

        def answer(name: str, case: Case, given_up: Mapping, only: Sequence[str]) -> list[dict]:
            calling("")
            device.limit_process()
            module = importlib.import_module(name)
            try:
                return measure_case(module, case, library, given_up=given_up, only=only, **how)
            except DeviceLost:
                os._exit(LOST)  # the parent starts another process, and leaves out the side that was called

        return surroundings(library, device), answer

    serve(pipe, start)


def _die_with_listener(pipe: int) -> None:
    """A sweep that ends, or is killed, leaves no case running: the other end of the pipe closes with it."""
    listener = select.poll()
    listener.register(pipe, 0)  # POLLHUP alone, which needs no asking
    listener.poll()
    os.kill(os.getpid(), signal.SIGKILL)
