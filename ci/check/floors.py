"""Includes follow the order of modules: a file of impl/ includes only files of its own module and of modules that
MAY_USE names.

The order is read from impl/CMakeLists.txt (td_add_module(... MAY_USE ...)), so the build and this check cannot
disagree. A module must be listed after all modules in its MAY_USE.

Inside a module, files call in one direction: no file calls a file that calls it, directly or through others.

Files of kernels/ may include each other, and the public headers of SEEN_BY_KERNELS, for the structs that describe a
shape. Only a module's CUDA files (cuda.c, cuda/*.c) may include kernels/.
"""

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
INTERNAL = re.compile(
    r"/\*\* Internal to ((?:impl/)?\w+/(?:[^:,]*? and \w+/)?)"
)  # of these modules; "impl/": of all
PUBLIC = "\nTD_BEGIN_DECLS"
SEEN_BY_KERNELS = {"base", "device", "ops", "attention"}
DECLARATIONS = "base/base.h"  # defines the macros that mark a public header
NO_CODE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
# A function with its body, or data with its value, that other files can use.
DEFINED = re.compile(
    r"^(?!static|extern|typedef)[a-z][\w *]*?\b(td_\w+)(?:\([^;{]*\)\s*\{|[\w\[\]]* =)", re.MULTILINE
)
MODULE = re.compile(r"td_add_module\(\s*(\w+)(.*?)\)", re.DOTALL)


def may_use(cmake: str) -> dict[str, set[str]]:
    floors: dict[str, set[str]] = {}
    for name, body in MODULE.findall(cmake):
        words = body.split()
        used: set[str] = set()
        if "MAY_USE" in words:
            for word in words[words.index("MAY_USE") + 1 :]:
                if word.isupper():
                    break
                used.add(word)
        for below in used:
            if below not in floors:
                raise SystemExit(
                    f"impl/CMakeLists.txt: {name} may use {below}, which does not stand below it"
                )
        floors[name] = used
    return floors


def owners(header: Path) -> set[str]:
    """The modules that the first line of a header names, as "Internal to ddp/ and shard/"; none: all may include it."""
    said = INTERNAL.match(header.read_text())
    return set(re.findall(r"(\w+)/", said[1])) - {"impl"} if said else set()


def violations(impl: Path, floors: dict[str, set[str]]) -> list[str]:
    found = []
    # cli/ may use every module and is no module of the library.
    allowed = {name: used | {name} for name, used in floors.items()} | {"cli": set(floors) | {"cli"}}
    for path in sorted([*impl.rglob("*.c"), *impl.rglob("*.cpp"), *impl.rglob("*.h")]):
        module = path.relative_to(impl).parts[0]
        where = path.relative_to(impl.parent)
        if module not in allowed:
            found.append(f"{where}: {module} is no module of impl/CMakeLists.txt")
            continue
        for included in INCLUDE.findall(path.read_text()):
            target = included.split("/")[0]
            if target == "kernels" and (impl.parent / included).is_file():
                if "cuda" not in (path.stem, path.parent.name):
                    found.append(f'{where}: includes "{included}", which is for cuda.c and cuda/ alone')
            elif "/" not in included or not (impl / included).is_file():
                found.append(f'{where}: "{included}" is no path from impl/')
            elif target not in allowed[module]:
                found.append(f'{where}: includes "{included}", but {module} may not use {target}')
            elif (mine := owners(impl / included)) and module not in mine:
                found.append(
                    f'{where}: includes "{included}", which is internal to {", ".join(sorted(mine))}'
                )
    return found


def circles(impl: Path) -> list[str]:
    found = []
    for module in sorted(path for path in impl.iterdir() if path.is_dir()):
        texts = {
            path.relative_to(module): NO_CODE.sub("", path.read_text())
            for path in sorted(module.rglob("*.c"))
        }
        home = {name: path for path, text in texts.items() for name in DEFINED.findall(text)}
        calls = {
            path: {home[name] for name in re.findall(r"\btd_\w+", text) if name in home} - {path}
            for path, text in texts.items()
        }
        try:
            TopologicalSorter(calls).prepare()
        except CycleError as error:
            found.append(f"{module.name}: files call in a circle: {' <- '.join(map(str, error.args[1]))}")
    return found


def kernel_violations(kernels: Path, impl: Path) -> list[str]:
    found = []
    for path in sorted(path for path in kernels.rglob("*") if path.suffix in (".h", ".cu", ".cuh")):
        where = path.relative_to(kernels.parent)
        for included in INCLUDE.findall(path.read_text()):
            target = included.split("/")[0]
            if target == "kernels":
                if not (kernels.parent / included).is_file():
                    found.append(f'{where}: "{included}" is not there')
            elif not (impl / included).is_file():
                found.append(f'{where}: "{included}" is no path from impl/')
            elif included != DECLARATIONS and (
                target not in SEEN_BY_KERNELS or PUBLIC not in (impl / included).read_text()
            ):
                found.append(f'{where}: includes "{included}", which is not for kernels')
    return found


def main() -> int:
    floors = may_use((ROOT / "impl/CMakeLists.txt").read_text())
    found = violations(ROOT / "impl", floors) + kernel_violations(ROOT / "kernels", ROOT / "impl")
    found += circles(ROOT / "impl")
    for line in found:
        print(line)
    print(f"floors: {len(floors)} modules, {len(found)} includes or calls that go the wrong way")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
