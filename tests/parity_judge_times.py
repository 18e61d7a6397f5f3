"""What judge times and waits for: calls that do not hold, ranks that do not answer, and what a row of times says."""

import contextlib
import ctypes
import itertools
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
from parity_judge_folders import ALL, ATTENTION, adapters_of, here, judged, row

from parity.judge import examinee, right
from parity.judge import times as clocked

SLOW = """
import threading
import time


def later(o):
    value = o.detach().clone()
    o.data.zero_()
    threading.Thread(target=lambda: (time.sleep(0.05), o.data.copy_(value))).start()
    return o
"""
WRONG_TIMES = {  # (text, replacement), what is found of which fact
    "the answers of later calls are kept": row(
        "        return o\n",
        "        COUNT.append(o)\n        return o if len(COUNT) < 5 else COUNT[4]\n",
        "timed calls",
        "[0-9]+ of [0-9]+ unlike PyTorch's",
    ),
    "answers are kept by address": row(
        "        return o\n",
        "        return CACHE.setdefault(q.data_ptr(), o)\n",
        "timed calls",
        "[0-9]+ of [0-9]+ unlike PyTorch's",
    ),
    "later calls are 1 % off": row(
        "        return o\n",
        "        COUNT.append(1)\n        return o if len(COUNT) < 5 else o * 1.01\n",
        "timed calls",
        "[0-9]+ of [0-9]+ unlike PyTorch's",
    ),
    "a thread goes on": row(
        "        return o\n", "        return later(o)\n", "after a call", "[0-9]+ outputs changed"
    ),
    "a buffer is used again": row(
        "        return o\n",
        "        COUNT.append(o)\n        return COUNT[0].data.copy_(o)\n",
        "after a call",
        "[0-9]+ outputs changed",
    ),
    "inputs are written": row(
        "        return o\n", "        v.data.add_(1)\n        return o\n", "inputs", "changed"
    ),
}


class Times(unittest.TestCase):
    def facts(self, text, beside=()):
        x = {name: torch.randn(1, 64, 16) for name in ("q", "k", "v", "do")}
        how = {"adapter": "get_flashattention_autograd_function_pytorch", "pass": "forward", "causal": True}
        request = how | {"sets": 4, "turn": 2, "budget": 0.3, "beside": beside}
        return examinee.times(adapters_of("CACHE, COUNT = {}, []\n" + text), request, x, "cpu")[1]

    def test_what_pytorch_does_holds(self):
        found = self.facts(ATTENTION, ("eager", "fused"))
        timed = found.pop("timed")
        self.assertEqual(found, {name: right.EXPECTED[name] for name in found})
        self.assertGreaterEqual(timed["n"], examinee.FEWEST)
        self.assertGreater(timed["beside"]["fused"], 0)

    def test_each_mistake_is_found_for_its_reason(self):
        for name, (text, new, fact, words) in WRONG_TIMES.items():
            with self.subTest(name):
                self.assertIn(text, ATTENTION)
                self.assertRegex(self.facts(SLOW + ATTENTION.replace(text, new))[fact], words)

    def test_below_the_bound_is_refused_and_stands_in_the_report(self):
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder, "page.md")
            only = "times, forward, 512"
            limits = ["--peak-tflops", "0.0001", "--bandwidth", "1", "--report", str(page)]
            quick = mock.patch.multiple(clocked, SIDES=("fused",), BUDGET_S=0.1, C_BUDGET_S=0.01)
            with here(), contextlib.nullcontext() if ALL else quick:
                status, said, _ = judged(ATTENTION, "--only", only, *limits)
            self.assertEqual(status, 1, said)
            row = "refused: pytorch: flash_benchmarking forward seq 512 head_dim 64 batch 1 heads 1 f32 causal True cpu"
            self.assertRegex(page.read_text(), rf"{row}\n    bound: .* TFLOP at 0.0001 TFLOP/s take")
            self.assertIn("| refused |", page.read_text())
            self.assertNotIn("wrong", said)


class Waiting(unittest.TestCase):
    """Each rank is a shell."""

    def asked(self, script, seconds=0.3):
        how = Path("."), ["sh", "-c", script], seconds
        with right.Processes(*how, ranks=1, device="cpu") as ranks:
            return ranks.ask({}, {})

    def test_a_rank_that_hangs_or_spins_is_ended(self):
        for script in ("sleep 100", "while :; do :; done"):
            with self.assertRaisesRegex(RuntimeError, "rank 0 of 1 did not answer in 0.3 s"):
                self.asked(script)

    def test_a_rank_that_works_on_a_slow_machine_is_waited_for(self):
        with mock.patch.object(right, "busy_s", side_effect=itertools.count(0.0, 0.01)):
            script = """read line; sleep 1; echo '{"facts": {}, "tensors": {}}'"""
            self.assertEqual(self.asked(script), [({}, {})])


class Notes(unittest.TestCase):
    def test_inputs_fill_two_caches(self):
        draw = mock.Mock(
            device=torch.device("cpu"), integers=lambda name, shape, high: torch.tensor([high - 1])
        )
        for mib, sets in ((1, 64), (0.001, 1024), (22, 3), (16, 4)):
            found = clocked.request_of(None, {"q": torch.empty(int(mib * 2**18), device="meta")}, draw)
            self.assertEqual((found["sets"], found["turn"]), (sets, sets - 1))

    def test_a_row_says_what_its_calls_ran_with(self):
        plain = {"settled": True, "compiled": 0, "persisting": 0, "mhz": [None, None]}
        for more, words in (
            ({}, []),
            ({"settled": False, "compiled": 2}, ["has not settled", "compiled in timed calls"]),
            (
                {"persisting": 3 * 2**19, "mhz": [1980, 1980]},
                ["1.5 MiB of L2 are set aside", "clock 1980 MHz"],
            ),
            ({"mhz": [1980, 1755]}, ["clock 1980 to 1755 MHz"]),
        ):
            self.assertEqual(clocked.notes(plain | more), words)

    def test_clock_and_l2_come_from_the_driver_and_the_runtime(self):
        with mock.patch.object(examinee, "CLOCKS", ["echo", "1755"]):
            self.assertEqual(examinee.clock_mhz("cuda"), 1755)
        for unknown in (["/nowhere"], ["echo", "[N/A]"]):
            with mock.patch.object(examinee, "CLOCKS", unknown):
                self.assertIsNone(examinee.clock_mhz("cuda"))
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder, "libcudart.so.13")
            code = "int cudaDeviceGetLimit(unsigned long *size, int limit) { *size = limit == 6 ? 4096 : 0; return 0; }"
            subprocess.run(["cc", "-shared", "-x", "c", "-o", made, "-"], input=code, text=True, check=True)
            ctypes.CDLL(str(made))
            self.assertEqual(examinee.persisting_bytes("cuda"), 4096)
        self.assertEqual(examinee.persisting_bytes("cpu"), 0)


if __name__ == "__main__":
    unittest.main()
