"""The checker checked: wrong answers that judge() must reject, and right ones that it must not."""

import itertools
import math
import unittest

import torch

from parity.core.case import amid, equal, within
from parity.core.draw import Draw
from parity.core.judge import EPS, ProtocolError, judge

torch.set_num_threads(1)  # the tensors are small

F32, BF16 = torch.float32, torch.bfloat16


def normal(name, dtype, *shape):
    return Draw(f"judge/{name}").normal(name, shape, "f32").to(dtype)


class Attention:
    """Causal, [2, 3, 130, 80]."""

    @staticmethod
    def inputs(seed, dtype):
        return [normal(f"{name}{seed}", dtype, 2, 3, 130, 80) for name in "qkv"]

    @staticmethod
    def eager(q, k, v):
        """As PyTorch runs it, in the dtype of its inputs."""
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1) @ v

    @staticmethod
    def kernel(q, k, v, dropped=None):
        """What a good C kernel returns: the sums in another order and in f32, rounded once. A key may be dropped."""
        wide = [tensor.float() for tensor in (q, k.flip(-2), v.flip(-2))]
        scores = wide[0] @ wide[1].transpose(-1, -2) / math.sqrt(q.shape[-1])
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if dropped is not None:
            seen[dropped + 1 :, dropped] = False  # for every later query; its own keeps it, or would see none
        weights = torch.exp(scores.masked_fill(~seen.flip(-1), -math.inf) - scores.amax(-1, keepdim=True))
        return ((weights @ wide[2]) / weights.sum(-1, keepdim=True)).to(q.dtype)


class Product:
    """C = A B, [33, 200] x [200, 65]."""

    @staticmethod
    def inputs(seed, dtype):
        return [normal(f"a{seed}", dtype, 33, 200), normal(f"b{seed}", dtype, 200, 65)]

    @staticmethod
    def eager(a, b):
        return a @ b

    @staticmethod
    def kernel(a, b, dropped=None):
        wide = a.float()
        if dropped is not None:
            wide = wide.index_fill(1, torch.tensor(dropped), 0.0)
        return (wide.flip(1) @ b.float().flip(0)).to(a.dtype)


PROBLEMS = (Attention, Product)


def verdict(answer, torchs, truth, rule=None):
    rules = {} if rule is None else {"o": rule}
    return judge({"c": {"o": answer}, "torch_eager": {"o": torchs}}, {"o": truth}, rules, "torch_eager")["c"]


class RightAnswers(unittest.TestCase):
    def test_another_order_of_summation_passes(self):
        for problem, dtype, seed in itertools.product(PROBLEMS, (F32, BF16), range(20)):
            with self.subTest(problem=problem.__name__, dtype=dtype, seed=seed):
                inputs = problem.inputs(seed, dtype)
                truth = problem.eager(*(tensor.double() for tensor in inputs))
                found = verdict(problem.kernel(*inputs), problem.eager(*inputs), truth)
                self.assertEqual(found.complaints, [])
                self.assertLess(found.error()["rel_l2"], 1e-6 if dtype == F32 else 1e-2)

    def test_nan_and_infinity_where_the_truth_has_them_pass(self):
        truth = torch.tensor([1.0, math.nan, math.inf, -math.inf], dtype=torch.float64)
        found = verdict(truth.float(), truth.float(), truth)
        self.assertEqual(found.complaints, [])
        self.assertEqual(found.error()["rel_l2"], 0.0)

    def test_overflow_of_the_dtype_is_the_infinity_of_the_truth(self):
        truth = torch.tensor([70000.0, -1e9, 1.0], dtype=torch.float64)
        self.assertEqual(verdict(truth.half(), truth.half(), truth).complaints, [])


class WrongAnswers(unittest.TestCase):
    """Each must be refused whatever PyTorch's own error is, in f32 and, where the dtype can show it, in bf16."""

    def refused(self, dtype, spoil, words=""):
        """spoil(answer, problem, inputs) returns a wrong answer; in 10 draws of each problem it must not pass."""
        for problem, seed in itertools.product(PROBLEMS, range(10)):
            with self.subTest(problem=problem.__name__, dtype=dtype, seed=seed):
                inputs = problem.inputs(seed, dtype)
                truth = problem.eager(*(tensor.double() for tensor in inputs))
                good = problem.kernel(*inputs)
                bad = spoil(good.clone(), problem, inputs)
                self.assertFalse(torch.equal(bad, good), "the answer was not spoilt")
                found = verdict(bad, problem.eager(*inputs), truth)
                self.assertFalse(found.passed)
                self.assertIn(words, found.complaints[0])

    def test_dropped_key(self):
        def drop(_, problem, inputs):
            return problem.kernel(*inputs, dropped=29)

        self.refused(F32, drop, "rel_l2")
        self.refused(BF16, drop)

    def test_zeroed_row(self):
        def zero(good, *_):
            good[..., 17, :] = 0
            return good

        self.refused(F32, zero)
        self.refused(BF16, zero)

    def test_one_zeroed_row_of_many(self):
        def zero(good, *_):
            good.view(-1, good.shape[-1])[-1] = 0
            return good

        self.refused(F32, zero)
        self.refused(BF16, zero)

    def test_swapped_rows(self):
        def swap(good, *_):
            rows = good.view(-1, good.shape[-1])
            rows[[20, 21]] = rows[[21, 20]]
            return good

        self.refused(F32, swap)
        self.refused(BF16, swap)

    def test_scale_off_by_a_thousandth(self):
        self.refused(F32, lambda good, *_: good * 1.001, "rel_l2")
        # In bf16 0.1 % is a quarter of the rounding error; 1 % is the least that it can show.
        self.refused(BF16, lambda good, *_: (good.float() * 1.01).to(BF16))

    def test_inputs_rounded_to_bf16(self):
        def coarse(_, problem, inputs):
            return problem.kernel(*(tensor.bfloat16().float() for tensor in inputs))

        self.refused(F32, coarse, "rel_l2")

    def test_probabilities_kept_in_bf16(self):
        for seed in range(10):
            q, k, v = Attention.inputs(seed, F32)
            truth = Attention.eager(q.double(), k.double(), v.double())
            seen = torch.ones(130, 130, dtype=torch.bool).tril()
            scores = (q @ k.transpose(-1, -2) / math.sqrt(80)).masked_fill(~seen, -math.inf)
            answer = torch.softmax(scores, -1).bfloat16().float() @ v
            self.assertFalse(verdict(answer, Attention.eager(q, k, v), truth).passed)

    def test_nan(self):
        def nan(good, *_):
            good.view(-1)[777] = math.nan
            return good

        self.refused(F32, nan, "NaN")
        self.refused(BF16, nan, "NaN")

    def test_infinity(self):
        def inf(good, *_):
            good.view(-1)[777] = math.inf
            return good

        self.refused(F32, inf, "+inf")
        self.refused(BF16, inf, "+inf")

    def test_infinity_of_the_wrong_sign(self):
        truth = torch.tensor([1.0, math.inf], dtype=torch.float64)
        for dtype in (F32, BF16):
            found = verdict(torch.tensor([1.0, -math.inf]).to(dtype), truth.to(dtype), truth)
            self.assertIn("inf", found.complaints[0])
            self.assertEqual(found.error()["max_abs"], math.inf)

    def test_finite_where_the_truth_is_not(self):
        for special in (math.nan, math.inf, -math.inf):
            truth = torch.tensor([1.0, special], dtype=torch.float64)
            self.assertFalse(verdict(torch.tensor([1.0, 3e38]), truth.float(), truth).passed)

    def test_left_poisoned(self):
        def leave(good, *_):
            poison = Draw("poison").poisoned(good.shape, "f32" if good.dtype == F32 else "bf16")
            poison[..., 1:] = good[..., 1:]
            return poison

        self.refused(F32, leave, "never written")
        self.refused(BF16, leave, "never written")

    def test_left_poisoned_where_the_truth_is_nan(self):
        truth = torch.full((4,), math.nan, dtype=torch.float64)
        poison = Draw("poison").poisoned((4,), "f32")
        self.assertIn("never written", verdict(poison, truth.float(), truth).complaints[0])

    def test_transposed(self):
        draw = Draw("judge/transposed")
        a, b = draw.normal("a", (64, 96), "f32"), draw.normal("b", (96, 64), "f32")
        truth = a.double() @ b.double()
        self.assertFalse(verdict((a @ b).T.contiguous(), a @ b, truth).passed)

    def test_shape_and_dtype_come_first(self):
        truth = torch.ones(4, 2, dtype=torch.float64)
        self.assertIn("shape", verdict(torch.ones(2, 4), truth.float(), truth).complaints[0])
        self.assertIn("dtype", verdict(truth.bfloat16(), truth.float(), truth).complaints[0])

    def test_other_outputs(self):
        sides = {"c": {"o": torch.ones(2)}, "torch_eager": {"o": torch.ones(2), "lse": torch.ones(2)}}
        truth = {"o": torch.ones(2).double()}
        found = judge(sides, truth, {}, "torch_eager")["c"]
        self.assertEqual(found.complaints, ["outputs are o (f32), expected lse (f32), o (f32)"])

    def test_tokens_and_words(self):
        ids = torch.tensor([3, 4])
        self.assertTrue(verdict(ids, ids, ids.double()).passed)
        self.assertFalse(verdict(ids + 1, ids, ids.double()).passed)
        self.assertIn("expected 'f32'", verdict("f16", "f32", torch.ones(1)).complaints[0])

    def test_a_torch_that_is_wrong_itself_sets_no_bar(self):
        truth = torch.ones(100, dtype=torch.float64)
        broken = truth.float()
        broken[3] = math.nan
        self.assertTrue(verdict(truth.float(), broken, truth).passed)
        self.assertFalse(verdict(truth.float() * 1.001, broken, truth).passed)


class OtherRules(unittest.TestCase):
    def test_equal_sees_one_bit(self):
        theirs = torch.tensor([1.0, 2.0])
        truth = theirs.double()
        self.assertTrue(verdict(theirs.clone(), theirs, truth, equal()).passed)
        found = verdict(torch.nextafter(theirs, theirs + 1), theirs, truth, equal())
        self.assertIn("2 of 2 elements differ; the first, [0]", found.complaints[0])
        self.assertFalse(verdict(torch.tensor([-0.0]), torch.tensor([0.0]), torch.zeros(1), equal()).passed)

    def test_equal_to_the_truth(self):
        theirs = torch.tensor([1.0, 2.0])
        truth = torch.tensor([1.0, 2.5], dtype=torch.float64)
        self.assertTrue(verdict(truth.float(), theirs, truth, equal("truth")).passed)
        self.assertFalse(verdict(theirs.clone(), theirs, truth, equal("truth")).passed)

    def test_within(self):
        truth = torch.ones(1000, dtype=torch.float64)
        close = truth.float() + 1e-4
        self.assertTrue(verdict(close, close, truth, within(rel_l2=2e-4)).passed)
        self.assertFalse(verdict(close, close, truth, within(rel_l2=5e-5)).passed)
        self.assertFalse(verdict(close, close, truth, within(max_abs=5e-5)).passed)
        close[0] = math.nan
        self.assertFalse(verdict(close, close, truth, within(max_abs=1.0)).passed)

    def test_amid_the_noise_of_another_side(self):
        base = torch.linspace(5, 1, 200)
        noise = base + 0.01 * torch.linspace(-1, 1, 200)

        def found(answer, **sides):
            sides = {"c": {"loss": answer}, "torch_eager": {"loss": base}} | sides
            return judge(sides, {}, {"loss": amid("torch_seed")}, "torch_eager")["c"]

        other = {"torch_seed": {"loss": noise}}
        self.assertTrue(found(base + 0.004, **other).passed)
        self.assertTrue(found(base, **other).passed)
        self.assertIn("mean distance 0.006 exceeds 0.005", found(base + 0.006, **other).complaints[0])
        once = base.clone()
        once[7] += 0.02
        self.assertIn("largest distance 0.02 exceeds 0.01", found(once, **other).complaints[0])
        once[7] = math.nan
        self.assertFalse(found(once, **other).passed)
        self.assertIn("no loss of torch_seed", found(base).complaints[0])
        self.assertIn("no loss of torch_seed", found(base, torch_seed={"other": base}).complaints[0])
        with self.assertRaisesRegex(ValueError, "name of a side"):
            amid("")

    def test_rules_go_by_pattern(self):
        sides = {impl: {"w.0": torch.ones(2) + off} for impl, off in (("c", 1e-3), ("torch_eager", 0.0))}
        truth = {"w.0": torch.ones(2).double()}
        self.assertFalse(judge(sides, truth, {}, "torch_eager")["c"].passed)
        self.assertTrue(judge(sides, truth, {"w.*": within(rel_l2=1e-2)}, "torch_eager")["c"].passed)

    def test_an_eps_that_is_no_output_s(self):
        truth = torch.linspace(1, 2, 100).double()
        for off, passes in ((4e-4, True), (6e-4, False)):
            sides = {"c": {"o": (truth * (1 + off)).float()}, "torch_eager": {"o": truth.float()}}
            found = judge(sides, {"o": truth}, {}, "torch_eager", EPS["tf32"])
            self.assertEqual(found["c"].passed, passes)
            self.assertFalse(judge(sides, {"o": truth}, {}, "torch_eager")["c"].passed)

    def test_a_module_that_breaks_the_protocol_is_told(self):
        one = torch.ones(2)
        with self.assertRaisesRegex(ProtocolError, "truth lacks"):
            judge({"c": {"o": one}, "torch_eager": {"o": one}}, {}, {}, "torch_eager")
        with self.assertRaisesRegex(ProtocolError, "its truth"):
            judge({"torch_eager": {"o": one}}, {"o": torch.ones(3).double()}, {}, "torch_eager")
        with self.assertRaisesRegex(ProtocolError, "needs a dict"):
            judge({"c": one}, {}, {}, None)

    def test_ulps(self):
        truth = torch.tensor([1.0, 1000.0, 800.0], dtype=torch.float64)
        off = torch.tensor([1.0, 1000.0 + 2 * 2**-14, 800.0])
        self.assertEqual(verdict(off, off, truth).error()["ulp_max"], 2.0)
        tiny = torch.tensor(
            [1.0 + 2**-14, 1000.0, 800.0]
        )  # measured by the typical element, not by 1.0's own ulp
        self.assertEqual(verdict(tiny, tiny, truth).error()["ulp_max"], 1.0)
        zero = torch.zeros(3)
        self.assertEqual(verdict(zero, zero, zero.double()).error()["ulp_max"], 0.0)


if __name__ == "__main__":
    unittest.main()
