"""FlashAttention, on every kind of device."""

import os
import subprocess
import sys
import unittest
import unittest.mock

import torch
import torch.multiprocessing
from torch.nn import functional as F

import tandem as bridge
from parity_bridge.started import CUDA

DEVICES = ["cpu", *(["cuda"] if CUDA else [])]


def attention(q, k, v, causal):
    """o and L in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], device=q.device).tril().bool()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


FORK = """
import os, signal, torch
from tandem import FlashAttention

torch.set_num_threads(2)
q = torch.randn(2, 300, 32)
right = FlashAttention.apply(q, q, q, True)
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(not torch.equal(FlashAttention.apply(q, q, q, True), right))
os._exit(os.waitpid(child, 0)[1] != 0)
"""


class Attention(unittest.TestCase):
    def check(self, device, dtype, seq, seq_k, d, causal, bound, apply=bridge.FlashAttention.apply):
        make = torch.Generator(device).manual_seed(seq + d)
        sizes = [(3, seq, d), (3, seq_k, d), (3, seq_k, d), (3, seq, d)]
        drawn = [torch.randn(size, generator=make, device=device).to(dtype) for size in sizes]
        q, k, v = (x.requires_grad_() for x in drawn[:3])
        o = apply(q, k, v, causal)
        o.backward(drawn[3], retain_graph=True)  # it keeps the saved tensors
        wide = [x.detach().double().requires_grad_() for x in drawn[:3]]
        truth, lse = attention(*wide, causal)
        truth.backward(drawn[3].double())
        for name, mine, right in zip(
            "o dq dk dv".split(),
            [o, q.grad, k.grad, v.grad],
            [truth, *(x.grad for x in wide)],
            strict=True,
        ):
            error = ((mine.double() - right).norm() / right.norm()).item()
            self.assertLess(error, bound, f"{name} on {device}, {dtype}, {seq} x {seq_k} x {d}, {causal=}")
        return o, lse.detach()

    def test_values_gradients_and_what_is_saved(self):
        for device in DEVICES:
            for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3)):
                for seq, seq_k, d in ((128, 128, 64), (37, 101, 16)):
                    for causal in (False, True):
                        o, lse = self.check(device, dtype, seq, seq_k, d, causal, bound)
                        saved = [t for t in o.grad_fn.saved_tensors if t.shape == (3, seq)]
                        self.assertEqual(len(saved), 1)
                        torch.testing.assert_close(saved[0].double(), lse, rtol=1e-4, atol=1e-2)

    def test_inputs_of_any_strides(self):
        for device in DEVICES:
            packed = torch.randn(2, 33, 3, 24, device=device, requires_grad=True)
            q, k, v = packed.unbind(2)
            o = bridge.FlashAttention.apply(q, k, v)
            o.mT.contiguous().mT.backward(torch.ones_like(o).mT.contiguous().mT)
            wide = packed.detach().double().requires_grad_()
            truth, _ = attention(*wide.unbind(2), False)
            truth.backward(torch.ones_like(truth))
            torch.testing.assert_close(o.double(), truth, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(packed.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)

    def test_without_sequences_or_queries(self):
        for device in DEVICES:
            for batch, seq, seq_k in ((0, 4, 4), (2, 0, 4), (0, 4, 0)):
                shapes = [(batch, n, 8) for n in (seq, seq_k, seq_k)]
                sides = []
                for apply in (bridge.FlashAttention.apply, F.scaled_dot_product_attention):
                    inputs = [torch.ones(shape, device=device, requires_grad=True) for shape in shapes]
                    o = apply(*inputs)
                    o.sum().backward()
                    sides.append([o, *(x.grad for x in inputs)])
                for mine, theirs in zip(*sides, strict=True):
                    self.assertTrue(torch.equal(mine, theirs), (batch, seq, seq_k))

    def test_within_what_is_compiled(self):
        for device in DEVICES:

            @torch.compile(backend="aot_eager", fullgraph=True)
            def doubled(q, k, v, causal):
                return bridge.FlashAttention.apply(2 * q, k, v, causal) / 2

            def halved(q, k, v, causal):
                return 2 * doubled(q / 2, k, v, causal)

            self.check(device, torch.float32, 48, 48, 32, True, 2e-6, halved)

    def test_the_operators_keep_what_they_promise(self):
        q, k, v = (torch.randn(2, 19, 8) for _ in range(3))
        torch.library.opcheck(torch.ops.tandem.flash_forward.default, (q, k, v, True))
        o, lse = torch.ops.tandem.flash_forward(q, k, v, True)
        torch.library.opcheck(torch.ops.tandem.flash_backward.default, (q, k, v, o, o, lse, True))

    def test_a_child_of_fork(self):
        """It has no other threads, although PyTorch tells OpenMP the parent's number of them."""
        done = subprocess.run(
            [sys.executable, "-c", FORK], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        )
        self.assertEqual(done.returncode, 0)

    def test_what_cannot_be(self):
        x = torch.zeros(2, 4, 8)
        for arguments, words in (
            ((x[0], x[0], x[0]), r"\[batch, seq, d\], got \[4, 8\]"),
            ((x, x[:, :, :4], x), r"got \[2, 4, 8\], \[2, 4, 4\]"),
            ((x.double(),) * 3, "of one type, f32, bf16, f16: got torch.float64"),
            ((x, x.bfloat16(), x), "got torch.float32, torch.bfloat16"),
            ((x.half(),) * 3, "TD_UNSUPPORTED"),
            ((torch.zeros(1, 4, 300),) * 3, "head_dim is 300"),
            ((x, x[:, :0], x[:, :0]), r"k and v have no keys, for q \[2, 4, 8\]"),
        ):
            with self.assertRaisesRegex((TypeError, ValueError, RuntimeError), words):
                bridge.FlashAttention.apply(*arguments)
