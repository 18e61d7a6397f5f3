"""libtandem through cffi: names, structs, tensors, errors and freeing, with a library built for the test.

If TANDEM_LIBRARY is set, the real library must also load with every prototype of the headers.
"""

import contextlib
import io
import os
import re
import runpy
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import parity_double
import torch

from parity.core.case import Case
from parity.shared.model import quick_start
from parity.shared.ranked import switches_of
from tandem import builds, device, doctor
from tandem.library import ROOT, Library, TandemError, default_library, openmp_runtimes


class FakeLibrary(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.library = Library(parity_double.build(Path(cls.folder.name)))

    def setUp(self):
        self.c = self.enterContext(self.library.open())
        self.x = torch.arange(4, dtype=torch.float32)
        self.y = torch.zeros(4)
        self.shape = self.c.struct("td_fake_shape", count=4)

    def test_tensors_are_passed_without_a_copy(self):
        self.c.td_fake_scale(self.c.device, self.shape, self.x, self.y)
        self.assertEqual(self.y.tolist(), [0.0, 0.5, 1.0, 1.5])

    def test_a_tensor_that_does_not_fit_is_refused(self):
        for tensor, words in (
            (torch.zeros(4, dtype=torch.float64), "argument 4: a tensor of torch.float64, needs float"),
            (torch.zeros(4, dtype=torch.bfloat16), "bfloat16"),
            (torch.zeros(4, 2)[:, 0], "contiguous"),
            (torch.zeros(4, device="meta"), "on meta"),
        ):
            with self.subTest(words=words), self.assertRaisesRegex((TypeError, ValueError), words):
                self.c.td_fake_scale(self.c.device, self.shape, self.x, tensor)
        with self.assertRaisesRegex(TypeError, "argument 2: a tensor of torch.float32, needs td_fake_shape"):
            self.c.td_fake_scale(self.c.device, self.x, self.x, self.y)  # only a struct of the same kind

    def test_a_bound_call_has_its_arguments_already(self):
        call = self.c.bound("td_fake_scale", self.c.device, self.shape, self.x, self.y)
        self.assertEqual(self.y.tolist(), [0.0] * 4)
        self.x[1] = 8
        self.assertIsNone(call())
        self.assertEqual(self.y.tolist(), [0.0, 4.0, 1.0, 1.5])
        with self.assertRaisesRegex(TandemError, "td_fake_scale: TD_BAD_ARGUMENT: x or y is NULL"):
            self.c.bound("td_fake_scale", self.c.device, self.shape, None, self.y)()
        with self.assertRaisesRegex(TypeError, "takes 4 arguments, got 1"):
            self.c.bound("td_fake_scale", self.x)

    def test_a_failure_carries_the_library_s_words(self):
        with self.assertRaisesRegex(TandemError, "td_fake_scale: TD_BAD_ARGUMENT: x or y is NULL") as caught:
            self.c.td_fake_scale(self.c.device, self.shape, None, self.y)
        self.assertEqual(caught.exception.status, "TD_BAD_ARGUMENT")

    def test_unknown_names(self):
        with self.assertRaisesRegex(AttributeError, "libtandem has no td_nothing"):
            self.c.td_nothing()
        with self.assertRaisesRegex(AttributeError, "neither a helper"):
            self.c.nothing()
        with self.assertRaisesRegex(TypeError, "no field counts"):
            self.c.struct("td_fake_shape", counts=4)
        with self.assertRaisesRegex(ValueError, "'f8' names 0 constants of td_dtype: TD_F64"):
            self.c.struct("td_fake_shape", dtype="f8")

    def test_structs_are_filled_by_name(self):
        case = Case(
            "d", count=7, dtype="f16", order="torch", causal=True, attention="flash", layers=3, heads=5
        )
        self.assertEqual(self.describe(case), "7 2 7 0 1 flash 3 5")
        self.assertEqual(self.describe(case, factor=0.25, causal=False), "7 2 7 0.25 0 flash 3 5")
        self.assertEqual(self.describe(case, size={"layers": 9}), "7 2 7 0 1 flash 9 5")
        self.assertEqual(self.describe({"dtype": "bf16", "size": "small"}), "0 3 0 0 0 NULL 0 0")
        self.assertEqual(self.describe(None, order="course2025"), "0 0 0 0 0 NULL 0 0")

    def describe(self, case, **fields):
        text = self.c.ffi.new("char[200]")
        shape = self.c.struct("td_fake_shape", case, **fields)
        self.c.td_fake_describe(shape, text, 200)
        return self.c.ffi.string(text).decode()

    def test_enums_by_name(self):
        self.assertEqual(self.c.enum("td_dtype", "bf16"), 3)
        self.assertEqual(self.c.enum("td_dtype", "f16"), 2)
        self.assertEqual(self.c.TD_BF16, 3)

    def test_work_is_aligned_counted_and_seen(self):
        self.assertEqual(self.c.bytes_peak(), 0)
        block = self.c.work(1000)
        self.assertEqual(int(self.c.ffi.cast("uintptr_t", block)) % 256, 0)
        self.assertEqual(self.c.bytes_peak(), 1000)
        self.assertIsNone(self.c.work(0))
        view = self.c.tensor(block, (5, 5), "f32")
        view.fill_(2.0)
        self.assertEqual(self.c.ffi.cast("float *", block)[24], 2.0)
        self.assertTrue(self.c.on_device(view))
        self.assertFalse(self.c.on_device(self.x))
        self.assertEqual(self.c.tensor(block, (0, 3), "f32").shape, (0, 3))
        self.c.free(block)
        self.assertFalse(self.c.on_device(view))  # other memory may have the address now
        self.c.work(100)
        self.assertEqual(self.c.bytes_peak(), 1000)
        self.c.free(None)

    def test_another_side_has_a_device_of_its_own(self):
        self.assertIs(self.c.side("c"), self.c)
        other = self.c.side("c_naive")
        self.assertIs(self.c.side("c_naive"), other)
        other.work(500)
        self.assertEqual((self.c.bytes_peak(), other.bytes_peak()), (0, 500))

    def test_created_objects_are_destroyed_with_the_case(self):
        with self.library.open() as c:
            c.create("td_fake_create", c.device)
            c.side("c_naive").create("td_fake_create", c.device)
            self.assertEqual(c.td_fake_live(), 2)
        self.assertEqual(self.c.td_fake_live(), 0)
        with self.assertRaisesRegex(ValueError, "is no _create"):
            self.c.create("td_fake_scale")

    def test_callbacks(self):
        seen = []

        @self.c.ffi.callback("td_fake_ready")
        def ready(_, number):
            seen.append(number)
            return self.c.enum("td_status", "ok" if number < 2 else "unsupported")

        with self.assertRaisesRegex(TandemError, "TD_UNSUPPORTED"):
            self.c.td_fake_each(5, ready, None)
        self.assertEqual(seen, [0, 1, 2])

    def test_one_openmp_and_one_number_of_threads(self):
        self.assertEqual(len(openmp_runtimes()), 1, openmp_runtimes())
        for threads in (2, 1):
            self.library.set_threads(threads)
            self.assertEqual((torch.get_num_threads(), self.c.td_cpu_threads()), (threads, threads))

    def test_an_openmp_runtime_of_its_own_gets_pytorchs_threads(self):
        torch.set_num_threads(3)
        self.addCleanup(torch.set_num_threads, 1)
        with self.assertWarnsRegex(UserWarning, "two OpenMP runtimes"):
            own = Library(parity_double.build(Path(self.folder.name), "FAKE_OWN_THREADS"))
        self.assertEqual((own.lib.td_cpu_threads(), torch.get_num_threads()), (3, 3))

    def test_a_package_loads_the_best_build_that_the_processor_can_run(self):
        built = Path(self.folder.name) / "built"
        with patch.object(builds, "BUILDS", built), patch.dict(os.environ, TANDEM_LIBRARY="/named.so"):
            self.assertEqual(default_library(), Path("/named.so"))
            del os.environ["TANDEM_LIBRARY"]
            self.assertEqual(default_library(), ROOT / "build/default/impl/libtandem.so")
            for name in ("x86-64-v3", "x86-64-v4"):
                (built / name).mkdir(parents=True)
            for flags, chosen in (
                (builds.NEEDS["x86-64-v4"], "x86-64-v4"),
                (builds.V3 | {"avx512f"}, "x86-64-v3"),
            ):
                with patch.object(builds, "flags", lambda flags=flags: flags):
                    self.assertEqual(default_library(), built / chosen / "lib/libtandem.so")
            with (
                patch.object(builds, "flags", lambda: builds.V3 - {"fma"}),
                self.assertRaisesRegex(RuntimeError, "lacks fma.*TANDEM_PACKAGE_MARCH=native"),
            ):
                default_library()

    def test_the_doctor_says_what_is_broken_and_the_rest(self):
        with patch.dict(os.environ, TANDEM_LIBRARY="/none/libtandem.so", WORLD_SIZE="7"):
            device.library.cache_clear()
            self.addCleanup(device.library.cache_clear)
            page = doctor.report()
        self.assertRegex(page, "library +FileNotFoundError: no library at /none/libtandem.so")
        self.assertRegex(page, f"torch +{re.escape(torch.__version__)}.*\n(.*\n)*environment .*WORLD_SIZE=7")

    def test_a_quick_start_gives_the_threads_back(self):
        self.library.set_threads(2)
        for name, most in (("cpu", 2), ("cuda:0", 5)):
            with (
                patch.object(self.c, "on", SimpleNamespace(name=name)),
                patch("os.sched_getaffinity", lambda _: range(11)),
                self.assertRaises(KeyError),
                quick_start(self.c, 2),
            ):
                self.assertEqual(self.c.td_cpu_threads(), most)
                raise KeyError
            self.assertEqual(self.c.td_cpu_threads(), 2)

    def test_a_library_that_is_not_there(self):
        with self.assertRaisesRegex(FileNotFoundError, "no library at .*: build it with cmake --preset"):
            Library(Path(self.folder.name) / "none.so")
        alone = Path(self.folder.name) / "alone.so"
        alone.touch()
        with self.assertRaisesRegex(FileNotFoundError, "no prototypes of the library at .*alone.cdef"):
            Library(alone)

    def test_a_library_of_other_headers_is_refused(self):
        for define, theirs in (('FAKE_INTERFACE="0123"', "0123"), ("FAKE_UNNAMED", "unknown")):
            other = parity_double.build(Path(self.folder.name), define)
            words = rf"cdef is of another library than {other} \(interface {theirs}\): build both again"
            with self.assertRaisesRegex(RuntimeError, words):
                Library(other)


class RealLibrary(unittest.TestCase):
    @unittest.skipUnless("TANDEM_LIBRARY" in os.environ, "TANDEM_LIBRARY names no library")
    def test_it_loads_and_answers(self):
        library = Library(Path(os.environ["TANDEM_LIBRARY"]))
        library.set_threads(2)
        self.assertEqual(len(openmp_runtimes()), 1, openmp_runtimes())
        with library.open() as c:
            self.assertEqual(c.ffi.string(c.td_device_name(c.device)), b"cpu")
            with self.assertRaisesRegex(TandemError, "TD_BAD_ARGUMENT"):
                c.value("td_dtype_parse", "f8")
            self.assertEqual(c.value("td_dtype_parse", "bf16"), c.TD_BF16)
            c.work(10_000)
            self.assertEqual(c.bytes_peak(), 10_000)
            missing = [name for name in dir(library.lib) if not _exported(library.lib, name)]
            self.assertEqual(missing, [])

    @unittest.skipUnless("TANDEM_LIBRARY" in os.environ, "TANDEM_LIBRARY names no library")
    def test_ranks_of_parity_have_the_sms_of_the_program(self):
        with Library(Path(os.environ["TANDEM_LIBRARY"])).open() as c:
            for dtype in ("f32", "tf32", "bf16", "f16", "bf16_mixed"):
                (switches,) = switches_of("cuda", dtype).values()
                self.assertEqual(switches.get("nccl_ctas", 0), c.td_ddp_nccl_ctas(dtype))
                for shard in ("flat", "full"):
                    (switches,) = switches_of("cuda", dtype, shard=shard).values()
                    self.assertEqual(switches.get("nccl_ctas", 0), c.td_shard_nccl_ctas(dtype))

    @unittest.skipUnless("TANDEM_LIBRARY" in os.environ, "TANDEM_LIBRARY names no library")
    def test_an_operation_end_to_end(self):
        with Library(Path(os.environ["TANDEM_LIBRARY"])).open() as c:
            case = Case("d", batch=1, m=3, n=5, k=7, trans_b=True, dtype="f32")
            shape = c.struct("td_gemm_shape", case, alpha=1.0, out_dtype="f32")
            a, b = torch.randint(-4, 5, (3, 7)).float(), torch.randint(-4, 5, (5, 7)).float()
            y = torch.full((3, 5), float("nan"))
            c.td_gemm(c.device, shape, a, b, y, c.work(c.value("td_gemm_work_bytes", c.device, shape)))
            self.assertTrue(torch.equal(y, a @ b.T))
            self.assertEqual(c.struct("td_hyperparameters", {}, kind=1).kind, 1)


def _exported(lib, name):
    try:
        getattr(lib, name)
    except AttributeError:
        return False
    return True


@unittest.skipUnless(os.environ.get("TANDEM_LIBRARY"), "TANDEM_LIBRARY names no library")
class Examples(unittest.TestCase):
    def test_the_examples_of_the_readme_run(self):
        root = Path(__file__).resolve().parents[1]
        for name, words in (("records.py", "torch_flash"), ("call.py", "C and PyTorch agree")):
            with contextlib.chdir(root), contextlib.redirect_stdout(io.StringIO()) as said:
                runpy.run_path(str(root / "examples" / name))
            self.assertIn(words, said.getvalue())


if __name__ == "__main__":
    unittest.main()
