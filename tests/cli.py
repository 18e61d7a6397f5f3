"""The program `tandem` as a whole: help and version, every mistake and failure it must name, files and progress.
cli_commands.py tests each command, and cli_ranks.py tests commands with several ranks.

Run by CTest as  python3 cli.py PATH_OF_TANDEM ; Python's standard library is all it needs.
"""

import json
import os
import pty
import re
import subprocess

from cli_kit import MODEL, SHORT, TINY, Cli, main, program, run, tables

COMMANDS = [
    "bench",
    "attention",
    "flash",
    "trace",
    "memory",
    "precision",
    "sizes",
    "account",
    "allreduce",
]
COMMANDS += ["ddp", "shard"]


class Program(Cli):
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
                self.assertNotRegex(text, r"(?m)^ \w.*:\n\n", "a heading without an option under it")
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
        listed = re.findall(
            r"^  (\w+)  +\w", self.succeed("--help").partition("\nExamples:")[0], re.MULTILINE
        )
        self.assertEqual(sorted(listed), sorted(COMMANDS))
        self.assertIn(f"'benchh' is no command; there are {', '.join(listed)}\n", run("benchh").stderr)

    def test_every_help_has_examples_that_run(self):
        small = {"bench": TINY, "flash": [*SHORT, "--seq", "16"], "attention": [*SHORT, "--seq", "16"]}
        small |= {"memory": MODEL, "trace": TINY, "ddp": TINY, "shard": TINY}
        for command in [[], *([name] for name in COMMANDS)]:
            text = self.succeed(*command, "--help")
            shown = text.partition("\nExamples:\n")[2]
            self.assertRegex(shown, r"\A(  \S.*\n)+\Z")  # none is broken into two lines
            examples = re.findall(r"^  (tandem (\w+) .*)$", shown, re.MULTILINE)
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
        """The dtypes that the help lists for the CPU are tried."""
        for command, small in (
            ("flash", SHORT),
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
            ("memory --keep some", "--keep: 'some' needs to be all, most, inputs or attention"),
            ("memory --checkpoint-layers 2", "--checkpoint-layers: '2' needs --keep inputs or attention"),
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
            ("bench --size Small", "'Small', needs small, medium, large, xl, 2.7B, 8B or 10B"),
            ("bench --mode sideways", "tandem bench: --mode: "),
            ("bench --dtype f8", "'f8' needs to be f32, tf32, bf16, f16 or bf16_mixed"),
            ("bench --dtype bf16_mix", "'bf16_mix' needs to be f32, tf32, bf16"),
            (
                "bench --update along --timed phases",
                "tandem bench: --update: 'along' needs --timed whole and --mode train",
            ),
            ("bench --update along --mode backward", "--update: 'along' needs --timed whole"),
            ("bench --update-sms -1", "tandem bench: --update-sms: '-1' needs to be at least 0"),
            ("bench --update never", "tandem bench: --update: 'never' needs to be along or after"),
            ("bench --timed twice", "tandem bench: --timed: 'twice' needs to be phases, events or whole"),
            ("bench --keep some", "tandem bench: --keep: 'some' needs to be all, most, inputs or attention"),
            (
                "bench --checkpoint-layers 2",
                "tandem bench: --checkpoint-layers: '2' needs --keep inputs or attention",
            ),
            (
                "bench --keep attention --kept-layers 13",
                "tandem bench: --kept-layers: '13' needs at most the model's 12 layers",
            ),
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
                "tandem bench: --attention: attention is 'fast', needs flash or naive",
            ),
            ("bench --device tpu", "tandem bench: --device: 'tpu' needs to be cpu, cuda or cuda:<index>"),
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
            ("ddp --ctas 65", "tandem ddp: --ctas: '65' needs to be at most 64"),
            ("allreduce --ctas -1", "tandem allreduce: --ctas: '-1' needs to be at least 0"),
            ("ddp --optimizer adam", "tandem ddp: --optimizer: 'adam' needs to be adamw or sgd"),
            ("ddp --kind flat", "tandem ddp: unrecognized option '--kind'"),
            ("ddp --timeout 0", "tandem ddp: --timeout: '0' needs to be above 0 and at most 86400"),
            (
                "ddp --micro-batches 2 --gradients transient",
                "tandem ddp: --gradients: 'transient' cannot be added up over --micro-batches 2",
            ),
            ("ddp --keep most --kept-layers 2", "--kept-layers: '2' needs --keep inputs or attention"),
            ("ddp --checkpoint-layers 2", "--checkpoint-layers: '2' needs --keep inputs or attention"),
            ("ddp 3", "tandem ddp: '3' is one argument too many"),
            ("shard --kind whole", "tandem shard: --kind: 'whole' needs to be tensors, flat or full"),
            ("shard --strategy naive", "tandem shard: --strategy: 'naive' needs --kind tensors"),
            ("shard --keep-weights", "tandem shard: --keep-weights needs --kind full"),
            (
                "shard --kind full --bucket-mb 1",
                "tandem shard: --bucket-mb: '1' needs --kind flat or tensors",
            ),
            ("shard --kind full --prefetch 0", "tandem shard: --prefetch: '0' needs to be"),
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
            1,
            "but the machine or a control group allows",
            "bench",
            "--size",
            "10B",
            "--batch",
            "4096",
            "--context",
            "2048",
        )
        self.refuse(1, "tandem bench: update_sms is 8, but cpu", "bench", *TINY, "--update-sms", "8")
        self.refuse(1, "tandem ddp: update_sms is 8, but cpu", "ddp", *TINY, "--update-sms", "8")
        self.refuse(1, "tandem flash: dtype is f16", "flash", *SHORT, "--dtype", "f16")
        self.refuse(1, "but the machine or a control group allows", "allreduce", "--mib", "1000000")

    def test_files_that_cannot_be_written_are_refused_before_the_measurement(self):
        step = ["trace", *TINY, "--steps", "1000000000"]
        for command, options in (
            (step, ("trace", "timeline")),
            (["memory"], ("snapshot", "events", "timeline")),
        ):
            for option in options:
                for path, reason in (
                    ("/no/such/folder/file", "No such file or directory"),
                    ("/dev/full", "not a regular file"),
                    (str(self.folder), "not a regular file"),
                ):
                    message = f"tandem {command[0]}: cannot write '{path}': {reason}"
                    self.refuse(1, message, *command, f"--{option}", path)

    def test_files_of_one_name_are_refused(self):
        there, link, new = self.folder / "there", self.folder / "link", self.folder / "new"
        there.write_text('{"old": 1}\n')
        link.symlink_to(there)
        for first, second in (
            (there, there),
            (there, link),
            (new, self.folder / ".." / self.folder.name / "new"),
        ):
            for options in (("trace", "trace", "timeline"), ("memory", "events", "snapshot")):
                message = f"tandem {options[0]}: --{options[1]} and --{options[2]} name the same file"
                words = [
                    f"--{option}={path}" for option, path in zip(options[1:], (first, second), strict=True)
                ]
                if options[0] == "memory":
                    message = message.replace("events and --snapshot", "snapshot and --events")
                self.refuse(1, message, *options[:1], *words)
        self.assertEqual(there.read_text(), '{"old": 1}\n')

    def test_rows_are_json(self):
        """They come on standard output, each with all of its numbers' digits, and tables on standard error."""
        for command in (
            ["bench", *TINY],
            ["memory", *MODEL],
            ["trace", *TINY],
            ["flash", *SHORT, "--seq", "16"],
            ["attention", *SHORT, "--seq", "16"],
            ["sizes"],
            ["account"],
            ["precision"],
            ["precision", "--ops"],
        ):
            with self.subTest(command=command[0]):
                self.rows(*command)
                with open("/dev/full", "w") as full:
                    done = run(*command, "--json", stdout=full)
                self.assertEqual(done.returncode, 1)
                said = f"tandem {command[0]}: standard output: No space left on device\n"
                self.assertEqual(done.stderr.count(said), 1)
        sizes, _ = self.rows("sizes")
        self.assertEqual(
            (sizes[0]["size"], sizes[0]["parameters"], sizes[4]["size"]), ("small", 128625408, "2.7B")
        )
        self.assertEqual(sizes[0]["f32_mib"], 128625408 * 4 / 2**20)  # not as printed: 490.67
        self.assertEqual(self.rows("precision")[0][0]["sum"], 10.000133514404297)
        lines = [json.loads(line) for line in run("account", "ddp", "--json").stdout.splitlines()]
        self.assertEqual({line["table"] for line in lines}, {"ddp", "ring"})
        odd = os.fsencode(self.folder) + b'/\xff"\n'
        line = json.loads(run("memory", *MODEL, "--json", "--events", odd).stdout.splitlines()[0])
        self.assertEqual(line["argv"][-1], f'{self.folder}/?"\n')

    def test_a_row_comes_before_the_next_length_is_measured(self):
        command = [program(), "flash", *SHORT, "--seq", "16,4096", "--iters", "3000", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tandem:
            row = json.loads(tandem.stdout.readline())["row"]
            self.assertEqual((row["seq"], tandem.poll()), (16, None))
            tandem.kill()

    def test_a_model_attends_in_every_way(self):
        """The same weights and tokens give the same loss."""
        losses = set()
        for attention in ("naive", "flash"):
            text = self.succeed("bench", *TINY, "--attention", attention)
            losses.add(re.search(r"loss ([\d.]+ to [\d.]+)", text)[1])
        self.assertEqual(len(losses), 1)
        text = self.succeed("memory", *MODEL, "--attention", "flash")
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


if __name__ == "__main__":
    main()
