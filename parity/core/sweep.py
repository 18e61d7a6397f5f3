"""Which cases there are, how long they take, and the run over those that are not finished."""

import contextlib
import importlib
import itertools
import math
import os
import pkgutil
import re
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from parity.core.case import BAD, MEASURES, Case, ParityError, is_judged
from parity.core.device import kind_of
from parity.core.identity import build_for, host_words, same_machine
from parity.core.ranks import runs_ranks
from parity.core.record import Finished, RecordError, RecordFile, key_of, now
from parity.core.worker import Settings, Worker

PROFILES = ("quick", "standard", "full")
NO_MODULES = ("__main__", "audit", "bridge", "bridge_fsdp", "core", "judge", "shared")
FRESH_PROCESS_S = 4.0  # importing PyTorch and loading the library, for a case that is alone
MORE = 3  # exit status of a run that stopped in time, with cases left


class SelectionError(ParityError):
    """The command line asks for cases that do not exist."""


@dataclass(frozen=True)
class Item:
    """A case and the module it belongs to."""

    module: str  # the last part of its name
    path: str  # as it is imported
    case: Case

    @property
    def name(self) -> str:
        return f"{self.module}/{self.case.name}"


def discover(package: str) -> dict[str, ModuleType]:
    """The modules of a package: every file and every package in it but those of NO_MODULES."""
    root = importlib.import_module(package)
    names = {found.name for found in pkgutil.iter_modules(root.__path__)} - {*NO_MODULES}
    return {name: importlib.import_module(f"{package}.{name}") for name in sorted(names)}


def listed(modules: Mapping[str, ModuleType]) -> dict[tuple[str, str], dict]:
    """{(module, case): keys} of every case, in any profile and on any kind of device."""
    return {
        (name, case.name): case.keys
        for name, module in modules.items()
        for kind in itertools.product(PROFILES, ("cpu", "cuda"))
        for case in module.cases(*kind)
    }


def is_listed(record: Mapping, listed: Mapping[tuple[str, str], dict]) -> bool:
    """Whether the record's case is listed. Keys are compared as well: the name is the same for 16 and "16"."""
    return listed.get(key_of(record)[:2]) == record["case"]


def refuse_unknown(names: Iterable[str], modules: Iterable[str]) -> None:
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise SelectionError(f"no module {', '.join(unknown)}; there are: {', '.join(modules)}")


def select(
    modules: Mapping[str, ModuleType], profile: str, only=(), regex="", measures=MEASURES, device="cpu"
) -> list[Item]:
    """The cases of a profile on a kind of device that are asked for, by stage, then by module from the lowest up. Cases
    of more than two ranks come last in a stage, so that their ranks are started once."""
    refuse_unknown(only, modules)
    try:
        pattern = re.compile(regex)
    except re.error as error:
        raise SelectionError(f"--case {regex!r} is no regular expression: {error}") from error
    items = []
    for name, module in modules.items():
        if only and name not in only:
            continue
        cases = [Item(name, module.__name__, case) for case in module.cases(profile, device)]
        twice = [item for item, count in Counter(item.name for item in cases).items() if count > 1]
        if twice:
            raise SelectionError(f"parity/{name} lists a case twice: {twice[0]}")
        for case in (item.case for item in cases):
            # A case that runs is always judged: its newest record would lack the error otherwise.
            asked = {*measures, "error"} if {*measures} & {*case.measure} else ()
            case.measure = tuple(measure for measure in case.measure if measure in asked)
        items += [item for item in cases if item.case.measure and pattern.search(item.name)]
    if not items:
        words = [f"--module {name}" for name in only] + [f"--case {regex!r}"] * bool(regex)
        words += [f"--measure {measure}" for measure in measures if {*measures} != {*MEASURES}]
        raise SelectionError(f"profile {profile} has no case for {', '.join(words)}")
    place = places(items)

    def order(item: Item) -> tuple[int, int, int]:
        ranks = item.case.ranks if runs_ranks(modules[item.module], item.case) else 1
        return item.case.stage, max(2, ranks), place(item.module)

    return sorted(items, key=order)


def expected_seconds(item: Item, finished: Finished) -> float:
    """What the case took last time, else what its module says."""
    seconds = finished.seconds(item.module, item.case)
    return (item.case.seconds if seconds is None else seconds) + (FRESH_PROCESS_S if item.case.alone else 0)


def describe(items: Iterable[Item], finished: Finished) -> str:
    """ "412 cases, about 6 min (380 of them timed in earlier runs)"."""
    items = list(items)
    known = sum(finished.seconds(item.module, item.case) is not None for item in items)
    total = sum(expected_seconds(item, finished) for item in items)
    words = f"{len(items)} cases, about {duration(total)}"
    return f"{words} ({known} of them timed in earlier runs)" if known else words


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def run_sweep(
    items: Sequence[Item], file: RecordFile, settings: Settings, console: Console, options: Namespace
) -> int:
    """Runs what is not finished, as the options of the command `run` say, and appends its records. Returns 1 if a case
    failed or C has no result of any, else MORE if the time was up before all were run, else 0."""
    end = time.monotonic() + options.within
    finished = Finished(file.loaded.records)
    timed = any(item.case.measure != ("error",) for item in items)
    with Worker(settings, timed) as worker:
        if not options.any_machine:
            _refuse_others(file, worker.surroundings)
        common = (finished, worker.surroundings, settings)
        pending = [item for item in items if options.redo or not is_done(item, *common, options.keep)]
        if len(pending) < len(items):
            console.print(f"{len(items) - len(pending)} cases are finished; --redo repeats them")
        older = 0 if options.redo else sum(is_done(item, *common, keep=True) for item in pending)
        if older:
            words = "cases were measured with another build and are measured again; --keep keeps them"
            console.print(f"{older} {words}")
        if not pending:
            return 0
        console.print(f"to run: {describe(pending, finished)}")
        busy = os.getloadavg()[0]
        if busy > 1 and any("time" in item.case.measure for item in pending):
            words = f"the machine is busy (load average {busy:.1f}): times will be noise"
            console.print(words, style="yellow")
        expected = {item.name: expected_seconds(item, finished) for item in pending}
        with _Watch(console, expected, options.verbose, end) as watch:
            return _run_pending(pending, watch, worker, file, options)


def here(item: Item, surroundings: Mapping, settings: Settings) -> dict:
    """The keys that all records of an item have in common."""
    runs = getattr(sys.modules.get(item.path), "runs", lambda case: ())(item.case)
    kind = kind_of(settings.device)
    build = build_for(surroundings["build"], item.path, kind, item.case.measure, runs)
    return {**surroundings, "build": build}


def is_done(
    item: Item, finished: Finished, surroundings: Mapping, settings: Settings, keep: bool = False
) -> bool:
    """Whether a run with these surroundings would leave the case out."""
    now = here(item, surroundings, settings)
    return finished.covers(item.module, item.case, settings.threads, now, keep)


def _run_pending(
    pending: list[Item], watch: "_Watch", worker: Worker, file: RecordFile, options: Namespace
) -> int:
    counts, console = Counter(), watch.console
    bad, none = False, True
    while pending and not ((options.fail_fast and bad) or watch.is_over(pending[0])):
        item = pending.pop(0)
        watch.begin(item)
        common = here(item, worker.surroundings, worker.settings) | {"time": now()}
        records = [record | common for record in worker.run(item.path, item.case)]
        file.append(records)
        counts.update(record["status"] for record in records)
        bad |= any(record["status"] in BAD for record in records)
        none &= not any(is_judged(record["impl"]) and record["status"] == "ok" for record in records)
        watch.end(item, records)
    console.print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    if pending:
        why = "a case before them is bad" if options.fail_fast and bad else "the time is up"
        console.print(f"{len(pending)} cases are left: {why}, the same command goes on from here")
    if none:
        console.print("C has no result of any case: nothing was compared", style="red")
    return 1 if bad or none else MORE if pending else 0


def places(items: Sequence[Item]) -> Callable[[str], int]:
    """The place of a module in its package's FLOORS; unknown modules come last."""
    package = items[0].path.rpartition(".")[0] if items else ""
    floors = getattr(importlib.import_module(package), "FLOORS", ()) if package else ()
    found = {name: floor for floor, name in enumerate(floors)}
    return lambda module: found.get(module, len(found))


def lowest_floor(bad: Sequence[tuple[Item, Mapping]], place: Callable[[str], int]) -> str:
    """Where to look first: the lowest module in which something failed."""
    items = sorted((item for item, _ in bad), key=lambda item: place(item.module))
    counts = Counter(item.module for item in items)
    words = ", ".join(f"{count} of {module}" for module, count in counts.items())
    return f"{len(bad)} results are bad, from the lowest module up: {words}. Begin with {items[0].name}"


def _refuse_others(file: RecordFile, surroundings: Mapping) -> None:
    """A page compares all results of a file, so they have to be of one machine."""

    def words(record: Mapping) -> str:
        name = record.get("machine", "another machine")
        return name if "device" in record or "host" not in record else host_words(record["host"])

    names = sorted({words(r) for r in file.loaded.records if not same_machine(r, surroundings)})
    if names:
        raise RecordError(
            f"{file.path} holds records of {' and of '.join(names)}; this is {words(surroundings)}. Name another "
            "folder with --machine, remove that file, or append to it all the same with --any-machine"
        )


@dataclass
class _Tally:
    """The counts of one module's cases so far."""

    total: int
    done: int = 0
    bad: int = 0
    seconds: float = 0.0


class _Watch(contextlib.AbstractContextManager):
    """Prints how far the run is: a line for each module that is done, and on a terminal the case that runs. A bad case
    has a line of its own; with `verbose` every case has one."""

    def __init__(self, console: Console, expected: Mapping, verbose: bool, stop: float = math.inf):
        self.console, self.expected, self.verbose, self.stop = console, expected, verbose, stop
        self.started = self.begun = time.monotonic()
        self.done, self.past = 0, 0.0  # cases, and the seconds they were expected to take
        totals = Counter(name.partition("/")[0] for name in expected)
        self.tallies = {name: _Tally(total) for name, total in totals.items()}
        self.status = Status("", console=console) if console.is_terminal else None

    def __exit__(self, *_) -> None:
        if self.status:
            self.status.stop()

    def is_over(self, item: Item) -> bool:
        """Whether the time is up. The first case always runs: a time that fits no case would never end."""
        return self.done > 0 and time.monotonic() + self.expected[item.name] > self.stop

    def begin(self, item: Item) -> None:
        self.begun = time.monotonic()
        if self.status:
            tally = self.tallies[item.module]
            words = f"{item.module} {tally.done + 1} of {tally.total}, about {duration(self._left())} left"
            self.status.update(Text(f"{words}: {item.case.name}", overflow="ellipsis", no_wrap=True))
            self.status.start()

    def end(self, item: Item, records: list[dict]) -> None:
        self.done += 1
        self.past += self.expected[item.name]
        tally = self.tallies[item.module]
        bad = any(record["status"] in BAD for record in records)
        tally.done += 1
        tally.bad += bad
        tally.seconds += time.monotonic() - self.begun
        if bad or self.verbose:
            line = f"[{self.done}/{len(self.expected)}] {item.name}: {'; '.join(map(_summary, records))}"
            self.console.print(line, style="red" if bad else None)
        if tally.done == tally.total:
            left = f"; about {duration(self._left())} left" if self.done < len(self.expected) else ""
            words = f"{tally.bad} failed" if tally.bad else "none failed"
            line = f"{item.module:<12} {tally.total:>4} cases: {words}, {duration(tally.seconds)}{left}"
            self.console.print(line)

    def _left(self) -> float:
        """The expected time of the rest, corrected by how the finished ones did."""
        rest = sum(self.expected.values()) - self.past
        elapsed = time.monotonic() - self.started
        return rest * (elapsed / self.past if self.done >= 3 else 1.0)


def _summary(record: dict) -> str:
    words = [record["impl"], record["status"]]
    if "ms" in record:
        words.append(f"{record['ms']['median']:.4g} ms")
    if record.get("error", {}).get("rel_l2") is not None:
        words.append(f"rel_l2 {record['error']['rel_l2']:.2g}")
    return " ".join(words)
