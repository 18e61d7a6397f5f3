"""Code lines of C, CUDA and Python per top folder, without blank lines, comments and docstrings. Prints them beside
the numbers that ci/lines.txt allows, and the difference to main. Fails if a folder has more lines than allowed."""

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = ROOT / "ci/lines.txt"
C = {".c", ".h", ".cpp", ".cu", ".cuh"}
C_COMMENTS = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|//[^\n]*|/\*.*?\*/', re.DOTALL)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def c_lines(text: str) -> int:
    code = C_COMMENTS.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)
    return sum(1 for line in code.splitlines() if line.strip())


def python_lines(text: str) -> int:
    documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    docstrings = [node.body[0] for node in documented if ast.get_docstring(node, clean=False) is not None]
    words = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return sum(
        1
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#") and number not in words
    )


def count(files: dict[str, str]) -> Counter[str]:
    lines: Counter[str] = Counter()
    for name, text in files.items():
        suffix = Path(name).suffix
        if "/" in name and suffix in C | {".py"}:
            lines[name.split("/")[0]] += c_lines(text) if suffix in C else python_lines(text)
    return lines


def here() -> dict[str, str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    wanted = [name for name in listed if Path(name).suffix in C | {".py"} and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text() for name in wanted}


def on_main() -> dict[str, str] | None:
    """None in a clone without a branch main, as CI's may be."""
    for branch in ("main", "origin/main"):
        packed = subprocess.run(["git", "archive", branch], cwd=ROOT, capture_output=True)
        if packed.returncode == 0:
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
                wanted = [entry for entry in tar if entry.isfile() and Path(entry.name).suffix in C | {".py"}]
                return {entry.name: tar.extractfile(entry).read().decode() for entry in wanted}
    return None


def allowed(text: str) -> dict[str, int]:
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {folder: int(number) for folder, number in rows}


def too_many(lines: Counter[str], limits: dict[str, int]) -> list[str]:
    return [
        f"{folder}: {lines[folder]} code lines, ci/lines.txt allows {limits.get(folder, 0)}"
        for folder in sorted(lines)
        if lines[folder] > limits.get(folder, 0)
    ]


def main() -> int:
    lines, limits, before = count(here()), allowed(ALLOWED.read_text()), on_main()
    old = count(before) if before is not None else None
    print(f"{'folder':10} {'code':>8} {'allowed':>8} {'to main':>8}")
    for folder in sorted(lines):
        change = f"{lines[folder] - old[folder]:+8}" if old is not None else "       ?"
        print(f"{folder:10} {lines[folder]:8} {limits.get(folder, 0):8} {change}")
    change = f"{lines.total() - old.total():+8}" if old is not None else "       ?"
    print(f"{'total':10} {lines.total():8} {sum(limits.values()):8} {change}")
    found = too_many(lines, limits)
    print("\n".join([*found, f"lines: {len(found)} folders have more code lines than allowed"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
