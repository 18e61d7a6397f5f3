"""What README.md quotes is what the quoted file says.

A quotation stands between `<!-- quoted from FILE -->` and `<!-- end -->`; without its code fence it must be a run of
lines of FILE. Every relative link and picture of README.md must exist as well.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUOTE = re.compile(r"<!-- quoted from (\S+) -->\n(.*?)\n<!-- end -->", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def problems(root: Path) -> list[str]:
    text = (root / "README.md").read_text()
    found = []
    quotes = QUOTE.findall(text)
    if not quotes:
        found.append("README.md quotes nothing")
    for name, block in quotes:
        lines = [line for line in block.strip("\n").split("\n") if not line.startswith("```")]
        quoted = "\n".join(lines).strip("\n")
        path = root / name
        if not path.is_file():
            found.append(f"README.md quotes {name}, which is not there")
        elif not quoted:
            found.append(f"README.md quotes nothing from {name}")
        elif quoted not in path.read_text():
            found.append(f"README.md quotes {name} with other words than it has: copy it again")
    for target in LINK.findall(text):
        if not (root / target).exists():
            found.append(f"README.md links to {target}, which is not there")
    return found


def main() -> int:
    found = problems(ROOT)
    for line in found:
        print(line)
    print(f"readme: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
