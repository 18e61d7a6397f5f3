"""Tests of the checker: wrong answers that judge() must reject, and right answers that it must accept."""

import itertools
import math
import unittest

import torch

from parity.core.allowance import ELEMENT, FLOOR, NORM, NORM_16, Orders, allow, leaning, no_measures, relative
from parity.core.case import amid, equal, within
from parity.core.draw import Draw
from parity.core.equals import LARGE, UNIT, Sequential
from parity.core.judge import EPS, ProtocolError, judge, timed_complaints
from ref import ops

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
        """PyTorch's result, in the dtype of the inputs."""
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1) @ v

    @staticmethod
    def kernel(q, k, v, dropped=None):
        """The answer of a good C kernel: sums in another order and in f32, rounded once. It can leave out a key."""
        wide = [tensor.float() for tensor in (q, k.flip(-2), v.flip(-2))]
        scores = wide[0] @ wide[1].transpose(-1, -2) / math.sqrt(q.shape[-1])
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if dropped is not None:
            seen[dropped + 1 :, dropped] = (
                False  # for every later query; the key's own query keeps it, because it might see no other
            )
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


def verdict(answer, torchs, truth, rule=None, equals=()):
    rules = {} if rule is None else {"o": rule}
    sides = {"c": {"o": answer}, "torch_eager": {"o": torchs}}
    return judge(sides, {"o": truth}, rules, "torch_eager", equals=[{"o": o} for o in equals])["c"]


def equals_of(formula, inputs, count=4, first=0):
    found = []
    for seed in range(first, first + count):
        with Sequential(seed):
            found.append(formula(*inputs))
    return found


def judged(formula, inputs, answer):
    """Returns the verdict on an answer, as for a case with this formula."""
    truth = formula(*(x.double() if x.is_floating_point() else x for x in inputs))
    return verdict(answer, formula(*inputs), truth, equals=equals_of(formula, inputs))


class RightAnswers(unittest.TestCase):
    def test_another_order_of_summation_passes(self):
        for problem, dtype, seed in itertools.product(PROBLEMS, (F32, BF16), range(10)):
            with self.subTest(problem=problem.__name__, dtype=dtype, seed=seed):
                inputs = problem.inputs(seed, dtype)
                found = judged(problem.eager, inputs, problem.kernel(*inputs))
                self.assertEqual(found.complaints, [])
                self.assertLess(found.error()["rel_l2"], 1e-6 if dtype == F32 else 1e-2)
                self.assertLess(found.error()["used"], 1)

    def test_equals_pass_among_each_other(self):
        for dtype, count, seed in itertools.product((F32, BF16), (1, 3, 64), range(20)):
            with self.subTest(dtype=dtype, count=count, seed=seed):
                inputs = [normal(f"e{seed}", dtype, count, 300), normal(f"f{seed}", dtype, 300, 2)]
                (answer,) = equals_of(Product.eager, [x.float() for x in inputs], 1, first=99)
                self.assertEqual(judged(Product.eager, inputs, answer.to(dtype)).complaints, [])

    def test_one_of_many_may_be_as_far_as_any_of_pytorch_s(self):
        truth = normal("many", F32, 300, 300).double()
        noise = 1e-7 * normal("noise", F32, 300, 300)
        torchs, answer = (truth + noise).float(), (truth - noise).float()
        torchs[7, 7] += 1e-5
        equals = [(truth + noise.roll(i)).float() for i in range(4)]
        for places, off, passes in (([5], 2e-5, True), ([5], 4e-5, False), ([5, 6, 9], 2e-5, False)):
            bad = answer.clone()
            bad[200, places] += off
            self.assertEqual(verdict(bad, torchs, truth, equals=equals).passed, passes, (places, off))
        few = slice(0, 100)
        bad = answer[few].clone()
        bad[50, 5] += 2e-5
        found = verdict(bad, torchs[few], truth[few], equals=[equal[few] for equal in equals])
        self.assertIn("1 of 30000 elements", found.complaints[0])

    def test_an_order_worse_than_pytorch_s_passes_where_it_is_sequential(self):
        # A long sum. PyTorch forms it in many lanes, with far less error than one term after the other.
        a, b = normal("long", F32, 8, 4000), normal("longer", F32, 4000, 8)
        truth = a.double() @ b.double()
        (answer,) = equals_of(Product.eager, (a, b), 1, first=99)
        self.assertFalse(verdict(answer, (a @ b), truth).passed)
        self.assertTrue(verdict(answer, (a @ b), truth, equals=equals_of(Product.eager, (a, b))).passed)

    def test_nan_and_infinity_where_the_truth_has_them_pass(self):
        truth = torch.tensor([1.0, math.nan, math.inf, -math.inf], dtype=torch.float64)
        found = verdict(truth.float(), truth.float(), truth)
        self.assertEqual(found.complaints, [])
        self.assertEqual(found.error()["rel_l2"], 0.0)

    def test_overflow_of_the_dtype_is_the_infinity_of_the_truth(self):
        truth = torch.tensor([70000.0, -1e9, 1.0], dtype=torch.float64)
        self.assertEqual(verdict(truth.half(), truth.half(), truth).complaints, [])


class WrongAnswers(unittest.TestCase):
    """Each wrong answer must be refused for any error of PyTorch: in f32, and in bf16 if bf16 can show it."""

    def refused(self, dtype, spoil, words=""):
        """spoil(answer, problem, inputs) returns a wrong answer, which must fail in 5 draws of each problem."""
        for problem, seed in itertools.product(PROBLEMS, range(5)):
            with self.subTest(problem=problem.__name__, dtype=dtype, seed=seed):
                inputs = problem.inputs(seed, dtype)
                truth = problem.eager(*(tensor.double() for tensor in inputs))
                good = problem.kernel(*inputs)
                bad = spoil(good.clone(), problem, inputs)
                self.assertFalse(torch.equal(bad, good), "the answer was not spoilt")
                equals = equals_of(problem.eager, inputs)
                found = verdict(bad, problem.eager(*inputs), truth, equals=equals)
                self.assertFalse(found.passed)
                self.assertIn(words, found.complaints[0])

    def test_dropped_key(self):
        def drop(_, problem, inputs):
            return problem.kernel(*inputs, dropped=29)

        self.refused(F32, drop, "rel_l2")
        self.refused(BF16, drop)

    def test_one_zeroed_row_of_many(self):
        def zero(good, *_):
            good.view(-1, good.shape[-1])[-1] = 0
            return good

        self.refused(F32, zero)
        self.refused(BF16, zero)

    def test_scale_off_by_a_thousandth(self):
        # In bf16 0.1 % is less than the rounding error, so both norms miss it.
        for more, much in ((1.001, 1.01), (0.999, 0.99)):
            self.refused(F32, lambda good, *_, by=more: good * by, f"all are about {more} times the truth")
            self.refused(BF16, lambda good, *_, by=much: (good.float() * by).to(BF16))

    def test_scale_off_by_a_thousandth_in_16_bits(self):
        """Found if there are many numbers."""
        x = normal("scores", BF16, 512, 128) * 2
        softmax = lambda x: torch.softmax(x, -1)  # noqa: E731
        truth = softmax(x.double())
        for dtype in (BF16, torch.float16):
            inputs = [x.to(dtype)]
            truth = softmax(inputs[0].double())
            good = truth.float().to(dtype)
            self.assertEqual(judged(ops.softmax, inputs, good).complaints, [])
            for factor in (1.001, 0.999):
                bad = (truth.float() * factor).to(dtype)
                found = judged(ops.softmax, inputs, bad)
                self.assertIn("times the truth rounded once", found.complaints[0])
                self.assertGreater(found.error()["used"], 1)
        for count, said in ((4095, 0), (4096, 1)):
            x = normal("x", F32, count) + 3
            answers = [x.to(BF16), (x * 1.001).to(BF16)]
            self.assertEqual(
                len(verdict(answers[1], answers[0], x.double(), equals=answers[:1] * 2).complaints), said
            )

    def test_scale_off_by_a_hundred_thousandth(self):
        inputs = Product.inputs(0, F32)
        found = judged(Product.eager, inputs, Product.kernel(*inputs) * (1 + 1e-5))
        self.assertRegex(
            found.complaints[0], r"rel_l2 1e-05 .* \(PyTorch's is .*e-07, in other orders .*e-07\)"
        )

    def test_inputs_rounded_to_tf32(self):
        def coarse(_, problem, inputs):
            return problem.kernel(*(ops.as_tf32(tensor) for tensor in inputs))

        self.refused(F32, coarse, "rel_l2")

    def test_one_term_of_one_sum(self):
        inputs = Product.inputs(0, F32)
        answer = Product.kernel(*inputs)
        answer[5, 7] -= inputs[0][5, 100] * inputs[1][100, 7]
        found = judged(Product.eager, inputs, answer)
        self.assertIn("1 of 2145 elements", found.complaints[0])
        self.assertRegex(found.complaints[0], r"the worst, \[5, 7\], is .*, truth .*, PyTorch \S*$")

    def test_one_number_zeroed(self):
        for dtype in (F32, BF16):
            inputs = Product.inputs(0, dtype)
            answer = Product.kernel(*inputs)
            answer[5, 7] = 0
            self.assertIn("all that are wrong are 0", judged(Product.eager, inputs, answer).complaints[0])
            answer[9, 9] += 1
            self.assertNotIn("are 0", judged(Product.eager, inputs, answer).complaints[0])

    def test_one_number_off_by_twice_what_pytorch_s_is(self):
        truth = torch.ones(64, dtype=torch.float64)
        eager, c = truth.float(), truth.float()
        eager[0] += 1e-3  # the norm allows much
        eager[1] += 1e-5
        c[1] += 1.9e-5
        self.assertIn("1 of 64", verdict(c, eager, truth).complaints[0])

    def test_the_worst_number_is_the_furthest_beyond_its_limit(self):
        truth = torch.tensor([[2.0**20], [1.0]], dtype=torch.float64).expand(2, 64)
        noise = truth * 2.0**-20 * (1 - 2 * (torch.arange(64) % 2))
        c = (truth - noise).float()
        c[0, 9], c[1, 7] = 2.0**20 + 9, 1.5
        self.assertIn("the worst, [1, 7], is 1.5", verdict(c, (truth + noise).float(), truth).complaints[0])

    def test_nothing_was_written(self):
        inputs = Product.inputs(0, F32)
        answer = torch.zeros_like(Product.kernel(*inputs))
        self.assertIn("all are 0", judged(Product.eager, inputs, answer).complaints[0])

    def test_a_stale_buffer(self):
        for dtype in (F32, BF16):
            answer = Product.kernel(*Product.inputs(0, dtype))
            answer[:, 64] = Product.kernel(*Product.inputs(1, dtype))[:, 64]
            found = judged(Product.eager, Product.inputs(0, dtype), answer)
            self.assertIn("index 64 (the last) in dimension 1 of [33, 65]", found.complaints[0])

    def test_norms_gone_wrong(self):
        x, weight = normal("x", F32, 64, 257), 1 + 0.1 * normal("w", F32, 257)
        formula, square = ops.rmsnorm, x.square()
        wrong = {
            "eps outside the root": x / (square.mean(-1, keepdim=True).sqrt() + 1e-5) * weight,
            "no eps": x * square.mean(-1, keepdim=True).rsqrt() * weight,
        }
        self.assertEqual(judged(formula, (x, weight), formula(x, weight)).complaints, [])
        for name, answer in wrong.items():
            with self.subTest(name):
                self.assertFalse(judged(formula, (x, weight), answer).passed)

    def test_updates_gone_wrong(self):
        p, g = normal("p", F32, 5000), normal("g", F32, 5000)
        m, v = 0.3 * normal("m", F32, 5000), normal("v", F32, 5000).square()

        def step(number, decay=0.01, **how):
            how = {"variant": "torch"} | how
            return lambda p, g, m, v: ops.adamw_step(p, g, m, v, number, weight_decay=decay, **how)[0]

        inputs = p, g, m, v
        self.assertEqual(judged(step(3), inputs, step(3)(*inputs)).complaints, [])
        for name, other in {
            "no decay": step(3, decay=0.0),
            "no bias correction of the second moment": step(
                3, variant="course2025", lr=1e-3 / math.sqrt(1 - 0.999**3)
            ),
            "eps before the correction": step(3, eps=1e-8 * math.sqrt(1 - 0.999**3), lr=1e-3 * 1.0001),
        }.items():
            with self.subTest(name):
                self.assertFalse(judged(step(3), inputs, other(*inputs)).passed)

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

    def test_one_number_may_be_off_by_its_rounding(self):
        truth = torch.tensor([1 + 0.3e-3], dtype=torch.float64)  # 1 in f16
        answers = ((1.0, 0, 0), (1.0005, 0, 1), (0.9993, 0, 1), (1.0005, 0.001, 0), (1.003, 0.001, 1))
        for factor, apart, wrong in answers:
            theirs = {"torch_eager": (truth * factor).half()}
            found = no_measures(theirs, Orders([truth.half()] * 2, truth), truth, None, 1, apart)
            self.assertEqual(len(found), wrong)

    def test_a_long_sum_may_be_cut_off_at_each_16_terms(self):
        truth, sign = torch.ones(64, dtype=torch.float64), torch.tensor([1.0, -1.0] * 32)
        for units, wrong in ((100, 0), (104, 1)):
            theirs = {"torch_eager": truth.float() + units * 2.0**-24 * sign}
            found = no_measures(theirs, Orders([truth] * 2, truth), truth, None, 1600, 0.0)
            self.assertEqual(len(found), wrong)

    def test_products_that_round_to_tf32_are_a_measure_of_few_numbers(self):
        v = normal("v", F32, 1, 80).double()
        truth = v.expand(300, 80)  # 300 rows of one sum
        for factor, holds in ((1 + 2.0**-12, True), (1.001, False)):
            theirs = (truth * factor).float()
            sides = {"torch_tf32": {"y": theirs}}
            found = judge(sides, {"y": truth}, {}, "torch_tf32", None, [{"y": theirs}] * 4)
            self.assertEqual(found["torch_tf32"].passed, holds)


class Equals(unittest.TestCase):
    """Sums in another order have the error that the rule assumes."""

    def error(self, formula, *inputs, seed=0):
        truth = formula(*(x.double() for x in inputs))
        with Sequential(seed):
            got = formula(*inputs).double()
        return float((got - truth).norm() / truth.norm())

    def partial_sums(self, a, b):
        """u times the root of the squared partial sums, over the norm of the results: the measure of rule.md."""
        sums = (a.double()[:, :, None] * b.double()[None]).cumsum(1)
        return 2**-24 * float(sums.square().sum().sqrt() / sums[:, -1].norm())

    def test_a_product_errs_as_a_sequential_sum_does(self):
        for name, shift in (("zero mean", 0.0), ("positive", 3.0)):
            for k in (64, 512, 2048):
                with self.subTest(name, k=k):
                    a, b = normal("a", F32, 16, k) + shift, normal("b", F32, k, 16) + shift
                    ratio = self.error(torch.matmul, a, b) / self.partial_sums(a, b)
                    self.assertTrue(0.3 < ratio < 0.5, ratio)

    def test_a_large_product_errs_as_much_as_a_small_one(self):
        for shift in (0.0, 1.0):
            a, b = normal("a", F32, 300, 800) + shift, normal("b", F32, 800, 700) + shift
            self.assertGreater(300 * 800 * 700, LARGE)
            one_by_one = self.error(torch.matmul, a[:40], b)
            self.assertLess(40 * 800 * 700, LARGE)
            at_once = self.error(torch.matmul, a, b)
            self.assertTrue(0.8 < at_once / one_by_one < 1.25, (at_once, one_by_one))

    def test_sums_means_and_norms(self):
        x = normal("x", F32, 6, 7, 500)
        for formula in (
            lambda x: x.sum(-1),
            lambda x: x.sum((0, 2)),
            lambda x: x.sum(1, keepdim=True),
            lambda x: x.sum(),
            lambda x: x.mean(),
            lambda x: x.mean(0),
            lambda x: torch.linalg.vector_norm(x),
            lambda x: x.square().sum(-1).sqrt(),
        ):
            truth = formula(x.double())
            with Sequential(0):
                got = formula(x)
            self.assertEqual(got.shape, truth.shape)
            self.assertLess(float((got - truth).norm() / truth.norm()), 1e-5)
        self.assertGreater(self.error(lambda x: x.sum(-1), x), 2**-24)
        with Sequential(0) as mode:  # in pieces of 4096
            self.assertEqual(torch.ones(2, 5000).sum(-1).tolist(), [5000, 5000])
        self.assertEqual(mode.longest, 5000)

    def test_gradients_are_formed_in_it_too(self):
        a, b = normal("a", F32, 9, 300).requires_grad_(), normal("b", F32, 300, 5)

        def gradient(a):
            return torch.autograd.grad((a @ b.to(a.dtype)).exp().mean(), [a])[0]

        truth = gradient(a.detach().double().requires_grad_())
        found = []
        for seed in (0, 0, 1):
            with Sequential(seed):
                found.append(gradient(a))
        self.assertTrue(torch.equal(found[0], found[1]))
        self.assertFalse(torch.equal(found[0], found[2]))
        self.assertLess(float((found[2] - truth).norm() / truth.norm()), 1e-4)

    def test_float64_and_whole_numbers_are_left_alone(self):
        x = normal("x", F32, 50, 50).double()
        ids = torch.arange(50)
        with Sequential(0):
            self.assertTrue(torch.equal(x @ x, torch.matmul(x, x)))
            self.assertEqual(int(ids.sum()), 1225)
            self.assertTrue(torch.equal(ids + 1, torch.arange(1, 51)))

    def test_shapes_without_numbers_are_left_alone(self):
        with Sequential(0), torch.device("meta"):
            self.assertEqual(torch.empty(3, 4).mul_(2.0).add_(1.0).shape, (3, 4))

    def test_infinities_stay(self):
        with Sequential(0):
            got = torch.tensor([1.0, -math.inf, math.inf]) - 1.0
        self.assertTrue(torch.equal(got, torch.tensor([0.0, -math.inf, math.inf])))

    def test_tf32_rounds_the_inputs_of_products(self):
        a, b = normal("a", F32, 20, 30), normal("b", F32, 30, 20)
        with Sequential(0, tf32=True):
            got = a @ b
        want = ops.as_tf32(a).double() @ ops.as_tf32(b).double()
        self.assertLess(float((got - want).norm() / want.norm()), 1e-6)
        self.assertGreater(float((got - a.double() @ b.double()).norm() / want.norm()), 1e-5)

    def test_matrix_units_cut_off(self):
        a, b = normal("a", BF16, 40, 1024).abs(), normal("b", BF16, 1024, 40).abs()
        truth = a.double() @ b.double()
        with Sequential(0, truncates=True):
            got = Sequential(0, truncates=True).product(a[None], b[None])[0]
        self.assertTrue(bool((got.double() <= truth).all()), "all terms are positive: none may be rounded up")
        self.assertGreater(float((got - truth).norm() / truth.norm()), UNIT * 2**-24)

    def test_leaning(self):
        truth = normal("t", F32, 64, 64).double()
        cut = (truth.float().view(torch.int32) >> 16 << 16).view(F32)
        rows = truth * (1 + 0.01 * torch.linspace(-0.85, 1.15, 64)[:, None])  # each has its own factor
        answers = ((truth, False), (1.003 * truth, True), (0.997 * truth, True), (cut, True), (rows, False))
        for answer, leans in answers:
            common, most = leaning(answer.to(BF16), truth, Orders([], truth))
            self.assertEqual(abs(common) > most, leans)

    def test_leaning_of_an_answer_that_is_less_noisy_than_the_equals(self):
        truth, noise = (normal(name, F32, 64, 64).double() for name in ("t", "noise"))
        near, far = 1.01 * truth.to(BF16).double(), 1.01 * truth + 0.02 * noise
        equals = [
            (truth * factor + noise.roll(1) * own).to(BF16) for factor, own in ((0.995, 0.02), (1.005, 0))
        ]
        amid = 1.015 * truth + 0.005 * noise
        for answer, leans in ((near, True), (amid, True), (far, False)):
            common, most = leaning(answer.to(BF16), truth, Orders(equals, truth))
            self.assertEqual(abs(common) > most, leans)

    def test_the_limit_of_an_element_is_of_its_row_and_of_all(self):
        truth = -torch.ones(64, 64, dtype=torch.float64)
        truth[0, 0] = 0
        equal = truth.clone()
        equal[40, 5] -= 0.1
        for dtype, norm, u in ((F32, NORM, 0.0), (BF16, NORM_16, 2.0**-8)):
            limit, off = allow(truth, [], Orders([equal] * 2, truth), dtype), 0.1 - 2 * u
            self.assertAlmostEqual(float(limit.elements[0, 0]), FLOOR * off / 64, places=9)
            self.assertAlmostEqual(float(limit.elements[40, 50]), ELEMENT * off / 8 + 2 * u, places=6)
            self.assertAlmostEqual(float(limit.elements[44, 9]), ELEMENT * off / 9 + 2 * u, places=6)
            self.assertAlmostEqual(float(limit.elements[45, 5]), ELEMENT * off / 64 + 2 * u, places=4)
            self.assertAlmostEqual(limit.norm, norm * 0.1 / 4095**0.5 + u, places=6)
            self.assertAlmostEqual(limit.rarely, 0.3)
        for dtype, most in ((BF16, 2**-7 + FLOOR * 2**-24), (F32, 2**-24)):
            exact = allow(truth, [], Orders([truth] * 2, truth), dtype)
            self.assertAlmostEqual(float(exact.elements[1, 1]), most, places=9)
        self.assertEqual([relative(off, 0 * truth) for off in (0 * truth, truth)], [0, math.inf])

    def test_the_mean_of_equals_may_be_off_as_they_differ(self):
        one = torch.ones(1, dtype=torch.float64)
        for off, wrong in ((0.036, False), (0.061, True)):
            orders = Orders([one + off + 0.01 * sign for sign in (1, -1, 1, -1, 0)], one)
            self.assertEqual(
                "" in no_measures({"torch_eager": one.float()}, orders, one, None, 1, 0.0), wrong
            )

    def test_a_small_row_in_16_bits(self):
        truth = normal("rows", F32, 64, 32).double()
        truth[7] *= 1e-3
        right, *equals = ((truth * (1 + 0.01 * normal(f"noise {i}", F32, 64, 32))).to(BF16) for i in range(4))
        self.assertTrue(verdict(right, right, truth, equals=equals).passed)
        wrong = right.clone()
        wrong[7] = 0
        self.assertIn("a row is off as a whole", verdict(wrong, right, truth, equals=equals).complaints[0])

    def test_a_row_of_zeros_that_is_noisy_in_16_bits(self):
        truth = normal("rows", F32, 64, 32).double()
        truth[7] *= 1e-3
        noise = torch.full((64, 1), 0.01)
        # 0.9: nobody knows the row.
        for share, said in ((0.3, "1 rows are 0, and PyTorch's are not"), (0.9, "")):
            noise[7] = share
            right, *equals = (
                (truth * (1 + noise * normal(f"noise {i}", F32, 64, 32))).to(BF16) for i in range(4)
            )
            wrong = right.clone()
            wrong[7] = 0
            found = verdict(wrong, right, truth, equals=equals).complaints
            self.assertIn(said, found[0]) if said else self.assertEqual(found, [])

    def test_a_row_of_zeros_in_16_bits_may_hold_what_f32_rounds(self):
        truth = normal("rows", F32, 64, 32).double()
        truth[0] = 0
        right, *equals = ((truth * (1 + 0.01 * normal(f"noise {i}", F32, 64, 32))).to(BF16) for i in range(4))
        for off, holds in ((2.0**-18, True), (2.0**-14, False)):
            answer = right.clone()
            answer[0] = off
            self.assertEqual(verdict(answer, right, truth, equals=equals).passed, holds)


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
        found = verdict(close, close, truth, within(rel_l2=5e-5)).complaints
        self.assertEqual(found, ["o: rel_l2 0.0001 exceeds 5e-05; all are about 1.0001 times the truth"])
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
        sides = {"torch_seed": {"loss": once}, "torch_eager": {"loss": base}}
        unfit = judge(sides, {}, {"loss": amid("torch_seed")}, "torch_eager")["torch_seed"]
        self.assertIn("its distance from torch_eager is nan, at most 0.25 is noise", unfit.complaints[0])
        self.assertIn("no loss of torch_seed", found(base).complaints[0])
        self.assertIn("no loss of torch_seed", found(base, torch_seed={"other": base}).complaints[0])

    def test_rules_go_by_pattern(self):
        sides = {impl: {"w.0": torch.ones(2) + off} for impl, off in (("c", 1e-3), ("torch_eager", 0.0))}
        truth = {"w.0": torch.ones(2).double()}
        self.assertFalse(judge(sides, truth, {}, "torch_eager")["c"].passed)
        self.assertTrue(judge(sides, truth, {"w.*": within(rel_l2=1e-2)}, "torch_eager")["c"].passed)

    def test_a_timed_answer(self):
        right = normal("timed", F32, 64, 64)
        signs = 1 - 2 * (torch.arange(64) % 2)
        for off, eps, rules, holds in (
            (1.2e-4 * signs, None, {}, True),
            (1.3e-4 * signs, None, {}, False),
            (1.5e-5, None, {}, True),
            (1.6e-5, None, {}, False),
            (4.8e-4, EPS["tf32"], {}, True),
            (5e-4, EPS["tf32"], {}, False),
            (1.2e-3, None, {"o": within(rel_l2=1e-2)}, True),
        ):
            found = timed_complaints({"x": {"o": (right * (1 + off), right)}}, eps, rules)
            self.assertEqual(found == [], holds, found)
        (found,) = timed_complaints({"x": {"o": (right.view(32, 128), right)}}, None, {})
        self.assertEqual(found, "o: shape is [32, 128] while timed, expected [64, 64]")

    def test_an_eps_that_is_no_output_s(self):
        truth = torch.linspace(1, 2, 100).double()
        for off, passes in ((4e-4, True), (6e-4, False)):
            sides = {"c": {"o": (truth * (1 + off)).float()}, "torch_eager": {"o": truth.float()}}
            more = {"torch_other": sides["c"]}  # a side of another precision is no measure
            found = judge(sides | more, {"o": truth}, {}, "torch_eager", EPS["tf32"])
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
        # Relative to the typical element, not to the ulp of 1.0.
        tiny = torch.tensor([1.0 + 2**-14, 1000.0, 800.0])
        self.assertEqual(verdict(tiny, tiny, truth).error()["ulp_max"], 1.0)
        zero = torch.zeros(3)
        self.assertEqual(verdict(zero, zero, zero.double()).error()["ulp_max"], 0.0)


if __name__ == "__main__":
    unittest.main()
