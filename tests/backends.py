"""A backend is on only if a program that uses it compiles: headers that include missing headers leave it off.

Configures the project with headers as PyPI's packages of CUDA have them: backends.py CMAKE.
"""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
cmake = "cmake"

# Headers of CUDA without the folders crt/ and nv/, which they include.
HEADERS = {
    "cupti.h": "#include <cuda.h>\n",
    "cupti_version.h": "#define CUPTI_API_VERSION 130101\n",
    "cuda.h": "#include <crt/host_defines.h>\n",
    "nvtx3/nvToolsExt.h": "#include <nv/target>\n",
}


class Backends(unittest.TestCase):
    def configure(self, *options):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for name, text in HEADERS.items():
            path = Path(folder.name, "include", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        found = [
            f"-DTANDEM_{name}_INCLUDE={path.parents[name == 'NVTX']}"
            for name, path in (
                ("CUPTI", Path(folder.name, "include/cupti.h")),
                ("CUDA_H", Path(folder.name, "include/cuda.h")),
                ("NVTX", Path(folder.name, "include/nvtx3/nvToolsExt.h")),
            )
        ]
        command = [cmake, "-S", ROOT, "-B", Path(folder.name, "build"), "-DTANDEM_TESTS=OFF"]
        command += ["-DTANDEM_CUDA=OFF", *found, *options]
        return subprocess.run(command, capture_output=True, text=True)

    def test_headers_that_do_not_compile_leave_a_backend_off(self):
        done = self.configure()
        self.assertEqual(done.returncode, 0, done.stderr)
        for name in ("CUPTI", "NVTX"):
            self.assertRegex(
                done.stdout, f"TANDEM_{name}: off .*: found, but a program that uses it does not compile"
            )
        self.assertRegex(done.stdout, "-- backends: CUDA OFF, NCCL OFF, CUPTI OFF, NVTX OFF, ")

    def test_a_demanded_backend_whose_header_does_not_compile_is_an_error(self):
        done = self.configure("-DTANDEM_CUPTI=ON")
        self.assertNotEqual(done.returncode, 0)
        words = " ".join(done.stderr.split())
        self.assertRegex(words, "TANDEM_CUPTI=ON, but .*: found, but a program that uses it does not compile")


if __name__ == "__main__":
    cmake = sys.argv.pop(1) if len(sys.argv) > 1 else cmake
    unittest.main()
