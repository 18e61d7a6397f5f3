"""`tandem doctor`: what this machine and this installation are, on one page for a bug report."""

import ctypes.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from . import builds

STARTS = "CUDA_ GLOO_ LOCAL_ MASTER_ NCCL_ OMP_ OMPI_COMM_ PMI_ SLURM_ TANDEM_ TD_ TORCHELASTIC_".split()
PROGRAMS = ("cc", "c++", "nvcc", "torchrun", "mpirun", "srun")  # torch.compile needs a compiler
NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "RANK", "WORLD_SIZE")


def report() -> str:
    """Rows of a name and its text. A row that fails has its error as its text."""
    rows = {
        "python": lambda: f"{sys.version.split()[0]}, {sys.executable}",
        "system": _system,
        "processor": _processor,
        "torch": _torch,
        "library": _library,
        "OpenMP": _openmp,
        "backends": _backends,
        "GPU": _gpu,
        "CUDA, NCCL": _cuda,
        "programs": lambda: ", ".join(f"{name}: {shutil.which(name) or 'none'}" for name in PROGRAMS),
        "environment": _environment,
    }
    return "\n".join(f"{name:12} {_text(row)}" for name, row in rows.items())


def _text(row) -> str:
    try:
        return row()
    except Exception as error:  # the page must say what is broken
        return f"{type(error).__name__}: {error}"


def _system() -> str:
    return f"{platform.platform()}, {os.cpu_count()} processors, {len(os.sched_getaffinity(0))} allowed"


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = found[1].strip() if found else "unknown"
    runs = [name for name, needs in builds.NEEDS.items() if needs <= builds.flags()]
    folder = builds.folder()
    return f"{model}; runs {', '.join(runs)}; build: {folder.name if folder else 'of a clone'}"


def _torch() -> str:
    import torch

    return f"{torch.__version__}, {torch.get_num_threads()} threads, {Path(torch.__file__).parent}"


def _opened():
    from .device import library

    return library()


def _library() -> str:
    found = _opened()
    info = found.lib.td_build_info()

    def text(name: str) -> str:
        return found.ffi.string(getattr(info, name)).decode() or "none"

    names = ("version", "commit", "id", "compiler", "march", "flags")
    return f"{found.path}\n" + "\n".join(f"{'':12} {name} {text(name)}" for name in names)


def _openmp() -> str:
    from .library import openmp_runtimes

    _opened()
    return ", ".join(openmp_runtimes())


def _backends() -> str:
    found = _opened()
    engines = sorted(path.name for path in found.path.parent.glob("libtandem_*.so"))
    return f"{found.ffi.string(found.lib.td_build_info().backends).decode()}; engines: {', '.join(engines) or 'none'}"


def _gpu() -> str:
    import torch

    from .device import device_of

    found = _opened()
    built = found.ffi.string(found.lib.td_build_info().architectures).decode()
    if not torch.cuda.is_available():
        return f"PyTorch sees none; kernels in the library: {built or 'none'}"
    cards = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        cards.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    opened = _text(lambda: f"C opens {device_of(torch.empty(0, device='cuda')).name}")
    return f"{', '.join(cards)}; kernels in the library: {built or 'none'}; {opened}"


def _cuda() -> str:
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    files = sorted(set(re.findall(r"\S*libnccl\S*$", Path("/proc/self/maps").read_text(), re.MULTILINE)))
    there = f"not loaded; the loader finds {ctypes.util.find_library('nccl') or 'none'}"
    return f"PyTorch's CUDA {torch.version.cuda or 'none'}, its NCCL {nccl}; libnccl: {', '.join(files) or there}"


def _environment() -> str:
    found = {k: v for k, v in os.environ.items() if k.startswith(tuple(STARTS)) or k in NAMES}
    return ", ".join(f"{name}={value}" for name, value in sorted(found.items())) or "no variables"
