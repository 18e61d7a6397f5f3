"""The program `tandem` as several ranks: launchers, collectives, data parallelism and sharding.

Run by CTest as  python3 cli_ranks.py PATH_OF_TANDEM ; Python's standard library is all it needs.
"""

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from cli_kit import TINY, Cli, main, program, tables


def quiet(err: str) -> str:
    """Removes the ranks' messages about waits: on a busy machine a rank may wait 2 s for another."""
    return re.sub(r".* waits: .*\n", "", err)


class Ranks(Cli):
    def with_launcher(self, **variables):
        """Runs the command with a launcher's variables. Returns None in a build without Gloo."""
        environ = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("OMPI_", "PMI_", "SLURM_", "RANK", "WORLD"))
        }
        command = [program(), "allreduce", "--backend", "gloo", "--bytes", "4096", "--iters", "3"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ | variables)
        return None if "has no Gloo" in result.stderr else result

    def test_allreduce_of_one_rank(self):
        result = self.with_launcher()
        if result is None:
            self.skipTest("no Gloo")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        (rows,) = tables(result.stdout)
        self.assertEqual((rows[0]["bytes"], rows[0]["count"], rows[0]["#wrong"]), ("4,096", "1,024", "0"))
        self.assertEqual((rows[0]["algbw (GB/s)"], rows[0]["busbw (GB/s)"]), ("n/a", "n/a"))
        self.assertIn("1 rank, which sends nothing: mpirun, torchrun, or RANK and WORLD_SIZE", result.stdout)
        for more in (
            ["--dtype", "bf16", "--reduction", "average", "--out-of-place"],
            ["--dtype", "i64", "--iters", "70"],  # more calls than run at the same time
            ["--dtype", "f16", "--reduction", "average"],
            ["--dtype", "f64", "--reduction", "average"],
        ):
            said = self.succeed("allreduce", "--backend", "gloo", "--bytes", "8,80008", *more)
            self.assertEqual([row["#wrong"] for row in tables(said)[0]], ["0", "0"])

    def test_mpi_needs_its_launcher(self):
        environ = os.environ | {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": f"cli-mpi-{os.getpid()}"}
        command = [program(), "allreduce", "--backend", "mpi", "--bytes", "4096"]
        ranks = [
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ | {"RANK": str(rank)})
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
        if "has no MPI" in said[0]:
            self.skipTest("no MPI")
        for line in said:
            self.assertRegex(line, r"MPI says that this is rank 0 of 1: was it started by mpirun or srun")

    def test_sms_are_an_option_of_nccl(self):
        message = "tandem ddp: --ctas: '8' needs --backend nccl, this run has gloo"
        self.refuse(1, message, "ddp", "--backend", "gloo", "--ctas", "8")

    def test_launchers_are_understood(self):
        refusals = [
            ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, needs to be below WORLD_SIZE, which is 2"),
            ({"RANK": "1"}, "RANK is '1', and WORLD_SIZE is not set"),
            ({"WORLD_SIZE": "4"}, "WORLD_SIZE is '4', and RANK is not set"),
            (
                {"OMPI_COMM_WORLD_SIZE": "2"},
                "OMPI_COMM_WORLD_SIZE is '2', and OMPI_COMM_WORLD_RANK is not set",
            ),
            (
                {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "0"},
                "needs to be below OMPI_COMM_WORLD_SIZE, which is 0",
            ),
        ]
        for variables, words in refusals:
            result = self.with_launcher(**variables)
            if result is None:
                self.skipTest("no Gloo")
            self.assertEqual(result.returncode, 1)
            self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
            self.assertIn(words, result.stderr)
        for variables in (
            {"SLURM_PROCID": "3"},  # inside a job, but not started by srun
            {"WORLD_SIZE": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # a script's for PyTorch
        ):
            self.assertEqual(self.with_launcher(**variables).returncode, 0)

    def test_other_names_do_not_meet(self):
        """Ranks of two runs wait for ranks of the same run, if the names or ports differ: at the end of long names, or
        in '/' and '_'."""
        long = f"cli-{os.getpid()}-{'x' * 60}"
        pairs = [
            ({"TORCHELASTIC_RUN_ID": "a/b"}, {"TORCHELASTIC_RUN_ID": "a_b"}),
            (
                {"TORCHELASTIC_RUN_ID": long, "MASTER_PORT": "29501"},
                {"TORCHELASTIC_RUN_ID": long, "MASTER_PORT": "29502"},
            ),
        ]
        command = [program(), "allreduce", "--backend", "gloo", "--bytes", "8", "--open-timeout", "2.5"]
        runs = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"WORLD_SIZE": "2", "RANK": str(rank)} | variables,
            )
            for pair in pairs
            for rank, variables in enumerate(pair)
        ]
        for number, run_of in enumerate(runs):
            out, err = run_of.communicate(timeout=60)
            if "has no Gloo" in err:
                self.skipTest("no Gloo")
            missing = (
                "rank 0 did not come in time: nobody answers" if number % 2 else "rank 1 did not come in time"
            )
            self.assertEqual((run_of.returncode, out), (1, ""))
            self.assertIn(missing, err)
            self.assertIn("; open_seconds is 2.5 (--open-timeout)", err)
            # The rank says once, after 2 s, what it waits for.
            waits = f"rank {number % 2} of 2 waits: {'nobody answers at' if number % 2 else 'rank 1 has not come'}"
            self.assertEqual((err.count(waits), err.count("\n")), (1, 2), err)

    def test_two_loops_at_once(self):
        name = f"cli-twice-{os.getpid()}"
        command = [program(), "allreduce", "--backend", "gloo", "--bytes", "8", "--run", name]
        environ = os.environ | {"WORLD_SIZE": "3"}

        def start(rank):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            return subprocess.Popen(command, env=environ | {"RANK": str(rank)}, **pipes)

        first = start(0)
        self.addCleanup(first.kill)
        said = first.stderr.readline()
        if "has no Gloo" in said:
            first.communicate()
            self.skipTest("no Gloo")
        self.assertIn("waits", said)  # rank 0 has started
        _, err = start(0).communicate(timeout=60)
        self.assertRegex(err, "another run has this name; name this one with --run$")
        twins = [start(1), start(1)]
        for process in [first, *twins]:
            _, err = process.communicate(timeout=60)
            self.assertRegex(err, "both say that they are rank 1; two runs at a time need two names: --run")
            self.assertEqual(process.returncode, 1)

    def test_ranks_from_a_loop(self):
        with tempfile.TemporaryDirectory() as folder:
            self.two_ranks("--timeout", "20", "--open-timeout", "20")
            self.two_ranks("--directory", folder, "--run", "named")
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            open_port = f"tandem allreduce: {address} is not protected: any program that reaches the port"
            self.assertEqual(self.two_ranks("--address", address).count(open_port), 1)
            self.assertNotIn(open_port, self.two_ranks("--address", address, TANDEM_TOKEN="ab" * 16))
            path = Path(folder) / "token"
            path.write_text("cd" * 16 + "\n")
            for mode, content, words in (
                (0o640, "cd" * 16, "may be read by other users"),
                (0o600, "cd", "needs 32 hexadecimal digits"),
                (0o600, "cd" * 17, "needs 32 hexadecimal digits"),
                (0o600, "cd" * 16 + "\n", None),
            ):
                path.write_text(content)
                path.chmod(mode)
                if words is None:
                    said = self.two_ranks("--address", address, TANDEM_TOKEN_FILE=str(path))
                    self.assertNotIn(open_port, said)
                else:
                    self.refuse_token(words, address, TANDEM_TOKEN_FILE=str(path))
            path.unlink()
            self.refuse_token("No such file", address, TANDEM_TOKEN_FILE=str(path))
            self.refuse_token("TANDEM_TOKEN has 2 characters", address, TANDEM_TOKEN="ab")
            self.assertEqual(os.listdir(folder), [])

    def refuse_token(self, words, address, **variables):
        environ = os.environ | {"RANK": "0", "WORLD_SIZE": "2"} | variables
        command = [program(), "allreduce", "--backend", "gloo", "--address", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (1, "", 1))
        self.assertIn(words, done.stderr)
        self.assertNotIn("cdcd", done.stderr)  # the token is not printed, so no reader of logs sees it

    def two_ranks(self, *more, **variables):
        """Runs two ranks. Returns rank 0's output without its rows."""
        environ = os.environ | {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": f"cli-{os.getpid()}"} | variables
        command = [
            program(),
            "allreduce",
            "--backend",
            "gloo",
            "--bytes",
            "4096,400000",
            "--iters",
            "3",
            "--json",
            *more,
        ]
        ranks = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environ | {"RANK": str(rank)},
            )
            for rank in range(2)
        ]
        said = [(out, quiet(err)) for out, err in (rank.communicate(timeout=60) for rank in ranks)]
        if "has no Gloo" in said[0][1]:
            self.skipTest("no Gloo")
        self.assertEqual([rank.returncode for rank in ranks], [0, 0], said)
        self.assertEqual(said[1], ("", ""))
        rows = self.check_rows(command[1:], *said[0])
        self.assertEqual([row["bytes"] for row in rows], [4096, 400000])
        self.assertIn("among 2 ranks on 1 host by gloo", said[0][1])
        for row in rows:  # bytes / time, and this times 2 (2 - 1) / 2
            self.assertAlmostEqual(row["algbw_gb_s"], row["bytes"] / row["time_us"] / 1e3, delta=0.0051)
            self.assertEqual(row["busbw_gb_s"], row["algbw_gb_s"])
        return said[0][1]


class Steps(Cli):
    """Training steps of several ranks, on the CPU with Gloo. cli_gpus.py runs them on GPUs."""

    RANKED = tuple(("ddp", way) for way in ("naive", "flat", "overlap", "bucketed"))
    RANKED += (("shard", "flat"), ("shard", "full"))
    FULL = ("gathered_layers", "gathered_tables", "reduced_layers", "reduced_tables")
    BACKEND = "gloo"
    MODEL, SHORT = TINY[:10], TINY[10:]
    MOST = 3  # ranks
    # Steps that take minutes and have no communication. They run first. If a rank dies in them, the others
    # end within END_S.
    LONG = "--layers 8 --batch 16 --context 256 --warmup 1 --steps 4096".split()
    MET_S, END_S = 1.5, 15.0  # MET_S: until the ranks have met and are in their steps
    BESIDE_MS = 0.0  # the most overlap with the backward pass of collectives that run after it
    # Options that differ on rank 1.
    OTHERS = (
        *("--layers 3", "--heads 4", "--batch 1", "--context 4", "--micro-batches 2", "--optimizer sgd"),
        *("--update after", "--attention naive", "--keep most", "--steps 4", "--seed 2", "--bucket-mb 3"),
        *("--warmup 3", "--d-ff 36", "--vocab 31", "--dtype bf16", "--gradients held"),
    )

    def on(self, rank: int) -> tuple[list[str], dict[str, str]]:
        """Returns the arguments and variables that choose the rank's device."""
        return ["--backend", self.BACKEND], {}

    def start(self, ranks: int, *args, how=None, **more):
        """Starts `ranks` ranks of the command in a loop. `more` has arguments of single ranks: _1 for rank 1, and so
        on."""
        environ = os.environ | {"WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": f"cli-{os.getpid()}"}
        environ |= {"LOCAL_WORLD_SIZE": str(ranks)}
        started = []
        for rank in range(ranks):
            where, variables = self.on(rank)
            mine = more.get(f"_{rank}", [])
            started.append(
                subprocess.Popen(
                    [program(), *args, *where, *self.MODEL, *(how or self.SHORT), *mine],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | variables,
                )
            )
        return started

    def finish(self, ranks) -> list[tuple[int, str, str]]:
        done = [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks]
        if "has no Gloo" in done[0][1]:
            self.skipTest("no Gloo")
        return [(status, out, quiet(err)) for out, err, status in done]

    def test_ddp_and_shard(self):
        states = []
        for command, way in self.RANKED:
            with self.subTest(command=command, way=way):
                option = "--strategy" if command == "ddp" else "--kind"
                done = self.finish(self.start(2, command, option, way, "--json"))
                self.assertEqual([done[0][0], done[1]], [0, (0, "", "")], done)
                text = done[0][2]
                times, memory = self.tables_of(self.check_rows([command, option, way], *done[0][1:]))
                self.assertEqual([row["rank"] for row in times], [0, 1, "mean"])
                self.assertIn(f"2 ranks on 1 host by {self.BACKEND}", text)
                said = {"full": "split by parts of units", "tensors": "its state split by tensors"}
                said |= {"flat": "its state split by parts of buckets"} if command == "shard" else {}
                self.assertIn(said.get(way, f"gradients reduced {way}"), text)
                bucketed = way == "bucketed" or (command, way) == ("shard", "flat")
                self.assertEqual("; buckets of 25 MiB" in text, bucketed)
                for head in times[0].keys() - {"rank"}:
                    self.assertAlmostEqual(times[2][head], (times[0][head] + times[1][head]) / 2)
                for row, of in zip(times[:2], memory, strict=True):
                    parts = "parameters gradients optimizer_state activations buffers".split()
                    self.assertAlmostEqual(sum(of[part] for part in parts), of["before_update"])
                    self.assertAlmostEqual(row["exposed_ms"], row["step_ms"] - row["without_ms"])
                    self.assertLessEqual(row["hidden_ms"], row["collectives_ms"])
                    if way in ("naive", "flat") and command == "ddp":
                        self.assertLessEqual(row["hidden_ms"], self.BESIDE_MS)
                self.assertEqual("Of the buffers, gathered weights use " in text, way == "full")
                states.append(memory[0]["optimizer_state"])
        self.assertLess(states[4], 0.8 * states[0])

    def tables_of(self, rows) -> tuple[list[dict], list[dict]]:
        return [row for row in rows if "step_ms" in row], [row for row in rows if "buffers" in row]

    def test_ddp_takes_what_bench_takes(self):
        for words in (
            "--dtype bf16_mixed --update after",
            "--optimizer sgd --dtype bf16",
            "--micro-batches 3 --bucket-mb 0",
            "--keep inputs --checkpoint-layers 2 --gradients held",
        ):
            for command in ("ddp", "shard"):
                with self.subTest(command=command, words=words):
                    (done,) = self.finish(self.start(1, command, *words.split()))
                    self.assertEqual((done[0], done[2]), (0, ""))

    def test_ranks_with_other_options_are_told(self):
        """A difference is refused before the first step, because a record has only rank 0's options."""
        for number, words in enumerate(self.OTHERS):
            option, value = words.split()
            command = ("ddp", "shard")[number % 2]
            with self.subTest(command=command, option=option):
                done = self.finish(self.start(2, command, _1=[option, value]))
                told = rf"^tandem {command}: {option}.*: rank 1 has .*, where rank 0 has "
                for status, _, err in done:
                    self.assertEqual((status, len(err.splitlines())), (1, 1), err)
                    self.assertRegex(err, told)

    def test_a_rank_that_is_killed_in_its_steps_is_named(self):
        for command in ("ddp", "shard"):
            with self.subTest(command=command):
                ranks = self.start(self.MOST, command, how=self.LONG)
                time.sleep(self.MET_S)
                ranks[1].kill()
                killed = time.monotonic()
                done = self.finish(ranks)
                self.assertLess(time.monotonic() - killed, self.END_S)
                expected = [-signal.SIGKILL if rank == 1 else 1 for rank in range(self.MOST)]
                self.assertEqual([status for status, _, _ in done], expected, done)
                for rank in range(0, self.MOST, 2):
                    self.assertRegex(done[rank][2], rf"^tandem {command}: .*rank 1 \(process \d+ on .*\)")


if __name__ == "__main__":
    main()
