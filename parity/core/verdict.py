"""What a run comes to, for the last lines of a terminal: which cases hold, what C's time is relative to PyTorch's, and
what failed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from parity.core.comparison import geomean
from parity.core.judge import is_judged
from parity.core.record import key_of
from parity.core.sweep import BAD, Item, lowest_floor, places
from parity.core.view import number


@dataclass
class Row:
    """The cases of one module."""

    cases: int = 0
    hold: int = 0
    eager: list[float] = field(default_factory=list)  # C's time over eager PyTorch's
    fastest: list[tuple[float, str]] = field(
        default_factory=list
    )  # over the fastest side's, and which case it is


def say(
    items: Sequence[Item], newest: Sequence[Mapping], console: Console, pages: Path | None = None
) -> None:
    """Prints a line a module, the worst case, where the pages are, and at the end what failed."""
    records = defaultdict(list)
    for record in newest:
        records[key_of(record)[:2]].append(record)
    place = places(items)
    rows: dict[str, Row] = defaultdict(Row)
    bad = []
    for item in sorted(items, key=lambda item: place(item.module)):
        found = records[item.module, item.case.name]
        rows[item.module].cases += 1
        failed = [record for record in found if record["status"] in BAD]
        rows[item.module].hold += any(map(_holds, found)) and not failed
        bad += [(item, record) for record in failed]
        _add_times(rows[item.module], item, found)
    console.print(
        f"\n{'module':<12} {'cases hold':>12}  {'C / eager PyTorch':>17}  {'C / fastest PyTorch':>19}"
    )
    for module, row in rows.items():
        _print(console, f"{module:<12} {f'{row.hold} of {row.cases}':>12}  {_ratios(row)}".rstrip())
    whole = Row(*(sum(getattr(row, name) for row in rows.values()) for name in ("cases", "hold")))
    for row in rows.values():
        whole.eager += row.eager
        whole.fastest += row.fastest
    _print(console, f"{'all':<12} {f'{whole.hold} of {whole.cases}':>12}  {_ratios(whole)}".rstrip())
    if whole.fastest:
        worst, name = max(whole.fastest)
        _print(console, f"C against the fastest PyTorch at worst: {worst:.2f} times its time, {name}")
    if pages:
        _print(console, f"tables and pictures: {pages}")
    for item, record in bad:
        _print(console, f"{record['status']}: {item.name} {record['impl']}: {record['message']}", "red")
    if bad:
        _print(console, lowest_floor(bad, place), "red")


def _holds(record: Mapping) -> bool:
    """Whether it is a result of C, and right where the case judges it."""
    asked = not record.get("message", "").startswith("not judged")
    return is_judged(record["impl"]) and record["status"] == "ok" and asked


def _add_times(row: Row, item: Item, records: Sequence[Mapping]) -> None:
    times = {record["impl"]: number(record, "ms") for record in records}
    ms = {impl: time for impl, time in times.items() if time is not None}
    theirs = {impl: value for impl, value in ms.items() if not is_judged(impl)}
    if not theirs:
        return
    for record in records:
        impl = record["impl"]
        if impl not in ms or not is_judged(impl):
            continue
        row.fastest.append((ms[impl] / min(theirs.values()), f"{item.name} ({impl})"))
        if record.get("ratio", {}).get("over") == "torch_eager":  # sample by sample
            row.eager.append(record["ratio"]["median"])
        elif "torch_eager" in theirs:
            row.eager.append(ms[impl] / theirs["torch_eager"])


def _ratios(row: Row) -> str:
    fastest = [ratio for ratio, _ in row.fastest]
    return "  ".join(
        f"{f'{geomean(found):.2f}' if found else '':>{width}}"
        for found, width in ((row.eager, 17), (fastest, 19))
    )


def _print(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, highlight=False)
