"""What is compared with several sides of PyTorch, where the first, the best and the worst of them differ."""

import io
import unittest
from pathlib import Path

import torch
from parity_writeup import timed
from rich.console import Console

from parity.core import Case, verdict
from parity.core.allowance import SAME, Orders, allow
from parity.core.judge import judge
from parity.core.sweep import Item
from parity.core.writeup import Machine


class Sides(unittest.TestCase):
    def test_what_a_run_ends_with(self):
        items, records, out = [], [], io.StringIO()

        def ran(module, n, **sides):
            items.append(Item(module, f"parity.{module}", Case("d", n=n)))
            of = dict(module=module, deliverable="d", case=items[-1].case.keys)
            records.extend(timed(impl, [ms]) | of | more for impl, (ms, more) in sides.items())

        paired = {"ratio": {"over": "torch_eager", "median": 0.25}}
        failed, lost = ({"status": status, "message": f"{status}!"} for status in ("failed", "oom"))
        ran("ddp", 1, c_gloo=(8.0, {}), c_mpi=(2.0, failed), torch_ddp=(4.0, {}))
        ran("ddp", 2, c_gloo=(5.0, {"measure": "time"}), torch_ddp=(1.0, lost))
        ran("ops", 3, c=(2.0, paired), torch_eager=(4.0, {}), torch_compile=(1.0, {}))
        ran("ops", 4, c=(9.0, {}), torch_eager=(3.0, {}), c_flash=(12.0, paired | {"measure": "time"}))
        ran("ops", 5, c=(1.0, {"message": "not judged: torch_eager is oom"}))
        ran("ops", 6, c=(1.0, {"measure": "time", "timed": 1}), torch_eager=(2.0, lost))
        ran("ddp", 8, c_gloo=(1.0, {"measure": "time"}), c_nccl=(1.0, failed))
        ran("ops", 7, c=(1.0, lost), torch_eager=(2.0, {}))
        console = Console(file=out, soft_wrap=True)
        bad = [verdict.say(items, records, console, Path("P")), verdict.say([], [], console)]
        wanted = """module cases hold C / eager PyTorch C / fastest PyTorch ops 3 of 5 0.57 2.88 ddp 0 of 3 2.00
            all 3 of 8 0.57 2.63 not judged, only measured: 1 of ops, 1 of ddp C against the fastest PyTorch at worst:
            4.00 times its time, ops/d/n=4 (c_flash) tables and pictures: P failed: ddp/d/n=1 c_mpi: failed! failed:
            ddp/d/n=8 c_nccl: failed! 2 results are bad, from the lowest module up: 2 of ddp. Begin with ddp/d/n=1
            module cases hold C / eager PyTorch C / fastest PyTorch all 0 of 0"""
        self.assertEqual((bad, out.getvalue().split()), ([2, 0], wanted.split()))

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
        for shape in ((), (0, 4)):
            one = torch.ones(shape, dtype=torch.float64)
            self.assertEqual(allow(one, [one], Orders([one, one], one), torch.float32).elements.shape, shape)
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


if __name__ == "__main__":
    unittest.main()
