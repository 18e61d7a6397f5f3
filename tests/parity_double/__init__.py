"""The fake library, built for a test."""

import subprocess
from pathlib import Path

from parity.core.library import interface_of

FOLDER = Path(__file__).parent
HEADERS = FOLDER / "impl"


def build(folder: Path, *define: str) -> Path:
    """Compiles the fake library into `folder`, with OpenMP as libtandem. `define` sets a macro, as in 'FAKE_ID="2"'."""
    if not any(name.startswith("FAKE_INTERFACE") for name in define):
        define = (*define, f'FAKE_INTERFACE="{interface_of(HEADERS)}"')
    library = folder / f"libfake{len(list(folder.glob('libfake*')))}.so"
    flags = [*(f"-D{name}" for name in define), "-shared", "-fPIC", "-fopenmp", "-O1", "-w", f"-I{HEADERS}"]
    subprocess.run(["cc", *flags, str(FOLDER / "fake.c"), "-o", str(library)], check=True)
    return library
