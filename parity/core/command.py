"""python -m parity run | report | writeup | compare | list | prune."""

import argparse
import io
import math
import re
import sys
import traceback
from collections import Counter
from pathlib import Path

from rich.console import Console

from parity.core import compare, document, report, sweep, writeup
from parity.core.case import MEASURES
from parity.core.device import kind_of
from parity.core.library import HEADERS, ROOT, default_library
from parity.core.record import FILE, Finished, RecordError, RecordFile, key_of, load, prune
from parity.core.tables import FORMATS
from parity.core.worker import Settings, Worker, WorkerError

ERRORS = (sweep.SelectionError, RecordError, WorkerError, report.ReportError, compare.CompareError)
MOST_THREADS = 4096  # as the program's --threads
MOST_SECONDS = 86400
BUDGETS = {"cpu": {"quick": 0.5, "full": 2.0}, "cuda": {"quick": 0.1, "full": 0.1}}
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
    except ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit:  # how rich takes it that nobody reads standard output any more, with status 1
        return 2
    except OSError as error:  # standard output that is full or closed, for one
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception:  # 1 has a meaning: a case failed, something got worse
        traceback.print_exc()
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted: every finished case is recorded, the same command goes on from there",
            file=sys.stderr,
        )
        return 130


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
        console.print(f"profile {options.profile}: {sweep.describe(items, Finished(file.loaded.records))}")
        return sweep.run_sweep(
            items,
            file,
            settings,
            console,
            redo=options.redo,
            within=options.within,
            keep=options.keep,
            any_machine=options.any_machine,
            fail_fast=options.fail_fast,
        )


def write_report(package: str, options: argparse.Namespace, console: Console) -> int:
    loaded = load(_folder(options) / FILE)
    _warn(loaded.warnings)
    if not loaded.records:
        raise RecordError(f"no records in {_folder(options) / FILE}; python -m parity run makes some")
    modules = sweep.discover(package)
    listed, newest = sweep.listed(modules), loaded.newest()
    records = [record for record in newest if sweep.is_listed(record, listed)]
    gone = [record for record in newest if not sweep.is_listed(record, listed)]
    if gone:
        console.print(
            f"left out, for their cases are no more: {len(gone)} results (python -m parity prune takes them out of the "
            "records)"
        )
    unknown = [name for name in options.module if name not in modules]
    if unknown:
        raise sweep.SelectionError(f"no module {', '.join(unknown)}; there are: {', '.join(modules)}")
    out = options.out or _folder(options)
    for path in report.write(modules, records, out, options.format, options.module, gone):
        console.print(str(path), markup=False, highlight=False)
    return 0


def write_up(package: str, options: argparse.Namespace, console: Console) -> int:
    modules = sweep.discover(package)
    for path in writeup.write(
        modules, options.reports, options.out, options.format, options.id, options.machine
    ):
        console.print(str(path), markup=False, highlight=False)
    return 0


def compare_records(package: str, options: argparse.Namespace, console: Console) -> int:
    settings = compare.Settings(options.band, options.growth, options.common, options.module, options.missing)
    return compare.run(options.old, options.new, settings, console)


def prune_records(package: str, options: argparse.Namespace, console: Console) -> int:
    listed = sweep.listed(sweep.discover(package))
    dropped, stay = prune(
        _folder(options), lambda record: sweep.is_listed(record, listed), write=not options.dry_run
    )
    verb = "would drop" if options.dry_run else "dropped"
    counts = Counter((*key_of(record), record["status"]) for record in dropped)
    for (module, case, impl, status), count in counts.items():
        line = f"{verb}: {module}/{case} {impl}: {count} {status}"
        console.print(line, markup=False, highlight=False)
    modules = Counter(record["module"] for record in dropped)
    words = ", ".join(f"{module} {count}" for module, count in sorted(modules.items()))
    console.print(f"{verb} {len(dropped)} records{f' ({words})' if words else ''}; {stay} stay")
    return 0


def list_cases(package: str, options: argparse.Namespace, console: Console) -> int:
    items = _selected(package, options)
    records = load(_folder(options) / FILE)
    _warn(records.warnings)
    finished = Finished(records.records)
    settings = Settings(
        options.library or default_library(), options.threads, 0.0, options.headers, options.device
    )
    try:
        with Worker(settings) as worker:
            surroundings = worker.surroundings
    except WorkerError as error:
        _warn([f"what is done depends on the build: {error}"])
        surroundings = None
    for item in items:
        done = "done" if surroundings and sweep.is_done(item, finished, surroundings, settings) else "    "
        seconds = sweep.expected_seconds(item, finished)
        line = f"{done} {seconds:7.1f} s  {' '.join(item.case.measure):<18} {item.name}"
        console.print(line, markup=False, highlight=False)
    console.print(f"profile {options.profile}: {sweep.describe(items, finished)}")
    return 0


def _selected(package: str, options: argparse.Namespace) -> list[sweep.Item]:
    return sweep.select(
        sweep.discover(package),
        options.profile,
        options.module,
        options.case,
        options.measure or MEASURES,
        kind_of(options.device),
    )


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

    records = argparse.ArgumentParser(add_help=False)
    records.add_argument(
        "--machine", help="the folder of reports/ to use (default: local, on a GPU local-cuda)"
    )
    records.add_argument("--reports", type=Path, default=ROOT / "reports", help="where those folders are")

    cases = argparse.ArgumentParser(add_help=False)
    cases.add_argument(
        "--profile",
        choices=sweep.PROFILES,
        default="quick",
        help="quick: minutes on two cores; full: the whole grids (default: %(default)s). `list` and `run` state the "
        "expected time of either",
    )
    cases.add_argument(
        "--module", action="append", default=[], metavar="NAME", help="only this module; may be repeated"
    )
    cases.add_argument("--case", default="", metavar="REGEX", help="only cases whose module/name this finds")
    cases.add_argument(
        "--measure",
        action="append",
        choices=MEASURES,
        help="only this of each case, and its error; may be repeated",
    )
    cases.add_argument(
        "--device", type=_device, default="cpu", help="cpu, cuda or cuda:INDEX (default: %(default)s)"
    )
    cases.add_argument("--library", type=Path, help="libtandem.so (default: that of the preset)")
    cases.add_argument("--threads", type=_threads, default=2, help="of both sides (default: %(default)s)")

    command = commands.add_parser("run", parents=[cases, records], help="measure what is not measured yet")
    command.add_argument(
        "--redo", action="store_true", help="repeat finished cases; reports use the newest result"
    )
    command.add_argument(
        "--keep",
        action="store_true",
        help="results of other builds count as finished too; pages name the builds that theirs are of",
    )
    command.add_argument(
        "--any-machine",
        action="store_true",
        help="append to a folder that holds results of another machine; pages name both",
    )
    command.add_argument(
        "--budget", type=_budget, metavar="SECONDS", help="of timing a side (default: by profile)"
    )
    command.add_argument(
        "--within",
        type=_within,
        default=math.inf,
        metavar="SECONDS",
        help="start no case that is expected to end later; the exit status is 3 where cases are left",
    )
    command.add_argument(
        "--fail-fast", action="store_true", help="end behind the first case of which a result is bad"
    )
    command.add_argument(
        "--dump",
        type=Path,
        metavar="FOLDER",
        help="save the tensors of each judged case there: inputs, every side's outputs and the truth, for torch.load",
    )
    command.set_defaults(command=run)

    command = commands.add_parser("report", parents=[records], help="rewrite every page from the records")
    command.add_argument(
        "--format",
        choices=FORMATS,
        default="md",
        help="md writes the pages; latex, typst and csv write them and each table as a file (default: %(default)s)",
    )
    command.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="NAME",
        help="only this module's pages, and no index; repeatable",
    )
    command.add_argument("--out", type=Path, metavar="FOLDER", help="write there, not beside the records")
    command.set_defaults(command=write_report)

    command = commands.add_parser("writeup", help="every answer to the handouts in one document")
    command.add_argument("--reports", type=Path, default=ROOT / "reports", help="where machines' folders are")
    command.add_argument(
        "--machine",
        action="append",
        default=[],
        metavar="NAME",
        help="only the records of this folder; repeatable (default: all but local ones)",
    )
    command.add_argument(
        "--format",
        choices=list(document.FORMATS),
        default="md",
        help="of the document (default: %(default)s)",
    )
    command.add_argument(
        "--id", action="append", default=[], metavar="ID", help="only this id of the handouts; repeatable"
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write there, not to reports/WRITEUP.md")
    command.set_defaults(command=write_up)

    command = commands.add_parser(
        "compare", help="what moved between two runs; exits 1 if something got worse"
    )
    command.add_argument("old", type=Path, metavar="OLD", help="a folder of reports/ or a record file")
    command.add_argument("new", type=Path, metavar="NEW")
    command.add_argument(
        "--band",
        type=_band,
        default=0.15,
        help="noise: changes of time and memory up to this are none (default: %(default)s)",
    )
    command.add_argument(
        "--growth",
        type=_growth,
        default=2.0,
        help="errors that grow by more are worse (default: %(default)s)",
    )
    command.add_argument("--common", action="store_true", help="cases that NEW lacks are no matter")
    command.add_argument(
        "--missing",
        action="store_true",
        help="name the cases that NEW lacks, which are otherwise only counted",
    )
    command.add_argument(
        "--module", action="append", default=[], metavar="NAME", help="only this module; may be repeated"
    )
    command.set_defaults(command=compare_records)

    command = commands.add_parser(
        "prune",
        parents=[records],
        help="take results of cases that are no more out of the records; pages leave them out as it is",
    )
    command.add_argument("--dry-run", action="store_true", help="name what would go, and write nothing")
    command.set_defaults(command=prune_records)

    command = commands.add_parser(
        "list", parents=[cases, records], help="the cases of a profile and their time"
    )
    command.set_defaults(command=list_cases)
    return parser


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: cpu, cuda or cuda:INDEX")
    return text


def _threads(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if not 1 <= value <= MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{value}, needs 1 to {MOST_THREADS}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return value


def _budget(text: str) -> float:
    value = _number(text)
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text}, needs to be above 0 and at most {MOST_SECONDS}, which is a day"
        )
    return value


def _within(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}, needs at least 0")
    return value


def _band(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}, needs at least 0, and to be finite")
    return value


def _growth(text: str) -> float:
    value = _number(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}, needs at least 1, and to be finite")
    return value
