"""Plain words in generated pages and in the templates of their sentences: a short list of words that readers had to
read twice, each with a plain one. Tables, code and names in backticks are left out."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("reports/*.md", "reports/*/*.md", "parity/words/*.j2")
# Word -> what to write. Each was tried on the project's good prose and on our pages: no false alarm.
PLAIN = {
    r"behind": "after, or hidden by",
    r"ahead of": "before",
    r"beside": "during, or next to in a table",
    r"those of": "name the thing",
    r"held (to|against)": "compared with",
    r"at the most": "at most",
    r"in the mean": "on average, or the geometric mean",
    r"is no more": "was removed",
    r"what lacks": "what is missing",
    r"times (eager )?PyTorch's of": "milliseconds first",
    r"of which it": "name the thing",
    r"not measured on this machine": "leave it out",
}
WORDS = re.compile(rf"\b({'|'.join(PLAIN)})\b", re.IGNORECASE)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def problems(root: Path) -> list[str]:
    found = []
    for page in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        if page.parent.name.startswith("local"):
            continue
        # The same number of lines remains, so that the line is right.
        text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text(encoding="utf-8"))
        for number, line in enumerate(text.split("\n"), 1):
            if line.startswith("|"):
                continue
            for match in WORDS.finditer(re.sub(r"`[^`]*`|\{\{.*?\}\}|\{%.*?%\}", "", line)):
                plain = next(
                    plain for word, plain in PLAIN.items() if re.fullmatch(word, match[0], re.IGNORECASE)
                )
                found.append(f"{page.relative_to(root)}:{number}: '{match[0]}': {plain}")
    return found


def main() -> int:
    found = problems(ROOT)
    for line in found:
        print(line)
    print(f"plain: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
