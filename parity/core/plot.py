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
# An implementation looks the same on every plot: colour and marker. C's are blue, eager PyTorch's red.
LOOKS = {
    "c": ("#0b5fa5", "o"),
    "c_graph": ("#3f8fd2", "s"),
    "c_graph_overlap": ("#05305a", "^"),
    "c_naive": ("#7fb4e3", "v"),
    "torch_eager": ("#d1495b", "s"),
    "torch_eager_f32": ("#e58a97", "D"),
    "torch_eager_seed": ("#8c1c2e", "x"),
    "torch_compile": ("#c77f0a", "D"),
    "torch_compile_graph": ("#8a5200", "v"),
    "torch_flash": ("#2e8540", "^"),
    "torch_cudnn": ("#8b5fbf", "D"),
    "torch_efficient": ("#5b8c5a", "v"),
    "torch_tiled": ("#777777", "x"),
    "flash": ("#444444", "*"),
    "c_mpi": ("#1c6fb8", "v"),
    "c_gloo": ("#62a5dd", "^"),
    "c_nccl": ("#0a4178", "s"),
    "torch_gloo": ("#da6474", "x"),
    "torch_nccl": ("#a3283b", "D"),
}
# What fills a bar of a timeline.
FILLS = {"forward": "#9ecae1", "backward": "#3182bd", "after": "#d9d9d9", "collective": "#d1495b"}
METADATA = {"Date": None, "Creator": None}


def points(xs: Sequence, ys: Sequence, log: bool) -> list[tuple[float, float]]:
    """The pairs that can be drawn: what is no number (an "oom", a gap) is left out, and on logarithmic axes what is
    not above 0."""
    numbers = [(x, y) for x, y in zip(xs, ys, strict=True) if _is_finite(x) and _is_finite(y)]
    return [(x, y) for x, y in numbers if not log or (x > 0 and y > 0)]


def look(label: str) -> tuple[str, str | None, str]:
    """Colour, marker and line of a curve: of an implementation, or dashed where a comma and a word follow its name."""
    impl, _, what = label.partition(", ")
    if impl not in LOOKS:
        raise ValueError(f"no curve can be called {label!r}: it begins with no implementation of plot.LOOKS")
    colour, marker = LOOKS[impl]
    return (colour, None, "--") if what else (colour, marker, "-")


def write(
    path: Path,
    panels: Mapping[str, Mapping[str, list[tuple[float, float]]]],
    *,
    x: str,
    y: str,
    log: bool,
    title: str,
    ceilings: Mapping[str, float],
) -> None:
    """Draws {panel: {curve: points}} side by side. `log` makes both axes logarithmic, the horizontal one to base 2.
    `ceilings` are drawn across every panel, dotted."""
    with plt.rc_context(STYLE):
        size = (3.0 + 3.4 * len(panels), 3.8) if len(panels) > 1 else (7.2, 4.0)
        figure, found = plt.subplots(
            1, len(panels), figsize=size, layout="constrained", sharey=True, squeeze=False
        )
        drawn = {}
        for axes, (panel, curves) in zip(found[0], panels.items(), strict=True):
            looks = [look(label) for label in curves]
            if len(set(looks)) < len(looks):
                raise ValueError(f"two curves of {', '.join(curves)} look the same")
            for (label, pairs), (colour, marker, line) in zip(curves.items(), looks, strict=True):
                xs, ys = zip(*pairs, strict=True)
                how = dict(color=colour, marker=marker if len(pairs) <= 40 else None, linestyle=line)
                drawn.setdefault(label, axes.plot(xs, ys, markersize=4, linewidth=1.5, label=label, **how)[0])
            for words, height in ceilings.items():
                line = axes.axhline(height, color="#888888", linestyle=":", linewidth=1.2, label=words)
                drawn.setdefault(words, line)
            if log:
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
                axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axes.set_xlabel(x)
            axes.set_title(panel, fontsize=10)
        found[0][0].set_ylabel(y)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.legend(drawn.values(), drawn, loc="outside right upper", frameon=False)
        _save(figure, path)


def timeline(
    path: Path,
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]],
    *,
    x: str,
    title: str,
) -> None:
    """Draws {panel: {row: {fill: [(begin, end)]}}} one under the other, on one axis; fills are those of FILLS."""
    with plt.rc_context(STYLE):
        lines = sum(len(rows) for rows in panels.values())
        figure, found = plt.subplots(
            len(panels),
            1,
            figsize=(9.6, 1.2 + 0.32 * lines),
            layout="constrained",
            sharex=True,
            squeeze=False,
        )
        drawn = {}
        for axes, (panel, rows) in zip(found[:, 0], panels.items(), strict=True):
            for place, bars in enumerate(rows.values()):
                for fill, intervals in bars.items():
                    spans = [(begin, end - begin) for begin, end in intervals]
                    how = dict(facecolors=FILLS[fill], edgecolor="white", linewidth=0.2)
                    drawn.setdefault(fill, axes.broken_barh(spans, (place - 0.4, 0.8), **how))
            axes.set_yticks(range(len(rows)), list(rows))
            axes.invert_yaxis()
            axes.set_axisbelow(True)
            axes.grid(visible=False, axis="y")
            axes.set_title(panel, fontsize=10, loc="left")
        found[-1, 0].set_xlabel(x)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.legend(drawn.values(), drawn, loc="outside right upper", frameon=False)
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    drawing = io.StringIO()
    try:
        figure.savefig(drawing, format="svg", metadata=METADATA)
    finally:
        plt.close(figure)
    # matplotlib ends some lines with blanks, which would show up in every diff check.
    write_whole(path, "".join(line.rstrip() + "\n" for line in drawing.getvalue().splitlines()))


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
