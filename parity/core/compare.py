"""What moved between two record files: new failures, larger errors, slower, hungrier, missing."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from parity.core.case import ParityError
from parity.core.judge import is_judged
from parity.core.record import FILE, key_of, load
from parity.core.view import number

# In the order in which they are said: what is worse first, and what is merely not there last.
KINDS = (
    *("new failure", "error grew", "more time", "more memory"),
    *("other status", "other config", "fixed", "error fell", "less time", "less memory", "new", "missing"),
)
SHOWN = 30  # rows of each kind; the rest is counted


class CompareError(ParityError):
    """What is to be compared is not there."""


@dataclass(frozen=True)
class Move:
    """Something that differs, and whether that is worse."""

    kind: str
    case: str
    impl: str
    before: str
    after: str
    worse: bool


@dataclass(frozen=True)
class Settings:
    """What counts as worse, and what is said."""

    band: float  # changes of time and memory up to this are noise
    growth: float  # of an error, up to this
    common: bool = False  # what NEW lacks is no matter
    modules: Sequence[str] = ()  # none: all
    missing: bool = False  # what NEW lacks is named case by case


def run(old: Path, new: Path, settings: Settings, console: Console) -> int:
    """Prints what moved, faults first; 1 if something got worse, else 0."""
    before, after = _newest(old), _newest(new)
    if settings.modules:
        before, after = _only(settings.modules, before, after)
    places = [{place(record) for record in records.values()} for records in (before, after)]
    same_machine = places[0] == places[1] and None not in places[0]
    found = list(moves(before, after, settings, same_machine=same_machine))
    found.sort(key=lambda move: KINDS.index(move.kind))
    console.print(
        f"{len(before.keys() & after.keys())} results in both, {len(before.keys() - after.keys())} only in {old}, "
        f"{len(after.keys() - before.keys())} only in {new}; noise band of time and memory "
        f"{settings.band:.0%}, errors may grow by a factor of {settings.growth:g}",
        markup=False,
    )
    if not same_machine:
        why = (
            "records that name no host may be of any"
            if None in places[0] | places[1]
            else "the machines differ"
        )
        console.print(f"{why}: times are compared as ratios to PyTorch's only")
    for kind in dict.fromkeys(move.kind for move in found):
        # What lacks is counted below, and would hide the rest: a run of one module lacks all others.
        if kind != "missing" or settings.missing:
            _print(kind, [move for move in found if move.kind == kind], console)
    _count(found, console)
    worse = sum(move.worse for move in found)
    lacking = sum(move.worse for move in found if move.kind == "missing")
    words = f"{worse} got worse" if worse else "nothing got worse"
    if lacking and not settings.missing:
        words += f", {lacking} of them by missing: --missing names them, with --common they are no matter"
    console.print(words)
    return 1 if worse else 0


def _only(modules: Sequence[str], *sides: dict) -> list[dict]:
    there = sorted({key[0] for records in sides for key in records})
    unknown = [name for name in modules if name not in there]
    if unknown:
        raise CompareError(f"no results of module {', '.join(unknown)}; there are: {', '.join(there)}")
    return [{key: record for key, record in records.items() if key[0] in modules} for records in sides]


def place(record: Mapping) -> str | None:
    """Where it was measured: a GPU by its name, a processor by all of its host; None where the record does not say."""
    if "device" in record:
        return record.get("machine")
    return json.dumps(record["host"], sort_keys=True) if "host" in record else None


def moves(before: Mapping, after: Mapping, settings: Settings, *, same_machine: bool) -> Iterable[Move]:
    """The differences, by kind. Only C is held to account; PyTorch is the measure."""
    keys = [key for key in before if is_judged(key[2])]
    shared = [key for key in keys if key in after]
    for key in shared:
        yield from _status(key, before[key], after[key])
        yield from _config(key, before[key], after[key])
    yield from (
        Move("missing", *_name(key), before[key]["status"], "", not settings.common)
        for key in keys
        if key not in after
    )
    ok = [key for key in shared if before[key]["status"] == after[key]["status"] == "ok"]
    for key in ok:
        yield from _error(key, before[key], after[key], settings.growth)
    band = settings.band
    for key in ok:
        yield from _time(key, before[key], after[key], band, same_machine)
    for key in ok:
        yield from _change(
            "memory", key, number(before[key], "peak_mib"), number(after[key], "peak_mib"), band, "MiB"
        )
    fresh = [key for key in after if key not in before and is_judged(key[2])]
    for key in fresh:
        bad = after[key]["status"] in ("failed", "error")
        yield Move("new failure" if bad else "new", *_name(key), "", _outcome(after[key]), bad)


def _status(key, before: Mapping, after: Mapping) -> Iterable[Move]:
    was, now = before["status"], after["status"]
    if was == now:
        return
    if now == "ok":
        yield Move("fixed", *_name(key), was, now, False)
    else:
        # A run that used to fail and now says so differently is not worse.
        worse = was == "ok" or (now in ("failed", "error") and was not in ("failed", "error"))
        yield Move("new failure" if worse else "other status", *_name(key), was, _outcome(after), worse)


def _config(key, before: Mapping, after: Mapping) -> Iterable[Move]:
    """Switches that differ; a record from before results named their build had none to name."""
    was, now = before.get("config", {}), after.get("config", {})
    if "build" in before and "build" in after and was != now:
        names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        yield Move("other config", *_name(key), *(_switches(config, names) for config in (was, now)), False)


def _switches(config: Mapping, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {json.dumps(config[name])}" for name in names if name in config)


def _error(key, before: Mapping, after: Mapping, growth: float) -> Iterable[Move]:
    for name in ("rel_l2", "max_abs"):
        was, now = number(before, name), number(after, name)
        if was is None or now is None or was == now:
            continue
        if now > growth * was:
            yield Move("error grew", *_name(key), f"{name} {was:.3g}", f"{now:.3g}", True)
            return
        if was > growth * now:
            yield Move("error fell", *_name(key), f"{name} {was:.3g}", f"{now:.3g}", False)
            return


def _time(key, before: Mapping, after: Mapping, band: float, same_machine: bool) -> Iterable[Move]:
    """Slower is what took longer and also fell back against PyTorch, where that ran beside it: a machine that is busy
    slows both."""
    times = [number(before, "ms"), number(after, "ms")]
    ratios = [number(before, "ratio"), number(after, "ratio")]
    by_time = list(_change("time", key, *times, band, "ms")) if same_machine else []
    by_ratio = list(_change("time", key, *ratios, band, "x PyTorch")) if None not in ratios else None
    if by_ratio is None:
        yield from by_time
    elif not same_machine:
        yield from by_ratio
    elif by_time and by_ratio and by_time[0].worse == by_ratio[0].worse:
        yield by_time[0]


def _change(what: str, key, was, now, band: float, unit: str) -> Iterable[Move]:
    if not was or not now:
        return
    if now > was * (1 + band):
        yield Move(f"more {what}", *_name(key), f"{was:.4g} {unit}", f"{now:.4g} ({now / was:.2f}x)", True)
    elif was > now * (1 + band):
        yield Move(f"less {what}", *_name(key), f"{was:.4g} {unit}", f"{now:.4g} ({now / was:.2f}x)", False)


def _newest(path: Path) -> dict:
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise CompareError(f"no record file at {file}")
    loaded = load(file)
    if not loaded.records:
        raise CompareError(f"{file} holds no records")
    return {key_of(record): record for record in loaded.newest()}


def _name(key) -> tuple[str, str]:
    module, case, impl = key
    return f"{module}/{case}", impl


def _outcome(record: Mapping) -> str:
    message = record.get("message", "")
    return f"{record['status']}: {message}" if message else record["status"]


def _count(found: list[Move], console: Console) -> None:
    """How much moved, by kind and module."""
    counts = Counter((move.kind, move.case.partition("/")[0]) for move in found)
    for kind in dict.fromkeys(kind for kind, _ in counts):
        modules = {module: count for (other, module), count in counts.items() if other == kind}
        words = ", ".join(f"{module} {count}" for module, count in sorted(modules.items()))
        console.print(f"{kind}: {sum(modules.values())} ({words})", markup=False, highlight=False)


def _print(kind: str, found: list[Move], console: Console) -> None:
    style = "red" if found[0].worse else None
    if not console.is_terminal:
        for move in found:
            line = f"{kind}: {move.case} {move.impl}: {move.before} -> {move.after}"
            console.print(line, markup=False, highlight=False)
        return
    table = Table(title=f"{kind} ({len(found)})", title_style=style or "bold", title_justify="left")
    for head in ("case", "impl", "before", "after"):
        table.add_column(head, overflow="fold")
    for move in found[:SHOWN]:
        table.add_row(move.case, move.impl, move.before, move.after)
    console.print(table)
    if len(found) > SHOWN:
        console.print(f"and {len(found) - SHOWN} more")
