"""A DataFrame as a table in Markdown, LaTeX, Typst or CSV: pure functions of the values."""

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from parity.core.escape import escape

FORMATS = ("md", "latex", "typst", "csv")
SUFFIXES = {"md": ".md", "latex": ".tex", "typst": ".typ", "csv": ".csv"}
DIGITS = 3


class Spread(NamedTuple):
    """A cell of two numbers: "834 ± 47"; two columns of a CSV."""

    mean: float
    std: float


class Table:
    """Titles and cells in order; numbers stay numbers until they are rendered."""

    def __init__(
        self,
        frame: pd.DataFrame,
        columns: Mapping[str, str] | Sequence[str] | None = None,
        units: Mapping[str, str] | None = None,
        digits: Mapping[str, int] | None = None,
    ):
        """columns selects, orders and (as a mapping) titles the frame's columns; one that the frame lacks, because
        nothing was measured, is left out. units follow the title in brackets. digits are significant digits."""
        columns = columns if columns is not None else list(frame.columns)
        titles = columns if isinstance(columns, Mapping) else {str(name): str(name) for name in columns}
        unknown = (set(units or {}) | set(digits or {})) - set(titles) - set(frame.columns)
        names = [name for name in titles if name in frame.columns]
        if unknown - set(titles):
            raise ValueError(f"units or digits for {', '.join(sorted(unknown))}, which is no column")
        self.titles = [f"{titles[n]} ({units[n]})" if units and n in units else titles[n] for n in names]
        self.digits = [(digits or {}).get(name, DIGITS) for name in names]
        self.rows = [
            [_plain(value) for value in row] for row in frame[names].itertuples(index=False, name=None)
        ]
        self.numeric = [any(_is_number(row[i]) for row in self.rows) for i in range(len(names))]

    def render(self, form: str) -> str:
        return {"md": self._markdown, "latex": self._latex, "typst": self._typst, "csv": self._csv}[form]()

    def _cells(self, form: str) -> list[list[str]]:
        return [
            [escape(text(value, digits), form) for value, digits in zip(row, self.digits, strict=True)]
            for row in self.rows
        ]

    def _markdown(self) -> str:
        def line(cells):
            return "| " + " | ".join(cells) + " |"

        rule = ["---:" if numeric else "---" for numeric in self.numeric]
        head = [escape(title, "cell") for title in self.titles]
        return "\n".join(line(cells) for cells in [head, rule, *self._cells("cell")]) + "\n"

    def _latex(self) -> str:
        alignment = "".join("r" if numeric else "l" for numeric in self.numeric)
        head = [escape(title, "latex") for title in self.titles]
        lines = [" & ".join(cells) + r" \\" for cells in [head, *self._cells("latex")]]
        body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        # The rules are those of booktabs, where a document loads it.
        rules = [rf"\providecommand{{\{name}rule}}{{\hline}}" for name in ("top", "mid", "bottom")]
        return "\n".join([*rules, rf"\begin{{tabular}}{{{alignment}}}", *body, r"\end{tabular}"]) + "\n"

    def _typst(self) -> str:
        alignment = ", ".join("right" if numeric else "left" for numeric in self.numeric)
        head = ", ".join(f"[{escape(title, 'typst')}]" for title in self.titles)
        lines = ["  " + ", ".join(f"[{cell}]" for cell in row) + "," for row in self._cells("typst")]
        opening = (
            f"#table(\n  columns: {len(self.titles)},\n  align: ({alignment},),\n  table.header({head}),"
        )
        return "\n".join([opening, *lines, ")"]) + "\n"

    def _csv(self) -> str:
        """Unrounded: what reads a CSV can round for itself."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        pairs = [any(isinstance(row[i], Spread) for row in self.rows) for i in range(len(self.titles))]
        head = [
            _two_titles(title) if pair else [title] for title, pair in zip(self.titles, pairs, strict=True)
        ]
        writer.writerow(itertools.chain(*head))
        for row in self.rows:
            cells = [_two_cells(value) if pair else [value] for value, pair in zip(row, pairs, strict=True)]
            writer.writerow("" if value is None else value for value in itertools.chain(*cells))
        return out.getvalue()


def _two_titles(title: str) -> list[str]:
    """ "forward (ms)" becomes "forward mean (ms)" and "forward std (ms)"."""
    name, bracket, unit = title.partition(" (")
    return [f"{name} {what}{bracket}{unit}" for what in Spread._fields]


def _two_cells(value: Any) -> list:
    return list(value) if isinstance(value, Spread) else [value, None]


def text(value: Any, digits: int = DIGITS) -> str:
    """A value as a reader wants it: 1234567, 0.0123, 4.56e-08, yes, and nothing for what is missing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Spread):
        return f"{text(value.mean, digits)} ± {text(value.std, 2)}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if value == 0:
            return "0"
        magnitude = math.floor(math.log10(abs(value)))
        if magnitude < -4 or magnitude > 9:
            return f"{value:.{digits - 1}e}"
        return f"{value:.{max(0, digits - 1 - magnitude)}f}"
    return str(value)


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's, pandas' missing values as None."""
    if hasattr(value, "item"):
        value = value.item()
    if value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return None
    # pandas turns a column of integers with a gap into floats.
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1e3 else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
