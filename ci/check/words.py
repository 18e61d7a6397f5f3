"""Checks that our pages and help texts use plain words. They must have none of PATTERNS. In pages that people write, a
sentence has at most MOST words.

Good prose does not need these patterns: images, "behind" and "ahead of" for time, "beside" for "and" or "during", and
pronouns whose noun is missing. Code, tables and quotations do not count as sentences.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "parity/*.md")
GENERATED = ("reports/*.md", "reports/*/*.md", "parity/words/*.j2")  # only the patterns are checked
HELP = ("impl/cli/*.[ch]", "parity/core/command.py")
MOST = 25  # the most words of a sentence
PATTERNS = {
    r"(?<!--)\b(behind|beside|besides|ahead of|alongside)\b": '"after", "before", "during", "with" or "next to"',
    r"\b(is|are) no more\b": '"was removed", "no longer"',
    r"\bthose of\b": "the noun again",
    r"\bthe (latter|former)\b": "the noun again",
    r"\bwho(ever)? (takes|has|wants)\b": "the noun",
    r"\b(house|guest|bargain)s?\b": "the thing itself",
    r"\b(rooms|floors|(own|each|every|lowest) (room|floor))\b(?!\.py)": '"files", "layer"',
    r"\b(held (to|against)|is held)\b": '"compared with", "must match"',
    r"\bmultiprocessors?\b": '"SM"',
    r"\bfor want of\b": '"because of missing"',
    r"\bat the (least|most)\b": '"at least", "at most"',
    r"\bin the mean\b": '"on average", or the geometric mean',
    r"\bwhat lacks\b": '"what is missing"',
    r"\bof which it\b": "the noun again",
}
CODE = re.compile(r"^```.*?^```|^    .*?$|<!--.*?-->|`[^`\n]*`|^\|.*?$", re.DOTALL | re.MULTILINE)
JINJA = re.compile(r"\{[{%].*?[}%]\}")
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def patterns_in(name: str, text: str) -> list[str]:
    found = []
    for pattern, better in PATTERNS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            line = text[: match.start()].count("\n") + 1
            found.append(f'{name}:{line}: "{match[0]}": say {better}')
    return found


def prose(text: str) -> str:
    """The text without code, quotations and tables, each of which leaves its lines empty."""
    return CODE.sub(lambda match: "\n" * match[0].count("\n") or "x", text)


def long_sentences(name: str, text: str) -> list[str]:
    found = []
    plain = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*#] )|\n#+ ", plain):
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split())):
            count = len(re.findall(r"[\w'][\w'/.,-]*", sentence))
            if count > MOST:
                found.append(f"{name}: {count} words, at most {MOST}: {sentence[:60]} ...")
    return found


def help_in(path: Path) -> str:
    """The string literals of a file, each on its line."""
    return "\n".join(" ".join(STRING.findall(line)) for line in path.read_text().split("\n"))


def problems(root: Path) -> list[str]:
    found = []
    for path in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        name, text = str(path.relative_to(root)), prose(path.read_text())
        found += patterns_in(name, text) + long_sentences(name, text)
    for path in sorted(path for pattern in GENERATED for path in root.glob(pattern)):
        if not path.parent.name.startswith("local"):
            found += patterns_in(str(path.relative_to(root)), prose(JINJA.sub("", path.read_text())))
    for path in sorted(path for pattern in HELP for path in root.glob(pattern)):
        found += patterns_in(str(path.relative_to(root)), help_in(path))
    return found


def main() -> int:
    found = problems(ROOT)
    for line in found:
        print(line)
    print(f"words: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
