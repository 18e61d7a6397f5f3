"""Activation checkpointing: time and memory of a step whose backward pass computes activations again."""

from parity.core import Case
from parity.shared.model import c_switches, torch_switches

KEPT = {"c_keep_all": {"keep": "all"}, "c_keep_most": {"keep": "most"}, "c_checkpoint": {"keep": "inputs"}}
PEERS = {"cuda": "torch_compile_graph", "cpu": "torch_eager"}


def configs(device, dtype, checkpoint_layers):
    """The sides. With one layer a checkpoint, also the sides that keep more."""
    gpu = device == "cuda"
    found = {}
    for impl, how in KEPT.items():
        if impl == "c_checkpoint":
            how = how | {"checkpoint_layers": checkpoint_layers}
        mine = c_switches(graph=gpu, gradients="transient", update="along", **how)
        found[impl] = {"attention": "flash"} | mine | {"timed": "whole"}
    theirs = torch_switches(dtype, compiled=gpu, graph=gpu)
    theirs |= {"attention": "fused" if gpu else "scores", "optimizer": "fused" if gpu else "loop"}
    theirs |= {"blocks": gpu, "timed": "whole"}
    found[PEERS[device]] = theirs | {"checkpoint_layers": 0}
    found["torch_checkpoint"] = theirs | {"checkpoint_layers": checkpoint_layers}
    if checkpoint_layers > 1:
        found = {impl: found[impl] for impl in ("c_checkpoint", "torch_checkpoint")}
    return found


def case(keys, device, *, numel, seconds, stage=0):
    checkpoint_layers, gpu = keys["checkpoint_layers"], device == "cuda"
    config = configs(device, keys["dtype"], checkpoint_layers)
    return Case(
        "gradient_checkpointing",
        measure="time memory",
        repeats=3,
        together=10 if gpu else 1,
        in_turn=True,
        config=config,
        # Warm-up, samples, a step that is weighed; on a GPU PyTorch compiles a block for each of its sides.
        seconds=len(config) * (1 + numel / 1e9 + (34 if gpu else 11) * seconds) + (30 if gpu else 0),
        # Of a side with checkpoints, with the initial weights. A side that keeps all may not fit.
        needs_bytes=numel * 18,
        reference="torch_checkpoint" if checkpoint_layers > 1 else PEERS[device],
        stage=stage,
        **keys,
    )


def predictions(case, c):
    """What activations take by the arithmetic of accounting.h, in MiB."""
    stream = 2 if case.dtype == "bf16" else 4
    element = 2 if case.dtype.startswith("bf16") else 4
    size = c.struct("td_account_model", case)
    block = c.value("td_account_block_activations", size, case.batch, case.context, element, stream, True)
    kept = c.value("td_account_checkpointing", case.layers, case.checkpoint_layers, block.input, block.all)
    mib = 2**20
    return {
        "all_mib": (case.layers * block.all + block.final) / mib,
        "most_mib": case.layers * block.most / mib,
        "inputs_mib": (kept + block.final) / mib,
    }
