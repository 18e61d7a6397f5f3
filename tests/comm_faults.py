"""After a fault of one rank every other rank ends in time, with one line that names the fault. Nothing is left over.

comm_faults.py DRIVER MPIRUN [--times N] [--only WORDS]     MPIRUN may be empty
"""

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SECONDS = 3.0  # the limit of a call, and of the start
WITHIN = 4.0  # more time, for the last messages and a busy machine
AT_ONCE = 4
BAD = 1

# fault: what the other ranks print, whether the bad rank prints the same, how the bad rank ends
CALLS = {
    "killed": (
        r"rank 1 \(process \d+ on [^)]+\) died, its last call was all_reduce #\d+ of 4194304 f32",
        False,
    ),
    "exits": (r"rank 1 \(process \d+ on [^)]+\) died, its last call was all_reduce #6", False),
    "sleeps": (
        r"in all_reduce #7 of 1000 f32 \(average\): rank 1 \(.*\) is late, its last call was all_reduce #6",
        False,
    ),
    "stops": (
        r"rank 1 \(.*\) (is late and )?does not answer, its last call was all_reduce #\d+ of 4194304",
        False,
    ),
    "count": (
        r"rank 1 \(.*\) made another call, all_reduce #7 of 1001 f32.*, where rank 0 made .* of 1000 f32",
        True,
    ),
    "dtype": (
        r"rank 1 \(.*\) made another call, all_reduce #7 of 500 f64.*, where rank 0 made .* of 1000 f32",
        True,
    ),
    "order": (
        r"rank 1 \(.*\) made another call, broadcast #7 of 1000 f32 from rank 0, where rank 0 made all_reduce",
        True,
    ),
    "leaves": (r"rank 1 \(.*\) made another call, close #7, where rank 0 made all_reduce", True),
    "gives_up": (r"rank 1 \(.*\) gave up: its data ended", True),
    "never": (r"rank 1 did not come in time", False),
}
REPLAYS = {
    "replay": (
        r"rank 1 \(.*\) made another call, replay #7 of a graph with 2 collectives \(hash (\w{16})\), "
        r"where rank 0 made replay #7 of a graph with 2 collectives \(hash (?!\1)\w{16}\)",
        True,
    ),
    "killed_replay": (r"rank 1 \(process \d+ on [^)]+\) died, its last call was replay #\d+", False),
    "killed_end": (r"rank 1 \(process \d+ on [^)]+\) died, its last call was replay #7", False),
}


class Failure(Exception):
    pass


def processes(mark: str) -> list[int]:
    """Returns the processes that have the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"TD_MARK={mark}\0" in (folder / "environ").read_text():
                found.append(int(folder.name))
        except (OSError, UnicodeDecodeError):
            continue
    return found


class Run:
    """A run of ranks, with the output and the end of each rank."""

    def __init__(self, options, backend: str, fault: str, ranks: int, launcher: str, **more: str):
        self.options, self.ranks, self.launcher = options, ranks, launcher
        self.work = Path(tempfile.mkdtemp(prefix="tandem-faults-"))
        self.mark = self.work.name
        environ = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("OMPI_", "PMIX_", "SLURM_", "TD_")) or key == "TD_SHARE_GPU"
        }
        environ |= {
            "TD_SECONDS": str(SECONDS),
            "TD_OPEN_SECONDS": str(options.open_seconds),
            "TD_MARK": self.mark,
            "TD_SAID": str(self.work),
        }
        command = [options.driver, backend, fault, str(BAD)]
        self.started = time.monotonic()
        if launcher == "mpirun":
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} | more
            environ["ASAN_OPTIONS"] = "detect_leaks=0"  # Open MPI's own
            mpirun = [options.mpirun, "-n", str(ranks), "--oversubscribe", "--bind-to", "none"]
            self.children = [self.start([*mpirun, *command], environ, "mpirun")]
            return
        environ |= {"TD_RUN": self.mark, "WORLD_SIZE": str(ranks)} | more
        self.children = [
            self.start(command, environ | {"RANK": str(rank)}, f"{rank}") for rank in range(ranks)
        ]

    def start(self, command, environ, name):
        with open(self.work / f"{name}.out", "w") as said:
            return subprocess.Popen(command, env=environ, stdout=said, stderr=said, start_new_session=True)

    def said(self, rank: int) -> list[str]:
        file = self.work / f"rank.{rank}"
        return [line for line in file.read_text().splitlines() if line] if file.is_file() else []

    def end(self, survivors: list[int]) -> float:
        """Waits for the survivors, ends the other ranks, and returns the time that this took."""
        until = self.started + self.options.open_seconds + SECONDS + WITHIN
        waited = self.children if self.launcher == "mpirun" else [self.children[rank] for rank in survivors]
        try:
            for child in waited:
                child.wait(max(0.1, until - time.monotonic()))
            # mpirun may end before its ranks do.
            while self.launcher == "mpirun" and processes(self.mark) and time.monotonic() < until:
                time.sleep(0.02)
        except subprocess.TimeoutExpired:
            raise Failure(f"not ended after {time.monotonic() - self.started:.1f} s") from None
        finally:
            took = time.monotonic() - self.started
            for child in self.children:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        return took

    def close(self) -> None:
        until = time.monotonic() + 2
        while (left := processes(self.mark)) and time.monotonic() < until:
            time.sleep(0.02)
        for process in left:
            os.kill(process, signal.SIGKILL)
        if left:
            raise Failure(f"processes {left} are left")
        shutil.rmtree(self.work)


def expect_line(run: Run, rank: int, words: str) -> None:
    lines = [line for line in run.said(rank) if line.startswith("driver:")]
    if len(lines) != 1:
        raise Failure(f"rank {rank} said {len(lines)} lines: {run.said(rank)}")
    if not re.search(words, lines[0]):
        raise Failure(f"rank {rank} said {lines[0]!r}, without {words!r}")


def fault_of_a_call(options, backend: str, launcher: str, fault: str, ranks: int = 3) -> float:
    words, bad_says = (CALLS | REPLAYS)[fault]
    run = Run(options, backend, fault, ranks, launcher)
    speak = [rank for rank in range(ranks) if rank != BAD or bad_says]
    try:
        # mpirun ends a sleeping rank, because the other ranks ended with an error.
        took = run.end(speak)
        for rank in speak:
            expect_line(run, rank, words)
    finally:
        run.close()
    return took


def all_is_well(options, backend: str, launcher: str, ranks: int = 2) -> float:
    run = Run(options, backend, "none", ranks, launcher)
    try:
        took = run.end(list(range(ranks)))
        for rank in range(ranks):
            if run.said(rank):
                raise Failure(f"rank {rank} said {run.said(rank)}")
        if any(child.returncode for child in run.children):
            raise Failure(f"ended with {[child.returncode for child in run.children]}")
    finally:
        run.close()
    return took


def one_rank(options, backend: str, launcher: str) -> float:
    return all_is_well(options, backend, launcher, 1)


def signalled(options, backend: str, launcher: str, number: int, words: str) -> float:
    """Sends a signal to the launcher, or to one rank if there is no launcher."""
    run = Run(options, backend, "interrupted", 2, launcher)
    try:
        while len(list(run.work.glob("ready.*"))) < 2 and time.monotonic() < run.started + SECONDS + WITHIN:
            time.sleep(0.02)
        time.sleep(0.1)
        run.started = time.monotonic()
        run.children[0].send_signal(number)
        took = run.end([0, 1])
        for rank in range(2):
            expect_line(run, rank, words)
    finally:
        run.close()
    return took


def taken_port(options, backend: str, launcher: str) -> float:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = Run(options, backend, "none", 2, launcher, TD_ADDRESS=f"127.0.0.1:{taken.getsockname()[1]}")
        try:
            took = run.end([0, 1])
            expect_line(run, 0, r"rank 0 cannot listen at 127.0.0.1:\d+: the port is taken")
            expect_line(run, 1, r"rank 0 (has not reported that all ranks have come|did not come in time)")
        finally:
            run.close()
    return took


def taken_directory(options, backend: str, launcher: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tandem.again").write_text("tandem 1 process 1 on elsewhere\n1\nkey\n\n")
        run = Run(options, backend, "none", 2, launcher, TD_DIRECTORY=folder, TD_RUN="again")
        try:
            took = run.end([0, 1])
            expect_line(
                run, 0, r"the directory is taken: '.*tandem.again' exists, from process 1 on elsewhere"
            )
            expect_line(run, 1, r"rank 0 did not come in time: nobody answers at .*tandem.again")
        finally:
            run.close()
        if sorted(os.listdir(folder)) != ["tandem.again"]:
            raise Failure(f"the directory holds {os.listdir(folder)}")
    return took


def by_directory(options, backend: str, launcher: str) -> float:
    """Runs meet at a directory or an address instead of a name. No file stays in the directory."""
    with tempfile.TemporaryDirectory() as folder:
        for where in ({"TD_DIRECTORY": folder}, {"TD_ADDRESS": f"localhost:{free_port()}"}):
            run = Run(options, backend, "none", 3, launcher, **where)
            try:
                took = run.end([0, 1, 2])
                for rank in range(3):
                    if run.said(rank):
                        raise Failure(f"{where}: rank {rank} said {run.said(rank)}")
            finally:
                run.close()
        if os.listdir(folder):
            raise Failure(f"the directory holds {os.listdir(folder)}")
    return took


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def no_directory(options, backend: str, launcher: str) -> float:
    run = Run(options, backend, "none", 2, launcher, TD_DIRECTORY="/no/such/folder")
    try:
        took = run.end([0, 1])
        for rank in range(2):
            expect_line(run, rank, r"'?/no/such/folder.*No such file or directory")
    finally:
        run.close()
    return took


def other_options(options, backend: str, launcher: str, fault: str, words: str) -> float:
    run = Run(options, backend, fault, 3, launcher)
    try:
        took = run.end([0, 1, 2])
        said = [line for rank in range(3) for line in run.said(rank)]
        if fault != "twin":  # two ranks write to one file
            for rank in range(3):
                expect_line(run, rank, words)
        if not said or not all(re.search(words, line) for line in said) or "time" in said[0]:
            raise Failure(f"the ranks said {said}")
    finally:
        run.close()
    return took


def cases(options):
    """Yields (name, function) of each case."""
    if options.nccl:
        for fault in CALLS | REPLAYS:
            yield f"nccl {fault}", lambda f=fault: fault_of_a_call(options, "nccl", "loop", f, 2)
        yield "nccl all is well", lambda: all_is_well(options, "nccl", "loop", 2)
        gave_up = r"rank 0 \(.*\) gave up: SIGINT"
        yield "nccl SIGINT", lambda: signalled(options, "nccl", "loop", signal.SIGINT, gave_up)
        return
    launchers = [("gloo", "loop")]
    if options.mpirun:
        launchers += [("mpi", "mpirun")]
    for backend, launcher in launchers:
        for fault in CALLS:
            yield (
                f"{backend} {fault}",
                lambda b=backend, x=launcher, f=fault: fault_of_a_call(options, b, x, f),
            )
        yield f"{backend} one rank", lambda b=backend, x=launcher: one_rank(options, b, x)
        yield f"{backend} all is well", lambda b=backend, x=launcher: all_is_well(options, b, x)
    yield (
        "gloo SIGINT",
        lambda: signalled(options, "gloo", "loop", signal.SIGINT, r"rank 0 \(.*\) gave up: SIGINT"),
    )
    yield (
        "gloo SIGTERM",
        lambda: signalled(options, "gloo", "loop", signal.SIGTERM, r"rank 0 \(.*\) gave up: SIGTERM"),
    )
    if options.mpirun:
        yield (
            "mpi SIGINT",
            lambda: signalled(options, "mpi", "mpirun", signal.SIGINT, r"rank [01] \(.*\) gave up: SIGTERM"),
        )
    yield "taken port", lambda: taken_port(options, "gloo", "loop")
    yield "taken directory", lambda: taken_directory(options, "gloo", "loop")
    yield "by a directory", lambda: by_directory(options, "gloo", "loop")
    yield "no directory", lambda: no_directory(options, "gloo", "loop")
    # Rank 0 ends then, and a rank that comes later finds nobody.
    late = r"|rank 0 did not come in time"
    twin = r"rank 2 \(.*\) and process \d+ on .* both say that they are rank 2" + late
    yield "twin", lambda: other_options(options, "gloo", "loop", "twin", twin)
    other = r"rank 1 \(process \d+ on .*\) has 4 ranks, rank 0 has 3" + late
    yield "another number of ranks", lambda: other_options(options, "gloo", "loop", "ranks", other)


def shared_memory() -> set[str]:
    """Returns Open MPI's files. tandem makes none, and other programs may have files there too."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("vader", "sm_segment"))}


def repeat(name: str, run, times: int) -> bool:
    good, longest = 0, 0.0
    for _ in range(times):
        try:
            longest = max(longest, run())
            good += 1
        except Failure as failure:
            print(f"FAIL {name}: {failure}", flush=True)
    print(f"{name}: {good} of {times}, at most {longest:.2f} s", flush=True)
    return good < times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("driver")
    parser.add_argument("mpirun", nargs="?", default="")
    parser.add_argument(
        "--times", type=int, default=1, help="runs of each case; 20 take about 5 minutes on two cores"
    )
    parser.add_argument("--only", default="", help="cases with these words in their names")
    parser.add_argument("--nccl", action="store_true", help="cases of NCCL")
    options = parser.parse_args()
    gpus = subprocess.run("nvidia-smi --list-gpus", shell=True, capture_output=True, text=True).stdout.count(
        "GPU "
    )
    if options.nccl and gpus < 2 and not (gpus and "TD_SHARE_GPU" in os.environ):
        print(f"skipped: {gpus} GPUs, 2 are needed")
        return 77
    # A GPU's context and NCCL take seconds. Only one run at a time uses the GPUs.
    options.open_seconds = 20.0 if options.nccl else SECONDS
    options.driver = os.path.realpath(options.driver)
    started = time.monotonic()
    shared = shared_memory()
    chosen = [(name, run) for name, run in cases(options) if options.only in name]
    # Runs mostly wait, so several can run at the same time.
    with ThreadPoolExecutor(1 if options.nccl else AT_ONCE) as pool:
        failed = sum(pool.map(lambda case: repeat(*case, options.times), chosen))
    ran = len(chosen)
    until = time.monotonic() + 2
    while (left := shared_memory() - shared) and time.monotonic() < until:
        time.sleep(0.05)
    if left:
        print(f"FAIL /dev/shm has {sorted(left)}")
        failed += 1
    print(f"faults: {ran} cases, {failed} failed, {time.monotonic() - started:.0f} s")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
