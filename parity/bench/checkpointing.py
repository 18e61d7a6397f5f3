"""Activation checkpointing: what a step takes, and how much memory, where backward computes activations again; and
steps of many micro-batches, for which such a step is run."""

import pandas as pd

from parity.core import Case
from parity.core.comparison import ms_of
from parity.shared.model import AS_TIMED, c_switches, torch_switches
from parity.shared.pages import MIB, extent, mark, peak_of

KEPT = {"c_keep_all": {"keep": "all"}, "c_keep_most": {"keep": "most"}, "c_checkpoint": {"keep": "inputs"}}
PEERS = {"cuda": "torch_compile_graph", "cpu": "torch_eager"}
STEP_TOKENS = 2**18  # of a step whose optimizer is spread over many micro-batches


def configs(device, dtype, checkpoint_layers):
    """Where a checkpoint has one layer, beside it the sides that keep more."""
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


def case(size, context, checkpoint_layers, device, *, shape, numel, seconds, stage=0):
    dtype = "bf16_mixed" if device == "cuda" else "f32"
    config = configs(device, dtype, checkpoint_layers)
    gpu = device == "cuda"
    return Case(
        "gradient_checkpointing",
        measure="time memory",
        repeats=3,
        together=10 if gpu else 1,
        in_turn=True,
        config=config,
        # Warm-up, samples, a step that is weighed; on a GPU PyTorch compiles a block for each of its sides.
        seconds=len(config) * (1 + numel / 1e9 + (34 if gpu else 11) * seconds) + (30 if gpu else 0),
        needs_bytes=numel * 24,
        reference="torch_checkpoint" if checkpoint_layers > 1 else PEERS[device],
        stage=stage,
        size=size,
        **shape,
        dtype=dtype,
        warmup=2,
        checkpoint_layers=checkpoint_layers,
        **{"pass": "step"},
    )


def micro_case(size, batch, *, shape, seconds, stage=0):
    """A step of STEP_TOKENS tokens in mixed precision on a GPU."""
    micro_batches = STEP_TOKENS // (batch * shape["context"])
    switches = AS_TIMED | {"gradients": "held"}
    return Case(
        "micro_batches",
        measure="time memory",
        repeats=3,
        in_turn=True,
        config={"c_graph_overlap": {"attention": "flash"} | switches | {"timed": "whole"}},
        seconds=5 + 7 * seconds,
        stage=stage,
        size=size,
        **(shape | {"batch": batch}),
        dtype="bf16_mixed",
        warmup=2,
        micro_batches=micro_batches,
        **{"pass": "step"},
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


# ---- the page ----


def report(page, records):
    report_checkpoints(page, records.only("gradient_checkpointing").records)
    report_micro_batches(page, records.only("micro_batches").records)


def place(record):
    case = record["case"]
    return *extent(case), case.get("checkpoint_layers", 0)


def report_checkpoints(page, records):
    page.section("gradient_checkpointing")
    rows, peaks = [], {}
    for record in sorted(records, key=place):
        case, impl = record["case"], record["impl"]
        row = {name: case[name] for name in ("size", "context", "dtype")} | {"side": impl}
        row["layers a checkpoint"] = str(case["checkpoint_layers"]) if "checkpoint" in impl else None
        name = {"c_keep_all": "all_mib", "c_keep_most": "most_mib", "c_checkpoint": "inputs_mib"}.get(impl)
        row |= {"time": ms_of(record), "peak": record.get("peak_mib")}
        mark(row, record)
        row["activations by the arithmetic"] = record.get("values", {}).get(name)
        rows.append(row | {"status": record["status"]})
        if impl == "c_checkpoint" and record.get("peak_mib"):
            peaks.setdefault((case["size"], case["context"]), {})[case["checkpoint_layers"]] = record
    sizes = {"peak": "MiB", "activations by the arithmetic": "MiB"}
    page.table(pd.DataFrame(rows), "checkpointing", units={"time": "ms"} | sizes)
    chosen = max(peaks, key=lambda key: (len(peaks[key]), key[1]), default=None)
    if chosen is None:
        return
    found = {k: record["peak_mib"] for k, record in peaks[chosen].items()}
    best, rest = min(found, key=found.get), sorted(set(found) - {min(found, key=found.get)})
    one = peaks[chosen].get(1)
    base = next((r for r in records if r["impl"] == "c_keep_all" and one and r["case"] == one["case"]), None)
    told = {"size": chosen[0], "context": chosen[1], "best": best, "peak": found[best]}
    if rest:
        told |= {"other": rest[0], "other_peak": found[rest[0]]}
    if base and ms_of(base) and ms_of(one):
        told |= {"ms": ms_of(one), "more": ms_of(one) / ms_of(base) - 1}
        told["less"] = 1 - one["peak_mib"] / base["peak_mib"]
    page.say(**{"other": None} | told)
    case = peaks[chosen][best]["case"]
    each = case["batch"] * case["context"] * case["d_model"] * 4 / MIB
    layer = peaks[chosen][best]["values"]["all_mib"] / case["layers"]
    page.working(size=chosen[0], input=each, layer=layer, model=(case["layers"] * each / layer) ** 0.5)
    bars = {f"k = {k}": {"activations": r["values"]["inputs_mib"]} for k, r in sorted(peaks[chosen].items())}
    page.bars(
        "checkpoints",
        bars,
        y="MiB",
        title=f"Activations by layers a checkpoint, {chosen[0]}, context {chosen[1]}, by the arithmetic",
    )
    page.method(
        "Checkpoints: whole captured steps, medians of three, and the peak of all memory. c_checkpoint runs "
        "the layers of "
        "a checkpoint forward again in backward. The same weights give the same gradients."
    )


def report_micro_batches(page, records):
    page.section("micro_batches", "What is used of the GPU if the optimizer runs once in 262,144 tokens?")
    rows, told = [], {}
    for record in sorted(records, key=place):
        case, peak = record["case"], peak_of(record)
        row = {name: case[name] for name in ("size", "dtype", "batch", "context", "micro_batches")}
        row |= {"side": record["impl"], "time": ms_of(record), "peak memory": record.get("peak_mib")}
        flops = record.get("values", {}).get("model_flops")
        tokens = case["batch"] * case["context"] * case["micro_batches"]
        if ms_of(record):
            row["tokens/s"] = 1e3 * tokens / ms_of(record)
            share = flops / ms_of(record) / 1e9 / peak if peak and flops else None
            row["MFU"] = f"{100 * share:.1f} %" if share else None
            told = {"size": case["size"], "ms": ms_of(record), "micro": case["micro_batches"], "mfu": share}
            told["tokens"] = tokens
        rows.append(row)
    page.table(pd.DataFrame(rows), "micro_batches", units={"time": "ms", "peak memory": "MiB"})
    page.say(**told)
