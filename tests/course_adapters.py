"""The course's tests/adapters.py, with tandem: tests/parity_peers.py --suite puts it into a copy of a clone."""

from tandem import DataParallel, FlashAttention, ShardedOptimizer
from tandem.fsdp import FullyShardedDataParallel


def get_flashattention_autograd_function_pytorch():
    return FlashAttention


get_flashattention_autograd_function_triton = get_flashattention_autograd_function_pytorch
get_ddp, get_fsdp, get_sharded_optimizer = DataParallel, FullyShardedDataParallel, ShardedOptimizer


def ddp_on_after_backward(model, optimizer):
    model.finish_gradient_synchronization()


def fsdp_on_after_backward(model, optimizer):
    """Gradients are averaged when backward() returns."""


def fsdp_gather_full_params(model):
    return model.gather_full_parameters()
