"""Steps and forward passes of the course's models, in C and in PyTorch: phase by phase, as the handout asks, and on a
GPU as a whole, captured and compiled."""

from itertools import product

from parity.bench import classes
from parity.bench.drivers import COLD, WARMUPS, WHOLE_CONTEXT, CDriver, TorchDriver
from parity.bench.page import report
from parity.core import Case, grid
from parity.shared.model import c_switches, draw_batch, initial_state, timed_rules, torch_switches
from parity.shared.pages import MIB
from parity.shared.sizes import BATCH, extents, keys_of
from ref.transformer import SIZES

__all__ = ["cases", "report", "run"]

KEPT = {"c_keep_all": {"keep": "all"}, "c_keep_most": {"keep": "most"}, "c_checkpoint": {"keep": "inputs"}}
LONG_S, LONGEST_S = 0.2, 0.5  # steps from which on there are fewer of warm-up
OVERHEAD_S = 1.0  # of a case on a GPU: weights drawn and laid out for each side
CONTEXTS = [128, 256, 512, 1024]
# FLOP/s to expect, which decide how often a case repeats and how long it is expected to take.
RATES = {"cpu": 1e11, "f32": 4.5e13, "tf32": 2.5e14, "bf16": 4e14, "bf16_mixed": 4e14}
EAGER_LAYER_S = 7e-3  # a layer's operations, queued by PyTorch one by one, whatever their size
LOW = ("bf16", "bf16_mixed")
BOTH = ("c", "torch_eager")
WHOLE_STEPS = 4
COLD_STEPS = max(WARMUPS) + 10
GPU_SIZES = ["2.7B", "xl", "small", "large", "medium"]  # the ones that matter most first
# What sides of PyTorch have: whether they are compiled, and whose attention and AdamW.
TORCH = {
    "torch_eager": (False, "scores", "loop"),
    "torch_eager_attention": (False, "fused", "loop"),
    "torch_eager_fused": (False, "fused", "fused"),
    "torch_compile_course": (True, "scores", "loop"),
    "torch_compile": (True, "fused", "fused"),
    "torch_compile_graph": (True, "fused", "fused"),
}


def cases(profile, device):
    if device == "cuda":
        yield from gpu_cases(profile)
        return
    if profile != "full":
        size = "laptop" if profile == "quick" else "small"
        yield step(size, 128, "f32", "step", warmup=5, repeats=10)
        for warmup in (0, 5) if profile == "quick" else (0, 1, 2, 5):
            yield step(size, 128, "f32", "inference", warmup=warmup, repeats=10)
        yield step(size, 128, "bf16", "inference", warmup=1, repeats=3)
        return
    for context in (128, 512):
        yield checkpoints("small", context, 1, "cpu")
    for keys in grid(size=list(SIZES), context=CONTEXTS, mode=["step", "inference"]):
        yield step(keys["size"], keys["context"], "f32", keys["mode"], warmup=5, repeats=10)
    for warmup in (0, 1, 2):
        for keys in grid(size=["small", "medium"], mode=["step", "inference"]):
            yield step(keys["size"], 128, "f32", keys["mode"], warmup=warmup, repeats=10)
    for keys in grid(size=list(SIZES), mode=["step", "inference"]):
        yield step(keys["size"], 128, "bf16", keys["mode"], warmup=1, repeats=3)
    for size in ("small", "medium"):
        yield step(size, 128, "f32", "inference", warmup=2, repeats=5, compiled=True)


def gpu_cases(profile):
    """Whole steps and forward passes against compiled PyTorch, the handout's grid of phases, and first steps."""
    if profile != "full":
        yield whole("small")
        yield gpu_step("small", WHOLE_CONTEXT, "bf16_mixed")
        yield cold("small", *COLD[0])
        yield checkpoints("small", 512, 1, "cuda")
        return
    for keys in grid(mode=["step", "inference"], size=GPU_SIZES):
        yield whole(**keys)
    yield by_class("2.7B")
    for keys in (("xl", 1024, 1), ("xl", 2048, 1), ("xl", 2048, 2), ("xl", 2048, 4)):
        yield checkpoints(*keys, "cuda", stage=1)
    for layers in (1, 2, 4):  # the handout's question
        yield checkpoints("2.7B", 2048, layers, "cuda", stage=2)
    for size in GPU_SIZES:  # with the handout's warm-up, however long a step is
        yield gpu_step(size, WHOLE_CONTEXT, "f32", stage=1, warmup=5)
    for keys in grid(dtype=["tf32", "bf16_mixed", "f32"], context=CONTEXTS, size=GPU_SIZES):
        if (keys["dtype"], keys["context"]) != ("f32", WHOLE_CONTEXT):
            yield gpu_step(**keys, stage=2)
    for (dtype, context), size in product(COLD, GPU_SIZES):
        yield cold(size, dtype, context)
    for dtype in ("f32", "bf16_mixed"):
        yield gpu_step("10B", WHOLE_CONTEXT, dtype, stage=3, warmup=5, mode="inference")


def switches(impl, device, dtype, mode, timed):
    """The settings of a side, which are no keys of its case. timed: "whole" steps with no clock inside, or "phases"."""
    training, captured = mode != "inference", impl in ("c_graph", "c_graph_overlap", "torch_compile_graph")
    timed = "whole" if captured else timed
    if impl.startswith("torch"):
        compiled, attention, optimizer = TORCH[impl]
        found = torch_switches(dtype, compiled=compiled, graph=captured) | {"attention": attention}
        return found | ({"optimizer": optimizer} if training else {}) | {"timed": timed}
    if not training:
        return {"attention": "flash", "graph": captured, "timed": timed}
    # On a GPU gradients may be gone after the step, and nothing is computed again; on a CPU the figures so
    # far were taken the other way.
    how = dict(keep="all", gradients="transient") if device == "cuda" else {}
    update = "along" if impl == "c_graph_overlap" else "after"
    return {"attention": "flash"} | c_switches(graph=captured, update=update, **how) | {"timed": timed}


def configs(impls, device, dtype, mode, timed="phases"):
    return {impl: switches(impl, device, dtype, mode, timed) for impl in impls}


def step(size, context, dtype, mode, *, warmup, repeats, compiled=False):
    """Phase by phase, on a CPU; `compiled`: torch.compile's step as well."""
    impls = [*BOTH, *(["torch_compile"] if compiled else [])]
    deliverable = "benchmarking_mixed_precision" if dtype in LOW else "benchmarking_script"
    numel = extents(size)[1]
    element = 2 if dtype == "bf16" else 4
    # Weights of a side, initial ones, and if it trains gradients and f32 moments. Activations are small.
    held = numel * (2 * element + 8 if mode == "step" else element)
    work = BATCH * context * 2 * numel * (3 if mode == "step" else 1)
    slow = 3 if dtype == "bf16" else 1
    return Case(
        "torch_compile" if compiled else deliverable,
        measure="time memory" if mode == "step" else "time",
        repeats=repeats,
        seconds=len(impls) * (warmup + repeats + 1) * work / RATES["cpu"] * slow + numel / 2e7,
        alone=True,  # hungry, and cold, which is what the warm-up is about
        config=configs(impls, "cpu", dtype, mode),
        needs_bytes=len(impls) * held + numel * element,
        **keys_of(size, context, dtype, mode, warmup=warmup),
    )


def on_gpu(deliverable, size, context, dtype, mode, impls, steps, warmup, held=20, compiling=0.0, **how):
    """A case whose sides run so many steps one after the other, each with `held` bytes for a weight."""
    numel, both = extents(size)[1], sum(step_seconds(size, context, dtype, mode))
    seconds = OVERHEAD_S + compiling + numel / 2e9 + steps * both * len(impls) / 2
    config = configs(impls, "cuda", dtype, mode, how.pop("timed", "phases"))
    how |= dict(in_turn=True, seconds=seconds, config=config, needs_bytes=numel * held)
    return Case(deliverable, **how, **keys_of(size, context, dtype, mode, warmup=warmup))


def gpu_step(size, context, dtype, stage=0, warmup=None, mode="step"):
    """Phase by phase: ten timed steps after 5 warm-up steps, or after fewer if a step is long."""
    _, theirs = step_seconds(size, context, dtype, mode)
    warmup, repeats = warmup or (5 if theirs < LONG_S else 2 if theirs < LONGEST_S else 1), 10
    deliverable = "benchmarking_mixed_precision" if dtype in LOW else "benchmarking_script"
    how = dict(measure="time memory", repeats=repeats, held=20 if mode == "step" else 10, stage=stage)
    how["again"] = BOTH if theirs == eager_seconds(size) else ()  # launches take longer than kernels
    return on_gpu(deliverable, size, context, dtype, mode, BOTH, warmup + repeats + 2, warmup, **how)


def cold(size, dtype, context):
    """The first steps of a process. The page forms runs of ten steps after 0 or more warm-up steps from them."""
    how = dict(measure="time", repeats=COLD_STEPS, alone=True, stage=2)
    return on_gpu("benchmarking_script", size, context, dtype, "step", BOTH, COLD_STEPS, 0, **how)


def whole(size, mode="step"):
    """Steps, or with "inference" forward passes, that nothing waits for between two readings of the clock."""
    training = mode == "step"
    course = ["torch_eager", "torch_eager_attention", *(["torch_eager_fused"] if training else [])]
    queued = ["c", *course, "torch_compile_course", "torch_compile"]
    impls = [*queued, "c_graph", *(["c_graph_overlap"] if training else []), "torch_compile_graph"]
    how = dict(measure="time memory" if training else "time", repeats=7, together=WHOLE_STEPS, timed="whole")
    how |= dict(stage=-2 if training else -1, held=20 if training else 12, compiling=1.2 * SIZES[size][2])
    steps = 7 * WHOLE_STEPS + 8
    return on_gpu("torch_compile", size, WHOLE_CONTEXT, "bf16_mixed", mode, impls, steps, 2, **how)


def by_class(size):
    """Captured steps by class of kernels: C's with the update after the backward pass and during it, and PyTorch's."""
    impls = ["c_graph", "c_graph_overlap", "torch_compile_graph"]
    how = dict(part="classes", measure="memory", stage=-1, compiling=30.0)
    return on_gpu("torch_compile", size, WHOLE_CONTEXT, "bf16_mixed", "step", impls, 12, 3, **how)


def checkpoints(size, context, layers, device, stage=0):
    """Checkpoints of so many layers."""
    numel, gpu = extents(size)[1], device == "cuda"
    dtype = "bf16_mixed" if gpu else "f32"
    seconds = BATCH * context * 8 * numel / RATES["bf16_mixed" if gpu else device]
    config = checkpoint_configs(gpu, dtype, layers)
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
        stage=stage,
        **keys_of(size, context, dtype, "step", warmup=2, checkpoint_layers=layers),
    )


def checkpoint_configs(gpu, dtype, layers):
    """The sides. With checkpoints of one layer, also the sides that keep more."""
    found = {}
    for impl, how in KEPT.items():
        more = {"checkpoint_layers": layers} if impl == "c_checkpoint" else {}
        mine = c_switches(graph=gpu, gradients="transient", update="along", **how, **more)
        found[impl] = {"attention": "flash"} | mine | {"timed": "whole"}
    theirs = torch_switches(dtype, compiled=gpu, graph=gpu)
    theirs |= {"attention": "fused" if gpu else "scores", "optimizer": "fused" if gpu else "loop"}
    theirs |= {"blocks": gpu, "timed": "whole"}
    found["torch_compile_graph" if gpu else "torch_eager"] = theirs | {"checkpoint_layers": 0}
    found["torch_checkpoint"] = theirs | {"checkpoint_layers": layers}
    if layers > 1:
        found = {impl: found[impl] for impl in ("c_checkpoint", "torch_checkpoint")}
    return found


def activations(case, c):
    """What activations take by the arithmetic of accounting.h, in MiB."""
    stream = 2 if case.dtype == "bf16" else 4
    element = 2 if case.dtype.startswith("bf16") else 4
    size = c.struct("td_account_model", case)
    block = c.value("td_account_block_activations", size, case.batch, case.context, element, stream, True)
    kept = c.value("td_account_checkpointing", case.layers, case.checkpoint_layers, block.input, block.all)
    return {
        "all_mib": (case.layers * block.all + block.final) / MIB,
        "most_mib": case.layers * block.most / MIB,
        "inputs_mib": (kept + block.final) / MIB,
    }


def step_seconds(size, context, dtype, mode="step"):
    """What a step is expected to take on a GPU: C's, and PyTorch's queued operation by operation."""
    numel = extents(size)[1]
    passes = 3 if mode == "step" else 1
    mine = BATCH * context * 2 * numel * passes / RATES[dtype] + (28 * numel / 4e12 if mode == "step" else 0)
    return mine, max(1.5 * mine, eager_seconds(size, mode))


def eager_seconds(size, mode="step"):
    """Those that PyTorch takes to queue a step operation by operation."""
    return SIZES[size][2] * EAGER_LAYER_S * (1 if mode == "step" else 1 / 3)


def run(case, draw, c):
    cpu = draw.device.type == "cpu"
    state = initial_state(case, draw.normal if cpu else draw.quickly)
    batch = (state, *draw_batch(case, draw))
    if "part" in case:
        drivers = {impl: driver_of(case, c, impl, batch) for impl in case.config}
        return classes.run(case, drivers, c)
    flops = model_flops(case, c)
    values = activations(case, c) if case.deliverable == "gradient_checkpointing" else {}
    sides = {impl: driver_of(case, c, impl, batch).side(values, flops) for impl in case.config}
    return sides | {"rule": timed_rules(case)}


def driver_of(case, c, impl, batch):
    return (TorchDriver if impl.startswith("torch") else CDriver)(case, c, impl, *batch)


def model_flops(case, c):
    """Matrix products of the model, the same for both sides: all of S^2, backward twice forward."""
    size = c.struct("td_account_model", case)
    counted = c.value("td_account_model_flops", size, case.batch, case.context, False, False)
    return counted.forward_matmul + (0.0 if case["pass"] == "inference" else counted.backward_matmul)
