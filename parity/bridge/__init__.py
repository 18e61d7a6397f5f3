"""libtandem for PyTorch programs: attention, data parallelism and a sharded optimizer, with the interfaces that the
course's tests call.

    o = FlashAttention.apply(q, k, v, is_causal)                          # [batch, seq, d]; differentiable
    model = DataParallel(model)                                           # "naive", "flat", "overlap" or "bucketed"
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    ...
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()

The ranks come from torch.distributed's default process group. Without one, mpirun, torchrun or srun has started them.
They send through libtandem: NCCL on GPUs, and on a CPU MPI under mpirun or else Gloo (TANDEM_BACKEND names another).
The library is build/default's, or TANDEM_LIBRARY's.

Limits are arguments of DataParallel and ShardedOptimizer, or environment variables: open_seconds (TANDEM_OPEN_SECONDS;
60) for all ranks to come, seconds (TANDEM_SECONDS; 30) for a call and for the other ranks to make it. A rank that
waits for 2 s says for what. Ctrl-C ends the wait.
"""

from parity.bridge.attention import FlashAttention
from parity.bridge.data_parallel import DataParallel
from parity.bridge.sharded_optimizer import ShardedOptimizer

__all__ = ["DataParallel", "FlashAttention", "ShardedOptimizer"]
