"""What a result is a result of: the code on both sides, the configuration, the machine.

A result's `build.id` is a hash of the sources that it depends on: in C as the library names them (td_build_info), in
Python as the files are now. An edit of anything else, such as a page, leaves the result valid.
"""

import ast
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tandem.library import Library

# Raise one if older results are no longer comparable. MEASURING: how inputs are drawn and sides are called,
# timed and weighed. JUDGING: the rule for errors. Other edits of parity/core leave results valid.
MEASURING, JUDGING = 2, 2
PAGE = re.compile(r"(^|[._])pages?($|[.])")  # in the name of a file that writes pages: page, cpu_page, pages
# The instruction sets by which libraries choose kernels, weakest first.
SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
L3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
# Variables that limit a library: it then computes as on another processor.
LIMITS = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def host(cpuinfo: Path = Path("/proc/cpuinfo"), environment: Mapping = os.environ) -> dict[str, Any]:
    """The processor, in the keys and words that `tandem` writes too (impl/cli/output.c)."""
    first = cpuinfo.read_text().split("\n\n")[0]
    said = dict(re.findall(r"^([^\t:\n]*?)[\t ]*: ?(.*)$", first, re.MULTILINE))
    found: dict[str, Any] = {"name": said.get("model name", "unknown processor").strip()}
    for key, name in (("cpu family", "family"), ("model", "model"), ("stepping", "stepping")):
        if said.get(key, "").strip().isdigit():
            found[name] = int(said[key])
    flags = said.get("flags", "").split()
    found["isa"] = " ".join(name for name in SETS if name in flags)
    found["cores"] = len(os.sched_getaffinity(0))
    if L3.is_file() and (size := re.fullmatch(r"(\d+)K\s*", L3.read_text())):
        found["l3_mib"] = int(size[1]) / 1024
    limits = {name: environment[name] for name in LIMITS if name in environment}
    return found | ({"limits": limits} if limits else {})


def host_words(host: Mapping[str, Any]) -> str:
    """ "AMD EPYC (family 26, model 2, stepping 1; avx2 avx512f; 2 cores, 32 MiB L3)"."""
    numbers = ", ".join(f"{key} {host[key]}" for key in ("family", "model", "stepping") if key in host)
    sizes = [f"{host['cores']} cores"] if "cores" in host else []
    sizes += [f"{host['l3_mib']:g} MiB L3"] if "l3_mib" in host else []
    limits = ", ".join(f"{name}={value}" for name, value in host.get("limits", {}).items())
    words = "; ".join(filter(None, [numbers, host.get("isa", ""), ", ".join(sizes), limits]))
    return f"{host.get('name', 'unknown processor')} ({words})"


def build_of(library: Library) -> dict[str, Any]:
    """The build of the loaded library, from td_build_info(). `library` is a hash of all sources."""
    info = library.lib.td_build_info()

    def text(pointer) -> str:
        return library.ffi.string(pointer).decode()

    modules = [info.modules[i] for i in range(info.module_count)]
    return {
        "version": text(info.version),
        "commit": text(info.commit),
        "dirty": bool(info.dirty),
        "library": text(info.id),
        "compiler": text(info.compiler),
        "modules": {text(m.name): {"cpu": text(m.cpu), "cuda": text(m.cuda)} for m in modules},
    }


def build_for(
    build: Mapping[str, Any], path: str, kind: str, measure: Iterable[str], runs: Iterable[str] = ()
) -> dict[str, Any]:
    """The record's `build` for a case of the module `path` ("parity.flash") on a kind of device, which `runs` further
    modules of libtandem. A module whose name the library does not know depends on all of the library."""
    ids = build.get("modules", {})
    mine = [ids.get(name, {}).get(kind) or build["library"] for name in (path.rpartition(".")[2], *runs)]
    core = f"{MEASURING} {JUDGING if 'error' in measure else ''}"
    record = {key: value for key, value in build.items() if key not in ("compiler", "modules")}
    return record | {"id": _hash(f"{' '.join(mine)} {core} {_python(path)}".encode())}


def is_here(record: Mapping, here: Mapping, keep: bool = False) -> bool:
    """Whether a record is of the machine of `here` and, unless those of other builds are kept, of its build."""
    return same_machine(record, here) and (keep or _id(record) == _id(here))


def same_machine(record: Mapping, here: Mapping) -> bool:
    """A GPU is known by its name, a processor also by its host if both records name one."""
    if record.get("machine", here.get("machine")) != here.get("machine"):
        return False
    if "device" in here or "host" not in record or "host" not in here:
        return True
    return record["host"] == here["host"]


def _id(record: Mapping) -> str | None:
    build = record.get("build")
    return build.get("id") if isinstance(build, Mapping) else None


@cache
def _python(path: str) -> str:
    """A hash of the module's files, without comments, and without what only its page needs in its own file."""
    text = ""
    for name, file in sorted(sources_of(path).items()):
        tree = ast.parse(file.read_text())
        text += f"# {name}\n{ast.unparse(_measuring(tree) if name == path else tree)}\n"
    return _hash(text.encode())


def _measuring(tree: ast.Module) -> ast.Module:
    """The statements that cases(), run() and runs() need."""
    bound: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        names = [getattr(node, "name", "")]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            parts = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
            stored = [part.id for part in parts if isinstance(part.ctx, ast.Store)]
            names = stored or ["run"]
        for name in names:
            bound.setdefault(name, []).append(node)
    left, found, used = ["cases", "run", "runs"], [], set()
    while left:
        for node in bound.pop(left.pop(), []):
            found.append(node)
            left += [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
            used |= {*left}
    for node in found:  # what only the page needs of an import
        if isinstance(node, ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name) in used]
    return ast.Module([node for node in tree.body if node in found], [])


def sources_of(path: str) -> Mapping[str, Path]:
    """The files of the module `path` by name: it and its imports from its package, tandem/ and ref/, but no page, core
    or tandem.library."""
    package = path.rpartition(".")[0]
    found: dict[str, Path] = {}
    left = [path]
    while left:
        name = left.pop()
        file = _file_of(name) if name not in found else None
        if file is None:
            continue
        found[name] = file
        within = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(file.read_text())):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), within)
                imported = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            for name in imported:  # after its packages, whose files Python runs first
                words = name.split(".")
                names = (".".join(words[: count + 1]) for count in range(len(words)))
                left += [name for name in names if _is_part(name, package)]
    return MappingProxyType(found)


def _is_part(name: str, package: str) -> bool:
    """Whether results depend on the file of this name."""
    ours = name.startswith((f"{package}.", "tandem.", "ref."))
    core = f"{name}.".startswith((f"{package}.core.", "tandem.library."))
    return ours and not core and not PAGE.search(name)


def _file_of(name: str) -> Path | None:
    """The file of a module, of a package its __init__.py; None for a name inside a module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
