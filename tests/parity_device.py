"""The device layer without a GPU: the CPU, and a simulated GPU. parity_gpu.py tests a real GPU."""

import math
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

import parity_double
import torch

from parity.bench.drivers import Driver
from parity.core import clock, device, memory
from parity.core.case import Case, Side, within
from parity.core.command import main
from parity.core.device import Cpu, Cuda, DeviceError, DeviceLost, driver_version, kind_of, open_device
from parity.core.draw import Draw
from parity.core.measure import measure_case
from parity.core.worker import with_second
from tandem.library import Library

MIB = 2**20


class Pretended(Cpu):
    """A device with a limited amount of memory, which is only counted: a simulated GPU."""

    kind = "pretended"

    def __init__(self):
        self.log, self.allocated, self.lost = [], 0, False

    def clear_caches(self):
        self.log.append("clear")

    def release(self):
        self.log.append("release")

    def precision(self, dtype):
        self.log.append(f"precision {dtype}")

    def check_alive(self):
        if self.lost:
            raise DeviceLost("an illegal access")

    def held_by_torch(self):
        return {"peak": self.allocated, "requested": self.allocated - 1}

    def peak_of_torch(self, call):
        call()
        return {"peak": 3 * MIB, "requested": 2 * MIB}


class Devices(unittest.TestCase):
    def test_names(self):
        self.assertEqual(open_device("cpu").torch, torch.device("cpu"))
        self.assertEqual((kind_of("cuda:3"), kind_of("cpu")), ("cuda", "cpu"))
        for name in ("gpu", "cuda:", "cuda:x", "cpu:0"):
            with self.assertRaisesRegex(DeviceError, "is no device"):
                open_device(name)

    def test_a_machine_without_a_gpu_says_so(self):
        with (
            mock.patch("torch.cuda.is_available", lambda: False),
            self.assertRaisesRegex(DeviceError, "no CUDA device"),
        ):
            open_device("cuda")
        with (
            mock.patch("torch.cuda.is_available", lambda: True),
            mock.patch("torch.cuda.device_count", lambda: 2),
            self.assertRaisesRegex(DeviceError, "cuda:2 of 2"),
        ):
            open_device("cuda:2")

    def test_the_driver_s_version(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "version"
            for line in (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
            ):
                path.write_text(line)
                self.assertEqual(driver_version(path), "580.95.05")
            with mock.patch.object(device.subprocess, "run", side_effect=OSError):
                self.assertEqual(driver_version(Path(folder) / "none"), "unknown")

    def test_a_gpu_s_words_for_no_memory(self):
        for words in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"):
            self.assertTrue(memory.is_out_of_memory(RuntimeError(words)))
        self.assertFalse(memory.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access")))


class Timing(unittest.TestCase):
    def test_calls_together_share_a_sample(self):
        now, calls = [0], []

        def call():
            calls.append(1)
            now[0] += 2_000_000

        on = Pretended()
        with mock.patch("time.perf_counter_ns", lambda: now[0]):
            timing = clock.time_sides({"c": Side(call)}, warmup=1, repeats=3, device=on, together=4)["c"]
        self.assertEqual((timing.samples, len(calls)), ([2.0] * 3, 1 + 3 * 4))
        self.assertEqual((timing.first_ms, on.log), (2.0, ["clear"]))  # only the warm-up is a call by itself

    def test_caches_are_cleared_after_before_and_outside_the_time(self):
        on = Pretended()
        side = Side(lambda: on.log.append("call"), before=lambda: on.log.append("before"))
        clock.time_sides({"c": side}, warmup=0, repeats=2, device=on)
        self.assertEqual(on.log, ["before", "clear", "call"] * 2)

    def test_the_host_gets_ahead_by_what_the_quickest_call_took_it(self):
        on, leads = Pretended(), []
        on.get_ahead = leads.append
        for warmup, queued, expected in (
            (2, [5000.0, 3.0, 4.0, 2.0, 2.5], [3.0, 3.0, 2.0]),  # the first call compiles
            (0, [5000.0, 3.0, 4.0], [math.inf, 5000.0, 3.0]),
        ):
            calls = iter(queued)
            on.timed_ms = lambda call, together, calls=calls: (1.0, next(calls))
            clock.time_sides({"c": Side(dict)}, warmup=warmup, repeats=3, device=on)
            self.assertEqual(leads, expected)
            leads.clear()
        on.timed_ms = lambda call, together: (1.0, 1.0)
        clock.time_sides({"c": Side(dict)}, repeats=3, device=on, together=2)
        self.assertEqual(leads, [])

    def test_a_gpu_is_kept_busy_meanwhile(self):
        gpu = object.__new__(Cuda)
        with mock.patch("torch.cuda._sleep") as sleep:
            for queue_ms in (0.5, 15.0, 25.0, math.inf):  # the last two are bound by the host
                gpu.get_ahead(queue_ms)
        self.assertEqual(
            [call.args[0] / device.CYCLES_PER_MS for call in sleep.call_args_list], [1.0, device.LEAD_MS]
        )

    def test_a_failure_gives_its_memory_back(self):
        def fail():
            raise RuntimeError("CUDA error: out of memory")

        on = Pretended()
        timing = clock.time_sides({"c": Side(fail)}, repeats=2, device=on)["c"]
        self.assertEqual(on.log, ["clear", "release"])
        self.assertIsNone(timing.failure.__traceback__)

    def test_a_lost_device_ends_the_case(self):
        on = Pretended()

        def fail():
            on.lost = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with self.assertRaises(DeviceLost):
            clock.time_sides({"c": Side(fail)}, repeats=2, device=on)


class Turns(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.library = Library(parity_double.build(folder))

    def measure(self, sides, on, **options):
        options = dict(measure="time memory", repeats=2, in_turn=True) | options
        module = types.SimpleNamespace(__name__="parity.turns", run=lambda case, draw, c: sides)
        records = measure_case(
            module, Case("d", dtype="tf32", **options), self.library, budget=0.01, device=on
        )
        return {record["impl"]: record for record in records}

    def test_sides_are_opened_and_closed_by_themselves(self):
        on, log = Pretended(), []

        def side(name, holds):
            def opened():
                log.append(f"open {name}")
                on.allocated += holds

            def closed():
                log.append(f"close {name}")
                on.allocated -= holds

            return Side(dict, open=opened, close=closed)

        found = self.measure({"c": side("c", 0), "torch_eager": side("torch", 5 * MIB)}, on, together=3)
        self.assertEqual(log, ["open c", "close c", "open torch", "close torch"])
        self.assertEqual(on.log[0], "precision tf32")
        eager = found["torch_eager"]
        self.assertEqual((eager["peak_mib"], eager["requested_mib"]), (3 + 5, 2 + 5))
        self.assertEqual((eager["together"], eager["ms"]["n"]), (3, 2))
        self.assertNotIn("ratio", found["c"], "nothing paired their samples")
        together = self.measure({"c": dict, "torch_eager": dict}, Pretended(), in_turn=False)
        self.assertEqual(together["c"]["ratio"]["over"], "torch_eager")

    def test_a_second_process_that_fails_costs_the_first_one_nothing(self):
        first = {"ms": {"median": 2.0, "n": 3}, "samples": [1.0, 2.0, 3.0], "peak_mib": 7.0}
        ended = dict(first)
        with_second(ended, {"status": "oom", "message": "no room"})
        self.assertEqual(ended, first | {"message": "timed in one process; in a second one: no room"})
        ended = dict(first)
        with_second(ended, None)
        self.assertIn("it left no result", ended["message"])
        slower = dict(first)
        with_second(slower, {"ms": {"median": 4.0, "n": 3}, "samples": [4.0] * 3})
        self.assertEqual(slower, first | {"processes": [2.0, 4.0]})

    def test_a_side_that_does_not_fit_is_closed_and_costs_no_other(self):
        on, log = Pretended(), []

        def full():
            raise RuntimeError("CUDA error: out of memory")

        sides = {"c": Side(dict, open=full, close=lambda: log.append("close")), "torch_eager": Side(dict)}
        found = self.measure(sides, on)
        self.assertEqual((found["c"]["status"], found["torch_eager"]["status"]), ("oom", "ok"))
        self.assertEqual(log, ["close"])
        self.assertNotIn("ms", found["c"])

    def test_a_side_that_needs_more_than_there_is_is_not_run(self):
        sides = {"c": Side(dict, needs_bytes=0), "torch_eager": Side(dict, needs_bytes=2**60)}
        found = self.measure(sides, Pretended())
        self.assertEqual((found["c"]["status"], found["torch_eager"]["status"]), ("ok", "not run"))
        self.assertRegex(found["torch_eager"]["message"], r"needs about 1073741824 GiB, \d+ GiB are")

    def test_errors_are_judged_after_all_turns(self):
        def outputs():
            return {"y": torch.ones(3)}

        sides = {"c": outputs, "torch_eager": outputs, "truth": lambda: {"y": torch.ones(3).double()}}
        found = self.measure(sides, Pretended(), measure="error")
        self.assertEqual((found["c"]["status"], found["c"]["error"]["rel_l2"]), ("ok", 0.0))

    def test_other_orders_are_formed_where_they_judge(self):
        calls = []

        def eager():
            calls.append(1)
            return {"y": torch.ones(3)}

        sides = {"c": lambda: {"y": torch.ones(3)}, "torch_eager": eager}
        sides["truth"] = lambda: {"y": torch.ones(3).double()}
        for rule, count in (({}, 17), ({"y": within(rel_l2=1e-5)}, 1)):
            calls.clear()
            found = self.measure(sides | {"rule": rule}, Pretended(), measure="error", in_turn=False)
            self.assertEqual((found["c"]["status"], len(calls)), ("ok", count))

    def test_a_record_says_what_it_is_judged_against(self):
        def outputs():
            return {"y": torch.ones(3)}

        sides = {"c": outputs, "torch_eager": outputs, "truth": lambda: {"y": torch.ones(3).double()}}
        self.assertNotIn("reference", self.measure(sides, Pretended(), measure="error")["c"])
        sides |= {"torch_tf32": outputs, "reference": "torch_tf32"}
        found = self.measure(sides, Pretended(), measure="error")
        self.assertEqual((found["c"]["status"], found["c"]["reference"]), ("ok", "torch_tf32"))

    def test_a_device_that_is_lost_when_a_side_closes(self):
        on = Pretended()

        def close():
            on.lost = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with self.assertRaises(DeviceLost):
            self.measure({"c": Side(dict, close=close)}, on)

    def test_a_captured_step_says_its_own_peak(self):
        how = dict(begin=None, answer=None, whole=lambda: None)
        driver = mock.Mock(peaks={"peak_mib": 7.0}, switches={"timed": "whole"}, **how)
        side = Driver.side(driver, {"tokens": 1}, flops=1.0)
        found = self.measure({"torch_compile": side}, Pretended(), measure="time")["torch_compile"]
        self.assertEqual((found["values"], found["peak_mib"]), ({"tokens": 1}, 7.0))
        driver.phased.assert_not_called()

    def test_a_stream_is_handed_to_c(self):
        on = Pretended()
        on.stream = lambda: 4711
        with self.library.open(on) as c:
            self.assertEqual(c.td_fake_stream(c.device), 4711)
            other = c.side("c_naive")
            self.assertEqual(other.td_fake_stream(other.device), 4711)
            on.synchronize = mock.Mock()
            c.own_stream(True)
            self.assertEqual((c.td_fake_stream(c.device), on.synchronize.call_count), (0, 1))
            c.own_stream(False)
            self.assertEqual((c.td_fake_stream(c.device), on.synchronize.call_count), (4711, 2))

    def test_dtypes_that_are_more_than_a_dtype(self):
        with self.library.open() as c:
            shape = c.struct("td_fake_shape", Case("d", count=3, dtype="tf32"))
            self.assertEqual((shape.dtype, shape.tf32, shape.precision), (c.TD_F32, True, c.TD_FAKE_TF32))
            shape = c.struct("td_fake_shape", Case("d", count=3, dtype="bf16_mixed"))
            self.assertEqual(
                (shape.dtype, shape.tf32, shape.precision), (c.TD_BF16, False, c.TD_FAKE_BF16_MIXED)
            )
            self.assertEqual(c.enum("td_dtype", "tf32"), c.TD_F32)
        draw = Draw("case")
        self.assertEqual(draw.normal("x", (3,), "tf32").dtype, torch.float32)
        self.assertEqual(draw.quickly("y", (3,), "bf16")().dtype, torch.bfloat16)

    def test_destroying_before_the_case_is_over(self):
        with self.library.open() as c:
            handles = [c.create("td_fake_create", c.device) for _ in range(2)]
            c.destroy(handles[0])
            self.assertEqual(c.td_fake_live(), 1)
        self.assertEqual(self.library.lib.td_fake_live(), 0)


class CommandLine(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def main(self, *arguments):
        return main("parity_double.fakes", [*arguments, "--reports", str(self.folder)])

    def test_one_folder_holds_one_kind_of_device(self):
        machine = self.folder / "here"
        machine.mkdir()
        (machine / "records.jsonl").write_text(
            '{"deliverable": "d", "module": "m", "case": {}, "impl": "c", "status": "ok", "device": "cuda"}\n'
        )
        with mock.patch("sys.stderr") as err:
            self.assertEqual(self.main("run", "--machine", "here"), 2)
        self.assertIn("holds records of cuda", "".join(call.args[0] for call in err.write.call_args_list))

    def test_devices_are_checked(self):
        with mock.patch("sys.stderr"), self.assertRaises(SystemExit):
            self.main("run", "--device", "gpu")


if __name__ == "__main__":
    unittest.main()
