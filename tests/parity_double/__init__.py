"""The fake library, built where a test asks for it."""

import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
HEADERS = FOLDER / "impl"


def build(folder: Path) -> Path:
    """Compiles the fake library into `folder`, with OpenMP as libtandem has it."""
    library = folder / "libfake.so"
    flags = ["-shared", "-fPIC", "-fopenmp", "-O1", "-w", f"-I{HEADERS}"]
    subprocess.run(["cc", *flags, str(FOLDER / "fake.c"), "-o", str(library)], check=True)
    return library
