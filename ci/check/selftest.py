"""The project's checks must find errors: each case breaks one thing and expects a message that names it."""

import subprocess
import tempfile
import unittest
from pathlib import Path

import columns
import floors
import lines
import readme
import results
import rooms
import words

CMAKE = """
td_add_module(base SOURCES base/base.c)
td_add_module(ops SOURCES ops/ops.c MAY_USE base LIBRARIES DNNL::dnnl)
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Floors(unittest.TestCase):
    def check(self, files: dict[str, str]) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write(root, {"impl/base/base.h": "", "impl/ops/ops.h": "", "impl/cli/main.c": "", **files})
            return floors.violations(root / "impl", floors.may_use(CMAKE))

    def test_downward_and_own_floor_pass(self) -> None:
        self.assertEqual(self.check({"impl/ops/ops.c": '#include "base/base.h"\n#include "ops/ops.h"\n'}), [])

    def test_upward_is_named(self) -> None:
        (line,) = self.check({"impl/base/base.c": '#include "ops/ops.h"\n'})
        self.assertIn("base may not use ops", line)

    def test_internal_headers_are_for_their_modules(self) -> None:
        for said, names in (
            ("base/", "base"),
            ("impl/base/cuda*.c", "base"),
            ("impl/", ""),
            ("base/ and ops/", ""),
        ):
            files = {"impl/base/state.h": f"/** Internal to {said}: a state. */"}
            found = self.check(files | {"impl/ops/ops.c": '#include "base/state.h"\n'})
            self.assertEqual(len(found), 1 if names else 0, said)
            self.assertIn(f"which is internal to {names}" if names else "", "".join(found))

    def test_relative_include_is_named(self) -> None:
        (line,) = self.check({"impl/ops/ops.c": '#include "../base/base.h"\n'})
        self.assertIn("no path from impl/", line)
        (line,) = self.check({"impl/ops/ops.c": '#include "ops.h"\n'})
        self.assertIn("no path from impl/", line)

    def test_unknown_module_is_named(self) -> None:
        (line,) = self.check({"impl/extra/extra.c": ""})
        self.assertIn("extra is no module", line)

    def test_cli_may_use_everything_but_nothing_uses_cli(self) -> None:
        self.assertEqual(self.check({"impl/cli/main.c": '#include "ops/ops.h"\n'}), [])
        (line,) = self.check({"impl/cli/cli.h": "", "impl/ops/ops.c": '#include "cli/cli.h"\n'})
        self.assertIn("ops may not use cli", line)

    def test_only_cuda_files_may_use_kernels(self) -> None:
        files = {"kernels/add.h": "", "impl/ops/cuda.c": '#include "kernels/add.h"\n'}
        self.assertEqual(self.check(files), [])
        (line,) = self.check({**files, "impl/ops/ops.c": '#include "kernels/add.h"\n'})
        self.assertIn("for cuda.c and cuda/ alone", line)

    def test_kernels_see_public_headers_only(self) -> None:
        files = {
            "impl/ops/ops.h": "\nTD_BEGIN_DECLS\n",
            "impl/ops/table.h": "",
            "impl/flash/flash.h": "\nTD_BEGIN_DECLS\n",
            "kernels/add.h": '#include "ops/ops.h"\n',
        }
        for include, said in (("ops/ops.h", None), ("ops/table.h", "not for"), ("flash/flash.h", "not for")):
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                write(root, {**files, "kernels/add.cu": f'#include "{include}"\n'})
                found = floors.kernel_violations(root / "kernels", root / "impl")
                self.assertEqual(len(found), 0 if said is None else 1)
                self.assertIn(said or "", "".join(found))

    def test_files_that_call_in_a_circle_are_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            files = {
                "ops/a.c": "int td_a(int x)\n{\n    return td_b(x);\n}\n",
                "ops/b.c": "static const int td_n = 1;\nint td_b(int x)\n{\n    return td_table[x];\n}\n",
                "ops/c.c": "const int td_table[2] = {0, 1};\nint td_c(void)\n{\n    return td_a(1);\n}\n",
            }
            write(Path(folder), files)
            self.assertEqual(
                floors.circles(Path(folder)), ["ops: files call in a circle: a.c <- c.c <- b.c <- a.c"]
            )
            write(Path(folder), {"ops/b.c": "int td_b(int x)\n{\n    return x; /* no td_table */\n}\n"})
            self.assertEqual(floors.circles(Path(folder)), [])

    def test_may_use_goes_down(self) -> None:
        with self.assertRaises(SystemExit):
            floors.may_use("td_add_module(base SOURCES b.c MAY_USE ops)\ntd_add_module(ops SOURCES o.c)")


class Rooms(unittest.TestCase):
    def test_missing_room_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write(root, {"impl/flash/flash.h": "", "impl/flash/flash.c": "", "tests/flash.c": ""})
            write(root, {"impl/train/train.h": "", "impl/base/base.h": ""})
            found = rooms.missing_rooms(root)
        self.assertEqual(found, ["flash: no reference (ref/flash.py)", "flash: no parity (parity/flash.py)"])

    def test_unregistered_test_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write(
                root, {"impl/flash/flash.h": "", "tests/flash.c": "", "tests/CMakeLists.txt": "# flash.cpp\n"}
            )
            self.assertEqual(
                rooms.unregistered_tests(root),
                [
                    "tests/flash.c stands in no program of tests/CMakeLists.txt",
                    "flash: no td_add_test(flash ...) in tests/CMakeLists.txt",
                ],
            )
            write(root, {"tests/CMakeLists.txt": "td_add_test(flash SOURCES flash.c)\n"})
            self.assertEqual(rooms.unregistered_tests(root), [])

    def test_map_tells_what_is_measured(self) -> None:
        row, record = "| [flash](../impl/flash/flash.h) | attention{} |\n", '{"module": "flash"}\n'
        lacking = "flash: no row in the map of docs/layout.md, | [flash](../impl/flash/flash.h) | ... |"
        silent = "flash: no results in reports/, and its row in the map of docs/layout.md does not say "
        silent += '"not measured yet"'
        wrong = 'flash: its row in the map of docs/layout.md says "not measured yet", and it is'
        page = "flash: no page (reports/h200/flash.md), though there are records"
        measured = {"reports/h200/records.jsonl": record, "reports/h200/flash.md": ""}
        local = {"reports/local/records.jsonl": record, "reports/local/flash.md": ""}
        unmeasured = row.format(" (not measured yet)")
        for readme_text, reports, found in (
            ("", measured, [lacking]),
            (row.format(""), {}, [silent]),
            (row.format(""), local, [silent]),
            (unmeasured, {}, []),
            (unmeasured, measured, [wrong]),
            (row.format(""), measured, []),
            (row.format(""), {"reports/h200/records.jsonl": record.replace(" ", "")}, [page]),
            (
                row.format(""),
                {"reports/h200/records.jsonl": record, "reports/h200/README.md": "\n# flash\n"},
                [],
            ),
        ):
            with self.subTest(readme=readme_text, reports=reports), tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                write(
                    root,
                    {
                        "impl/flash/flash.h": "",
                        "impl/base/base.h": "",
                        "docs/layout.md": readme_text,
                        **reports,
                    },
                )
                self.assertEqual(rooms.off_the_map(root), found)

    def test_a_part_without_results_needs_its_row_alone(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write(
                root,
                {
                    "impl/train/train.h": "",
                    "docs/layout.md": "| [train](../impl/train/train.h) | the step |\n",
                },
            )
            self.assertEqual(rooms.off_the_map(root), [])

    def test_operation_without_case_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            header = "TD_API td_status td_gemm(int a);\nTD_API td_status td_gemm_work_bytes(int a);\n"
            write(root, {"impl/ops/ops.h": header, "parity/ops.py": "c.td_silu_mul_forward()\n"})
            lacking = ["ops: td_gemm has no case in parity/ops"]
            self.assertEqual(rooms.operations_without_case(root), lacking)
            write(root, {"parity/ops/__init__.py": "", "parity/gemm.py": "c.td_gemm()\n"})
            self.assertEqual(rooms.operations_without_case(root), lacking)
            write(root, {"parity/ops/gemm.py": "c.td_gemm()\n"})
            self.assertEqual(rooms.operations_without_case(root), [])

    def test_a_package_is_a_room(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write(root, {"impl/flash/flash.h": "", "impl/flash/flash.c": "", "parity/flash/page.py": ""})
            self.assertIn("flash: no parity (parity/flash/__init__.py)", rooms.missing_rooms(root))
            write(root, {"parity/flash/__init__.py": ""})
            self.assertNotIn("parity", "".join(rooms.missing_rooms(root)))

    def test_what_is_no_module_in_parity_is_named(self) -> None:
        names = [
            "__init__.py",
            "__main__.py",
            "core/case.py",
            "shared/pages.py",
            "flash.py",
            "ops/__init__.py",
        ]
        wrong = {
            "_attend.py": "begins with an underscore",
            "ops/_rows.py": "begins with an underscore",
            "attend.py": "is no module's",
            "pages/__init__.py": "is no module's",
        }
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write(root, {"impl/flash/flash.h": "", "impl/ops/ops.h": ""})
            write(root, {f"parity/{name}": "" for name in names})
            self.assertEqual(rooms.strangers(root), [])
            write(root, {f"parity/{name}": "" for name in wrong})
            self.assertEqual(
                rooms.strangers(root), sorted(f"parity/{name} {words}" for name, words in wrong.items())
            )


class Readme(unittest.TestCase):
    def check(self, text: str) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write(root, {"README.md": text, "table.md": "| a |\n|---|\n| 1 |\n"})
            return readme.problems(root)

    def test_true_quote_and_link_pass(self) -> None:
        text = "[t](table.md)\n<!-- quoted from table.md -->\n| a |\n|---|\n| 1 |\n<!-- end -->\n"
        self.assertEqual(self.check(text), [])

    def test_changed_quote_is_named(self) -> None:
        (line,) = self.check("<!-- quoted from table.md -->\n| a |\n|---|\n| 2 |\n<!-- end -->\n")
        self.assertIn("other words", line)

    def test_dead_link_is_named(self) -> None:
        lines = self.check("[gone](gone.md)\n<!-- quoted from table.md -->\n| a |\n<!-- end -->\n")
        self.assertEqual(lines, ["README.md links to gone.md, which is not there"])

    def test_a_heading_that_is_not_there_is_named(self) -> None:
        quote = "<!-- quoted from table.md -->\n| a |\n<!-- end -->\n"
        text = f"# A heading, `code` and 2.7B?\n[a](#a-heading-code-and-27b) [b](table.md#none)\n{quote}"
        self.assertEqual(
            self.check(text), ["README.md links to table.md#none, where there is no such heading"]
        )

    def test_links_of_a_report_count_from_its_folder(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write(root, {"README.md": "<!-- quoted from a -->\na\n<!-- end -->", "a": "a"})
            write(
                root,
                {"reports/m/x.md": "[y](y.md#t) [z](z.md)\n```\n[no](link.md)\n```", "reports/m/y.md": "# t"},
            )
            self.assertEqual(readme.problems(root), ["reports/m/x.md links to z.md, which is not there"])

    def test_no_quote_is_named(self) -> None:
        self.assertEqual(self.check("words"), ["README.md quotes nothing"])


class Words(unittest.TestCase):
    def check(self, files: dict[str, str]) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), files)
            return words.problems(Path(folder))

    def test_each_pattern_is_named_with_its_line(self) -> None:
        for bad in (
            *("it waits behind the pass", "cases that are no more", "those of the median", "the latter"),
            *(
                "held to PyTorch's",
                "a room on every floor",
                "the house style",
                "132 multiprocessors",
                "at the most",
            ),
        ):
            with self.subTest(bad=bad):
                found = self.check({"README.md": f"Good.\n\nSo, {bad}.\n"})
                self.assertTrue(found and all(line.startswith("README.md:3: ") for line in found), found)
                found = self.check({"impl/cli/a.c": f'/* {bad} */\n    {{"x", "{bad}"}},\n'})
                self.assertTrue(found and all(line.startswith("impl/cli/a.c:2: ") for line in found), found)

    def test_generated_pages_and_templates_are_read_without_their_expressions(self) -> None:
        for name in ("reports/README.md", "reports/h200/x.md", "parity/words/x.j2"):
            (line,) = self.check({name: "{{ behind }} It is behind.\n| behind |\n"})
            self.assertTrue(line.startswith(f"{name}:1: "), line)
        self.assertEqual(self.check({"reports/local/x.md": "It is behind."}), [])

    def test_long_sentences_are_named(self) -> None:
        long = " ".join(["word"] * 26)
        (line,) = self.check({"docs/a.md": f"Short. {long}. Short."})
        self.assertIn("docs/a.md: 26 words, at most 25", line)

    def test_code_tables_and_good_prose_pass(self) -> None:
        code = "one behind the other " * 9
        text = f"A `house` room for 3 after the pass.\n\n```sh\n{code}\n```\n\n    {code}\n\n| {code} |\n"
        self.assertEqual(
            self.check({"README.md": text + "<!-- quoted from the house -->\nA floor of floats.\n"}), []
        )


class Results(unittest.TestCase):
    LINE = '{{"deliverable": "d", "case": {{"n": {n}, "k": 1}}, "impl": "{impl}", "ms": {{"median": {ms}}}}}'

    def lines(self, *rows: tuple[int, str, float]) -> list[str]:
        return [self.LINE.format(n=n, impl=impl, ms=ms) for n, impl, ms in rows]

    def test_all_records_of_each_side_count_and_far_ones_give_a_range(self) -> None:
        lines = self.lines((1, "c", 2.0), (2, "c", 9.0), (1, "torch_eager", 4.0), (1, "c", 3.0))
        self.assertEqual(results.sides(lines, "d", {"n": 1}, "ms"), {"c": [2.0, 3.0], "torch_eager": [4.0]})
        self.assertEqual([results.several(x) for x in ([4.0, 4.1], [2.0, 3.0])], ["4.1", "2 to 3"])

    def test_keys_of_several_cases_are_refused(self) -> None:
        for keys in ({"k": 1}, {"n": 3}):
            with self.assertRaisesRegex(SystemExit, "needs one"):
                results.sides(self.lines((1, "c", 2.0), (2, "c", 2.0)), "d", keys, "ms")


class Common(unittest.TestCase):
    def test_a_build_of_another_folder_is_named(self) -> None:
        common = (Path(__file__).parents[1] / "common.sh").read_text()
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for home, status in ((root, 0), (root / "before", 1)):
                cache = f"CMAKE_HOME_DIRECTORY:INTERNAL={home}\n"
                write(root, {"ci/common.sh": common, "build/default/CMakeCache.txt": cache})
                ran = subprocess.run(["bash", root / "ci/common.sh"], capture_output=True, text=True)
                self.assertEqual(ran.returncode, status, ran.stderr)
        self.assertIn(f"was made for {home}: this clone was copied or moved", ran.stderr)


class Columns(unittest.TestCase):
    def test_wide_lines_are_named(self) -> None:
        wide, code = "x" * 111, "x = " + "1" * 120
        self.assertEqual(
            columns.too_wide(Path("a.c"), f"int x;\n{wide}\n"), ["a.c:2: 111 columns, at most 110"]
        )
        self.assertEqual(len(columns.too_wide(Path("a.py"), f"# {wide}\n{code}\n")), 1)
        self.assertEqual(columns.too_wide(Path("a.h"), "x" * 110), [])


class Lines(unittest.TestCase):
    def test_blank_lines_comments_and_docstrings_do_not_count(self) -> None:
        c = '/* a\n\n b */ int x; // c\n\nconst char *s = "/*";\n// d\nint y; /* e */\n'
        python = '"""a\n\nb"""\n\n# c\ndef f():\n    """d"""\n    return """\ne"""  # f\n'
        found = lines.count({"impl/a.c": c, "tests/b.py": python, "docs/c.md": "d\n", "setup.py": "1\n"})
        self.assertEqual(found, {"impl": 3, "tests": 3})

    def test_a_folder_above_its_number_is_named(self) -> None:
        limits = lines.allowed("# folder lines\nimpl 3\nci 5\n")
        self.assertEqual(lines.too_many(lines.Counter(impl=3, ci=5), limits), [])
        self.assertEqual(
            lines.too_many(lines.Counter(impl=4, new=1), limits),
            ["impl: 4 code lines, ci/lines.txt allows 3", "new: 1 code lines, ci/lines.txt allows 0"],
        )


if __name__ == "__main__":
    unittest.main()
