"""The parts of parity/core that need no library: drawing, timing, weighing, tables, pages, comparisons."""

import gc
import io
import json
import math
import multiprocessing
import os
import pickle
import re
import resource
import subprocess
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import torch
from rich.console import Console

from parity.core import clock, compare, identity, measure, memory, plot, report
from parity.core.case import Case, Side, grid, seed_of, within
from parity.core.draw import Draw, left_poisoned
from parity.core.folder import folder_of
from parity.core.handouts import HANDOUTS
from parity.core.record import FILE, RecordError
from parity.core.tables import Spread, Table, text
from parity.core.view import Records, geomean

torch.set_num_threads(1)  # the tensors are small
MIB = 2**20
UMASK = os.umask(0o022)
os.umask(UMASK)
HOST = {
    "name": "AMD EPYC",
    "family": 26,
    "model": 2,
    "stepping": 1,
    "isa": "avx2 avx512f",
    "cores": 2,
    "l3_mib": 32.0,
}
BUILD = {"version": "0.1.0", "commit": "0123456789", "dirty": False, "library": "l1", "id": "i1"}


class Folders(unittest.TestCase):
    def test_a_gpu_has_one_by_its_name(self):
        for name, folder in (
            ("NVIDIA H200", "h200"),
            ("NVIDIA H200 NVL", "h200"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H100 PCIe", "h100"),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100mig1g10gb"),
            ("NVIDIA GH200 480GB", "gh200"),
            ("NVIDIA B200", "b200"),
            ("NVIDIA A100-SXM4-80GB", "a100"),
            ("NVIDIA A100-PCIE-40GB", "a100"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA RTX A6000", "rtxa6000"),
            ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
            ("NVIDIA GeForce RTX 5090", "rtx5090"),
            ("NVIDIA GeForce RTX 3080 Ti", "rtx3080ti"),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090laptop"),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000blackwellserveredition"),
        ):
            with self.subTest(name):
                self.assertEqual(folder_of(name), folder)

    def test_a_name_that_says_nothing_is_refused(self):
        for name in ("", "NVIDIA", "NVIDIA Graphics Device", "../.."):
            with self.subTest(name), self.assertRaisesRegex(ValueError, "--machine"):
                folder_of(name)


class Complaints(unittest.TestCase):
    def test_five_and_how_many_more(self):
        self.assertEqual(measure.summary(["a", "b"]), "a; b")
        self.assertEqual(measure.summary([f"o{i}: x" for i in range(5)]), "o0: x; o1: x; o2: x; o3: x; o4: x")
        words = measure.summary([f"grad.{i}: off" for i in range(217)])
        self.assertEqual(words.split("; ")[4:], ["grad.4: off", "and 212 more outputs"])


class Cases(unittest.TestCase):
    def test_grid(self):
        self.assertEqual([*grid(a=[1, 2], b="xy")], [dict(a=a, b=b) for a in (1, 2) for b in "xy"])

    def test_keys_are_read_by_name(self):
        case = Case("flash_forward", seq=128, causal=True, **{"pass": "forward"})
        self.assertEqual(case.name, "flash_forward/seq=128,causal=true,pass=forward")
        self.assertEqual(
            (case.seq, case["pass"], case.get("seq_k", 0), "seq" in case), (128, "forward", 0, True)
        )
        with self.assertRaisesRegex(AttributeError, "no key 'heads', only: seq, causal, pass"):
            _ = case.heads
        self.assertEqual(pickle.loads(pickle.dumps(case)).name, case.name)

    def test_nonsense_is_refused(self):
        for options, words in (
            (dict(measure="speed"), "measure is 'speed'"),
            (dict(measure=""), "needs words"),
            (dict(repeats=0), "repeats is 0"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                Case("d", **options)
        for ranks in (0, True, 2.0, "2"):
            with self.assertRaisesRegex(
                ValueError, f"ranks is {ranks!r}, needs a whole number of at least 1"
            ):
                Case("d", ranks=ranks)
        with self.assertRaisesRegex(ValueError, "together is 0"):
            Case("d", together=0)
        for name in ("alternate", "again"):
            with self.assertRaisesRegex(ValueError, f"{name} is c, torch_eager, needs in_turn"):
                Case("d", **{name: ["c", "torch_eager"]})
        with self.assertRaisesRegex(TypeError, "case key shape"):
            Case("d", shape=(1, 2))
        with self.assertRaisesRegex(ValueError, "needs rel_l2"):
            within()


class Draws(unittest.TestCase):
    def test_inputs_depend_on_names_alone(self):
        first, second = Draw("case"), Draw("case")
        second.normal("k", (3,), "f32")  # another order of draws
        self.assertTrue(torch.equal(first.normal("q", (5, 7), "f32"), second.normal("q", (5, 7), "f32")))
        self.assertFalse(
            torch.equal(first.normal("v", (99,), "f32"), Draw("other").normal("v", (99,), "f32"))
        )
        with self.assertRaisesRegex(ValueError, "draws 'q' twice"):
            first.normal("q", (5, 7), "f32")
        self.assertEqual(seed_of("a", "b"), 7627090119978703148)
        self.assertNotEqual(seed_of("a", "b"), seed_of("ab"))

    def test_distributions(self):
        draw = Draw("distributions")
        normal = draw.normal("n", (100_000,), "f64", std=2.0, mean=1.0)
        self.assertAlmostEqual(float(normal.mean()), 1.0, delta=0.05)
        self.assertAlmostEqual(float(normal.std()), 2.0, delta=0.05)
        uniform = draw.uniform("u", (100_000,), "f32", low=-1, high=3)
        self.assertTrue(-1 <= float(uniform.min()) < -0.99 and 2.99 < float(uniform.max()) <= 3)
        whole = draw.integers("i", (1000,), "bf16", low=-3, high=4)
        self.assertEqual((whole.dtype, sorted(set(whole.tolist()))), (torch.bfloat16, [*range(-3, 4)]))
        self.assertEqual(draw.integers("t", (2,)).dtype, torch.int64)

    def test_poison(self):
        draw = Draw("poison")
        for dtype in ("f64", "f32", "f16", "bf16"):
            tensor = draw.poisoned((3, 5), dtype)
            self.assertTrue(bool(tensor.isnan().all()))
            self.assertEqual((left_poisoned(tensor), tensor.data_ptr() % 256), (15, 0))
            tensor[0] = 1.0
            self.assertEqual(left_poisoned(tensor), 10)
        self.assertEqual(draw.poisoned((4,), "i64").tolist(), [-1] * 4)
        self.assertEqual(draw.poisoned((0, 4), "f32").shape, (0, 4))
        self.assertEqual(draw.complaints(), [])

    def test_fences_and_inputs_are_watched(self):
        draw = Draw("fences")
        output, source = draw.poisoned((10,), "f32"), draw.normal("x", (10,), "f32")
        whole = torch.as_strided(output, (11,), (1,))  # one element too many
        whole[10] = 0.0
        self.assertEqual(draw.complaints(), ["an output of 40 bytes was written beyond its bounds"])
        source[3] += 1
        self.assertIn("input x was written", draw.complaints())


class Clock(unittest.TestCase):
    def setUp(self):
        self.now = 0
        self.enterContext(mock.patch("time.perf_counter_ns", lambda: self.now))

    def pass_ms(self, ms):
        self.now += round(ms * 1e6)

    def test_sides_take_turns(self):
        calls, prepared = [], []
        sides = {
            "c": Side(lambda: calls.append("c"), before=lambda: prepared.append(len(calls))),
            "torch_eager": Side(lambda: calls.append("t")),
        }
        timings = clock.time_sides(sides, warmup=1, repeats=3)
        self.assertEqual("".join(calls), "ctctctct")
        self.assertEqual(prepared, [0, 2, 4, 6])
        self.assertEqual([len(timing.samples) for timing in timings.values()], [3, 3])

    def test_before_is_not_timed(self):
        side = Side(lambda: self.pass_ms(2), before=lambda: self.pass_ms(20))
        timing = clock.time_sides({"c": side}, warmup=0, repeats=3)["c"]
        self.assertEqual(timing.samples, [2.0, 2.0, 2.0])

    def test_repetitions_fit_the_budget(self):
        def repetitions(ms, **options):
            return len(clock.time_sides({"c": Side(lambda: self.pass_ms(ms))}, **options)["c"].samples)

        self.assertEqual(repetitions(10, budget=0.5), 50)
        self.assertEqual(repetitions(10, budget=0.5, warmup=0), 50)
        self.assertEqual(repetitions(0.001, budget=0.5), clock.MOST)
        self.assertEqual(repetitions(10_000, budget=0.5), clock.FEWEST)
        self.assertEqual(repetitions(10_000, budget=0.5, repeats=2), 2)

    def test_a_side_that_raises_drops_out(self):
        def fail():
            raise ValueError("no")

        timings = clock.time_sides({"c": Side(fail), "torch_eager": Side(lambda: None)}, repeats=4)
        self.assertEqual(str(timings["c"].failure), "no")
        self.assertEqual(len(timings["torch_eager"].samples), 4)

    def test_no_garbage_is_collected_meanwhile(self):
        seen = []
        clock.time_sides({"c": Side(lambda: seen.append(gc.isenabled()))}, repeats=2)
        self.assertEqual(set(seen), {False})
        self.assertTrue(gc.isenabled())

    def test_statistics(self):
        stats = clock.statistics([4.0, 1.0, 2.0, 3.0])
        self.assertEqual(
            (stats["median"], stats["mean"], stats["min"], stats["max"], stats["n"]), (2.5, 2.5, 1, 4, 4)
        )
        self.assertAlmostEqual(stats["std"], math.sqrt(5 / 3))
        self.assertAlmostEqual(stats["p95"], 3.85)
        self.assertEqual(clock.statistics([1.0])["std"], 0.0)
        self.assertEqual(clock.ratio([2, 4, 9], [1, 4, 3]), {"median": 2.0, "p25": 1.5, "p75": 2.5})


def exact_and_high_water():
    """The peak of one attention by PyTorch's allocator and by the kernel's account of the process."""

    def status(name):
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found.group(1)) * 1024

    def call():
        return torch.softmax(q @ q.transpose(-1, -2), -1) @ q

    q = torch.randn(8, 1024, 64)
    exact = memory.peak_of_torch(call)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to the present size
    before = status("VmRSS")
    call()
    return exact, status("VmHWM") - before


def allocate_beyond_the_limit():
    room = memory.limit_process()
    torch.empty(room // 4, dtype=torch.uint8)
    try:
        torch.empty(room + 2**30, dtype=torch.uint8)
    except RuntimeError as error:
        return "out of memory" if memory.is_out_of_memory(error) else str(error)
    return "no limit"


class Memory(unittest.TestCase):
    def in_a_fresh_process(self, function):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        with context.Pool(1) as pool:
            return pool.apply(function)

    def test_peak_of_torch_is_exact(self):
        x = torch.randn(256, 256)

        def call():
            y = x @ x
            z = torch.exp(y)
            del y
            return (z + 1).sum()

        # y and z together, then z and z + 1: two matrices, and a few scalars.
        self.assertTrue(0 <= memory.peak_of_torch(call) - 2 * x.nbytes <= 64)

    def test_peak_of_torch_sees_backward(self):
        x = torch.randn(512, 512, requires_grad=True)
        peak = memory.peak_of_torch(lambda: torch.exp(x).sum().backward())
        self.assertGreaterEqual(peak, 2 * x.nbytes)  # the saved result and the gradient
        self.assertLess(peak, 4 * x.nbytes)

    def test_the_process_s_high_water_agrees(self):
        exact, high = self.in_a_fresh_process(exact_and_high_water)
        self.assertEqual(
            exact, 2 * 8 * 1024**2 * 4
        )  # scores and probabilities; the output comes when scores are gone
        self.assertAlmostEqual(high / exact, 1, delta=0.1)

    def test_available_is_the_least_of_machine_and_group(self):
        with tempfile.TemporaryDirectory() as folder:
            meminfo, groups = Path(folder) / "meminfo", Path(folder) / "cgroup"
            groups.mkdir()
            meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
            self.assertEqual(memory.available_bytes(meminfo, groups), 4096 * MIB - memory.KEPT_FREE)
            for line in Path("/proc/self/cgroup").read_text().splitlines():
                controllers = line.split(":")[1]
                if controllers in ("", "memory"):
                    (groups / controllers).mkdir(exist_ok=True)
                    (groups / controllers / "memory.max").write_text(str(2048 * MIB))
                    (groups / controllers / "memory.current").write_text(str(1024 * MIB))
            self.assertEqual(memory.available_bytes(meminfo, groups), 1024 * MIB - memory.KEPT_FREE)

    def test_the_kernel_s_kills_are_counted_by_the_group_else_by_the_machine(self):
        with tempfile.TemporaryDirectory() as folder:
            vmstat, groups = Path(folder) / "vmstat", Path(folder) / "cgroup"
            self.assertIsNone(memory.oom_kills(vmstat, groups))
            vmstat.write_text("nr_free_pages 1\noom_kill 3\n")
            self.assertEqual(memory.oom_kills(vmstat, groups), 3)
            for name, text in (
                ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"),
                ("memory.events", "low 0\noom 9\noom_kill 4\noom_group_kill 8\n"),
            ):
                for line in Path("/proc/self/cgroup").read_text().splitlines():
                    _, controllers, path = line.split(":", 2)
                    if controllers in ("", "memory"):
                        mine = groups / controllers / path.lstrip("/")
                        mine.mkdir(parents=True, exist_ok=True)
                        (mine / name).write_text(text)
                        if mine != groups / controllers:  # all of the machine's, or of the container's
                            (groups / controllers / name).write_text("oom_kill 100\n")
                found = re.search(r"^oom_kill (\d)$", text, re.MULTILINE).group(1)
                self.assertEqual(memory.oom_kills(vmstat, groups), int(found))

    def test_out_of_memory_is_told_from_other_errors(self):
        for error in (
            MemoryError(),
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
        ):
            self.assertTrue(memory.is_out_of_memory(error))
        self.assertFalse(memory.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")))

    def test_a_limited_process_fails_instead_of_the_machine(self):
        self.assertEqual(self.in_a_fresh_process(allocate_beyond_the_limit), "out of memory")

    def test_outputs_count_once(self):
        x = torch.zeros(100)
        outputs = {"a": x, "b": x.view(10, 10), "c": torch.zeros(10), "d": 3.0, "e": torch.zeros(50)}
        inside = outputs["e"]
        self.assertEqual(memory.outside_bytes(outputs, lambda tensor: tensor is inside), 440)


class Tables(unittest.TestCase):
    frame = pd.DataFrame(
        {
            "dtype": ["f32", "a|b_c"],
            "ms": [1234.5678, 0.0123456],
            "n": [3, 4],
            "x": ["oom", math.nan],
            "ok": [True, False],
        }
    )

    def test_markdown(self):
        table = Table(self.frame, {"dtype": "dtype", "ms": "C", "n": "n", "x": "x", "ok": "ok"}, {"ms": "ms"})
        self.assertEqual(
            table.render("md"),
            "| dtype | C (ms) | n | x | ok |\n| --- | ---: | ---: | --- | --- |\n"
            "| f32 | 1235 | 3 | oom | yes |\n| a\\|b_c | 0.0123 | 4 |  | no |\n",
        )

    def test_other_formats(self):
        table = Table(self.frame, ["dtype", "ms"])
        self.assertIn("\\begin{tabular}{lr}\n\\toprule\ndtype & ms \\\\\n\\midrule\n", table.render("latex"))
        self.assertIn("a\\textbar{}b\\_c & 0.0123 \\\\", table.render("latex"))
        self.assertIn(
            "columns: 2,\n  align: (left, right,),\n  table.header([dtype], [ms]),", table.render("typst")
        )
        self.assertIn("[a|b\\_c], [0.0123],", table.render("typst"))
        self.assertEqual(table.render("csv"), "dtype,ms\nf32,1234.5678\na|b_c,0.0123456\n")

    def test_a_mean_with_its_deviation_is_two_columns_of_numbers(self):
        frame = pd.DataFrame({"side": ["c", "d"], "forward": [Spread(834.4, 47.1), None]})
        table = Table(frame, units={"forward": "ms"})
        self.assertIn("| c | 834 ± 47 |", table.render("md"))
        self.assertEqual(table.render("csv"), "side,forward mean (ms),forward std (ms)\nc,834.4,47.1\nd,,\n")

    def test_numbers(self):
        for value, want in (
            (0.0, "0"),
            (123456789, "123456789"),
            (1.0, "1.00"),
            (99.95, "100.0"),
            (4.5678e-8, "4.57e-08"),
            (-12.345, "-12.3"),
            (math.inf, "inf"),
            (True, "yes"),
            (None, ""),
        ):
            self.assertEqual(text(value), want)

    def test_columns(self):
        self.assertEqual(Table(self.frame, ["n", "absent", "dtype"]).titles, ["n", "dtype"])
        with self.assertRaisesRegex(ValueError, "units or digits for typo"):
            Table(self.frame, units={"typo": "ms"})


def record(impl="c", status="ok", case=None, module="scale", deliverable="scaling", **more):
    base = dict(
        deliverable=deliverable,
        module=module,
        case=case or {"seq": 128, "dtype": "f32"},
        impl=impl,
        status=status,
    )
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

    def test_sides_side_by_side(self):
        frame = self.records.wide(["dtype", "seq"], "ms", base="torch_eager")
        self.assertEqual([*frame.columns], ["dtype", "seq", "c", "torch_eager", "c / torch_eager"])
        self.assertEqual(frame.iloc[0].tolist(), ["f32", 128, 0.25, 1.0, 0.25])
        self.assertEqual(frame.iloc[1].tolist(), ["f32", 1024, 2.0, 4.0, 0.5])
        self.assertEqual(frame.iloc[2].tolist()[:4], ["bf16", 128, 9.0, "oom"])
        self.assertTrue(math.isnan(frame.iloc[2]["c / torch_eager"]))
        with self.assertRaisesRegex(ValueError, "two cases of .* agree in dtype"):
            self.records.wide(["dtype"], "ms")

    def test_numbers(self):
        self.assertEqual(self.records.value("ms", seq=1024), 2.0)
        self.assertEqual(self.records.value("peak_mib", seq=1024), 3.5)
        self.assertEqual(self.records.value("error.outputs.o.rel_l2"), 0.5)
        self.assertTrue(math.isnan(self.records.value("ulp_max", seq=128, dtype="f32")))
        with self.assertRaisesRegex(ValueError, "name more keys"):
            self.records.value("ms", seq=128)
        self.assertEqual(sorted(self.records.ratio("ms")), [0.25, 0.5])
        self.assertAlmostEqual(geomean(self.records.ratio("ms")), math.sqrt(0.125))
        self.assertTrue(math.isnan(geomean([])))

    def test_ranks_are_a_key_like_others(self):
        records = Records(timed("c", 4.0 / ranks, case={"ranks": ranks}) for ranks in (4, 1, 2))
        self.assertEqual(
            Table(records.wide(["ranks"], "ms")).render("md").splitlines()[2:],
            ["| 1 | 4.00 |", "| 2 | 2.00 |", "| 4 | 1.00 |"],
        )
        self.assertEqual(records.only(ranks=2).value("ms"), 2.0)

    def test_selection(self):
        self.assertEqual(self.records.values("seq"), [128, 1024])
        self.assertEqual(self.records.values("dtype"), ["f32", "bf16"])
        self.assertEqual(len(self.records.only("scaling", impl="c", dtype=["f32", "f16"])), 2)
        self.assertEqual(len(self.records.only("other")), 0)
        self.assertEqual(self.records.series("loss"), [("c", {"seq": 1024, "dtype": "f32"}, [3.0, 2.0])])
        self.assertEqual(self.records.frame.shape[0], 6)
        self.assertEqual(self.records.frame["ms"].tolist()[:2], [4.0, 2.0])


class Pages(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.module = types.SimpleNamespace(
            DELIVERABLES={"scaling": "Scaling", "else": "Something else"}, report=self.write_page
        )

    @staticmethod
    def write_page(page, records):
        page.question("How fast?")
        page.answer("scaling", "It is fast.", "Fast")
        page.table(records.wide(["seq", "dtype"], "ms", base="torch_eager"), "times", units={"c": "ms"})
        page.table(records.only("nothing").frame, "nothing")
        xs = records.values("seq")
        times = [records.value("ms", seq=x, dtype="f32") for x in xs]
        page.plot("time", {"c": (xs, times)}, x="seq", y="ms", title="Time, f32")
        page.plot("none", {"c": ([1, 2, 3], ["oom", math.nan, 0.0])}, x="seq", y="ms", title="None")
        page.text("It is.")
        page.method("By the clock.")

    def write(self, form="md"):
        return report.write({"scale": self.module}, View.records.records, self.folder, form)

    def test_a_page_and_the_index(self):
        names = [path.name for path in self.write()]
        self.assertEqual(names, ["scale.md", "scale_time.svg", "README.md"])
        page = (self.folder / "scale.md").read_text()
        self.assertIn(
            "# scale\n\n*M; torch 2; measured 2026-11-21.*\n\n**[scaling](#how-fast)** It is fast.\n", page
        )
        self.assertIn("## How fast?\n\n| seq | dtype | c (ms) | torch_eager | c / torch_eager |", page)
        self.assertIn("*Not measured on this machine yet.*", page)
        self.assertIn("![Time, f32](scale_time.svg)", page)
        self.assertIn("Time, f32 · M", (self.folder / "scale_time.svg").read_text())
        self.assertIn(
            "## How it was measured\n\nBy the clock.\n\nMeasured 2026-11-21 on M; 2 threads on both", page
        )
        self.assertIn("## What did not end with a number", page)
        index = (self.folder / "README.md").read_text()
        self.assertIn("| [scaling](scale.md#how-fast) | Scaling | holds (1 ok, 2 measured) | Fast |", index)
        self.assertIn("| else | Something else | not measured |  |", index)

    def test_the_index_has_every_row_of_the_handouts(self):
        self.module.DELIVERABLES |= {"torch_compile (b)": "The step"}
        compiled = record(deliverable="torch_compile", case={"seq": 2048, "dtype": "f32"})
        report.write({"scale": self.module}, [*View.records.records, compiled], self.folder)
        lines = (self.folder / "README.md").read_text().splitlines()
        rows = [row for rows in HANDOUTS.values() for row in rows]
        found = [
            line
            for line in lines
            if line.split("|")[1:2] and line.split("|")[1].strip("[] ").split("](")[0] in rows
        ]
        self.assertEqual([line.split("|")[1].strip("[] ").split("](")[0] for line in found], rows)
        self.assertIn("| [torch_compile (b)](scale.md) | The step | measured (1) |  |", found)
        self.assertIn("| torch_compile (a) |  | no module yet |  |", found)
        self.assertLess(lines.index("## The handout of 2026"), lines.index("## Beyond the handouts"))

    def test_long_tables_stand_on_a_page_of_their_own(self):
        def page_of(rows):
            def write(page, records):
                page.question("How many?")
                page.table(pd.DataFrame({"n": range(rows)}), "counts")

            self.module.report = write
            self.write()
            return (self.folder / "scale.md").read_text()

        self.assertIn("| 9 |", page_of(10))
        self.assertFalse((self.folder / "scale_tables.md").exists())
        said = page_of(11)
        self.assertNotIn("| 9 |", said)
        self.assertIn("[All 11 rows: counts](scale_tables.md#counts-how-many)", said)
        tables = (self.folder / "scale_tables.md").read_text()
        self.assertIn("## counts: How many?\n\n| n |", tables)
        self.assertIn("| 10 |", tables)
        page_of(10)
        self.assertFalse((self.folder / "scale_tables.md").exists(), "nothing leads to it any more")

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
                how = dict(x="x", y="y", log=False, title="t", ceilings={})
                plot.write(self.folder / "p.svg", {"": curves}, **how)

    def test_a_page_names_machine_and_builds(self):
        def page(*records):
            report.write({"scale": self.module}, records, self.folder)
            return (self.folder / "scale.md").read_text()

        before = [timed("c", 1.0, case={"seq": n, "dtype": "f32"}) for n in (1, 2)]
        self.assertIn("2 of 2 results are from before results named their build,", page(*before))
        here = dict(host=HOST, build=BUILD)
        now = timed("c", 1.0, case={"seq": 3, "dtype": "f32"}, **here)
        said = page(now)
        self.assertIn(
            "on AMD EPYC (family 26, model 2, stepping 1; avx2 avx512f; 2 cores, 32 MiB L3); 2 threads", said
        )
        self.assertIn("C was built as l1 (tandem 0.1.0, commit 0123456789): 1 results.", said)
        self.assertNotIn("before results named", said)
        changed = here | {"build": BUILD | {"library": "l2", "dirty": True}}
        said = page(*before, now, timed("c", 1.0, case={"seq": 4, "dtype": "f32"}, **changed))
        self.assertIn(
            "(tandem 0.1.0, commit 0123456789): 1 results; l2 (tandem 0.1.0, commit 0123456789 with", said
        )
        self.assertIn("changes): 1 results. 2 of 4 results are from before", said)
        said = page(timed("c", 1.0, case={"seq": 3, "dtype": "f32"}, device="cuda", **here))
        self.assertIn("on M in AMD EPYC (family 26,", said)

    def test_the_same_records_give_the_same_bytes(self):
        first = {path: path.read_bytes() for path in self.write()}
        time.sleep(1.1)  # so that a date would differ
        self.assertEqual({path: path.read_bytes() for path in self.write()}, first)

    def test_tables_as_files(self):
        names = [str(path.relative_to(self.folder)) for path in self.write("csv")]
        self.assertIn("tables/scale_times.csv", names)
        self.assertNotIn("tables/scale_nothing.csv", names)
        lines = (self.folder / "tables/scale_times.csv").read_text().splitlines()
        self.assertRegex(lines[0], "^# How fast[?] M, measured 2026-11-21[.] ")
        self.assertIn("128,f32,0.25,1.0,0.25", lines)
        self.assertEqual(
            len(pd.read_csv(self.folder / "tables/scale_times.csv", comment="#")), len(lines) - 2
        )
        for form, start in (("latex", "% How fast? M, measured"), ("typst", "// How fast? M, measured")):
            self.write(form)
            suffix = {"latex": "tex", "typst": "typ"}[form]
            self.assertTrue((self.folder / f"tables/scale_times.{suffix}").read_text().startswith(start))

    def test_two_tables_of_a_name_are_refused(self):
        def twice(page, records):
            page.table(records.frame, "times")
            page.table(records.frame, "times")

        self.module.report = twice
        with self.assertRaisesRegex(report.ReportError, "two tables of scale are called 'times'"):
            self.write("csv")

    def test_one_module_s_pages_without_the_index(self):
        paths = report.write({"scale": self.module}, View.records.records, self.folder, only=["scale"])
        self.assertEqual([path.name for path in paths], ["scale.md", "scale_time.svg"])
        self.assertEqual(
            report.write({"scale": self.module}, View.records.records, self.folder, only=["else"]), []
        )

    def test_a_full_disk_leaves_the_old_pages_whole(self):
        """The disk ends inside the first file that is larger than `room`."""

        def plain(page, records):
            page.table(records.frame, "all")

        sizes = {path.name: path.stat().st_size for path in self.write("csv")}
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
                        self.write("csv")
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                after = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
                self.assertEqual(after, before)
        self.module.report = self.write_page
        self.write("csv")

    def test_a_page_that_is_a_link_never_reaches_its_target(self):
        target = self.folder / "target"
        target.write_text("as it was")
        (self.folder / "README.md").symlink_to(target)
        self.write()
        self.assertEqual(target.read_text(), "as it was")
        self.assertIn("[scaling](scale.md#how-fast)", (self.folder / "README.md").read_text())
        self.assertEqual((self.folder / "scale.md").stat().st_mode & 0o777, 0o666 & ~UMASK)

    def test_pages_are_utf_8_in_every_locale(self):
        code = (
            "import sys, types; from pathlib import Path; from parity.core import report\n"
            "def write_page(page, records):\n"
            "    page.plot('times', {'c': ([1, 2], [3, 4])}, x='caf\\xe9', y='\\xb5s', title='t')\n"
            "    page.text('caf\\xe9')\n"
            "module = types.SimpleNamespace(DELIVERABLES={'d': 'D'}, report=write_page)\n"
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

        modules = {
            "broken": types.SimpleNamespace(DELIVERABLES={"b": "B"}, report=fail),
            "scale": self.module,
        }
        records = [record(module="broken", deliverable="b"), *View.records.records]
        with self.assertRaisesRegex(
            report.ReportError, r"parity/broken: report\(\) failed(.|\n)*no such column"
        ):
            report.write(modules, records, self.folder)
        self.assertIn("How fast?", (self.folder / "scale.md").read_text())
        self.assertIn("| [scaling](scale.md#how-fast) |", (self.folder / "README.md").read_text())

    def test_failures_show_in_the_verdict_and_on_the_page(self):
        records = [
            record("c", "failed", message="o: NaN at 3 elements"),
            record("c", case={"seq": 1, "dtype": "f32"}),
        ]
        report.write({"scale": self.module}, records, self.folder)
        self.assertIn("**fails** (1 failed of 2)", (self.folder / "README.md").read_text())
        self.assertIn("o: NaN at 3 elements", (self.folder / "scale.md").read_text())


class Identity(unittest.TestCase):
    CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_bitalg

processor\t: 1
model\t\t: 99
"""

    def test_the_host_is_told_from_others_of_its_name(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cpuinfo"
            path.write_text(self.CPUINFO)
            found = identity.host(path, {"ONEDNN_MAX_CPU_ISA": "AVX2", "HOME": "/root"})
            path.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
            other = identity.host(path, {})
        self.assertEqual(
            (found["name"], found["family"], found["model"], found["stepping"]), ("AMD EPYC", 26, 2, 1)
        )
        self.assertEqual(found["isa"], "avx2 avx512f avx512_bf16")
        self.assertEqual(found["limits"], {"ONEDNN_MAX_CPU_ISA": "AVX2"})
        self.assertGreaterEqual(found["cores"], 1)
        self.assertEqual((other["name"], other["isa"], "limits" in other), ("unknown processor", "", False))

    def test_which_records_are_of_here(self):
        here = dict(machine="M", host=HOST, build=BUILD)
        for record, machine, build in (
            (here, True, True),
            (
                here | {"build": BUILD | {"commit": "another", "library": "l2"}},
                True,
                True,
            ),  # the id alone counts
            (here | {"build": BUILD | {"id": "i2"}}, True, False),
            (dict(machine="M"), True, False),  # from before
            (dict(machine="N"), False, False),
            (here | {"host": HOST | {"model": 17}}, False, False),
        ):
            with self.subTest(record=record):
                self.assertEqual(identity.same_machine(record, here), machine)
                self.assertEqual(identity.is_here(record, here), build)
                self.assertEqual(identity.is_here(record, here, keep=True), machine)
        gpu = here | dict(device="cuda")
        self.assertTrue(identity.is_here(gpu | {"host": {"name": "another"}}, gpu))
        self.assertFalse(identity.is_here(gpu | {"machine": "N"}, gpu))

    def test_what_a_result_depends_on(self):
        found = identity.sources_of("parity.bench")
        parts = {"parity.bench", "parity.shared.model", "ref.bench", "ref.transformer"}
        self.assertLessEqual(parts, {*found})
        self.assertNotIn("parity.transformer", found)
        self.assertIn("parity.bench.steps", found)
        self.assertNotIn("parity.bench.rules", found)  # bars, which no result depends on
        self.assertEqual([name for name in found if "page" in name or "core" in name], [])
        self.assertIn("parity.transformer.rules", identity.sources_of("parity.transformer"))
        self.assertLessEqual(
            {"parity.shared", "parity.shared.attend"}, {*identity.sources_of("parity.flash")}
        )
        self.assertNotIn("ref.transformer", identity.sources_of("parity.flash"))
        build = {
            "commit": "c",
            "library": "l",
            "compiler": "x",
            "modules": {"flash": {"cpu": "1", "cuda": ""}},
        }

        def id_of(path="parity.flash", kind="cpu", measure=("error",), **more):
            return identity.build_for(build | more, path, kind, measure)["id"]

        self.assertEqual(id_of(), id_of(library="m", commit="d"))
        self.assertNotEqual(id_of(), id_of(modules={"flash": {"cpu": "2", "cuda": ""}}))
        self.assertNotEqual(id_of(), id_of(measure=("time",)))  # which the rule of errors has no part in
        self.assertNotEqual(
            id_of(path="parity.ops"), id_of(path="parity.ops", library="m")
        )  # a module not named
        self.assertNotEqual(id_of(kind="cuda"), id_of(kind="cuda", library="m"))
        self.assertEqual({*identity.build_for(build, "parity.flash", "cpu", ())}, {"commit", "library", "id"})

    def test_an_edit_changes_the_id_and_one_of_a_page_does_not(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
            package = Path(folder) / "edited"
            files = {
                "__init__": "",
                "a/__init__": "from edited.a.page import report\nfrom edited.a import rules\nimport edited.shared.c",
                "a/page": "from edited.a import gpu_page\nreport = None",
                "a/gpu_page": "",
                "a/rules": "import edited.core.d",
                "core/d": "",
                "e": "",
                "shared/__init__": "",
                "shared/c": "from edited.shared.pages import mib",
                "shared/pages": "mib = None",
            }
            for name, source in files.items():
                (package / name).parent.mkdir(parents=True, exist_ok=True)
                (package / f"{name}.py").write_text(source)

            def id_of():
                identity._python.cache_clear()
                return identity.build_for({"library": "l"}, "edited.a", "cpu", ("error",))["id"]

            before = id_of()
            for name, changes in (
                ("a/page", False),
                ("a/gpu_page", False),
                ("shared/pages", False),
                ("core/d", False),  # whose files are counted by name
                ("e", False),
                ("__init__", False),
                ("a/rules", True),
                ("shared/c", True),
                ("shared/__init__", True),
                ("a/__init__", True),
            ):
                with (package / f"{name}.py").open("a") as file:
                    file.write("\nx = 1\n")
                self.assertEqual(id_of() != before, changes, name)
                before = id_of()


class Comparisons(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def compare(self, old, new, **options):
        for name, records in (("old", old), ("new", new)):
            (self.folder / name).mkdir(exist_ok=True)
            records = [{"host": HOST} | record for record in records]
            (self.folder / name / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
        out = io.StringIO()
        settings = compare.Settings(**(dict(band=0.15, growth=2.0) | options))
        console = Console(file=out, soft_wrap=True)
        status = compare.run(self.folder / "old", self.folder / "new" / FILE, settings, console)
        return status, out.getvalue()

    def test_the_same_is_no_worse(self):
        status, said = self.compare(View.records.records, View.records.records)
        self.assertEqual(status, 0)
        self.assertIn("nothing got worse", said)
        self.assertIn("noise band of time and memory 15%", said)

    def test_new_failures(self):
        status, said = self.compare([record()], [record(status="failed", message="NaN")])
        self.assertEqual(status, 1)
        self.assertIn("new failure: scale/scaling/seq=128,dtype=f32 c: ok -> failed: NaN", said)
        self.assertEqual(self.compare([record()], [record(status="oom")])[0], 1)
        self.assertEqual(self.compare([record(status="failed")], [record()])[0], 0)
        self.assertEqual(self.compare([record(status="failed")], [record(status="error")])[0], 0)
        self.assertEqual(self.compare([record("torch_eager")], [record("torch_eager", "oom")])[0], 0)
        case = {"seq": 1}
        self.assertEqual(self.compare([record()], [record(), record(case=case)])[0], 0)
        self.assertEqual(self.compare([record()], [record(), record(status="failed", case=case)])[0], 1)

    def test_error_growth(self):
        def with_error(rel_l2):
            return [record(error=dict(max_abs=1e-6, rel_l2=rel_l2))]

        self.assertEqual(self.compare(with_error(1e-7), with_error(1.9e-7))[0], 0)
        status, said = self.compare(with_error(1e-7), with_error(2.1e-7))
        self.assertEqual(status, 1)
        self.assertIn("error grew: scale/scaling/seq=128,dtype=f32 c: rel_l2 1e-07 -> 2.1e-07", said)
        self.assertEqual(self.compare(with_error(0.0), with_error(1e-9))[0], 1)
        self.assertEqual(self.compare(with_error(1e-7), with_error(1e-7), growth=1.0)[0], 0)

    def test_slowdowns(self):
        self.assertEqual(self.compare([timed("c", 1.0)], [timed("c", 1.14)])[0], 0)
        status, said = self.compare([timed("c", 1.0)], [timed("c", 1.2)])
        self.assertEqual(status, 1)
        self.assertIn("more time: scale/scaling/seq=128,dtype=f32 c: 1 ms -> 1.2 (1.20x)", said)
        self.assertEqual(self.compare([timed("c", 1.0)], [timed("c", 1.2)], band=0.25)[0], 0)

    def test_a_machine_that_is_busy_is_no_slowdown(self):
        def run(ms, ratio):
            return [timed("c", ms, ratio=dict(over="torch_eager", median=ratio))]

        self.assertEqual(self.compare(run(1.0, 0.5), run(2.0, 0.5))[0], 0)
        self.assertEqual(self.compare(run(1.0, 0.5), run(2.0, 1.0))[0], 1)
        elsewhere = [run(5.0, 0.5)[0] | {"host": HOST | {"model": 17}}]
        status, said = self.compare(run(1.0, 0.5), elsewhere)
        self.assertEqual(status, 0)
        self.assertIn("the machines differ", said)
        self.assertEqual(self.compare(run(1.0, 0.4), elsewhere)[0], 1)

    def test_a_processor_is_more_than_its_name_and_a_gpu_is_not(self):
        slow = timed("c", 2.0)
        for more, same in (
            ({}, True),
            ({"host": HOST | {"stepping": 2}}, False),
            ({"host": HOST | {"limits": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}}, False),
            ({"host": None}, False),  # from before records named it
        ):
            now = {key: value for key, value in ({"host": HOST} | slow | more).items() if value is not None}
            old, new = (self.folder / name for name in ("a.jsonl", "b.jsonl"))
            old.write_text(json.dumps(timed("c", 1.0, host=HOST)))
            new.write_text(json.dumps(now))
            out = io.StringIO()
            status = compare.run(old, new, compare.Settings(0.15, 2.0), Console(file=out))
            self.assertEqual(status, 1 if same else 0, more)
            self.assertEqual("compared as ratios" in out.getvalue(), not same)
        gpu = dict(device="cuda")
        self.assertEqual(
            self.compare([timed("c", 1.0, **gpu)], [slow | gpu | {"host": {"name": "other"}}])[0], 1
        )

    def test_faults_come_first_and_the_count_last(self):
        old = [record(), record(case={"seq": 1}), record(case={"seq": 2}), timed("c", 1.0, case={"seq": 3})]
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
            "missing: 2 (scale 2)",
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
        self.assertEqual(self.compare(old, new, modules=["scale"])[0], 0)
        self.assertEqual(self.compare(old, new, modules=["scale", "other"])[0], 1)
        self.assertIn("1 results in both, 0 only in", self.compare(old, new, modules=["other"])[1])
        with self.assertRaisesRegex(compare.CompareError, "no results of module x; there are: other, scale"):
            self.compare(old, new, modules=["x"])

    def test_another_configuration_is_said_and_no_worse(self):
        was = record(build=BUILD, config={"graph": True, "keep": "all", "timed": "whole"})
        now = record(build=BUILD, config={"graph": True, "keep": "most"})
        status, said = self.compare([was], [now])
        self.assertEqual(status, 0)
        self.assertIn(
            'other config: scale/scaling/seq=128,dtype=f32 c: keep "all", timed "whole" -> keep "most"', said
        )
        self.assertNotIn("other config", self.compare([record(config={"graph": True})], [now])[1])

    def test_memory(self):
        self.assertEqual(self.compare([record(peak_mib=10.0)], [record(peak_mib=12.0)])[0], 1)
        self.assertEqual(self.compare([record(peak_mib=12.0)], [record(peak_mib=10.0)])[0], 0)

    def test_missing_cases(self):
        both = [record(), record(case={"seq": 1})]
        status, said = self.compare(both, both[:1], missing=True)
        self.assertEqual(status, 1)
        self.assertIn("missing: scale/scaling/seq=1 c", said)
        self.assertEqual(self.compare(both, both[:1], common=True)[0], 0)

    def test_nothing_to_compare(self):
        with self.assertRaisesRegex(compare.CompareError, "no record file"):
            compare.run(self.folder, self.folder, compare.Settings(0.1, 2), Console(file=io.StringIO()))
        (self.folder / FILE).write_text("")
        with self.assertRaisesRegex(compare.CompareError, "holds no records"):
            compare.run(self.folder, self.folder, compare.Settings(0.1, 2), Console(file=io.StringIO()))

    def test_a_terminal_gets_tables(self):
        out = io.StringIO()
        self.compare([record()], [record(status="failed", message="x")])
        console = Console(file=out, force_terminal=True, width=200, color_system=None)
        compare.run(self.folder / "old", self.folder / "new", compare.Settings(0.1, 2), console)
        self.assertRegex(re.sub(r"\s+", " ", out.getvalue()), r"new failure \(1\).*failed: x.*1 got worse")


class Numbers(unittest.TestCase):
    def test_pandas_makes_no_floats_of_whole_numbers(self):
        frame = pd.DataFrame([{"seq": 4096, "d": 64}, {"seq": np.nan, "d": 64}])
        self.assertIn("| 4096 | 64 |", Table(frame).render("md"))


if __name__ == "__main__":
    unittest.main()
