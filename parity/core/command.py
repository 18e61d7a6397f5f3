"""python -m parity run | diverge | judge | audit | report | writeup | compare | list | prune."""

import argparse
import importlib
import io
import math
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from parity.core import sweep, verdict
from parity.core.case import MEASURES, ParityError
from parity.core.device import DeviceLost, kind_of
from parity.core.record import FILE, Finished, RecordError, RecordFile, key_of, load, prune
from parity.core.worker import Settings, Worker, WorkerError
from tandem.library import ROOT, default_library

BUDGETS = {"cpu": {"quick": 0.25, "standard": 0.5, "full": 2.0}, "cuda": dict.fromkeys(sweep.PROFILES, 0.1)}
MACHINES = {"cpu": "local", "cuda": "local-cuda"}


def main(package: str, arguments: list[str] | None = None) -> int:
    """The command line of a package of modules; returns the exit status."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale that lacks a letter is no reason to stop
    # In a pipe a line stays a line, however long. Names and messages may have brackets, which are no markup.
    console = Console(soft_wrap=not sys.stdout.isatty(), markup=False, highlight=False)
    try:
        status = options.command(package, options, console)
        sys.stdout.flush()  # here, where a full disk is still seen
        return status
    except (ParityError, OSError) as error:  # OSError: standard output that is full or closed, for one
        print(f"error: {error}", file=sys.stderr)
        _give_up_on_stdout()
    except SystemExit:  # how rich takes it that nobody reads standard output any more, with status 1
        pass
    except (Exception, DeviceLost):  # 1 has a meaning: a case failed, something got worse
        traceback.print_exc()
    except KeyboardInterrupt:
        words = "interrupted: every finished case is recorded, the same command goes on from there"
        print(words, file=sys.stderr)
        return 130
    return 2


def _give_up_on_stdout() -> None:
    """Python flushes standard output once more when it ends. If that fails too, the exit status would be 120."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(package: str, options: argparse.Namespace, console: Console) -> int:
    items = _selected(package, options)
    kind = kind_of(options.device)
    budget = options.budget or BUDGETS[kind][options.profile]
    library = options.library or default_library()
    os.environ["TANDEM_LIBRARY"] = str(library)  # for sides that use the bridge
    settings = Settings(library, options.threads, budget, options.device, options.dump)
    with RecordFile(_folder(options)) as file:
        _warn(file.loaded.warnings)
        others = {record.get("device", "cpu") for record in file.loaded.records} - {kind}
        if others:
            kinds = ", ".join(sorted(others))
            raise RecordError(f"{file.path} holds records of {kinds}: name another --machine")
        console.print(f"profile {options.profile}: {len(items)} cases")
        status = sweep.run_sweep(items, file, settings, console, options)
    if options.report:
        whole = vars(options) | {"out": None, "module": []}
        write_report(package, argparse.Namespace(**whole), Console(quiet=True))
    pages = _folder(options) / "README.md" if options.report else None
    bad = verdict.say(items, file.loaded.newest(), console, pages)
    return status or int(bad > 0)


def write_report(package: str, options: argparse.Namespace, console: Console) -> int:
    from parity.core import report  # which draws pictures

    loaded = load(_folder(options) / FILE)
    _warn(loaded.warnings)
    if not loaded.records:
        raise RecordError(f"no records in {_folder(options) / FILE}; python -m parity run makes some")
    modules = sweep.discover(package)
    listed, newest = sweep.listed(modules), loaded.newest()
    records = [record for record in newest if sweep.is_listed(record, listed)]
    gone = [record for record in newest if not sweep.is_listed(record, listed)]
    if gone:
        console.print(f"left out: {len(gone)} results of deleted cases (python -m parity prune removes them)")
    sweep.refuse_unknown(options.module, modules)
    folder = _folder(options)
    single = not options.out and report.one_page(folder.name, {record["module"] for record in newest})
    how = (options.out or folder, options.module, gone, single)
    return _say(console, report.write(modules, records, *how))


def write_up(package: str, options: argparse.Namespace, console: Console) -> int:
    from parity.core import writeup

    return _say(console, writeup.write(sweep.discover(package), options))


def prune_records(package: str, options: argparse.Namespace, console: Console) -> int:
    listed = sweep.listed(sweep.discover(package))
    wanted, write = lambda record: sweep.is_listed(record, listed), not options.dry_run
    dropped, stay = prune(_folder(options), wanted, write=write)
    verb = "dropped" if write else "would drop"
    counts = Counter((*key_of(record), record["status"]) for record in dropped)
    for (module, case, impl, status), count in counts.items():
        _say(console, [f"{verb}: {module}/{case} {impl}: {count} {status}"])
    modules = Counter(record["module"] for record in dropped)
    words = ", ".join(f"{module} {count}" for module, count in sorted(modules.items()))
    console.print(f"{verb} {len(dropped)} records{f' ({words})' if words else ''}; {stay} stay")
    return 0


def list_cases(package: str, options: argparse.Namespace, console: Console) -> int:
    items = _selected(package, options)
    records = load(_folder(options) / FILE)
    _warn(records.warnings)
    finished = Finished(records.records)
    library = options.library or default_library()
    settings = Settings(library, options.threads, 0.0, options.device)
    try:
        with Worker(settings) as worker:
            surroundings = worker.surroundings
    except WorkerError as error:
        _warn([f"what is done depends on the build: {error}"])
        surroundings = None
    left = []
    for item in items:
        done = surroundings and sweep.is_done(item, finished, surroundings, settings)
        left += [] if done else [item]
        words = f"{'done' if done else '':<4} {sweep.expected_seconds(item, finished):7.1f} s"
        _say(console, [f"{words}  {' '.join(item.case.measure):<18} {item.name}"])
    console.print(f"profile {options.profile}: {sweep.describe(items, finished)}")
    console.print(f"to run: {sweep.describe(left, finished)}")
    return 0


def main_of(module: str) -> Callable:
    """A command that is a module of its own."""

    def command(package: str, options: argparse.Namespace, console: Console) -> int:
        return importlib.import_module(module).main(options, console)

    return command


def _say(console: Console, lines: Any) -> int:
    for line in lines:
        console.print(str(line))
    return 0


def _selected(package: str, options: argparse.Namespace) -> list[sweep.Item]:
    measures, kind = options.measure or MEASURES, kind_of(options.device)
    modules = sweep.discover(package)
    return sweep.select(modules, options.profile, options.module, options.case, measures, kind)


def _folder(options: argparse.Namespace) -> Path:
    return options.reports / (options.machine or MACHINES[kind_of(getattr(options, "device", "cpu"))])


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m parity",
        description="Runs identical inputs through PyTorch and through C, and reports what differs.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Callable, words: str, *parents: argparse.ArgumentParser) -> tuple:
        made = commands.add_parser(name, parents=parents, help=words)
        made.set_defaults(command=function)
        return adding(made)

    def adding(made: argparse.ArgumentParser) -> tuple[Callable, Callable]:
        """What adds an option of a value, and a flag."""

        def add(name: str, words: str | None = None, **how: Any) -> None:
            made.add_argument(name, help=words, **how)

        return add, lambda name, words: add(name, words, action="store_true")

    several = dict(action="append", default=[], metavar="NAME")
    folders, machine, modules, where, few = (argparse.ArgumentParser(add_help=False) for _ in range(5))
    add, _ = adding(folders)
    add("--reports", "where machines' folders are", type=Path, default=ROOT / "reports")
    add, _ = adding(machine)
    add("--machine", "the folder of reports/ to use (default: local, on a GPU local-cuda)")
    add, _ = adding(modules)
    add("--module", "only this module; repeatable", **several)
    add, _ = adding(few)
    words = (
        "quick: 5 minutes on two cores; standard: more shapes and the model `small`, 15 minutes; full: the "
        "handout's whole grids, hours (default: %(default)s). `list` and `run` print the expected time"
    )
    add("--profile", words, choices=sweep.PROFILES, default="quick")
    add("--case", "only cases whose module/name this finds", default="", metavar="REGEX")
    add("--measure", "only this of each case, and its error; repeatable", action="append", choices=MEASURES)
    add, _ = adding(where)
    add("--device", "cpu, cuda or cuda:INDEX (default: %(default)s)", type=_device, default="cpu")
    add("--library", "libtandem.so (default: that of the preset)", type=Path)
    threads = _number("1 to 4096", lambda n: 1 <= n <= 4096, int)
    add("--threads", "of both sides (default: %(default)s)", type=threads, default=2)

    add, flag = command("run", run, "measure what is not measured yet", few, where, modules, machine, folders)
    flag("--redo", "repeat finished cases; reports use the newest result")
    flag("--keep", "results of other builds count as finished too; pages name the builds that theirs are of")
    flag("--any-machine", "append to a folder that holds results of another machine; pages name both")
    a_day = _number("to be above 0 and at most 86400, which is a day", lambda n: 0 < n <= 86400)
    add("--budget", "of timing a side (default: by profile)", type=a_day, metavar="SECONDS")
    words = "start no case that is expected to end later; the exit status is 3 where cases are left"
    seconds = _number("at least 0", lambda n: n >= 0)
    add("--within", words, type=seconds, default=math.inf, metavar="SECONDS")
    flag("--fail-fast", "end after the first case that has a bad result")
    flag("--verbose", "print a line for every case")
    flag("--report", "write the pages after the run")
    words = "save the tensors of each judged case there: inputs, every side's outputs and the truth, for torch.load"
    add("--dump", words, type=Path, metavar="FOLDER")

    words = "rewrite every page from the records"
    add, _ = command("report", write_report, words, modules, machine, folders)
    add("--out", "write there instead", type=Path, metavar="FOLDER")

    add, _ = command("writeup", write_up, "every answer to the handouts in one document", folders)
    add("--machine", "only the records of this folder; repeatable (default: all but local ones)", **several)
    add("--format", "of the document (default: %(default)s)", choices=("md", "html", "latex"), default="md")
    add("--id", "only this id of the handouts; repeatable", **several | {"metavar": "ID"})
    add("--beside", "add the times of this folder, and their ratio", metavar="MACHINE")
    words = "only the handout of this year (default: both; with --out, 2026)"
    add("--edition", words, choices=("2026", "2025"))
    add("--out", "write one document there, not to reports/", type=Path, metavar="FILE")

    words = "what moved between two runs; exits 1 if something got worse"
    add, flag = command("compare", main_of("parity.core.compare"), words, modules)
    add("old", "a folder of reports/ or a record file", type=Path, metavar="OLD")
    add("new", type=Path, metavar="NEW")
    flag("--common", "cases that NEW lacks are no matter")
    flag("--missing", "name the cases that NEW lacks, which are otherwise only counted")

    words = "the first operation of a training step whose output is wrong; exits 1 if there is one"
    add, flag = command("diverge", main_of("parity.shared.diverge"), words, where)
    count = _number("at least 1", lambda n: n >= 1, int)
    add("--size", "tiny, laptop, or a size of the handout (default: %(default)s)", default="tiny")
    add("--layers", "in place of the size's own", type=count)
    add("--batch", "sequences of a rank (default: %(default)s)", type=count, default=2)
    add("--context", "tokens of a sequence (default: %(default)s)", type=count, default=16)
    add("--dtype", choices=["f32", "tf32", "bf16", "bf16_mixed"], default="f32")
    add("--attention", choices=["flash", "naive"], default="flash")
    add("--keep", "what forward keeps for backward", choices=["most", "all", "inputs"], default="most")
    add("--checkpoint", "of a checkpoint; implies --keep inputs", type=count, metavar="LAYERS")
    add("--optimizer", "sgd shows a wrong scale of gradients", choices=["adamw", "sgd"], default="adamw")
    add("--until", "where the step ends", choices=["loss", "backward", "update"], default="update")
    add("--seed", type=_number("to be a whole number", lambda n: True, int), default=0)
    add("--ranks", "processes", type=_number("1 to 128", lambda n: 1 <= n <= 128, int), default=1)
    add("--strategy", choices=["naive", "flat", "overlap", "bucketed"], default="bucketed")
    add("--shard", "what ranks split (default: nothing)", choices=["tensors", "flat", "full"])
    add("--backend", "of ranks (default: gloo, on GPUs nccl)", choices=["gloo", "mpi", "nccl"])
    flag("--all", "print every output, in the order of the step")

    words = "somebody else's implementation, or their numbers; exits 1 if something is wrong or refused"
    add, flag = command("judge", main_of("parity.judge"), words, where, folders)
    add("folder", "a solution of the course, with tests/adapters.py", nargs="?", type=Path, metavar="FOLDER")
    add("--python", "their interpreter, such as 'uv run python' (default: this one)", default=sys.executable)
    positive = _number("to be above 0 and finite", lambda n: 0 < n < math.inf)
    add("--seconds", "limit of a case of their code (default: %(default)s)", type=positive, default=120.0)
    add("--only", "only cases that this finds in 'FUNCTION, LEVEL, KIND'", default="", metavar="REGEX")
    add("--seed", "of the inputs (default: another one each time)", type=int, default=time.time_ns() % 2**31)
    flag("--strict", "what the course does not promise counts as well")
    add("--no-hints", "leave out likely mistakes", dest="hints", action="store_false")
    words = "a CSV file with a head, or a JSON list: id, size, context, batch, dtype, pass, card, ms, std, MiB, ..."
    add("--numbers", words, type=Path, metavar="FILE")
    add("--peak-tflops", "of cards that have no data sheet here", type=positive, metavar="TFLOP/S")
    add("--bandwidth", "of their memory", type=positive, metavar="GB/S")
    add("--json", "write the verdicts there as well", type=Path, metavar="FILE")
    add("--report", "write them there as a page of Markdown", type=Path, metavar="FILE")

    words = "what the records contradict; exits 1 if parity/audit/known.csv does not explain it"
    add, flag = command("audit", main_of("parity.audit"), words, folders)
    flag("--all", "print the known findings as well, with their reasons")
    add("--library", "libtandem.so, for bounds (default: that of the preset, if it is built)", type=Path)

    words = "remove results of deleted cases from the records; pages leave them out anyway"
    _, flag = command("prune", prune_records, words, machine, folders)
    flag("--dry-run", "name what would go, and write nothing")

    words = "the cases of a profile and their time"
    command("list", list_cases, words, few, where, modules, machine, folders)
    return parser


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: cpu, cuda or cuda:INDEX")
    return text


def _number(needs: str, fits: Callable[[Any], bool], kind: type = float) -> Callable[[str], Any]:
    """What argparse calls for a number that has to fit."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if value != value:
            raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' if kind is int else ''}number")
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text}, needs {needs}")
        return value

    return parse
