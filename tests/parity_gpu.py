"""The device layer on a GPU. As a program it exits with 77 if there is no GPU; with TD_REQUIRE_GPU set it fails."""

import os
import sys
import unittest
from pathlib import Path

import torch

from parity.core import clock
from parity.core.case import Side
from parity.core.device import open_device
from parity.core.draw import Draw
from tandem.library import Library


def setUpModule():
    if not torch.cuda.is_available():
        raise unittest.SkipTest("PyTorch sees no CUDA device")


class Gpu(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.device = open_device("cuda")

    def test_draws_are_the_cpu_s(self):
        draw = Draw("case", self.device.torch)
        x, y = draw.normal("x", (5, 7), "bf16"), draw.poisoned((5, 7), "f32")
        self.assertEqual((x.device.type, y.device.type), ("cuda", "cuda"))
        self.assertTrue(torch.equal(x.cpu(), Draw("case").normal("x", (5, 7), "bf16")))
        self.assertTrue(bool(y.isnan().all()))
        y.fill_(1.0)
        self.assertEqual(draw.complaints(), [])
        torch.as_strided(y, (36,), (1,))[35] = 0.0
        self.assertEqual(len(draw.complaints()), 1)

    def test_events_time_a_call(self):
        x = torch.randn(4096, 4096, device=self.device.torch)
        once, twice = (
            clock.statistics(
                clock.time_sides(
                    {"torch": Side(lambda n=n: [x @ x for _ in range(n)])}, repeats=10, device=self.device
                )["torch"].samples
            )["median"]
            for n in (5, 10)
        )
        self.assertAlmostEqual(twice / once, 2, delta=0.3)

    def test_peaks_agree_with_the_allocator(self):
        x = torch.randn(1024, 1024, device=self.device.torch)
        peak = self.device.peak_of_torch(lambda: (x + 1).sum())
        self.assertTrue(0 <= peak["peak"] - x.nbytes <= 2048, peak)
        self.assertTrue(0 <= peak["requested"] - x.nbytes <= 2048, peak)

    def test_precision_is_the_case_s(self):
        x = torch.randn(512, 512, device=self.device.torch)
        errors = {}
        for dtype in ("tf32", "f32"):
            self.device.precision(dtype)
            errors[dtype] = float(((x @ x).double() - x.double() @ x.double()).norm())
        self.assertGreater(errors["tf32"], 50 * errors["f32"])

    @unittest.skipUnless("TANDEM_LIBRARY" in os.environ, "TANDEM_LIBRARY names no library")
    def test_c_works_on_the_same_stream_and_memory(self):
        with Library(Path(os.environ["TANDEM_LIBRARY"])).open(self.device) as c:
            self.assertEqual(c.ffi.string(c.td_device_name(c.device)), b"cuda:0")
            x = torch.arange(1000, device=self.device.torch, dtype=torch.float32)
            y = torch.empty_like(x)
            c.td_device_copy(c.device, y, x, x.nbytes)
            self.assertTrue(torch.equal(x, y))
            block = c.work(4000)
            c.td_device_copy(c.device, block, x, x.nbytes)
            for dtype in ("f32", "bf16"):
                seen = c.tensor(block, (4000 // (4 if dtype == "f32" else 2),), dtype)
                self.assertEqual(seen.device, x.device)
            self.assertTrue(torch.equal(c.tensor(block, (1000,), "f32"), x))
            self.assertEqual(c.bytes_peak(), 4000)
            with self.assertRaisesRegex(ValueError, "a tensor on cpu, C's device is cuda:0"):
                c.td_device_copy(c.device, y, x.cpu(), x.nbytes)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("skipped: PyTorch sees no CUDA device")
        sys.exit(1 if os.environ.get("TD_REQUIRE_GPU") else 77)
    unittest.main()
