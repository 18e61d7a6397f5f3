"""The training step of the course's models, timed phase by phase, in C and in PyTorch from the same weights."""

from statistics import median

import pandas as pd
import torch

from parity.core import Case, Side, geomean, grid
from parity.core.clock import statistics
from parity.transformer import DTYPES, Tandem, initial_state, torch_model
from ref import bench as ref
from ref.transformer import SIZES

DELIVERABLES = {
    "benchmarking_script": "Forward, backward and optimizer of the models, and what warm-up changes",
    "benchmarking_mixed_precision": "bf16 against f32, by size (part c)",
}

VOCAB, BATCH = 10_000, 4
PHASES = ("forward", "backward", "optimizer")
GIB = 2**30
RATE = 1e11  # FLOP/s to expect, for the estimates alone


def cases(profile, device):
    if device != "cpu":
        return
    if profile == "quick":
        yield step("small", 128, "f32", "step", warmup=5, repeats=10)
        for warmup in (0, 1, 2, 5):
            yield step("small", 128, "f32", "inference", warmup=warmup, repeats=10)
        yield step("small", 128, "bf16", "inference", warmup=1, repeats=3)
        return
    for keys in grid(size=list(SIZES), context=[128, 256, 512, 1024], mode=["step", "inference"]):
        yield step(keys["size"], keys["context"], "f32", keys["mode"], warmup=5, repeats=10)
    for warmup in (0, 1, 2):
        for keys in grid(size=["small", "medium"], mode=["step", "inference"]):
            yield step(keys["size"], 128, "f32", keys["mode"], warmup=warmup, repeats=10)
    for keys in grid(size=list(SIZES), mode=["step", "inference"]):
        yield step(keys["size"], 128, "bf16", keys["mode"], warmup=1, repeats=3)


def step(size, context, dtype, mode, *, warmup, repeats):
    d_model, d_ff, layers, heads = SIZES[size]
    shape = dict(
        d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, vocab=VOCAB, batch=BATCH, context=context
    )
    numel = 2 * VOCAB * d_model + layers * (4 * d_model**2 + 3 * d_model * d_ff)
    element = 4 if dtype == "f32" else 2
    # Weights on both sides; gradients and f32 moments when training; activations are small beside them at batch 4.
    held = 2 * numel * (2 * element + 8 if mode == "step" else element) + numel * element
    work = BATCH * context * 2 * numel * (3 if mode == "step" else 1)
    deliverable = "benchmarking_mixed_precision" if dtype == "bf16" else "benchmarking_script"
    return Case(
        deliverable,
        measure="time memory" if mode == "step" else "time",
        repeats=repeats,
        seconds=numel / 2e7 + 2 * (warmup + repeats + 1) * work / RATE * (3 if dtype == "bf16" else 1),
        alone=True,  # cold, which is what the warm-up is about, and hungry
        needs_bytes=held,
        size=size,
        **shape,
        dtype=dtype,
        warmup=warmup,
        **{"pass": mode},
    )


def run(case, draw, c):
    training = case["pass"] == "step"
    state = initial_state(case, draw)
    tokens = draw.integers("tokens", (case.batch, case.context + 1), high=case.vocab)
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    tandem = Tandem(case, c, "flash", use="training" if training else "inference")
    tandem.restart(state)
    mine = ref.Times()

    def call_tandem():
        laps = [ref.perf_counter()]
        tandem.forward(ids)
        if training:
            loss = tandem.loss(targets)
        laps.append(ref.perf_counter())
        if training:
            tandem.backward()
            laps.append(ref.perf_counter())
            tandem.update()
            laps.append(ref.perf_counter())
            mine.losses.append(loss.item())
        for phase, start, end in zip(PHASES, laps, laps[1:], strict=False):
            getattr(mine, phase).append(1e3 * (end - start))
        return {}

    model = torch_model(case, state, DTYPES[case.dtype])
    trainer = ref.Trainer(model, ids, targets, mode="train" if training else "forward")

    def call_torch():
        trainer.step()
        return {}

    def torch_holds():
        held = list(model.parameters())
        if trainer.optimizer:
            held += [v for s in trainer.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        return held

    flops = model_flops(case, c)

    def phases(times):
        """Of the timed calls: those after the warm-up, without the one that weighs the memory."""
        first, last = case.warmup, case.warmup + case.repeats
        found = {phase: getattr(times, phase)[first:last] for phase in PHASES}
        found = {phase: statistics(samples) for phase, samples in found.items() if samples}
        return {"phases": found, "values": {"tokens": case.batch * case.context, "flops": flops}}

    return {
        "c": Side(call_tandem, flops=flops, record=lambda: phases(mine)),
        "torch_eager": Side(call_torch, flops=flops, holds=torch_holds, record=lambda: phases(trainer.times)),
    }


def model_flops(case, c):
    """Matrix products of the model, the same for both sides: all of S^2, backward twice forward."""
    size = c.struct("td_account_model", case)
    counted = c.value("td_account_model_flops", size, case.batch, case.context, False, False)
    return counted.forward_matmul + (counted.backward_matmul if case["pass"] == "step" else 0.0)


def report(page, records):
    script = records.only("benchmarking_script")
    report_phases(page, script)
    report_warmup(page, script)
    report_bf16(page, script, records.only("benchmarking_mixed_precision"))


def rows_of(records):
    """A row for each implementation of a case, with its phases beside the whole."""
    for record in records.records:
        row = dict(record["case"]) | {"impl": record["impl"], "status": record["status"]}
        if "ms" in record:
            row |= {
                "median": record["ms"]["median"],
                "mean": record["ms"]["mean"],
                "std": record["ms"]["std"],
            }
            row |= {"cv": record["ms"]["std"] / record["ms"]["mean"], "first": record["samples"][0]}
            row |= {"min": record["ms"]["min"], "p95": record["ms"]["p95"]}
            row["tokens_s"] = record["values"]["tokens"] / record["ms"]["median"] * 1e3
            row["gflops"] = record["values"]["flops"] / record["ms"]["median"] / 1e6
            for phase, found in record["phases"].items():
                row[phase] = f"{found['mean']:.0f} ± {found['std']:.0f}"
        row["peak_mib"] = record.get("peak_mib")
        yield row


def report_phases(page, records):
    page.question("How long do forward, backward and optimizer take (batch 4, 5 warm-up and 10 timed steps)?")
    warm = records.only(warmup=5)
    keys = ["size", "context", "impl"]
    columns = [*keys, *PHASES, "median", "min", "p95", "cv", "tokens_s", "gflops", "peak_mib", "status"]
    steps = pd.DataFrame(rows_of(warm.only(**{"pass": "step"})))
    names = {
        "median": "step",
        "cv": "std / mean",
        "tokens_s": "tokens/s",
        "gflops": "GFLOP/s",
        "peak_mib": "peak",
    }
    units = dict.fromkeys((*PHASES, "median", "min", "p95"), "ms") | {"peak_mib": "MiB"}
    if len(steps):
        page.table(
            steps,
            columns={name: names.get(name, name) for name in columns if name in steps},
            units={name: unit for name, unit in units.items() if name in steps},
        )
    ratios = warm.only(**{"pass": "step"}).ratio("ms")
    peaks = warm.only(**{"pass": "step"}).ratio("peak_mib")
    if len(ratios):
        page.text(
            "A step is forward, loss, backward and AdamW; phases are means ± standard deviations, the step's median "
            f"is {geomean(ratios):.2f} times PyTorch's with {geomean(peaks):.2f} times its memory (geometric means). "
            "C attends with flash, PyTorch as the course does; both run AdamW in the course's order. GFLOP/s counts "
            "the matrix products alone."
        )
        page.verdict(
            "benchmarking_script",
            f"step {geomean(ratios):.2f} x PyTorch eager's time, {geomean(peaks):.2f} x its memory.",
        )
    inference = pd.DataFrame(rows_of(warm.only(**{"pass": "inference"})))
    if len(inference):
        page.text("Forward alone, with nothing kept for a backward pass:")
        page.table(
            inference,
            columns={
                name: names.get(name, name)
                for name in [*keys, "mean", "std", "median", "cv", "tokens_s", "gflops"]
            }
            | {"median": "median"},
            units=dict.fromkeys(("mean", "std", "median"), "ms"),
        )


def report_warmup(page, records):
    page.question("What do fewer warm-up steps change, and why?")
    few = [row for row in rows_of(records) if row["warmup"] in (0, 1, 2, 5) and "mean" in row]
    compared = {(row["size"], row["pass"]) for row in few if row["warmup"] == 0}
    few = [row for row in few if (row["size"], row["pass"]) in compared and row["context"] == 128]
    if not few:
        return
    for row in few:
        row["first_over"] = row["first"] / row["median"]
    frame = pd.DataFrame(few).sort_values(["size", "pass", "impl", "warmup"])
    page.table(
        frame,
        columns={
            "size": "size",
            "pass": "pass",
            "impl": "impl",
            "warmup": "warm-up steps",
            "mean": "mean",
            "std": "std",
        }
        | {"median": "median", "cv": "std / mean", "first_over": "first / median"},
        units=dict.fromkeys(("mean", "std", "median"), "ms"),
    )
    cold = {row["impl"]: row["first_over"] for row in few if row["warmup"] == 0}
    warm = [row["first_over"] for row in few if row["warmup"] == 5]
    if not cold or not warm:
        return
    page.text(
        "Each row is a process of its own. Without warm-up the first step takes "
        + " and ".join(f"{ratio:.2f} times the median in {impl}" for impl, ratio in cold.items())
        + f"; after five steps {median(warm):.2f} times. It pays for what happens once: pages of memory touched for "
        "the first time, the matrix library generating its kernels, threads being started, caches being filled. One "
        "such step among ten moves the mean and the standard deviation, the median hardly; so medians are quoted here."
    )


def report_bf16(page, script, mixed):
    page.question("What does bf16 do to the time of each size?")
    rows = []
    for row in rows_of(mixed):
        same = dict(size=row["size"], context=row["context"], impl=row["impl"], warmup=5)
        base = [other for other in rows_of(script.only(**same | {"pass": row["pass"]})) if "median" in other]
        if "median" in row and base:
            row |= {"f32": base[0]["median"], "speedup": base[0]["median"] / row["median"]}
            rows.append(row)
    if not rows:
        return
    page.table(
        pd.DataFrame(rows),
        columns={
            "size": "size",
            "context": "context",
            "pass": "pass",
            "impl": "impl",
            "f32": "f32",
            "median": "bf16",
        }
        | {"speedup": "f32 / bf16"},
        units={"f32": "ms", "median": "ms"},
    )
    for impl in ("c", "torch_eager"):
        found = [row["speedup"] for row in rows if row["impl"] == impl]
        if found:
            page.text(
                f"{impl}: f32 takes {geomean(found):.2f} times bf16's time. Weights and activations are bf16 here, "
                "sums f32. Half the bytes help only where the processor multiplies bf16 itself, or where bytes are "
                "the limit; without such instructions the operands of a product are converted first."
            )
    mine = [row["speedup"] for row in rows if row["impl"] == "c"]
    page.verdict("benchmarking_mixed_precision", f"bf16 speed-up of C {geomean(mine):.2f} on this CPU.")
