"""Curves as SVG files that depend on the values alone: the same records give the same bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

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
# C in one colour on every plot, PyTorch in another; told apart in grey print and by most colour-blind readers.
COLOURS = ("#0b5fa5", "#d1495b", "#2e8540", "#8b5fbf", "#c77f0a", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "x")
METADATA = {"Date": None, "Creator": None}


def write(
    path: Path,
    curves: Mapping[str, tuple[Sequence, Sequence]],
    *,
    x: str,
    y: str,
    log: bool = True,
    title: str = "",
) -> None:
    """Draws {label: (xs, ys)} with points that are None left out. `log` makes both axes logarithmic, the horizontal
    one to base 2."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
        for i, (label, (xs, ys)) in enumerate(curves.items()):
            points = [(a, b) for a, b in zip(xs, ys, strict=True) if a is not None and b is not None]
            marker = MARKERS[i % len(MARKERS)] if len(points) <= 40 else None
            axes.plot(
                [a for a, _ in points],
                [b for _, b in points],
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
        try:
            figure.savefig(path, format="svg", metadata=METADATA)
        finally:
            plt.close(figure)
    # matplotlib ends some lines with blanks, which would show up in every diff check.
    path.write_text("".join(line.rstrip() + "\n" for line in path.read_text().splitlines()))
