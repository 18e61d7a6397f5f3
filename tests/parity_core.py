"""parity/core before a record exists, without a library: cases, drawing, timing, weighing, identity."""

import functools
import gc
import math
import multiprocessing
import pickle
import re
import resource
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch

from parity.core import clock, identity, measure, memory
from parity.core.case import Case, Side, grid, seed_of, within
from parity.core.draw import Draw, Drawn, left_poisoned, sampled
from parity.core.folder import folder_of

torch.set_num_threads(1)  # the tensors are small
MIB = 2**20
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
            ("NVIDIA H200 NVL", "h200"),
            ("NVIDIA H100 PCIe", "h100"),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100mig1g10gb"),
            ("NVIDIA GH200 480GB", "gh200"),
            ("Tesla V100-SXM2-16GB", "v100"),
            ("Quadro GV100", "gv100"),
            ("NVIDIA A100-SXM4-80GB", "a100"),
            ("NVIDIA RTX A6000", "rtxa6000"),
            ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
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
        with self.assertRaisesRegex(ValueError, "together is 0"):
            Case("d", together=0)
        with self.assertRaisesRegex(ValueError, "again is c, torch_eager, needs in_turn"):
            Case("d", again=["c", "torch_eager"])
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

    def test_inputs_change_and_change_back(self):
        draw = Draw("changes")
        x, ids = draw.normal("x", (3, 5), "f32"), draw.integers("ids", (9,))
        before, was = x.clone(), ids.clone()
        for changed, same in ((True, False), (True, False), (False, True), (False, True)):
            draw.change(changed)
            self.assertEqual((torch.equal(x, before), torch.equal(ids, was)), (same, True))
        self.assertEqual(draw.complaints(), [])

    def test_what_is_drawn_again_is_the_same_and_changes_with_the_inputs(self):
        draw = Draw("again")
        drawn = Drawn({"w": draw.quickly("w", (3, 5), "f32", std=2.0)})
        before = drawn["w"]
        self.assertTrue(torch.equal(drawn["w"], before) and drawn["w"].data_ptr() != before.data_ptr())
        draw.change(True)
        self.assertTrue(torch.equal(drawn["w"].flatten(), before.flatten().roll(1)))
        self.assertEqual((list(drawn), list(draw.inputs())), (["w"], ["w"]))

    def test_a_sample_has_the_last_element(self):
        for count in (1, 2**16, 2**16 + 1, 1_000_000):
            found = sampled(torch.arange(count))
            self.assertEqual(int(found[-1]), count - 1)
            self.assertEqual(len(found), count if count <= 2**16 else -(-count // 1021))

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

    def test_kept_outputs_hold_nothing_for_a_backward_pass(self):
        weight = torch.ones(3, requires_grad=True)
        side = Side(lambda: {"y": weight.exp(), "count": 1})
        outputs = clock.time_sides({"torch_eager": side}, warmup=0, repeats=2)["torch_eager"].outputs
        self.assertFalse(
            outputs["y"].requires_grad, "what autograd keeps would count as the next call's memory"
        )
        self.assertEqual(outputs["count"], 1)

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


def allocate_beyond_the_limit():
    memory.limit_process()
    lower = resource.getrlimit(resource.RLIMIT_AS)[0] - 2**28
    resource.setrlimit(resource.RLIMIT_AS, (lower, lower))
    room = memory.limit_process()
    torch.empty(room - 2**29, dtype=torch.uint8)
    try:
        torch.empty(room + 2**30, dtype=torch.uint8)
    except RuntimeError as error:
        return "out of memory" if memory.is_out_of_memory(error) else str(error)
    return "no limit"


class Memory(unittest.TestCase):
    def test_peak_of_torch_is_exact(self):
        x = torch.randn(256, 256)

        def call():
            y = x @ x
            z = torch.exp(y)
            del y
            return (z + 1).sum()

        # y and z together, then z and z + 1: two matrices, and a few scalars.
        self.assertTrue(0 <= memory.peak_of_torch(call) - 2 * x.nbytes <= 64)

    def own_and_root(self, groups):
        """The folders of this process's control groups below another root: its own and the root's, by version."""
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                (groups / controllers / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
                yield 1 if controllers else 2, groups / controllers / path.lstrip("/"), groups / controllers

    def test_available_is_the_least_of_machine_and_group(self):
        names = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}
        rows = [(2, 0, "max", 1), (2, 1, 2048, 1024), (1, 0, 3072, 2560), (2, 0, 1124, 1024)]
        left = 4096
        with tempfile.TemporaryDirectory() as folder:
            meminfo, groups = Path(folder) / "meminfo", Path(folder) / "cgroup"
            meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
            for wanted, which, most, used in rows:
                for version, *found in self.own_and_root(groups):
                    if version == wanted:
                        limit, usage = (found[which] / f"memory.{name}" for name in names[version])
                        limit.write_text(most if most == "max" else str(most * MIB))
                        usage.write_text(str(used * MIB))
                        left = left if most == "max" else max(most - used, 256)
                self.assertEqual(memory.available_bytes(meminfo, groups), left * MIB - memory.KEPT_FREE)

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
                for _, mine, root in self.own_and_root(groups):
                    (mine / name).write_text(text)
                    if mine != root:  # kills of the machine, or of the container
                        (root / name).write_text("oom_kill 100\n")
                found = re.search(r"^oom_kill (\d)$", text, re.MULTILINE).group(1)
                self.assertEqual(memory.oom_kills(vmstat, groups), int(found))

    def test_out_of_memory_is_told_from_other_errors(self):
        words = "can't allocate memory; not enough memory; out of memory; std::bad_alloc; CUBLAS_STATUS_ALLOC_FAILED"
        errors = [MemoryError(), OSError(12, "Cannot allocate memory"), *map(RuntimeError, words.split("; "))]
        for error in (*errors, type("", (Exception,), {"status": "TD_NO_MEMORY"})()):
            self.assertTrue(memory.is_out_of_memory(error), error)
        self.assertFalse(memory.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")))

    def test_a_limited_process_fails_instead_of_the_machine(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        with context.Pool(1) as pool:
            self.assertEqual(pool.apply(allocate_beyond_the_limit), "out of memory")

    def test_outputs_count_once(self):
        x = torch.zeros(100)
        inside = torch.zeros(50)
        outputs = [x[:50], x, x.view(10, 10), x[:50], torch.zeros(10), inside]
        self.assertEqual(memory.outside_bytes(outputs, lambda tensor: tensor is inside), 440)


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
            ),  # only the id counts
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
        self.assertIn("parity.bench.drivers", found)
        self.assertEqual([name for name in found if "page" in name or "core" in name], [])
        self.assertIn("parity.transformer.rules", identity.sources_of("parity.transformer"))
        self.assertLessEqual(
            {"tandem.fsdp", "tandem.ranks", "tandem.replicas"}, {*identity.sources_of("parity.shard")}
        )
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
        self.assertNotEqual(id_of(), id_of(measure=("time",)))  # times do not use the rule of errors
        # A module not named.
        self.assertNotEqual(id_of(path="parity.ops"), id_of(path="parity.ops", library="m"))
        self.assertNotEqual(id_of(kind="cuda"), id_of(kind="cuda", library="m"))
        self.assertEqual({*identity.build_for(build, "parity.flash", "cpu", ())}, {"commit", "library", "id"})

    def test_an_edit_changes_the_id_and_one_of_a_page_does_not(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
            package = Path(folder) / "edited"
            files = {
                "__init__": "",
                "a/__init__": "from edited.a.page import report\nfrom edited.a import rules\nimport edited.shared.c\n"
                "def run():\n    return rules, edited\ndef words():\n    return 1",
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
                ("core/d", False),  # core has versions
                ("e", False),
                ("__init__", False),
                ("a/rules", True),
                ("shared/c", True),
                ("shared/__init__", True),
                ("a/__init__", False),
            ):
                with (package / f"{name}.py").open("a") as file:
                    file.write("\nx = 1\n")
                self.assertEqual(id_of() != before, changes, name)
                before = id_of()
            file = package / "a/__init__.py"
            for old, new, changes in (
                ("return 1", "return 2", False),  # run() does not call words()
                ("def run():", "def run():  # a comment", False),
                ("return rules, edited", "return rules, edited, X", True),
                ("x = 1", "X = 1", True),
                ("X = 1", "X = 2", True),
                ("X = 2", "X, Y = 2, 3\nX += 1", True),
                ("X += 1", "X += words()", True),
                ("return 2", "return 3", True),
                ("def words", "@run\ndef words", True),
            ):
                file.write_text(file.read_text().replace(old, new))
                self.assertEqual(id_of() != before, changes, new)
                before = id_of()

    def test_a_version_of_the_harness_changes_the_id(self):
        def ids():
            found = [
                identity.build_for({"library": "l"}, "parity.ops", "cpu", m) for m in (["error"], ["time"])
            ]
            return [build["id"] for build in found]

        before = ids()
        with mock.patch.object(identity, "JUDGING", 0):
            self.assertEqual([now != then for now, then in zip(ids(), before, strict=True)], [True, False])
        with mock.patch.object(identity, "MEASURING", 0):
            self.assertEqual([now != then for now, then in zip(ids(), before, strict=True)], [True, True])

    def test_modules_that_a_case_runs_count(self):
        modules = {"flash": {"cpu": "1"}, "attention": {"cpu": "2"}}
        of = functools.partial(identity.build_for, path="parity.flash", kind="cpu", measure=["time"])
        before = of({"library": "l", "modules": modules})["id"]
        with_it = of({"library": "l", "modules": modules}, runs=["attention"])["id"]
        modules["attention"]["cpu"] = "3"
        self.assertEqual(of({"library": "l", "modules": modules})["id"], before)
        self.assertNotEqual(of({"library": "l", "modules": modules}, runs=["attention"])["id"], with_it)


if __name__ == "__main__":
    unittest.main()
