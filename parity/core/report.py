"""Pages from records: reports/<machine>/<module>.md, their plots and tables, and README.md, the index.

Nothing here runs, measures or looks at the clock: the same records give the same bytes.
"""

import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd

from parity.core import plot
from parity.core.files import write_whole
from parity.core.identity import host_words
from parity.core.judge import is_judged
from parity.core.record import FILE, RecordError
from parity.core.tables import SUFFIXES, Table
from parity.core.view import Records, geomean


class ReportError(RuntimeError):
    """A module could not write its page; every other page was written."""


class Page:
    """What a module's report() writes to."""

    def __init__(self, module: str, folder: Path, form: str):
        self.module, self.folder, self.form = module, folder, form
        self.blocks: list[str] = []
        self.files: dict[str, str] = {}  # tables beside the page
        self.plots: list[Path] = []
        self.verdicts: dict[str, list[str]] = {}
        self._tables = 0

    def question(self, text: str) -> None:
        """A deliverable's question, in our words."""
        self.blocks.append(f"## {text}\n")

    def text(self, text: str) -> None:
        """A paragraph: the answer, with the derived figures."""
        self.blocks.append(f"{text.strip()}\n")

    def table(
        self,
        frame: pd.DataFrame,
        columns: Mapping[str, str] | Sequence[str] | None = None,
        units: Mapping[str, str] | None = None,
        digits: Mapping[str, int] | None = None,
    ) -> None:
        """A table; without a row, a sentence that says so."""
        if frame.empty:
            self.blocks.append("*Not measured on this machine yet.*\n")
            return
        table = Table(frame, columns, units, digits)
        self.blocks.append(table.render("md"))
        self._tables += 1
        if self.form != "md":
            name = f"{self.module}_{self._tables}{SUFFIXES[self.form]}"
            self.files[name] = table.render(self.form)

    def plot(
        self,
        name: str,
        curves: Mapping,
        *,
        x: str,
        y: str,
        log: bool = True,
        title: str = "",
        caption: str = "",
    ) -> None:
        """An SVG beside the page, with its caption as the text for those who do not see it; nothing where no curve
        has a point."""
        drawn = {label: plot.points(xs, ys, log) for label, (xs, ys) in curves.items()}
        drawn = {label: pairs for label, pairs in drawn.items() if pairs}
        if not drawn:
            return
        path = self.folder / f"{self.module}_{name}.svg"
        plot.write(path, drawn, x=x, y=y, log=log, title=title)
        self.plots.append(path)
        self.blocks.append(f"![{caption or title or f'{y} against {x}'}]({path.name})\n")

    def verdict(self, deliverable: str, text: str) -> None:
        """Adds a sentence to the deliverable's line in the index."""
        self.verdicts.setdefault(deliverable, []).append(text)


def write(
    modules: Mapping[str, ModuleType], records: Sequence[Mapping], folder: Path, form: str = "md"
) -> list[Path]:
    """Rewrites every page, and returns what was written."""
    written: list[Path] = []
    broken: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pages: dict[str, Page] = {}
        for name, module in modules.items():
            mine = [record for record in records if record["module"] == name]
            if not mine:
                continue
            page = Page(name, folder, form)
            try:
                module.report(page, Records(mine))
            except OSError:  # a plot that the disk does not take is nobody's mistake
                raise
            except Exception:  # one module's mistake must not cost the others their pages
                broken.append(f"parity/{name}: report() failed\n{traceback.format_exc()}")
                continue
            pages[name] = page
            body = [f"# {name}\n", _provenance(mine), *page.blocks, *_troubles(mine)]
            written.append(_write(folder / f"{name}.md", "\n".join(body)))
            written += page.plots
            written += [_write(folder / "tables" / file, content) for file, content in page.files.items()]
        written.append(_write(folder / "README.md", _index(modules, pages, records)))
    except OSError as error:
        raise RecordError(
            f"{error.filename or folder}: cannot be written: {error.strerror}; what stood there stays"
        ) from error
    if broken:
        raise ReportError("\n".join(broken))
    return written


def _index(modules: Mapping[str, ModuleType], pages: Mapping[str, Page], records: Sequence[Mapping]) -> str:
    """One line and one verdict a deliverable."""
    rows = []
    for name, module in modules.items():
        for deliverable, title in module.DELIVERABLES.items():
            mine = [r for r in records if r["module"] == name and r["deliverable"] == deliverable]
            said = pages[name].verdicts.get(deliverable, []) if name in pages else []
            rows.append(
                {
                    "deliverable": f"[{deliverable}]({name}.md)" if mine else deliverable,
                    "title": title,
                    "verdict": _verdict(mine),
                    "in figures": " ".join([*said, _figures(Records(mine))]).strip(),
                }
            )
    table = Table(pd.DataFrame(rows, columns=["deliverable", "title", "verdict", "in figures"]))
    return "\n".join(
        [
            "# C against PyTorch\n",
            _provenance(records),
            table.render("md"),
            'holds: C\'s answers obey the rule of the README ("Parity") in every judged case; measured: time or '
            "memory alone, of so many results of C's sides, no answer being judged. The error ratio is C's relative L2 "
            "error over that of the PyTorch side it is judged against, mostly torch_eager, both against float64, as a "
            "geometric mean over the cases; below 1, C is closer. The "
            "time ratio is the median of the side c over that of the side named, as a geometric mean over the cases "
            "measured; below 1, C is faster. torch_eager is the formula in PyTorch, operation by operation; the "
            "fastest PyTorch side is chosen case by case among those that were timed there.\n",
            f"Written by `python -m parity report` from [{FILE}]({FILE}).\n",
        ]
    )


def _verdict(records: Sequence[Mapping]) -> str:
    mine = [record for record in records if is_judged(record["impl"])]
    if not mine:
        return "not measured"
    statuses = Counter(record["status"] for record in mine)
    bad = {status: count for status, count in statuses.items() if status != "ok"}
    words = [f"{count} {status}" for status, count in sorted(bad.items())]
    if "failed" in bad or "error" in bad:
        return f"**fails** ({', '.join(words)} of {len(mine)})"
    if not statuses["ok"]:
        return f"no result ({', '.join(words)})"
    asked = [r for r in mine if r["status"] == "ok" and "error" in r.get("measure", r)]  # or has an error
    unjudged = sum(record.get("message", "").startswith("not judged") for record in asked)
    held, measured = len(asked) - unjudged, statuses["ok"] - len(asked)
    words = [f"{unjudged} not judged", *words] if unjudged else words
    if not held:
        return f"measured ({', '.join([str(measured), *words])})"
    words = [f"{measured} measured", *words] if measured else words
    return f"holds ({', '.join([f'{held} ok', *words])})"


def _figures(records: Records) -> str:
    words = []
    torches = records.torches()
    base = "torch_eager" if "torch_eager" in torches else next(iter(torches), "")
    errors = [error for error in records.error_ratio(base) if np.isfinite(error)]
    if errors:
        words.append(f"error ratio {geomean(errors):.2f}")
    times = records.ratio("ms", base)
    if len(times):
        words.append(f"time ratio {geomean(times):.2f} over {base}")
    fastest = records.ratio("ms", torches)
    if len(fastest) and {impl for impl in torches if len(records.ratio("ms", impl))} != {base}:
        words.append(f"{geomean(fastest):.2f} over the fastest PyTorch side of each case")
    return ", ".join(words)


def _troubles(records: Sequence[Mapping]) -> list[str]:
    """Every result that is no number, with its reason: a page hides nothing."""
    rows = [
        {
            "case": ", ".join([record["deliverable"], *(f"{k} {v}" for k, v in record["case"].items())]),
            "impl": record["impl"],
            "status": record["status"],
            "why": record.get("message", ""),
        }
        for record in records
        if record["status"] != "ok" or record.get("message")
    ]
    return ["## What did not end with a number\n", Table(pd.DataFrame(rows)).render("md")] if rows else []


def _provenance(records: Sequence[Mapping]) -> str:
    """Where the numbers come from, in a line."""

    def distinct(values: Iterable) -> str:
        return " and ".join(dict.fromkeys(str(value) for value in values if value)) or "unknown"

    versions: dict[str, dict] = {}
    for record in records:
        for name, version in record.get("versions", {}).items():
            versions.setdefault(name, {})[version] = None
    words = [f"{name} {'/'.join(found)}" for name, found in sorted(versions.items())]
    dates = sorted(record["time"][:10] for record in records if "time" in record)
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "unknown"
    on_cpu = any("device" not in record for record in records)
    threads = (
        f"{distinct(record.get('threads') for record in records)} threads on both sides; " if on_cpu else ""
    )
    return (
        f"*{distinct(map(_place, records))}; {threads}"
        f"{', '.join(words)}; commit {distinct(record.get('commit') for record in records)}; measured {when}.*\n"
        f"\n*{' '.join(_builds(records))}*\n"
    )


def _place(record: Mapping) -> str | None:
    """The machine in words: of a GPU its name and its host's, else the host's."""
    if "host" not in record:
        return record.get("machine")
    words = host_words(record["host"])
    return f"{record.get('machine')} in {words}" if "device" in record else words


def _builds(records: Sequence[Mapping]) -> Iterable[str]:
    """Which builds of C the results are of: they may be several, and say so."""
    builds = Counter(_build(record["build"]) for record in records if "build" in record)
    if builds:
        yield f"C was built as {'; '.join(f'{words}: {count} results' for words, count in builds.items())}."
    earlier = [record["earlier"].get("build") for record in records if "earlier" in record]
    if earlier:
        words = sorted({_build(build) for build in earlier if build}) or ["before results named their build"]
        yield f"Times and memory of {len(earlier)} results are from earlier runs: {'; '.join(words)}."
    before = sum("build" not in record for record in records)
    if before:
        yield f"{before} of {len(records)} results are from before results named their build, configuration and host."


def _build(build: Mapping) -> str:
    changed = " with changes" if build.get("dirty") else ""
    return f"{build['library']} (tandem {build['version']}, commit {build['commit']}{changed})"


def _write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
    return path
