"""What moved between two record files: new failures, larger errors, slower, hungrier, missing."""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from parity.core.case import BAD, ParityError, is_judged
from parity.core.record import FILE, key_of, load
from parity.core.view import number

# In the order in which they are printed.
KINDS = (
    *("new failure", "error grew", "more time", "more memory"),
    *("other status", "other config", "fixed", "error fell", "less time", "less memory", "new", "missing"),
)
BAND = 0.15  # changes of time and memory up to this are noise
GROWTH = 2.0  # of an error, up to this


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


def main(options: Namespace, console: Console) -> int:
    """Prints what moved, faults first; 1 if something got worse, else 0. `common`: what NEW lacks is no matter;
    `missing`: it is named case by case."""
    old, new = options.old, options.new
    before, after = _only(options.module, _newest(old), _newest(new))
    places = [{place(record) for record in records.values()} for records in (before, after)]
    same_machine = places[0] == places[1] and None not in places[0]
    found = [*moves(before, after, options.common, same_machine)]
    found.sort(key=lambda move: KINDS.index(move.kind))
    console.print(
        f"{len(before.keys() & after.keys())} results in both, {len(before.keys() - after.keys())} only in {old}, "
        f"{len(after.keys() - before.keys())} only in {new}; noise band of time and memory "
        f"{BAND:.0%}, errors may grow by a factor of {GROWTH:g}"
    )
    if not same_machine:
        console.print("the machines differ: times are compared as ratios to PyTorch's only")
    for move in found:
        # Missing cases are counted below. They would hide the rest, as in a run of one module.
        if move.kind != "missing" or options.missing:
            words = f"{move.kind}: {move.case} {move.impl}: {move.before} -> {move.after}"
            console.print(words, style="red" if move.worse else None)
    _count(found, console)
    worse = sum(move.worse for move in found)
    lacking = sum(move.worse for move in found if move.kind == "missing")
    words = f"{worse} got worse" if worse else "nothing got worse"
    if lacking and not options.missing:
        words += f", {lacking} of them by missing: --missing names them, with --common they are no matter"
    console.print(words)
    return 1 if worse else 0


def _only(modules: Sequence[str], *sides: dict) -> list[dict]:
    there = sorted({key[0] for records in sides for key in records})
    unknown = [name for name in modules if name not in there]
    if unknown:
        raise CompareError(f"no results of module {', '.join(unknown)}; there are: {', '.join(there)}")
    wanted = modules or there
    return [{key: record for key, record in records.items() if key[0] in wanted} for records in sides]


def place(record: Mapping) -> str | None:
    """Where it was measured: a GPU by its name, a processor by all of its host; None where the record does not say."""
    if "device" in record:
        return record.get("machine")
    return json.dumps(record["host"], sort_keys=True) if "host" in record else None


def moves(before: Mapping, after: Mapping, common: bool, same_machine: bool) -> Iterable[Move]:
    """The differences, case by case. Only C is held to account; PyTorch is the measure."""
    for key in dict.fromkeys([*before, *after]):
        module, case, impl = key
        if is_judged(impl):
            for kind, *rest in _differences(before.get(key), after.get(key), common, same_machine):
                yield Move(kind, f"{module}/{case}", impl, *rest)


def _differences(was: Mapping | None, now: Mapping | None, common: bool, here: bool) -> Iterable:
    """(kind, before, after, worse) of two records, one of which may be missing. `here`: both are of one machine."""
    if now is None:
        yield "missing", was["status"], "", not common
    elif was is None:
        bad = now["status"] in BAD
        yield "new failure" if bad else "new", "", _outcome(now), bad
    else:
        yield from _status(was, now)
        yield from _config(was, now)
        if was["status"] == now["status"] == "ok":
            yield from _error(was, now)
            yield from _time(was, now, here)
            yield from _change("memory", was, now, "peak_mib", "MiB")


def _status(before: Mapping, after: Mapping) -> Iterable:
    was, now = before["status"], after["status"]
    if now == "ok" != was:
        yield "fixed", was, now, False
    elif was != now:
        # A run that used to fail and now says so differently is not worse.
        worse = was == "ok" or (now in BAD and was not in BAD)
        yield "new failure" if worse else "other status", was, _outcome(after), worse


def _config(before: Mapping, after: Mapping) -> Iterable:
    """Switches that differ."""
    was, now = before.get("config", {}), after.get("config", {})
    if was != now:
        names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        switches = ([f"{n} {json.dumps(of[n])}" for n in names if n in of] for of in (was, now))
        yield "other config", *map(", ".join, switches), False


def _error(before: Mapping, after: Mapping) -> Iterable:
    for name in ("rel_l2", "max_abs"):
        was, now = number(before, name), number(after, name)
        if was is None or now is None:
            continue
        if now > GROWTH * was or was > GROWTH * now:
            kind = "error grew" if now > was else "error fell"
            yield kind, f"{name} {was:.3g}", f"{now:.3g}", now > was
            return


def _time(before: Mapping, after: Mapping, same_machine: bool) -> Iterable:
    """A change counts if the ratio to PyTorch, if there is one, changes alike: a busy machine slows both."""
    by_time = [*_change("time", before, after, "ms", "ms")] if same_machine else []
    by_ratio = [*_change("time", before, after, "ratio", "x PyTorch")]
    if None in (number(before, "ratio"), number(after, "ratio")):
        yield from by_time
    elif not same_machine:
        yield from by_ratio
    elif by_time and by_ratio and by_time[0][0] == by_ratio[0][0]:
        yield by_time[0]


def _change(what: str, before: Mapping, after: Mapping, name: str, unit: str) -> Iterable:
    was, now = number(before, name), number(after, name)
    if was and now and max(was, now) > min(was, now) * (1 + BAND):
        words = f"{'more' if now > was else 'less'} {what}"
        yield words, f"{was:.4g} {unit}", f"{now:.4g} ({now / was:.2f}x)", now > was


def _newest(path: Path) -> dict:
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise CompareError(f"no record file at {file}")
    loaded = load(file)
    if not loaded.records:
        raise CompareError(f"{file} holds no records")
    return {key_of(record): record for record in loaded.newest()}


def _outcome(record: Mapping) -> str:
    message = record.get("message", "")
    return f"{record['status']}: {message}" if message else record["status"]


def _count(found: list[Move], console: Console) -> None:
    counts = Counter((move.kind, move.case.partition("/")[0]) for move in found)
    for kind in dict.fromkeys(kind for kind, _ in counts):
        modules = {module: count for (other, module), count in counts.items() if other == kind}
        words = ", ".join(f"{module} {count}" for module, count in sorted(modules.items()))
        console.print(f"{kind}: {sum(modules.values())} ({words})")
