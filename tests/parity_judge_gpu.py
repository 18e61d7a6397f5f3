"""Somebody's attention on a GPU: each wrong copy of the bridge's is refused for its own reason. As a program it exits
with 77 if there is no GPU; with TD_REQUIRE_GPU set it fails. `parity_judge_gpu.py FOLDER` makes the bridge's folder."""

import os
import sys
import unittest
from pathlib import Path

import parity_judge_folders as zoo
import torch

DEVICE = os.environ.get("TANDEM_JUDGE_DEVICE", "cuda")
TRITON = "get_flashattention_autograd_function_triton"
WRONG = {  # (what the class changes, which cases run, what is said)
    "causal is ignored in backward": (
        """
    @staticmethod
    def backward(ctx, do):
        ctx.is_causal = False
        return FlashAttention.backward(ctx, do)
""",
        f"{TRITON}, course, causal",
        "d[qkv]: rel_l2",
    ),
    "nobody waits for another stream": (
        """
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10**7)
            return FlashAttention.forward(ctx, q, k, v, is_causal)
""",
        f"{TRITON}, times, forward, 512",
        "after a call: is '[0-9]+ outputs changed|timed calls: is '[0-9]+ of [0-9]+ unlike",
    ),
    "a Triton function calls PyTorch's attention": (
        """
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        fused(q, k, v, is_causal=is_causal)
        return FlashAttention.forward(ctx, q, k, v, is_causal)
""",
        f"{TRITON}, course, without",
        "kernel: is .*PyTorch's aten",
    ),
}


class OnTheGpu(unittest.TestCase):
    def test_each_mistake_is_found_for_its_reason(self):
        head = f"{zoo.BRIDGE}\n\nimport torch\nfrom torch.nn.functional import scaled_dot_product_attention as fused"
        for name, (body, only, words) in WRONG.items():
            with self.subTest(name):
                text = (
                    f"{head}\n\n\nclass Wrong(FlashAttention):{body}\n\ndef {TRITON}():\n    return Wrong\n"
                )
                status, said, _ = zoo.judged(text, "--device", DEVICE, "--only", only)
                self.assertEqual(status, 1, said)
                self.assertRegex(said, words)

    def test_ranks_use_the_cpu(self):
        only = "get_(ddp|sharded_optimizer|fsdp), course, sgd"
        status, said, _ = zoo.judged(zoo.BRIDGE, "--device", DEVICE, "--only", only)
        self.assertEqual((status, said.count("right ")), (0, 3), said)


if __name__ == "__main__":
    if sys.argv[1:]:
        (tests := Path(sys.argv[1], "tests")).mkdir(parents=True)
        (tests / "adapters.py").write_text(zoo.BRIDGE)
    elif DEVICE == "cpu" or torch.cuda.is_available():
        unittest.main()
    else:
        print("skipped: PyTorch sees no CUDA device")
        sys.exit(1 if os.environ.get("TD_REQUIRE_GPU") else 77)
