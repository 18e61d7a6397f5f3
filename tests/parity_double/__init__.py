"""The fake library, built for a test."""

import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
HEADERS = FOLDER / "impl"


def build(folder: Path, *define: str) -> Path:
    """Compiles the fake library into `folder`, with OpenMP as libtandem. `define` sets a macro, as in 'FAKE_ID="2"'."""
    library = folder / f"libfake{len(list(folder.glob('libfake*.so')))}.so"
    headers = "".join(f'#include "{path}"\n' for path in sorted(HEADERS.glob("*/*.h")))
    command = ["cc", "-E", "-P", "-DTD_CFFI", f"-I{HEADERS}", "-x", "c", "-"]
    done = subprocess.run(command, input=headers, capture_output=True, text=True, check=True)
    library.with_suffix(".cdef").write_text(f"/* interface fake */\n{done.stdout}")
    flags = [*(f"-D{name}" for name in define), "-shared", "-fPIC", "-fopenmp", "-O1", "-w", f"-I{HEADERS}"]
    subprocess.run(["cc", *flags, str(FOLDER / "fake.c"), "-o", str(library)], check=True)
    return library
