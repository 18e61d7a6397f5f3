"""The write-ups: every question of a handout in its order, each answered from the machine that answers it best. A
question that both handouts ask alike is answered in the newest one's file, to which the other links.

RULE says which machine that is. If several are equal by it, the answer with more rows is taken. Another GPU comes after
H200, and ranks that share a GPU come after the CPU.
"""

import math
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import filterfalse
from pathlib import Path
from types import ModuleType
from typing import Any

from parity.core import beside, handouts, report, sweep
from parity.core.document import FORMATS, Figure, Markdown, Section, Tabled, Text, anchor
from parity.core.files import write_whole
from parity.core.handouts import HANDOUTS, QUESTIONS, TWO_GPUS, XL, command_of, deliverable_of, is_same
from parity.core.record import FILE, RecordError, key_of, load
from parity.core.tables import Table

NAMES = {"2026": "WRITEUP", "2025": "WRITEUP-2025"}
NEWEST, OLDEST = NAMES
FIGURES = "figures"
XL_NAME = re.compile(rf"(?<!--size )(?<![\w.]){re.escape(XL)}")
OF_2025 = re.compile(r"of the \d+ rows that are asked for")
IS_XL = f"{XL} is the xl of 2026. "
CPU = 1  # the rank of a CPU's folder
MISSING = "What the answers lack"
NO_STEP = (
    "10B has its forward pass alone, without gradients: in f32 a step needs 16 bytes for each of 12.8e9 weights, "
    "in bf16_mixed 14, more than the card has. Forward and backward passes without the optimizer were not run."
)
RULE = (
    "Each answer is of one machine: the first that measured everything the question asks for, in the order H100 "
    "(the handout's GPU), H200, CPU; folders of several GPUs have the order of their cards. A machine that answers all "
    "parts of an id is preferred, then the machine of the part before. If no machine measured everything, the machine "
    "with the most rows is taken. The answer about all-reduce joins all folders. So sections may be of different "
    "cards; the last line of a section names its card and C's commit."
)


@dataclass(frozen=True)
class Machine:
    """A folder of reports/ and its records; `name` joins several folders where an answer needs all of them."""

    name: str
    records: Sequence[Mapping]
    home: "Machine | None" = None  # of joined folders, the one whose page is linked

    def rank(self) -> int:
        order = ("_shared", "cpu", "", "h200", "h100")
        found = [i for i, word in enumerate(order) if word and word in self.name]
        return min(found) if found else order.index("")

    def place(self, module: str, section: Section) -> str:
        """Where a section of a module's page is found, from reports/."""
        home = self.home or self
        single = report.one_page(home.name, {record["module"] for record in home.records})
        return f"{home.name}/{report.place_of(module, section, single)}"


@dataclass(frozen=True)
class Found:
    """A section of a machine's page."""

    section: Section
    machine: Machine
    module: str
    elsewhere: tuple["Found", ...] = ()  # which have something that this section lacks

    def key(self) -> tuple:
        """The larger, the better, by the rule above. Machines that are joined have all that each of them has."""
        joined, complete = self.machine.home is not None, not self.section.lacks
        rows, sentences = self.section.rows(), len(self.section.answer) + len(self.section.notes)
        partly = (0, 0) if complete else (rows - len(self.section.lacks), sentences)
        return joined, complete, *partly, self.machine.rank(), rows


def machines_of(reports: Path, names: Sequence[str], modules: Mapping[str, ModuleType]) -> list[Machine]:
    """Those named, else all whose folder is not a local one."""
    found, listed = [], sweep.listed(modules)
    for folder in (folders := sorted(path.parent for path in reports.glob(f"*/{FILE}"))):
        if folder.name in names if names else not folder.name.startswith("local"):
            newest = load(folder / FILE).newest()
            found.append(Machine(folder.name, [r for r in newest if sweep.is_listed(r, listed)]))
    if not found:
        wanted, there = ", ".join(names) or "that is not local", ", ".join(f.name for f in folders)
        raise RecordError(f"no machine {wanted} in {reports}; --machine takes: {there or 'nothing yet'}")
    return found


def sections_of(machines: Sequence[Machine], modules: Mapping[str, ModuleType]) -> tuple[dict, list[str]]:
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
            parts.sort(key=Machine.rank)  # the last one's page has the times of the sentences
            for part in parts:
                mine = {key_of(r): r for r in report.of_module(part.records, name)}
                whole |= {key: r for key, r in mine.items() if r["status"] == "ok" or key not in whole}
            joined = Machine(" and ".join(m.name for m in parts), list(whole.values()), parts[-1])
            pages, wrong = report.pages_of({name: module}, joined.records, joined=True)
            broken += wrong
            collect(found, pages, joined)
    return found, broken


def collect(found: dict[str, list[Found]], pages: Mapping[str, report.Page], machine: Machine) -> None:
    for name, page in pages.items():
        for section in page.shown():
            if section.row:
                found.setdefault(section.row, []).append(Found(section, machine, name))


def write(modules: Mapping[str, ModuleType], options: Namespace) -> list[Path]:
    """Writes the documents and their pictures, as the options of the command `writeup` say; of all rows as Markdown in
    reports/ also the index of ids and machines. With `out`: one document, of the newest handout if no edition is
    named."""
    reports, out, only, form = options.reports, options.out, options.id, FORMATS[options.format]
    there = machines_of(reports, options.machine, modules)
    others = machines_of(reports, [options.beside], modules) if options.beside else []
    old = [replace(m, records=[*filterfalse(handouts.is_new, m.records)]) for m in there]
    found, broken = sections_of(old, modules)
    unknown = [name for name in only if not any(wanted(row, [name]) for row in QUESTIONS)]
    if unknown:
        raise report.ReportError(f"no id {', '.join(unknown)}; there are: {', '.join(QUESTIONS)}")
    years = [options.edition or NEWEST] if out or options.edition else list(NAMES)
    by_year = {OLDEST: found}
    chosen = {OLDEST: choose(found, HANDOUTS[OLDEST])}
    if NEWEST in years:
        asked = [replace(m, records=[*filter(handouts.is_asked, m.records)]) for m in there]
        other, wrong = sections_of(asked, modules)
        broken += wrong
        by_year[NEWEST] = found_2026 = dict(found)
        for row in filter(lambda row: not is_same(row), HANDOUTS[NEWEST]):
            there_is = other.get(row, [])
            if deliverable_of(row) in TWO_GPUS:
                # The CPU, if nobody names it, has a smaller model than these ids ask for.
                named = (of for of in there_is if options.machine or of.machine.rank() != CPU)
                there_is = [of for of in named if of.section.answer]
            found_2026[row] = [replace(of, section=renamed(of.section)) for of in there_is]
        chosen[NEWEST] = choose(found_2026, HANDOUTS[NEWEST])
    written = []
    for year in years:
        path = out or reports / f"{NAMES[year]}{form.suffix}"
        if path.suffix != form.suffix:  # it would replace a file of another kind, such as records
            raise report.ReportError(f"--out: '{path}' needs to end with {form.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        title = f"Answers to the handout of {year}: CS336 systems in C and in PyTorch"
        document = form(path.parent, FIGURES, title)
        both = form is Markdown and len(years) > 1
        write_edition(document, year, chosen[year], there, only, both, others)
        written += [write_whole(path, document.whole()), *document.files]
    if not only and form is Markdown and not options.edition:
        for stale in set((path.parent / FIGURES).glob("*.svg")) - set(written):
            stale.unlink()
        if out is None:
            written.append(write_index(reports, there, by_year))
    if broken:
        raise report.ReportError("\n".join(broken))
    return written


def choose(found: Mapping[str, Sequence[Found]], rows: Iterable[str]) -> dict[str, Found | None]:
    """Of each row the best answer. A machine that answers all parts of an id is preferred for each part."""
    rows, whole = [*rows], {}
    for row in rows:
        names = {of.machine.name for of in found.get(row, ()) if not of.section.lacks}
        whole[deliverable_of(row)] = whole.get(deliverable_of(row), names) & names

    chosen, last = {}, {}  # last: the machine of the part before, by id
    for row in rows:
        name = deliverable_of(row)

        def key(of: Found, name: str = name) -> tuple:
            joined, complete, *others = of.key()
            same = complete and of.machine.name == last.get(name)
            return joined, of.machine.name in whole[name], same, complete, *others

        best = chosen[row] = max(found.get(row, ()), key=key, default=None)
        last[name] = best and best.machine.name
        lacks = [what for what in best.section.lacks if not OF_2025.search(what)] if best else []
        on_gpus = (of for of in found.get(row, ()) if of.machine.rank() > CPU and of.machine.home is None)
        others = (of for of in on_gpus if of.machine.name != last[name])
        if lacks and best.machine.rank() > CPU:
            elsewhere = (of for of in others if not set(lacks) <= set(of.section.lacks))
            chosen[row] = replace(best, elsewhere=tuple(elsewhere))
    return chosen


def write_edition(
    document: Markdown, year: str, chosen: Mapping, machines: list, only: list, both: bool, others: list
) -> None:
    """`both`: the other handout's document stands next to this one. `others`: the machine to compare with."""
    rows = [row for row in chosen if wanted(row, only) and chosen[row]]
    if both:
        other = next(name for of, name in NAMES.items() if of != year)
        link = f"[{other}.md]({other}.md) has the other handout"
        document.text(f"The handout's version is {handouts.VERSIONS[year]}. {link}.")
    if year == NEWEST:
        document.text(
            f"`xl` is the model of 2026, which `tandem --size` and pictures call `{XL}`. The handout of 2025 calls "
            "another model xl."
        )
    document.contents(year, rows)
    compared: set[str] = set()
    for row in rows:
        document.heading(2, row)
        if both and year == OLDEST and is_same(row) and row in HANDOUTS[NEWEST]:
            link = f"[the answer]({NAMES[NEWEST]}.md#{anchor(row)})"
            document.text(f"*{QUESTIONS[row]}* Both handouts ask this alike: {link}.")
        else:
            write_section(document, row, chosen[row])
            name = deliverable_of(row)
            for other in others if name not in compared else ():  # its parts have the same results
                sides = (chosen[row].machine.records, other.records)
                mine, theirs = ([r for r in of if r["deliverable"] == name] for of in sides)
                beside.write(document, mine, theirs, other.name)
            compared.add(name)
    if not only:
        write_missing(document, chosen)
        write_method(document, machines)


def wanted(row: str, only: Sequence[str]) -> bool:
    return not only or row in only or deliverable_of(row) in only


def write_method(document: Markdown, machines: Sequence[Machine]) -> None:
    document.heading(1, "How it was measured")
    document.text(
        "Every answer is formed from records by `python -m parity writeup`. Times are in ms, and medians if the table "
        f"does not say means; memory is in MiB (2^20 bytes). {RULE} A column `noisy` names results whose samples "
        "spread by more than 20 % (std / mean); no sentence uses those, except where the spread is the subject, in "
        "benchmarking_script (c). `n, spread`: number of samples of a row's times, and their largest std / mean. "
        "`% of the bound`: the shortest possible time over the measured time. "
        "The shortest possible time is FLOPs or bytes at the rate of the card's data sheet, whichever is longer. On a "
        "CPU it is the fastest rate that was measured of a GEMM or a copy."
    )
    rows = []
    for machine in machines:
        name, records = report.machine_of(machine.records, "plain"), machine.records
        versions = {r["versions"]["torch"] for r in records if "torch" in r.get("versions", {})}
        row = {"folder": machine.name, "machine": name, "PyTorch": ", ".join(sorted(versions))}
        rows.append(row | {"measured": report.when(records), "results": len(records)})
    document.heading(2, "What ran where")
    document.table(Table(rows))


def write_section(document: Markdown, row: str, found: Found) -> None:
    section, machine = found.section, found.machine
    document.text(f"*{section.question}*" if document.form == "md" else section.question)
    document.section(section, f"{row}: {section.question}", found.module, fold=True)
    for of in found.elsewhere:
        card = report.machine_of(of.machine.records, "plain")
        has = " ".join([f"Another card has it ({card}).", *of.section.answer[:2]])
        document.link(has, of.machine.name, of.machine.place(of.module, of.section))
    case = deliverable_of(row)
    mine = report.of_module(machine.records, found.module, joined=machine.home is not None)
    if all(record["deliverable"] != case for record in mine):
        case = mine[0]["deliverable"]  # the question has no cases of its own
    mine = [record for record in mine if record["deliverable"] == case]
    device = " --device cuda" if any(r.get("device") == "cuda" for r in mine) else ""
    command = f"python -m parity run --profile full --module {found.module} --case {case}{device}"
    measured = f"{'Measured' if section.blocks else 'Run'} by {command}"
    name = report.machine_of(mine, "md" if document.form == "md" else "plain")
    folder = (machine.home or machine).name
    place = machine.place(found.module, section)
    document.link(f"{name}; {builds_of(mine)}. {measured}.", f"The page of {folder}", place)


def renamed(section: Section) -> Section:
    """A section of the newest handout: its name of the largest size, and the size that was not measured."""

    def words(text: Any) -> Any:
        return XL_NAME.sub("xl", text.replace(IS_XL, "")) if isinstance(text, str) else text

    def block(of: Text | Tabled | Figure) -> Text | Tabled | Figure:
        if isinstance(of, Text):
            return replace(of, words=words(of.words))
        if isinstance(of, Figure):
            return replace(of, name=f"{of.name}_{NEWEST}", title=words(of.title))
        table = copy(of.table)
        table.rows = [[words(cell) for cell in row] for row in table.rows]
        if lacks_10b and "size" in table.titles:
            blank = [None] * len(table.titles)
            at = next((i for i, numeric in enumerate(table.numeric) if numeric), -1)
            blank[table.titles.index("size")], blank[at] = "10B", "not measured"
            table.rows.append(blank)
        return replace(of, table=table)

    row = section.row
    shown = [[*map(str, cells)] for of in section.blocks if isinstance(of, Tabled) for cells in of.table.rows]
    lacks_10b = row in handouts.NOT_10B and not any("10B" in cells for cells in shown)
    narrow = handouts.NARROWED[deliverable_of(row)]
    asked = math.prod(map(len, narrow.values())) if {"size", "context"} <= {*narrow} else 0
    tables = [of.table for of in section.blocks if isinstance(of, Tabled) and "context" in of.table.titles]
    lacks = [words(what) for what in section.lacks if not (narrow and OF_2025.search(what))]
    if tables and len(tables[0].rows) < asked:
        lacks.append(f"{asked - len(tables[0].rows)} of the {asked} rows that are asked for")
    if lacks_10b:
        lacks.append(
            f"10B, whose forward pass `{command_of(row)}` measures on a card with 141 GB that nothing else uses"
        )
    ran = any(cells[1:3] == ["2048", "step"] and cells[3][0].isdigit() for cells in shown)
    if row in ("memory_profiling (b)", "memory_profiling (c)") and not ran:
        lacks.append(f"context 2048 but for inference; `{command_of(row)}` measures it on a card with 141 GB")
    notes = [*map(words, section.notes), *([NO_STEP] if row in handouts.NOT_10B and not lacks_10b else [])]
    said = {"answer": [*map(words, section.answer)], "notes": notes}
    return replace(section, blocks=[*map(block, section.blocks)], lacks=lacks, **said)


def builds_of(records: Sequence[Mapping]) -> str:
    """The commits of C that the records are of, the newest last."""
    built = sorted((r for r in records if "build" in r), key=lambda r: r.get("time", ""))
    commits = [*dict.fromkeys(report.commit_of(record["build"], 10) for record in built)]
    commits = ["commit not recorded" if commit == "unknown" else commit for commit in commits]
    return f"tandem {', '.join(commits or ['commit not recorded'])}"


def write_missing(document: Markdown, chosen: Mapping[str, Found | None]) -> None:
    rows = []
    for row, found in chosen.items():
        what = "; ".join(found.section.lacks) if found else "everything"
        what += (
            f" ({', '.join(of.machine.name for of in found.elsewhere)} has it)"
            if found and found.elsewhere
            else ""
        )
        if what:
            rows.append({"id": row, "machine": found.machine.name if found else "", "what": what})
    document.heading(1, MISSING)
    if rows:
        document.text("Each answer has one machine's results. Another machine may have what is missing.")
        document.table(Table(rows), f"{MISSING}.", "missing")
    else:
        document.text("Nothing is missing.")


def write_index(reports: Path, machines: Sequence[Machine], found: Mapping[str, Mapping]) -> Path:
    """Ids and machines: the handouts that the machine answers, with a link. found: {handout: {row: answers}}."""
    document = Markdown(reports, title="Results by question and machine")
    document.text(
        f"Start with the write-up of [2026]({NAMES[NEWEST]}.md) or [2025]({NAMES[OLDEST]}.md). A machine's cell names "
        "the handouts for which its page has everything that the question asks for, and links to that page; `part`: "
        "something is missing. An empty cell: that machine did not measure it."
    )
    lines = []
    for row in QUESTIONS:
        line = {"row": row}
        line |= {y: f"[answer]({NAMES[y]}.md#{anchor(row)})" if row in HANDOUTS[y] else "" for y in NAMES}
        for machine in machines:
            there = {
                year: of
                for year in NAMES
                for of in found[year].get(row, ())
                if of.machine.name == machine.name
            }
            whole = [year for year, of in there.items() if row in HANDOUTS[year] and not of.section.lacks]
            place = next((of.machine.place(of.module, of.section) for of in reversed(there.values())), "")
            cell = f"[{', '.join(whole) or 'part'}]({place})" if place else ""
            line[f"[{machine.name}]({machine.name}/README.md)"] = cell
        lines.append(line)
    document.table(Table(lines))
    return write_whole(reports / "README.md", document.whole())
