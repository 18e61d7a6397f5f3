"""Curves as SVG files that depend on the values alone: the same records give the same bytes."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

from parity.core.files import write_whole

STYLE = {
    "svg.hashsalt": "tandem",  # else the ids of clip paths are random
    "svg.fonttype": "none",  # text stays text: small files, and diffs that can be read
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
}
# C in one colour on every plot, PyTorch in another; told apart in grey print and by most colour-blind
# readers.
COLOURS = ("#0b5fa5", "#d1495b", "#2e8540", "#8b5fbf", "#c77f0a", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "x")
METADATA = {"Date": None, "Creator": None}


def points(xs: Sequence, ys: Sequence, log: bool) -> list[tuple[float, float]]:
    """The pairs that can be drawn: what is no number (an "oom", a gap) is left out, and on logarithmic axes what is
    not above 0."""
    numbers = [(x, y) for x, y in zip(xs, ys, strict=True) if _is_finite(x) and _is_finite(y)]
    return [(x, y) for x, y in numbers if not log or (x > 0 and y > 0)]


def write(
    path: Path, curves: Mapping[str, list[tuple[float, float]]], *, x: str, y: str, log: bool, title: str
) -> None:
    """Draws {label: points}. `log` makes both axes logarithmic, the horizontal one to base 2."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
        for i, (label, pairs) in enumerate(curves.items()):
            marker = MARKERS[i % len(MARKERS)] if len(pairs) <= 40 else None
            axes.plot(
                [a for a, _ in pairs],
                [b for _, b in pairs],
                color=COLOURS[i % len(COLOURS)],
                marker=marker,
                markersize=4,
                linewidth=1.5,
                label=label,
            )
        if log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_title(title, loc="left", fontsize=11)
        axes.legend(frameon=False)
        drawing = io.StringIO()
        try:
            figure.savefig(drawing, format="svg", metadata=METADATA)
        finally:
            plt.close(figure)
    # matplotlib ends some lines with blanks, which would show up in every diff check.
    write_whole(path, "".join(line.rstrip() + "\n" for line in drawing.getvalue().splitlines()))


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
