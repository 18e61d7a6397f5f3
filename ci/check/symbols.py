"""Checks that the library exports exactly the functions of its public headers, and does not affect the process.

    symbols.py --library libtandem.so --archive libtandem.a --headers base/status.h ...

Exported symbols must be the TD_API declarations of the headers; no other header may have any. The objects must not call
functions that print, exit, or read the environment. They must have no writable data, except STATE_ALLOWED.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

IMPL = Path(__file__).resolve().parents[2] / "impl"
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
# The declared name is the last one before a parenthesis, a bracket or the semicolon.
DECLARATION = re.compile(r"^TD_API\b([^;{(]*?)(\w+)\s*(?:\(|\[|;)", re.MULTILINE)
FORBIDDEN = set(
    """exit _exit _Exit quick_exit abort raise kill __assert_fail
    printf vprintf fprintf vfprintf dprintf vdprintf puts putchar putc fputs fputc fwrite perror psignal
    __printf_chk __vprintf_chk __fprintf_chk __vfprintf_chk __dprintf_chk error warn warnx err errx
    stdout stderr stdin getenv secure_getenv setenv putenv unsetenv system popen signal sigaction setlocale""".split()
)
WRITABLE = re.compile(r"^\.(data(?!\.rel\.ro)|bss|tdata|tbss)")
# The message of td_last_error(), one for each thread (base/status.h); the only CUPTI listener of a process;
# and whether the process is a child of fork(), which has no OpenMP threads.
STATE_ALLOWED = {"last_error", "session", "forked", "once"}
# NVTX consists of headers: the file that includes them has its table and reads the environment.
OF_NVTX = "nvtx.c.o"
# nvcc writes these handles into every object, so that the runtime finds the kernels.
OF_NVCC = re.compile(r"_ZL20__cudaFatCubinHandle|_Z(GV)?Z.*__device_stub__|DW\.ref\.__gxx_personality_v0")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def declared(text: str) -> set[str]:
    return {name for _, name in DECLARATION.findall(COMMENT.sub(" ", text))}


def exported(library: str) -> set[str]:
    """Exported names that are C identifiers. Clang's OpenMP also exports .gomp_critical_user_.reduction.var."""
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
        # "value flags section<tab>size name"; flags have a fixed width, and d marks the symbol of a section.
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
    # Fewer than 50 names: probably no declaration was found, which would agree with no symbols.
    return 1 if found or len(names) < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
