"""Pictures that depend on the values alone: the same records give the same bytes.

A picture is a function that returns a figure; save() writes it as SVG or PDF. The title stands above the axes, the
machine under it in grey, and the legend below the axes: none of them overlap (tests/parity_report.py).
"""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

from parity.core.sides import SIDES
from parity.core.tables import Spread, is_number

STYLE = {
    "svg.hashsalt": "tandem",  # else the ids of clip paths are random
    "svg.fonttype": "none",  # text stays text: small files, and diffs that can be read
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
}
LOOKS = {name: (side.colour, side.marker) for name, side in SIDES.items() if side.colour}
LOOKS |= {"flash": ("#444444", "*"), "FLOPs": ("#111111", "*")}
# What each colour fills, of bars and areas.
COLOURS = {
    "#9ecae1": ("forward", "after construction", "inputs of norms and attention"),
    "#3182bd": ("backward", "before the update"),
    "#d9d9d9": ("waiting for communication",),
    "#fd8d3c": ("update of the weights", "optimizer state", "optimizer", "after it"),
    "#d1495b": ("communication", "all-gather", "softmax", "scores"),
    "#111111": ("waiting for weights",),
    "#8b5fbf": ("reduce-scatter", "reduction"),
    "#c77f0a": ("all-reduce", "attention"),
    "#08519c": ("weights", "parameters", "matmul", "feed-forward"),
    "#6baed6": ("gradients",),
    "#74c476": ("activations", "elementwise"),
    "#bdbdbd": ("scratch", "buffers", "memory"),
    "#777777": ("other", "live tensors"),
}
FILLS = {name: colour for colour, names in COLOURS.items() for name in names}
SPARE = ("#5b8c5a", "#e58a97", "#62a5dd", "#444444")  # for what has no colour of its own
METADATA = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def points(xs: Sequence, ys: Sequence, log: bool) -> list[tuple[float, float]]:
    """The pairs that can be drawn: without what is no number, and on logarithmic axes without what is not above 0."""
    pairs = [
        pair for pair in zip(xs, ys, strict=True) if all(is_number(v) and math.isfinite(v) for v in pair)
    ]
    return [(x, y) for x, y in pairs if not log or (x > 0 and y > 0)]


def look(label: str) -> tuple[str, str | None, str]:
    """Colour, marker and line of a curve. A comma and a word after the implementation's name make it open markers."""
    impl, _, what = label.partition(", ")
    if impl not in LOOKS:
        raise ValueError(f"no curve can be called {label!r}: it begins with no implementation of plot.LOOKS")
    colour, marker = LOOKS[impl]
    # All are seen if one lies on the other.
    line = "--" if impl.startswith("torch") else "-." if impl.startswith("c_graph") else "-"
    return (colour, f"open {marker}", "") if what else (colour, marker, line)


def fill(name: str) -> str:
    """A colour that depends on the name alone."""
    return FILLS.get(name, SPARE[sum(name.encode()) % len(SPARE)])


@plt.rc_context(STYLE)
def curves(
    panels: Mapping[str, Mapping[str, list[tuple[float, float]]]],
    *,
    x: str,
    y: str,
    title: str,
    under: str = "",
    log: bool | str = True,
    ceilings: Mapping[str, float] | None = None,
) -> Any:
    """{panel: {curve: points}} side by side. log: both axes, or "x". `ceilings` are dotted lines across every panel."""
    size = (3.0 + 3.4 * len(panels), 4.4) if len(panels) > 1 else (7.2, 4.6)
    figure, found = _figure(1, len(panels), size, title, under, sharex=True, sharey=True)
    places = sorted({at for lines in panels.values() for pairs in lines.values() for at, _ in pairs})
    drawn = {}
    for axes, (panel, lines) in zip(found[0], panels.items(), strict=True):
        looks = [look(label) for label in lines]
        if len(set(looks)) < len(looks):
            raise ValueError(f"two curves of {', '.join(lines)} look the same")
        for (label, pairs), (colour, marker, line) in zip(lines.items(), looks, strict=True):
            xs, ys = zip(*pairs, strict=True)
            hollow = marker.startswith("open ")
            how = dict(color=colour, marker=marker.removeprefix("open "), linestyle=line)
            how |= {"markersize": 9, "fillstyle": "none"} if hollow else {"markersize": 4}
            if len(pairs) > 40:
                how |= {"marker": None, "linestyle": ":" if hollow else line}
            drawn.setdefault(label, axes.plot(xs, ys, linewidth=1.5, label=label, **how)[0])
        for words, height in (ceilings or {}).items():
            line = axes.axhline(height, color="#888888", linestyle=":", linewidth=1.2, label=words)
            drawn.setdefault(words, line)
        _scale(axes, log, places)
        axes.set_xlabel(x)
        axes.set_title(panel, fontsize=10)
        axes.tick_params(axis="x", labelsize=9 if len(panels) == 1 else 8)
    found[0][0].set_ylabel(y)
    return _legend(figure, drawn)


def _scale(axes: Any, log: bool | str, places: list[float]) -> None:
    if log:
        axes.set_xscale("log", base=2)
        if len(places) <= 12:  # a tick where something was measured
            axes.xaxis.set_major_locator(ticker.FixedLocator(places[:: 1 + (len(places) - 1) // 6]))
            axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    if log is True:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = axes.get_ylim()
        if high < 200 * low:  # three powers of ten or fewer: name more
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    elif axes.get_ylim()[0] >= 0 or not places:
        axes.set_ylim(bottom=0)


@plt.rc_context(STYLE)
def timeline(
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]],
    *,
    x: str,
    title: str,
    under: str = "",
) -> Any:
    """{panel: {row: {fill: [(begin, end)]}}} one below the other, on one axis. The end of each row is written there."""
    lines = sum(len(rows) for rows in panels.values())
    size = (9.6, 1.9 + 0.3 * lines + 0.35 * len(panels))
    figure, found = _figure(len(panels), 1, size, title, under, sharex=True)
    drawn, last = {}, 0.0
    for axes, (panel, rows) in zip(found[:, 0], panels.items(), strict=True):
        for place, bars in enumerate(rows.values()):
            ends = [end for intervals in bars.values() for _, end in intervals]
            for name, intervals in bars.items():
                spans = [(begin, end - begin) for begin, end in intervals]
                # The edge shows bars that are too short for a pixel.
                how = dict(facecolors=fill(name), edgecolors=fill(name), linewidth=0.1)
                drawn.setdefault(name, axes.broken_barh(spans, (place - 0.4, 0.8), **how))
            if ends:
                last = max(last, *ends)
                axes.text(
                    max(ends), place, f"  ends at {_short(max(ends), 1000)} ms", va="center", fontsize=8
                )
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_title(panel, fontsize=10, loc="left")
    found[-1, 0].set_xlim(0, 1.16 * last or 1)
    found[-1, 0].set_xlabel(x)
    return _legend(figure, drawn)


@plt.rc_context(STYLE)
def stack(
    panels: Mapping[str, tuple[Mapping[str, Sequence[float]], Mapping[str, float]]],
    *,
    x: str,
    y: str,
    title: str,
    under: str = "",
) -> Any:
    """{panel: ({layer: values}, {band: where it ends, 0 to 1})}: layers stacked over named bands, and the peak."""
    size = (7.2, 4.8) if len(panels) == 1 else (2.0 + 4.0 * len(panels), 4.8)
    figure, found = _figure(1, len(panels), size, title, under, sharey=True)
    drawn, top = {}, 0.0
    for axes, (panel, (layers, bands)) in zip(found[0], panels.items(), strict=True):
        count = len(next(iter(layers.values())))
        places = [100 * (i + 0.5) / count for i in range(count)]
        areas = axes.stackplot(places, *layers.values(), colors=[fill(name) for name in layers])
        drawn |= dict(zip(layers, areas, strict=True))
        begin = 0.0
        passed = {band: end for band, end in bands.items() if end > 0}
        for i, (band, end) in enumerate(passed.items()):
            axes.axvspan(100 * begin, 100 * end, color="#f0f0f0" if i % 2 else "#ffffff", zorder=-2)
            if end - begin > 0.04:
                how = dict(xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8)
                axes.annotate(band, (50 * (begin + end), 1.0), **how)
            begin = end
        totals = [sum(values) for values in zip(*layers.values(), strict=True)]
        peak = max(range(count), key=totals.__getitem__)
        axes.annotate(
            f"peak {_short(totals[peak])}",
            (places[peak], totals[peak]),
            xytext=(0, 4),
            textcoords="offset points",
            ha="left" if places[peak] < 25 else "right" if places[peak] > 75 else "center",
            va="bottom",
            fontsize=9,
        )
        top = max(top, *totals)
        axes.set_xlim(0, 100)
        axes.set_xlabel(x)
        axes.set_title(panel, fontsize=10, pad=16)
    found[0][0].set_ylabel(y)
    found[0][0].set_ylim(0, 1.15 * top)  # of all panels
    return _legend(figure, drawn)


@plt.rc_context(STYLE)
def bars(
    groups: Mapping[str, Mapping[str, float | Spread]],
    *,
    y: str,
    title: str,
    under: str = "",
    stacked: bool = True,
) -> Any:
    """{bar: {part: height}}: parts stacked, and the sum written on top. Not stacked: bars beside each other, with a
    line of 2 std if the height is a Spread."""
    figure, found = _figure(1, 1, (max(7.2, 1.6 + 1.1 * len(groups)), 4.6), title, under)
    axes, drawn = found[0, 0], {}
    parts = list(dict.fromkeys(part for heights in groups.values() for part in heights))
    for place, heights in enumerate(groups.values()):
        bottom = 0.0
        for i, part in enumerate(parts):
            found = heights.get(part, 0.0)
            height, std = found if isinstance(found, Spread) else (found, None)
            at = place if stacked else place + (i - (len(parts) - 1) / 2) * 0.8 / len(parts)
            width = 0.6 if stacked else 0.8 / len(parts)
            colour = LOOKS[part][0] if part in LOOKS else fill(part)
            how = dict(color=colour, yerr=std, error_kw={"linewidth": 1, "capsize": 2})
            bar = axes.bar(at, height, width, bottom if stacked else 0.0, **how)[0]
            drawn.setdefault(part, bar)
            if not stacked and height:
                how = dict(ha="center", va="bottom", fontsize=7, rotation=90)
                axes.text(at, height + (std or 0), f" {_short(height)}", **how)
            bottom += height
        if stacked:
            axes.text(place, bottom, f"{bottom:,.0f}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(groups)), [textwrap.fill(name, 14) for name in groups], fontsize=9)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.1)
    axes.set_ylabel(y)
    return _legend(figure, drawn)


def _figure(rows: int, columns: int, size: tuple[float, float], title: str, under: str, **share) -> tuple:
    """An empty figure with its title; long titles are wrapped, so that none is cut."""
    lines = textwrap.wrap(title, int(size[0] * 12))
    height = 0.22 * len(lines) + (0.2 if under else 0) + 0.1
    whole = size[1] + height
    how = dict(figsize=(size[0], whole), layout="constrained", squeeze=False)
    figure, found = plt.subplots(rows, columns, **how, **share)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - height / whole))
    figure.text(0.01, 1 - 0.05 / whole, "\n".join(lines), fontsize=11, va="top", gid="title")
    if under:
        place = 1 - (0.22 * len(lines) + 0.06) / whole
        figure.text(0.01, place, under, fontsize=8.5, color="#666666", va="top", gid="under")
    return figure, found


def _short(value: float, whole: float = 100) -> str:
    """Three significant digits, or from `whole` on a whole number."""
    return f"{value:,.0f}" if value >= whole else f"{value:.3g}"


def _legend(figure: Any, drawn: Mapping[str, Any]) -> Any:
    """Below the axes, in as many columns as fit."""
    longest = max((len(name) for name in drawn), default=1)
    columns = max(1, min(len(drawn), int(figure.get_figwidth() * 11 / (longest + 7))))
    figure.legend(drawn.values(), drawn, loc="outside lower left", ncols=columns, frameon=False)
    return figure


def save(figure: Any, form: str = "svg") -> bytes:
    """The figure's file; it is closed."""
    drawing = io.BytesIO()
    try:
        with plt.rc_context(STYLE):
            title = next((text.get_text() for text in figure.texts), None)  # for screen readers
            figure.savefig(drawing, format=form, metadata=METADATA.get(form, {}) | {"Title": title})
    finally:
        plt.close(figure)
    if form != "svg":
        return drawing.getvalue()
    # matplotlib ends some lines with blanks, which would show up in every diff check.
    text = drawing.getvalue().decode()
    return "".join(line.rstrip() + "\n" for line in text.splitlines()).encode()
