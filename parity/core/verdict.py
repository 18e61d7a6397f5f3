"""The last lines of a run: which cases hold, what C's time is relative to PyTorch's, and what failed."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from parity.core.case import BAD, is_judged
from parity.core.comparison import geomean, quotient
from parity.core.record import by_case
from parity.core.sweep import Item, lowest_floor, places
from parity.core.view import number


@dataclass
class Row:
    """The cases of one module."""

    cases: int = 0
    hold: int = 0
    eager: list[float] = field(default_factory=list)  # C's time over eager PyTorch's
    fastest: list[tuple[float, str]] = field(default_factory=list)  # over the fastest side's, and the case


def say(items: Sequence[Item], newest: Sequence[Mapping], console: Console, pages: Path | None = None) -> int:
    """Prints a line a module, the worst case, where the pages are, and at the end what failed. Returns how many."""
    records, place = by_case(newest), places(items)
    rows: dict[str, Row] = defaultdict(Row)
    whole, bad, unjudged = Row(), [], Counter()
    for item in sorted(items, key=lambda item: place(item.module)):
        found = records.get((item.module, item.case.name), [])
        failed = [record for record in found if record["status"] in BAD]
        bad += [(item, record) for record in failed]
        mine = [record for record in found if is_judged(record["impl"]) and record["status"] == "ok"]
        unjudged[item.module] += bool(mine) and not failed and not any(map(_holds, mine))
        for row in (rows[item.module], whole):
            row.cases += 1
            row.hold += any(map(_holds, found)) and not failed
            _add_times(row, item, found)
    heads = f"{'module':<12} {'cases hold':>12}  {'C / eager PyTorch':>17}  {'C / fastest PyTorch':>19}"
    console.print(f"\n{heads}")
    for name, row in [*rows.items(), ("all", whole)]:
        console.print(f"{name:<12} {f'{row.hold} of {row.cases}':>12}  {_ratios(row)}".rstrip())
    if unjudged.total():
        words = ", ".join(f"{count} of {name}" for name, count in unjudged.items() if count)
        console.print(f"not judged, only measured: {words}")
    if whole.fastest:
        worst, name = max(whole.fastest)
        console.print(f"C against the fastest PyTorch at worst: {worst:.2f} times its time, {name}")
    if pages:
        console.print(f"tables and pictures: {pages}")
    for item, record in bad:
        console.print(f"{record['status']}: {item.name} {record['impl']}: {record['message']}", style="red")
    if bad:
        console.print(lowest_floor(bad, place), style="red")
    return len(bad)


def _holds(record: Mapping) -> bool:
    """Whether it is a result of C, and right where the case judges it."""
    judged = "error" in record.get("measure", "error") or "timed" in record
    judged &= not record.get("message", "").startswith("not judged")
    return is_judged(record["impl"]) and record["status"] == "ok" and judged


def _add_times(row: Row, item: Item, records: Sequence[Mapping]) -> None:
    times = {record["impl"]: number(record, "ms") for record in records}
    ms = {impl: time for impl, time in times.items() if time is not None}
    theirs = {impl: value for impl, value in ms.items() if not is_judged(impl)}
    for record in records:
        impl = record["impl"]
        if not theirs or impl not in ms or impl in theirs:
            continue
        row.fastest.append((quotient(ms[impl], min(theirs.values())), f"{item.name} ({impl})"))
        if record.get("ratio", {}).get("over") == "torch_eager":  # sample by sample
            row.eager.append(record["ratio"]["median"])
        elif "torch_eager" in theirs:
            row.eager.append(quotient(ms[impl], theirs["torch_eager"]))


def _ratios(row: Row) -> str:
    means = (geomean(found) for found in (row.eager, [ratio for ratio, _ in row.fastest]))
    eager, fastest = ("" if mean is None else f"{mean:.2f}" for mean in means)
    return f"{eager:>17}  {fastest:>19}"
