"""A document as Markdown, HTML or LaTeX: the same calls, and a different text."""

import base64
import html
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parity.core import plot
from parity.core.case import ParityError
from parity.core.files import write_whole
from parity.core.tables import PREAMBLE, Table, breaking

CODE = re.compile(r"`([^`]*)`")
FOLDED = 24  # rows of a table from which on Markdown and HTML fold it


@dataclass
class Text:
    words: str
    kind: str = "small"  # or "working": the method of a document that writes it


@dataclass
class Tabled:
    """A table, and its name in a document that has many."""

    name: str
    table: Table


@dataclass
class Figure:
    """A picture that is drawn when a document needs it."""

    name: str
    title: str
    draw: Callable[[], Any]

    def saved(self, form: str) -> bytes:
        try:
            return plot.save(self.draw(), form)
        except (
            ValueError,
            ArithmeticError,
        ) as error:  # values that no axis holds, and sides without a colour
            raise ParityError(f"picture {self.name}: {error}") from error


@dataclass
class Section:
    """A question, its answer, and what shows it."""

    row: str
    question: str
    answer: list[str] = field(default_factory=list)
    blocks: list[Text | Tabled | Figure] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)  # what the question asks for and was not measured
    notes: list[str] = field(default_factory=list)  # sentences beyond those that the question asks for

    def rows(self) -> int:
        tables = (block.table for block in self.blocks if isinstance(block, Tabled))
        return sum(len(table.rows) for table in tables)

    def has_content(self) -> bool:
        return bool(self.answer) or any(getattr(block, "kind", "") != "small" for block in self.blocks)


def anchor(heading: str) -> str:
    """Where a heading is found, as GitHub makes it."""
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


class Markdown:
    """`figures`: where pictures go, from the document's folder."""

    suffix, form = ".md", "md"
    TEXT, SMALL, WORKING = "{}\n", "*{}*\n", "```text\n{}\n```\n"
    FOLD = "<details><summary>The table: {} rows</summary>\n\n{}\n</details>\n"

    def __init__(self, folder: Path, figures: str = "", title: str = ""):
        self.folder, self.figures, self.title = folder, figures, title
        self.parts: list[str] = []
        self.files: list[Path] = []  # pictures that were written
        if title:
            self.heading(1, title)

    def whole(self) -> str:
        return "\n".join(self.parts)

    def inline(self, words: str) -> str:
        """A text that may have `code`."""
        return words

    def heading(self, level: int, words: str) -> None:
        self.parts.append(f"{'#' * level} {words}\n")

    def text(self, words: str) -> None:
        self.parts.append(self.TEXT.format(self.inline(words)))

    def small(self, words: str) -> None:
        self.parts.append(self.SMALL.format(self.inline(words)))

    def link(self, before: str, words: str, target: str) -> None:
        """In Markdown alone: a document of another form stands by itself."""
        if self.form == "md":
            self.parts.append(f"<sub>{before} [{words}]({target})</sub>\n")
        else:
            self.small(before)

    def working(self, lines: str) -> None:
        self.parts.append(self.WORKING.format(lines))

    def table(self, table: Table, caption: str = "", label: str = "", fold: bool = False) -> None:
        drawn = table.render(self.form)
        folds = fold and len(table.rows) > FOLDED
        self.parts.append(self.FOLD.format(len(table.rows), drawn) if folds else drawn)

    def picture(self, figure: Figure) -> None:
        self.parts.append(f"![{figure.title}]({self.drawn(figure, 'svg')})\n")

    def section(self, section: Section, caption: str = "", label: str = "", fold: bool = False) -> None:
        """All of it but its heading. The caption and the label are for its tables."""
        if section.answer:
            self.text(" ".join(section.answer))
        for block in section.blocks:
            if isinstance(block, Tabled):
                self.table(block.table, caption, f"{label}_{block.name}", fold)
            elif isinstance(block, Figure):
                self.picture(block)
            else:
                getattr(self, block.kind)(block.words)
        if section.notes:
            self.text(f"Notes: {' '.join(section.notes)}")
        if section.lacks:
            self.small(f"Not measured on this machine: {'; '.join(section.lacks)}.")

    def contents(self, year: str, rows: Iterable[str]) -> None:
        """Links to the answers of a handout. An id with several parts stands once."""
        items = []
        for name, group in itertools.groupby(rows, lambda row: row.partition(" (")[0]):
            parts = list(group)
            links = [self.inside(row.removeprefix(f"{name} "), row) for row in parts]
            items.append(" ".join(links if name in parts else [name, *links]))
        self.parts.append(self.TEXT.format(f"{year}: {'; '.join(items)}."))

    def inside(self, words: str, heading: str) -> str:
        """A link to a heading of this document."""
        return f"[{words}](#{anchor(heading)})"

    def drawn(self, figure: Figure, form: str) -> str:
        """The picture's path from the document."""
        path = self.folder / self.figures / f"{figure.name}.{form}"
        path.parent.mkdir(exist_ok=True)
        self.files.append(write_whole(path, figure.saved(form)))
        return path.relative_to(self.folder).as_posix()


class Html(Markdown):
    """One file without outside references."""

    suffix, form = ".html", "html"
    TEXT, SMALL, WORKING = "<p>{}</p>", '<p class="small">{}</p>', "<pre>{}</pre>"
    FOLD = "<details><summary>The table: {} rows</summary>\n{}</details>"
    STYLE = """body{font:16px/1.5 sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:13px;margin:1em 0;display:block;overflow-x:auto}
th,td{padding:2px 8px;border-bottom:1px solid #ddd;text-align:left}.r{text-align:right}
thead th{border-bottom:2px solid #888;background:#f6f6f6}pre{background:#f6f6f6;padding:1em;white-space:pre-wrap}
img{max-width:100%}h2{border-top:1px solid #ccc;padding-top:.7em;margin-top:2em}.small{color:#666;font-size:13px}
code{background:#f2f2f2;padding:0 .2em}"""

    def whole(self) -> str:
        head = f'<meta charset="utf-8"><title>{html.escape(self.title)}</title><style>{self.STYLE}</style>'
        opening = f'<!doctype html><html lang="en"><head>{head}</head><body>'
        return "\n".join([opening, *self.parts, "</body></html>", ""])

    def inline(self, words: str) -> str:
        return CODE.sub(r"<code>\1</code>", html.escape(words, quote=False))

    def working(self, lines: str) -> None:
        super().working(html.escape(lines))

    def heading(self, level: int, words: str) -> None:
        self.parts.append(f'<h{level} id="{anchor(words)}">{self.inline(words)}</h{level}>')

    def inside(self, words: str, heading: str) -> str:
        return f'<a href="#{anchor(heading)}">{self.inline(words)}</a>'

    def picture(self, figure: Figure) -> None:
        data = base64.b64encode(figure.saved("svg")).decode()
        title = html.escape(figure.title)
        self.parts.append(f'<p><img alt="{title}" src="data:image/svg+xml;base64,{data}"></p>')


class Latex(Markdown):
    suffix, form = ".tex", "latex"
    SMALL = "{{\\footnotesize {}\\par}}\n"
    WORKING = "{{\\scriptsize\\begin{{verbatim}}\n{}\n\\end{{verbatim}}}}\n"
    HEAD = (
        r"\documentclass[a4paper]{article}",
        r"\usepackage[T1]{fontenc}\usepackage[utf8]{inputenc}\usepackage{lmodern,textcomp,amssymb}",
        r"\usepackage[margin=2.5cm]{geometry}\usepackage{graphicx}\usepackage{float}",
        PREAMBLE,
        r"\setlength{\parindent}{0pt}\setlength{\parskip}{6pt}\emergencystretch=3em",
        r"\begin{document}",
    )

    def whole(self) -> str:
        return "\n".join([*self.HEAD, *self.parts, r"\end{document}", ""])

    def inline(self, words: str) -> str:
        parts = CODE.split(words)
        found = [rf"\texttt{{{breaking(p)}}}" if i % 2 else breaking(p) for i, p in enumerate(parts)]
        return "".join(found)

    def heading(self, level: int, words: str) -> None:
        self.parts.append(f"\\{(level - 1) * 'sub'}section*{{{self.inline(words)}}}\n")

    def contents(self, year: str, rows: Iterable[str]) -> None:
        pass  # pages have numbers

    def table(self, table: Table, caption: str = "", label: str = "", fold: bool = False) -> None:
        self.parts.append(table.render("latex", caption, f"tab:{label}" if label else ""))

    def picture(self, figure: Figure) -> None:
        path = self.drawn(figure, "pdf")
        self.parts += [
            "\\begin{figure}[H]\\centering",
            f"\\includegraphics[width=\\linewidth,height=.42\\textheight,keepaspectratio]{{{path}}}",
            f"\\caption{{{self.inline(figure.title)}}}\\label{{fig:{figure.name}}}",
            "\\end{figure}\n",
        ]


FORMATS = {found.form: found for found in (Markdown, Html, Latex)}
