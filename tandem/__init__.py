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
NCCL on GPUs, MPI under mpirun, else Gloo. TANDEM_LIBRARY names the library, if it is not build/default's.
"""

from .attention import FlashAttention
from .data_parallel import DataParallel
from .fsdp import FullyShardedDataParallel
from .sharded_optimizer import ShardedOptimizer

__all__ = ["DataParallel", "FlashAttention", "FullyShardedDataParallel", "ShardedOptimizer"]
