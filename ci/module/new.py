"""new.py ROOT NAME [WORDS]: writes the files of a module NAME into the tree ROOT, for ci/new-module. WORDS describe it
in the map of docs/layout.md.

The files are copies of template/, an elementwise operation, with the new name. EDITS adds the module to lists. All
texts are prepared before anything is written, so nothing changes after a refusal. Prints the paths of written files.
"""

import keyword
import re
import sys
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parent / "template"
EXAMPLE = "scale"
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# Names with a meaning in C or in the project that no file has.
RESERVED = {
    *"auto char const double enum extern float inline int long short signed static void volatile".split()
}
RESERVED |= {*"core shared support main build local reports kernels ref impl tests parity tandem".split()}
# The lists of modules: a file, an expression for the place before which the module is put, and the text. The
# expression must find one place, also for the next module.
EDITS = (
    (
        "impl/CMakeLists.txt",
        r"^td_add_module\(attention ",
        "td_add_module({name} SOURCES {name}/{name}.c MAY_USE device base)\n",
    ),
    (
        "tests/CMakeLists.txt",
        r"^td_add_test\(bench SOURCES",
        "td_add_test({name} SOURCES {name}.c USES {name} device base WRAP td_device_kind_of)\n",
    ),
    ("tests/CMakeLists.txt", r"fuzz_api_base\.c", "fuzz_api_{name}.c "),
    ("tests/CMakeLists.txt", r"base LABELS [\w ]*\n *ARGUMENTS \$\{api_seconds\}", "{name} "),
    ("parity/__init__.py", r'"attention",', '"{name}", '),
    (
        "docs/layout.md",
        r"^\| \[ops\]\(\.\./impl/ops/ops\.h\) \| ",
        "| [{name}](../impl/{name}/{name}.h) | {words} (not measured yet) |\n",
    ),
    ("docs/layout.md", r"`ops`, `device comm`,", "`{name}`, "),
)


class Refused(RuntimeError):
    """A name is taken or invalid, or a place for an edit was not found."""


def check_name(root: Path, name: str) -> None:
    if not NAME.fullmatch(name) or len(name) > 24:
        raise Refused(f"'{name}' is no name for a module: lower-case words joined by _, at most 24 letters")
    if name in RESERVED or keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise Refused(f"'{name}' has another meaning")
    for folder in ("impl", "kernels", "ref", "tests", "parity"):
        for path in (root / folder).glob("*"):
            if path.name.split(".")[0] == name:
                raise Refused(f"{path.relative_to(root)} is there already")
    lists = [*root.glob("cmake/*.cmake"), root / "tests/CMakeLists.txt", *root.glob("impl/**/CMakeLists.txt")]
    target = re.compile(
        rf"add_(?:library|executable|custom_target)\((?:td|test)_{name}\b|add_test\((?:NAME )?{name}\b"
    )
    for path in lists:
        if target.search(path.read_text()):
            raise Refused(f"{path.relative_to(root)} has a target of that name already")
    function = re.compile(rf"\btd_{name}_(?:forward|backward)\(")
    for path in sorted(root.glob("impl/**/*.h")):
        if found := function.search(path.read_text()):
            raise Refused(f"{path.relative_to(root)} has {found[0]}) already")


def rooms(root: Path, name: str) -> dict[Path, str]:
    """The module's own files."""
    found = {}
    for path in sorted(path for path in TEMPLATE.rglob("*") if path.suffix in (".c", ".h", ".py", ".j2")):
        place = str(path.relative_to(TEMPLATE)).replace(EXAMPLE, name)
        text = path.read_text()
        found[root / place] = text.replace(EXAMPLE, name).replace(EXAMPLE.upper(), name.upper())
    return found


def lists(root: Path, name: str, words: str) -> dict[Path, str]:
    """The files that list modules, with this module added."""
    found: dict[Path, str] = {}
    for file, before, line in EDITS:
        path = root / file
        text = found.get(path) or path.read_text()
        places = [match.start() for match in re.finditer(before, text, re.MULTILINE)]
        if len(places) != 1:
            raise Refused(f"{file} has '{before}' {len(places)} times, ci/module/new.py needs it once")
        found[path] = text[: places[0]] + line.format(name=name, words=words) + text[places[0] :]
    return found


def main() -> int:
    root, name, *words = sys.argv[1:]
    try:
        check_name(Path(root), name)
        files = rooms(Path(root), name) | lists(Path(root), name, " ".join(words) or name)
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 1
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
