"""Pages from records: reports/<machine>/<module>.md, their pictures, and README.md, the machine's index.

Nothing here runs, measures or looks at the clock: the same records give the same bytes.
"""

import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partialmethod
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.core import plot, words
from parity.core.case import BAD, ParityError, case_name, is_judged
from parity.core.comparison import Rates
from parity.core.document import Figure, Markdown, Section, Tabled, Text, anchor
from parity.core.escape import escape
from parity.core.files import write_whole
from parity.core.handouts import QUESTIONS, SENTENCES, USUAL, deliverable_of
from parity.core.identity import host_words
from parity.core.record import FILE, RecordError
from parity.core.sides import explained, sides_note
from parity.core.tables import Table, columns_of, has, titles_of
from parity.core.view import COUNTED, Records

FEW = 4  # modules of a machine with one page


class ReportError(ParityError):
    """A module could not write its page; every other page was written."""


class Page:
    """What a module's report() writes to. `others`: the machine's records of all modules, for comparisons."""

    def __init__(self, module: str, machine: str = "", others: Sequence[Mapping] = ()):
        self.module, self.machine = module, machine
        self.others, self.rates = Records(others), Rates.of(others)
        self.sections: list[Section] = []
        self.more: list[tuple[str, Tabled]] = []  # (question, table) that no question asks for
        self.methods: list[str] = []
        self._names: set[str] = set()  # that the section has explained
        self._notes: list[str] = []  # that wait for their table

    def section(self, row: str, question: str = "") -> None:
        """The answer to a row of core/handouts.py, or to one of the module's own, whose question is given."""
        self.sections.append(Section(row, question or QUESTIONS[row]))
        self._names, self._notes = set(), []

    def question(self, text: str) -> None:
        """A section that answers no row."""
        self.section("", text)

    def say(self, **values: Any) -> None:
        """The answer, from the templates of parity/words/<module>.j2 for the section's row, the notes that follow it
        there, and from "## <row> working" the steps to it."""
        found, most = words.sentences(self.module, self._now.row, values), SENTENCES.get(self._now.row, USUAL)
        self._now.answer, self._now.notes = found[:most], found[most:]
        lines = words.lines(self.module, f"{self._now.row} working", values)
        if any(lines):
            self._now.blocks.append(Text("\n".join(lines).strip("\n"), "working"))

    def note(self, text: str) -> None:
        """A paragraph that explains the table or the picture that follows; without one it is not shown."""
        self._notes.append(text.strip())

    def method(self, part: str = "", **values: Any) -> None:
        """A paragraph of the page's last section, from "## method <part>": how something was measured."""
        lines = words.lines(self.module, f"method {part}".strip(), values)
        self.methods.append(f"{' '.join(filter(None, lines))}\n")

    def lacks(self, what: str) -> None:
        """Something that the section's question asks for and that was not measured here."""
        self._now.lacks.append(what)

    def table(
        self, rows: Iterable, name: str, columns=None, units=None, digits=None, more=False, expected=0
    ) -> None:
        """A Table of the section, with its columns, units and digits. `more`: it is at the page's end, with its name.
        `expected`: rows that the question asks for. Columns without a value are left out. `noisy` comes last."""
        rows = list(rows)
        there = [column for column in columns_of(rows) if any(has(row, column) for row in rows)]
        counted = COUNTED in there and not {"n", "steps"} & set(there)
        there = [column for column in there if column != COUNTED] + [COUNTED] * counted
        if expected and len(rows) < expected:
            self.lacks(f"{expected - len(rows)} of the {expected} rows that are asked for")
        if not there:
            self._notes = []
            return
        rows = [{column: row.get(column) for column in there} for row in rows]
        titles = titles_of(columns or there)
        if COUNTED in there and any((units or {}).get(column) == "ms" for column in there):
            titles[COUNTED] = titles.pop(COUNTED, COUNTED)
        if "noisy" in there:
            titles["noisy"] = titles.pop("noisy", "noisy")
        tabled = Tabled(name, Table(rows, titles, units, digits))
        if more:
            self.more.append((self._now.question, tabled))
            self._notes = []
            return
        names = explained(tabled.table) - self._names
        self._names |= names
        if names:
            self.note(sides_note(names, self.module))
        self._add(tabled)

    def plot(self, name: str, curves: Mapping, *, log: bool | str = True, **how: Any) -> None:
        """{implementation: (xs, ys)}, or {panel: {implementation: (xs, ys)}}; nothing if none has a point. After an
        implementation may come a comma and a word, as "c, arithmetic", which is drawn as open markers."""
        panels = curves if any(isinstance(found, Mapping) for found in curves.values()) else {"": curves}
        drawn = {}
        for panel, curves_of in panels.items():
            found = {label: plot.points(xs, ys, log is True) for label, (xs, ys) in curves_of.items()}
            drawn[panel] = {label: pairs for label, pairs in found.items() if pairs}
        drawn = {panel: found for panel, found in drawn.items() if found}
        self._picture("curves", name, drawn, log=log, **how)

    def _picture(self, kind: str, name: str, content: Mapping, **how: Any) -> None:
        """A picture by a function of core/plot.py; nothing if there is no content."""
        how |= {"under": escape(self.machine, "mathtext")}
        if content:
            self._add(
                Figure(f"{self.module}_{name}", how["title"], lambda: getattr(plot, kind)(content, **how))
            )

    timeline = partialmethod(_picture, "timeline")
    stack = partialmethod(_picture, "stack")
    bars = partialmethod(_picture, "bars")

    def _add(self, block: Tabled | Figure) -> None:
        self._now.blocks += [*map(Text, self._notes), block]
        self._notes = []

    @property
    def _now(self) -> Section:
        return self.sections[-1]

    def shown(self) -> list[Section]:
        return [section for section in self.sections if section.has_content()]


def heading_of(section: Section) -> str:
    return f"{section.row}: {section.question}" if section.row else section.question


def one_page(folder: str, modules: Collection[str]) -> bool:
    """Whether a machine's README.md holds all of its pages, because it has few."""
    return len(modules) <= FEW and not folder.startswith("local")


def place_of(module: str, section: Section, single: bool = False) -> str:
    """Where a section is found, from the folder of its machine. `single`: the machine has one page."""
    return f"{'README' if single else module}.md#{anchor(heading_of(section))}"


def of_module(records: Iterable[Mapping], name: str, joined: bool = False) -> list[Mapping]:
    """A module's records. On GPUs: the records of the newest record's card, because cards are not compared, unless
    folders of several machines are `joined`."""
    mine = [record for record in records if record["module"] == name]
    if joined:
        return mine
    newest = max(mine, key=lambda record: record.get("time", ""), default={})
    return [r for r in mine if r.get("machine") == newest.get("machine")] if "device" in newest else mine


def pages_of(
    modules: Mapping[str, ModuleType], records: Sequence[Mapping], only: Sequence[str] = (), joined=False
) -> tuple[dict[str, Page], list[str]]:
    """The pages of the modules that have records, unwritten, and what went wrong."""
    pages, broken = {}, []
    for name, module in modules.items():
        mine = of_module(records, name, joined)
        if not mine or (only and name not in only):
            continue
        machines = {record.get("machine") for record in mine}
        page = Page(name, machine_of(mine, "plain"), [r for r in records if r.get("machine") in machines])
        try:
            module.report(page, Records(mine))
            pages[name] = page
        except Exception as error:  # one module's mistake must not cost the others their pages
            at = traceback.extract_tb(error.__traceback__)[-1]
            broken.append(f"parity/{name}: report() failed at {at.filename}:{at.lineno}: {error!r}")
    return pages, broken


def write(
    modules: Mapping[str, ModuleType],
    records: Sequence[Mapping],
    folder: Path,
    only=(),
    gone=(),
    single=False,
) -> list[Path]:
    """Rewrites every page, or only some, without the index. Returns the files. `gone`: results of removed cases.
    `single`: README.md holds every page."""
    written: list[Path] = []
    only = () if single else only
    pages, broken = pages_of(modules, records, only)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        whole = []
        for name, page in pages.items():
            document = _page_of(page, folder, of_module(records, name), of_module(gone, name))
            if single:
                whole.append(document.whole())
            else:
                written.append(write_whole(folder / f"{name}.md", document.whole()))
            written += document.files
        here = not only and (folder / FILE).exists()
        pruned = [name for name in modules if here and not of_module(records, name)]
        for name in (*pages, *pruned):
            for stale in {folder / f"{name}.md", *folder.glob(f"{name}_*.svg")} - {*written}:
                stale.unlink(missing_ok=True)
        if not only:
            index = _index(pages, records, single)
            written.append(write_whole(folder / "README.md", "\n".join([index, *whole])))
    except OSError as error:
        words = f"cannot be written: {error.strerror}; what stood there stays"
        raise RecordError(f"{error.filename or folder}: {words}") from error
    if broken:
        raise ReportError("\n".join(broken))
    return written


def _page_of(page: Page, folder: Path, records: Sequence[Mapping], gone: Sequence[Mapping]) -> Markdown:
    """The page, with its pictures written."""
    document = Markdown(folder, title=page.module)
    document.parts.append(_summary(records))
    for section in page.shown():
        document.heading(2, heading_of(section))
        document.section(section)
    if page.more:
        document.heading(2, "Further tables")
    for question, tabled in page.more:
        document.heading(3, tabled.name)
        document.text(question)
        document.table(tabled.table, fold=True)
    document.heading(2, "How it was measured")
    document.parts += [*page.methods, provenance(records), *_gone(gone)]
    troubles = _troubles(records)
    if troubles:
        document.heading(2, "Results without a number or with a message")
        document.table(Table(troubles), fold=True)
    return document


def _index(pages: Mapping[str, Page], records: Sequence[Mapping], single: bool) -> str:
    """What was measured on the machine, a line a row."""
    order = {row: place for place, row in enumerate(QUESTIONS)}
    found = [(section, name) for name, page in pages.items() for section in page.shown() if section.row]
    lines = []
    for section, name in sorted(found, key=lambda pair: order.get(pair[0].row, len(order))):
        mine = [r for r in of_module(records, name) if r["deliverable"] == deliverable_of(section.row)]
        row = f"[{section.row}]({place_of(name, section, single)})"
        lines.append({"row": row, "question": section.question, "verdict": verdict(mine)})
    document = Markdown(Path(), title=f"C and PyTorch on {machine_of(records)}")
    document.parts.append(_summary(records))
    document.table(Table(lines or [{"row": "", "question": "", "verdict": ""}]))
    links = (f"[{name}]({'#' if single else ''}{name}{'' if single else '.md'})" for name in pages)
    document.text(f"Pages: {', '.join(links)}.")
    document.text(
        "holds: every judged case is as near to float64 as the rule of docs/parity.md asks. measured: so "
        "many results are times or memory alone, which nobody judges."
    )
    document.parts.append(provenance(records))
    document.text(f"Written by `python -m parity report` from [{FILE}]({FILE}).")
    return document.whole()


def verdict(records: Sequence[Mapping]) -> str:
    mine = [record for record in records if is_judged(record["impl"])]
    if not mine:
        return ""
    statuses = Counter(record["status"] for record in mine)
    bad = {status: count for status, count in statuses.items() if status != "ok"}
    words = [f"{count} {status}" for status, count in sorted(bad.items())]
    if "failed" in bad or "error" in bad:
        return f"**fails** ({', '.join(words)} of {len(mine)})"
    if not statuses["ok"]:
        return f"no result ({', '.join(words)})"
    asked = [r for r in mine if r["status"] == "ok" and ("error" in r.get("measure", r) or "timed" in r)]
    unjudged = sum(record.get("message", "").startswith("not judged") for record in asked)
    held, measured = len(asked) - unjudged, statuses["ok"] - len(asked)
    words = [f"{unjudged} not judged", *words] if unjudged else words
    if not held:
        return f"measured ({', '.join([str(measured), *words])})"
    words = [f"{measured} measured", *words] if measured else words
    return f"holds ({', '.join([f'{held} ok', *words])})"


def _troubles(records: Sequence[Mapping]) -> list[dict]:
    """Every result that is no number, with its reason: a page hides nothing."""
    rows = []
    for record in (r for r in records if r["status"] != "ok" or r.get("message")):
        case = ", ".join([record["deliverable"], *(f"{k} {v}" for k, v in record["case"].items())])
        row = {"case": case, "impl": record["impl"], "status": record["status"]}
        rows.append(row | {"why": record.get("message", "")})
    return rows


def _gone(records: Sequence[Mapping]) -> Iterable[str]:
    """That results of removed cases were left out, and which of them failed."""
    if not records:
        return
    bad = [record for record in records if record["status"] in BAD]
    words = f"{len(records)} results of removed cases are left out"
    if bad:
        names = dict.fromkeys(f"{case_name(r['deliverable'], r['case'])} of {r['impl']}" for r in bad)
        words += f", {len(bad)} of them failed: {escape('; '.join(names), 'md')}"
    yield f"{words}.\n"


def _distinct(values: Iterable, form: str = "md") -> str:
    return " and ".join(dict.fromkeys(escape(str(value), form) for value in values if value)) or "unknown"


def machine_of(records: Sequence[Mapping], form: str = "md") -> str:
    """The machine's own name, short enough for a title."""
    return _distinct((record.get("machine") for record in records), form)


def when(records: Sequence[Mapping]) -> str:
    dates = sorted(record["time"][:10] for record in records if "time" in record)
    return " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "at a time unknown"


def _summary(records: Sequence[Mapping]) -> str:
    """Machine, versions and dates, for the head of a page."""
    versions = _versions(records)
    words = ", ".join(versions[name] for name in ("torch", "cuda") if name in versions)
    parts = [machine_of(records), words, f"measured {when(records)}"]
    return f"*{'; '.join(filter(None, parts))}.*\n"


def _versions(records: Sequence[Mapping]) -> dict[str, str]:
    """{"torch": "torch 2.12.0/2.13.0"} by name."""
    found: dict[str, dict] = {}
    for record in records:
        for name, version in record.get("versions", {}).items():
            found.setdefault(name, {})[version] = None
    return {name: escape(f"{name} {'/'.join(found[name])}", "md") for name in sorted(found)}


def provenance(records: Sequence[Mapping]) -> str:
    """Where the numbers come from: machine, versions, builds."""
    words = ", ".join(_versions(records).values())
    on_cpu = any("device" not in record for record in records)
    threads = f"{_distinct(r.get('threads') for r in records)} threads on both sides; " if on_cpu else ""
    where = f"Measured {when(records)} on {_distinct(map(_place, records))}; {threads}{words}."
    return f"{where} {' '.join(builds_of(records))}\n"


def _place(record: Mapping) -> str | None:
    """The machine in words: of a GPU its name and its host's, else the host's."""
    if "host" not in record:
        return record.get("machine")
    words = host_words(record["host"])
    return f"{record.get('machine')} in {words}" if "device" in record else words


def builds_of(records: Sequence[Mapping]) -> Iterable[str]:
    """Which builds of C the results are of: they may be several, and say so."""
    builds = Counter(_build(record["build"]) for record in records if "build" in record)
    if builds:
        yield f"C was built as {'; '.join(f'{words}: {count} results' for words, count in builds.items())}."
    earlier = [record["earlier"].get("build") for record in records if "earlier" in record]
    if earlier:
        words = sorted({_build(build) for build in earlier if build})
        yield f"Times and memory of {len(earlier)} results are from earlier runs: {'; '.join(words)}."


def _build(build: Mapping) -> str:
    return f"{build['library']} (tandem {build['version']}, commit {commit_of(build)})"


def commit_of(build: Mapping, digits: int | None = None) -> str:
    return build["commit"][:digits] + (" with changes" if build.get("dirty") else "")
