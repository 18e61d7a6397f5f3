"""Lines are at most 110 columns wide: all of C and CUDA, and comments elsewhere. Tables of a page may be wider."""

import subprocess
import sys
from pathlib import Path

WIDEST = 110
ROOT = Path(__file__).resolve().parents[2]
WHOLE = {".c", ".h", ".cu", ".cuh"}
COMMENTS = {".py", ".sh", ".cmake", ".txt", ""}


def too_wide(path: Path, text: str) -> list[str]:
    whole = path.suffix in WHOLE
    return [
        f"{path}:{number}: {len(line)} columns, at most {WIDEST}"
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > WIDEST and (whole or line.lstrip().startswith("#"))
    ]


def main() -> int:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    paths = [Path(name) for name in listed if not name.startswith("reports/")]
    found = [
        complaint
        for path in paths
        if path.suffix in WHOLE | COMMENTS and (ROOT / path).is_file()
        for complaint in too_wide(path, (ROOT / path).read_text(encoding="utf-8", errors="replace"))
    ]
    print("\n".join([*found, f"columns: {len(found)} lines are too wide"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
