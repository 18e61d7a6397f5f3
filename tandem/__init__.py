"""libtandem for PyTorch programs: attention, data parallelism, full sharding and a sharded optimizer, with the
interfaces that the course's tests call. tandem.library calls any function of the library.

    o = FlashAttention.apply(q, k, v, is_causal)                          # [batch, seq, d]; differentiable
    model = DataParallel(model)                                           # "naive", "flat", "overlap" or "bucketed"
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    ...
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()

The default process group of torch.distributed gives the ranks. Without one, mpirun, torchrun or srun gives them.
docs/pytorch.md has the limits of a wait, and the environment variables. TANDEM_BACKEND names the backend; without it,
NCCL on GPUs, MPI under mpirun, else Gloo. TANDEM_LIBRARY names another library than that of
the package, or of build/default in a clone.
"""

import importlib

_FILES = {
    "DataParallel": "data_parallel",
    "FlashAttention": "attention",
    "FullyShardedDataParallel": "fsdp",
    "ShardedOptimizer": "sharded_optimizer",
}
__all__ = sorted(_FILES)


def __getattr__(name: str):
    """Imports at the first use of a name: the program `tandem` starts without PyTorch, and parity without our hooks."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
