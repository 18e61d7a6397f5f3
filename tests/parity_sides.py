"""What is compared with several sides of PyTorch, where the first, the best and the worst of them differ."""

import contextlib
import io
import unittest
from types import SimpleNamespace

import torch
from parity_writeup import timed
from rich.console import Console

from parity.core import Case, verdict
from parity.core.allowance import SAME, Orders, allow
from parity.core.judge import judge
from parity.core.sweep import Item
from parity.core.view import Records
from parity.core.writeup import Machine
from parity.shard import full_page
from parity.shared import diverge

SIDES = {"torch_fsdp": 30.0, "torch_fsdp_compiled": 20.0, "torch_eager": 40.0}


class Sides(unittest.TestCase):
    def test_times_are_compared_with_the_fastest(self):
        times = SIDES | {full_page.MINE[0]: 10.0}
        row = verdict.Row()
        records = [timed(impl, [ms] * 5) for impl, ms in times.items()]
        verdict._add_times(row, SimpleNamespace(name="step"), records)
        self.assertEqual(row.fastest, [(0.5, f"step ({full_page.MINE[0]})")])
        case = {"warmup": 1, "layers": 2, "d_model": 8, "context": 4}
        told = full_page.timed_of(
            Records([record | {"case": case, "deliverable": "fsdp_accounting"} for record in records])
        )
        self.assertEqual((told["theirs"], told["compiled"]), (20.0, True))

    def test_the_slowest_case_is_told(self):
        items, records, out = [], [], io.StringIO()
        for ms in (2.0, 4.0, 1.0):
            items.append(Item("ops", "parity.ops", Case("operations", ms=ms)))
            of = dict(module="ops", deliverable="operations", case=items[-1].case.keys)
            records += [timed("c", [ms]) | of, timed("torch_eager", [2.0]) | of]
        verdict.say(items, records, Console(file=out, soft_wrap=True))
        self.assertIn("at worst: 2.00 times its time, ops/operations/ms=4.0 (c)", out.getvalue())

    def test_a_shared_gpu_is_the_last_choice(self):
        names = ["h100_shared", "cpu", "local", "h200x2", "h100"]
        self.assertEqual([Machine(name, []).rank() for name in names], [0, 1, 2, 3, 4])

    def test_the_limit_is_of_the_largest_error_of_a_side(self):
        torch.manual_seed(0)
        truth = torch.ones(64, 64, dtype=torch.float64)
        first, second = torch.randn_like(truth).sign() * 2e-4, torch.randn_like(truth).sign() * 3e-4
        first[32:], second[:32] = 0, 0  # so that a limit of the norm is below the limits of the elements
        torchs = [(truth + error).float() for error in (first, second)]
        limit = allow(truth, torchs, Orders([], truth), torch.float32)
        self.assertAlmostEqual(limit.norm / (SAME * 3e-4 * 0.5**0.5), 1, places=2)
        every = first + second
        one = torch.zeros_like(truth)
        one[40, 5] = limit.elements[40, 5]
        for term, error in (("norm", every * limit.norm / every.square().mean().sqrt()), ("element", one)):
            for factor, holds in ((0.99, True), (1.01, False)):
                with self.subTest(term=term, factor=factor):
                    sides = {"c": {"o": (truth + factor * error).float()}}
                    sides |= {f"torch_{i}": {"o": answer} for i, answer in enumerate(torchs)}
                    found = judge(sides, {"o": truth}, {}, "torch_0")["c"]
                    self.assertEqual(found.passed, holds, found.complaints)
                    self.assertAlmostEqual(found.error()["used"], factor, places=2)

    def test_the_first_wrong_output_is_of_the_step_and_not_of_the_first_rank(self):
        def rank(wrong):
            outputs = {
                name: {"used": 9.0 if name == wrong else 0.1, "rel_l2": 1.0, "max_abs": 1.0} for name in "abc"
            }
            return {"error": {"outputs": outputs}, "message": f"{wrong}: far off"}, outputs

        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            options = SimpleNamespace(all=False, size="tiny", dtype="f32")
            diverge.say([rank("c"), rank("b")], options, Console(width=200))
        self.assertIn("The first of rank 1: b", out.getvalue())


if __name__ == "__main__":
    unittest.main()
