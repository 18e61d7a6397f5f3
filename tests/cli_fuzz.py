"""Hostile command lines: `tandem` always ends with exit status 0, 1 or 2, and prints a reason.

    cli_fuzz.py PATH_OF_TANDEM SECONDS [--limit-memory]

Cases are drawn from TANDEM_FUZZ_SEED (default 1) for TANDEM_FUZZ_SECONDS (default SECONDS). A failure prints the seed
of its case: with it and TANDEM_FUZZ_SECONDS=0 the case runs alone. --limit-memory lets some runs have too little
address space, which a sanitizer would not survive.
"""

import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

LONGEST_S = 60  # the limit of one run; the slowest runs took a few seconds
NUMBERS = [
    *"0 -1 1 2 3 1e3 1.5 +4 0x10 nan inf -inf 1e999 -0 007 2147483648 4294967297 9223372036854775807".split(),
    *"9223372036854775808 -9223372036854775809 99999999999999999999999 %s%n 1,2 , 1, 5x x5 -- -".split(),
    *["", " 5", "5 ", "\t1", "\u0663", "9" * 5000, b"\xff\xfe"],
]
LARGEST = "2147483647"  # this size is accepted, and then needs more memory than the run may have
SIZES = [*NUMBERS, LARGEST]
LISTS = [*NUMBERS, "1,2,3", "16,33", ",".join(["1"] * 65), ",".join(["2"] * 64), "1,,2"]
NAMES = [
    *"whole phases along after all most transient held bf16_mixed".split(),
    *"10B f32 bf16 f16 f64 tf32 naive flash cpu cuda cuda:0 cuda:-1 cuda:x train forward Small %n%s ../.. -".split(),
    *["", " ", "a" * 3000, b"\xff\xc0\x80", "\n", "cpu\n"],
]
MODEL = {
    **dict.fromkeys("--d-ff --d-model --heads --vocab --batch --context".split(), SIZES),
    **dict.fromkeys("--layers --seed --steps --warmup".split(), NUMBERS),
    **dict.fromkeys("--attention --dtype --size --mode --timed --update --keep --gradients".split(), NAMES),
}
ATTEND = {
    **dict.fromkeys("--batch --head-dim --heads".split(), SIZES),
    **dict.fromkeys("--iters --warmup".split(), NUMBERS),
    "--seq": LISTS,
    "--dtype": NAMES,
}
MACHINE = {"--device": NAMES, "--threads": [*NUMBERS, "64"]}
FLAGS = [
    *"--queued --causal --ops --help --usage --version -?".split(),
    *["-V", "-x", "--", "-", "--nonsense", "--he", "extra", "\xe9", b"\xff"],
]
SMALL_MODEL = (
    "--d-model 16 --d-ff 24 --layers 2 --heads 2 --vocab 17 --batch 2 --context 8 --warmup 1 --steps 2"
)
FILES = ["x", "", "missing/x", "/dev/full", "/dev/null", "."]
RECORDED = {
    **{
        name: MODEL[name]
        for name in MODEL
        if name not in ("--mode", "--seed", "--steps", "--timed", "--warmup")
    },
    **dict.fromkeys("--top --layer --checkpoint-layers --kept-layers".split(), NUMBERS),
    "--pass": [*NAMES, "inference", "forward", "step"],
    **dict.fromkeys("--snapshot --events --timeline".split(), FILES),
}
TRACED = {
    **{name: MODEL[name] for name in MODEL if name != "--peak-tflops"},
    "--top": NUMBERS,
    **dict.fromkeys("--trace --timeline".split(), FILES),
}
SMALL_RECORDED = SMALL_MODEL.partition(" --warmup")[0]
RANKED = {
    **{name: MODEL[name] for name in MODEL if name not in ("--mode", "--timed")},
    **dict.fromkeys(
        "--bucket-mb --micro-batches --checkpoint-layers --kept-layers --timeout".split(), NUMBERS
    ),
    "--optimizer": [*NAMES, "adamw", "sgd"],
    "--backend": [*NAMES, "gloo", "mpi"],
}
SMALL_ATTEND = "--batch 2 --heads 3 --head-dim 8 --seq 9 --warmup 1 --iters 2"
COMMANDS = {
    "bench": ({**MODEL, **MACHINE}, SMALL_MODEL),
    "attention": ({**ATTEND, **MACHINE}, SMALL_ATTEND),
    "flash": ({**ATTEND, **MACHINE}, SMALL_ATTEND),
    "memory": ({**RECORDED, **MACHINE}, SMALL_RECORDED),
    "trace": ({**TRACED, **MACHINE}, SMALL_MODEL),
    "ddp": ({**RANKED, "--strategy": [*NAMES, "overlap", "bucketed"], **MACHINE}, SMALL_MODEL),
    "shard": (
        {**RANKED, "--kind": [*NAMES, "tensors", "full"], "--prefetch": NUMBERS, **MACHINE},
        SMALL_MODEL,
    ),
    "precision": ({"--count": NUMBERS, "--value": NUMBERS}, "--count 50"),
    "sizes": ({"--batch": SIZES, "--context": SIZES}, ""),
    "account": ({}, ""),
}
SECTIONS = "parameters flops activations training fsdp attention ddp xxl parallel operations nothing".split()
ENVIRONMENT = {
    "COLUMNS": ["1", "-1", "x"],
    "ARGP_HELP_FMT": ["rmargin=60", "garbage", ""],
    "LC_ALL": ["C", "tr_TR.UTF-8", "x"],
    "OMP_NUM_THREADS": ["1", "0", "x", ""],
    "TERM": ["", "dumb"],
    "HOME": [""],
}


class Case:
    """One run: its random arguments, and the checks of its result."""

    def __init__(self, seed: int, folder: Path, limit_memory: bool):
        self.draw = random.Random(seed)
        self.folder = folder
        self.environment = {
            k: self.draw.choice(v) for k, v in ENVIRONMENT.items() if self.draw.random() < 0.1
        }
        self.stdout = self.draw.choices(["pipe", "closed", "full", "file"], [70, 10, 10, 10])[0]
        self.args = self.draw_arguments()
        large = any(isinstance(arg, str) and LARGEST in arg for arg in self.args)
        if large and not limit_memory:
            self.args = [arg.replace(LARGEST, "2") if isinstance(arg, str) else arg for arg in self.args]
        limited = limit_memory and (large or self.draw.random() < 0.2)
        self.limit = self.draw.choice([256 << 20, 1 << 30]) if limited else None

    def draw_arguments(self) -> list:
        draw = self.draw
        if draw.random() < 0.05:
            return [draw.choice([*NAMES, *NUMBERS, *FLAGS]) for _ in range(draw.randrange(4))]
        command = draw.choice(list(COMMANDS))
        options, base = COMMANDS[command]
        args = base.split()
        for _ in range(draw.choice([0, 1, 1, 2, 3, 6])):
            if options and draw.random() < 0.7:
                name = draw.choice(list(options))
                value = draw.choice(options[name])
                if isinstance(value, str) and draw.random() < 0.5:
                    args.append(f"{name}={value}")
                else:
                    args += [name, value] if draw.random() < 0.95 else [name]
            else:
                args.append(draw.choice(FLAGS))
        if command == "account" and draw.random() < 0.5:
            args += draw.choices(SECTIONS, k=draw.randrange(1, 4))
        if draw.random() < 0.5:
            args.append("--json")
        return [command, *args]

    def __str__(self):
        words = " ".join(repr(os.fsencode(arg) if isinstance(arg, Path) else arg) for arg in self.args)
        return f"tandem {words[:1500]} (stdout {self.stdout}, memory {self.limit}, environment {self.environment})"

    def run(self, tandem: str) -> "str | None":
        """Runs tandem. Returns what is wrong with the run, or None."""
        files = {
            "pipe": subprocess.PIPE,
            "closed": None,
            "full": "/dev/full",
            "file": self.folder / "output",
        }
        where = files[self.stdout]

        def prepare():
            if self.stdout == "closed":
                os.close(1)
            if self.limit:
                resource.setrlimit(resource.RLIMIT_AS, (self.limit, self.limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        command = [
            os.fsencode(tandem),
            *(arg if isinstance(arg, bytes) else os.fsencode(arg) for arg in self.args),
        ]
        with contextlib.ExitStack() as stack:
            stdout = stack.enter_context(open(where, "wb")) if isinstance(where, (str, Path)) else where
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=subprocess.PIPE,
                    timeout=LONGEST_S,
                    cwd=self.folder,
                    env={**os.environ, **self.environment},
                    preexec_fn=prepare,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"still running after {LONGEST_S} s"
        self.status = done.returncode
        return self.judge(done)

    def judge(self, done) -> "str | None":
        said = done.stderr.decode(errors="replace")
        if done.returncode not in (0, 1, 2):
            return f"exit status {done.returncode}: {said[-2000:]}"
        if "Sanitizer" in said or "runtime error:" in said:
            return said[-6000:]
        if done.returncode != 0 and not said.strip():
            return f"exit status {done.returncode} without a message"
        # --help and --version are printed, and their exit status chosen, by the C library.
        asked = any(arg in ("--help", "--usage", "--version", "-?", "-V", "--he") for arg in self.args)
        if done.returncode == 0 and self.stdout in ("full", "closed") and not asked:
            return f"exit status 0, though standard output is {self.stdout}"
        if "--json" in self.args and self.stdout == "pipe" and not asked:
            for line in done.stdout.splitlines():
                try:
                    json.loads(line)["row"]
                except (ValueError, KeyError) as error:
                    return f"{line[:200]!r} is no row: {error}"
        return None


def main() -> int:
    tandem, seconds, *rest = sys.argv[1:]
    tandem = str(Path(tandem).resolve())
    first = int(os.environ.get("TANDEM_FUZZ_SEED", "1"), 0)
    until = time.monotonic() + float(os.environ.get("TANDEM_FUZZ_SECONDS", seconds))
    endings: Counter = Counter()
    seed, runs = first, 0
    derive = random.Random(first)
    while True:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(seed, Path(folder), "--limit-memory" in rest)
            wrong = case.run(tandem)
        runs += 1
        if wrong:
            print(
                f"case {runs}, which TANDEM_FUZZ_SEED={seed} TANDEM_FUZZ_SECONDS=0 runs alone:\n  {case}\n  {wrong}"
            )
            return 1
        endings[case.status] += 1
        if time.monotonic() >= until:
            break
        seed = derive.getrandbits(63)
    print(
        f"cli_fuzz: seed {first}, {runs} runs; exit status "
        + ", ".join(f"{k}: {v}" for k, v in sorted(endings.items()))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
