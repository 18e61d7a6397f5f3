"""The builds of an installed package, one for each instruction set, and which of them this processor can run."""

import platform
from pathlib import Path

BUILDS = Path(__file__).parent / "built"
V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"}
NEEDS = {
    "native": set(),
    "x86-64-v4": V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": V3,
}


def flags() -> set[str]:
    """The processor's flags, as Linux names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def folder() -> Path | None:
    """The folder of the best build; None in a clone, which has its own build."""
    if not BUILDS.is_dir():
        return None
    here, built = flags(), [name for name in NEEDS if (BUILDS / name).is_dir()]
    for name in built:
        if here >= NEEDS[name]:
            return BUILDS / name
    least = sorted(NEEDS[built[-1]] - here) if built else []
    raise RuntimeError(
        f"no build of tandem in {BUILDS} runs on this processor ({platform.machine()}"
        + (f"; it lacks {', '.join(least)}). " if least else "). ")
        + "Build one for it: pip install . -C cmake.define.TANDEM_PACKAGE_MARCH=native"
    )


def program() -> Path:
    """The program `tandem` of the build; in a clone the default preset's."""
    root = folder()
    return root / "bin/tandem" if root else Path(__file__).parents[1] / "build/default/impl/cli/tandem"
