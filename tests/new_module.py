"""Runs ci/new-module in a copy of the tree. The new module must be formatted, and every check and list must know it.
Its test must pass, first as written and then with its functions filled in.

    new_module.py SOURCE CMAKE        SOURCE has build/venv
"""

import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

NAME = "leaky_relu"
# A function other than y = x / 2, filled in without any other change.
FILLED = {
    f"impl/{NAME}/{NAME}.c": {
        "return 0.5f * x;": "return x > 0 ? x : 0.25f * x;",
        "(void)x; /* the slope does not depend on x */\n    return 0.5f * dy;": "return x > 0 ? dy : 0.25f * dy;",
    },
    f"tests/{NAME}.c": {"return 0.5 * x;": "return x > 0 ? x : 0.25 * x;"},
    f"ref/{NAME}.py": {"return 0.5 * x": "return torch.nn.functional.leaky_relu(x, 0.25)"},
}
CHECKS = ("floors", "rooms", "readme")

source, cmake = (Path(argument) for argument in sys.argv[1:3])


def run(*command, cwd=None) -> subprocess.CompletedProcess:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    done.said = done.stdout + done.stderr
    return done


class NewModule(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tree = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        for folder in (
            "ci",
            "cmake",
            "docs",
            "examples",
            "impl",
            "kernels",
            "parity",
            "ref",
            "reports",
            "tandem",
            "tests",
        ):
            shutil.copytree(source / folder, cls.tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for file in source.iterdir():
            if file.is_file():
                shutil.copy(file, cls.tree)
        (cls.tree / "build").mkdir()
        (cls.tree / "build/venv").symlink_to(source / "build/venv")
        cls.before = cls.files()
        cls.made = run("ci/new-module", NAME, "what it is", cwd=cls.tree)

    @classmethod
    def files(cls):
        found = [path for path in cls.tree.rglob("*") if path.is_file()]
        made_by_use = ("build", ".ruff_cache", "__pycache__")
        return {
            str(path.relative_to(cls.tree)): path.read_bytes()
            for path in found
            if not set(made_by_use) & {*path.relative_to(cls.tree).parts}
        }

    def succeed(self, *command):
        done = run(*command, cwd=self.tree)
        self.assertEqual(done.returncode, 0, f"{command}\n{done.said}")
        return done.said

    def test_a_module_passes_the_checks_and_its_test(self):
        self.assertEqual(self.made.returncode, 0, self.made.said)
        now = self.files()
        changed = sorted(name for name in now if now[name] != self.before.get(name))
        for name in changed:
            self.assertIn(f"  {name}\n", self.made.stdout)
        c, python = ([name for name in changed if name.endswith(end)] for end in ((".c", ".h"), ".py"))
        self.assertEqual((len(c), len(python)), (4, 3))
        venv = self.tree / "build/venv/bin"
        self.succeed(str(venv / "clang-format"), "--dry-run", "--Werror", *c)
        self.succeed(str(venv / "ruff"), "check", *python)
        self.succeed(str(venv / "ruff"), "format", "--check", *python)
        for check in CHECKS:
            self.succeed("python3", f"ci/check/{check}.py")
        listed = self.succeed(str(venv / "python"), "-c", "import parity; print(*parity.FLOORS)").split()
        self.assertLess(listed.index("ops"), listed.index(NAME))

        # The module's test, and its part of the random test, without the rest of the library.
        configure = [
            "-S",
            ".",
            "-B",
            "build/cmake",
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Debug",
            "-DTANDEM_CUDA=OFF",
        ]
        self.succeed(str(cmake), *configure, "-DCMAKE_C_FLAGS=-O0")
        program = f"tests/test_{NAME}"
        build = [str(cmake), "--build", "build/cmake", "--target", program]
        self.succeed(*build, f"tests/CMakeFiles/test_fuzz_api.dir/fuzz_api_{NAME}.c.o")
        self.succeed(f"build/cmake/{program}")
        for name, pairs in FILLED.items():
            text = (self.tree / name).read_text()
            for old, new in pairs.items():
                self.assertEqual(text.count(old), 1, f"{old} in {name}")
                text = text.replace(old, new)
            (self.tree / name).write_text(text)
        self.succeed(*build)
        self.assertIn("PASSED", self.succeed(f"build/cmake/{program}"))

    def test_what_is_in_the_way_changes_nothing(self):
        before = self.files()
        for name, words in (
            (NAME, f"impl/{NAME} is there already"),
            ("flash", "impl/flash is there already"),
            ("softmax", "kernels/softmax.cu is there already"),
            ("gelu/../x", "is no name for a module"),
            ("Gelu", "is no name for a module"),
            ("", "is no name for a module"),
            ("core", "has another meaning"),
            ("double", "has another meaning"),
            ("json", "has another meaning"),
            ("instrument", "cmake/TandemTargets.cmake has a target of that name already"),
            ("commands", "impl/cli/CMakeLists.txt has a target of that name already"),
            ("cli_faults", "tests/cli_faults.c is there already"),
            ("silu_mul", "is there already"),
            ("qkv_split", "impl/ops/ops.h has td_qkv_split_forward() already"),
        ):
            with self.subTest(name=name):
                done = run("ci/new-module", name, cwd=self.tree)
                self.assertEqual(done.returncode, 1, done.said)
                self.assertIn(words, done.stderr)
        self.assertIn("ci/new-module NAME", run("ci/new-module", cwd=self.tree).stderr)
        self.assertEqual(self.files(), before)

    def test_a_list_that_is_not_as_expected_is_named(self):
        readme = self.tree / "docs/layout.md"
        text = readme.read_text()
        self.addCleanup(readme.write_text, text)
        readme.write_text(text.replace("| [ops](../impl/ops/ops.h) |", "| ops |"))
        before = self.files()
        done = run("ci/new-module", "another", cwd=self.tree)
        self.assertEqual(done.returncode, 1)
        self.assertIn("0 times, ci/module/new.py needs it once", done.stderr)
        self.assertEqual(self.files(), before)


if __name__ == "__main__":
    del sys.argv[1:3]
    unittest.main()
