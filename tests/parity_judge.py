"""The checker checked: wrong answers that judge() must reject, and right ones that it must not."""

import math
import unittest

import torch

from parity.core.case import equal, within
from parity.core.draw import Draw
from parity.core.judge import ProtocolError, judge

torch.set_num_threads(1)  # the tensors are small

F32, BF16 = torch.float32, torch.bfloat16


def attention(q, k, v):
    """Causal attention as PyTorch would run it eagerly, in the dtype of its inputs."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1) @ v


def attention_inputs(seed, dtype, seq=130, head_dim=80):
    draw = Draw(f"judge/attention/{seed}")
    return [draw.normal(name, (2, 3, seq, head_dim), "f32").to(dtype) for name in "qkv"]


def better(inputs):
    """What a good C kernel returns: the sums in another order and in f32, rounded once."""
    q, k, v = (tensor.float() for tensor in inputs)
    flipped = [tensor.flip(-2) for tensor in (k, v)]
    scores = q @ flipped[0].transpose(-1, -2) / math.sqrt(q.shape[-1])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().flip(-1)
    weights = torch.exp(scores.masked_fill(~seen, -math.inf) - scores.amax(-1, keepdim=True))
    return ((weights @ flipped[1]) / weights.sum(-1, keepdim=True)).to(inputs[0].dtype)


def verdict(answer, torchs, truth, rule=None):
    rules = {} if rule is None else {"o": rule}
    return judge({"c": {"o": answer}, "torch_eager": {"o": torchs}}, {"o": truth}, rules, "torch_eager")["c"]


class RightAnswers(unittest.TestCase):
    def test_another_order_of_summation_passes(self):
        for dtype in (F32, BF16):
            for seed in range(20):
                with self.subTest(dtype=dtype, seed=seed):
                    inputs = attention_inputs(seed, dtype)
                    truth = attention(*(tensor.double() for tensor in inputs))
                    found = verdict(better(inputs), attention(*inputs), truth)
                    self.assertEqual(found.complaints, [])
                    self.assertLess(found.error()["rel_l2"], 1e-6 if dtype == F32 else 1e-2)

    def test_matrix_product_passes(self):
        draw = Draw("judge/gemm")
        for dtype in ("f32", "bf16"):
            a, b = draw.normal(f"a {dtype}", (33, 200), dtype), draw.normal(f"b {dtype}", (200, 65), dtype)
            mine = (a.float().flip(1) @ b.float().flip(0)).to(a.dtype)
            self.assertEqual(verdict(mine, a @ b, a.double() @ b.double()).complaints, [])

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

    def refused(self, dtype, spoil, words="", seeds=10):
        for seed in range(seeds):
            with self.subTest(dtype=dtype, seed=seed):
                inputs = attention_inputs(seed, dtype)
                truth = attention(*(tensor.double() for tensor in inputs))
                good = better(inputs)
                bad = spoil(good.clone(), inputs)
                self.assertFalse(torch.equal(bad, good), "the answer was not spoilt")
                found = verdict(bad, attention(*inputs), truth)
                self.assertFalse(found.passed)
                self.assertIn(words, found.complaints[0])

    def test_dropped_key(self):
        def drop(good, inputs):
            q, k, v = inputs
            far = k.clone()
            far[..., 5, :] = 0  # key 5 scores 0 and brings nothing
            gone = v.clone()
            gone[..., 5, :] = 0
            return better((q, far, gone))

        self.refused(F32, drop, "rel_l2")
        self.refused(BF16, drop)

    def test_zeroed_row(self):
        def zero(good, _):
            good[1, 2, 77] = 0
            return good

        self.refused(F32, zero)
        self.refused(BF16, zero)

    def test_swapped_rows(self):
        def swap(good, _):
            good[0, 1, [40, 41]] = good[0, 1, [41, 40]]
            return good

        self.refused(F32, swap)
        self.refused(BF16, swap)

    def test_scale_off_by_a_thousandth(self):
        self.refused(F32, lambda good, _: good * 1.001, "rel_l2")
        # In bf16 0.1 % is a quarter of the rounding error; 1 % is the least that it can show.
        self.refused(BF16, lambda good, _: (good.float() * 1.01).to(BF16))

    def test_probabilities_kept_in_bf16(self):
        def coarse(_, inputs):
            q, k, v = inputs
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            return torch.softmax(scores.masked_fill(~seen, -math.inf), -1).bfloat16().float() @ v

        self.refused(F32, coarse)

    def test_nan(self):
        def nan(good, _):
            good[1, 1, 9, 3] = math.nan
            return good

        self.refused(F32, nan, "NaN")
        self.refused(BF16, nan, "NaN")

    def test_infinity(self):
        def inf(good, _):
            good[1, 1, 9, 3] = math.inf
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
        def leave(good, _):
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

    def test_rules_go_by_pattern(self):
        sides = {impl: {"w.0": torch.ones(2) + off} for impl, off in (("c", 1e-3), ("torch_eager", 0.0))}
        truth = {"w.0": torch.ones(2).double()}
        self.assertFalse(judge(sides, truth, {}, "torch_eager")["c"].passed)
        self.assertTrue(judge(sides, truth, {"w.*": within(rel_l2=1e-2)}, "torch_eager")["c"].passed)

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
