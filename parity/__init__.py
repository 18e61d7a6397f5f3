"""Parity: identical inputs through PyTorch and through C, and what differs. `python -m parity --help`."""

import os

# PyTorch's profiler, which counts allocations for us, otherwise announces each start and stop on stderr. It
# reads this when torch is first imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "9")

# The modules in order: a fault in one shows in the later ones.
FLOORS = ("accounting", "comm", "ops", "attention", "flash", "transformer")
FLOORS += ("ddp", "shard", "precision", "bench", "memory", "trace")
