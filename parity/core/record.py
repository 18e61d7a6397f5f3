"""reports/<machine>/records.jsonl: one JSON line per result, appended, flushed to the disk, never rewritten.

The keys are those of docs/parity.md, "Records". identity.py writes `build` and `host`. Further keys are `message`
(why a status is not "ok"), `samples` (times in ms), `together` (calls of a sample), `first_ms` (of the first call),
`ratio` (over the time of a side that it alternated with), `processes` (medians, if a side was timed in two processes),
`gb_s`, `requested_mib` (a GPU's `peak_mib` before its allocator rounds), `series` (curves), `device` ("cuda"; left out
on the CPU). A restarted sweep needs `measure`, `threads`, `seconds` (of the case), and `sides` (records of the
case). `reference` is the side that C is judged against, if run() names it.
"""

import contextlib
import datetime
import errno
import fcntl
import itertools
import json
import math
import os
import platform
import re
import stat
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parity.core.case import ParityError, case_name
from parity.core.device import Cpu, Device
from parity.core.files import write_whole
from parity.core.identity import build_of, host, is_here
from parity.core.schema import SchemaError, disagreement, parse
from tandem.library import Library

FILE = "records.jsonl"
ASIDE = "records.torn"
FINISHED = ("ok", "oom", "not run", "unsupported")
# What earlier versions wrote as `oom` of sides that nobody tried. The need is the largest side's.
UNTRIED = re.compile(r"(rank \d+: )?needs (\d+) MiB, (\d+) MiB are available")
# Equal in all records of a case that one run wrote.
RUN = ("time", "machine", "device", "host", "versions", "build")
# What a record has of each measure besides the error.
MEASURED = {
    "time": ("ms", "first_ms", "together", "tflops", "gb_s", "ratio", "processes", "samples", "timed"),
    "memory": ("peak_mib", "requested_mib"),
}
# Environment variables that change what a library computes. Records name them among versions.
OVERRIDES = ("NVIDIA_TF32_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION", "CUBLAS_EMULATION_STRATEGY")


class RecordError(ParityError):
    """The record file cannot be read or written; what it held before is as it was."""


def key_of(record: Mapping) -> tuple[str, str, str]:
    """What a result is a result of: module, case, impl."""
    return (record["module"], case_name(record["deliverable"], record["case"]), record["impl"])


@dataclass
class Loaded:
    """The records of a file in order, and what was found there that is no record."""

    records: list[dict] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    torn_at: int | None = None  # where a last line without its end begins

    def leave_out_contradictions(self, path: Path) -> None:
        """Sides of one run whose numbers contradict each other; nobody knows which is right."""
        timed = (record for record in self.records if "ms" in record)
        runs, wrong = grouped(timed, lambda record: (*key_of(record)[:2], record.get("time"))), []
        for mine, theirs in (pair for run in runs.values() for pair in itertools.permutations(run, 2)):
            if words := disagreement(mine, theirs):
                who = f"{' '.join(key_of(mine))}: left out with {theirs['impl']}"
                self.warnings.append(f"{path}: {who}: {words}")
                wrong += [id(mine), id(theirs)]
        if wrong:
            self.records = [record for record in self.records if id(record) not in wrong]

    def newest(self) -> list[dict]:
        """The records of the newest run of each case, in the order in which the cases first appeared. If that run did
        not measure time or memory, they are taken from the newest run of this machine and configuration that did;
        `earlier` then has the build and time of that run."""
        found = []
        for records in by_case(self.records).values():
            latest: dict[str, dict] = {}
            for record in records:
                before = latest.get(record["impl"])
                latest[record["impl"]] = _with_measured(record, before) if before else record
            sides = {record["impl"] for record in newest_run(records)}
            found += [record for impl, record in latest.items() if impl in sides]
        return found


def grouped(items: Iterable, by: Callable[[Any], Hashable]) -> dict[Any, list]:
    """{what `by` says of an item: all such items in order}."""
    found: dict[Any, list] = {}
    for item in items:
        found.setdefault(by(item), []).append(item)
    return found


def by_case(records: Iterable[Mapping]) -> dict[tuple[str, str], list[dict]]:
    """{(module, case): its records in order}."""
    return grouped(records, lambda record: key_of(record)[:2])


def newest_run(records: Sequence[dict]) -> list[dict]:
    """The records of a case's last run, one for each side. `records` are of one case; a run that was cut off has fewer
    sides."""
    run = [record for record in records if all(record.get(key) == records[-1].get(key) for key in RUN)]
    return [*{record["impl"]: record for record in run}.values()]


def _with_measured(record: dict, before: Mapping) -> dict:
    """The record, with the times and the memory of `before` that were not measured again."""
    asked = record.get("measure", "").split()
    same = all(before.get(key) == record.get(key) for key in ("machine", "config"))
    if not asked or not same or not record["status"] == before["status"] == "ok":
        return record
    lacks = (name for measure, names in MEASURED.items() if measure not in asked for name in names)
    found = {name: before[name] for name in lacks if name in before}
    if not found:
        return record
    earlier = before.get("earlier", before)
    return record | found | {"earlier": {key: earlier[key] for key in ("build", "time") if key in earlier}}


def _as_it_happened(record: dict) -> dict:
    found = UNTRIED.fullmatch(record.get("message", "")) if record["status"] == "oom" else None
    if not found:
        return record
    need, room = (round(int(mib) / 1024) for mib in found.groups()[1:])
    words = f"{found[1] or ''}the largest side needs about {need} GiB, {room} GiB are available"
    return record | {"status": "not run", "message": words}


def load(path: Path) -> Loaded:
    """Reads a record file, which may be missing. A line that schema.py refuses is left out with a warning."""
    loaded = Loaded()
    try:
        with open(_open(path, os.O_RDONLY), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return loaded
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    position = 0
    # Not splitlines(), to which a stray carriage return would end a line, and a file in its middle.
    for number, line in enumerate(data.split(b"\n"), 1):
        ended = position + len(line) < len(data)
        try:
            if line.strip():
                loaded.records.append(_as_it_happened(parse(line)))
        except SchemaError as error:
            if ended:
                loaded.warnings.append(f"{path}, line {number}: no record, left out: {error}")
            else:
                loaded.torn_at = position
                loaded.warnings.append(f"{path}, line {number}: cut off in the middle of a record, left out")
        position += len(line) + 1
    loaded.leave_out_contradictions(path)
    return loaded


def _open(path: Path, flags: int) -> int:
    """A descriptor of a regular file; OSError for anything else, which may never end, or never open."""
    # O_NONBLOCK, which a regular file ignores: a FIFO opens at once, to be refused.
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "Is a directory")
    raise OSError(errno.EINVAL, "Not a regular file")


class RecordFile(contextlib.AbstractContextManager):
    """A record file open for appending: one writer at a time. A context manager."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.loaded = load(self.path)
        self._open_locked()
        while not self._is_in_place():  # prune() put another in its place before the lock was taken
            os.close(self._file)
            self._open_locked()
        self.loaded = load(self.path)  # again: whoever held the lock has finished
        self._mend()

    def _open_locked(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise RecordError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            held = isinstance(error, BlockingIOError)
            reason = "another run is writing it" if held else f"cannot be locked: {error.strerror}"
            raise RecordError(f"{self.path}: {reason}") from error

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def __exit__(self, *_) -> None:
        os.close(self._file)

    def append(self, records: Iterable[Mapping]) -> None:
        """Adds all of them or, with RecordError, none."""
        texts = [json.dumps(_finite(record)).encode() for record in records]
        try:
            records = [*map(parse, texts)]
        except SchemaError as error:
            raise RecordError(f"{self.path}: no reader would take a record: {error}: {texts}") from error
        lines = b"".join(text + b"\n" for text in texts)
        before = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(lines):
                written += os.write(self._file, lines[written:])
            os.fsync(self._file)
        except OSError as error:
            # Nobody else writes under the lock. If this fails too, _mend() finds the rest.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)
            before = f"the {len(self.loaded.records)} records before are intact"
            raise RecordError(f"{self.path}: cannot be written: {error.strerror}; {before}") from error
        self.loaded.records.extend(records)

    def _mend(self) -> None:
        """A killed writer may have left half a line: it is kept aside, so that the next line starts on its own."""
        size = os.fstat(self._file).st_size
        try:
            if self.loaded.torn_at is not None:
                aside = self.path.with_name(ASIDE)
                appending = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                with self.path.open("rb") as file, open(_open(aside, appending), "ab") as torn:
                    file.seek(self.loaded.torn_at)
                    torn.write(file.read() + b"\n")
                os.ftruncate(self._file, self.loaded.torn_at)
                self.loaded.warnings[-1] += f" and kept in {aside.name}"
            elif size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")
        except OSError as error:
            os.close(self._file)
            raise RecordError(f"{self.path}: cannot be written: {error.strerror}") from error


def prune(folder: Path, wanted: Callable[[Mapping], bool], *, write: bool = True) -> tuple[list[dict], int]:
    """Removes the records that `wanted` refuses, or nothing if the file cannot be written again; returns them, and how
    many stay. All other lines stay byte for byte. It takes the writer's lock. write=False: only looks."""
    path = folder / FILE
    if not path.exists():
        raise RecordError(f"{path}: there is no such file")
    with RecordFile(folder) if write else contextlib.nullcontext():
        dropped, stay, lines = [], 0, []
        try:
            with open(_open(path, os.O_RDONLY), "rb") as file:
                for line in file.read().split(b"\n"):
                    record = None
                    with contextlib.suppress(SchemaError):
                        record = parse(line)
                    if record is not None and not wanted(record):
                        dropped.append(record)
                    else:
                        stay += record is not None
                        lines.append(line)
            if dropped and write:
                write_whole(path.resolve(), b"\n".join(lines))  # a link goes on to point at the file
        except OSError as error:
            doing = "written" if write else "read"
            raise RecordError(f"{path}: cannot be {doing}: {error.strerror}; it is as it was") from error
    return dropped, stay


class Finished:
    """Which cases a sweep need not repeat."""

    def __init__(self, records: Iterable[Mapping]):
        self._cases = by_case(records)

    def covers(self, module: str, case, threads: int, here: Mapping, keep: bool = False) -> bool:
        """Whether the newest run of the case is whole, failed nowhere, measured what is asked for, and is of the
        configuration, machine and build that records of `here` would name. `keep`: of any build."""
        records = newest_run(self._cases.get((module, case.name), ()))
        if not records or len(records) != records[0].get("sides", -1):
            return False

        def fits(record: Mapping) -> bool:
            return (
                record["status"] in FINISHED
                and record.get("threads") == threads
                and is_here(record, here, keep)
                and record.get("config") == case.config.get(record["impl"])
                and set(case.measure) <= set(record.get("measure", "").split())
                and (record["status"] != "ok" or is_timed(record))
            )

        def is_timed(record: Mapping) -> bool:
            twice = record["impl"] in case.again and "time" in case.measure
            few = record.get("ms", {}).get("n", math.inf) < (case.repeats or 0)
            return not few and ("processes" in record or not twice)

        return all(map(fits, records))

    def seconds(self, module: str, case) -> float | None:
        """How long the newest run of the case took."""
        records = newest_run(self._cases.get((module, case.name), ()))
        return records[0].get("seconds") if records else None


def surroundings(library: Library, device: Device | None = None) -> dict:
    """What core adds to every record: machine, host, versions, and build, of which a record has its module's part."""
    more = (device or Cpu()).surroundings()
    build = build_of(library)
    found = {"machine": machine_name(), "host": host(), "build": build} | more
    return found | {"versions": versions(build) | more.get("versions", {})}


def machine_name() -> str:
    """The processor and how many of its hardware threads this process may use."""
    return "{name}, {cores} threads".format(**host())


def versions(build: Mapping) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = "\n".join(str(Path(line.split()[-1]).resolve()) for line in maps if "libdnnl" in line)
    if onednn := re.search(r"/libdnnl\.so\.([\d.]+)$", files, re.MULTILINE):
        found["onednn"] = onednn[1]
    found |= {name: os.environ[name] for name in OVERRIDES if name in os.environ}
    return found | ({"cc": build["compiler"]} if "compiler" in build else {})


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _finite(value):
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
