"""PyTorch's own counts of parameters, FLOPs and bytes, on models without storage."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ref.attention import attention
from ref.transformer import Transformer, cross_entropy


def meta_model(d_model: int, d_ff: int, layers: int, heads: int, vocab: int, context: int) -> Transformer:
    """The model on the meta device: shapes and dtypes without storage."""
    with torch.device("meta"):
        return Transformer(d_model, d_ff, layers, heads, vocab, context)


def parameters(model: nn.Module) -> dict[str, int]:
    """Elements by part, and the number of tensors."""
    parts = {"embedding": 0, "attention": 0, "ffn": 0, "norms": 0, "head": 0}
    for name, p in model.named_parameters():
        keys = {"token_": "embedding", ".attn.": "attention", ".ffn.": "ffn", "lm_head": "head"}
        part = next((part for key, part in keys.items() if key in name), "norms")
        parts[part] += p.numel()
    tensors = list(model.parameters())
    return {**parts, "total": sum(p.numel() for p in tensors), "tensors": len(tensors)}


def flops(model: Transformer, batch: int, context: int) -> dict[str, int]:
    """GEMM FLOPs of a forward and of a backward pass, by PyTorch's counter."""
    ids = torch.zeros(batch, context, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        loss = cross_entropy(model(ids), ids)
        forward = counter.get_total_flops()
        loss.backward()
    return {"forward": forward, "backward": counter.get_total_flops() - forward}


def flops_of_layers(
    d_model: int, d_ff: int, layers: int, heads: int, vocab: int, batch: int, context: int
) -> dict[str, int]:
    """flops() of a model with `layers` equal layers, extrapolated from models with one layer and with two."""
    one, two = (
        flops(meta_model(d_model, d_ff, count, heads, vocab, context), batch, context) for count in (1, 2)
    )
    return {way: one[way] + (layers - 1) * (two[way] - one[way]) for way in one}


def saved_bytes(function, *inputs) -> list[tuple[tuple[int, ...], int]]:
    """(shape, bytes) of each tensor that autograd keeps for backward; each storage counts once."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept.setdefault(storage._cdata, (tuple(tensor.shape), storage.nbytes(), storage))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*inputs)
    return [(shape, size) for shape, size, _ in kept.values()]


def attention_saved_bytes(batch: int, seq: int, head_dim: int, dtype=torch.float32) -> dict[str, int]:
    """Bytes that naive attention keeps for its backward: of score-sized matrices, and in all."""
    shape = (batch, seq, head_dim)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for _ in "qkv")
    kept = saved_bytes(attention, q, k, v)
    matrices = sum(size for shape, size in kept if shape[-2:] == (seq, seq))
    return {"matrices": matrices, "total": sum(size for _, size in kept)}


def activation_bytes(
    d_model: int, d_ff: int, heads: int, vocab: int, batch: int, context: int
) -> dict[str, int]:
    """Bytes of one residual tensor, one score matrix, one hidden tensor of the feed-forward, and the logits."""
    model = meta_model(d_model, d_ff, 1, heads, vocab, context)
    seen = {}

    def watch(name):
        return lambda module, inputs, output: seen.update({name: output.nbytes})

    model.token_embeddings.register_forward_hook(watch("residual"))
    model.layers[0].ffn.w1.register_forward_hook(watch("ffn"))
    model.lm_head.register_forward_hook(watch("logits"))
    ids = torch.zeros(batch, context, dtype=torch.long, device="meta")
    kept = saved_bytes(model, ids)
    seen["scores"] = max(size for shape, size in kept if shape[-2:] == (context, context))
    return seen


def ddp_optimum(size: float, bytes_per_second: float, seconds_per_call: float) -> dict[str, float]:
    """The best number of buckets, found by a search in steps of 0.01."""
    buckets = torch.arange(100, 100_000, dtype=torch.float64) / 100
    seconds = size / (buckets * bytes_per_second) + buckets * seconds_per_call
    best = seconds.argmin()
    return {
        "buckets": buckets[best].item(),
        "bucket_bytes": size / buckets[best].item(),
        "seconds": seconds[best].item(),
    }


def xxl(d_model: int, d_ff: int, blocks: int) -> dict[str, int]:
    """Blocks of two linears on the meta device: weights, AdamW's state, and bytes saved for one bf16 token."""
    with torch.device("meta"):
        block = nn.Sequential(nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_ff, d_model, bias=False))
        token = torch.empty(1, d_model, dtype=torch.bfloat16, requires_grad=True)
    numel = blocks * sum(p.numel() for p in block.parameters())
    kept = saved_bytes(block.bfloat16(), token)
    saved = sum(size for shape, size in kept if shape[0] == 1)
    return {"parameters": numel, "state_bytes": 4 * 4 * numel, "saved_bytes_per_token": blocks * saved}


def ring(size: int, ranks: int, bytes_per_second: float) -> dict[str, float]:
    """Seconds of a ring all-reduce, step by step. Parts go round the ring twice: once to be summed, once to be spread.
    In the alternate ring each step sends whole buffers."""
    parts = sum(size / ranks for _ in range(2 * (ranks - 1)))
    whole = sum(size for _ in range(ranks - 1))
    return {"ring": parts / bytes_per_second, "alternate": whole / bytes_per_second}


def parallel_times(strategy, d_model, d_ff, devices, tokens, flops_per_second, bytes_per_second):
    """Seconds of one feed-forward of three matrices in 16 bits, from the collectives of each strategy."""
    weights, activations = 3 * d_model * d_ff * 2, tokens * d_model * 2
    products = 3 * 2 * tokens * d_model * d_ff / (devices * flops_per_second)

    def gather(size):  # a reduce-scatter moves as many bytes
        return (devices - 1) / devices * size / bytes_per_second

    forward, backward = {
        "data": (0.0, 2 * gather(weights)),  # all-reduce of the gradients
        "fsdp": (gather(weights), 2 * gather(weights)),  # forward: weights; backward: weights and gradients
        "tensor": (2 * gather(activations), 2 * gather(activations)),  # before the layer, and after it
    }[strategy]
    return {
        "forward_compute": products,
        "backward_compute": 2 * products,
        "forward_comm": forward,
        "backward_comm": backward,
    }


def both_devices(d_model, d_ff, devices, tokens, flops_per_second, bytes_per_second):
    """The most devices for which compute hides communication in forward, with FSDP and tensor parallelism together.
    overlapped: both communicate at the same time, so it is the product of their limits. shared: both on one wire, whose
    time for X and Y devices, wire["fsdp"] (X - 1) + wire["tensor"] (Y - 1), is at most the compute."""
    rates = dict(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)

    def times(strategy, count):
        return parallel_times(strategy, d_model, d_ff, count, tokens, **rates)

    def limit(strategy):
        low, high = 1.0, 1e9  # communication is hidden at `low` and not at `high`
        for _ in range(200):
            middle = (low * high) ** 0.5
            found = times(strategy, middle)
            if found["forward_comm"] <= found["forward_compute"]:
                low = middle
            else:
                high = middle
        return low

    compute = times("fsdp", 1.0)["forward_compute"]
    wire = {
        "fsdp": 3 * d_model * d_ff * 2 / bytes_per_second,
        "tensor": 2 * tokens * d_model * 2 / bytes_per_second,
    }
    budget = compute + sum(wire.values())
    return {
        "overlapped": limit("fsdp") * limit("tensor"),
        "shared": (budget / 2 / wire["fsdp"])
        * (budget / 2 / wire["tensor"]),  # X Y is the largest with equal terms
    }
