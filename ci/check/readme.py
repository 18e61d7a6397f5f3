"""Checks that quotations in our Markdown equal the quoted files, and that links lead to existing files.

A quotation lies between `<!-- quoted from FILE -->` and `<!-- end -->`. FILE is a path from the root. Without its code
fence the quotation must be consecutive lines of FILE. Every relative link and picture of every page must exist, and so
must the heading that a link names.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUOTE = re.compile(r"<!-- quoted from (\S+) -->\n(.*?)\n<!-- end -->", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
PAGES = ("*.md", "docs/*.md", "parity/*.md", "reports/*.md", "reports/*/*.md")
QUOTING = "README.md"  # the page that must quote something


def problems(root: Path) -> list[str]:
    found = []
    for pattern in PAGES:
        for page in sorted(root.glob(pattern)):
            if page.parent.name != "local":
                found += problems_of(root, page)
    return found


def problems_of(root: Path, page: Path) -> list[str]:
    text, name, found = page.read_text(), page.relative_to(root), []
    quotes = QUOTE.findall(text)
    if not quotes and str(name) == QUOTING:
        found.append(f"{name} quotes nothing")
    for source, block in quotes:
        lines = [line for line in block.strip("\n").split("\n") if not line.startswith("```")]
        quoted = "\n".join(lines).strip("\n")
        path = root / source
        if not path.is_file():
            found.append(f"{name} quotes {source}, which is not there")
        elif not quoted:
            found.append(f"{name} quotes nothing from {source}")
        elif quoted not in path.read_text():
            found.append(f"{name} quotes {source} with other words than it has: copy it again")
    for target, anchor in LINK.findall(FENCE.sub("", text)):
        path = page.parent / target if target else page
        if not path.exists():
            found.append(f"{name} links to {target}, which is not there")
        elif anchor and path.suffix == ".md" and anchor[1:] not in anchors(path):
            found.append(f"{name} links to {target}{anchor}, where there is no such heading")
    return found


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a page's headings. The second heading of the same name ends in -1."""
    found: dict[str, int] = {}
    names = set()
    for heading in HEADING.findall(FENCE.sub("", path.read_text())):
        name = "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")
        count = found[name] = found.get(name, -1) + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def main() -> int:
    found = problems(ROOT)
    for line in found:
        print(line)
    print(f"readme: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
