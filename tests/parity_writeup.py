"""The write-up: comparisons, sentences and their limits, the machine of an answer, and its formats."""

import json
import math
import re
import shlex
import tempfile
import types
import unittest
import unittest.mock
from pathlib import Path

from parity import attention, comm, flash, memory, trace
from parity.bench import page as bench
from parity.core import beside, handouts, report, sweep, words, writeup
from parity.core.clock import statistics
from parity.core.comparison import Comparison, Rates, clean, geomean, ms_of, noisy, quotient
from parity.core.document import Html, Latex, Markdown, Section, Tabled, Text
from parity.core.draw import Draw
from parity.core.record import FILE, RecordError
from parity.core.report import Page
from parity.core.tables import Table
from parity.core.view import Records
from parity.ddp import page as ddp
from parity.shard import page as shard
from parity.shared.pages import report_proofs


def timed(impl, samples, **more):
    return {"impl": impl, "case": {}, "status": "ok", "ms": statistics(samples)} | more


class Figures(unittest.TestCase):
    """What rates are formed from, and what is made of the activities that PyTorch's profiler names."""

    def test_work_of_a_call(self):
        c = unittest.mock.MagicMock()
        case = comm.time_case("cpu", 4, 2**20, calls=3)
        sides = comm.run(case, Draw("work"), c)
        self.assertEqual([sides[side].nbytes for side in ("c_gloo", "torch_gloo")], [1.5 * 2**20] * 2)
        work = dict(forward_flops=4.0, backward_flops=10.0, backward_flops_naive=8.0)
        c.value.return_value = unittest.mock.MagicMock(**work)
        for module, passes in (
            (attention, {"forward": 4, "backward": 8}),
            (flash, {"forward": 4, "backward": 10, "both": 14}),
        ):
            timed = [of for of in module.cases("quick", "cpu") if "pass" in of and of.seq <= 512]
            self.assertEqual({case["pass"] for case in timed}, {*passes})
            for case in timed:
                sides = module.run(case, Draw(case.name), c)
                found = {sides[side].flops for side in ("c", "torch_eager")}
                self.assertEqual(found, {passes[case["pass"]]}, case)

    def test_what_is_made_of_a_profile(self):
        rows = """mm 0 forward scores 0 100; _softmax 0 forward softmax 50 150; add 0 loss - 200 250
            add_ 0 optimizer - 300 400; mul 0 optimizer - 310 320; div 0 optimizer - 390 395
            mm 1 forward scores 1000 1300; bmm 1 backward - 1400 1430"""
        rows = [row.split() for row in re.split("[;\n]", rows)]
        activities = [
            trace.ref.Activity(f"aten::{name}", int(step), phase, part.strip("-"), float(begin), float(end))
            for name, step, phase, part, begin, end in rows
        ]
        timer = {"forward": [1.0, 2.0, 9.0], "loss": [0.5, 0.25, 0.125]}
        found = trace.torch_values(trace.ref.Profiled(2, timer, activities), None)
        wanted = {"forward timer": 2.25, "forward window": 0.275, "optimizer busy": 0.05}
        wanted |= {"forward ms matmul": 0.2, "forward ms softmax": 0.05, "step ms elementwise": 0.0825}
        wanted |= {"forward and backward ms elementwise": 0.025, "attention ms scores": 0.2}
        wanted |= {"attention ms scores matmul": 0.2, "attention ms softmax": 0.05}
        wanted |= {"forward 1 share": 0.8, "forward 1 calls": 1.0, "forward 2 calls": 0.5}
        self.assertEqual({name: round(found[name], 9) for name in wanted}, wanted)
        self.assertEqual((found["step 2 name"], found["step 2 class"]), ("aten::_softmax", "softmax"))


class Comparisons(unittest.TestCase):
    def test_ratio_and_range(self):
        found = Comparison.of(timed("c", [1.0, 1.02, 0.8]), timed("torch_eager", [2.0, 2.01, 1.7]))
        self.assertEqual((found.ratio, round(found.low, 3), found.high), (0.5, 0.398, 0.6))

    def test_the_range_of_pairs_is_the_range_of_their_ratios(self):
        paired = timed("c", [1.0], ratio={"over": "torch_eager", "median": 0.5, "p25": 0.45, "p75": 0.55})
        found = Comparison.of(paired, timed("torch_eager", [2.0]))
        self.assertEqual((found.low, found.high), (0.45, 0.55))
        self.assertEqual(Comparison.of(paired, timed("torch_compile", [2.0])).low, 0.5)
        for end in ("p25", "p75"):
            half = paired | {"ratio": {"over": "torch_eager", end: 0.4}}
            self.assertEqual(Comparison.of(half, timed("torch_eager", [2.0])).low, 0.5)
        edges = [Comparison(mine, 2.0, low, high).verdict for mine, low, high in
                 ((1.0, 0.4, 1.0), (3.0, 1.0, 2.0), (1.0, 0.4, 0.9), (3.0, 1.1, 2.0))]  # fmt: skip
        self.assertEqual(edges, ["equal", "equal", "faster", "slower"])

    def test_nothing_is_compared_with_noise(self):
        calm, wild = timed("c", [1.0, 1.1]), timed("torch_eager", [1.0, 3.0])
        self.assertFalse(noisy(calm))
        self.assertTrue(noisy(wild))
        busy = calm | {"host": {"cores": 2}, "others": 2}
        self.assertTrue(noisy(busy))
        self.assertFalse(noisy(busy | {"device": "cuda"}))  # a GPU's times are the GPU's
        self.assertFalse(noisy(busy | {"others": 1}))
        for pair in ((calm, wild), (busy, calm), (calm, None), (calm, {"impl": "x", "status": "oom"})):
            self.assertIsNone(Comparison.of(*pair))
            self.assertIsNone(Comparison.of(*pair[::-1]))
        for key in ("machine", "device", "host", "versions"):
            self.assertIsNone(Comparison.of(calm, calm | {key: {"cores": 9}}))
            self.assertEqual(Comparison.of(calm, calm | {key: {"cores": 9}}, anywhere=True).ratio, 1)
        bad = {"impl": "c"}, calm | {"status": "failed"}
        self.assertFalse(any(clean(record) or noisy(record) for record in bad))
        self.assertEqual([ms_of(r) for r in (timed("c", [1.0, 1.02, 0.8]), wild, None)], [1.0, None, None])
        pairs = (3, 2.0), (0, 2), (2.0, 0), (None, 2.0), (2.0, None), ("oom", 1.0)
        self.assertEqual([quotient(*pair) for pair in pairs], [1.5, 0, None, None, None, None])
        self.assertAlmostEqual(geomean([None, 0, -1, 4, 9]), 6)

    def test_the_bound_is_the_tighter_of_both_rates(self):
        rates = Rates.of(
            [
                timed("c", [1.0], tflops=800.0) | {"case": {"op": "gemm", "dtype": "bf16"}},
                timed("c", [1.0], tflops=400.0) | {"case": {"op": "gemm", "dtype": "bf16"}},
                timed("c", [1.0], gb_s=4000.0) | {"case": {"op": "copy", "dtype": "f32"}},
                timed("c", [1.0], gb_s=3000.0) | {"case": {"op": "copy", "dtype": "f32"}},
            ]
        )
        record = timed("c", [1.0], tflops=400.0) | {"case": {"dtype": "bf16_mixed"}}
        self.assertEqual(rates.share(record), "50 %")
        self.assertEqual(rates.share(record, 3e9), "75 %")  # 3 GB in 1 ms
        self.assertIsNone(Rates({}, 0.0).share(record))
        self.assertIsNone(rates.share(record | {"case": {"dtype": "f32"}}, 3e9))  # the copy alone is no bound
        self.assertIsNone(rates.share({"case": {}}))


class Sentences(unittest.TestCase):
    def test_a_sentence_without_its_value_is_left_out(self):
        for values, want in (
            ({"x": 1.0}, "It is 1."),
            ({"x": None}, None),
            ({}, None),
            ({"x": math.nan}, None),
        ):
            self.assertEqual(words.filled("It is {{ x }}.", values), want)
        self.assertIsNone(words.filled("It is {{ x | percent }}.", {"x": math.nan}))
        self.assertIsNone(words.filled("{% if a > 1 %}x{% endif %}", {"a": None}))
        self.assertEqual(words.filled("Always.", {}), "Always.")

    def test_what_always_holds_is_no_answer_without_a_number(self):
        rows = {"row": ["It takes {{ ms }} ms.", "This is physics."]}
        with unittest.mock.patch.object(words, "templates", return_value=rows):
            self.assertEqual(words.sentences("m", "row", {"ms": 2.0}), ["It takes 2 ms.", "This is physics."])
            self.assertEqual(words.sentences("m", "row", {}), [])

    def test_numbers(self):
        for value, want in (
            (12.84, "12.8"),
            (1095.3, "1,095"),
            (0.00123, "0.00123"),
            (0.000123, "1.23e-04"),
            (math.inf, "infinite"),
            (97.0, "97"),
            (1048576, "1,048,576"),
            ("f32", "f32"),
        ):
            self.assertEqual(words.number(value), want)
        shares = [words.percent(share) for share in (0.283, 0.0163, -1.234, 0.0)]
        self.assertEqual(shares, ["28 %", "1.6 %", "-123 %", "0 %"])
        self.assertEqual((words.change(0.88), words.change(1.5)), ("falls by 12 %", "rises by 50 %"))


class Answers(unittest.TestCase):
    """The values that the templates of answers get, row by row."""

    def answers(self, write, records, others=()):
        page, values, original = Page("m", "M", others), {}, words.sentences
        page.module = write.__module__.split(".")[1]

        def sentences(module, row, given):
            values[row] = given
            return original(module, row, given)

        with unittest.mock.patch.object(words, "sentences", sentences):
            write(page, Records(records))
        return {section.row: section for section in page.sections}, values

    def peaks(self, peaks, passes):
        """{(impl, dtype, context): MiB, or None where memory ended}."""
        return [
            {
                "deliverable": "memory_profiling",
                "impl": impl,
                "status": "ok" if mib else "oom",
                "case": {"part": "peaks", "size": "2.7B", "layers": 32, "d_model": 2560, "context": context}
                | {"dtype": dtype, "pass": what, "batch": 4},
                "peak_mib": mib,
                "values": {},
            }
            for (impl, dtype, context), mib in peaks.items()
            for what in passes
        ]

    def test_a_peak_at_the_end_of_a_phase_is_in_it(self):
        (step,) = self.peaks({("c", "f32", 512): 3.0}, ("step",))
        step["values"] = {"live": 3 * 2**20}
        step["series"] = {"live_mib": [1, 3, 2, 1], "phase ends": [0.25, 0.5, 0.75, 1.0]}
        _, values = self.answers(memory.report, [step])
        self.assertEqual(values["memory_profiling (a)"]["during"], "forward")

    def test_memory_is_compared_at_a_context_that_both_dtypes_have(self):
        fits = {
            ("f32", 256): 100.0,
            ("f32", 512): 200.0,
            ("bf16_mixed", 256): 103.0,
            ("bf16_mixed", 512): None,
        }
        peaks = {(impl, *key): mib for key, mib in fits.items() for impl in ("c", "torch_eager")}
        _, values = self.answers(memory.report, self.peaks(peaks, ("step",)))
        found = {name: values["memory_profiling (c)"][name] for name in ("wide", "low")}
        self.assertEqual({of["context"] for of in found.values()}, {256})
        self.assertEqual([of["c_step"] for of in found.values()], [100.0, 103.0])
        self.assertEqual(values["memory_profiling (b)"]["last"]["context"], 512)

    def test_one_block_at_the_longest_context_is_measured_without_the_others(self):
        case = memory.block_case("2.7B", memory.LONGEST)
        saved = {"saved": 2**24, "saved 1": 2**23, "saved 1 name": "layers.0.ffn.gate_up"}
        records = self.peaks({("c", "f32", 512): 100.0, ("c_naive", "f32", 512): 90.0}, ("forward", "step"))
        for record in records:
            record["values"] = saved | {"saved": 2**22, "block gradients": 2**21}
        for asked in (False, True):
            block = dict(deliverable=case.deliverable, impl="c", status="ok", case=case.keys, values=saved)
            sections, values = self.answers(memory.report, [*records, *[block] * asked])
            found = values["memory_profiling (f)"]
            self.assertEqual((found["context"], found["saved"]), (2048, 16) if asked else (512, 4))
            self.assertEqual(found["gradients"], 2)
            self.assertEqual(not sections["memory_profiling (f)"].lacks, asked)

    def run_of(self, strategy, step, **more):
        case = dict(size="xl", dtype="f32", optimizer="adamw", ranks=2, batch=2, context=128)
        case |= dict(strategy=strategy, part="communication")
        values = dict(step=step, without=90.0, exposed=step - 90.0, tail=1.0, collectives=40.0)
        values |= dict(beside=0.0 if strategy in ("naive", "flat") else 38.0, calls=435, bytes=2**22)
        series = {f"{rank} {name}": ms for rank in (0, 1) for name, ms in
                  (("passes", [10.0, 60.0, step]), ("begin", [60.0]), ("end", [80.0]))}  # fmt: skip
        return dict(
            deliverable="d", impl="c_nccl", status="ok", case=case | more, values=values, series=series
        )

    def test_strategies_are_compared_on_the_same_way(self):
        runs = [self.run_of("naive", 130.0), self.run_of("flat", 120.0), self.run_of("overlap", 101.0)]
        runs += [
            self.run_of("bucketed", ms, bucket_mb=mb) for mb, ms in ((1, 103.0), (25, 99.0), (1000, 110.0))
        ]
        runs[-1]["values"]["beside"] = 20.0
        for run, calls, ms in zip(
            (runs[1], *runs[3:]), (1, 150, 50, 2), (36.66, 42.0, 41.0, 40.0), strict=True
        ):
            run["values"] |= {"calls": calls, "collectives": ms}
        runs += [self.run_of("flat", 20.0, dtype="bf16", optimizer="sgd", ranks=1)]
        runs += [self.run_of("naive", 1.0) | {"status": "failed"}, self.run_of("flat", 1.0)]  # say nothing
        del runs[-1]["values"]
        way = {key: value for key, value in runs[0]["case"].items() if key != "part"} | {"warmup": 5}
        for strategy, mb, ms in (("naive", 1, 100.0), ("bucketed", 1, 105.0), ("bucketed", 25, 300.0)):
            case = way | {"strategy": strategy, "bucket_mb": mb}
            runs.append(timed("torch_ddp", [ms, 1.1 * ms, (1.2 - mb / 250) * ms], deliverable="d", case=case))
        sections, values = self.answers(ddp.report, runs)
        flat = values["minimal_ddp_flat_benchmarking"]
        self.assertEqual([flat[name]["step"] for name in ("naive", "flat")], [130.0, 120.0])
        self.assertEqual(flat["dtype"], "f32")
        buckets = values["ddp_bucketed_benchmarking (a)"]
        self.assertEqual(buckets["c"], {"best": 25, "fast": 99.0, "worst": 1000, "slow": 110.0})
        self.assertEqual([buckets[end]["mb"] for end in ("small", "large")], [1, 1000])
        self.assertEqual(buckets["hidden"], 20 / 40)  # the least of the sizes
        # Calls explain more than half of the 2 ms between the smallest and the largest.
        self.assertEqual((round(buckets["explained"], 3), buckets["partly"]), (1.139, False))
        overlap = values["ddp_overlap_individual_parameters_benchmarking (a)"]
        for strategy in ("naive", "flat", "overlap", "bucketed"):
            found = overlap[strategy]
            self.assertAlmostEqual(found["step"], found["without"] + found["exposed"])
            self.assertAlmostEqual(found["collectives_share"], found["collectives"] / found["step"])
        self.assertGreater(overlap["overlap"]["hidden"], overlap["naive"]["hidden"])
        found = overlap["bucketed"]
        self.assertEqual([found[name] for name in ("step", "theirs", "equal")], [99.0, 1.1 * 105, True])
        self.assertAlmostEqual(found["spread"], 0.0888, places=3)
        traces = sections["ddp_overlap_individual_parameters_benchmarking (b)"]
        self.assertFalse(traces.lacks)  # a trace of the overlap was recorded
        blocks = sections["ddp_bucketed_benchmarking (a)"].blocks
        self.assertEqual([len(block.table.rows) for block in blocks if hasattr(block, "table")], [2, 4, 3])

    def test_the_machine_that_answers_all_parts_is_preferred(self):
        rows = ("memory_profiling (a)", "memory_profiling (b)")

        def of(name, row):
            lacks = [] if name == "cpu" or row == rows[0] else ["more"]
            return writeup.Found(Section(row, "", lacks=lacks), writeup.Machine(name, []), "memory")

        found = {row: [of(name, row) for name in ("cpu", "h100")] for row in rows}
        self.assertEqual([of.machine.name for of in writeup.choose(found, rows).values()], ["cpu", "cpu"])

    def test_the_row_with_the_largest_error_of_c_is_told(self):
        # of C and PyTorch
        far = {("a", "f32"): (3e-7, 1e-7), ("b", "f32"): (1e-7, 2e-7), ("a", "bf16"): (3e-3, 1e-3)}
        records = [
            dict(impl=impl, status="ok", case={"size": size, "dtype": dtype}, error={"max_abs": error})
            for (size, dtype), errors in far.items()
            for impl, error in zip(("c_gloo", "torch"), errors, strict=True)
        ]
        page = unittest.mock.Mock()
        report_proofs(page, records, "proofs", ("model", "dtype"))
        told = page.say.call_args.kwargs
        self.assertEqual((told["worst"], told["behind"]), ({"mine": 3e-7, "theirs": 1e-7}, 1))

    def test_sharded_steps_stand_next_to_others_of_their_run(self):
        case = dict(size="xl", dtype="f32", ranks=2, bucket_mb=25, batch=2, context=128)
        sides = {"c_nccl": [3.0], "c_nccl_whole": [4.0], "torch_zero": [6.0]}
        run = {"build": {"commit": "a"}, "time": "2026-11-26T09:00:00Z"}
        name = "optimizer_state_sharding_accounting"
        sharded = case | {"shard": "flat", "warmup": 5}
        records = [timed(impl, ms, deliverable=name, case=sharded, **run) for impl, ms in sides.items()]
        ddp_step = timed(
            "torch_ddp", [5.0], deliverable="ddp_bucketed_benchmarking", case=case | {"strategy": "bucketed"}
        )
        for of, ms in ((run, 5.0), (run | {"build": {"commit": "b"}}, None)):
            sections, values = self.answers(shard.report, records, [ddp_step | of])
            self.assertEqual(values[f"{name} (b)"]["torch_ddp"], ms)
            table = next(block.table for block in sections[f"{name} (b)"].blocks if hasattr(block, "table"))
            self.assertEqual("torch_ddp (ms)" in table.titles, ms is not None)

    def test_the_harness_is_blamed_for_its_own_time_alone(self):
        for time, held in (("2026-11-26T06:15:49Z", True), ("2026-11-29T00:00:00Z", None)):
            self.assertEqual(bench.held_weights([{"time": time}]), held)

    def test_numbers_of_gpus_are_compared_on_one_kind_of_gpu(self):
        keys = dict(collective="all_reduce", bytes=2**30, dtype="f32", reduction="sum", calls=1, warmup=5)

        def one(impl, ranks, ms, machine, **more):
            found = timed(impl, [ms], deliverable=comm.NAME, machine=machine, case=keys | {"ranks": ranks})
            return found | more

        records = [one("torch_gloo", ranks, 9.0, "CPU") for ranks in (2, 4, 6)]
        for machine, times in (("H100", [3.0, 5.0]), ("H200", None)):
            gpus = [one("torch_nccl", 2, 3.0, machine), one("torch_nccl", 4, 5.0, "H100")]
            sections, values = self.answers(comm.report, records + gpus)
            self.assertEqual(values[comm.NAME]["nccl"], times)
            self.assertEqual(values[comm.NAME]["above"], [6])
            self.assertIn("NCCL among 6 ranks: no more than 4 GPUs were measured", sections[comm.NAME].lacks)


def answering(page, records):
    page.section("naive_ddp")
    page.table(records.wide(["n"], "ms"), "times", expected=2)
    xs = records.values("n")
    page.plot("time", {"c": (xs, [records.value("ms", n=n) for n in xs])}, x="n", y="ms", title="Time")


class Documents(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.modules = {"ddp": types.SimpleNamespace(report=answering)}
        self.enterContext(unittest.mock.patch.object(sweep, "listed", lambda modules: None))
        self.enterContext(unittest.mock.patch.object(sweep, "is_listed", lambda record, listed: True))

    def machine(self, name, counts, module="ddp", deliverable="naive_ddp"):
        (self.folder / name).mkdir()
        records = [
            dict(deliverable=deliverable, module=module, case={"n": n}, impl="c", status="ok", machine=name,
                 ms=statistics([float(n)]), versions={"cuda": "13.0"}, time="2026-11-21T10:00:00Z") for n in counts
        ]  # fmt: skip
        (self.folder / name / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))

    def write(self, form="md", **how):
        usual = dict(reports=self.folder, out=None, id=[], machine=[], edition=None, beside=None)
        return writeup.write(self.modules, types.SimpleNamespace(format=form, **usual | how))

    def chosen(self):
        self.write()
        return re.search(r"The page of (\w+)", (self.folder / "WRITEUP.md").read_text())[1]

    def test_a_local_folder_answers_nothing(self):
        self.machine("h100", [1])  # not all that is asked for
        self.machine("local", [1, 2])
        self.assertEqual(self.chosen(), "h100")
        self.assertNotIn("local", (self.folder / "README.md").read_text())

    def test_an_answer_of_2026_is_of_its_own_xl(self):
        def answer(page, records):
            page.section("benchmarking_script (b)")
            page.table(records.wide(["size"], "ms"), "times")
            page.section("mixed_precision_accumulation")
            page.table([{"sum": 1.0}], "sums")

        self.modules = {"bench": types.SimpleNamespace(report=answer)}
        (self.folder / "h100").mkdir()
        common = dict(deliverable="benchmarking_script", module="bench", impl="c", status="ok", device="cuda")
        times = {"xl": 3.0, "2.7B": 5.0}
        records = [common | dict(case={"size": s}, ms=statistics([ms])) for s, ms in times.items()]
        (self.folder / "h100" / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
        self.write()
        new, old = ((self.folder / f"{name}.md").read_text() for name in writeup.NAMES.values())
        self.assertIn("| xl | 5.00 | 1, 0.0\u00a0% |\n| 10B | not measured |  |\n", new)
        self.assertNotIn("3.00", new)
        self.assertIn("| xl | 3.00 | 1, 0.0\u00a0% |\n| 2.7B | 5.00 | 1, 0.0\u00a0% |\n", old)
        self.assertIn("[the answer](WRITEUP.md#mixed_precision_accumulation)", old)
        self.assertNotIn("| sum |", old)
        records.append(common | dict(case={"size": "10B"}, ms=statistics([9.0])))
        (self.folder / "h100" / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
        self.write()
        new, old = ((self.folder / f"{name}.md").read_text() for name in writeup.NAMES.values())
        self.assertIn("| 10B | 9.00 |", new)
        self.assertNotIn("10B", old)

    def test_an_answer_names_the_card_that_has_what_it_lacks(self):
        def answer(page, records):
            page.section("naive_ddp")
            page.table(records.wide(["n"], "ms"), "times")
            for n in (8, 9):
                page.lacks(f"n of {n}") if n not in records.values("n") else None

        self.modules = {"ddp": types.SimpleNamespace(report=answer)}
        for folder, counts in (("cpu", [8]), ("h200", [1, 2, 3]), ("h100x2", [1]), ("h100", [9])):
            self.machine(folder, counts)
        self.assertEqual(self.chosen(), "h200")  # which has the most rows
        named = re.findall(r"Another card has it.*\[(\w+)\]", (self.folder / "WRITEUP.md").read_text())
        self.assertEqual(named, ["h100"])

    def test_a_command_for_what_is_missing_selects_cases_of_its_id(self):
        for name, (module, _) in handouts.COMMANDS.items():
            words_of = shlex.split(handouts.command_of(name))[4:]
            options = dict(zip(words_of[::2], words_of[1::2], strict=True))
            how = dict(only=[options["--module"]], regex=options["--case"], device=options["--device"])
            found = sweep.select(sweep.discover("parity"), options["--profile"], **how)
            self.assertEqual({(item.module, item.case.deliverable) for item in found}, {(module, name)})

    def test_joined_machines_give_each_result_once(self):
        for name, counts in (("cpu", [1]), ("h100x4", [2, 4]), ("h200x2", [1, 2])):
            self.machine(name, counts)
        records = self.folder / "h100x4" / FILE
        lost = json.loads(records.read_text().splitlines()[0]) | {"case": {"n": 1}, "status": "oom"}
        records.write_text(
            records.read_text() + json.dumps({k: v for k, v in lost.items() if k != "ms"}) + "\n"
        )
        given = []

        def answer(page, records):
            given.append({record["case"]["n"]: record["machine"] for record in records.records})
            self.assertEqual(len(given[-1]), len(records))

        self.modules = {"ddp": types.SimpleNamespace(report=answer, JOINED=True)}
        machines = writeup.machines_of(self.folder, (), self.modules)
        writeup.sections_of(machines, self.modules)
        self.assertEqual(given[-1], {1: "h200x2", 2: "h100x4", 4: "h100x4"})
        given.clear()
        writeup.sections_of(machines[1:2], self.modules)
        self.assertEqual(len(given), 1)  # one machine is joined with none

    def test_every_format(self):
        built = [{"build": {"commit": commit}} for commit in ("0123456789ab", "unknown", "0123456789ab")]
        self.assertEqual(writeup.builds_of(built), "tandem 0123456789, commit not recorded")
        self.machine("a<b", [1, 2])
        for form, question, machine in (
            ("md", "*{}*\n", r"a\<b; tandem"), ("html", "<p>{}</p>", "a&lt;b; tandem"),
            ("latex", "{}\n", r"a\textless{}\allowbreak{}b; tandem"),
        ):  # fmt: skip
            path = self.write(form)[0]
            text = path.read_text()
            self.assertEqual(text.count("Measured by python -m parity run"), 1)
            self.assertIn(f"\n{question.format(handouts.QUESTIONS['naive_ddp'])}", text)
            self.assertIn(machine, text)
            if form == "html":
                self.assertNotRegex(text, r"(src|href)=\"(?!data:|#)")
            if form == "latex":
                self.assertIn(r"\includegraphics", text)
                self.assertTrue((self.folder / "figures/ddp_time.pdf").read_bytes().startswith(b"%PDF"))

    def test_a_section_in_each_form(self):
        table = Table([{"n": n} for n in range(25)])
        blocks = [Text("s"), Text("a < b", "working"), Tabled("t", table)]
        section = Section("d", "q", ['A `x_y` <"b">.'], blocks, notes=["N."], lacks=["L"])
        lacks, fold = "Not measured on this machine: L.", "<details><summary>The table: 25 rows</summary>\n"
        for form, *wanted, table_in in (
            (Markdown, 'A `x_y` <"b">.\n', "*s*\n", "```text\na < b\n```\n", "Notes: N.\n", f"*{lacks}*\n",
             f"{fold}\n{table.render('md')}\n</details>\n"),
            (Html, '<p>A <code>x_y</code> &lt;"b"&gt;.</p>', '<p class="small">s</p>', "<pre>a &lt; b</pre>",
             "<p>Notes: N.</p>", f'<p class="small">{lacks}</p>', f"{fold}{table.render('html')}</details>"),
            (Latex, 'A \\texttt{x\\_\\allowbreak{}y} \\textless{}\\allowbreak{}"b"\\textgreater{}.\n',
             "{\\footnotesize s\\par}\n", "{\\scriptsize\\begin{verbatim}\na < b\n\\end{verbatim}}\n", "Notes: N.\n",
             f"{{\\footnotesize {lacks}\\par}}\n", table.render("latex", "C", "tab:l_t")),
        ):  # fmt: skip
            (document := form(self.folder)).section(section, "C", "l", fold=True)
            self.assertEqual(document.parts, [*wanted[:3], table_in, *wanted[3:]])

    def test_contents_name_an_id_once_and_link_its_parts(self):
        for form, link in ((Markdown, "[{1}](#{0})"), (Html, '<a href="#{0}">{1}</a>')):
            document = form(self.folder)
            document.contents("2025", ["x_y (a)", "x_y (b)", "z"])
            links = [link.format(*pair) for pair in (("x_y-a", "(a)"), ("x_y-b", "(b)"), ("z", "z"))]
            self.assertIn("2025: x_y {} {}; {}.".format(*links), document.whole())

    def test_results_beside_those_of_another_machine(self):
        name = "torch_compile"

        def answer(page, records):
            for part in "ab":
                page.section(f"{name} ({part})")
                page.table(records.wide(["n"], "ms"), "times", expected=2)

        self.modules = {"ddp": types.SimpleNamespace(report=answer)}
        self.machine("local", [2], deliverable=name)
        self.machine("h100", [2], deliverable=name)
        text = self.write(machine=["local"], beside="h100")[0].read_text()
        self.assertEqual(text.count("| side | case | yours | h100 | yours / h100 |"), 1)  # of both parts
        self.assertNotIn("yours", self.write(machine=["local"])[0].read_text())

    def test_what_is_beside_and_what_is_not(self):
        dims = dict(d_model=1, d_ff=2, layers=3, heads=4, vocab=5)
        cases = [{"size": "xl", "n": 7} | dims, dims, {"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}]
        times = [2.0], [3.0], [4.0], [1.0, 9.0], [6.0], [5.0]
        mine, far = (
            [timed("c", ms, case=case, module="m", deliverable="d", machine=name)
             for ms, case in zip(of, cases, strict=True)]
            for name, of in (("here", times), ("far", ([8.0], [6.0], [1.0, 9.0], [5.0], [0.0], [5.0])))
        )  # fmt: skip
        del far[4]["ms"]
        mine[5]["config"], far[5]["config"] = ({"attention": how} for how in ("naive", "flash"))
        beside.write(document := Markdown(Path()), [*mine, far[4] | {"impl": "x"}], far, "far")
        beside.write(document, [], far, "far")
        *rows, left = document.whole().strip("\n").splitlines()[4:]
        small = ", ".join(f"{name} {value}" for name, value in dims.items())
        ratios = ["| c | size xl, n 7 | 2.00 | 8.00 | 0.250 |", f"| c | {small} | 3.00 | 6.00 | 0.500 |"]
        self.assertEqual([*filter(None, rows)], ratios)
        why = ["noisy, or judged wrong"] * 2 + ["not measured there", "attention (scores, fused)"]
        why = "; ".join(f"c, n {n} ({words_of})" for n, words_of in enumerate(why, 1))
        self.assertEqual(left, f"*Not beside far: {why}.*")

    def test_one_id_and_another_place(self):
        self.machine("cpu", [1, 2])
        out = self.folder / "elsewhere" / "one.md"
        (out.parent / "figures").mkdir(parents=True)
        (out.parent / "figures/of_another_answer.svg").touch()
        self.write(out=out, id=["naive_ddp"])
        self.assertEqual(len([*out.parent.glob("figures/*.svg")]), 2)
        self.assertEqual(re.findall("^## .*", out.read_text(), re.MULTILINE), ["## naive_ddp"])
        self.assertFalse((self.folder / "README.md").exists())
        self.assertTrue(self.write(out=self.folder / "new" / "empty.md", id=["flash_forward"])[0].exists())
        of_2025 = [path.name for path in self.write(edition="2025") if path.suffix == ".md"]
        self.assertEqual(of_2025, ["WRITEUP-2025.md"])
        with self.assertRaisesRegex(report.ReportError, "no id nothing; there are: benchmarking_script"):
            self.write(id=["nothing"])
        with self.assertRaisesRegex(RecordError, "no machine h300 in .*; --machine takes: cpu$"):
            self.write(machine=["h300"])
        records = self.folder / "cpu" / "records.jsonl"
        before = records.read_bytes()
        with self.assertRaisesRegex(report.ReportError, "records.jsonl' needs to end with .md"):
            self.write(out=records)
        self.assertEqual(records.read_bytes(), before)


if __name__ == "__main__":
    unittest.main()
