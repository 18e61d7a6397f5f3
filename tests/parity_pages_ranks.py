"""The pages of data parallelism and of split state: what they say of records of ranks."""

import tempfile
import unittest
from pathlib import Path

from parity.core.clock import statistics
from parity.core.report import Page
from parity.core.view import Records
from parity.ddp.communication import behind, fitted, handout_optimum, optimum, overlapped
from parity.ddp.page import (
    STRATEGIES,
    by_strategy,
    compiled_words,
    fit_words,
    link_of,
    links_of,
    nccl_words,
    order_words,
    predictions,
    report_overlap,
    varied,
    words_of,
)
from parity.shard.page import by_kind, is_unfused
from parity.shard.page import nccl_words as nccl_words_of_shard


class DataParallel(unittest.TestCase):
    def test_the_model_of_buckets(self):
        o, w = fitted({"bytes": [10**5, 10**6, 10**7], "ms": [0.15, 1.05, 10.05]})
        self.assertAlmostEqual(o, 5e-5, places=9)
        self.assertAlmostEqual(w / 1e9, 1.0, places=6)
        # One bucket is behind backward whole; many small ones hide but for the last.
        self.assertAlmostEqual(behind(1, 10**7, 20.0, o, w), 10.05)
        self.assertAlmostEqual(behind(10, 10**7, 20.0, o, w), 1.05)
        # Where a bucket is sent for as long as the next is computed: s / (n w) + n o, as the handout has it.
        self.assertAlmostEqual(behind(10, 10**7, 10.0, o, w), 1.0 + 10 * 0.05)
        self.assertAlmostEqual(10**7 / handout_optimum(10**7, o, w), 200**0.5)
        self.assertEqual(optimum(10**7, 10.0, o, w), 14)
        # Where sending takes longer than backward: n = sqrt(T / o).
        self.assertAlmostEqual(behind(4, 10**7, 5.0, o, w), 5.0 / 4 + 10.0 + 4 * 0.05 - 5.0)
        self.assertEqual(optimum(10**7, 5.0, o, w), 10)
        # On GPUs they are how long calls ran, of which a host has no part.
        watched = {"ms": [0.2, 1.1, 10.1], "device_ms": [0.15, 1.05, 10.05]}
        self.assertAlmostEqual(fitted({"bytes": [10**5, 10**6, 10**7]} | watched)[0], 5e-5, places=9)
        self.assertNotEqual(fit_words({"c": {"ms": []}}), fit_words({"c": watched}))
        # A fit below 0 is one without o.
        self.assertEqual(fitted({"bytes": [10**6, 10**7], "ms": [0.5, 10.0]})[0], 0.0)

    def test_model_and_floor_of_a_way_are_its_own(self):
        links = {("c_nccl", False): {"bytes": [10**5, 10**6, 10**7], "ms": [0.15, 1.05, 10.05]}}
        runs = []
        for dtype, times in (("f32", 1.0), ("bf16_mixed", 2.0)):
            for strategy, more in (("naive", {}), ("bucketed", {"bucket_mb": 5})):
                record = self.run_of(strategy, [6.0], [9.0])
                record["impl"], record["case"]["dtype"] = "c_nccl", dtype
                record["case"] |= more
                record["values"] = {
                    "step": 12.0 * times, "without": 6.5, "exposed": 12.0 * times - 6.5, "tail": 5.0,
                    "collectives": 8.0, "beside": 2.0, "calls": 2, "bytes": 10**7,
                }  # fmt: skip
                runs.append(record)
        rows = predictions(runs, links)
        self.assertEqual(len(rows), 2)
        # Forward 1, backward 4.5, and 1 ms of updates; 10 ms by the fit, 8 as they ran.
        self.assertAlmostEqual(rows[0]["floor"]["floor (ms)"], 1.0 + 8.0 + 0.5)
        self.assertAlmostEqual(rows[0]["model"]["behind backward, model (ms)"], 4.5 / 2 + 10.1 - 4.5)
        self.assertAlmostEqual(rows[0]["model"]["model / step"], (6.5 + 7.85) / 12.0)
        said = words_of(runs, links)["bucketed"]
        self.assertIn("steps are 1.20 times those measured", said)  # and not those of bf16_mixed

    def test_a_ratio_without_turns_is_of_medians(self):
        case = dict(size="x", dtype="f32", optimizer="sgd", ranks=2, strategy="naive")
        times = Records(
            {"impl": impl, "case": case, "ms": statistics([ms] * 3)}
            for impl, ms in (("c_nccl", 3.0), ("torch_ddp", 4.0))
        )
        self.assertEqual(by_strategy(times)[1]["naive"][0][0], 0.75)

    def test_a_step_stands_beside_each_of_pytorchs_best(self):
        case = dict(size="x", dtype="f32", optimizer="sgd", ranks=2, strategy="bucketed", bucket_mb=25)
        sides = {"c_nccl": 3.0, "torch_ddp": 8.0, "torch_ddp_compiled": 6.0, "torch_ddp_graph": 4.0}
        times = Records(
            {"impl": impl, "case": case, "ms": statistics([ms] * 3)} for impl, ms in sides.items()
        )
        frame, _ = by_strategy(times)
        self.assertEqual(
            compiled_words(frame),
            ", and 0.50 times its compiled one, and 0.75 times that one captured as a graph",
        )
        self.assertEqual(compiled_words(by_strategy(Records(times.records[:2]))[0]), "")

    def test_what_nccl_was_told_is_said_by_records(self):
        def record(mb, impl="c_nccl", **more):
            case = dict(dtype="bf16", strategy="bucketed", bucket_mb=mb)
            return {"impl": impl, "case": case, "ms": statistics([1.0])} | more

        told = record(100, config={"nccl_ctas": 24})
        said = nccl_words(Records([told, record(100, "torch_ddp")]), [])
        self.assertIn("multiprocessors: 24 in bf16 (", said)
        self.assertNotIn("windows", said)
        said = nccl_words(Records([told, record(25), record(25, config={"graph": True})]), [])
        self.assertIn("multiprocessors: 24 in bf16 bucketed with 100 MiB (", said)
        naive = told | {"case": dict(dtype="bf16", strategy="naive")}
        self.assertIn(": 24 in bf16 naive (", nccl_words(Records([naive, record(25)]), []))
        unsaid = Records([record(25, config={"graph": True})])
        self.assertIn("Records do not say", nccl_words(unsaid, []))
        self.assertIn("lie in windows", nccl_words(unsaid, [{"values": {"windows": 1}}]))
        self.assertIn("lie in windows", nccl_words(Records([record(25, values={"windows": 1})]), []))

    def test_what_nccl_was_told_of_state_that_is_split(self):
        def record(shard, impl="c_nccl", **more):
            return {
                "impl": impl,
                "case": dict(dtype="f32", shard=shard, bucket_mb=25),
                "ms": statistics([1.0]),
            } | more

        flat = record("flat", config={"nccl_ctas": 16})
        whole = record("flat", "c_nccl_whole", config={"nccl_ctas": 8})
        said = nccl_words_of_shard(Records([flat, record("tensors"), whole, record("flat", "torch_zero")]))
        self.assertEqual(said.count("multiprocessors: 16 in f32 flat with 25 MiB ("), 1)
        self.assertNotIn(" 8 in", said)
        self.assertNotIn("windows", said)
        self.assertEqual(nccl_words_of_shard(Records([record("flat")])), "")
        self.assertTrue(
            nccl_words_of_shard(Records([record("flat", values={"windows": 2})])).startswith(
                "C's gradients, and weights"
            )
        )

    def test_steps_are_held_to_the_fit_of_their_bits(self):
        f32, narrow = ({"bytes": [10**6], "ms": [ms]} for ms in (2.0, 1.0))
        fits = [{"impl": "c", "case": {}, "series": f32}, {"impl": "c", "case": {}, "status": "failed"}]
        links = links_of(fits)
        record = {"impl": "c", "case": {"dtype": "bf16_mixed"}}
        self.assertIs(link_of(links, record), f32)
        links = links_of([*fits, {"impl": "c", "case": {"dtype": "bf16"}, "series": narrow}])
        self.assertIs(link_of(links, record), narrow)
        self.assertIs(link_of(links, {"impl": "c", "case": {"dtype": "f32"}}), f32)
        self.assertIsNone(link_of(links, {"impl": "d", "case": {"dtype": "f32"}}))

    def test_strategies_are_ranked_by_each_way(self):
        values = dict(step=1.0, exposed=0.5, collectives=2.0, beside=1.0, calls=3)
        runs = [
            {
                "impl": "c_nccl",
                "case": dict(size="x", dtype=dtype, optimizer="sgd", ranks=2, strategy=strategy),
                "values": values | {"step": ms},
            }
            for dtype, steps in (
                ("f32", (9.0, 8.0, 7.0, 6.0)),
                ("bf16", (9.0, 6.0, 7.0, 5.0)),
                ("tf32", (1.0,)),
            )
            for strategy, ms in zip(STRATEGIES, steps, strict=False)
        ]
        f32, bf16 = order_words(runs)  # and none of what has not run whole
        self.assertIn("x, f32, 2 ranks", f32)
        self.assertIn("naive > flat > overlap > bucketed holds", f32)
        self.assertIn("naive 9.0 > overlap 7.0 > flat 6.0 > bucketed 5.0; ", bf16)
        self.assertIn(
            "does not hold: `naive` sends 3 calls, 50 % of their time beside backward, 0.5 ms", bf16
        )

    def test_the_spread_of_steps_is_the_largest_of_each_side(self):
        case = dict(size="x", dtype="f32", optimizer="sgd", ranks=2, strategy="naive")
        samples = {"c_mpi": [3.0, 3.0], "c_nccl": [9.0, 11.0], "torch_ddp": [8.0, 12.0]}
        times = Records(
            {"impl": impl, "case": case, "ms": statistics(values)} for impl, values in samples.items()
        )
        times.records.append({"impl": "c", "case": case, "status": "unsupported"})
        times.records.append(
            times.records[2] | {"case": case | {"strategy": "flat"}, "ms": statistics([1.0, 9.0])}
        )
        self.assertEqual(varied(times, "naive"), "std / mean up to 14 % in C, 28 % in PyTorch")

    def test_the_share_that_overlaps_is_of_intervals(self):
        series = {"0 passes": [1.0, 5.0, 8.0], "0 begin": [2.0, 3.0, 6.0], "0 end": [4.0, 5.5, 7.0]}
        self.assertAlmostEqual(overlapped(series, 0), 3.0 / 4.5)  # 2 to 5.5 and 6 to 7, of which 2 to 5
        self.assertEqual(overlapped(series | {"0 begin": [6.0], "0 end": [7.0]}, 0), 0.0)
        self.assertEqual(overlapped(series | {"0 begin": [], "0 end": []}, 0), 0.0)

    def test_a_timeline_is_drawn_with_a_row_for_each_rank_and_its_collectives(self):
        records = [self.run_of("naive", [6.0], [9.0]), self.run_of("bucketed", [3.0, 5.0], [4.0, 6.0])]
        records[1]["case"]["bucket_mb"] = 4
        with tempfile.TemporaryDirectory() as folder:
            page = Page("ddp", Path(folder), "md")
            report_overlap(page, records)
            drawing = (Path(folder) / "ddp_timeline.svg").read_text()
        for words in ("rank 0", "rank 0, sent", "naive", "bucketed, 4 MiB", "collective"):
            self.assertIn(words, drawing)
        table = "".join(page.blocks)
        self.assertRegex(table, r"\| naive \| +\| 0 % \|")
        self.assertIn("| 75 % |", table)  # 1 of 1 ms before 5.5, and half of the other

    def run_of(self, strategy, begin, end):
        case = dict(size="x", dtype="f32", optimizer="sgd", ranks=1, strategy=strategy)
        series = {"0 passes": [1.0, 5.5, 10.0], "0 begin": begin, "0 end": end}
        return {"impl": "c_mpi", "case": case, "series": series}


class SplitState(unittest.TestCase):
    def test_a_split_step_stands_beside_the_whole_one_of_its_run(self):
        case = dict(size="x", dtype="f32", ranks=2, bucket_mb=25, shard="flat")
        sides = {"c_nccl": 3.0, "c_nccl_whole": 4.0, "torch_zero": 6.0}
        times = Records(
            {"deliverable": "a", "impl": impl, "case": case, "ms": statistics([ms] * 3)}
            for impl, ms in sides.items()
        )
        frame, ratios, of_whole = by_kind(times)
        self.assertEqual(([r for r, _ in ratios], [r for r, _ in of_whole]), ([0.5], [0.75]))
        self.assertEqual(frame["c_nccl / c_nccl_whole"].tolist(), [0.75])
        times.records.append(times.records[0] | {"case": case | {"shard": "tensors"}})  # of another run
        self.assertEqual(len(by_kind(times)[2]), 1)
        self.assertTrue(is_unfused(times))
        times.records[2]["config"] = {"fused": True}
        self.assertFalse(is_unfused(times))


if __name__ == "__main__":
    unittest.main()
