"""Activation checkpointing: what a step takes, and how much memory, where backward computes activations again; and
steps of many micro-batches, for which such a step is run."""

import pandas as pd

from parity.core import Case
from parity.shared.model import AS_TIMED, c_switches, torch_switches
from parity.shared.pages import peak_of, units_of
from ref.transformer import SIZES

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


def micro_case(size, batch, *, shape, seconds, keep="all", stage=0):
    """A step of STEP_TOKENS tokens in mixed precision on a GPU."""
    micro_batches = STEP_TOKENS // (batch * shape["context"])
    switches = AS_TIMED | {"gradients": "held", "keep": keep}
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


def by_case(records):
    found = {}
    for record in sorted(records, key=lambda r: place(r["case"])):
        found.setdefault(tuple(record["case"].items()), {})[record["impl"]] = record
    return [(dict(keys), sides) for keys, sides in found.items()]


def place(case):
    return list(SIZES).index(case["size"]), case["context"], case.get("checkpoint_layers", 0)


def report_checkpoints(page, records):
    cases = by_case(records)
    if not cases:
        return
    page.question("What does activation checkpointing save, and what does it cost?")
    rows, saved, added = [], [], []
    for case, sides in cases:
        key = {name: case[name] for name in ("size", "context", "dtype")}
        base = sides.get("c_keep_all", {})
        for impl, record in sides.items():
            row = key | {"layers a checkpoint": None, "side": impl}
            if "checkpoint" in impl:
                row["layers a checkpoint"] = str(case["checkpoint_layers"])
            if "ms" not in record:
                rows.append(row | {"time": record["status"]})
                continue
            row |= {"time": record["ms"]["median"], "peak": record.get("peak_mib")}
            name = {"c_keep_all": "all_mib", "c_keep_most": "most_mib", "c_checkpoint": "inputs_mib"}.get(
                impl
            )
            row["activations by the arithmetic"] = record.get("values", {}).get(name)
            rows.append(row)
            if impl == "c_checkpoint" and "ms" in base:
                if record.get("peak_mib") and base.get("peak_mib"):
                    saved.append(1 - record["peak_mib"] / base["peak_mib"])
                added.append(record["ms"]["median"] / base["ms"]["median"] - 1)
    whole = pd.DataFrame(rows).dropna(axis="columns", how="all")
    for size, context in dict.fromkeys((row["size"], row["context"]) for row in rows):
        frame = whole[(whole["size"] == size) & (whole["context"] == context)]
        sizes = units_of(frame, ["peak", "activations by the arithmetic"], "MiB")
        page.table(frame, f"checkpointing_{size}_{context}", units=units_of(frame, ["time"], "ms") | sizes)
    page.method(
        "A whole training step, medians of three samples, and the peak of its memory. c_keep_all finds all of "
        "forward's activations in backward, c_keep_most computes norms and silu(gate) up again, c_checkpoint keeps "
        "the inputs of checkpoints and runs the layers of each but the last one forward again; their gradients are "
        "the same bits where nothing is summed in another order. torch_checkpoint is the PyTorch side above it with "
        "torch.utils.checkpoint around as many layers. Activations by the arithmetic are those of "
        "td_account_block_activations and td_account_checkpointing; C's plan has them within a thousandth "
        "(tests/transformer_memory.c). C's gradients share memory with activations."
    )
    best = best_spans(cases)
    if best:
        page.text(
            "Checkpoints of k layers keep the inputs of N / k checkpoints and the activations of k layers. Without "
            "regard to compute the least is recursive halving: backward of a half begins from a checkpoint in its "
            "middle, and so on down to one layer. That keeps one layer's activations and about log2 N inputs, and runs "
            "forward N log2 N times over instead of N."
        )
    if saved:
        page.answer(
            "gradient_checkpointing",
            f"Checkpoints of one layer take {100 * min(saved):.0f} to {100 * max(saved):.0f} % less memory for "
            f"{100 * min(added):.0f} to {100 * max(added):.0f} % more time than a step that keeps all."
            + (f" Of one level, {best}." if best else "")
            + " Without regard to compute the least is recursive halving: one layer's activations, log2 N inputs.",
            f"{100 * min(saved):.0f} to {100 * max(saved):.0f} % less memory",
        )


def best_spans(cases):
    """In words, the peaks of every model that has several."""
    peaks = {}
    for case, sides in cases:
        record = sides.get("c_checkpoint", {})
        if record.get("peak_mib"):
            peaks.setdefault((case["size"], case["context"]), {})[case["checkpoint_layers"]] = record[
                "peak_mib"
            ]
    said = []
    for (size, context), found in peaks.items():
        if len(found) > 1:
            best = min(found, key=found.get)
            figures = ", ".join(f"{peak:.0f} MiB (k = {span})" for span, peak in sorted(found.items()))
            said.append(
                f"{size} at context {context} has {figures}, so that k = {best} is the least measured"
            )
    return "; ".join(said)


def report_micro_batches(page, records):
    rows, shares = [], []
    for case, sides in by_case(records):
        for impl, record in sides.items():
            row = {name: case[name] for name in ("size", "dtype", "batch", "context", "micro_batches")}
            row["tokens a step"] = case["batch"] * case["context"] * case["micro_batches"]
            row["side"] = impl
            if "ms" not in record:
                rows.append(row | {"time": record["status"]})
                continue
            seconds, peak = record["ms"]["median"] / 1e3, peak_of(record)
            flops = record.get("values", {}).get("model_flops")
            share = flops / seconds / 1e12 / peak if peak and flops else None
            shares += [(case["size"], share)] if share else []
            row |= {"time": 1e3 * seconds, "tokens/s": row["tokens a step"] / seconds}
            row |= {"peak memory": record.get("peak_mib"), "MFU": f"{100 * share:.1f} %" if share else None}
            rows.append(row)
    if not rows:
        return
    page.question("What is used of the GPU where the optimizer comes once in 262,144 tokens?")
    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    memory = units_of(frame, ["peak memory"], "MiB")
    page.table(frame, "micro_batches", units=units_of(frame, ["time"], "ms") | memory)
    page.method(
        "Steps of many micro-batches, captured, whose gradients are added up in f32; medians of three. MFU: the "
        "products that the model asks for, over time and the data sheet's peak of dense products. Of a step of T "
        "tokens in batches of context S they are 6 T (L (4 d^2 + 3 d d_ff) + d V) for the linear layers and "
        "6 T S d L for attention, of whose scores the masked half is not counted; nothing that is computed twice "
        "counts twice."
    )
    if shares:
        figure = ", ".join(f"{100 * share:.1f} % ({size})" for size, share in shares)
        page.answer(
            "micro_batches",
            f"Where the optimizer comes once in {STEP_TOKENS:,} tokens, the MFU is {figure}, of the products that the "
            "model asks for and the data sheet's peak.",
            f"MFU {figure}",
        )
