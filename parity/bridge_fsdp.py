"""The name of tandem.fsdp up to version 0.2; it goes in the next."""

from tandem.fsdp import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
