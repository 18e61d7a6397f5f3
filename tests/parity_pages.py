"""The pages of parity/<module>.py are written from whatever records there are: none missing, some, or ends without a
number. Tried on the committed records, and on invented ones of a GPU, thinned and spoiled by a seeded choice."""

import random
import unittest
from pathlib import Path
from unittest.mock import patch

from parity import _bench_gpu_pages, bench
from parity.core import grid, plot, sweep
from parity.core.clock import statistics
from parity.core.record import FILE, load
from parity.core.report import Page
from parity.core.view import Records

COMMITTED = Path(__file__).resolve().parents[1] / "reports" / "cpu" / FILE
MEASURED = """ms error peak_mib requested_mib tflops gb_s samples first_ms ratio values series dtypes lists phases
parts""".split()
TRIALS = 40
# Of every kind that some page reads.
IMPLS = {
    "accounting": ["c", "torch_eager"],
    "precision": ["c", "torch_eager"],
    "ops": ["c", "torch_eager", "torch_compile", "torch_library"],
    "attention": ["c", "torch_eager"],
    "flash": ["c", "c_naive", "torch_eager", "torch_flash", "torch_cudnn", "torch_efficient"],
    "transformer": ["c", "c_graph", "torch_eager", "torch_eager_f32", "torch_eager_seed"],
    "bench": ["c", "c_graph", "c_graph_overlap", "torch_eager", "torch_compile", "torch_compile_graph"],
}
VALUES = """tokens flops account_mib saved_mib matrix_mib flash_mib forward_peak_mib backward_peak_mib end_16_gib
end_24_gib
end_80_gib bytes largest mean product_tflops copy_gb_s floor_products floor_attention floor_optimizer floor_rest
furthest_grad_rel_l2 furthest_weight_rel_l2""".split()


class PagesTest(unittest.TestCase):
    def test_every_page_survives_missing_and_failed_records(self):
        committed = load(COMMITTED).newest()
        self.assertGreater(len(committed), 100)
        for name, module in sweep.discover("parity").items():
            mine = [record for record in committed if record["module"] == name]
            self.assertTrue(mine, f"no record of {name}")
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
                    for impl in IMPLS[name]
                ]
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
        with patch.object(plot, "write"):  # the drawing itself is core's, and slow
            page = Page(name, Path("nowhere"), "csv")
            module.report(page, Records(records))
        self.assertTrue(page.blocks)


class BenchOnAGpu(unittest.TestCase):
    def test_the_grid_is_whole_and_what_matters_most_comes_first(self):
        items = sweep.select({"bench": bench}, "full", device="cuda")
        compiled = [item.case for item in items[:5]]
        self.assertEqual({case.deliverable for case in compiled}, {"torch_compile"})
        self.assertEqual([case.size for case in compiled][:2], ["2.7B", "xl"])
        self.assertTrue(all(case.ahead for case in compiled))
        steps = [item.case for item in items[5:] if item.case["pass"] == "step"]
        found = {(case.dtype, case.size, case.context) for case in steps}
        sizes, dtypes = ["small", "medium", "large", "xl", "2.7B"], ["f32", "tf32", "bf16_mixed"]
        cells = {tuple(keys.values()) for keys in grid(dtype=dtypes, size=sizes, context=bench.CONTEXTS)}
        cold = {("bf16_mixed", size, bench.COLD_CONTEXT) for size in sizes}
        self.assertEqual(found, cells | cold)
        self.assertEqual({case.repeats for case in steps if case.warmup == 0}, {15})

    def test_rows_of_any_warmup_come_from_one_trace(self):
        case = next(case for case in bench.cases("quick", "cuda") if case.warmup == 0)
        record = invented("bench", case, "c")
        record["samples"] = [31.0, 5.0, *[1.0] * 13]
        page = Page("bench", Path("nowhere"), "md")
        _bench_gpu_pages.report_warmup(page, Records([record]))
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
            "c's first step takes 31.00 to 31.00 times as long as its settled ones, 30 to 30 ms more", text
        )


def invented(module, case, impl):
    """A record of a GPU with a number wherever a page may look for one."""
    rng = random.Random(f"{case.name} {impl}")
    found = dict(module=module, deliverable=case.deliverable, case=case.keys, impl=impl, status="ok")
    found |= dict(
        machine="NVIDIA H200", device="cuda", measure=" ".join(case.measure), versions={"cuda": "13.0"}
    )
    if "error" in case.measure:
        found["error"] = {"max_abs": rng.random(), "rel_l2": rng.random(), "ulp_max": 1.0, "truth": "float64"}
    if "time" in case.measure:
        samples = [1 + rng.random() for _ in range(5)]
        found |= {"ms": statistics(samples), "samples": samples, "first_ms": 30.0, "ratio": {"median": 1.0}}
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
    if case.deliverable == "transformer_training":
        found["series"] = {"loss": [5.0 - rng.random() for _ in range(case.steps)]}
    return found


if __name__ == "__main__":
    unittest.main()
