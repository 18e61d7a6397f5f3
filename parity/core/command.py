"""python -m parity run | diverge | report | writeup | compare | list | prune."""

import argparse
import dataclasses
import importlib
import io
import math
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from parity.core import sweep, verdict
from parity.core.case import MEASURES, ParityError
from parity.core.device import kind_of
from parity.core.escape import DOCUMENTS, TABLES
from parity.core.library import HEADERS, ROOT, default_library
from parity.core.record import FILE, Finished, RecordError, RecordFile, key_of, load, prune
from parity.core.worker import Settings, Worker, WorkerError

MOST_THREADS = 4096  # as the program's --threads
MOST_RANKS = 128  # as core/rank.py's MOST
MOST_SECONDS = 86400
BUDGETS = {"cpu": {"quick": 0.25, "standard": 0.5, "full": 2.0}, "cuda": dict.fromkeys(sweep.PROFILES, 0.1)}
MACHINES = {"cpu": "local", "cuda": "local-cuda"}


def main(package: str, arguments: list[str] | None = None, headers: Path = HEADERS) -> int:
    """The command line of a package of modules, on the library that the headers declare; returns the exit status."""
    options = _parser().parse_args(arguments)
    options.headers = headers
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale that lacks a letter is no reason to stop
    # In a pipe a line stays a line, however long.
    console = Console(soft_wrap=not sys.stdout.isatty())
    try:
        status = options.command(package, options, console)
        sys.stdout.flush()  # here, where a full disk is still seen
        return status
    except (ParityError, OSError) as error:  # OSError: standard output that is full or closed, for one
        print(f"error: {error}", file=sys.stderr)
    except SystemExit:  # how rich takes it that nobody reads standard output any more, with status 1
        pass
    except Exception:  # 1 has a meaning: a case failed, something got worse
        traceback.print_exc()
    except KeyboardInterrupt:
        words = "interrupted: every finished case is recorded, the same command goes on from there"
        print(words, file=sys.stderr)
        return 130
    return 2


def run(package: str, options: argparse.Namespace, console: Console) -> int:
    items = _selected(package, options)
    kind = kind_of(options.device)
    budget = options.budget or BUDGETS[kind][options.profile]
    library = options.library or default_library()
    settings = Settings(library, options.threads, budget, options.headers, options.device, options.dump)
    with RecordFile(_folder(options)) as file:
        _warn(file.loaded.warnings)
        others = {record.get("device", "cpu") for record in file.loaded.records} - {kind}
        if others:
            raise RecordError(
                f"{file.path} holds records of {', '.join(sorted(others))}: name another --machine"
            )
        console.print(f"profile {options.profile}: {len(items)} cases")
        how = sweep.How(**{name.name: getattr(options, name.name) for name in dataclasses.fields(sweep.How)})
        status = sweep.run_sweep(items, file, settings, console, how)
    if options.report:
        whole = vars(options) | {"format": "md", "out": None, "module": []}
        write_report(package, argparse.Namespace(**whole), Console(quiet=True))
    pages = _folder(options) / "README.md" if options.report else None
    verdict.say(items, file.loaded.newest(), console, pages)
    return status


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
    out = options.out or _folder(options)
    return _say(console, report.write(modules, records, out, options.format, options.module, gone))


def write_up(package: str, options: argparse.Namespace, console: Console) -> int:
    from parity.core import writeup

    how = (options.reports, options.out, options.format, options.id, options.machine)
    return _say(console, writeup.write(sweep.discover(package), *how))


def compare_records(package: str, options: argparse.Namespace, console: Console) -> int:
    from parity.core import compare

    settings = compare.Settings(options.band, options.growth, options.common, options.module, options.missing)
    return compare.run(options.old, options.new, settings, console)


def prune_records(package: str, options: argparse.Namespace, console: Console) -> int:
    listed = sweep.listed(sweep.discover(package))
    wanted, write = lambda record: sweep.is_listed(record, listed), not options.dry_run
    dropped, stay = prune(_folder(options), wanted, write=write)
    verb = "dropped" if write else "would drop"
    counts = Counter((*key_of(record), record["status"]) for record in dropped)
    _say(
        console, (f"{verb}: {m}/{case} {impl}: {n} {status}" for (m, case, impl, status), n in counts.items())
    )
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
    settings = Settings(library, options.threads, 0.0, options.headers, options.device)
    try:
        with Worker(settings) as worker:
            surroundings = worker.surroundings
    except WorkerError as error:
        _warn([f"what is done depends on the build: {error}"])
        surroundings = None
    left = []
    for item in items:
        done = "done" if surroundings and sweep.is_done(item, finished, surroundings, settings) else "    "
        left += [item] if done == "    " else []
        seconds = sweep.expected_seconds(item, finished)
        _say(console, [f"{done} {seconds:7.1f} s  {' '.join(item.case.measure):<18} {item.name}"])
    console.print(f"profile {options.profile}: {sweep.describe(items, finished)}")
    console.print(f"to run: {sweep.describe(left, finished)}")
    return 0


def diverge(package: str, options: argparse.Namespace, console: Console) -> int:
    return importlib.import_module(f"{package}.shared.diverge").main(options, console)


def _say(console: Console, lines: Any) -> int:
    for line in lines:
        console.print(str(line), markup=False, highlight=False)
    return 0


def _selected(package: str, options: argparse.Namespace) -> list[sweep.Item]:
    how = (
        options.profile,
        options.module,
        options.case,
        options.measure or MEASURES,
        kind_of(options.device),
    )
    return sweep.select(sweep.discover(package), *how)


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

    def command(name: str, function: Callable, words: str, *parents: argparse.ArgumentParser) -> Callable:
        made = commands.add_parser(name, parents=parents, help=words)
        made.set_defaults(command=function)
        return made.add_argument

    def parent() -> argparse.ArgumentParser:
        return argparse.ArgumentParser(add_help=False)

    several = dict(action="append", default=[], metavar="NAME")
    folders, machine, modules, where, few = (parent() for _ in range(5))
    folders.add_argument("--reports", type=Path, default=ROOT / "reports", help="where machines' folders are")
    machine.add_argument(
        "--machine", help="the folder of reports/ to use (default: local, on a GPU local-cuda)"
    )
    modules.add_argument("--module", **several, help="only this module; repeatable")
    few.add_argument(
        "--profile",
        choices=sweep.PROFILES,
        default="quick",
        help="quick: 5 minutes on two cores; standard: more shapes and the model `small`, 15 minutes; full: the "
        "handout's whole grids, hours (default: %(default)s). `list` and `run` print the expected time",
    )
    few.add_argument("--case", default="", metavar="REGEX", help="only cases whose module/name this finds")
    few.add_argument(
        "--measure",
        action="append",
        choices=MEASURES,
        help="only this of each case, and its error; repeatable",
    )
    where.add_argument(
        "--device", type=_device, default="cpu", help="cpu, cuda or cuda:INDEX (default: %(default)s)"
    )
    where.add_argument("--library", type=Path, help="libtandem.so (default: that of the preset)")
    where.add_argument(
        "--threads",
        type=_number("1 to 4096", lambda n: 1 <= n <= MOST_THREADS, int),
        default=2,
        help="of both sides (default: %(default)s)",
    )

    add = command("run", run, "measure what is not measured yet", few, where, modules, machine, folders)
    add("--redo", action="store_true", help="repeat finished cases; reports use the newest result")
    add(
        "--keep",
        action="store_true",
        help="results of other builds count as finished too; pages name the builds that theirs are of",
    )
    add(
        "--any-machine",
        action="store_true",
        help="append to a folder that holds results of another machine; pages name both",
    )
    add(
        "--budget",
        type=_number("to be above 0 and at most 86400, which is a day", lambda n: 0 < n <= MOST_SECONDS),
        metavar="SECONDS",
        help="of timing a side (default: by profile)",
    )
    add(
        "--within",
        type=_number("at least 0", lambda n: n >= 0),
        default=math.inf,
        metavar="SECONDS",
        help="start no case that is expected to end later; the exit status is 3 where cases are left",
    )
    add("--fail-fast", action="store_true", help="end after the first case that has a bad result")
    add("--verbose", action="store_true", help="print a line for every case")
    add("--report", action="store_true", help="write the pages after the run")
    add(
        "--dump",
        type=Path,
        metavar="FOLDER",
        help="save the tensors of each judged case there: inputs, every side's outputs and the truth, for torch.load",
    )

    add = command("report", write_report, "rewrite every page from the records", modules, machine, folders)
    add(
        "--format",
        choices=TABLES,
        default="md",
        help="md writes the pages; latex, typst and csv write them and each table as a file (default: %(default)s)",
    )
    add("--out", type=Path, metavar="FOLDER", help="write there instead")

    add = command("writeup", write_up, "every answer to the handouts in one document", folders)
    add(
        "--machine",
        **several,
        help="only the records of this folder; repeatable (default: all but local ones)",
    )
    add("--format", choices=DOCUMENTS, default="md", help="of the document (default: %(default)s)")
    add("--id", **several | {"metavar": "ID"}, help="only this id of the handouts; repeatable")
    add("--out", type=Path, metavar="FILE", help="write there, not to reports/WRITEUP.md")

    words = "what moved between two runs; exits 1 if something got worse"
    add = command("compare", compare_records, words, modules)
    add("old", type=Path, metavar="OLD", help="a folder of reports/ or a record file")
    add("new", type=Path, metavar="NEW")
    add(
        "--band",
        type=_number("at least 0, and to be finite", lambda n: 0 <= n < math.inf),
        default=0.15,
        help="noise: changes of time and memory up to this are none (default: %(default)s)",
    )
    add(
        "--growth",
        type=_number("at least 1, and to be finite", lambda n: 1 <= n < math.inf),
        default=2.0,
        help="errors that grow by more are worse (default: %(default)s)",
    )
    add("--common", action="store_true", help="cases that NEW lacks are no matter")
    add(
        "--missing",
        action="store_true",
        help="name the cases that NEW lacks, which are otherwise only counted",
    )

    words = "the first operation of a training step whose output is wrong; exits 1 if there is one"
    add = command("diverge", diverge, words, where)
    count = _number("at least 1", lambda n: n >= 1, int)
    add("--size", default="tiny", help="tiny, laptop, or a size of the handout (default: %(default)s)")
    add("--layers", type=count, help="in place of the size's own")
    add("--batch", type=count, default=2, help="sequences of a rank (default: %(default)s)")
    add("--context", type=count, default=16, help="tokens of a sequence (default: %(default)s)")
    add("--dtype", choices=["f32", "tf32", "bf16", "bf16_mixed"], default="f32")
    add("--attention", choices=["flash", "naive", "jit"], default="flash")
    add("--keep", choices=["most", "all", "inputs"], default="most", help="what forward keeps for backward")
    add("--checkpoint", type=count, metavar="LAYERS", help="of a checkpoint; implies --keep inputs")
    add("--optimizer", choices=["adamw", "sgd"], default="adamw", help="sgd shows a wrong scale of gradients")
    add("--until", choices=["loss", "backward", "update"], default="update", help="where the step ends")
    add("--seed", type=_number("to be a whole number", lambda n: True, int), default=0)
    add("--ranks", type=_number("1 to 128", lambda n: 1 <= n <= MOST_RANKS, int), default=1, help="processes")
    add("--strategy", choices=["naive", "flat", "overlap", "bucketed"], default="bucketed")
    add("--shard", choices=["tensors", "flat", "full"], help="what ranks split (default: nothing)")
    add("--backend", choices=["gloo", "mpi", "nccl"], help="of ranks (default: gloo, on GPUs nccl)")
    add("--all", action="store_true", help="print every output, in the order of the step")

    words = "remove results of deleted cases from the records; pages leave them out anyway"
    add = command("prune", prune_records, words, machine, folders)
    add("--dry-run", action="store_true", help="name what would go, and write nothing")

    command(
        "list", list_cases, "the cases of a profile and their time", few, where, modules, machine, folders
    )
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
