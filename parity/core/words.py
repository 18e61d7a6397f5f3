"""The sentences of answers: templates (Jinja2) in parity/words/, filled with numbers from records.

A file has a heading "## row" for each answer, "## row working" for its steps, and "## method ..." for how it was
measured. A line of an answer is one sentence. It is left out if its values were not measured or are noisy.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from parity.core.tables import Spread, text

FOLDER = Path(__file__).resolve().parents[1] / "words"


class MissingError(ValueError):
    """A sentence asks for a number that there is not."""


def number(value: Any) -> Any:
    """A float in three significant digits or as a whole number, with commas; "infinite" for infinity. MissingError for
    what is no number."""
    if value is None or isinstance(value, jinja2.Undefined):
        raise MissingError
    if isinstance(value, Spread):
        return text(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            if math.isnan(value):
                raise MissingError
            return "infinite"
        if value.is_integer():
            return f"{value:,.0f}"
        digits = 2 - math.floor(math.log10(abs(value)))
        return f"{value:.2e}" if digits > 5 else f"{value:,.{max(0, digits)}f}"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else value


def percent(value: float | None) -> str:
    """0.283 becomes "28 %", and 0.0163 "1.6 %"."""
    if value is None or not math.isfinite(value):
        raise MissingError
    shown = f"{100 * value:.0f}" if abs(value) >= 0.0995 else f"{100 * value:.2g}"
    return f"{shown} %"


def change(ratio: float) -> str:
    """0.88 becomes "falls by 12 %"."""
    return f"{'falls' if ratio < 1 else 'rises'} by {percent(abs(ratio - 1))}"


ENVIRONMENT = jinja2.Environment(undefined=jinja2.StrictUndefined, finalize=number, autoescape=False)
ENVIRONMENT.filters |= {"percent": percent, "change": change, "n": number}
ENVIRONMENT.filters |= {"whole": "{:,.0f}".format, "down": lambda value: f"{math.floor(value):,}"}  # a limit


@cache
def templates(module: str) -> dict[str, list[str]]:
    """{row: its lines}; none of a module without a file."""
    path, found = FOLDER / f"{module}.j2", {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        if line.startswith("## "):
            lines = found.setdefault(line.removeprefix("## "), [])
        elif found:
            lines.append(line)
    return found


def sentences(module: str, row: str, values: dict[str, Any]) -> list[str]:
    """The answer's sentences, without those whose values are missing."""
    found = {line: filled(line, values) for line in templates(module).get(row, ()) if line}
    filled_in = [line for line in found if "{" in line]
    if filled_in and not any(found[line] for line in filled_in):
        return []  # what always holds is no answer without a number
    return [sentence for sentence in found.values() if sentence]


def lines(module: str, heading: str, values: dict[str, Any]) -> list[str]:
    """The lines under a heading, such as the steps to an answer, without those whose values are missing."""
    found = (filled(line, values) for line in templates(module).get(heading, ()))
    return [line for line in found if line is not None]


@cache
def compiled(line: str) -> jinja2.Template:
    return ENVIRONMENT.from_string(line)


def filled(line: str, values: dict[str, Any]) -> str | None:
    try:
        return compiled(line).render(values).rstrip() if "{" in line else line
    except (MissingError, jinja2.UndefinedError, TypeError):
        return None
