"""The output of parity/core from records, without a library: tables, views of records, pages, comparisons."""

import io
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import types
import unittest
import xml.etree.ElementTree
from pathlib import Path

import torch
from parity_core import BUILD, HOST
from rich.console import Console

from parity.core import compare, plot, report
from parity.core.case import ParityError
from parity.core.comparison import differing, geomean, traits
from parity.core.document import Figure
from parity.core.record import FILE, RecordError
from parity.core.tables import Samples, Spread, Table, _ems, breaking, text
from parity.core.view import COUNTED, Records, number

torch.set_num_threads(1)  # the tensors are small
UMASK = os.umask(0o022)
os.umask(UMASK)


class Tables(unittest.TestCase):
    def test_no_line_ends_within_a_number_and_its_unit(self):
        digits = {"forward (ms)": 4}
        table = Table([{"forward (ms)": Spread(12.84, 0.016), "share": "67.2 %"}], digits=digits)
        for form in ("md", "html"):
            self.assertRegex(table.render(form), "12.84\u00a0±\u00a00.016.*67.2\u00a0%")
        found = table.render("latex")
        self.assertIn("67.2~\\%", found)
        self.assertIn(" (ms) &", found)
        self.assertNotIn("caption", found)

    def test_other_formats(self):
        table = Table([{"dtype": "a|b_c", "ms": 0.0123456}])
        self.assertEqual(table.render("md"), "| dtype | ms |\n| --- | ---: |\n| a\\|b_c | 0.0123 |\n")
        self.assertIn('<td class="l">a|b_c</td><td class="r">0.0123</td>', table.render("html"))
        head, _, rows = table.render("latex", "times", "t").partition(
            "\\toprule\ndtype & ms \\\\\n\\midrule\n"
        )
        left, right = (rf">{{\ragged{side}\arraybackslash}}p{{" for side in ("right", "left"))
        self.assertIn(rf"{{{left}24.8pt}}{right}29.7pt}}}}" + "\n\\caption{times}\\label{t}\\\\\n", head)
        self.assertIn(r"a\textbar{}b\_\allowbreak{}c & 0.0123 \\", rows)
        wide = Table([{f"{i}": "x" * 39 for i in range(8)}]).render("latex")
        self.assertRegex(wide, r"^\\begin{landscape}\n{\\tiny(.|\n)*p{79.8pt}(.|\n)*\\end{landscape}\n$")
        for title, cell, broken, ems in (
            ("a title", "12345678", False, 8), ("t", "x" * 60, False, 40), ("t", "unbreakable text", True, 11)
        ):  # fmt: skip
            self.assertEqual(_ems(title, [cell, "1"], broken), ems)
        self.assertEqual(breaking("a,b 13,328 --id"), r"a,\allowbreak{}b 13,328 -{}-id")

    def test_numbers(self):
        for value, want in (
            (0.0, "0"),
            (123456789, "123456789"),
            (1.5e10, "1.50e+10"),
            (99.95, "100.0"),
            (4.5678e-8, "4.57e-08"),
            (-2.5e9, "-2500000000"),
            (math.inf, "inf"),
            (True, "yes"),
            (None, ""),
        ):
            self.assertEqual(text(value), want)


def record(impl="c", status="ok", case=None, module="scale", deliverable="scaling", **more):
    base = dict(
        deliverable=deliverable,
        module=module,
        case=case or {"seq": 128, "dtype": "f32"},
        impl=impl,
        status=status,
    )
    base |= {"message": "y is off"} if status in ("failed", "error") else {}
    stamp = dict(machine="M", versions={"torch": "2"}, commit="abc", time="2026-11-21T10:00:00Z", threads=2)
    return base | more | stamp


def timed(impl, ms, **more):
    return record(impl, ms=dict(median=ms, mean=ms, std=0.0, min=ms, max=ms, p95=ms, n=5), **more)


class View(unittest.TestCase):
    records = Records(
        [
            timed("torch_eager", 4.0, case={"seq": 1024, "dtype": "f32"}),
            timed("c", 2.0, case={"seq": 1024, "dtype": "f32"}, peak_mib=3.5, series={"loss": [3.0, 2.0]}),
            timed("torch_eager", 1.0),
            timed(
                "c", 0.25, error=dict(max_abs=0.1, rel_l2=0.01, ulp_max=None, outputs={"o": {"rel_l2": 0.5}})
            ),
            timed("c", 9.0, case={"seq": 128, "dtype": "bf16"}),
            record("torch_eager", "oom", case={"seq": 128, "dtype": "bf16"}),
        ]
    )

    def test_numbers(self):
        self.assertEqual(self.records.value("ms", seq=1024), 2.0)
        self.assertEqual(self.records.value("peak_mib", seq=1024), 3.5)
        self.assertEqual(self.records.value("error.outputs.o.rel_l2"), 0.5)
        self.assertTrue(math.isnan(self.records.value("ulp_max", seq=128, dtype="f32")))
        lost, exact = ({"error": dict(max_abs=most, rel_l2=None)} for most in (None, 0.0))
        found = number(lost, "rel_l2"), number(exact, "rel_l2"), number({"error": {"used": None}}, "used")
        self.assertEqual(found, (math.inf, None, math.inf))
        with self.assertRaisesRegex(ValueError, "name more keys"):
            self.records.value("ms", seq=128)
        with self.assertRaisesRegex(ValueError, "two cases of .* agree in dtype; name more keys"):
            self.records.wide(["dtype"], "ms")
        self.assertEqual(sorted(self.records.ratio("ms")), [0.25, 0.5])
        self.assertAlmostEqual(geomean(self.records.ratio("ms")), math.sqrt(0.125))
        self.assertIsNone(geomean([]))
        apart = [timed("c", 1.0), timed("torch_eager", 2.0) | {"machine": "N"}]
        self.assertEqual([*Records(apart).ratio("ms")], [])
        errors = ("c", 0.5), ("torch_eager", 4.0), ("torch_flash", 2.0)
        found = [record(impl, error={"rel_l2": e}, reference="torch_flash") for impl, e in errors]
        self.assertEqual([*Records(found).error_ratio()], [0.25])

    def test_selection(self):
        self.assertEqual(self.records.values("seq"), [128, 1024])
        self.assertEqual(self.records.values("dtype"), ["f32", "bf16"])
        self.assertEqual(len(self.records.only("scaling", impl="c", dtype=["f32", "f16"])), 2)
        self.assertEqual(len(self.records.only("other")), 0)
        self.assertEqual(len(self.records.where(lambda r: r["status"] == "oom")), 1)
        first = self.records.ordered(lambda record: record["case"]["seq"]).first
        self.assertEqual((first()["ms"]["median"], first("none")), (1.0, None))
        f32 = self.records.only(dtype="f32")
        self.assertEqual(f32.curve("seq", "ms", "c"), ([128, 1024], [0.25, 2.0]))
        self.assertEqual(f32.curve("seq", "peak_mib", "c"), ([128, 1024], [None, 3.5]))
        self.assertEqual(f32.curve("seq", "ms", "none"), ([], []))

    def test_a_row_has_all_sides_of_a_case(self):
        wild = [timed(impl, 3.0, case={"seq": 4096, "dtype": "f32"}) for impl in ("torch_eager", "c")]
        wild[0]["ms"] |= {"std": 1.5}
        wild[1]["ms"] |= {"std": 1.2, "n": 7}
        rows = Records([*wild, *self.records.records]).wide(["dtype", "seq"], "ms", base="torch_eager")
        self.assertEqual(
            [*rows[0]], ["dtype", "seq", "c", "torch_eager", "c / torch_eager", COUNTED, "noisy"]
        )
        calm = Samples(5, 5, 0.0)
        self.assertEqual([[*row.values()] for row in rows], [
            ["f32", 128, 0.25, 1.0, 0.25, calm, None],
            ["f32", 1024, 2.0, 4.0, 0.5, calm, None],
            ["f32", 4096, 3.0, 3.0, 1.0, Samples(5, 7, 0.5), "torch_eager, c"],
            ["bf16", 128, 9.0, "oom", None, calm, None],
        ])  # fmt: skip


class Pages(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.module = types.SimpleNamespace(report=self.write_page)

    @staticmethod
    def write_page(page, records):
        page.section("scaling", "How fast?")
        page.note("By size:")
        page.table(records.wide(["seq", "dtype"], "ms", base="torch_eager"), "times", units={"c": "ms"})
        page.note("Nothing:")
        page.table(records.only("nothing").wide(["seq"], "ms"), "nothing")
        xs = records.values("seq")
        times = [records.value("ms", seq=x, dtype="f32") for x in xs]
        page.plot("time", {"c": (xs, times)}, x="seq", y="ms", title="Time, f32")
        page.plot("none", {"c": ([1, 2, 3], ["oom", math.nan, 0.0])}, x="seq", y="ms", title="None")
        page.question("What is empty?")
        page.table([], "empty")

    def write(self):
        return report.write({"scale": self.module}, View.records.records, self.folder)

    def test_curves_look_like_their_implementation_and_like_no_other(self):
        looks = [plot.look(name) for name in plot.LOOKS]
        self.assertEqual(len({colour for colour, _, _ in looks}), len(looks))
        self.assertEqual(plot.look("c, arithmetic")[0], plot.look("c")[0])
        self.assertNotEqual(plot.look("c, arithmetic"), plot.look("c"))
        for curves, words in (
            ({"mine": [(1, 1)]}, "no curve can be called 'mine'"),
            ({"c, saved": [(1, 1)], "c, arithmetic": [(1, 2)]}, "look the same"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                plot.curves({"": curves}, x="x", y="y", log=False, title="t")
        high = Figure(
            "high",
            "",
            lambda: plot.stack(
                {"": ({"weights": [1e308], "gradients": [1e308]}, {"a": 1})}, x="x", y="y", title="t"
            ),
        )
        with self.assertRaisesRegex(ParityError, "^picture high: Axis limits cannot be NaN or Inf"):
            high.saved("svg")

    def test_text_of_records_is_shown_and_changes_nothing_else(self):
        record = timed("c", 1.0, case={"seq": 1, "dtype": "f32"}, message="not judged: a\\|b\r|c<d>")
        record["machine"] = "CPU $\\frac{x$\x01\n# Heading *<b>* of 2_000"
        report.write({"scale": self.module}, [record], self.folder)
        page = (self.folder / "scale.md").read_text()
        self.assertNotIn("\n# Heading", page)
        self.assertIn("*CPU \\$\\\\frac{x\\$ \\# Heading \\*\\<b\\>\\* of 2_000; ", page)
        self.assertIn("| not judged: a\\\\\\|b \\|c\\<d> |\n", page)
        words = "".join(xml.etree.ElementTree.parse(self.folder / "scale_time.svg").getroot().itertext())
        self.assertIn("CPU $\\frac{x$ # Heading *<b>* of 2_000", words)

    def test_pages_of_a_module_without_records_are_removed_from_a_machine_s_folder(self):
        self.write()
        pages = [*self.folder.glob("scale*")]
        report.write({"scale": self.module}, [], self.folder)  # a folder of the user, by --out
        self.assertEqual([*self.folder.glob("scale*")], pages)
        others = [self.folder / name for name in ("records.jsonl", "scaled.md")]
        for path in others:
            path.write_text("not a page of this module")
        report.write({"scale": self.module}, [], self.folder)
        self.assertEqual([path for path in (*pages, *others) if path.exists()], others)

    def test_one_module_s_pages_without_the_index(self):
        paths = report.write({"scale": self.module}, View.records.records, self.folder, only=["scale"])
        self.assertEqual([path.name for path in paths], ["scale.md", "scale_time.svg"])
        self.assertEqual(
            report.write({"scale": self.module}, View.records.records, self.folder, only=["else"]), []
        )

    def test_a_full_disk_leaves_the_old_pages_whole(self):
        """The disk becomes full inside the first file that is larger than `room`."""

        def plain(page, records):
            page.question("All?")
            page.table(records.wide(["seq", "dtype"], "ms"), "all")

        sizes = {path.name: path.stat().st_size for path in self.write()}
        self.assertGreater(sizes["scale_time.svg"], sizes["README.md"] + 100)
        before = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for room, name, page in (
            (10, "scale_time.svg", self.write_page),
            (sizes["README.md"] + 100, "scale_time.svg", self.write_page),
            (10, "scale.md", plain),
        ):
            with self.subTest(room=room, name=name):
                self.module.report = page
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # Python ignores SIGXFSZ
                try:
                    with self.assertRaisesRegex(
                        RecordError, f"{name}: cannot be written: File too large; what stood there stays"
                    ):
                        self.write()
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                after = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
                self.assertEqual(after, before)
        self.module.report = self.write_page
        self.write()

    def test_a_page_that_is_a_link_never_reaches_its_target(self):
        target = self.folder / "target"
        target.write_text("as it was")
        (self.folder / "README.md").symlink_to(target)
        self.write()
        self.assertEqual(target.read_text(), "as it was")
        self.assertIn("[scaling](scale.md#scaling-how-fast)", (self.folder / "README.md").read_text())
        self.assertEqual((self.folder / "scale.md").stat().st_mode & 0o777, 0o666 & ~UMASK)

    def test_pages_are_utf_8_in_every_locale(self):
        code = (
            "import sys, types; from pathlib import Path; from parity.core import report\n"
            "def write_page(page, records):\n"
            "    page.question('q')\n"
            "    page.plot('times', {'c': ([1, 2], [3, 4])}, x='caf\\xe9', y='\\xb5s', title='t')\n"
            "    page.note('caf\\xe9')\n"
            "    page.table([{'n': 1}], 'n')\n"
            "module = types.SimpleNamespace(report=write_page)\n"
            "record = dict(deliverable='d', module='m', case={}, impl='c', status='ok', machine='Zo\\xeb')\n"
            "report.write({'m': module}, [record], Path(sys.argv[1]))\n"
        )
        plain = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
        subprocess.run(
            [sys.executable, "-c", code, str(self.folder)],
            env=os.environ | plain,
            check=True,
            cwd=Path(__file__).resolve().parents[1],
        )
        self.assertIn("Zoë", (self.folder / "README.md").read_text(encoding="utf-8"))
        self.assertIn("café", (self.folder / "m.md").read_text(encoding="utf-8"))
        self.assertIn("µs", (self.folder / "m_times.svg").read_text(encoding="utf-8"))

    def test_a_page_that_fails_costs_no_other_page(self):
        def fail(page, records):
            raise KeyError("no such column")

        modules = {"broken": types.SimpleNamespace(report=fail), "scale": self.module}
        records = [record(module="broken", deliverable="b"), *View.records.records]
        with self.assertRaisesRegex(
            report.ReportError, r"parity/broken: report\(\) failed(.|\n)*no such column"
        ):
            report.write(modules, records, self.folder)
        self.assertIn("How fast?", (self.folder / "scale.md").read_text())
        self.assertIn("| [scaling](scale.md#scaling-how-fast) |", (self.folder / "README.md").read_text())

    def test_failures_show_in_the_verdict_and_on_the_page(self):
        records = [
            record("c", "failed", message="o: NaN at 3 elements"),
            record("c", case={"seq": 1, "dtype": "f32"}),
        ]
        report.write({"scale": self.module}, records, self.folder)
        self.assertIn("**fails** (1 failed of 2)", (self.folder / "README.md").read_text())
        self.assertIn("o: NaN at 3 elements", (self.folder / "scale.md").read_text())
        error = {"max_abs": 0.0}
        judged, unjudged = record(error=error), record(error=error, message="not judged: torch_eager is oom")
        self.assertEqual(report.verdict([judged, unjudged]), "holds (1 ok, 1 not judged)")
        self.assertEqual(
            report.verdict([record(status="oom"), record(status="not run")]), "no result (1 not run, 1 oom)"
        )
        for bad in ("failed", "error"):
            found = report.verdict([judged, record(status=bad, message="o: NaN")])
            self.assertEqual(found, f"**fails** (1 {bad} of 2)")


def wanted(old, new, **options):
    return types.SimpleNamespace(**dict(old=old, new=new, common=False, module=[], missing=False) | options)


class Comparisons(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def compare(self, old, new, **options):
        for name, records in (("old", old), ("new", new)):
            (self.folder / name).mkdir(exist_ok=True)
            records = [{"host": HOST} | record for record in records]
            (self.folder / name / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
        out = io.StringIO()
        console = Console(file=out, markup=False, soft_wrap=True)
        status = compare.main(wanted(self.folder / "old", self.folder / "new" / FILE, **options), console)
        return status, out.getvalue()

    def test_what_moved_is_said_with_both_values(self):
        """Each way and back: the words, and whether it is worse."""

        def off(rel_l2, max_abs=1.0, status="ok"):
            return record(status=status, error=dict(max_abs=max_abs, rel_l2=rel_l2))

        ok, failed, error, oom = (record(status=status) for status in ("ok", "failed", "error", "oom"))
        one, ten = timed("c", 1.0), record(peak_mib=10.0)
        graph = record(build=BUILD, config={"graph": True, "keep": "all", "timed": "whole"})
        changed = record(build=BUILD, config={"graph": True, "keep": "most", "update": "along"})
        switches = 'keep "all", timed "whole"', 'keep "most", update "along"'
        for was, now, way, back in (
            (ok, failed, "!new failure: ok -> failed: y is off", "fixed: failed -> ok"),
            (ok, oom, "!new failure: ok -> oom", "fixed: oom -> ok"),
            (oom, record(status="not run"), "other status: oom -> not run", "other status: not run -> oom"),
            (oom, failed, "!new failure: oom -> failed: y is off", "other status: failed -> oom"),
            (error, failed, "other status: error -> failed: y is off", "other status: failed -> error: y is off"),
            (off(1.0), off(2.0), "", ""),
            (off(0.0), off(0.0), "", ""),
            (off(1.0), off(3.0, status="failed"), "!new failure: ok -> failed: y is off", "fixed: failed -> ok"),
            (off(1.0), ok, "", ""),
            (off(None, 1.0), off(2.0, 3.0), "!error grew: max_abs 1 -> 3", "error fell: max_abs 3 -> 1"),
            (off(0.0), off(1e-9), "!error grew: rel_l2 0 -> 1e-09", "error fell: rel_l2 1e-09 -> 0"),
            (off(0.1), off(0.21, 9.0), "!error grew: rel_l2 0.1 -> 0.21", "error fell: rel_l2 0.21 -> 0.1"),
            (one, timed("c", 1.14), "", ""),
            (one, timed("c", 1.2), "!more time: 1 ms -> 1.2 (1.20x)", "less time: 1.2 ms -> 1 (0.83x)"),
            (ten, record(peak_mib=12.0), "!more memory: 10 MiB -> 12 (1.20x)", "less memory: 12 MiB -> 10 (0.83x)"),
            (ten, record(peak_mib=0.0), "", ""),
            (graph, changed, *[f"other config: {a} -> {b}" for a, b in (switches, switches[::-1])]),
            (record("torch_eager"), record("torch_eager", "oom"), "", ""),
            (record(module="other"), error, "!new failure:  -> error: y is off", "new:  -> ok"),
        ):  # fmt: skip
            for old, new, words in ((was, now, way), (now, was, back)):
                with self.subTest(words, old=old, new=new):
                    status, said = self.compare([old], [new], common=True)
                    lines = re.findall(r"^([^:\n]+:) \S+ c:(.* -> .*)", said, re.MULTILINE)
                    self.assertEqual([*map("".join, lines)], [words.strip("!")] * bool(words))
                    self.assertEqual(status, words.startswith("!"))

    def test_a_machine_that_is_busy_is_no_slowdown(self):
        def run(ms, ratio):
            ratios = {"ratio": dict(over="torch_eager", median=ratio)} if ratio else {}
            return [timed("c", ms, **ratios)]

        rows = [(2.0, 0.5, 0.5, 0, 0), (2.0, 0.5, 1.0, 1, 1), (1.0, 0.5, 1.0, 0, 1), (2.0, 0.5, 0.25, 0, 0)]
        for ms, was, now, here, there in [*rows, (2.0, None, 0.5, 1, 0), (2.0, 0.5, None, 1, 0)]:
            with self.subTest(ms=ms, was=was, now=now):
                self.assertEqual(self.compare(run(1.0, was), run(ms, now))[0], here)
                elsewhere = [run(ms, now)[0] | {"host": HOST | {"model": 17}}]
                status, said = self.compare(run(1.0, was), elsewhere)
                self.assertEqual((status, "the machines differ" in said), (there, True))

    def test_a_processor_is_more_than_its_name_and_a_gpu_is_not(self):
        slow = timed("c", 2.0)
        usual = {"host": HOST}
        for first, more, same in (
            (usual, {"host": dict(reversed(HOST.items()))}, True),
            (usual, {"host": HOST | {"stepping": 2}}, False),
            (usual, {"host": HOST | {"limits": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}}, False),
            (usual, {}, False),  # records once had no host
            ({}, {}, False),
        ):
            old, new = (self.folder / name for name in ("a.jsonl", "b.jsonl"))
            old.write_text(json.dumps(timed("c", 1.0, **first)))
            new.write_text(json.dumps(slow | more))
            out = io.StringIO()
            status = compare.main(wanted(old, new), Console(file=out, markup=False))
            self.assertEqual(status, 1 if same else 0, more)
            self.assertEqual("compared as ratios" in out.getvalue(), not same)
        gpu = dict(device="cuda")
        for more, status in (({"host": {"name": "other"}}, 1), ({"machine": "N"}, 0)):
            self.assertEqual(self.compare([timed("c", 1.0, **gpu)], [slow | gpu | more])[0], status)

    def test_faults_come_first_and_the_count_last(self):
        old = [record(module="zoo"), record(), record(case={"seq": 1}), timed("c", 1.0, case={"seq": 3})]
        new = [
            record(status="failed", message="NaN"),
            timed("c", 9.0, case={"seq": 3}),
            record(module="other"),
        ]
        said = self.compare(old, new)[1].splitlines()
        kinds = [line.partition(":")[0] for line in said[1:-5]]
        self.assertEqual(kinds, ["new failure", "more time", "new"])
        counts = [
            "new failure: 1 (scale 1)",
            "more time: 1 (scale 1)",
            "new: 1 (other 1)",
            "missing: 2 (scale 1, zoo 1)",
        ]
        last = "4 got worse, 2 of them by missing: --missing names them, with --common they are no matter"
        self.assertEqual(said[-5:], [*counts, last])
        said = self.compare(old, new, missing=True)[1].splitlines()
        self.assertEqual([line.partition(":")[0] for line in said[4:6]], ["missing", "missing"])
        self.assertEqual(said[-1], "4 got worse")
        self.assertEqual(
            self.compare(old, new, common=True)[1].splitlines()[-2:], [counts[-1], "2 got worse"]
        )

    def test_one_module_alone(self):
        old = [record(), record(module="other")]
        new = [record(), record(module="other", status="failed")]
        self.assertEqual(self.compare(old, new)[0], 1)
        self.assertEqual(self.compare(old, new, module=["scale"])[0], 0)
        self.assertEqual(self.compare(old, new, module=["scale", "other"])[0], 1)
        self.assertIn("1 results in both, 0 only in", self.compare(old, new, module=["other"])[1])
        with self.assertRaisesRegex(compare.CompareError, "no results of module x; there are: other, scale"):
            self.compare(old, new, module=["x"])

    def test_sides_differ_in_settings(self):
        sides = [record(config={"graph": on, "compiled": on, "compressed": on}) for on in (True, False)]
        words = "capture (one CUDA graph, queued)", "compilation (yes, no)", "gradients sent in (bf16, f32)"
        self.assertEqual(differing(*sides), [*words])
        for other in (None, record(config={"keep": "all"})):
            self.assertEqual(differing(record(config={"attention": "flash"}), other), [])
        names = dict(attention="flash", optimizer="adamw", keep="all", gradients="held", update="along")
        for impl, config, dtype, want in (
            ("c", names, "f32", "attention fused, optimizer adamw, kept activations all, gradients held, update along, "
             "capture queued, gradients sent in f32"),
            ("c_nccl_flat", {"graph": True}, "f32",
             "attention fused, capture one CUDA graph, SMs of NCCL as many as NCCL chooses, gradients sent in f32"),
            ("c_nccl", {"nccl_ctas": 4}, "bf16_mixed", "attention fused, capture queued, SMs of NCCL 4"),
            ("c_mpi", {"attention": "naive"}, "bf16_mixed", "attention scores, capture queued"),
            ("torch_zero", {"captured": True}, "bf16",
             "update after, attention scores, capture one CUDA graph, gradients sent in f32"),
            ("torch_fsdp", {"compiled": True}, "bf16_mixed",
             "update after, attention fused, capture queued, compilation yes"),
            ("torch_ddp", {"compiled": False, "compressed": True, "update": "along"}, "bf16_mixed",
             "update along, attention scores, capture queued, compilation no, gradients sent in bf16"),
            ("c_nccl", {}, "f32", ""),
        ):  # fmt: skip
            found = traits(record(impl, config=config, case={"dtype": dtype}))
            self.assertEqual(", ".join(map(" ".join, found.items())), want)

    def test_nothing_to_compare(self):
        with self.assertRaisesRegex(compare.CompareError, "no record file"):
            compare.main(wanted(self.folder, self.folder), Console(file=io.StringIO()))
        (self.folder / FILE).write_text("")
        with self.assertRaisesRegex(compare.CompareError, "holds no records"):
            compare.main(wanted(self.folder, self.folder), Console(file=io.StringIO()))


if __name__ == "__main__":
    unittest.main()
