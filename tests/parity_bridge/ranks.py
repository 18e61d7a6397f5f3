"""The ranks of a program: their numbers, their waits, and their ends."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import launchers
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import tandem as bridge
import tandem.ranks
from parity_bridge.started import RANKS, OnRanks, Tied, preload

# Ranks of loops, forked from a process that has imported PyTorch. Each rank writes the time of its error to
# its file. The first process interrupts some ranks while they wait, and prints how all ended.
SCENARIOS = """
import json, os, signal, sys, threading, time
import torch
import tandem as bridge

folder, started = sys.argv[1], {}
for scenario in ("alone", "waits", "thread", "limit", "raises", "leaves", "exits"):
    for rank in (0, 1) if scenario != "alone" else (0,):
        path = f"{folder}/{scenario}.{rank}"
        process = os.fork()
        if process == 0:
            sys.stderr.flush()
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": f"{scenario}-{os.getppid()}"}
            os.environ |= {"TANDEM_OPEN_SECONDS": "100", "TANDEM_SECONDS": "3" if scenario == "limit" else "100"}
            break
        started[process] = path
    else:
        continue
    break
if process:
    sent = {}
    ended = {}
    until = time.monotonic() + 100
    while started.keys() - ended.keys() and time.monotonic() < until:
        for name, word in (("alone.0", "waits: "), ("waits.0", "waits: all_"), ("thread.0", "waits: all_")):
            path = f"{folder}/{name}"
            if path not in sent and os.path.exists(path) and word in open(path).read():
                sent[path] = time.monotonic()
                os.kill(next(process for process, of in started.items() if of == path), signal.SIGINT)
        process, status = os.waitpid(-1, os.WNOHANG)
        ended |= {process: status} if process else {}
        time.sleep(0.01)
    for process in started.keys() - ended.keys():
        os.kill(process, signal.SIGKILL)
    json.dump({path: [ended.get(p, -1), sent.get(path)] for p, path in started.items()}, sys.stdout)
    sys.stdout.flush()
    os._exit(0)
try:
    model = bridge.DataParallel(torch.nn.Linear(2, 2))
    if rank == 1 and scenario in ("waits", "thread", "limit"):
        time.sleep(8)
    if rank == 1 and scenario == "raises":
        raise ValueError("mine")
    if rank == 1 and scenario == "leaves":
        sys.exit(0)
    if rank == 1 and scenario == "exits":
        sys.exit(7)
    def step():
        try:
            model(torch.ones(3, 2)).sum().backward()
            model.finish_gradient_synchronization()
        except RuntimeError:
            print("after", time.monotonic(), file=sys.stderr, flush=True)
            raise
    if rank == 0 and scenario == "thread":  # as autograd's of a GPU
        thread = threading.Thread(target=step)
        threading.excepthook = lambda _: None
        thread.start()
        thread.join()
    else:
        step()
finally:
    if scenario != "thread":
        print("after", time.monotonic(), file=sys.stderr, flush=True)
"""


def example():
    """What a rank of the README's example prints."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples/bridge.py"))
    return said.getvalue()


class Ranks(OnRanks):
    def test_ranks_of_launchers(self):
        c = tandem.device.device_of(torch.ones(1)).c
        for variables, expected in launchers.TABLE:
            with self.subTest(variables), unittest.mock.patch.dict(os.environ, variables, clear=True):
                if isinstance(expected, str):
                    self.assertRaisesRegex(RuntimeError, expected, tandem.ranks.who, c)
                    continue
                self.assertEqual(tandem.ranks.who(c)[:2], expected)

    def test_the_example_of_the_readme(self):
        """By the launcher behind torchrun, which gives the ranks their variables."""
        preload()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=RANKS,
            run_id=f"example-{os.getpid()}",
            rdzv_backend="static",
            rdzv_endpoint="127.0.0.1:0",
            rdzv_configs={"rank": 0},
            max_restarts=0,
            start_method="forkserver",
        )
        said = elastic_launch(config, example)()
        weights = [re.search(r"weights sum to (\S+\d{6})", text)[1] for text in said.values()]
        self.assertEqual((len(weights), len(set(weights))), (RANKS, 1), said)  # the same on every rank

    def test_waits_limits_and_ends(self):
        """The messages of a loop's ranks, and their ends."""
        folder = self.enterContext(tempfile.TemporaryDirectory(prefix="tandem-bridge-"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCENARIOS, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        self.assertEqual(done.returncode, 0, done.stderr)
        interrupted = 0
        said = {}
        for path, (status, sent) in json.loads(done.stdout).items():
            text = said[Path(path).name] = Path(path).read_text()
            with self.subTest(path):
                leaves = Path(path).name in ("leaves.1", "exits.1")
                self.assertEqual(text.count("Traceback"), int(not leaves), text)
                self.assertEqual(os.WEXITSTATUS(status) == 7, path.endswith("exits.1"), (status, text))
                self.assertTrue(status > 0, (status, text))
                if sent is not None:
                    interrupted += 1
                    self.assertIn("\nKeyboardInterrupt\n", text)
                    self.assertLess(float(re.search(r"after (\S+)", text)[1]) - sent, 3.0)
        self.assertEqual(interrupted, 3)
        for name, words in {
            "alone.0": ["tandem: rank 0 of 2 waits: rank 1 has not come"],
            "waits.0": [
                "tandem: rank 0 of 2 waits: all_reduce #",
                "of 64 f32 (average): rank 1 has not made it",
            ],
            "waits.1": ["gave up: its caller ended the wait"],
            "thread.1": ["gave up: its caller ended the wait"],
            "limit.0": ["is late", "; seconds is 3 (seconds= or TANDEM_SECONDS raises it)"],
            "limit.1": ["is late", "; seconds is 3 (seconds= or TANDEM_SECONDS raises it)"],
            "raises.0": ["rank 1 (process ", "gave up: its program failed"],
            "raises.1": ["ValueError: mine"],
            "leaves.0": ["made another call, close #"],
            "leaves.1": ["tandem: rank 1 of 2 ends: td_comm_close: TD_RANK_FAILED: "],
            "exits.0": ["rank 1 (process ", "gave up: its program failed"],
        }.items():
            for word in words:
                self.assertIn(word, said[name])

    def test_what_keeps_strangers_out(self):
        path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "token"
        path.write_text("ab" * 16 + "\n")
        path.chmod(0o600)
        there, file = {"TANDEM_ADDRESS": "host:1"}, {"TANDEM_TOKEN_FILE": str(path)}
        patch = unittest.mock.patch
        rows = [(file, 0, None), (there, 0, None), (there, 1, None), (there | file, 0, "ab" * 16)]
        for variables, rank, expected in [*rows, (there | file | {"TANDEM_TOKEN": "cd"}, 0, "cd")]:
            with (
                patch.dict(os.environ, variables, clear=True),
                contextlib.redirect_stderr(io.StringIO()) as said,
            ):
                self.assertEqual(tandem.ranks._token(rank, "run"), expected)
            warns = (variables, rank) == (there, 0)
            self.assertEqual("host:1 is not protected" in said.getvalue(), warns)
        path.chmod(0o640)
        with patch.dict(os.environ, there | file):
            self.assertRaisesRegex(PermissionError, "chmod 600", tandem.ranks._token, 0, "run")
            with patch.object(tandem.ranks.dist, "is_initialized", lambda: True):
                tokens = {tandem.ranks._token(rank, run) for rank in (0, 1) for run in ("a", "b")}
        self.assertEqual([len(token) for token in tokens], [32, 32])

    def test_no_ranks(self):
        with self.assertRaisesRegex(
            RuntimeError, "no ranks: call torch.distributed.init_process_group first"
        ):
            bridge.DataParallel(Tied())
