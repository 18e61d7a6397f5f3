"""The ids of td_build_info(): an edit changes the ids of the modules that depend on the edited file, and no other ids.

Runs cmake/build.cmake, as every build does, on a small source tree: build_ids.py CMAKE.
"""

import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
cmake = "cmake"

TREE = {
    "CMakeLists.txt": "",
    "cmake/TandemTargets.cmake": "flags",
    "kernels/CMakeLists.txt": "kernels",
    "kernels/add.h": "",
    "kernels/add.cu": '#include "kernels/add.h"\n#include "kernels/tile/row.cuh"',
    "kernels/flash.h": "",
    "kernels/flash_forward.cu": '#include "kernels/share.cuh"',
    "kernels/share.cuh": "",
    "kernels/other.cu": "",
    "kernels/mul.cu": "cudaError_t td_cuda_mul(int n)",
    "kernels/tile/row.cuh": "",
    "impl/base/base.h": "",
    "impl/accounting/accounting.c": '#include "base/base.h"',
    "impl/ops/ops.h": '#include "base/base.h"\nTD_BEGIN_DECLS\nvoid td_add(int);\nvoid td_norm(int);',
    "impl/ops/ops.c": "\nvoid td_add(int n)\n{\n    td_ops_cpu[0](n);\n}",
    "impl/ops/table.c": "\ntd_op *const td_ops_cpu[] = {td_cpu_add};",
    "impl/ops/cuda/table.c": "td_cuda_mul(1);",
    "impl/ops/cpu/add.c": '#include "ops/ops.h"\nvoid td_cpu_add(int n)',
    "impl/ops/cpu/norm.c": '#include "ops/ops.h"\nvoid td_norm(int n)',
    "impl/ops/cuda/add.c": '#include "kernels/add.h"\nvoid td_cuda_add(int n)',
    "impl/flash/flash.c": '#include "ops/ops.h"\n    td_add(1); td_flash_template_tile();',
    "impl/flash/cuda.c": '#include "kernels/flash.h"\n    td_cuda_add(1);',
    "impl/flash/templates/tile.cu": "",
    "tests/flash.c": "",
}
MODULES = ["base", "accounting", "ops", "flash"]
EVERY = {f"{module} {kind}" for module in MODULES for kind in ("cpu", "cuda")}


class BuildIds(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.out = self.root / "build.c"
        self.options = {"CUDA": "NVIDIA 13", "ARCHITECTURES": "90a", "FLAGS": "-O3", "MARCH": "native"}
        for name, text in TREE.items():
            self.write(name, text)

    def write(self, name, text):
        path = self.root / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def describe(self):
        options = {
            "OUT": self.out,
            "TEMPLATE": ROOT / "impl/base/build.c.in",
            "SOURCE": self.root / "source",
            "MODULES": ";".join(MODULES),
            "VERSION": "1.2.3",
            "COMPILER": "GNU 12",
            "BACKENDS": "cpu cuda",
        } | self.options
        command = [cmake, *(f"-D{name}={value}" for name, value in options.items())]
        subprocess.run([*command, "-P", str(ROOT / "cmake/build.cmake")], check=True)
        return self.out.read_text()

    def ids(self):
        rows = re.findall(r'\{"(\w+)", "(\w*)", "(\w*)"\}', self.describe())
        self.assertEqual([name for name, _, _ in rows], MODULES)
        return {
            f"{name} {kind}": id
            for name, *both in rows
            for kind, id in zip(("cpu", "cuda"), both, strict=True)
        }

    def value(self, name):
        return re.search(rf"\.{name} = ([^,]*),", self.describe())[1].strip('"')

    def git(self, *arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(
            ["git", "-C", str(self.root / "source"), *who, *arguments], check=True, capture_output=True
        )

    def test_an_edit_changes_what_depends_on_it(self):
        before = self.ids()
        self.assertEqual(len({*before.values()}), 8)
        for name, changed in (
            ("tests/flash.c", set()),
            ("kernels/other.cu", set()),
            ("impl/accounting/accounting.c", {"accounting cpu", "accounting cuda"}),
            ("impl/flash/flash.c", {"flash cpu", "flash cuda"}),
            ("impl/flash/templates/tile.cu", {"flash cpu", "flash cuda"}),
            ("impl/ops/cpu/add.c", {"ops cpu", "ops cuda", "flash cpu", "flash cuda"}),
            ("impl/ops/cpu/norm.c", {"ops cpu", "ops cuda"}),  # flash does not call it
            ("impl/ops/ops.h", {"ops cpu", "ops cuda", "flash cpu", "flash cuda"}),
            ("impl/ops/cuda/add.c", {"ops cuda", "flash cuda"}),
            ("kernels/add.cu", {"ops cuda", "flash cuda"}),
            ("kernels/mul.cu", {"ops cuda"}),  # found by its launcher's name
            ("kernels/tile/row.cuh", {"ops cuda", "flash cuda"}),
            ("kernels/flash_forward.cu", {"flash cuda"}),
            ("kernels/share.cuh", {"flash cuda"}),
            ("impl/base/base.h", EVERY),
            ("cmake/TandemTargets.cmake", EVERY),
        ):
            with self.subTest(name=name):
                self.write(name, TREE[name] + "\n// edited")
                now = self.ids()
                self.assertEqual({key for key in EVERY if now[key] != before[key]}, changed)
                before = now
        self.write("impl/flash/new.c", "")
        self.assertNotEqual(self.ids()["flash cpu"], before["flash cpu"])

    def test_the_interface_covers_the_public_headers(self):
        def interface():
            return re.search(r'td_build_interface.*\n{\n    return "(\w{16})";', self.describe())[1]

        header, before = TREE["impl/ops/ops.h"], interface()
        for name, text, changed in (
            ("impl/ops/ops.h", f"/* of n;\n [ * **/{header}\n  /**/", False),
            ("impl/ops/ops.h", header.replace("int", "long"), True),
            ("impl/ops/ops.h", header, True),
            ("impl/ops/internal.h", "struct { int n; }", False),
            ("impl/flash/flash.h", "\nTD_BEGIN_DECLS\nvoid f(int);", True),
        ):
            with self.subTest(name=name, text=text):
                self.write(name, text)
                now = interface()
                self.assertEqual(now != before, changed)
                before = now

    def test_compile_options_change_the_ids(self):
        before = self.ids()
        whole = self.value("id")
        self.options["ARCHITECTURES"] = "80 90a"
        now = self.ids()
        self.assertEqual({key for key in EVERY if now[key] != before[key]}, {k for k in EVERY if "cuda" in k})
        self.assertNotEqual(self.value("id"), whole)
        for name, value in (("MARCH", "x86-64-v3"), ("FLAGS", '-O2 -DX="y"')):
            before = self.ids()
            self.options[name] = value
            now = self.ids()
            self.assertEqual({key for key in EVERY if now[key] != before[key]}, EVERY)
        self.assertIn(r'.flags = "-O2 -DX=\"y\"",', self.describe())
        self.options["CUDA"] = ""
        self.assertEqual({id for key, id in self.ids().items() if "cuda" in key}, {""})

    def test_nothing_is_written_if_nothing_changed(self):
        self.describe()
        written = self.out.stat().st_mtime_ns
        self.describe()
        self.assertEqual(self.out.stat().st_mtime_ns, written)
        self.write("impl/flash/flash.c", "// edited")
        self.describe()
        self.assertGreater(self.out.stat().st_mtime_ns, written)

    def test_the_commit_is_that_of_the_source(self):
        self.assertEqual((self.value("commit"), self.value("dirty")), ("unknown", "false"))
        # A repository around a source tree that is no checkout belongs to another project.
        subprocess.run(["git", "init", "-q", str(self.root)], check=True)
        self.assertEqual(self.value("commit"), "unknown")
        self.git("init", "-q")
        self.git("add", "impl", "kernels", "cmake", "CMakeLists.txt")
        self.git("commit", "-q", "-m", "first")
        first = self.value("commit")
        self.assertRegex(first, "^[0-9a-f]{10}$")
        self.assertEqual(self.value("dirty"), "false")  # tests/ is no part of the library
        self.write("impl/flash/flash.c", "// edited")
        self.assertEqual((self.value("commit"), self.value("dirty")), (first, "true"))
        self.git("commit", "-q", "-a", "-m", "second")
        self.assertNotEqual(self.value("commit"), first)
        self.assertEqual(self.value("dirty"), "false")


if __name__ == "__main__":
    cmake = sys.argv.pop(1)
    unittest.main()
