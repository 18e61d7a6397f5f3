"""A module has one name, and the name opens the same room on every floor.

Every deliverable module that impl/ has must have: its public header and a source, its CMocka test, its PyTorch
reference, its parity file and its committed report. Every operation of ops.h must have a parity case.
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


def rooms(root: Path, name: str) -> dict[str, Path]:
    return {
        "header": root / f"impl/{name}/{name}.h",
        "test": root / f"tests/{name}.c",
        "reference": root / f"ref/{name}.py",
        "parity": root / f"parity/{name}.py",
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


def public_operations(header: str) -> list[str]:
    names = re.findall(r"TD_API td_status td_(\w+)\(", header)
    # What only tells about an operation has none of its own.
    return [name for name in names if not name.endswith(("_work_bytes", "_pays", "_check"))]


def operations_without_case(root: Path) -> list[str]:
    files = [root / "parity/ops.py", *sorted((root / "parity").glob("_ops_*.py"))]
    parity = "".join(file.read_text() for file in files)
    return [
        f"ops: td_{name} has no parity case in parity/ops.py"
        for name in public_operations((root / "impl/ops/ops.h").read_text())
        if f"td_{name}" not in parity
    ]


def main() -> int:
    found = missing_rooms(ROOT) + operations_without_case(ROOT)
    for line in found:
        print(line)
    opened = [name for name in [*MODULES, *FLOORS] if (ROOT / "impl" / name).is_dir()]
    print(f"rooms: {len(opened)} names, {len(found)} missing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
