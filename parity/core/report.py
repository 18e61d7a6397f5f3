"""Pages from records: reports/<machine>/<module>.md and <module>_tables.md, their plots and exported tables, and
README.md, the index.

Nothing here runs, measures or looks at the clock: the same records give the same bytes.
"""

import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pandas as pd

from parity.core import plot
from parity.core.case import case_name
from parity.core.escape import escape
from parity.core.files import write_whole
from parity.core.handouts import HANDOUTS, deliverable_of
from parity.core.identity import host_words
from parity.core.judge import is_judged
from parity.core.record import FILE, RecordError
from parity.core.tables import SUFFIXES, Table
from parity.core.view import Records

NOTHING = "*Not measured on this machine yet.*\n"
MOST_ROWS = 10  # of a table on a module's page
GRIDS = "_tables.md"  # the module's second page, for longer ones
COMMENTS = {"latex": "%", "typst": "//", "csv": "#"}  # how an exported table says what it is


class ReportError(RuntimeError):
    """A module could not write its page; every other page was written."""


class Page:
    """What a module's report() writes to: answers first, then questions with small tables, at the end how it was
    measured. Tables of more than MOST_ROWS rows stand on a second page."""

    def __init__(self, module: str, folder: Path, form: str, machine: str = ""):
        self.module, self.folder, self.form, self.machine = module, folder, form, machine
        self.answers: list[Answer] = []
        self.blocks: list[str] = []
        self.grids: list[str] = []  # blocks of the second page
        self.methods: list[str] = []
        self.files: dict[
            str, tuple[str, str]
        ] = {}  # tables beside the page: their question, and what is in them
        self.plots: list[Path] = []
        self._question = ""

    def question(self, text: str) -> None:
        """A deliverable's question, in our words: a heading."""
        self._question = text
        self.blocks.append(f"## {text}\n")

    def answer(self, row: str, text: str, figure: str = "", question: str = "") -> None:
        """What the deliverable's question comes to, in at most three sentences, for the head of the page. `row` is
        one of the module's DELIVERABLES; `figure` is the one figure of its line in the index. It leads to `question`,
        else to the one before it."""
        self.answers.append(Answer(row, text.strip(), figure, anchor(question or self._question)))

    def text(self, text: str) -> None:
        """A paragraph under the question."""
        self.blocks.append(f"{text.strip()}\n")

    def method(self, text: str) -> None:
        """A paragraph of the page's last section: how something was measured, what a word means."""
        self.methods.append(f"{text.strip()}\n")

    def table(
        self,
        frame: pd.DataFrame,
        name: str,
        columns: Mapping[str, str] | Sequence[str] | None = None,
        units: Mapping[str, str] | None = None,
        digits: Mapping[str, int] | None = None,
    ) -> None:
        """A table; without a row, a sentence that says so. `name` is that of its file where tables are exported. A
        long one stands on the second page, under its question and its name, and a link to it here."""
        if frame.empty:
            if self.blocks[-1:] != [NOTHING]:
                self.blocks.append(NOTHING)
            return
        table = Table(frame, columns, units, digits)
        self._export(name, table)
        if len(frame) <= MOST_ROWS:
            self.blocks.append(table.render("md"))
            return
        title = f"{name}: {self._question}"
        self.grids += [f"## {title}\n", table.render("md")]
        self.blocks.append(f"[All {len(frame)} rows: {name}]({self.module}{GRIDS}#{anchor(title)})\n")

    def plot(
        self,
        name: str,
        curves: Mapping,
        *,
        x: str,
        y: str,
        title: str,
        log: bool = True,
        ceilings: Mapping[str, float] | None = None,
    ) -> None:
        """An SVG beside the page, with its title as the text for those who do not see it; nothing where no curve has a
        point. `curves`: {implementation: (xs, ys)}, or {panel: {implementation: (xs, ys)}}. An implementation may be
        followed by a comma and a word, as "c, arithmetic", which is drawn dashed. `ceilings`: {words: y}."""
        panels = curves if any(isinstance(found, Mapping) for found in curves.values()) else {"": curves}
        drawn = {}
        for panel, sides in panels.items():
            found = {label: plot.points(xs, ys, log) for label, (xs, ys) in sides.items()}
            drawn[panel] = {label: pairs for label, pairs in found.items() if pairs}
        drawn = {panel: found for panel, found in drawn.items() if found}
        if not drawn:
            return
        path, whole = self._plotted(name, title)
        plot.write(path, drawn, x=x, y=y, log=log, title=whole, ceilings=ceilings or {})

    def timeline(self, name: str, panels: Mapping, *, x: str, title: str) -> None:
        """An SVG of bars, as plot.timeline has its panels; nothing where there are none."""
        if panels:
            path, whole = self._plotted(name, title)
            plot.timeline(path, panels, x=x, title=whole)

    def _plotted(self, name: str, title: str) -> tuple[Path, str]:
        """Where the SVG of this name stands, and its title with the machine; the page shows it."""
        path = self.folder / f"{self.module}_{name}.svg"
        self.plots.append(path)
        self.blocks.append(f"![{title}]({path.name})\n")
        return path, f"{title} · {self.machine}" if self.machine else title

    def _export(self, name: str, table: Table) -> None:
        if self.form == "md":
            return
        file = f"{self.module}_{name}{SUFFIXES[self.form]}"
        if file in self.files:
            raise ValueError(f"two tables of {self.module} are called {name!r}")
        self.files[file] = self._question, table.render(self.form)


@dataclass(frozen=True)
class Answer:
    """A line at the head of a page, and the figure of the index."""

    row: str
    text: str
    figure: str
    anchor: str


def anchor(heading: str) -> str:
    """Where a heading is found, as GitHub makes it."""
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def write(
    modules: Mapping[str, ModuleType],
    records: Sequence[Mapping],
    folder: Path,
    form: str = "md",
    only: Sequence[str] = (),
    gone: Sequence[Mapping] = (),
) -> list[Path]:
    """Rewrites every page, or those of the modules `only` without the index, and returns what was written. `gone`:
    results of cases that are no more, which pages leave out and say so."""
    written: list[Path] = []
    broken: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pages: dict[str, Page] = {}
        for name, module in modules.items():
            mine = [record for record in records if record["module"] == name]
            if not mine or (only and name not in only):
                continue
            page = Page(name, folder, form, _machine(mine, "mathtext"))
            try:
                module.report(page, Records(mine))
            except OSError:  # a plot that the disk does not take is nobody's mistake
                raise
            except Exception:  # one module's mistake must not cost the others their pages
                broken.append(f"parity/{name}: report() failed\n{traceback.format_exc()}")
                continue
            pages[name] = page
            written += _write_page(page, mine, [record for record in gone if record["module"] == name])
        if not only:
            written.append(_write(folder / "README.md", _index(modules, pages, records)))
    except OSError as error:
        raise RecordError(
            f"{error.filename or folder}: cannot be written: {error.strerror}; what stood there stays"
        ) from error
    if broken:
        raise ReportError("\n".join(broken))
    return written


def _write_page(page: Page, records: Sequence[Mapping], gone: Sequence[Mapping]) -> list[Path]:
    """The page, its second one if it has long tables, and its exported tables; the plots are written."""
    folder, troubles = page.folder, _troubles(records)
    head = [f"# {page.module}\n", _summary(records)]
    head += [f"**[{found.row}](#{found.anchor})** {found.text}\n" for found in page.answers]
    body = [*page.blocks, "## How it was measured\n", *page.methods, _provenance(records), *_gone(gone)]
    grids = list(page.grids)
    if troubles is not None:
        table, title = Table(troubles).render("md"), "What did not end with a number"
        if len(troubles) <= MOST_ROWS:
            body += [f"## {title}\n", table]
        else:
            grids += [f"## {title}\n", table]
            link = f"{page.module}{GRIDS}#{anchor(title)}"
            body.append(f"[{title}: {len(troubles)} results]({link})\n")
    written = [_write(folder / f"{page.module}.md", "\n".join([*head, *body]))]
    if grids:
        title = f"# {page.module}: the long tables\n\nThe answers are on [their page]({page.module}.md).\n"
        written.append(_write(folder / f"{page.module}{GRIDS}", "\n".join([title, *grids])))
    else:
        (folder / f"{page.module}{GRIDS}").unlink(missing_ok=True)
    written += page.plots
    whence = f"{_machine(records)}, measured {_when(records)}. {' '.join(_builds(records))}"
    for file, (question, content) in page.files.items():
        comment = f"{COMMENTS[page.form]} {question} {whence}"
        written.append(_write(folder / "tables" / file, f"{comment}\n{content}"))
    return written


def _index(modules: Mapping[str, ModuleType], pages: Mapping[str, Page], records: Sequence[Mapping]) -> str:
    """A line a row of the handouts, in their order, and then of what modules answer beyond them."""
    owners = {row: name for name, module in modules.items() for row in module.DELIVERABLES}
    titles = {row: title for module in modules.values() for row, title in module.DELIVERABLES.items()}

    def line(row: str) -> dict:
        name = owners.get(row)
        if name is None:
            return {"deliverable": row, "question": "", "verdict": "no module yet", "figure": ""}
        deliverable = deliverable_of(row)
        mine = [r for r in records if r["module"] == name and r["deliverable"] == deliverable]
        answers = [found for found in pages[name].answers if found.row == row] if name in pages else []
        where = f"{name}.md#{answers[0].anchor}" if answers else f"{name}.md"
        return {
            "deliverable": f"[{row}]({where})" if name in pages and mine else row,
            "question": titles[row],
            "verdict": _verdict(mine),
            "figure": answers[0].figure if answers and mine else "",
        }

    parts = []
    for year, rows in HANDOUTS.items():
        parts += [f"## The handout of {year}\n", Table(pd.DataFrame(map(line, rows))).render("md")]
    further = [row for row in owners if not any(row in rows for rows in HANDOUTS.values())]
    if further:
        parts += ["## Beyond the handouts\n", Table(pd.DataFrame(map(line, further))).render("md")]
    return "\n".join(
        [
            "# C against PyTorch\n",
            _summary(records),
            *parts,
            'holds: C\'s answers obey the rule of parity/README.md ("Parity") in every judged case. measured: time or '
            "memory alone, of so many results of C's sides, no answer being judged. no module yet: nothing of it is "
            "built. "
            "Times are ratios of medians, C's over PyTorch's: below 1, C is faster.\n",
            _provenance(records),
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


def _troubles(records: Sequence[Mapping]) -> pd.DataFrame | None:
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
    return pd.DataFrame(rows) if rows else None


def _gone(records: Sequence[Mapping]) -> Iterable[str]:
    """That results of superseded cases were left out, and what failed among them."""
    if not records:
        return
    bad = [record for record in records if record["status"] in ("failed", "error")]
    words = f"{len(records)} results of cases that are no more are left out"
    if bad:
        names = dict.fromkeys(f"{case_name(r['deliverable'], r['case'])} of {r['impl']}" for r in bad)
        words += f", {len(bad)} of them failed: {escape('; '.join(names), 'md')}"
    yield f"{words}.\n"


def _distinct(values: Iterable, form: str = "md") -> str:
    return " and ".join(dict.fromkeys(escape(str(value), form) for value in values if value)) or "unknown"


def _machine(records: Sequence[Mapping], form: str = "md") -> str:
    """The machine's own name, short enough for a title."""
    return _distinct((record.get("machine") for record in records), form)


def _when(records: Sequence[Mapping]) -> str:
    dates = sorted(record["time"][:10] for record in records if "time" in record)
    return " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "at a time unknown"


def _summary(records: Sequence[Mapping]) -> str:
    """Machine, versions and dates, for the head of a page."""
    names = ("torch", "cuda")
    versions = {
        name: {r["versions"][name]: None for r in records if name in r.get("versions", {})} for name in names
    }
    words = [escape(f"{name} {'/'.join(found)}", "md") for name, found in versions.items() if found]
    parts = [_machine(records), *([", ".join(words)] if words else []), f"measured {_when(records)}"]
    return f"*{'; '.join(parts)}.*\n"


def _provenance(records: Sequence[Mapping]) -> str:
    """Where the numbers come from: machine, versions, builds."""
    versions: dict[str, dict] = {}
    for record in records:
        for name, version in record.get("versions", {}).items():
            versions.setdefault(name, {})[version] = None
    words = [escape(f"{name} {'/'.join(found)}", "md") for name, found in sorted(versions.items())]
    on_cpu = any("device" not in record for record in records)
    threads = f"{_distinct(r.get('threads') for r in records)} threads on both sides; " if on_cpu else ""
    return (
        f"Measured {_when(records)} on {_distinct(map(_place, records))}; {threads}{', '.join(words)}. "
        f"{' '.join(_builds(records))}\n"
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
