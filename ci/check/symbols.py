"""The library exports what its public headers declare and nothing else, and leaves the process alone.

    symbols.py --library libtandem.so --archive libtandem.a --headers base/status.h ...

Exported symbols are compared with the TD_API declarations of the headers, which must be all that have any. The
objects must not call what prints, exits, or reads the environment, and must keep no writable data: the message of
td_last_error(), one a thread, is the only exception.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

IMPL = Path(__file__).resolve().parents[2] / "impl"
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
# The last name before a parenthesis, a bracket or the semicolon is what is declared.
DECLARATION = re.compile(r"^TD_API\b([^;{(]*?)(\w+)\s*(?:\(|\[|;)", re.MULTILINE)
FORBIDDEN = set(
    """exit _exit _Exit quick_exit abort raise kill __assert_fail
    printf vprintf fprintf vfprintf dprintf vdprintf puts putchar putc fputs fputc fwrite perror psignal
    __printf_chk __vprintf_chk __fprintf_chk __vfprintf_chk __dprintf_chk error warn warnx err errx
    stdout stderr stdin getenv secure_getenv setenv putenv unsetenv system popen signal sigaction setlocale""".split()
)
WRITABLE = re.compile(r"^\.(data(?!\.rel\.ro)|bss|tdata|tbss)")
# One for each thread, documented in base/status.h; the one listener that CUPTI has in a process; and whether
# the process is a child of fork(), where OpenMP's threads are gone.
STATE_ALLOWED = {"last_error", "session", "forked", "once"}
# NVTX is in headers: the file that includes them keeps its table, and asks the environment for a profiler.
OF_NVTX = "nvtx.c.o"
# What nvcc writes into every object: by these handles the runtime finds the kernels.
OF_NVCC = re.compile(r"_ZL20__cudaFatCubinHandle|_Z(GV)?Z.*__device_stub__|DW\.ref\.__gxx_personality_v0")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def declared(text: str) -> set[str]:
    return {name for _, name in DECLARATION.findall(COMMENT.sub(" ", text))}


def exported(library: str) -> set[str]:
    """Names that C can spell. Clang's OpenMP shares a lock of another kind, .gomp_critical_user_.reduction.var."""
    lines = run("nm", "--dynamic", "--defined-only", "--format=posix", library).splitlines()
    names = {line.split()[0].split("@")[0] for line in lines}
    return {name for name in names if name.isidentifier()}


def forbidden_calls(archive: str) -> list[str]:
    found = []
    for line in run("nm", "--undefined-only", "--print-file-name", archive).splitlines():
        where, _, symbol = line.rpartition(" U ")
        name = symbol.split("@")[0]
        if name in FORBIDDEN and not (where.split(":")[1] == OF_NVTX and name == "getenv"):
            found.append(f"{where.split(':')[1]} refers to {symbol}")
    return found


def writable_data(archive: str) -> list[str]:
    found, member = [], "?"
    for line in run("objdump", "--syms", archive).splitlines():
        if "file format" in line:
            member = line.split(":")[0]
        # "value flags section<tab>size name", the flags in a field of fixed width; d marks a section's own.
        match = re.match(r"^[0-9a-f]{16} (.{7}) (\S+)\t([0-9a-f]+)\s+(?:\.hidden )?(\S+)$", line)
        if not match or "d" in match[1] or not int(match[3], 16) or not WRITABLE.match(match[2]):
            continue
        if member.endswith(".cu.o") and OF_NVCC.match(match[4]):
            continue
        if member == OF_NVTX:
            continue
        if match[4].split(".")[0] not in STATE_ALLOWED:
            found.append(f"{member} keeps {match[4]} in {match[2]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--archive", required=True)
    parser.add_argument("--headers", required=True, nargs="+")
    options = parser.parse_args()

    names: set[str] = set()
    for header in options.headers:
        names |= declared((IMPL / header).read_text())
    found = []
    for header in sorted(IMPL.rglob("*.h")):
        inside = str(header.relative_to(IMPL))
        if inside not in options.headers and declared(header.read_text()):
            found.append(f"{inside} declares TD_API functions, but is no public header")
    symbols = exported(options.library)
    found += [f"{name} is declared, but not exported" for name in sorted(names - symbols)]
    found += [f"{name} is exported, but not declared" for name in sorted(symbols - names)]
    found += forbidden_calls(options.archive) + writable_data(options.archive)
    for line in found:
        print(line)
    print(f"symbols: {len(names)} declared, {len(symbols)} exported, {len(found)} problems")
    # No symbols at all would agree with no declarations.
    return 1 if found or len(names) < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
