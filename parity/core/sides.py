"""The sides of a comparison by the names that tables have: what each one is, and how it looks on pictures."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from parity.core.tables import Table


class Legend(NamedTuple):
    """What a side is in words. A side that pictures show has the same colour and marker on all of them."""

    words: str
    colour: str = ""
    marker: str = ""


# C's sides are blue, eager PyTorch is red.
SIDES = {
    "c": Legend("C, one operation after the other", "#0b5fa5", "o"),
    "c_graph": Legend("C, the step captured as one CUDA graph", "#3f8fd2", "s"),
    "c_graph_overlap": Legend(
        "C, captured, and each layer's weights are updated during the backward pass", "#05305a", "^"
    ),
    "c_naive": Legend("C with attention scores in memory", "#7fb4e3", "v"),
    "c_flash": Legend("C's fused attention", "#62b5e5", "D"),
    "c_keep_all": Legend("C, all activations are kept"),
    "c_keep_most": Legend("C, norms and gates are computed again in backward"),
    "c_checkpoint": Legend("C, only the inputs of checkpoints are kept"),
    "c_mpi": Legend("C over MPI", "#1c6fb8", "v"),
    "c_gloo": Legend("C over Gloo", "#62a5dd", "^"),
    "c_nccl": Legend("C over NCCL", "#0a4178", "s"),
    "c_mpi_whole": Legend("C over MPI without sharding"),
    "c_gloo_whole": Legend("C over Gloo without sharding"),
    "c_nccl_whole": Legend("C over NCCL without sharding"),
    "c_bridge": Legend("FullyShardedDataParallel of tandem/fsdp.py: PyTorch's modules, C's collectives"),
    "torch_eager": Legend("PyTorch as the course writes it, eager", "#d1495b", "s"),
    "torch_eager_f32": Legend("PyTorch, eager, in f32", "#e58a97", "D"),
    "torch_eager_seed": Legend("PyTorch, eager, with another seed", "#8c1c2e", "x"),
    "torch_eager_attention": Legend("PyTorch, eager, with its fused attention", "#f2a9a0", "v"),
    "torch_eager_fused": Legend("PyTorch, eager, with its fused attention and fused AdamW", "#b55d4c", "^"),
    "torch_compile_course": Legend(
        "torch.compile of the course's model, nothing else changed", "#e3b565", "x"
    ),
    "torch_compile": Legend("torch.compile", "#c77f0a", "D"),
    "torch_compile_graph": Legend("torch.compile, captured as one CUDA graph", "#8a5200", "v"),
    "torch_checkpoint": Legend(
        "PyTorch's compiled blocks with torch.utils.checkpoint, captured as one CUDA graph"
    ),
    "torch_flash": Legend("PyTorch's fused attention (on GPUs FlashAttention-2)", "#2e8540", "^"),
    "torch_cudnn": Legend("cuDNN's attention, called by PyTorch", "#8b5fbf", "D"),
    "torch_efficient": Legend("PyTorch's memory-efficient attention", "#5b8c5a", "v"),
    "torch_tiled": Legend("the tiled algorithm in plain tensor code", "#777777", "x"),
    "torch_tf32": Legend("PyTorch with TF32 products"),
    "torch_library": Legend("PyTorch's own fused function"),
    "torch_gloo": Legend("torch.distributed over Gloo", "#da6474", "x"),
    "torch_nccl": Legend("torch.distributed over NCCL", "#a3283b", "D"),
    "torch_ddp": Legend(
        "PyTorch: the assignment's strategy, and DistributedDataParallel for buckets", "#d2566a", "D"
    ),
    "torch_ddp_compiled": Legend(
        "DistributedDataParallel with compiled blocks and fused attention, which sends bf16 in bf16_mixed"
    ),
    "torch_ddp_graph": Legend("that step captured as one CUDA graph"),
    "torch_ddp_compressed": Legend("DistributedDataParallel that sends bf16"),
    "torch_zero": Legend("PyTorch's ZeroRedundancyOptimizer"),
    "torch_fsdp": Legend("PyTorch's fully_shard (FSDP2)"),
    "torch_fsdp_compiled": Legend("fully_shard with compiled blocks and fused attention"),
}
# Where C runs no model, or runs it in another way than step by step.
SPECIAL = {
    ("attention", "c"): "C, attention with its scores in memory",
    ("bench", "torch_compile"): "torch.compile, with fused attention and a fused AdamW",
    ("flash", "c"): "C's fused attention",
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
    words = (f"`{name}`: {SPECIAL.get((module, name), SIDES[name].words)}" for name in SIDES if name in names)
    return f"Sides: {'; '.join(words)}."
