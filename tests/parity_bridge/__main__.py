"""The same tests on GPUs: 77 if the ranks have no GPUs; with TD_REQUIRE_GPU set, a failure."""

import os
import sys
import unittest

import torch

from parity_bridge.started import ON_GPUS, RANKS

if __name__ == "__main__":
    if not ON_GPUS:
        print(f"skipped: PyTorch sees {torch.cuda.device_count()} CUDA devices, {RANKS} are needed")
        sys.exit(1 if os.environ.get("TD_REQUIRE_GPU") else 77)
    unittest.main(module="parity_bridge", verbosity=2)
