"""Records as a page looks at them: one row a (case, impl), sides next to each other, ratios."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from parity.core.case import is_judged
from parity.core.comparison import noisy, quotient, same_place
from parity.core.tables import Samples, is_number

# Name of a number -> where the record has it. `ms` alone is the median.
COUNTED = "n, spread"  # of the samples of a row's times
SPEEDS = ("ms", "ratio", "tflops", "gb_s")
MEASURED = {"ms": ("ms", "median"), "ratio": ("ratio", "median")}
MEASURED |= {name: ("error", name) for name in ("max_abs", "rel_l2", "ulp_max", "used")}


class Records:
    """The newest record of each (case, impl) of a module, in the order in which the cases first ran."""

    def __init__(self, records: Iterable[Mapping]):
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    def only(self, deliverable: str | None = None, impl: str | None = None, **keys: Any) -> "Records":
        """Those of a deliverable, of an impl, and with these case keys; a list means any of its values."""

        def wanted(record: Mapping) -> bool:
            case = record["case"]
            mine = _matches(record["deliverable"], deliverable) and _matches(record["impl"], impl)
            return mine and all(key in case and _matches(case[key], want) for key, want in keys.items())

        return self.where(wanted)

    def where(self, wanted: Callable[[Mapping], bool]) -> "Records":
        return Records(filter(wanted, self.records))

    def ordered(self, by: Callable[[Mapping], Any]) -> "Records":
        return Records(sorted(self.records, key=by))

    def first(self, *asked: str, **keys: Any) -> Mapping | None:
        """The first of only()."""
        return next(iter(self.only(*asked, **keys).records), None)

    def values(self, key: str) -> list:
        """The values of a case key: numbers ascending, words in the order in which they first ran."""
        found = dict.fromkeys(record["case"][key] for record in self.records if key in record["case"])
        return sorted(found) if all(is_number(value) for value in found) else list(found)

    def impls(self) -> list[str]:
        """C's first, then the others, each in the order in which they first ran."""
        found = dict.fromkeys(record["impl"] for record in self.records)
        return sorted(found, key=lambda impl: not is_judged(impl))

    def value(self, name: str, impl: str = "c", **keys: Any) -> float:
        """One number; NaN if there is none. ValueError if the keys leave more than one case."""
        numbers = [number(record, name) for record in self.only(impl=impl, **keys).records]
        found = [value for value in numbers if value is not None]
        if len(found) > 1:
            raise ValueError(f"{len(found)} records of {impl} have {keys}; name more keys")
        return found[0] if found else float("nan")

    def curve(self, x: str, name: str, impl: str) -> tuple[list, list]:
        """The values of a case key, and one number at each; None where there is none."""
        xs = self.only(impl=impl).values(x)
        ys = [self.value(name, impl=impl, **{x: at}) for at in xs]
        return xs, [None if y != y else y for y in ys]

    def wide(self, keys: Sequence[str], value: str, base: str | None = None) -> list[dict[str, Any]]:
        """A row for each combination of the case keys, with a number for each impl; where a number is missing, the
        status in words. With `base`, also "c / base" for every C impl. `noisy` names sides whose times are noisy.
        ValueError if two cases meet in a cell."""
        rows: dict[tuple, dict[str, Any]] = {}
        for record in self.records:
            head = {key: record["case"].get(key) for key in keys}
            row = rows.setdefault(tuple(head.values()), head)
            if record["impl"] in row:
                raise ValueError(f"two cases of {record['impl']} agree in {', '.join(keys)}; name more keys")
            found = number(record, value)
            if value == "ms":
                count(row, record)
            if value in SPEEDS and noisy(record):
                row["noisy"] = ", ".join(filter(None, [row.get("noisy"), record["impl"]]))
            lost = record["status"] if record["status"] != "ok" else None
            row[record["impl"]] = lost if found is None else found
        orders = [[None, *self.values(key)] for key in keys]

        def place(combination: tuple) -> list[int]:
            return [order.index(word) for order, word in zip(orders, combination, strict=True)]

        ratios = {f"{impl} / {base}": impl for impl in filter(is_judged, self.impls()) if base}
        for row in rows.values():
            row |= {title: quotient(row.get(impl), row.get(base)) for title, impl in ratios.items()}
        last = [name for name in (COUNTED, "noisy") if any(name in row for row in rows.values())]
        names = [*keys, *self.impls(), *ratios, *last]
        return [{name: rows[at].get(name) for name in names} for at in sorted(rows, key=place)]

    def ratio(self, value: str, over: str = "torch_eager") -> np.ndarray:
        """C's value over that of a side, for every case in which both are numbers and the divisor is not 0."""
        return self._ratios(value, lambda mine: over)

    def error_ratio(self) -> np.ndarray:
        """The same of rel_l2, over the side that C is judged against: the record's `reference`, else eager PyTorch."""
        return self._ratios("rel_l2", lambda mine: mine.get("reference", "torch_eager"))

    def _ratios(self, value: str, over: Callable[[Mapping], str]) -> np.ndarray:
        cases: dict[tuple, dict[str, Mapping]] = {}
        for record in self.records:
            case = (record["deliverable"], *record["case"].items())
            cases.setdefault(case, {})[record["impl"]] = record
        ratios = []
        for sides in cases.values():
            mine = sides.get("c")
            theirs = mine and sides.get(over(mine))
            together = mine and theirs and same_place(mine, theirs)
            ratios.append(quotient(number(mine, value), number(theirs, value)) if together else None)
        return np.array([ratio for ratio in ratios if ratio is not None], dtype=np.float64)


def count(row: dict, record: Mapping) -> None:
    """Adds a record to the row's number of samples and their spread."""
    if "ms" in record and record["status"] == "ok":
        n, spread = record["ms"]["n"], record["ms"]["std"] / record["ms"]["mean"]
        low, high, most = row.get(COUNTED, (n, n, spread))
        row[COUNTED] = Samples(min(low, n), max(high, n), max(most, spread))


def number(record: Mapping, name: str) -> float | None:
    """A number of a record by column name, or by key with dots. A wrong answer has no speed. The error
    of a NaN, which a record has as null, is infinite."""
    path = MEASURED.get(name, tuple(name.split(".")))
    if path[0] in SPEEDS and record["status"] != "ok":
        return None
    value: Any = record
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    if path[0] == "error" and value is None:  # rel_l2 is null as well if the truth is 0
        return math.inf if name == "used" or record["error"].get("max_abs") is None else None
    return value if is_number(value) else None


def _matches(value: Any, want: Any) -> bool:
    return want is None or value == want or (isinstance(want, (list, tuple, set)) and value in want)
