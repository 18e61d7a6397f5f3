"""Rows as a table in Markdown, HTML or LaTeX: pure functions of the values."""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from parity.core.escape import escape

# What a document that includes a table of ours must load.
PREAMBLE = r"\usepackage{longtable,booktabs,array,pdflscape,caption}"
# Points and gap. Letters of 7 and of 5 points are wider, as if of more.
LATEX_SIZES = (("small", 9, 4), ("footnotesize", 8, 3), ("scriptsize", 7.6, 2.5), ("tiny", 6.2, 2))
LATEX_WIDTH, LATEX_HEIGHT = 455, 670  # points between margins of 2.5 cm on A4
# A table that finds no room for its head and some rows begins on the next page.
ROOM = r"\par\vspace{0pt plus 8\baselineskip}\penalty-100\vspace{0pt plus -8\baselineskip}"
LATEX_EM = 0.55  # of a letter's mean width to its size
DIGITS = 3


class Spread(NamedTuple):
    """A cell of two numbers: "834 ± 47"."""

    mean: float
    std: float


class Samples(NamedTuple):
    """A cell that tells of a row's times how many samples they are of, and the largest std / mean."""

    low: int
    high: int
    spread: float

    def __str__(self) -> str:
        n = f"{self.low} to {self.high}" if self.high > self.low else self.low
        return f"{n}, {100 * self.spread:.1f} %"


class Table:
    """Titles and cells in order; numbers stay numbers until they are rendered."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns=None, units=None, digits=None):
        """columns selects, orders and (as a mapping) titles the columns. One that no row has, because nothing was
        measured, is left out. units follow the title in brackets. digits are significant digits."""
        there = columns_of(rows)
        titles = titles_of(there if columns is None else columns)
        names = [name for name in titles if name in there]
        self.titles = [f"{titles[n]} ({units[n]})" if units and n in units else titles[n] for n in names]
        self.digits = [(digits or {}).get(name, DIGITS) for name in names]
        self.rows = [[row.get(name) if has(row, name) else None for name in names] for row in rows]
        columns = [[row[i] for row in self.rows] for i in range(len(names))]
        self.numeric = [any(is_number(x) or isinstance(x, Spread) for x in cells) for cells in columns]

    def render(self, form: str, caption: str = "", label: str = "") -> str:
        """The table in a format; LaTeX's has the caption and the label."""
        return self._latex(caption, label) if form == "latex" else getattr(self, f"_{form}")()

    def _cells(self, form: str) -> list[list[str]]:
        """Texts, escaped for a form if one is given."""
        rows = [[*map(text, row, self.digits)] for row in self.rows]
        return [[escape(cell, form) for cell in row] for row in rows] if form else rows

    def _md(self) -> str:
        def line(cells):
            return "| " + " | ".join(cells) + " |"

        rule = ["---:" if numeric else "---" for numeric in self.numeric]
        head = [escape(title, "cell") for title in self.titles]
        return "\n".join(map(line, [head, rule, *map(unbroken, self._cells("cell"))])) + "\n"

    def _html(self) -> str:
        def line(tag, cells):
            marks = ["r" if numeric else "l" for numeric in self.numeric]
            pairs = zip(marks, cells, strict=True)
            return "<tr>" + "".join(f'<{tag} class="{mark}">{cell}</{tag}>' for mark, cell in pairs) + "</tr>"

        rows = [line("td", unbroken(map(html.escape, row))) for row in self._cells("plain")]
        head = line("th", [html.escape(title) for title in self.titles])
        return "\n".join(["<table>", f"<thead>{head}</thead>", *rows, "</table>"]) + "\n"

    def _latex(self, caption: str = "", label: str = "") -> str:
        """A longtable that fits a page: the largest letters that fit, in landscape if none are small enough."""
        cells = self._cells("")
        columns_of = list(zip(self.titles, map(list, zip(*cells, strict=True)), strict=True))
        fits = (
            (widths, size, point, gap, aside)
            for aside, wide in ((False, LATEX_WIDTH), (True, LATEX_HEIGHT))
            for broken in (False, True)
            for size, point, gap in LATEX_SIZES
            for widths in [[_ems(title, column, broken) for title, column in columns_of]]
            if sum(widths) * point * LATEX_EM + 2 * gap * len(widths) <= wide
        )
        narrowest = [_ems(title, column, True) for title, column in columns_of]
        ems, size, point, gap, aside = next(fits, (narrowest, *LATEX_SIZES[-1], True))
        most = (LATEX_HEIGHT if aside else LATEX_WIDTH) - 2 * gap * len(ems)
        shrink = min(1.0, most / (sum(ems) * point * LATEX_EM))
        columns = "".join(
            rf">{{\ragged{'left' if numeric else 'right'}\arraybackslash}}p{{{em * point * LATEX_EM * shrink:.1f}pt}}"
            for em, numeric in zip(ems, self.numeric, strict=True)
        )
        head, *lines = [" & ".join(breaking(cell) for cell in row) + r" \\" for row in [self.titles, *cells]]
        named = rf"\caption{{{breaking(caption)}}}" + (rf"\label{{{label}}}" if label else "") + r"\\"
        body = [
            ROOM,
            rf"\begin{{longtable}}{{{columns}}}",
            *([named] if caption else []),
            *(r"\toprule", head, r"\midrule", r"\endfirsthead", r"\toprule", head, r"\midrule", r"\endhead"),
            *lines,
            r"\bottomrule",
            r"\end{longtable}",
        ]
        body = [rf"{{\{size}\setlength{{\tabcolsep}}{{{gap}pt}}", *body, "}"]
        body = [r"\begin{landscape}", *body, r"\end{landscape}"] if aside else body
        return "\n".join(body) + "\n"


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """In the order in which they first come."""
    return list(dict.fromkeys(name for row in rows for name in row))


def titles_of(columns: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    return dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}


def has(row: Mapping[str, Any], name: str) -> bool:
    """Whether there is something to show; NaN is nothing."""
    value = row.get(name)
    return value is not None and value != "" and value == value


def text(value: Any, digits: int = DIGITS) -> str:
    """A value as a reader wants it: 1234567, 0.0123, 4.56e-08, yes, and nothing for what is missing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
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


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ems(title: str, cells: list[str], broken: bool) -> float:
    """Letters that a column needs. Titles may break; cells may if they are long texts, and all may if `broken`."""
    joints = r"(?<=[_/,:<]) *| +(?!%)"
    words = [word for cell in [title, *(cells if broken else [])] for word in re.split(joints, cell)]
    longest, cell = (max(map(_letters, found), default=1) for found in (words, cells))
    return max(longest, cell / 3 if broken else min(cell, 40), len(title) / 4, 2)


def unbroken(cells: Iterable[str]) -> list[str]:
    """Cells in which no line ends before a % or at a ±: with spaces that do not break."""
    return [re.sub(r"(?<=\d) (?=[±%])|(?<=±) ", "\u00a0", cell) for cell in cells]


def _letters(text: str) -> float:
    """Its length in letters of the mean width."""
    return len(text) + 0.3 * sum(letter in "mwMW" for letter in text)


def breaking(cell: str) -> str:
    """LaTeX, in which a line may break after what joins the words of a name, but not within a number."""
    cell = escape(cell, "latex").replace(r" \%", r"~\%")
    return re.sub(r"(\\_|[/:]|,(?!\d)|\\textless\{\})(?=\S)", r"\1\\allowbreak{}", cell)
