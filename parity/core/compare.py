"""What moved between two record files: new failures, larger errors, slower, hungrier, missing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from parity.core.judge import is_judged
from parity.core.record import FILE, key_of, load
from parity.core.view import number

SHOWN = 30  # rows of each kind; the rest is counted


class CompareError(RuntimeError):
    """One side of the comparison is not there."""


@dataclass(frozen=True)
class Move:
    """Something that differs, and whether that is worse."""

    kind: str
    case: str
    impl: str
    before: str
    after: str
    worse: bool


def run(old: Path, new: Path, band: float, growth: float, common: bool, console: Console) -> int:
    """Prints what moved; 1 if something got worse, else 0."""
    before, after = _newest(old), _newest(new)
    same_machine = {r.get("machine") for r in before.values()} == {r.get("machine") for r in after.values()}
    found = list(moves(before, after, band=band, growth=growth, common=common, same_machine=same_machine))
    console.print(
        f"{len(before.keys() & after.keys())} results in both, {len(before.keys() - after.keys())} only in {old}, "
        f"{len(after.keys() - before.keys())} only in {new}; noise band of time and memory {band:.0%}, "
        f"errors may grow by a factor of {growth:g}",
        markup=False,
    )
    if not same_machine:
        console.print("the machines differ: times are compared as ratios to PyTorch's only")
    for kind in dict.fromkeys(move.kind for move in found):
        _print(kind, [move for move in found if move.kind == kind], console)
    worse = sum(move.worse for move in found)
    console.print(f"{worse} got worse" if worse else "nothing got worse")
    return 1 if worse else 0


def moves(
    before: Mapping, after: Mapping, *, band: float, growth: float, common: bool, same_machine: bool
) -> Iterable[Move]:
    """The differences, by kind. Only C is held to account; PyTorch is the measure."""
    keys = [key for key in before if is_judged(key[2])]
    shared = [key for key in keys if key in after]
    for key in shared:
        yield from _status(key, before[key], after[key])
    yield from (
        Move("missing", *_name(key), before[key]["status"], "", not common)
        for key in keys
        if key not in after
    )
    ok = [key for key in shared if before[key]["status"] == after[key]["status"] == "ok"]
    for key in ok:
        yield from _error(key, before[key], after[key], growth)
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
