"""The write-up: every question of the handouts in their order, each answered from the machine that answers it best.

RULE says which machine that is. If several are equal by it, the answer with more rows is taken. Another GPU comes after
H200, and ranks that share a GPU come after the CPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from parity.core import report, sweep
from parity.core.document import FORMATS, Figure, Markdown, Section, Tabled, anchor
from parity.core.files import write_whole
from parity.core.handouts import HANDOUTS, KEPT, QUESTIONS, deliverable_of
from parity.core.record import FILE, RecordError, key_of, load
from parity.core.tables import Table

NAME = "WRITEUP"
FIGURES = "figures"
MISSING = "What the answers lack"
RULE = (
    "Each answer is of one machine: the first that measured everything the question asks for, in the order H100 "
    "(the handout's GPU), H200, CPU; folders of several GPUs have the order of their cards. If no machine measured "
    "everything, the machine with the most sentences is taken. The answer about all-reduce joins all folders. So "
    "sections may be of different cards; the last line of a section names its card and C's commit."
)


@dataclass(frozen=True)
class Machine:
    """A folder of reports/ and its records; `name` joins several folders where an answer needs all of them."""

    name: str
    records: Sequence[Mapping]

    def rank(self) -> int:
        order = ("_shared", "cpu", "", "h200", "h100")
        found = [i for i, word in enumerate(order) if word and word in self.name]
        return min(found) if found else order.index("")


@dataclass(frozen=True)
class Found:
    """A section of a machine's page."""

    section: Section
    machine: Machine
    module: str

    def key(self) -> tuple:
        """The larger, the better, by the rule above. Machines that are joined have all that each of them has."""
        joined, complete = " and " in self.machine.name, self.section.complete
        sentences = 0 if complete else len(self.section.answer) + len(self.section.notes)
        return joined, complete, sentences, self.machine.rank(), self.section.rows()


def machines_of(reports: Path, names: Sequence[str], modules: Mapping[str, ModuleType]) -> list[Machine]:
    """Those named, else all whose folder is not a local one."""
    found, listed = [], sweep.listed(modules)
    for folder in sorted(path.parent for path in reports.glob(f"*/{FILE}")):
        if folder.name in names if names else not folder.name.startswith("local"):
            newest = load(folder / FILE).newest()
            found.append(Machine(folder.name, [r for r in newest if sweep.is_listed(r, listed)]))
    if not found:
        raise RecordError(f"no {FILE} in {reports}/{','.join(names) or '*'}: nothing to write of")
    return found


def sections_of(
    machines: Sequence[Machine], modules: Mapping[str, ModuleType]
) -> tuple[dict[str, list[Found]], list[str]]:
    """{row: what each machine has of it}. A module with JOINED is also reported on the records of all machines."""
    found: dict[str, list[Found]] = {}
    broken: list[str] = []
    for machine in machines:
        pages, wrong = report.pages_of(modules, machine.records)
        broken += wrong
        collect(found, pages, machine)
    for name, module in modules.items():
        parts = [m for m in machines if report.of_module(m.records, name) and m.rank()]
        if getattr(module, "JOINED", False) and len(parts) > 1:
            whole: dict[tuple, Mapping] = {}  # of a result that several machines have, the preferred one's
            for part in sorted(parts, key=Machine.rank):
                mine = {key_of(r): r for r in report.of_module(part.records, name)}
                whole |= {key: r for key, r in mine.items() if r["status"] == "ok" or key not in whole}
            joined = Machine(" and ".join(m.name for m in parts), list(whole.values()))
            pages, wrong = report.pages_of({name: module}, joined.records, joined=True)
            broken += wrong
            collect(found, pages, joined)
    return found, broken


def collect(found: dict[str, list[Found]], pages: Mapping[str, report.Page], machine: Machine) -> None:
    for name, page in pages.items():
        for section in page.shown():
            if section.row:
                found.setdefault(section.row, []).append(Found(section, machine, name))


def write(
    modules: Mapping[str, ModuleType],
    reports: Path,
    out: Path | None,
    form: str = "md",
    only: Sequence[str] = (),
    machines: Sequence[str] = (),
) -> list[Path]:
    """Writes the document and its pictures; of all rows as Markdown in reports/ also the index of ids and machines."""
    there = machines_of(reports, machines, modules)
    found, broken = sections_of(there, modules)
    unknown = [name for name in only if not any(wanted(row, [name]) for row in QUESTIONS)]
    if unknown:
        raise report.ReportError(f"no id {', '.join(unknown)}; there are: {', '.join(QUESTIONS)}")
    path = out or reports / f"{NAME}{FORMATS[form].suffix}"
    if path.suffix != FORMATS[form].suffix:  # it would replace a file of another kind, such as records
        raise report.ReportError(f"--out: '{path}' needs to end with {FORMATS[form].suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    document = FORMATS[form](path.parent, FIGURES, "The write-up: CS336 systems in C and in PyTorch")
    chosen = {row: max(found.get(row, ()), key=Found.key, default=None) for row in QUESTIONS}
    answers = {
        year: {row: chosen[row] for row in rows if wanted(row, only) and chosen[row]}
        for year, rows in HANDOUTS.items()
    }
    for year, of_year in answers.items():
        if of_year:
            document.contents(year, of_year)
    for year, of_year in answers.items():
        if of_year:
            document.heading(1, f"The handout of {year}")
            if year == "2026" and not only:
                write_kept(document, chosen)
        for row, answer in of_year.items():
            write_section(document, row, answer)
    if not only:
        write_missing(document, chosen)
        write_method(document, there)
    write_whole(path, document.whole())
    written = [path, *document.files]
    if not only and form == "md":
        for stale in set((path.parent / FIGURES).glob("*.svg")) - set(document.files):
            stale.unlink()
        if out is None:
            written += [write_index(reports, there, found), write_list(reports, chosen)]
    if broken:
        raise report.ReportError("\n".join(broken))
    return written


def wanted(row: str, only: Sequence[str]) -> bool:
    return not only or row in only or deliverable_of(row) in only


def write_method(document: Markdown, machines: Sequence[Machine]) -> None:
    document.heading(1, "How it was measured")
    document.text(
        "Every answer is formed from records by `python -m parity writeup`. Times are in ms, and medians if the table "
        f"does not say means; memory is in MiB (2^20 bytes). {RULE} A column `noisy` names results whose samples "
        "spread by more than 20 % (std / mean); no sentence uses those, except where the spread is the subject, in "
        "benchmarking_script (c). `% of the bound`: the shortest possible time over the measured time. "
        "The shortest possible time is FLOPs at the measured GEMM rate or bytes at the measured copy rate of the card, "
        "whichever is longer."
    )
    rows = []
    for machine in machines:
        name, records = report.machine_of(machine.records, "plain"), machine.records
        torch = ", ".join(sorted({r["versions"]["torch"] for r in records if "versions" in r}))
        row = {"folder": machine.name, "machine": name, "PyTorch": torch}
        rows.append(row | {"measured": report.when(records), "results": len(records)})
    document.heading(2, "What ran where")
    document.table(Table(rows))


def write_kept(document: Markdown, chosen: Mapping[str, Found | None]) -> None:
    """The ids of 2025 that 2026 keeps, and what it asks of them."""
    document.text(
        "The sections below are new in 2026. These ids are answered above. The xl of 2026 is the 2.7B of 2025; "
        "bucketed data parallelism and communication_accounting are gone."
    )
    rows = []
    for name, asks in KEPT.items():
        row = next(row for row in QUESTIONS if deliverable_of(row) == name)
        link = f"[{name}](#{anchor(row)})" if document.form == "md" and chosen[row] else name
        rows.append({"id": link, "2026 asks for": asks})
    document.table(Table(rows))


def write_section(document: Markdown, row: str, found: Found) -> None:
    section, machine = found.section, found.machine
    document.heading(2, row)
    document.text(f"*{section.question}*" if document.form == "md" else section.question)
    document.section(section, f"{row}: {section.question}", found.module, fold=True)
    case, mine = deliverable_of(row), report.of_module(machine.records, found.module)
    mine = [record for record in mine if record["deliverable"] == case] or mine
    device = " --device cuda" if any(r.get("device") == "cuda" for r in mine) else ""
    command = f"python -m parity run --profile full --module {found.module} --case {case}{device}"
    measured = f"{'Measured' if section.blocks else 'Run'} by {command}"
    name = report.machine_of(mine, "md" if document.form == "md" else "plain")
    folder = machine.name.split(" and ")[-1]
    place = f"{folder}/{report.place_of(found.module, section)}"
    document.link(f"{name}; {builds_of(mine)}. {measured}.", f"The page of {folder}", place)


def builds_of(records: Sequence[Mapping]) -> str:
    """The commits of C that the records are of, the newest last."""
    built = sorted((r for r in records if "build" in r), key=lambda r: r.get("time", ""))
    commits = [*dict.fromkeys(report.commit_of(record["build"], 10) for record in built)]
    return f"tandem {', '.join(commits)}" if commits else "tandem from before records named a build"


def write_missing(document: Markdown, chosen: Mapping[str, Found | None]) -> None:
    rows = []
    for row, found in chosen.items():
        what = "; ".join(found.section.lacks) if found else "everything"
        if what:
            rows.append({"id": row, "machine": found.machine.name if found else "", "what": what})
    document.heading(1, MISSING)
    if rows:
        document.text("An answer is of one machine, so another machine may have measured what it lacks.")
        document.table(Table(rows), f"{MISSING}.", "missing")
    else:
        document.text("Nothing is missing.")


def write_index(reports: Path, machines: Sequence[Machine], found: Mapping[str, Sequence[Found]]) -> Path:
    """Ids and machines: a link where the machine has the answer."""
    document = Markdown(reports, title="Results by question and machine")
    document.text(
        f"Start with [the write-up]({NAME}.md). A cell links to the machine's own page; `part` is a page that lacks "
        "something the question asks for. An empty cell: that machine did not measure it."
    )
    for year, rows in HANDOUTS.items():
        lines = []
        for row in rows:
            line = {"row": f"[{row}]({NAME}.md#{anchor(row)})" if row in found else row}
            line |= {f"[{m.name}]({m.name}/README.md)": "" for m in machines}
            for of in found.get(row, ()):
                folder = of.machine.name
                head = f"[{folder}]({folder}/README.md)"
                if line.get(head) == "":
                    words = "yes" if of.section.complete else "part"
                    line[head] = f"[{words}]({folder}/{report.place_of(of.module, of.section)})"
            lines.append(line)
        document.heading(2, f"The handout of {year}")
        document.table(Table(lines))
    path = reports / "README.md"
    write_whole(path, document.whole())
    return path


def write_list(reports: Path, chosen: Mapping[str, Found | None]) -> Path:
    """Which table and picture of the write-up answers which question: for those who export them."""
    rows = [("row", "kind", "name", "machine")]
    for row, found in chosen.items():
        for block in found.section.blocks if found else ():
            if isinstance(block, Tabled):
                rows.append((row, "table", f"{found.module}_{block.name}", found.machine.name))
            elif isinstance(block, Figure):
                rows.append((row, "picture", block.name, found.machine.name))
    return report.write_list(reports / report.LIST, rows)
