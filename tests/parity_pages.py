"""The pages of parity/<module>.py are written from whatever records there are: none missing, some, or ends without a
number. Tried on the committed records, and on invented ones of a GPU, thinned and spoiled by a seeded choice."""

import random
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pandas as pd
import torch
import typst

from parity import bench, flash, jit, trace, transformer
from parity.bench import drivers, gpu_page
from parity.core import grid, plot, report, sweep
from parity.core.clock import statistics
from parity.core.record import FILE, load
from parity.core.report import Page
from parity.core.view import Records
from parity.shared.model import TandemTrainer

COMMITTED = Path(__file__).resolve().parents[1] / "reports" / "cpu" / FILE
MEASURED = """ms error peak_mib requested_mib tflops gb_s samples first_ms ratio values series dtypes lists phases
parts""".split()
TRIALS = 40
SENTENCES = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
RANKED = ("ddp", "shard")  # whose sides are those of each case
COMMUNICATION = "step without exposed collectives beside tail".split()
# Of every kind that some page reads, where those are more than C and PyTorch's formula.
SIDES = ["c", "torch_eager"]
IMPLS = {
    "ops": ["c", "torch_eager", "torch_compile", "torch_library"],
    "flash": ["c", "c_naive", "torch_eager", "torch_flash", "torch_cudnn", "torch_efficient"],
    "jit": ["c", "torch_eager", "torch_compile"],
    "transformer": ["c", "c_graph", "torch_eager", "torch_eager_f32", "torch_eager_seed"],
    "bench": ["c", "c_graph", "c_graph_overlap", "torch_eager", "torch_compile", "torch_compile_graph"],
}
VALUES = """tokens flops account_mib saved_mib matrix_mib flash_mib forward_peak_mib backward_peak_mib end_16_gib
end_24_gib
end_80_gib bytes largest mean product_tflops copy_gb_s floor_products floor_attention floor_optimizer floor_rest
furthest_grad_rel_l2 furthest_weight_rel_l2 swapped compile_ms find_ms""".split()


class PagesTest(unittest.TestCase):
    def test_the_trace_s_sentences_are_of_the_largest_case(self):
        cases = [case for case in trace.cases("full", "cuda") if case.get("part") == "profile"]
        records = [invented("trace", case, impl) for case in cases for impl in ("c", "torch_eager")]
        for record in records:  # a step of 100 ms, whatever PyTorch's costs
            slow = record["case"]["size"] == "large" and record["case"]["context"] == 256
            traced_ms = 109.0 if slow else 150.0 if record["impl"] == "torch_eager" else 104.0
            record["values"] |= {"step events": 100.0, "step traced": traced_ms}
        largest = next(r for r in records if (r["case"]["size"], r["case"]["context"]) == ("2.7B", 1024))
        theirs = next(r for r in records if r["case"] == largest["case"] and r is not largest)
        theirs["values"] |= {"forward ms elementwise": 5.0}
        largest["values"] |= {"forward timer": 50.0, "forward window": 49.98, "forward traced mean": 51.0}
        largest["values"] |= {
            "forward ms matmul": 8.0,
            "forward ms softmax": 1.5,
            "forward ms elementwise": 0.5,
        }
        largest["values"] |= {
            "attention ms scores": 1.0,
            "attention ms softmax": 3.0,
            "attention ms values": 1.0,
        }
        page = written(trace, "trace", records)
        for words in (
            "2.7B at context 1024 in f32 takes 50.00 ms by the timer; in steps with a trace 51.00 ms by events and "
            "49.98 by the trace, 2.0 % less.",
            "with the most time of the forward pass is `sm90_xmma_gemm` (matmul, 50 %, 73 calls a pass)",
            "Beside products forward spends time in softmax 15.0 %, elementwise 5.0 % (PyTorch: elementwise ",
            "makes a whole step of C's longer by 4.0 % (small), 4.0 % (medium), 9.0 % (large), 4.0 % (xl), 4.0 % "
            "(2.7B) at the most.",
            "Matrix products are 80 % of forward",
            "Inside attention softmax takes 1.50 of the time of both products",
        ):
            self.assertIn(words, page)

    def test_every_page_survives_missing_and_failed_records(self):
        committed = load(COMMITTED).newest()
        self.assertGreater(len(committed), 100)
        for name, module in sweep.discover("parity").items():
            mine = [record for record in committed if record["module"] == name]
            if not mine:  # a new module may have no results as yet; ci/check/rooms.py has the map say so
                mine = [
                    invented(name, case, impl, gpu=False)
                    for case in module.cases("full", "cpu")
                    for impl in IMPLS.get(name, SIDES)
                ]
            for trial in range(TRIALS):
                with self.subTest(module=name, trial=trial):
                    self.write(module, name, self.thinned(mine, random.Random(f"{name} {trial}")))

    def test_every_page_is_written_from_a_gpu_s_records(self):
        for name, module in sweep.discover("parity").items():
            if name in ("accounting", "precision"):
                continue  # arithmetic, which has no device
            for profile in ("quick", "full"):
                mine = [
                    invented(name, case, impl)
                    for case in module.cases(profile, "cuda")
                    for impl in IMPLS.get(name, case.config if name in RANKED and case.config else SIDES)
                ]
                if not mine:
                    continue  # it has no cases for a GPU
                self.write(module, name, mine)
                for trial in range(TRIALS // 4):
                    with self.subTest(module=name, profile=profile, trial=trial):
                        self.write(module, name, self.thinned(mine, random.Random(f"{name} {trial}")))

    def thinned(self, records, rng):
        """Some of them or all; a fifth of what is kept has ended without a number."""
        count = rng.choice([1, 2, 5, len(records) // 2, len(records)])
        kept = [dict(record) for record in rng.sample(records, min(count, len(records)))]
        for record in kept:
            if rng.random() < 0.2:
                record["status"], record["message"] = rng.choice(["oom", "error", "unsupported"]), "spoiled"
                for key in MEASURED:
                    record.pop(key, None)
        return kept

    def write(self, module, name, records):
        # The drawing itself is core's, and slow.
        with patch.object(plot, "write") as drawn, patch.object(plot, "timeline"):
            page = Page(name, Path("nowhere"), "csv")
            module.report(page, Records(records))
        self.assertTrue(page.blocks)
        for found in page.answers:
            self.assertIn(found.row, module.DELIVERABLES)
            self.assertLessEqual(len(SENTENCES.split(found.text)), 3, found.text)
            self.assertLessEqual(len(found.figure), 60, found.figure)
            self.assertNotIn("nan", found.text + found.figure)
        for call in drawn.call_args_list:
            for curves in call.args[1].values():
                looks = [plot.look(label) for label in curves]
                self.assertEqual(len(set(looks)), len(looks), curves)


class Exports(unittest.TestCase):
    """The tables of the committed records, as a write-up takes them."""

    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        modules, records = sweep.discover("parity"), load(COMMITTED).newest()
        with patch.object(plot, "write"):
            for form in ("typst", "latex", "csv"):
                report.write(modules, records, cls.folder, form)

    def tables(self, suffix):
        found = sorted((self.folder / "tables").glob(f"*.{suffix}"))
        self.assertGreater(len(found), 30)
        return found

    def test_typst_compiles(self):
        for path in self.tables("typ"):
            self.assertTrue(typst.compile(str(path)).startswith(b"%PDF"), path.name)

    @unittest.skipUnless(shutil.which("pdflatex"), "no pdflatex: apt-get install texlive-latex-base")
    def test_latex_compiles_without_any_package(self):
        inputs = "\n\n".join(rf"\input{{tables/{path.name}}}" for path in self.tables("tex"))
        whole = "\n".join([r"\documentclass{article}", r"\begin{document}", inputs, r"\end{document}"])
        (self.folder / "all.tex").write_text(whole)
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, errors="replace")
        self.assertEqual(done.returncode, 0, done.stdout[-2000:])

    def test_csv_has_numbers(self):
        for path in self.tables("csv"):
            frame = pd.read_csv(path, comment="#")
            self.assertGreater(len(frame), 0, path.name)
            self.assertFalse(frame.astype(str).apply(lambda column: column.str.contains("±")).any(axis=None))
        steps = pd.read_csv(self.folder / "tables" / "bench_steps.csv", comment="#")
        for name in ("forward mean (ms)", "forward std (ms)"):
            self.assertTrue((steps[name] > 0).all(), name)


class BenchOnAGpu(unittest.TestCase):
    def test_the_grid_is_whole_and_what_matters_most_comes_first(self):
        bench_grid = ("benchmarking_script", "benchmarking_mixed_precision")
        items = sweep.select({"bench": bench}, "full", device="cuda")
        compiled = [item.case for item in items[:5]]
        self.assertEqual({case.deliverable for case in compiled}, {"torch_compile"})
        self.assertEqual([case.size for case in compiled][:2], ["2.7B", "xl"])
        self.assertTrue(all(case.ahead for case in compiled))
        rest = [item.case for item in items[5:]]
        forward = [case.size for case in rest if case.ahead]
        self.assertEqual(forward, bench.GPU_SIZES)
        self.assertEqual({case["pass"] for case in rest if case.ahead}, {"inference"})
        steps = [case for case in rest if case["pass"] == "step" and case.deliverable in bench_grid]
        found = {(case.dtype, case.size, case.context) for case in steps}
        sizes, dtypes = ["small", "medium", "large", "xl", "2.7B"], ["f32", "tf32", "bf16_mixed"]
        cells = {tuple(keys.values()) for keys in grid(dtype=dtypes, size=sizes, context=bench.CONTEXTS)}
        cold = {("bf16_mixed", size, bench.COLD_CONTEXT) for size in sizes}
        self.assertEqual(found, cells | cold)
        self.assertEqual({case.repeats for case in steps if case.warmup == 0}, {15})

    def test_sides_run_with_the_switches_that_their_records_name(self):
        c = MagicMock()
        c.side.return_value = c
        c.struct = lambda kind, case=None, **fields: fields
        gpu, cpu = (
            bench.whole("small", "bf16_mixed"),
            bench.step("small", 128, "f32", "step", warmup=5, repeats=10),
        )
        for case, impl, switches in (
            (gpu, "c_graph_overlap", dict(graph=True, keep="all", gradients="transient", update="along")),
            (gpu, "c_graph", dict(graph=True, keep="all", gradients="transient", update="after")),
            (gpu, "c", dict(graph=False, keep="all", gradients="transient", update="after")),
            (cpu, "c", dict(graph=False, keep="most", gradients="held", update="after")),
        ):
            with self.subTest(impl=impl, device="gpu" if case is gpu else "cpu"):
                self.assertEqual(case.config[impl], case.config[impl] | switches)
                driver = drivers.CDriver(case, c, impl, {}, None, None)
                config = driver.model.config
                self.assertEqual(config["model"]["keep"], switches["keep"])
                self.assertEqual(config["model"]["transient_gradients"], switches["gradients"] == "transient")
                self.assertEqual((config["time"], config["until"]), (switches["update"], "update"))
                self.assertEqual((config["capture"], driver.captured), (switches["graph"],) * 2)
                self.assertEqual(config["model"]["attention"], "flash")
                with patch.object(TandemTrainer, "step") as step, patch.object(TandemTrainer, "begin"):
                    driver.open_whole()
                self.assertEqual(step.call_count, 2 if switches["graph"] else 0)  # the second is captured
        graph, eager = (gpu.config[impl] for impl in ("torch_compile_graph", "torch_eager"))
        self.assertEqual((graph["compiled"], graph["graph"], graph["autocast"]), (True, True, True))
        self.assertEqual((eager["compiled"], eager["graph"], eager["attention"]), (False, False, "scores"))

    def test_a_forward_pass_runs_as_its_record_says(self):
        c = MagicMock()
        c.side.return_value = c
        c.struct = lambda kind, case=None, **fields: fields
        case = bench.whole("small", "bf16_mixed", mode="inference")
        impls = ["c", "torch_eager", "torch_compile", "c_graph", "torch_compile_graph"]
        self.assertEqual(list(case.config), impls)
        self.assertEqual(case.alternate, ("torch_compile_graph", "c_graph"))
        for impl in ("c", "c_graph"):
            with self.subTest(impl=impl):
                driver = drivers.CDriver(case, c, impl, {}, None, None)
                config, graph = driver.model.config, impl == "c_graph"
                self.assertEqual((config["until"], config["capture"]), ("forward", graph))
                self.assertEqual((driver.training, driver.captured), (False, graph))
                with patch.object(TandemTrainer, "step") as step, patch.object(TandemTrainer, "begin"):
                    driver.open_whole()
                self.assertEqual(step.call_count, 2 if graph else 0)
        with patch.object(drivers, "torch_model"), patch.object(drivers.ref, "Trainer") as trainer:
            for impl in ("torch_eager", "torch_compile", "torch_compile_graph"):
                drivers.TorchDriver(case, SimpleNamespace(on=MagicMock()), impl, {}, None, None).open()
                given = trainer.call_args.kwargs
                self.assertEqual((given["mode"], given["best"]), ("forward", impl != "torch_eager"))

    def test_what_is_compiled_ahead_is_the_pass_of_the_case(self):
        draw = SimpleNamespace(device="cpu", integers=lambda *_, **__: torch.zeros(1, 2))
        for mode, compiled in (("step", "backward"), ("inference", "forward")):
            case = bench.whole("small", "bf16_mixed", mode=mode)
            with (
                patch.object(bench, "initial_state"),
                patch.object(bench, "torch_model"),
                patch.object(bench.ref, "Trainer") as trainer,
            ):
                bench.ahead(case, draw)
            self.assertEqual(trainer.call_args.kwargs["mode"], compiled)

    def test_pytorch_s_side_asks_c_for_nothing(self):
        case = bench.whole("small", "bf16_mixed")
        c = SimpleNamespace(on=SimpleNamespace())  # neither a struct nor a session
        drivers.TorchDriver(case, c, "torch_eager", {}, None, None)
        self.assertTrue(drivers.TorchDriver(case, c, "torch_compile_graph", {}, None, None).captured)

    def test_a_ratio_s_range_is_pair_by_pair_where_samples_alternated(self):
        def side(samples, **more):
            return {"samples": samples, "ms": {"median": sorted(samples)[1]}} | more

        theirs, mine = side([10.0, 20.0, 40.0]), side([8.0, 16.0, 33.0])
        sides = {"torch_compile_graph": theirs, "c_graph": mine}
        self.assertEqual(gpu_page.ratio_and_range(sides, "c_graph", gpu_page.BEST), (0.8, 0.2, 3.3))
        mine["ratio"] = {"over": "torch_compile_graph"}
        self.assertEqual(gpu_page.ratio_and_range(sides, "c_graph", gpu_page.BEST), (0.8, 0.8, 0.825))
        sides["torch_compile"] = side([1.0, 1.0, 1.0])  # the best, which did not alternate
        self.assertEqual(gpu_page.ratio_and_range(sides, "c_graph", gpu_page.BEST), (16.0, 8.0, 33.0))

    def test_rows_of_any_warmup_come_from_one_trace(self):
        case = next(case for case in bench.cases("quick", "cuda") if case.warmup == 0)
        record = invented("bench", case, "c")
        record["samples"] = [31.0, 5.0, *[1.0] * 13]
        page = Page("bench", Path("nowhere"), "md")
        gpu_page.report_warmup(page, [record])
        text = "\n".join(page.blocks)
        for row in (
            "| small | c | 0 | 4.40 |",  # (31 + 5 + 8) / 10
            "| small | c | 1 | 1.40 |",
            "| small | c | 2 | 1.00 |",
            "| small | c | 5 | 1.00 |",
            "| small | c | 31.0 | 5.00 | 1.00 |",
        ):
            self.assertIn(row, text)
        self.assertIn(
            "Without warm-up the first step takes 31.00 times (c) a settled one",
            gpu_page.cold_words([record]),
        )


# Of a step and of the memory of a side, by size: what the pages must make of them can be done in the head.
STEP_MS = {
    "small": dict(
        c=30, c_graph=20, c_graph_overlap=15, torch_eager=100, torch_compile=40, torch_compile_graph=25
    ),
    "xl": dict(
        c=90, c_graph=60, c_graph_overlap=50, torch_eager=150, torch_compile=80, torch_compile_graph=100
    ),
}
STEP_MIB = dict(
    c=300, c_graph=200, c_graph_overlap=250, torch_eager=600, torch_compile=400, torch_compile_graph=500
)


class WholeSteps(unittest.TestCase):
    def setUp(self):
        self.records = []
        for case in bench.gpu_cases("full"):
            if case.deliverable == "torch_compile" and case["pass"] == "step" and case.size in STEP_MS:
                for impl, ms in STEP_MS[case.size].items():
                    longest = 1.3 if impl == "torch_compile" else 1.1
                    record = plain("bench", case, impl, [0.9 * ms, ms, longest * ms]) | {"tflops": 9894 / ms}
                    self.records.append(record | {"peak_mib": STEP_MIB[impl]})
                    self.records[-1]["values"] = {"tokens": 2048, "flops": 1e12}
        self.records.sort(key=lambda record: record["case"]["size"])

    def test_each_captured_step_has_its_own_ratios_and_bars(self):
        page = written(bench, "bench", self.records)
        for line in (
            "| bf16_mixed | small | 30.0 | 20.0 | 15.0 | 100 | 40.0 | 25.0 |",
            "| bf16_mixed | small | torch_compile | 40.0 | 36.0 | 52.0 |",
            "| bf16_mixed | small | 0.500 | 0.375 | torch_compile_graph | 0.800 | 0.600 | 0.800 | 0.300 | 0.500 |",
            "| bf16_mixed | xl | 0.750 | 0.625 | torch_compile | 0.750 | 0.625 | 0.800 | 0.600 | 0.500 |",
            # 18 / 27.5 to 22 / 22.5, and 54 / 104 to 66 / 72: neither is told from the bar.
            "c_graph takes 0.80 (small, 0.65 to 0.98), 0.75 (xl, 0.52 to 0.92) times the best compiled PyTorch side's "
            "time; 0 of 2 below 0.80, 2 at the bar.",
            "c_graph_overlap takes 0.60 (small, 0.49 to 0.73), 0.62 (xl, 0.43 to 0.76) times the best compiled PyTorch "
            "side's time; 2 of 2 below 0.80.",
            "c takes 0.30 (small, 0.25 to 0.37), 0.60 (xl, 0.49 to 0.73) times torch_eager's time; 1 of 2 below 0.50, "
            "1 at the bar.",
            "| bf16_mixed | small | 33 % | 50 % | 67 % | 10 % | 25 % | 40 % |",
        ):
            self.assertIn(line, page)

    def test_the_forward_pass_stands_beside_the_step(self):
        forward = [
            plain("bench", case, impl, [0.9 * ms / 10, ms / 10, 1.1 * ms / 10])
            for case in bench.gpu_cases("full")
            if case.deliverable == "torch_compile" and case["pass"] == "inference" and case.size in STEP_MS
            for impl, ms in STEP_MS[case.size].items()
            if impl in case.config
        ]
        page = written(bench, "bench", [*self.records, *forward])
        for words in (
            # 100 / 25 and 150 / 80; 20 / 25 and 60 / 80; 30 / 20 and 90 / 60, of either pass
            "Compiling makes PyTorch's step 4.0 (small), 1.9 (xl) times as fast as eager and its forward pass 4.0 "
            "(small), 1.9 (xl), in bf16 mixed precision.",
            "takes 0.60 (small), 0.62 (xl) times the best compiled step's time, and its captured forward pass 0.80 "
            "(small), 0.75 (xl) times the best compiled one's.",
            "C's own step is 1.50 (small), 1.50 (xl) times as fast as queued, its forward pass 1.50 (small), "
            "1.50 (xl).",
            "| small | 3.00 | 2.00 | 10.0 | 4.00 | 2.50 | 0.800 | 0.300 |",
            "| xl | 9.00 | 6.00 | 15.0 | 8.00 | 10.0 | 0.750 | 0.600 |",
        ):
            self.assertIn(words, page)

    def test_memory_is_over_what_each_side_took_and_asked_for(self):
        for record in self.records:
            if record["impl"] == "torch_compile":
                record["requested_mib"] = 320
        page = written(bench, "bench", self.records)
        self.assertIn(
            "| c_graph / torch_compile | c / torch_eager | requested by torch_compile (MiB) |", page
        )
        self.assertIn("| xl | 300 | 200 | 250 | 600 | 400 | 500 | 0.500 | 0.500 | 320 | 0.625 |", page)

    def test_the_index_says_that_nothing_was_judged_and_one_figure(self):
        index = indexed({"bench": bench}, self.records)
        self.assertIn("| measured (6) | 0.60 to 0.62 x the best compiled step |", index)
        page = written(bench, "bench", self.records)
        # 100 / 25 and 150 / 80; 15 / 25 and 50 / 80
        self.assertIn("Compiling makes PyTorch's step 4.0 (small), 1.9 (xl) times as fast as eager", page)
        self.assertIn("takes 0.60 (small), 0.62 (xl) times the best compiled step's time.", page)
        self.assertIn("c_graph takes 0.50 times torch_compile's memory.", page)

    def test_what_was_judged_and_what_was_only_measured_are_counted_apart(self):
        case = dict(self.records[0]["case"])
        judged = [
            plain("bench", None, "c", [1.0]) | {"case": case | {"seed": seed}, "measure": "error"}
            for seed in range(3)
        ]
        for record in judged:
            record["deliverable"] = "torch_compile"
        judged[2]["message"] = "not judged: torch_eager is oom"
        self.assertIn("| holds (2 ok, 6 measured, 1 not judged) |", indexed({}, [*self.records, *judged]))
        for record in self.records:
            record["status"] = "oom"
        self.assertIn("| no result (6 oom) |", indexed({}, self.records))

    def test_kernels_are_told_apart_by_name(self):
        for kernel, part in (
            ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
            ("td_attention_forward_bf16", "attention"),
            ("triton_poi_fused__scaled_dot_product_flash_attention_mul_3", "rest"),
            ("triton_red_fused_mm_attention_12", "rest"),
            ("triton_per_fused_add_native_gemm_1", "rest"),
            ("nvjet_tst_256x128_64x4", "products"),
            ("td_linear_adamw_bf16", "products with AdamW"),
            ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
            ("vectorized_elementwise_kernel<4, addcdiv_cuda_kernel>", "rest"),
        ):
            self.assertEqual(gpu_page.part_of(kernel), part, kernel)


class BenchOnACpu(unittest.TestCase):
    def test_the_forward_pass_is_held_against_what_torch_compile_makes_of_it(self):
        cases = [case for case in bench.cases("full", "cpu") if case.deliverable == "torch_compile"]
        self.assertEqual([case.size for case in cases], ["small", "medium"])
        records = [
            plain("bench", case, impl, [ms]) | {"device": "cpu"}
            for case in cases
            for impl, ms in dict(c=30.0, torch_eager=50.0, torch_compile=40.0).items()
        ]
        page = written(bench, "bench", records)
        self.assertIn("| small | 30.0 | 50.0 | 40.0 | 1.25 | 0.750 |", page)
        self.assertIn("forward pass 1.25 (small), 1.25 (medium) times as fast as eager", page)
        self.assertIn("takes 0.75 (small), 0.75 (medium) times the compiled one's time.", page)


class JitOnACpu(unittest.TestCase):
    def test_the_handout_s_grid_is_whole_and_its_long_cells_are_few_calls(self):
        timed = [case for case in jit.cases("full", "cpu") if "time" in case.measure]
        self.assertEqual({case.seq for case in timed}, {256, 1024, 4096, 8192, 16384})
        self.assertEqual({case.repeats for case in timed if case.seq >= jit.LONG}, {1})
        self.assertTrue(all(case.alone for case in timed if case.seq >= 4096))
        self.assertEqual({case.seq for case in jit.cases("quick", "cpu") if "pass" in case}, {256, 1024})

    def test_a_cell_without_room_is_a_result(self):
        times = {4096: dict(c=10.0, torch_eager=50.0, torch_compile=20.0), 8192: dict(c=40.0)}
        records = []
        for case in jit.cases("full", "cpu"):
            if "time" in case.measure and case.seq in times and case.head_dim == 64:
                for impl in ("c", "torch_eager", "torch_compile"):
                    ms = times[case.seq].get(impl)
                    record = plain("jit", case, impl, [ms] if ms else ()) | {"device": "cpu"}
                    records.append(record if ms else record | {"status": "oom"})
        page = written(jit, "jit", records)
        self.assertIn("| 8192 | 40.0 | oom | oom |  | 40.0 | oom | oom |", page)
        self.assertIn("Times are medians of so many calls: 1 (seq 4096, 8192).", page)
        self.assertIn("0.50 in the median cell, and no cell took more than 1.1", page)


class JitOnAGpu(unittest.TestCase):
    def test_code_that_the_driver_kept_is_no_first_call(self):
        first = {"forward": 1500.0, "backward": 40.0}  # the second found what the first had compiled
        for caches in (True, False):
            records = [
                plain("jit", case, impl, [1.0])
                | {"first_ms": first[case["pass"]]}
                | ({} if caches else {"config": case.config.get(impl, {})})
                for case in jit.cases("quick", "cuda")
                if "time" in case.measure and case.head_dim == 64
                for impl in ("c", "torch_compile")
            ]
            page = written(jit, "jit", records)
            self.assertIn(f"| c | forward | {2 if caches else 3} | 1500 |", page)  # 1024 was judged before
            self.assertEqual("| c | backward | 3 | 40.0 |" in page, not caches)
            self.assertIn("| torch_compile | backward | 3 | 40.0 |", page)
            self.assertIn(f"The first call for a shape takes {'1.5' if caches else '0.8'} s in C", page)


class FlashOnAGpu(unittest.TestCase):
    def test_the_fastest_side_of_pytorch_has_its_say(self):
        sides = dict(c=2.0, torch_eager=40.0, torch_flash=3.0, torch_cudnn=1.0)
        records = [
            plain("flash", case, impl, [ms])
            for case in flash.cases("full", "cuda")
            if "time" in case.measure and case.dtype == "bf16"
            for impl, ms in sides.items()
        ]
        page = written(flash, "flash", records)
        self.assertIn("it takes 0.67 times FlashAttention-2's and 2.00 times cuDNN's time.", page)
        self.assertIn("| forward | bf16 | 40 | ", page)
        self.assertIn(
            "One call takes 2.000 ms (2.000 to 2.000). The published record of 2025 is 5.364 ms", page
        )
        # No shape is launch-bound here, for none is compared with itself: all lengths take the same.
        self.assertIn("ahead of plain attention it is from 128 tokens on", page)
        index = indexed({"flash": flash}, records)
        self.assertIn("x plain, 2.00 x the fastest fused |", index)
        self.assertIn("| 2.000 ms; published 5.364 |", index)

    def test_memory_is_stated_as_it_was_measured(self):
        """A workspace that does not grow, as C has on a GPU, beside sides that grow by the length and by its square."""
        records = []
        for case in flash.cases("full", "cuda"):
            if case.get("pass") == "memory":
                length = case.seq / 1024
                for impl, mib, account in (
                    ("c", 32 + length, length),
                    ("c_naive", 4 * length**2, 4 * length**2),
                    ("torch_eager", 10 * length**2, 8 * length**2),
                    ("torch_efficient", length, None),
                ):
                    record = plain("flash", case, impl) | {"peak_mib": mib, "values": {}}
                    if account:
                        record["values"]["account_mib"] = account
                    records.append(record)
        page = written(flash, "flash", records)
        for words in (
            "Memory from seq 1024 to 32768, 32 times the length: c 33.0 to 64.0 MiB, 1.94 times (over the "
            "arithmetic by 32.0 "
            "and 32.0 MiB, at the end 100 %)",
            "c_naive 4.00 to 4096 MiB, 1024 times (over the arithmetic by 0 and 0 MiB, at the end 0 %)",
            "torch_efficient 1.00 to 32.0 MiB, 32.0 times.",
            "At seq 32768 c takes 64.0 MiB: 0.016 times c_naive's, 0.0063 times torch_eager's, 2 times "
            "torch_efficient's memory.",
        ):
            self.assertIn(words, page)


class TrainingInMixedPrecision(unittest.TestCase):
    def test_both_bands_are_shown_and_said(self):
        def side(mean, largest):
            return {"values": {"mean": mean, "largest": largest}}

        sides = {"torch_eager": {}, "c": side(0.02, 0.1), "torch_eager_seed": side(0.1, 0.5)}
        for rounding, word in ((side(0.01, 0.04), "within"), (side(0.01, 0.03), "beyond")):
            page = Page("transformer", Path("nowhere"), "md")
            transformer.page.report_noise(page, {(): sides | {"torch_eager_f32": rounding}})
            text = "\n".join(page.blocks)
            self.assertIn("C is within that noise, at 0.02 and 0.1", text)
            self.assertIn(f"C is {word} 3 times that", text)


def plain(module, case, impl, samples=()):
    """A record of a GPU with these times and nothing else."""
    found = dict(
        module=module, impl=impl, status="ok", machine="NVIDIA H200", device="cuda", measure="time memory"
    )
    if case is not None:
        found |= dict(deliverable=case.deliverable, case=case.keys)
    return found | ({"ms": statistics(samples), "samples": list(samples)} if samples else {})


def written(module, name, records):
    with patch.object(plot, "write"):
        page = Page(name, Path("nowhere"), "md")
        module.report(page, Records(records))
    return "\n".join([*(found.text for found in page.answers), *page.blocks, *page.grids, *page.methods])


def indexed(modules, records):
    """The index, of these modules or of one that says nothing."""
    with tempfile.TemporaryDirectory() as folder, patch.object(plot, "write"):
        silent = type(
            "silent", (), {"DELIVERABLES": bench.DELIVERABLES, "report": staticmethod(lambda *_: None)}
        )
        report.write(modules or {"bench": silent}, records, Path(folder))
        return (Path(folder) / "README.md").read_text()


def traced(rng):
    """What a trace leaves in a record."""
    figures = ("timer", "events", "traced", "traced mean", "window", "busy", "sum", "activities")
    values = {f"{name} {figure}": 1 + rng.random() for name in trace.PASSES for figure in figures}
    for scope in trace.SCOPES:
        values |= {f"{scope} ms {name}": rng.random() for name in ("matmul", "softmax", "elementwise")}
        kernels = [("sm90_xmma_gemm", "matmul", 0.5, 73.0), ("td_softmax", "softmax", 0.1, 12.0)]
        values |= {f"{scope} products": 73.0} | trace.numbered(scope, kernels)
    values |= {f"attention ms {part}": 1 + rng.random() for part in trace.PARTS[:3]}
    return values


def invented(module, case, impl, gpu=True):
    """A record with a number wherever a page may look for one."""
    rng = random.Random(f"{case.name} {impl}")
    found = dict(module=module, deliverable=case.deliverable, case=case.keys, impl=impl, status="ok")
    found |= dict(measure=" ".join(case.measure))
    if gpu:
        found |= dict(machine="NVIDIA H200", device="cuda", versions={"cuda": "13.0"})
    if "error" in case.measure:
        found["error"] = {"max_abs": rng.random(), "rel_l2": rng.random(), "ulp_max": 1.0, "truth": "float64"}
    if "time" in case.measure:
        samples = [1 + rng.random() for _ in range(5)]
        found |= {"ms": statistics(samples), "samples": samples, "first_ms": 30.0}
        if not case.in_turn or case.alternate:
            found["ratio"] = {"median": 1.0}
        found |= {"tflops": rng.random(), "gb_s": rng.random() * 4000}
    if "memory" in case.measure:
        found |= {"peak_mib": 10 * rng.random(), "requested_mib": 9.0}
    phases = {name: statistics([rng.random(), 1.0]) for name in ("forward", "backward", "optimizer")}
    found |= {
        "phases": phases,
        "parts": {"td_optimizer_adamw": 1.0, "nvjet_tst": 2.0, "td_attention_forward": 1.5},
    }
    found["values"] = {name: 1 + rng.random() for name in VALUES} | {
        "furthest_grad": "a",
        "furthest_weight": "b",
    }
    if case.deliverable == "nsys_profile":
        found["values"] |= traced(rng)
    if case.deliverable == "transformer_training":
        found["series"] = {"loss": [5.0 - rng.random() for _ in range(case.steps)]}
    if case.get("part") == "fit":
        found["series"] = {"bytes": [2**16, 2**20, 2**24], "ms": [0.1, 0.2, 1.5 + rng.random()]}
    if case.get("part") == "communication":
        found["values"] = {name: 1 + rng.random() for name in COMMUNICATION} | {"calls": 3, "bytes": 2**22}
        for rank in range(case.ranks):
            found.setdefault("series", {}).update(
                {f"{rank} passes": [1.0, 3.0, 4.0], f"{rank} begin": [2.0], f"{rank} end": [3.5]}
            )
    return found


if __name__ == "__main__":
    unittest.main()
