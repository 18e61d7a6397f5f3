"""Checks that each module has all of its files, under one name.

Every folder of impl/ is a module. It must have a public header and a source, a CMocka test that CMake knows, a PyTorch
reference, a parity file or package, a row in the map of docs/layout.md, and results: a page and records in a folder of
reports/. Modules in WITHOUT need fewer. Every operation of ops.h must have a parity case. parity/ has only modules,
core, shared, judge, audit, the bridge and Python's own files. Every program of tests/ must be in tests/CMakeLists.txt.

The author of a module may have no machine whose results belong in the repository. So a module without results is
allowed, but its row in the map must say "not measured yet". When there are results these words must go.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

GROUND = {"base", "device", "cli"}  # used by all modules, and the program that calls them
# Cases of ops, transformer and bench judge the update and the step.
WITHOUT = GROUND | {"optimizer", "train"}
# Modules without parity yet: header, source and test only.
WITHOUT_PARITY: set[str] = set()
# Files of parity/ that are no module.
BESIDE_MODULES = ["core", "shared", "bridge", "bridge_fsdp", "judge", "audit"]
UNMEASURED = "not measured yet"
MAP = "docs/layout.md"
MODULE_OF_RECORD = re.compile(rb'"module": ?"(\w+)"')


def modules(root: Path, without: Iterable[str] = WITHOUT) -> list[str]:
    return sorted(
        path.name for path in (root / "impl").glob("*/") if path.is_dir() and path.name not in without
    )


def parity_room(root: Path, name: str) -> Path:
    """Returns a module's parity file, or the first file of its package."""
    package = root / f"parity/{name}"
    return package / "__init__.py" if package.is_dir() else package.with_suffix(".py")


def rooms(root: Path, name: str) -> dict[str, Path]:
    return {
        "header": root / f"impl/{name}/{name}.h",
        "test": root / f"tests/{name}.c",
        "reference": root / f"ref/{name}.py",
        "parity": parity_room(root, name),
    }


def missing_rooms(root: Path) -> list[str]:
    found = []
    for name in modules(root):
        if not list((root / "impl" / name).glob("*.c")):
            found.append(f"{name}: no source in impl/{name}/")
        for room, path in rooms(root, name).items():
            if room in ("reference", "parity") and name in WITHOUT_PARITY:
                continue
            if not path.is_file():
                found.append(f"{name}: no {room} ({path.relative_to(root)})")
    return found


def unregistered_tests(root: Path) -> list[str]:
    """Sources in tests/ that are in no program, and modules without a CTest test."""
    cmake = (root / "tests/CMakeLists.txt").read_text()
    words = set(re.split(r"[\s()]+", cmake))
    found = [
        f"tests/{path.name} stands in no program of tests/CMakeLists.txt"
        for path in sorted((root / "tests").glob("*.c"))
        if path.name not in words
    ]
    tests = set(re.findall(r"td_add_test\((\w+)", cmake))
    return found + [
        f"{name}: no td_add_test({name} ...) in tests/CMakeLists.txt"
        for name in modules(root)
        if name not in tests
    ]


def measured(root: Path) -> dict[str, set[Path]]:
    """{module: the folders of reports/ with its records}. Local folders, which git ignores, do not count."""
    found: dict[str, set[Path]] = {}
    for path in sorted((root / "reports").glob("*/records.jsonl")):
        if not path.parent.name.startswith("local"):
            for name in set(MODULE_OF_RECORD.findall(path.read_bytes())):
                found.setdefault(name.decode(), set()).add(path.parent)
    return found


def readme_of(folder: Path) -> str:
    """The page of a machine, which holds all pages of a machine with few."""
    path = folder / "README.md"
    return path.read_text() if path.is_file() else ""


def off_the_map(root: Path) -> list[str]:
    """Missing or wrong rows in the map of docs/layout.md, and records without a page."""
    rows = dict(
        re.findall(r"^\| \[(\w+)\]\(\.\./impl/\1/\1\.h\) \|(.*)$", (root / MAP).read_text(), re.MULTILINE)
    )
    results = measured(root)
    found = []
    for name in modules(root, GROUND):
        row = rows.get(name)
        if row is None:
            found.append(f"{name}: no row in the map of {MAP}, | [{name}](../impl/{name}/{name}.h) | ... |")
        elif name not in WITHOUT and name not in results and UNMEASURED not in row:
            found.append(
                f'{name}: no results in reports/, and its row in the map of docs/layout.md does not say "{UNMEASURED}"'
            )
        elif name in results and UNMEASURED in row:
            found.append(f'{name}: its row in the map of docs/layout.md says "{UNMEASURED}", and it is')
        found += [
            f"{name}: no page ({(folder / name).relative_to(root)}.md), though there are records"
            for folder in sorted(results.get(name, ()))
            if not (folder / f"{name}.md").is_file() and f"\n# {name}\n" not in readme_of(folder)
        ]
    return found


def strangers(root: Path) -> list[str]:
    """Files that may not be in parity/."""
    parity = root / "parity"
    known = {*modules(root), *BESIDE_MODULES}
    found = []
    for file in sorted(parity.rglob("*.py")):
        top = file.relative_to(parity).parts[0].removesuffix(".py")
        pythons_own = re.fullmatch(r"__\w+__", file.stem)
        if file.stem.startswith("_") and not pythons_own:
            found.append(f"{file.relative_to(root)} begins with an underscore")
        elif top not in known and not (pythons_own and file.parent == parity):
            found.append(f"{file.relative_to(root)} is no module's")
    return found


def public_operations(header: str) -> list[str]:
    names = re.findall(r"TD_API td_status td_(\w+)\(", header)
    # Functions that only describe an operation need no case.
    return [name for name in names if not name.endswith(("_work_bytes", "_pays", "_check"))]


def operations_without_case(root: Path) -> list[str]:
    room = parity_room(root, "ops")
    files = room.parent.glob("*.py") if room.parent.name == "ops" else [room]
    parity = "".join(file.read_text() for file in files)
    return [
        f"ops: td_{name} has no case in parity/ops"
        for name in public_operations((root / "impl/ops/ops.h").read_text())
        if f"td_{name}" not in parity
    ]


def main() -> int:
    found = missing_rooms(ROOT) + unregistered_tests(ROOT) + off_the_map(ROOT)
    found += strangers(ROOT) + operations_without_case(ROOT)
    for line in found:
        print(line)
    print(f"rooms: {len(modules(ROOT))} names, {len(found)} missing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
