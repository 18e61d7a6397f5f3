"""The name of the package `tandem` up to version 0.2; it goes in the next."""

from tandem import DataParallel, FlashAttention, ShardedOptimizer

__all__ = ["DataParallel", "FlashAttention", "ShardedOptimizer"]
