"""The program `tandem`: help and version, every mistake it must name, and the commands of one process; cli_ranks.py has
those of several.

Run by CTest as  python3 cli.py PATH_OF_TANDEM ; Python's standard library is all it needs.
"""

import contextlib
import fcntl
import json
import os
import pickle
import pty
import re
import resource
import signal
import subprocess
from pathlib import Path

from cli_kit import MODEL, SHORT, TINY, Cli, is_near, main, program, run, tables

COMMANDS = [
    "bench",
    "attention",
    "flash",
    "jit",
    "trace",
    "memory",
    "precision",
    "sizes",
    "account",
    "allreduce",
]
COMMANDS += ["ddp", "shard"]
# The columns of nsys' cuda_gpu_kern_sum.
SUMMARY = [
    "Time (%)",
    "Total Time (ns)",
    "Instances",
    "Avg (ns)",
    "Med (ns)",
    "Min (ns)",
    "Max (ns)",
    "StdDev (ns)",
    "Name",
]


class OneProcess(Cli):
    # ---- the program ----

    def test_nothing_prints_usage(self):
        done = run()
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("Usage: tandem", done.stderr)
        for command in COMMANDS:
            self.assertRegex(done.stderr, rf"\n  {command}  ")

    def test_help_and_version(self):
        for command in [[], *([name] for name in COMMANDS)]:
            with self.subTest(command=command):
                text = self.succeed(*command, "--help")
                self.assertIn("Usage: " + " ".join(["tandem", *command]), text)
                self.assertIn("--version", text)
                self.assertLess(max(len(line) for line in text.splitlines()), 80)
                version = self.succeed(*command, "--version")
                self.assertRegex(
                    version,
                    r"^tandem \d+\.\d+\.\d+\n"
                    r"commit ([0-9a-f]{10,}( with changes)?|unknown), build [0-9a-f]{16}\n"
                    r"\w+ [\d.]+, -march=\S+, \w.*\n"
                    r"backends: cpu, (no cuda|cuda of GPU architectures \d.*)\n"
                    r"oneDNN \d+\.\d+\.\d+\n"
                    r"collectives:( mpi)?( gloo)?( nccl)?\n$",
                )
        self.assertIn("there are bench, attention", run("nonsense").stderr)

    def test_every_help_has_examples_that_run(self):
        small = {"bench": TINY, "flash": [*SHORT, "--seq", "16"], "attention": [*SHORT, "--seq", "16"]}
        small |= {"memory": MODEL, "trace": TINY, "ddp": TINY, "shard": TINY, "jit": small["flash"]}
        for command in [[], *([name] for name in COMMANDS)]:
            text = self.succeed(*command, "--help")
            examples = re.findall(r"^  (tandem (\w+) .*)$", text.partition("\nExamples:\n")[2], re.MULTILINE)
            self.assertGreaterEqual(len(examples), 2, command)
            for line, name in examples:
                self.assertIn(name, command or COMMANDS)
                if "cuda" in line:
                    continue
                with self.subTest(example=line):
                    line = re.sub(r"\b\w+\.(jsonl|json|pickle|svg)\b", rf"{self.folder}/\g<0>", line)
                    words = line.split()[1:]
                    done = run(*words, *small.get(name, []))
                    self.assertEqual(done.returncode, 0, done.stderr)

    def test_help_says_which_dtypes_a_device_has(self):
        """What it says of the CPU is tried."""
        for command, small in (
            ("flash", SHORT),
            ("jit", [*SHORT, "--seq", "16"]),
            ("attention", SHORT),
            ("bench", TINY),
            ("memory", MODEL),
            ("trace", TINY),
        ):
            text = " ".join(self.succeed(command, "--help").split())
            said = re.search(r"--dtype=NAME (.*?)--", text)[1]
            self.assertIn("on cuda also", said)
            here, there = said.split("on cuda also")
            for dtype in ("f32", "bf16", "f16", "tf32"):
                with self.subTest(command=command, dtype=dtype):
                    where = here if re.search(rf"\b{dtype}\b", here) else there
                    self.assertRegex(where, rf"\b{dtype}\b")
                    self.assertEqual(run(command, *small, "--dtype", dtype).returncode, where is there)

    def test_mistakes_end_with_status_2(self):
        for args, message in [
            ("nonsense", "tandem: 'nonsense' is no command"),
            ("--nonsense", "unrecognized option '--nonsense'"),
            ("bench --nonsense", "tandem bench: unrecognized option '--nonsense'"),
            ("bench --steps", "option '--steps' requires an argument"),
            ("memory --pass backward", "--pass: 'backward' needs to be inference, forward or step"),
            ("memory --layer 12", "--layer: '12' needs to be below the model's 12 layers"),
            ("memory --top 0", "tandem memory: --top: '0' needs to be at least 1"),
            ("memory --snapshot=", "--snapshot: '' is no file name"),
            ("memory --update before", "--update: 'before' needs to be along or after"),
            ("memory --keep some", "--keep: 'some' needs to be all, most or inputs"),
            ("memory --checkpoint-layers 2", "--checkpoint-layers: '2' needs --keep inputs"),
            ("trace --top 0", "tandem trace: --top: '0' needs to be at least 1"),
            ("trace --trace=", "tandem trace: --trace: '' is no file name"),
            ("trace --timeline=", "tandem trace: --timeline: '' is no file name"),
            ("trace --timed twice", "tandem trace: --timed: 'twice' needs to be phases, events or whole"),
            ("trace --update along", "--update: 'along' needs --timed whole and --mode train"),
            ("trace --peak-tflops 1", "tandem trace: unrecognized option '--peak-tflops'"),
            ("trace --size huge", "'huge', needs small, medium"),
            ("trace extra", "tandem trace: 'extra' is one argument too many"),
            ("memory extra", "tandem memory: 'extra' is one argument too many"),
            ("bench --steps 0", "tandem bench: --steps: '0' needs to be at least 1"),
            ("bench --steps -3", "tandem bench: --steps: '-3' needs to be at least 1"),
            ("bench --steps ten", "tandem bench: --steps: 'ten' is no whole number"),
            ("bench --steps 10x", "tandem bench: --steps: '10x' is no whole number"),
            ("bench --steps 1e3", "tandem bench: --steps: '1e3' is no whole number"),
            ("bench --steps=", "tandem bench: --steps: '' is no whole number"),
            (
                "bench --steps 2147483648",
                "tandem bench: --steps: '2147483648' needs to be at most 2147483647",
            ),
            ("bench --steps 99999999999999999999", "'99999999999999999999' needs to be at most"),
            ("bench --steps -99999999999999999999", "'-99999999999999999999' needs to be at least 1"),
            ("bench --warmup -1", "tandem bench: --warmup: '-1' needs to be at least 0"),
            ("bench --batch 0", "--batch: '0' needs to be at least 1"),
            ("bench --context 0", "--context: '0' needs to be at least 1"),
            ("bench --d-model 0", "--d-model: '0'"),
            ("bench --d-ff 0", "--d-ff: '0'"),
            ("bench --layers 0", "--layers: '0'"),
            ("bench --heads 0", "--heads: '0'"),
            ("bench --heads 7", "--heads: '7' needs to divide --d-model, which is 768"),
            ("bench --vocab 0", "--vocab: '0'"),
            ("bench --seed -1", "--seed: '-1' needs to be at least 0"),
            ("bench --threads 0", "--threads: '0' needs to be at least 1"),
            ("bench --threads 99999", "--threads: '99999' needs to be at most 4096"),
            ("bench --size huge", "tandem bench: --size: "),
            ("bench --size Small", "'Small', needs small, medium, large, xl, 2.7B or 10B"),
            ("bench --mode sideways", "tandem bench: --mode: "),
            ("bench --dtype f8", "'f8' needs to be f32, tf32, bf16, f16 or bf16_mixed"),
            ("bench --dtype bf16_mix", "'bf16_mix' needs to be f32, tf32, bf16"),
            (
                "bench --update along --timed phases",
                "tandem bench: --update: 'along' needs --timed whole and --mode train",
            ),
            ("bench --update along --mode backward", "--update: 'along' needs --timed whole"),
            ("bench --update never", "tandem bench: --update: 'never' needs to be along or after"),
            ("bench --timed twice", "tandem bench: --timed: 'twice' needs to be phases, events or whole"),
            ("bench --keep some", "tandem bench: --keep: 'some' needs to be all, most or inputs"),
            ("bench --checkpoint-layers 2", "tandem bench: --checkpoint-layers: '2' needs --keep inputs"),
            (
                "bench --keep inputs --checkpoint-layers 13",
                "tandem bench: --checkpoint-layers: '13' needs at most the model's 12 layers",
            ),
            (
                "bench --micro-batches 2 --timed phases",
                "tandem bench: --micro-batches: '2' needs --timed whole",
            ),
            (
                "bench --micro-batches 2 --gradients transient",
                "tandem bench: --gradients: 'transient' cannot be added up over --micro-batches 2",
            ),
            ("bench --peak-tflops 0", "tandem bench: --peak-tflops: '0' needs to be above 0"),
            ("bench --gradients lost", "tandem bench: --gradients: 'lost' needs to be transient or held"),
            (
                "bench --attention fast",
                "tandem bench: --attention: attention is 'fast', needs naive, flash or jit",
            ),
            ("bench --device tpu", "tandem bench: --device: 'tpu' needs to be cpu, cuda or cuda:<index>"),
            ("bench --json=", "tandem bench: --json: '' is no file name"),
            ("bench small", "tandem bench: 'small' is one argument too many"),
            ("attention --seq 0", "tandem attention: --seq: '0' needs to be at least 1"),
            ("attention --seq 8,", "tandem attention: --seq: '' is no whole number"),
            ("attention --seq 8,,9", "tandem attention: --seq: '' is no whole number"),
            ("attention --seq " + "9" * 60, "needs to be at most 2147483647"),
            ("attention --seq " + ",".join(["1"] * 65), "tandem attention: --seq: more than 64 numbers"),
            ("attention --iters 0", "tandem attention: --iters: '0' needs to be at least 1"),
            ("attention 128", "tandem attention: '128' is one argument too many"),
            ("flash --head-dim 0", "tandem flash: --head-dim: '0' needs to be at least 1"),
            ("flash --batch 0", "tandem flash: --batch: '0' needs to be at least 1"),
            ("flash --heads 0", "tandem flash: --heads: '0' needs to be at least 1"),
            ("flash --warmup -1", "tandem flash: --warmup: '-1' needs to be at least 0"),
            ("flash --dtype int8", "tandem flash: --dtype: 'int8' needs to be f32, tf32, bf16 or f16"),
            ("flash --dtype f64", "tandem flash: --dtype: 'f64' needs to be f32, tf32, bf16 or f16"),
            ("attention --dtype bf16_mixed", "--dtype: 'bf16_mixed' needs to be f32, tf32, bf16 or f16"),
            ("jit --compiler=", "tandem jit: --compiler: '' is no name"),
            ("bench --cache=", "tandem bench: --cache: '' is no name"),
            ("flash --cache none", "tandem flash: unrecognized option '--cache'"),
            ("account --json=", "tandem account: --json: '' is no file name"),
            ("sizes --device cpu", "tandem sizes: unrecognized option '--device'"),
            ("precision --count -1", "tandem precision: --count: '-1' needs to be at least 0"),
            (
                "precision --count 10000001",
                "tandem precision: --count: '10000001' needs to be at most 10000000",
            ),
            ("precision --value one", "tandem precision: --value: 'one' is no number"),
            ("precision --value inf", "tandem precision: --value: 'inf' needs to be finite"),
            ("precision --value 1e999", "tandem precision: --value: '1e999' needs to be finite"),
            ("precision 3", "tandem precision: '3' is one argument too many"),
            ("allreduce 3", "tandem allreduce: '3' is one argument too many"),
            (
                "ddp --strategy fast",
                "tandem ddp: --strategy: 'fast' needs to be naive, flat, overlap or bucketed",
            ),
            ("ddp --bucket-mb -1", "tandem ddp: --bucket-mb: '-1' needs to be at least 0"),
            ("ddp --bucket-mb x", "tandem ddp: --bucket-mb: 'x' is no number"),
            (
                "ddp --strategy flat --bucket-mb 5",
                "tandem ddp: --bucket-mb: '5' needs --strategy bucketed",
            ),
            ("ddp --optimizer adam", "tandem ddp: --optimizer: 'adam' needs to be adamw or sgd"),
            ("ddp --kind flat", "tandem ddp: unrecognized option '--kind'"),
            ("ddp --steps 4097", "tandem ddp: --steps: '4097' needs to be at most 4096"),
            ("ddp --timeout 0", "tandem ddp: --timeout: '0' needs to be above 0 and at most 86400"),
            (
                "ddp --micro-batches 2 --gradients transient",
                "tandem ddp: --gradients: 'transient' cannot be added up over --micro-batches 2",
            ),
            ("ddp --checkpoint-layers 2", "--checkpoint-layers: '2' needs --keep inputs"),
            ("ddp 3", "tandem ddp: '3' is one argument too many"),
            ("shard --kind whole", "tandem shard: --kind: 'whole' needs to be tensors or flat"),
            ("shard --strategy naive", "tandem shard: --strategy: 'naive' needs --kind tensors"),
            (
                "shard --kind tensors --strategy naive --bucket-mb 1",
                "tandem shard: --bucket-mb: '1' needs --strategy bucketed",
            ),
            (
                "allreduce --backend smoke",
                "tandem allreduce: --backend: 'smoke' needs to be mpi, gloo or nccl",
            ),
            (
                "allreduce --dtype f8",
                "tandem allreduce: --dtype: 'f8' needs to be f32, f64, f16, bf16 or i64",
            ),
            (
                "allreduce --reduction min",
                "tandem allreduce: --reduction: 'min' needs to be sum, average or max",
            ),
            ("allreduce --mib 0", "tandem allreduce: --mib: '0' needs to be at least 1"),
            ("allreduce --bytes 6", "tandem allreduce: --bytes: '6' needs to be whole elements of f32"),
            ("allreduce --iters 0", "tandem allreduce: --iters: '0' needs to be at least 1"),
            (
                "allreduce --timeout 0",
                "tandem allreduce: --timeout: '0' needs to be above 0 and at most 86400",
            ),
            ("sizes --batch 0", "tandem sizes: --batch: '0' needs to be at least 1"),
            ("sizes --context x", "tandem sizes: --context: 'x' is no whole number"),
            ("sizes small", "tandem sizes: 'small' is one argument too many"),
            ("account everything", "tandem account: 'everything' is no section; there are parameters,"),
        ]:
            with self.subTest(args=args):
                self.refuse(2, message, *args.split(" "))

    def test_failures_end_with_status_1(self):
        self.refuse(1, "tandem bench: ", "bench", *TINY, "--dtype", "f16")
        self.refuse(1, "cuda", "bench", *TINY, "--device", "cuda:99")
        self.refuse(1, "flash attention on the cpu has f32 and bf16", "bench", *TINY, "--dtype", "f16")
        self.refuse(
            1, "tandem bench: ", "bench", "--d-model", "6", "--heads", "2", "--layers", "1"
        )  # odd head size
        self.refuse(
            1, "more than the machine's", "bench", "--size", "10B", "--batch", "4096", "--context", "2048"
        )
        done = run("flash", *SHORT, "--dtype", "f16")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"^tandem flash: .*f16")

    def test_records_that_cannot_be_written_are_refused_before_the_measurement(self):
        for command in (
            ["bench", *TINY, "--steps", "1000000000"],
            ["flash", *SHORT, "--iters", "1000000000"],
        ):
            for path, reason in (
                (self.folder / "missing" / "x.jsonl", "No such file or directory"),
                (self.folder, "Is a directory"),
            ):
                with self.subTest(command=command[0], reason=reason):
                    message = f"tandem {command[0]}: cannot open '{path}': {reason}"
                    self.refuse(1, message, *command, "--json", str(path))
            fifo = self.folder / "fifo"
            os.mkfifo(fifo)
            for path in ("/dev/full", fifo):
                message = f"tandem {command[0]}: cannot write '{path}': not a regular file"
                self.refuse(1, message, *command, "--json", str(path))
            fifo.unlink()
        self.assertEqual(list(self.folder.iterdir()), [])
        with self.json.open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            message = f"tandem flash: cannot write '{self.json}': another program has locked it"
            self.refuse(1, message, "flash", *SHORT, "--json", str(self.json))

    def test_records_on_standard_output(self):
        for command in (
            ["bench", *TINY],
            ["memory", *MODEL],
            ["flash", *SHORT, "--seq", "16"],
            ["attention", *SHORT, "--seq", "16"],
        ):
            with self.subTest(command=command[0]):
                done = run(*command, "--json", "-")
                self.assertEqual(done.returncode, 0, done.stderr)
                records = [json.loads(line) for line in done.stdout.splitlines()]
                passes = {"step"} if command[0] in ("bench", "memory") else {"forward", "backward"}
                self.assertEqual({record["case"]["pass"] for record in records}, passes)
                self.assertTrue(tables(done.stderr))
                self.assertNotIn("|", done.stdout)
                with open("/dev/full", "w") as full:
                    done = run(*command, "--json", "-", stdout=full)
                self.assertEqual(done.returncode, 1)
                said = f"tandem {command[0]}: standard output: No space left on device\n"
                self.assertEqual(done.stderr.count(said), 1)
        self.assertFalse(Path("-").exists())

    def test_rows_of_arithmetic_are_records(self):
        known = "memory_accounting attention_accounting ddp_overhead_model communication_accounting".split()
        known += "parallelism_calculations mixed_precision_accumulation benchmarking_mixed_precision".split()
        for command in (["sizes"], ["account"], ["precision"], ["precision", "--ops"]):
            with self.subTest(command=command):
                shown = run(*command)
                done = run(*command, "--json", "-")
                self.assertEqual((done.returncode, done.stderr), (0, shown.stdout))
                self.json.unlink(missing_ok=True)
                self.assertEqual(self.succeed(*command, "--json", str(self.json)), shown.stdout)
                records = [json.loads(line) for line in done.stdout.splitlines()]
                rows = [row for table in tables(shown.stdout) for row in table]
                self.assertEqual(len(records), len(rows))
                self.assertEqual([r["case"] for r in records], [r["case"] for r in self.records()])
                self.assertEqual(len({json.dumps(r["case"]) for r in records}), len(rows))
                for record, row in zip(records, rows, strict=True):
                    self.assertIn(record["deliverable"], known)
                    self.assertIn(record["module"], ("accounting", "precision"))
                    self.assertNotIn("machine", record)
                    self.assertRegex(record["build"]["library"], r"^[0-9a-f]{16}$")
                    cells = [*record["case"].values(), *record["values"].values()]
                    for cell in filter(None, row.values()):
                        with contextlib.suppress(ValueError):
                            cell = float(cell.replace(",", ""))
                        self.assertTrue(
                            any(found == cell or is_near(found, cell) for found in cells), f"{cell}: {cells}"
                        )
                with open("/dev/full", "w") as full:
                    self.assertEqual(run(*command, "--json", "-", stdout=full).returncode, 1)
                missing = self.folder / "missing" / "x.jsonl"
                message = f"tandem {command[0]}: cannot open '{missing}': No such file or directory"
                self.refuse(1, message, *command, "--json", str(missing))
        records = [json.loads(line) for line in run("sizes", "--json", "-").stdout.splitlines()]
        self.assertEqual(records[0]["case"], {"table": "sizes", "batch": 4, "context": 512, "size": "small"})
        self.assertEqual(records[0]["values"]["parameters"], 128625408)
        self.assertEqual(records[0]["values"]["forward_tflop"], 0.534)
        loops = [json.loads(line) for line in run("precision", "--json", "-").stdout.splitlines()]
        first = {"table": "loops", "count": 1000, "value": 0.01, "loop": 1}
        first |= {"accumulator": "f32", "addend": "f32", "method": "sequential"}
        self.assertEqual((loops[0]["case"], loops[0]["values"]["exactly"]), (first, 10.000133514404297))

    def test_compiled_code_is_kept(self):
        cache = self.folder / "cache"
        call = ["jit", *SHORT, "--seq", "16", "--cache", str(cache)]
        self.assertRegex(
            self.succeed(*call), r"\ncompiled 1 shape in \d+ ms, loaded 0 in [\d.]+ ms, found /\S+ .* in"
        )
        self.assertRegex(self.succeed(*call), r"\ncompiled 0 shapes in 0 ms, loaded 1 in [\d.]+ ms")
        [entry] = cache.iterdir()
        entry.write_text("no code")
        text = self.succeed(*call)
        self.assertRegex(text, r"compiled 1 shape")
        self.assertIn(f"note: '{entry}' is no compiled code, or was cut short", text)
        self.assertIn("compiled 1 shape ", self.succeed(*call[:-1], "none"))
        self.assertIn("note: cannot make", self.succeed(*call[:-1], str(entry / "below")))
        done = run(*call, "--compiler", "false")  # its table has begun
        self.assertEqual(done.returncode, 1)
        self.assertIn("tandem jit: compiler '/usr/bin/false' failed (1)", done.stderr)
        self.refuse(1, "no compiler 'no-such'", "bench", *TINY, "--attention", "jit", "--compiler", "no-such")

    def test_the_folder_of_compiled_code_is_the_users_own(self):
        home = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
        for variables, kept in (
            ({"XDG_CACHE_HOME": str(self.folder / "xdg"), "HOME": "/nowhere"}, "xdg/tandem"),
            ({"XDG_CACHE_HOME": "no/path", "HOME": str(self.folder)}, ".cache/tandem"),
            ({}, None),
        ):
            call = [program(), "jit", *SHORT, "--seq", "16"]
            done = subprocess.run(call, env=home | variables, capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stderr), (0, ""), variables)
            self.assertNotIn("note:", done.stdout)
            if kept:
                self.assertEqual(len(list((self.folder / kept).iterdir())), 1)

    def test_a_model_attends_in_every_way(self):
        """By the same weights and tokens the loss is the same."""
        losses = set()
        for attention in ("naive", "flash", "jit"):
            text = self.succeed("bench", *TINY, "--attention", attention)
            losses.add(re.search(r"loss ([\d.]+ to [\d.]+)", text)[1])
            self.assertEqual("\ncompiled 1 shape " in text, attention == "jit")
        self.assertEqual(len(losses), 1)
        text = self.succeed("memory", *MODEL, "--attention", "jit")
        self.assertRegex(text, r"the scores of a layer +\| never in memory")

    def test_full_disks_are_failures(self):
        with open("/dev/full", "w") as full:
            done = run("sizes", stdout=full)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr, "tandem sizes: standard output: No space left on device\n")
        for command in [[], *([name] for name in COMMANDS)]:
            for option in ("--help", "--usage", "--version"):
                with self.subTest(command=command, option=option), open("/dev/full", "w") as full:
                    done = run(*command, option, stdout=full)
                    self.assertEqual(done.returncode, 1)
                    said = " ".join(["tandem", *command]) + ": standard output: No space left on device\n"
                    self.assertEqual(done.stderr, said)

    def test_a_limit_on_the_size_of_files_is_a_failure_and_no_death(self):
        self.succeed("flash", *SHORT, "--seq", "16", "--json", str(self.json))
        whole = self.json.read_bytes()
        room = len(whole) + 10

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and what it starts would too

        done = subprocess.run(
            [program(), "flash", *SHORT, "--seq", "16", "--json", str(self.json)],
            capture_output=True,
            text=True,
            preexec_fn=limit,
            # Built for coverage, the program writes its counts at its end: those would be cut off too.
            env={**os.environ, "GCOV_PREFIX": str(self.folder)},
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"tandem flash: cannot write '{self.json}': File too large", done.stderr)
        self.assertTrue(tables(done.stdout))
        self.assertEqual(self.json.read_bytes(), whole)

    def test_progress_is_for_terminals_alone(self):
        for args, words in (
            (["bench", *TINY], r"step 4 of 4: \d+\.\d ms"),
            (["attention", *SHORT, "--seq", "16"], r"seq 16, backward 4 of 4: \d+\.\d\d ms"),
        ):
            with self.subTest(command=args[0]):
                self.succeed(*args)  # a pipe: asserts that standard error is empty
                ours, theirs = pty.openpty()
                child = subprocess.Popen([program(), *args], stdout=subprocess.PIPE, stderr=theirs, text=True)
                os.close(theirs)
                seen = b""
                while True:
                    try:
                        part = os.read(ours, 4096)
                    except OSError:  # the terminal's other end was closed
                        break
                    if not part:
                        break
                    seen += part
                os.close(ours)
                self.assertTrue(tables(child.communicate()[0]))
                self.assertEqual(child.returncode, 0)
                self.assertRegex(seen.decode(), words)
                self.assertTrue(seen.decode().endswith("\r\x1b[K"), "the line is wiped at the end")
                self.assertNotIn("\n", seen.decode())

    # ---- the commands ----

    def test_bench(self):
        for mode, timed, passes in (
            ("forward", "whole", ["inference"]),
            ("backward", "whole", ["step"]),
            ("train", "whole", ["step"]),
            ("forward", "phases", ["inference"]),
            ("backward", "phases", ["forward", "backward", "step"]),
            ("train", "phases", ["forward", "backward", "optimizer", "step"]),
            ("train", "events", ["forward", "backward", "optimizer", "step"]),
        ):
            with self.subTest(mode=mode, timed=timed):
                self.json.unlink(missing_ok=True)
                how = ["--mode", mode, *(["--timed", timed] if timed != "whole" else [])]
                text = self.succeed("bench", *TINY, *how, "--threads", "1", "--json", str(self.json))
                (rows,) = tables(text)
                self.assertEqual([row["pass"] for row in rows], passes)
                self.assertIn("custom: d_model 16, d_ff 24, layers 2, heads 2, vocab 17", text)
                self.assertEqual("loss" in text, mode != "forward")
                found = self.records()
                self.assertEqual([record["case"]["pass"] for record in found], passes)
                config = dict(attention="flash", graph=False, timed=timed)
                config |= dict(keep="all", gradients="transient") if mode != "forward" else {}
                update = "along" if timed == "whole" else "after"
                config |= dict(update=update) if mode == "train" else {}
                said = {"whole": "whole steps", "phases": "phases apart", "events": "phases by events"}[timed]
                self.assertIn(f"{said}, queued", text)
                self.assertEqual(f"weights updated {update} the backward pass" in text, mode == "train")
                for row, record in zip(rows, found, strict=True):
                    self.check_bench_record(row, record)
                    self.assertEqual(record["config"], config)

    def check_bench_record(self, row, record):
        case = dict(record["case"])
        self.assertEqual(case.pop("pass"), row["pass"])
        expected = {"d_model": 16, "d_ff": 24, "layers": 2, "heads": 2, "vocab": 17, "batch": 2, "context": 8}
        self.assertEqual(case, {**expected, "dtype": "f32", "attention": "flash", "warmup": 1})
        impl = "c_overlap" if record["config"].get("update") == "along" else "c"
        self.check_record(record, "benchmarking_script", "bench", row, impl)
        self.assertEqual(record["threads"], 1)
        tokens = 16 / (record["ms"]["median"] / 1e3)
        self.assertAlmostEqual(record["tokens_per_second"], tokens, delta=1e-9 * tokens)
        self.assertAlmostEqual(float(row["tokens/s"]), tokens, delta=0.51)

    def check_record(self, record, deliverable, module, row, impl="c"):
        self.assertEqual((record["deliverable"], record["module"]), (deliverable, module))
        self.assertEqual((record["impl"], record["status"]), (impl, "ok"))
        self.assertTrue(record["machine"])
        self.assertRegex(record["versions"]["tandem"], r"^\d+\.\d+\.\d+$")
        build, host = record["build"], record["host"]
        self.assertEqual([*build], ["version", "commit", "dirty", "library"])
        version = run("--version").stdout
        self.assertIn(f"tandem {build['version']}\ncommit {build['commit']}", version)
        self.assertEqual(build["dirty"], " with changes," in version)
        self.assertIn(f", build {build['library']}\n", version)
        self.assertEqual(record["machine"], f"{host['name']}, {host['cores']} threads")
        self.assertEqual(host["cores"], len(os.sched_getaffinity(0)))
        said = dict(re.findall(r"^(\w[\w ]*\w)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
        for key, name in (("cpu family", "family"), ("model", "model"), ("stepping", "stepping")):
            self.assertEqual(host.get(name), int(said[key]) if key in said else None)
        self.assertEqual("avx2" in host["isa"].split(), "avx2" in said.get("flags", "").split())
        self.assertRegex(record["time"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertGreater(record["peak_mib"], 0)
        ms, samples = record["ms"], sorted(record["samples"])
        self.assertEqual(ms["n"], 3)
        self.assertEqual(len(samples), 3)
        self.assertGreater(samples[0], 0)
        self.assertEqual((ms["min"], ms["median"], ms["max"]), tuple(samples))
        self.assertAlmostEqual(ms["mean"], sum(samples) / 3, places=9)
        for key in ("mean", "std", "median", "min"):
            self.assertAlmostEqual(float(row[f"{key} ms"]), ms[key], delta=0.00051)

    def test_bench_takes_every_attention_dtype_and_a_named_size(self):
        for dtype in ("f32", "bf16"):
            for attention in ("naive", "flash"):
                self.succeed(
                    "bench", *TINY, "--dtype", dtype, "--attention", attention, "--json", str(self.json)
                )
        found = self.records()
        self.assertEqual(len(found), 4)  # earlier lines stay
        self.assertEqual(
            [(r["case"]["dtype"], r["case"]["attention"]) for r in found],
            [("f32", "naive"), ("f32", "flash"), ("bf16", "naive"), ("bf16", "flash")],
        )
        self.assertNotIn("size", found[0]["case"])
        self.json.unlink()
        args = (
            "bench --batch 1 --context 4 --warmup 0 --steps 1 --mode forward --size small --layers 12".split()
        )
        self.assertIn("small: d_model 768", self.succeed(*args, "--json", str(self.json)))
        self.assertEqual(self.records()[0]["case"]["size"], "small")

    def test_bench_runs_the_step_as_it_is_told(self):
        printed = []
        default = dict(
            attention="flash", graph=False, timed="whole", keep="all", gradients="transient", update="along"
        )
        ways = [{}, {"keep": "most"}, {"gradients": "held"}, {"update": "after"}]
        ways += [{"keep": "inputs", "checkpoint_layers": layers} for layers in (1, 2)]
        for way in ways:
            options = [
                text for name, value in way.items() for text in (f"--{name.replace('_', '-')}", str(value))
            ]
            text = self.succeed("bench", *TINY, *options, "--queued", "--json", str(self.json))
            printed.append(re.search(r"peak memory ([\d.]+) MiB; (loss .*)", text).groups())
        self.assertEqual(len({loss for _, loss in printed}), 1)
        found = self.records()
        peaks = [record["peak_mib"] for record in found]
        self.assertEqual([record["config"] for record in found], [default | way for way in ways])
        self.assertEqual([record["impl"] for record in found], ["c_overlap"] * 3 + ["c"] + ["c_overlap"] * 2)
        self.assertEqual([f"{peak:.1f}" for peak in peaks], [peak for peak, _ in printed])
        self.assertEqual(len(set(peaks[:3])), 3)

    def test_bench_adds_micro_batches_up(self):
        text = self.succeed(
            "bench", *TINY, "--micro-batches", "3", "--peak-tflops", "0.5", "--json", str(self.json)
        )
        self.assertIn("; 3 micro-batches a step", text)
        (record,) = self.records()
        self.assertEqual(record["case"]["micro_batches"], 3)
        self.assertEqual(record["config"]["gradients"], "held")
        tokens = 3 * record["case"]["batch"] * record["case"]["context"]
        rate = tokens / (record["ms"]["median"] / 1e3)
        self.assertAlmostEqual(record["tokens_per_second"] / rate, 1)
        percent, asked = re.search(r"; ([\d.]+) % of 0.5 TFLOP/s, of ([\d.]+) GFLOP that", text).groups()
        self.assertAlmostEqual(float(asked), record["model_flops"] / 1e9, places=3)
        share = record["model_flops"] / (record["ms"]["median"] / 1e3) / 0.5e12
        self.assertAlmostEqual(float(percent), 100 * share, delta=0.0051)
        # 3 forward passes of products: 2 a weight of the linears, of attention what the mask leaves.
        d, f, vocab, layers = 16, 24, 17, 2
        context = record["case"]["context"]
        products = tokens * 2 * (layers * (4 * d * d + 3 * d * f) + d * vocab)
        products += 0.5 * layers * 4 * tokens * context * d
        self.assertEqual(record["model_flops"], 3 * products)

    def test_records_name_what_limits_the_processor(self):
        limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
        subprocess.run(
            [program(), "bench", *TINY, "--json", str(self.json)],
            check=True,
            stdout=subprocess.DEVNULL,
            env=limited,
        )
        self.assertEqual(self.records()[0]["host"]["limits"]["ONEDNN_MAX_CPU_ISA"], "AVX2")

    def test_bench_without_the_memory_leaves_records(self):
        args = "bench --size 10B --batch 4096 --context 2048 --mode backward --json".split()
        done = run(*args, str(self.json))
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertEqual([r["status"] for r in self.records()], ["oom"])
        self.assertNotIn("ms", self.records()[0])

    def test_memory(self):
        """Tables and records say the same, and the tables what the switches ask for."""
        for name, how in (
            ("inference", ["--pass", "inference"]),
            ("forward", ["--pass", "forward", "--attention", "naive"]),
            ("step", ["--update", "after", "--gradients", "held"]),
            ("step", ["--keep", "inputs", "--dtype", "bf16_mixed"]),
        ):
            with self.subTest(how=how):
                self.json.unlink(missing_ok=True)
                text = self.succeed("memory", *MODEL, *how, "--threads", "1", "--json", str(self.json))
                self.assertIn("custom: d_model 16, d_ff 24, layers 2, heads 2, vocab 17", text)
                peaks, largest, sizes, *saved = tables(text)
                (record,) = self.records()
                values = record["values"]
                after = "after" in how
                phases = {"inference": 2, "forward": 2, "step": 4 if after else 3}[name]
                names = ["create", "forward", "backward", "optimizer"][:phases]
                self.assertEqual([row["phase"] for row in peaks], [*names, "all"])
                self.assertEqual([key[8:] for key in values if key.startswith("peak_in_")], names)
                self.assertEqual(record["impl"], "c_overlap" if name == "step" and not after else "c")
                self.assertEqual((record["deliverable"], record["module"]), ("memory_profiling", "memory"))
                self.assertEqual(record["case"]["pass"], name)
                self.assertEqual(
                    record["config"].get("update"), {"step": "after" if after else "along"}.get(name)
                )
                self.assertEqual(self.parts(values, "allocated_"), values["peak_bytes"])
                self.assertEqual(self.parts(values, "live_"), values["live_bytes"])
                self.assertEqual(float(peaks[-1]["blocks"]), round(values["peak_bytes"] / 2**20, 2))
                self.assertEqual(float(peaks[-1]["tensors"]), round(values["live_bytes"] / 2**20, 2))
                self.assertEqual(values["peak_bytes"] / 2**20, record["peak_mib"])
                self.assertEqual(values["residual_bytes"], 2 * 8 * 16 * 4)
                scores = "naive" in how
                self.assertEqual(values["scores_bytes"], 2 * 2 * 8 * 8 * 4 if scores else 0)
                self.assertEqual(sizes[1]["MiB"], "0.001" if scores else "never in memory")
                self.assertEqual(values["saved_bytes"] > 0, name != "inference")
                self.assertEqual(len(saved), 1 if name != "inference" else 0)
                self.assertEqual({row["phase"] for row in largest} <= set(names), True)

    def parts(self, values, what):
        """The sum over the five categories."""
        categories = ("weights", "gradients", "optimizer_state", "activations", "scratch")
        return sum(values[what + category] for category in categories)

    def test_memory_files_are_whole_or_not_there(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and what it starts would too

        kinds = ("snapshot", "events", "timeline")
        files = [self.folder / kind for kind in kinds]
        options = [word for kind, file in zip(kinds, files, strict=True) for word in (f"--{kind}", str(file))]
        self.succeed("memory", *MODEL, *options)
        whole = [file.read_bytes() for file in files]
        self.assertTrue(all(len(data) > 1000 for data in whole))
        self.assertEqual(sorted(self.folder.iterdir()), sorted(files))
        for kind, file in zip(kinds, files, strict=True):
            # A limit on a file's size is what a full disk is: an error of the write.
            done = subprocess.run(
                [program(), "memory", *MODEL, f"--{kind}", str(file)],
                capture_output=True,
                text=True,
                preexec_fn=limit,
                check=False,
                env={**os.environ, "GCOV_PREFIX": "/dev/null"},  # whose counts would be cut off, too
            )
            self.assertEqual(done.returncode, 1)
            said = done.stderr.splitlines()[0]
            self.assertRegex(said, rf"^tandem memory: cannot write '{file}.*': File too large$")
            self.refuse_to_write(kind, "/no/such/folder/file", "No such file or directory")
            self.refuse_to_write(kind, "/dev/full", "not a regular file")
        self.assertEqual([file.read_bytes() for file in files], whole)
        self.assertEqual(sorted(self.folder.iterdir()), sorted(files))

    def refuse_to_write(self, kind, path, reason):
        done = run("memory", *MODEL, f"--{kind}", path)
        self.assertEqual(done.returncode, 1)
        self.assertIn("tandem memory: cannot ", done.stderr)
        self.assertIn(path, done.stderr)
        self.assertIn(reason, done.stderr)

    def test_memory_killed_in_the_middle_leaves_no_half_file(self):
        file = self.folder / "snapshot"
        for wait in (0.0, 0.02, 0.05, 0.1, 0.2):
            file.write_bytes(b"old")
            child = subprocess.Popen(
                [program(), "memory", *MODEL, "--layers", "500", "--snapshot", str(file)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait)
            child.kill()
            child.wait()
            data = file.read_bytes()
            self.assertTrue(data == b"old" or isinstance(pickle.loads(data), dict))

    def test_memory_without_the_memory_leaves_a_record(self):
        done = run(
            "memory", "--size", "10B", "--batch", "4096", "--context", "2048", "--json", str(self.json)
        )
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        (record,) = self.records()
        self.assertEqual(record["status"], "oom")
        self.assertNotIn("values", record)

    def test_trace(self):
        """Tables and records say the same, and the tables what the model is made of."""
        for how in (
            ["--attention", "naive"],
            ["--timed", "whole", "--dtype", "bf16_mixed"],
            ["--mode", "forward"],
            ["--mode", "backward", "--keep", "inputs"],
        ):
            with self.subTest(how=how):
                self.json.unlink(missing_ok=True)
                text = self.succeed("trace", *TINY, *how, "--top", "3", "--json", str(self.json))
                records = self.records()
                times, *rest = tables(text)
                names = ["forward", "backward", "optimizer", "step"]
                if "forward" in how:
                    names = ["inference"]
                elif "whole" in how:
                    names = ["step"]
                elif "backward" in how:
                    names = ["forward", "backward", "step"]
                self.assertEqual([row["pass"] for row in times], names)
                self.assertEqual([record["case"]["pass"] for record in records], names)
                for row, record in zip(times, records, strict=True):
                    values = record["values"]
                    self.assertEqual((record["deliverable"], record["module"]), ("nsys_profile", "trace"))
                    self.assertEqual(float(row["timer ms"]), round(record["ms"]["median"], 3))
                    self.assertEqual(float(row["events ms"]), round(values["events_ms"], 3))
                    self.assertEqual(values["events_ms"] == record["ms"]["median"], "whole" in how)
                    self.assertEqual(float(row["traced events ms"]), round(values["traced_ms"], 3))
                    self.assertEqual(float(row["window ms"]), round(values["window_ms"], 3))
                    self.assertLessEqual(values["busy_ms"], values["window_ms"] * (1 + 1e-9))
                    parts = sum(values[key] for key in values if key.startswith("ms_"))
                    self.assertAlmostEqual(parts / values["sum_ms"], 1)
                    self.assertEqual(values["dropped"] + values["without_times"], 0)
                    self.assertEqual(values["activities"], int(values["activities"]))
                # Two layers of four, the head, and of naive attention one for scores and two for values.
                products = 2 * 4 + 1 + (2 * 3 if "naive" in how else 0)
                self.assertIn(f"Forward has {products} products of matrices", text)
                first = records[0]["values"]
                if "forward" in how:
                    self.assertEqual(first["products"], products)
                self.assertEqual("attention_ms_softmax" in first, "naive" in how)
                self.assertEqual("attention_ms_fused" in first, "naive" not in how)
                kernels = [table for table in rest if "Instances/pass" in table[0]]
                self.assertEqual(len(kernels), 1 if "forward" in how else 3 if "backward" in how else 4)
                self.assertEqual(list(kernels[0][0])[:9], SUMMARY)
                self.assertTrue(all(len(table) <= 3 for table in kernels))
                self.assertIn("; 0 without a range, 0 without times, 0 dropped", text)

    def test_trace_files_are_whole_or_not_there(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

        kinds = ("trace", "timeline")
        files = [self.folder / kind for kind in kinds]
        options = [word for kind, file in zip(kinds, files, strict=True) for word in (f"--{kind}", str(file))]
        self.succeed("trace", *TINY, *options)
        whole = [file.read_bytes() for file in files]
        events = json.loads(whole[0])["traceEvents"]
        self.assertEqual({event["ph"] for event in events}, {"M", "X"})
        steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep")]
        self.assertEqual(steps, [f"ProfilerStep#{i}" for i in range(len(steps))])
        self.assertIn(b"<title>backward: ", whole[1])
        for kind, file in zip(kinds, files, strict=True):
            done = subprocess.run(
                [program(), "trace", *TINY, f"--{kind}", str(file)],
                capture_output=True,
                text=True,
                preexec_fn=limit,
                check=False,
                env={**os.environ, "GCOV_PREFIX": "/dev/null"},
            )
            self.assertEqual(done.returncode, 1)
            said = done.stderr.splitlines()[0]
            self.assertRegex(said, rf"^tandem trace: cannot write '{file}.*': File too large$")
            done = run("trace", *TINY, f"--{kind}", "/no/such/folder/file")
            self.assertEqual(done.returncode, 1)
            self.assertIn("No such file or directory", done.stderr)
        self.assertEqual([file.read_bytes() for file in files], whole)
        self.assertEqual(sorted(self.folder.iterdir()), sorted(files))

    def test_trace_killed_in_the_middle_leaves_no_half_file(self):
        file = self.folder / "trace"
        for wait in (0.0, 0.05, 0.1, 0.2):
            file.write_bytes(b"old")
            child = subprocess.Popen(
                [program(), "trace", *TINY, "--layers", "100", "--trace", str(file)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait)
            child.kill()
            child.wait()
            data = file.read_bytes()
            self.assertTrue(data == b"old" or json.loads(data)["traceEvents"])

    def test_trace_without_the_memory_leaves_records(self):
        args = "trace --size 10B --batch 4096 --context 2048 --mode backward --json".split()
        done = run(*args, str(self.json))
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertEqual([r["status"] for r in self.records()], ["oom"] * 3)
        self.assertNotIn("values", self.records()[0])

    def test_attention_and_flash(self):
        for command, deliverable in (("attention", "pytorch_attention"), ("flash", "flash_benchmarking")):
            for flags in ([], ["--causal"], ["--dtype", "bf16"]):
                with self.subTest(command=command, flags=flags):
                    self.json.unlink(missing_ok=True)
                    text = self.succeed(command, *SHORT, *flags, "--seq", "16,33", "--json", str(self.json))
                    (rows,) = tables(text)
                    passes = [("16", "forward"), ("16", "backward"), ("33", "forward"), ("33", "backward")]
                    self.assertEqual([(row["seq"], row["pass"]) for row in rows], passes)
                    for row, record in zip(rows, self.records(), strict=True):
                        self.check_record(record, deliverable, command, row)
                        expected = {
                            "batch": 2,
                            "heads": 3,
                            "seq": int(row["seq"]),
                            "head_dim": 8,
                            "warmup": 1,
                        }
                        expected["dtype"] = "bf16" if "bf16" in flags else "f32"
                        expected["causal"] = "--causal" in flags
                        self.assertEqual(record["case"], {**expected, "pass": row["pass"]})
                        flops = 4 * 6 * expected["seq"] ** 2 * 8 * (0.5 if expected["causal"] else 1)
                        flops *= 2.5 if row["pass"] == "backward" else 1
                        tflops = flops / record["ms"]["median"] / 1e9
                        self.assertAlmostEqual(record["tflops"], tflops, delta=1e-9 * tflops)
                        saved = 6 * expected["seq"] * (expected["seq"] if command == "attention" else 1)
                        saved *= 2 if command == "attention" and expected["dtype"] == "bf16" else 4
                        self.assertGreaterEqual(float(row["saved MiB"]), saved / 2**20 - 0.0006)

    def test_attention_without_the_memory_is_a_row(self):
        args = [*"attention --seq 16,4000000 --warmup 0 --iters 1 --json".split(), str(self.json)]
        (rows,) = tables(self.succeed(*args))
        self.assertEqual([row["mean ms"] == "oom" for row in rows], [False, False, True, True])
        self.assertEqual([r["status"] for r in self.records()], ["ok", "ok", "oom", "oom"])

    def test_precision(self):
        loops, toy = tables(self.succeed("precision"))
        sums = {(row["accumulator"], row["addend"], row["method"]): row for row in loops}
        self.assertEqual([row["sum"] for row in loops[:4]], ["10.0001", "9.9531", "10.0021", "10.0021"])
        exactly = ["10.000133514404297", "9.953125", "10.00213623046875", "10.00213623046875"]
        self.assertEqual([row["exactly"] for row in loops[:4]], exactly)
        self.assertEqual(sums["bf16", "bf16", "sequential"]["sum"], "4.0000")
        self.assertIn("stalls after 350", sums["bf16", "bf16", "sequential"].values())
        self.assertEqual(sums["bf16", "bf16", "Kahan"]["exactly"], "10")
        self.assertEqual(len(toy), 12)
        self.assertEqual(
            list(toy[0].values()),
            ["CUDA", "f16", "cross_entropy_loss", "f32", "f16", "f16", "f32", "f16", "f32", "f32"],
        )
        few = tables(self.succeed("precision", "--count", "3", "--value", "-0.5"))[0]
        self.assertEqual({row["exactly"] for row in few}, {"-1.5"})
        (ops,) = tables(self.succeed("precision", "--ops"))
        found = {(row["device"], row["operation"]): row["rule"] for row in ops}
        self.assertEqual(len(found), len(ops))
        self.assertEqual(found["CUDA", "layer_norm"], "f32")
        self.assertNotIn(("CPU", "layer_norm"), found)

    def test_sizes(self):
        (rows,) = tables(self.succeed("sizes"))
        self.assertEqual([row["size"] for row in rows], ["small", "medium", "large", "xl", "2.7B", "10B"])
        self.assertEqual(rows[0]["parameters"], "128,625,408")
        self.assertEqual(rows[4]["head_dim"], "80")
        self.assertEqual([row["forward TFLOP"] for row in rows][:2], ["0.534", "1.794"])
        (rows,) = tables(self.succeed("sizes", "--batch", "8", "--context", "512"))
        self.assertEqual(rows[0]["forward TFLOP"], "1.068")

    def test_account(self):
        whole = self.succeed("account")
        for figure in (
            "3,406,809,600", "12995.95", "14.192", "50.77", "8,125,698,048", "219,848,638,464", "17,547,264",
            "2555.6", "20444", "10222", "25302", "61.3", "89.4", "235.1", "16512",
        ):  # fmt: skip
            self.assertIn(figure, whole)
        sections = "parameters flops activations training attention ddp xxl parallel operations".split()
        self.assertEqual("".join(self.succeed("account", name) for name in sections), whole)
        self.assertEqual(self.succeed("account", "xxl", "ddp"), self.succeed("account", "ddp", "xxl"))
        self.assertTrue(all(tables(whole)))


if __name__ == "__main__":
    main()
