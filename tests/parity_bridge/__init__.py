"""The bridge: what PyTorch programs make of libtandem, in the shapes of the course's tests. A file for each of
parity/bridge/. On GPUs too, where there are two, or ranks may share one (TD_SHARE_GPU)."""

from parity_bridge.attention import Attention
from parity_bridge.data_parallel import DataParallel
from parity_bridge.ranks import Ranks
from parity_bridge.sharded_optimizer import ShardedOptimizer

__all__ = ["Attention", "DataParallel", "Ranks", "ShardedOptimizer"]
