"""The sides of a comparison by the names that tables have: what each one is."""

import re
from collections.abc import Iterable

from parity.core.tables import Table

SIDES = {
    "c": "C, one operation after the other",
    "c_graph": "C, the step captured as one CUDA graph",
    "c_graph_overlap": "C, captured, and each layer's weights are updated during the backward pass",
    "c_naive": "C with attention scores in memory",
    "c_keep_all": "C, all activations are kept",
    "c_keep_most": "C, norms and gates are computed again in backward",
    "c_checkpoint": "C, only the inputs of checkpoints are kept",
    "c_mpi": "C over MPI",
    "c_gloo": "C over Gloo",
    "c_nccl": "C over NCCL",
    "c_mpi_whole": "C over MPI without sharding",
    "c_gloo_whole": "C over Gloo without sharding",
    "c_nccl_whole": "C over NCCL without sharding",
    "c_bridge": "FullyShardedDataParallel of parity/bridge_fsdp.py: PyTorch's modules, C's collectives",
    "torch_eager": "PyTorch as the course writes it, eager",
    "torch_eager_f32": "PyTorch, eager, in f32",
    "torch_eager_seed": "PyTorch, eager, with another seed",
    "torch_compile": "torch.compile",
    "torch_compile_graph": "torch.compile, captured as one CUDA graph",
    "torch_checkpoint": "PyTorch with torch.utils.checkpoint",
    "torch_flash": "PyTorch's fused attention (on GPUs FlashAttention-2)",
    "torch_cudnn": "cuDNN's attention, called by PyTorch",
    "torch_efficient": "PyTorch's memory-efficient attention",
    "torch_tiled": "the tiled algorithm in plain tensor code",
    "torch_tf32": "PyTorch with TF32 products",
    "torch_library": "PyTorch's own fused function",
    "torch_gloo": "torch.distributed over Gloo",
    "torch_nccl": "torch.distributed over NCCL",
    "torch_ddp": "PyTorch: the assignment's strategy, and DistributedDataParallel for buckets",
    "torch_ddp_compiled": "DistributedDataParallel with compiled blocks",
    "torch_ddp_graph": "that step captured as one CUDA graph",
    "torch_ddp_compressed": "DistributedDataParallel that sends bf16",
    "torch_zero": "PyTorch's ZeroRedundancyOptimizer",
    "torch_fsdp": "PyTorch's fully_shard (FSDP2)",
    "torch_fsdp_compiled": "fully_shard with compiled blocks and fused attention",
}
# Where C runs no model, or runs it in another way than step by step.
SPECIAL = {
    ("attention", "c"): "C, attention with its scores in memory",
    ("flash", "c"): "C's fused attention",
    ("jit", "c"): "C's attention, compiled at run time for the shape",
    ("memory", "c"): "C with flash attention; each layer's weights are updated during backward",
    ("memory", "c_naive"): "C with attention scores in memory; all weights are updated after backward",
    ("ops", "c"): "C",
}


def explained(table: Table) -> set[str]:
    """The names of sides that a table has in its head or its cells."""
    cells = {cell for row in table.rows for cell in row if isinstance(cell, str)}
    words = {word for title in table.titles for word in re.findall(r"\w+", title)}
    return set(SIDES) & (cells | words)


def sides_note(names: Iterable[str], module: str) -> str:
    """What each of these sides is in a module."""
    words = (f"`{name}`: {SPECIAL.get((module, name), SIDES[name])}" for name in SIDES if name in names)
    return f"Sides: {'; '.join(words)}."
