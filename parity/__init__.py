"""Parity: identical inputs through PyTorch and through C, and what differs. `python -m parity --help`."""

import os

# PyTorch's profiler, which counts allocations for us, otherwise announces each start and stop on stderr. It
# reads this when torch is first imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "9")

# The modules from the ground up: what fails on a floor spoils those above it.
FLOORS = (
    "accounting",
    "comm",
    "ops",
    "attention",
    "flash",
    "jit",
    "transformer",
    "ddp",
    "shard",
    "precision",
    "bench",
    "memory",
    "trace",
)
