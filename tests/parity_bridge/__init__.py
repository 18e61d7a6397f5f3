"""The bridge: libtandem in PyTorch programs, in the shapes of the course's tests. One test file for each file of
tandem/. The tests also run on GPUs, if there are two, or if ranks may share one (TD_SHARE_GPU)."""

from parity_bridge.attention import Attention
from parity_bridge.data_parallel import DataParallel
from parity_bridge.ranks import Ranks
from parity_bridge.sharded_optimizer import ShardedOptimizer

__all__ = ["Attention", "DataParallel", "Ranks", "ShardedOptimizer"]
