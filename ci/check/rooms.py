"""A module has one name, and the name opens the same room on every floor.

Every deliverable module that impl/ has must have: its public header and a source, its CMocka test, its PyTorch
reference, its parity file or package and its committed report. Every operation of ops.h must have a parity case. The
top of parity/ shows the names of modules, and besides them only core, shared and Python's own files.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The names of the house (the table of README.md, "Map"). A name counts once impl/ has its folder.
MODULES = "precision attention jit flash transformer bench trace memory comm ddp shard accounting".split()
# The floor of operations has its rooms too, though no deliverable of its own.
FLOORS = ["ops"]
COMMITTED_REPORT = "cpu"
BESIDE_MODULES = ["core", "shared"]  # folders of parity/


def parity_room(root: Path, name: str) -> Path:
    """A module's parity file, or the first file of its package."""
    package = root / f"parity/{name}"
    return package / "__init__.py" if package.is_dir() else package.with_suffix(".py")


def rooms(root: Path, name: str) -> dict[str, Path]:
    return {
        "header": root / f"impl/{name}/{name}.h",
        "test": root / f"tests/{name}.c",
        "reference": root / f"ref/{name}.py",
        "parity": parity_room(root, name),
        "report": root / f"reports/{COMMITTED_REPORT}/{name}.md",
    }


def missing_rooms(root: Path) -> list[str]:
    found = []
    for name in [*MODULES, *FLOORS]:
        folder = root / "impl" / name
        if not folder.is_dir():
            continue
        if not list(folder.glob("*.c")):
            found.append(f"{name}: no source in impl/{name}/")
        for room, path in rooms(root, name).items():
            if not path.is_file():
                found.append(f"{name}: no {room} ({path.relative_to(root)})")
    return found


def strangers(root: Path) -> list[str]:
    """What stands in parity/ and may not."""
    parity = root / "parity"
    known = {*MODULES, *FLOORS, *BESIDE_MODULES}
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
    # What only tells about an operation has none of its own.
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
    found = missing_rooms(ROOT) + strangers(ROOT) + operations_without_case(ROOT)
    for line in found:
        print(line)
    opened = [name for name in [*MODULES, *FLOORS] if (ROOT / "impl" / name).is_dir()]
    print(f"rooms: {len(opened)} names, {len(found)} missing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
