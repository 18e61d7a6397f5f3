"""Compares the PyTorch references with PyTorch's own implementations."""

import math
import unittest

import torch
import torch.nn.functional as F

from parity.bench.drivers import COURSE_EPS
from parity.shared.model import ADAMW
from ref import accounting, attention, bench, ddp, flash, memory, ops, precision, trace, transformer


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**63)


def normal(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(name), dtype=torch.float64)


def gradients(function, *inputs):
    """Returns the output, and the gradients of its product with a fixed cotangent."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, normal("cotangent", *y.shape))]


class RefTest(unittest.TestCase):
    def same(self, ours, theirs, tolerance=1e-12):
        for a, b in zip(ours, theirs, strict=True):
            self.assertEqual(a.shape, b.shape)
            self.assertEqual(a.dtype, b.dtype)
            error = (a - b).norm() / b.norm()
            self.assertTrue(error <= tolerance, f"relative error {error}")

    def test_gemm(self):
        for trans_a in (False, True):
            for trans_b in (False, True):
                a = normal("a", *((3, 5, 4) if trans_a else (3, 4, 5)))
                b = normal("b", *((3, 6, 5) if trans_b else (3, 5, 6)))
                c = normal("c", 3, 4, 6)
                ours = ops.gemm(a, b, c, trans_a, trans_b, alpha=0.5, beta=2.0)
                left, right = a.mT if trans_a else a, b.mT if trans_b else b
                self.same([ours], [torch.baddbmm(c, left, right, alpha=0.5, beta=2.0)])

    def test_embedding(self):
        ids = torch.tensor([3, 0, 3])
        ours = gradients(lambda w: ops.embedding(ids, w), normal("w", 5, 4))
        self.same(ours, gradients(lambda w: F.embedding(ids, w), normal("w", 5, 4)))

    def test_rmsnorm(self):
        inputs = normal("x", 7, 33), normal("w", 33)
        theirs = gradients(lambda x, w: F.rms_norm(x, (33,), w, 1e-5), *inputs)
        self.same(gradients(ops.rmsnorm, *inputs), theirs)

    def test_rope_is_a_complex_rotation(self):
        x = normal("x", 2, 3, 11, 80)
        cos, sin = ops.rope_table(11, 80, dtype=torch.float64)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
        self.same([ops.rope(x, cos, sin)], [turned])
        self.assertAlmostEqual(math.acos(cos[1, 3]), 10_000 ** (-6 / 80), places=12)

    def test_heads(self):
        x = normal("x", 2, 5, 12)
        split = ops.heads_split(x, 3)
        self.assertTrue(torch.equal(split[1, 2, 4], x[1, 4, 8:]))
        self.assertTrue(torch.equal(ops.heads_merge(split), x))

    def test_silu_mul(self):
        inputs = normal("gate", 7, 33), normal("up", 7, 33)
        theirs = gradients(lambda gate, up: F.silu(gate) * up, *inputs)
        self.same(gradients(ops.silu_mul, *inputs), theirs)

    def test_a_model_that_attends_by_pytorch_s_own_kernel(self):
        with torch.device("cpu"):
            torch.manual_seed(0)
            ours = transformer.Transformer(16, 24, 2, 2, 11, 9).double()
            theirs = transformer.Transformer(16, 24, 2, 2, 11, 9, attend=transformer.fused_attention).double()
        theirs.load_state_dict(ours.state_dict())
        ids = torch.tensor([[1, 7, 3, 10, 0]])
        self.same([ours(ids).detach()], [theirs(ids).detach()])

    def test_what_a_block_saves(self):
        """A linear layer saves its input, and its weight, which is not counted. A product of two tensors saves both,
        once."""

        class Square(torch.nn.Module):
            def forward(self, x):
                return x * x

        x = torch.ones(6, 8)[:3].requires_grad_()  # its storage stays whole
        self.assertEqual(memory.saved_by(transformer.Linear(8, 5), x), [([3, 8], 192)])
        self.assertEqual(memory.saved_by(Square(), x), [([3, 8], 192)])

    def test_sizes_of_a_pass(self):
        model = transformer.Transformer(16, 24, 2, 2, 11, 9)
        ids = torch.tensor([[1, 7, 3, 10, 0], [0, 1, 2, 3, 4]])
        before = model(ids)
        wanted = dict(residual=10 * 16 * 4, scores=2 * 2 * 25 * 4, ffn=10 * 24 * 4, logits=10 * 11 * 4)
        self.assertEqual(memory.sizes(model, ids), wanted)
        self.assertTrue(torch.equal(model(ids), before))

    def test_a_recorded_step_finds_moments_and_no_gradients(self):
        ids = torch.tensor([[1, 7, 3]])
        recorded = memory.Recorded(transformer.Transformer(16, 24, 1, 2, 11, 9), ids, ids)
        recorded.settle()
        numel = sum(p.numel() for p in recorded.model.parameters())
        self.assertEqual(sum(x.numel() for x in recorded.holds()), 3 * numel)
        self.assertTrue(all(p.grad is None for p in recorded.model.parameters()))
        self.assertEqual(recorded.run("inference").shape, (1, 3, 11))
        self.assertTrue(recorded.run("forward").requires_grad)
        self.assertFalse(recorded.run("step").requires_grad)

    def test_softmax(self):
        x = normal("x", 10, 33)
        self.same(gradients(ops.softmax, x), gradients(lambda x: x.softmax(-1), x))
        causal = ops.causal_softmax(x, 5)
        self.assertTrue(torch.equal(causal[5], F.one_hot(torch.tensor(0), 33).double()))
        self.same([causal[7, :3]], [x[7, :3].softmax(-1)])

    def test_cross_entropy(self):
        x, targets = normal("x", 7, 33), torch.arange(7)
        theirs = gradients(lambda x: F.cross_entropy(x, targets), x)
        self.same(gradients(lambda x: ops.cross_entropy(x, targets)[0], x), theirs)
        self.same([ops.cross_entropy(x, targets)[1]], [x.logsumexp(-1)])

    def test_adamw_is_torchs(self):
        p = normal("p", 100)
        m = v = torch.zeros(100, dtype=torch.float64)
        theirs = torch.nn.Parameter(p.clone())
        optimizer = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1)
        for step in range(1, 4):
            theirs.grad = normal(f"g{step}", 100)
            optimizer.step()
            p, m, v = ops.adamw_step(p, theirs.grad, m, v, step, lr=0.1, weight_decay=0.1, variant="torch")
        self.same([p], [theirs.data])

    def test_timed_sides_have_one_formula_in_the_step_that_is_judged(self):
        p, g = normal("p", 100), 1e-7 * normal("g", 100)
        how = dict(lr=0.1, weight_decay=0.0)
        zero = torch.zeros(100, dtype=torch.float64)
        course, torchs = (
            ops.adamw_step(p, g, zero, zero, 1, variant=variant, eps=eps, **how)[0]
            for variant, eps in (("course2025", COURSE_EPS), ("torch", ADAMW["eps"]))
        )
        self.same([course], [torchs])

    def test_adamw_of_the_course(self):
        for variant in ("course2025", "course2026"):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                p = normal("p", 100).to(dtype)
                m = v = torch.zeros(100, dtype=torch.promote_types(dtype, torch.float32))
                theirs = torch.nn.Parameter(p.clone())
                optimizer = transformer.AdamW([theirs], lr=0.1, weight_decay=0.1, variant=variant)
                for step in range(1, 4):
                    theirs.grad = normal(f"g{step}", 100).to(dtype)
                    optimizer.step()
                    p, m, v = ops.adamw_step(
                        p, theirs.grad, m, v, step, lr=0.1, weight_decay=0.1, variant=variant
                    )
                self.same([theirs.data], [p], torch.finfo(dtype).eps)

    def test_attention(self):
        for seq, seq_k in ((17, 17), (5, 19), (19, 5)):
            for causal in (False, True):
                for mask in ("inf", "add_1e6"):
                    with self.subTest(seq=seq, seq_k=seq_k, causal=causal, mask=mask):
                        self.attention_case(seq, seq_k, causal, mask)

    def attention_case(self, seq, seq_k, causal, mask):
        q = normal("q", 2, 3, seq, 80)
        k, v = normal("k", 2, 3, seq_k, 80), normal("v", 2, 3, seq_k, 80)
        options = dict(causal=causal, mask=mask)
        tiles = dict(tile_q=4, tile_k=8)
        visible = ops.causal_mask(seq, seq_k) if causal else None
        sdpa = F.scaled_dot_product_attention
        theirs = gradients(lambda *qkv: sdpa(*qkv, attn_mask=visible), q, k, v)
        self.same(gradients(lambda *qkv: attention.attention(*qkv, **options), q, k, v), theirs)
        self.same(gradients(lambda *qkv: flash.flash(*qkv, **options, **tiles)[0], q, k, v), theirs)
        lse = flash.flash(q, k, v, **options, **tiles)[1]
        self.same([lse], [attention.logsumexp(q, k, **options)])

    def test_compiled_attention(self):
        q, k, v = (normal(name, 2, 1, 24, 16) for name in "qkv")
        compiled = attention.Compiled(causal=True)  # cases time it without a mask
        self.assertIsNone(compiled.swapped)
        theirs = gradients(lambda *qkv: attention.attention(*qkv, True), q, k, v)
        self.same(gradients(compiled, q, k, v), theirs)
        self.assertGreaterEqual(compiled.swapped, 0)

    def test_products_in_tf32(self):
        ulp = 2.0**-10
        given = torch.tensor(
            [1 + ulp / 2, 1 + ulp / 2 - ulp / 512, -1 - ulp / 2, 3.0, 0.0, math.inf, -math.inf]
        )
        rounded = torch.tensor([1 + ulp, 1.0, -1 - ulp, 3.0, 0.0, math.inf, -math.inf])
        self.assertTrue(torch.equal(ops.as_tf32(given), rounded))
        self.assertTrue(ops.as_tf32(torch.tensor([math.nan])).isnan().item())
        a, b, cotangent = (
            normal(name, 3, *shape).float()
            for name, shape in [("a", (20, 30)), ("b", (30, 10)), ("c", (20, 10))]
        )
        leaves = [x.clone().requires_grad_() for x in (a, b)]
        product = ops.tf32_matmul(*leaves)
        grads = torch.autograd.grad(product, leaves, cotangent)
        for got, left, right in [(product, a, b), (grads[0], cotangent, b.mT), (grads[1], a.mT, cotangent)]:
            self.assertTrue(torch.allclose(got, ops.as_tf32(left) @ ops.as_tf32(right), rtol=1e-5, atol=1e-5))
            error = (got - left.double() @ right.double()).norm() / (left.double() @ right.double()).norm()
            self.assertTrue(1e-4 < error < 5e-4, error)

    def test_transformer_names_and_sizes(self):
        names = list(transformer.Transformer(16, 32, 2, 2, 11, 8).state_dict())
        block = [f"attn.{name}_proj" for name in ("q", "k", "v", "output")]
        block += ["ffn.w1", "ffn.w2", "ffn.w3", "ln1", "ln2"]
        self.assertEqual(
            names,
            ["token_embeddings.weight"]
            + [f"layers.{layer}.{part}.weight" for layer in (0, 1) for part in block]
            + ["ln_final.weight", "lm_head.weight"],
        )
        for size, total in (("small", 128_625_408), ("2.7B", 3_406_809_600), ("10B", 12_832_823_808)):
            model = accounting.meta_model(*transformer.SIZES[size], vocab=10_000, context=128)
            self.assertEqual(accounting.parameters(model)["total"], total)

    def test_transformer_is_causal_and_learns(self):
        torch.manual_seed(0)
        model = transformer.Transformer(32, 64, 2, 2, 11, 16)
        ids, targets = bench.random_batch(4, 16, 11)
        changed = ids.clone()
        changed[:, 9:] = 0
        self.assertTrue(torch.equal(model(ids)[:, :9], model(changed)[:, :9]))
        trainer = bench.Trainer(model, ids, targets)
        first = trainer.whole()
        self.assertEqual(len(bench.benchmark(trainer, warmup=1, steps=29).step), 29)
        self.assertLess(trainer.whole(), 0.8 * first)

    def test_checkpoints_change_no_number(self):
        torch.manual_seed(0)
        model = transformer.Transformer(16, 24, 3, 2, 11, 8).double()
        ids = torch.randint(11, (2, 9))

        def run(checkpoint_layers):
            model.checkpoint_layers = checkpoint_layers
            model.zero_grad()
            loss = transformer.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
            loss.backward()
            return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

        kept = run(0)
        for layers in (1, 2, 3):
            for one, other in zip(kept, run(layers), strict=True):
                self.assertTrue(torch.equal(one, other))

    def test_initialisation(self):
        torch.manual_seed(0)
        weight = transformer.Linear(300, 500).weight
        std = math.sqrt(2 / 800)
        self.assertLessEqual(weight.abs().max().item(), 3 * std)
        self.assertAlmostEqual(weight.std().item() / std, 0.9866, delta=0.005)  # cut at 3 std

    def test_accumulation(self):
        values = precision.handout_loops()
        self.assertEqual(values, [10.000133514404297, 9.953125, 10.00213623046875, 10.00213623046875])
        f16 = torch.float16
        self.assertEqual(precision.pairwise(1024, 0.25, f16, f16), 256.0)
        self.assertEqual(precision.kahan(4096, 0.25, f16, f16), 1024.0)

    def test_toy_model_under_autocast(self):
        names = "parameters fc1 relu ln logits loss gradients".split()
        for device, norm in (("cpu", torch.float16), ("cuda", torch.float32)):
            seen = precision.toy_dtypes(device, torch.float16, "cross_entropy_loss")
            self.assertEqual(sorted(seen), sorted(names))
            self.assertEqual(
                [seen[name] for name in ("fc1", "ln", "logits")], [torch.float16, norm, torch.float16]
            )
            self.assertEqual([seen["loss"], seen["gradients"]], 2 * [torch.float32])
        self.assertFalse(torch.is_autocast_enabled("cuda"))

    def test_every_operation_runs_under_autocast(self):
        for device in ("cpu", "cuda"):
            for op, (count, _) in precision.OPS.items():
                for dtype in (torch.float32, torch.bfloat16):
                    with self.subTest(op=op, device=device, dtype=dtype):
                        seen = precision.op_dtype(device, torch.bfloat16, op, [dtype] * count)
                        banned = (device, op) == ("cuda", "binary_cross_entropy")
                        self.assertEqual(seen is None, banned)

    def test_averaged_gradients_are_those_of_the_whole_batch(self):
        for name, make in ddp.TOYS.items():
            model = make().double()
            with torch.no_grad():
                for parameter, p in model.named_parameters():
                    p.copy_(normal(f"{name} {parameter}", *p.shape))
            x, y = normal("x", 12, 10), normal("y", 12, 5)
            parts = zip(x.chunk(3), y.chunk(3), strict=True)
            losses = ddp.average_alone(model, (F.mse_loss(model(a), b) for a, b in parts))
            ours = [p.grad for p in ddp.trained(model)]
            loss = F.mse_loss(model(x), y)
            self.same(ours, torch.autograd.grad(loss, ddp.trained(model)))
            self.assertAlmostEqual(sum(losses) / 3, loss.item())
            frozen = [p for p in model.parameters() if not p.requires_grad]
            self.assertEqual([p.grad for p in frozen], [None] * len(frozen))
            self.assertEqual(len(ours), 4 if name == "tied" else 3)
            before = [p.clone() for p in ddp.trained(model)]
            ddp.sgd(ddp.trained(model), 0.5)
            self.same(ddp.trained(model), [p - 0.5 * g for p, g in zip(before, ours, strict=True)])

    def test_counts(self):
        model = accounting.meta_model(*transformer.SIZES["small"], vocab=10_000, context=512)
        counted = accounting.flops(model, 4, 512)
        self.assertAlmostEqual(counted["forward"] / 1e12, 0.534, delta=0.0005)
        self.assertEqual(counted["backward"], 2 * counted["forward"])
        small = dict(zip(("d_model", "d_ff", "layers", "heads"), transformer.SIZES["small"], strict=True))
        layers = accounting.flops_of_layers(**small, vocab=10_000, batch=4, context=512)
        self.assertEqual(layers, counted)
        kept = accounting.attention_saved_bytes(8, 1024, 64)
        self.assertEqual(kept["matrices"], 2 * 8 * 1024**2 * 4)

    def test_a_kernel_s_phase_is_of_its_time_and_its_part_of_its_launch(self):
        def event(name, begin, end, on_host=True, **more):
            return trace.Event(name, on_host, begin, end, **more)

        events = [event(name, 100.0 * i, 100.0 * i + 90) for i, name in enumerate(trace.PHASES)]
        events += [
            event(trace.PARTS["softmax"], 10.0, 20.0, annotation=True),
            event("aten::softmax", 11.0, 18.0, number=7),  # the number of an operation is no CUDA call's
            event("cudaLaunchKernel", 12.0, 13.0, number=8),
            event("cudaLaunchKernel", 30.0, 31.0, number=9),
            event("softmax_kernel", 40.0, 50.0, on_host=False, number=8),  # long after its launch
            event("gemm", 50.0, 60.0, on_host=False, number=9),
            event("gemm", 120.0, 130.0, on_host=False, number=7),
            event("softmax_backward", 240.0, 250.0, on_host=False, number=8),
            event("forward", 0.0, 90.0, on_host=False, annotation=True),
        ]
        found = [(a.name, a.step, a.phase, a.part, a.begin, a.end) for a in trace.on_gpu(events)]
        self.assertEqual(
            found,
            [
                ("softmax_kernel", 0, "forward", "softmax", 40.0, 50.0),
                ("gemm", 0, "forward", "", 50.0, 60.0),
                ("gemm", 0, "loss", "", 120.0, 130.0),
                ("softmax_backward", 0, "backward", "", 240.0, 250.0),
            ],
        )


if __name__ == "__main__":
    unittest.main()
