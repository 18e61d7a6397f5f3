"""The arithmetic of the write-up: C's formulas beside what PyTorch counts on a model that is never allocated."""

import pandas as pd

from parity.core import Case, Side, equal, grid, within
from parity.shared.model import extents
from parity.shared.pages import MIB, mib, valued
from ref import accounting as ref
from ref.transformer import SIZES

DELIVERABLES = {
    "memory_accounting": "Parameters, FLOPs and bytes of the models",
    "attention_accounting": "What attention saves, and where it no longer fits",
    "ddp_bucketed_benchmarking (b)": "Bucketed data parallel: the overhead model and its optimum",
    "communication_accounting": "XXL: memory, devices, and the batch that hides communication",
    "alternate_ring_all_reduce": "A ring that passes whole buffers on",
    "data_parallel_calcs": "Data parallelism: when compute hides communication",
    "fsdp_calcs": "Sharded weights: when compute hides communication",
    "tp_calcs": "Tensor parallelism: when compute hides communication",
    "fsdp_tp_calcs": "Sharded weights and tensor parallelism together",
}

GIB = 2**30
CONTEXTS = [128, 256, 512, 1024]
LENGTHS = [256, 1024, 4096, 8192, 16384]
RUNS_RANKS = True  # they are counted here, and none is started
# The handout's model, and the rates behind its figures: 460 TFLOP/s, and 90 GB/s each way on each axis of the
# mesh.
XXL = {"d_model": 16384, "d_ff": 53248, "blocks": 126}
MESH = {"flops_per_second": 4.6e14, "bytes_per_second": 2 * 9e10}
MESH |= {"fsdp": 16, "tensor": 4, "fsdp_axes": 2, "tensor_axes": 1}
LINKS = [{"bytes_per_second": 20e9, "seconds_per_call": 50e-6}]
LINKS += [{"bytes_per_second": 230e9, "seconds_per_call": 30e-6}]
STRATEGIES = {"data": "data_parallel_calcs", "fsdp": "fsdp_calcs", "tensor": "tp_calcs"}
RATES = {name: MESH[name] for name in ("flops_per_second", "bytes_per_second")}
LAYER = {"d_model": 16384.0, "d_ff": 53248.0, "devices": 64.0, "tokens": 2.0**20}


def cases(profile, device):
    quick = (profile, device) == ("quick", "cpu")
    for size in ("small", "2.7B") if quick else SIZES:
        for context in (CONTEXTS[0], CONTEXTS[-1]) if quick else CONTEXTS:
            yield Case("memory_accounting", seconds=1, size=size, batch=4, context=context)
    for keys in grid(head_dim=[16, 64, 128], seq=LENGTHS):
        yield Case("attention_accounting", batch=8, dtype="f32", causal=False, **keys)
    for keys in LINKS:
        yield Case("ddp_bucketed_benchmarking", size="xl", **keys)
    yield Case("communication_accounting", **XXL)
    for strategy, deliverable in STRATEGIES.items():
        yield Case(deliverable, strategy=strategy)
    yield Case("fsdp_tp_calcs", strategy="fsdp_tp")
    yield Case("alternate_ring_all_reduce", ranks=8, bytes=2**30)


def run(case, draw, c):
    parts = {
        "memory_accounting": model,
        "attention_accounting": attention,
        "ddp_bucketed_benchmarking": ddp,
        "communication_accounting": xxl,
        "alternate_ring_all_reduce": ring,
        "fsdp_tp_calcs": both_strategies,
    } | dict.fromkeys(STRATEGIES.values(), parallel)
    return parts[case.deliverable](case, c)


def sides(mine, theirs, rule=None, **more):
    """C's figures, all of them in the record, and those that the other side can count as well."""
    return {
        "c": Side(lambda: {name: mine[name] for name in theirs}, record={"values": {**mine, **more}}),
        "torch_eager": lambda: theirs,
        "rule": {"*": rule or equal()},
    }


def fields(struct, *names):
    return {name: getattr(struct, name) for name in names}


def shape_of(size):
    return extents(size)[0]


def model(case, c):
    shape = shape_of(case.size)
    desc = c.struct("td_account_model", case, **shape)
    parts = ("embedding", "attention", "ffn", "norms", "head", "total", "tensors")
    mine = fields(c.value("td_account_model_parameters", desc), *parts)
    flops = c.value("td_account_model_flops", desc, case.batch, case.context, False, False)
    mine |= {"forward_flops": flops.forward_matmul, "backward_flops": flops.backward_matmul}
    sizes = c.value("td_account_model_activations", desc, case.batch, case.context, 4)
    mine |= fields(sizes, "residual", "scores", "ffn", "logits") | {"ffn_parameters": mine["ffn"]}
    training = c.value("td_account_training_memory", mine["total"], 4, 4, 4)
    copies = c.value("td_account_autocast_copies", desc, 2)

    meta = ref.meta_model(*shape.values(), case.context)
    counted = ref.parameters(meta)
    theirs = {**counted, "ffn_parameters": counted["ffn"]}
    total = ref.flops(meta, case.batch, case.context)
    theirs |= {"forward_flops": float(total["forward"]), "backward_flops": float(total["backward"])}
    heads = {name: shape[name] for name in ("d_model", "d_ff", "heads", "vocab")}
    theirs |= ref.activation_bytes(**heads, batch=case.batch, context=case.context)
    return sides(mine, theirs, training=training.total, copies=copies, **shape)


def attention(case, c):
    size = (case.batch, case.seq, case.seq, case.head_dim, 4, 2, False)
    memory = c.value("td_account_attention_memory", *size)
    mine = {"matrices": 2 * memory.matrix, "saved_naive": memory.saved_naive}
    peaks = fields(
        memory, "matrix", "saved_flash", "forward_peak", "backward_peak", "forward_flops", "softmax_flops"
    )
    oom = {
        f"oom_{gib}": c.value("td_account_attention_oom", case.batch, case.head_dim, 4, gib * GIB)
        for gib in (24, 80)
    }
    counted = ref.attention_saved_bytes(case.batch, case.seq, case.head_dim)
    return sides(mine, {"matrices": counted["matrices"]}, torch_total=counted["total"], **peaks, **oom)


def ddp(case, c):
    parameters = c.value(
        "td_account_model_parameters", c.struct("td_account_model", case, **shape_of(case.size))
    )
    size = 4.0 * parameters.total
    link = (case.bytes_per_second, case.seconds_per_call)
    best = c.value("td_account_ddp_optimum_find", size, *link)
    mine = fields(best, "buckets", "bucket_bytes", "seconds")
    one = c.value("td_account_ddp_overhead", size, *link, 1.0)
    each = c.value("td_account_ddp_overhead", size, *link, float(parameters.tensors))
    return sides(
        mine,
        ref.ddp_optimum(size, *link),
        within(rel_l2=1e-3),
        gradients=size,
        one=one,
        each=each,
        tensors=parameters.tensors,
    )


def xxl(case, c):
    desc = c.struct("td_account_xxl", case)
    memory = c.value("td_account_xxl_memory_of", desc)
    mine = fields(memory, "parameters", "state_bytes", "saved_bytes_per_token")
    more = fields(memory, "devices_80gb", "devices_80gib")
    more["fsdp_devices"] = c.value("td_account_xxl_devices", desc, 95e9)
    mesh = c.value("td_account_mesh_batch_of", desc, c.struct("td_account_mesh", case, **MESH))
    names = "alpha fsdp_tokens fsdp_tokens_per_device tensor_d_ff tensor_met shared_wire_tokens"
    names += " shared_wire_tokens_per_device optimum_tokens_per_device"
    more |= fields(mesh, *names.split())
    return sides(mine, ref.xxl(case.d_model, case.d_ff, case.blocks), **more)


def ring(case, c):
    once, alternate = c.ffi.new("double *"), c.ffi.new("double *")
    c.td_account_ring_all_reduce(float(case.bytes), case.ranks, MESH["bytes_per_second"], once, alternate)
    mine = {"ring": once[0], "alternate": alternate[0]}
    return sides(mine, ref.ring(case.bytes, case.ranks, MESH["bytes_per_second"]), within(rel_l2=1e-12))


def parallel(case, c):
    desc = c.struct("td_account_parallel", case, **LAYER, **RATES)
    times = c.value("td_account_parallel_times_of", c.enum("td_account_strategy", case.strategy), desc)
    names = ("forward_compute", "backward_compute", "forward_comm", "backward_comm")
    limits = fields(times, "forward_devices", "backward_devices")
    theirs = ref.parallel_times(case.strategy, **LAYER, **RATES)
    return sides(fields(times, *names), theirs, within(rel_l2=1e-12), **limits)


def both_strategies(case, c):
    desc = c.struct("td_account_parallel", case, **LAYER, **RATES)
    overlapped, shared = c.ffi.new("double *"), c.ffi.new("double *")
    c.td_account_fsdp_tensor_devices(desc, overlapped, shared)
    mine = {"overlapped": overlapped[0], "shared": shared[0]}
    return sides(mine, ref.both_devices(**LAYER, **RATES), within(rel_l2=1e-12))


def report(page, records):
    report_models(page, records.only("memory_accounting"))
    report_attention(page, records.only("attention_accounting"))
    report_ddp(page, records.only("ddp_bucketed_benchmarking"))
    report_xxl(page, records.only("communication_accounting"))
    report_parallel(page, records)


def report_models(page, records):
    page.question("How many parameters, bytes and FLOPs has each model (vocabulary 10,000, batch 4)?")
    rows = [row for row in valued(records) if row["context"] == 512]
    for row in rows:
        row |= {"f32": mib(4 * row["total"]), "state": row["training"] / GIB, "bf16": mib(row["copies"])}
        row |= {"forward": row["forward_flops"] / 1e12, "backward": row["backward_flops"] / 1e12}
    page.table(
        pd.DataFrame(rows),
        "models",
        columns={"size": "size", "total": "parameters", "tensors": "tensors", "f32": "f32 weights"}
        | {"state": "weights, gradients, moments", "bf16": "autocast copies"}
        | {"forward": "forward at 512", "backward": "backward at 512"},
        units={"f32": "MiB", "state": "GiB", "bf16": "MiB", "forward": "TFLOP", "backward": "TFLOP"},
        digits={"forward": 4, "backward": 4},
    )
    by_size = {row["size"]: row for row in rows}
    if "2.7B" in by_size:
        row = by_size["2.7B"]
        page.answer(
            "memory_accounting",
            f"The model called 2.7B has {row['total'] / 1e9:.2f} billion parameters, for SwiGLU has a third "
            f"matrix, and "
            f"takes {row['state']:.1f} GiB for weights, gradients and moments in f32 before any activation. Under bf16 "
            f"autocast the low-precision copies of its weights add {row['bf16'] / 1024:.1f} GiB to inference, which is "
            "why memory goes up there.",
            f"2.7B: {row['state']:.1f} GiB of state",
        )
        page.text(
            "Parameters are 2 V d + L (4 d^2 + 3 d d_ff + 2 d) + d in 9 L + 3 tensors. Training in f32 with "
            "AdamW takes "
            "16 bytes a parameter."
        )

    page.question(
        "How large is one tensor of the residual stream, and which activation of 2.7B is the largest?"
    )
    rows = []
    for row in valued(records, size="2.7B"):
        named = {name: row[name] for name in ("residual", "ffn", "scores", "logits")}
        largest = max(named, key=named.get)
        rows.append({"context": row["context"], **{n: mib(v) for n, v in named.items()}, "largest": largest})
    page.table(
        pd.DataFrame(rows),
        "activations",
        columns={"context": "context", "residual": "residual (B S d)", "ffn": "FFN hidden (B S d_ff)"}
        | {"scores": "scores (B H S^2)", "logits": "logits (B S V)", "largest": "largest"},
        units=dict.fromkeys(("residual", "ffn", "scores", "logits"), "MiB"),
    )
    page.text(
        "All but the scores grow with S, the scores with S^2, so the answer changes with the context: the hidden "
        "tensor of the feed-forward comes first for short ones, one layer's attention scores for long ones."
    )


def report_attention(page, records):
    page.question(
        "What does naive attention keep for its backward (batch 8, f32, no mask), and when does it not fit?"
    )
    rows = valued(records, head_dim=64)
    for row in rows:
        row |= {
            name: row[name] / MIB
            for name in ("matrix", "saved_naive", "saved_flash", "forward_peak", "backward_peak")
        }
    page.table(
        pd.DataFrame(rows),
        "attention",
        columns={
            "seq": "seq",
            "matrix": "one score matrix",
            "saved_naive": "saved, naive",
            "saved_flash": "saved, flash",
        }
        | {"forward_peak": "forward peak", "backward_peak": "backward peak"},
        units=dict.fromkeys(("matrix", "saved_naive", "saved_flash", "forward_peak", "backward_peak"), "MiB"),
    )
    if rows:
        last = rows[-1]
        ratio = last["forward_flops"] / last["softmax_flops"]
        page.answer(
            "attention_accounting",
            f"At {last['seq']} tokens naive attention keeps {last['saved_naive']:.0f} MiB for its backward, and flash "
            f"attention {last['saved_flash']:.0f}. The smallest power of two that does not fit is {last['oom_24']} in "
            f"24 GiB and {last['oom_80']} in 80 GiB. The products of attention are {ratio:.0f} times the FLOPs of its "
            "softmax (head_dim 64, 5 FLOPs an element), whose time is set by bytes.",
            f"{last['saved_naive'] / 1024:.1f} GiB saved at {last['seq']}",
        )
        page.text(
            "The course's softmax keeps its exponentials and their quotient, so 2 M + 4 B S d e bytes are saved for "
            "q, k, v, o and two score-sized matrices, M = B S^2 e. PyTorch's own saved tensors, counted by hooks, "
            "hold these two matrices to the byte; they have the row sums but not o, which no gradient needs: "
            f"{last['torch_total'] / MIB:.1f} MiB in all at {last['seq']}. Doubling S multiplies M by 4. The remedy is "
            "not to store S^2."
        )


def report_ddp(page, records):
    page.question("How many buckets should data parallel training of xl use, and what is left exposed then?")
    rows = valued(records)
    for row in rows:
        row |= {"w": row["bytes_per_second"] / 1e9, "o": row["seconds_per_call"] * 1e6}
        row |= {"mb": row["bucket_bytes"] / 1e6, "ms": row["seconds"] * 1e3}
        row |= {"one_ms": row["one"] * 1e3, "each_ms": row["each"] * 1e3}
    page.table(
        pd.DataFrame(rows),
        "ddp_buckets",
        columns={"w": "bandwidth w", "o": "a call o", "buckets": "buckets", "mb": "bucket", "ms": "overhead"}
        | {"one_ms": "one bucket", "each_ms": "a bucket a tensor"},
        units={"w": "GB/s", "o": "us", "mb": "MB", "ms": "ms", "one_ms": "ms", "each_ms": "ms"},
    )
    if rows:
        best = "; ".join(
            f"{row['buckets']:.0f} buckets of {row['mb']:.0f} MB leave {row['ms']:.1f} ms exposed at "
            f"{row['w']:.0f} GB/s"
            for row in rows
        )
        page.answer(
            "ddp_bucketed_benchmarking (b)",
            f"{best}. The overhead of n buckets is s / (n w) + n o, least at n = sqrt(s / (o w)), a bucket of "
            "sqrt(s o w): 2 sqrt(s o / w).",
            "; ".join(f"{row['buckets']:.0f} buckets, {row['ms']:.1f} ms" for row in rows),
        )
        page.text(
            f"With s = {rows[0]['gradients'] / 1e9:.3f} GB of f32 gradients in {rows[0]['tensors']} tensors, and "
            "compute that takes as long as the transfer, a step waits s / (n w) for the last of n buckets and n o "
            "for the calls. The optimum was also searched for by trying every number of buckets."
        )


def report_xxl(page, records):
    page.question("XXL: how much memory, how many devices, and which batch hides the communication?")
    for row in valued(records):
        page.answer(
            "communication_accounting",
            f"Weights, gradients and moments take {row['state_bytes'] / 1e12:.3f} TB, the memory of "
            f"{row['devices_80gb']:.1f} devices of 80 GB; sharded, {row['fsdp_devices']} devices of 95 GB hold a step. "
            f"The sharded weights are hidden from {row['fsdp_tokens_per_device']:.0f} tokens a device on, and from "
            f"{row['shared_wire_tokens_per_device']:.0f} where both kinds of communication share the wire.",
            f"{row['state_bytes'] / 1e12:.2f} TB; {row['fsdp_tokens_per_device']:.0f} tokens a device",
        )
        page.text(
            f"(a) {row['blocks']} blocks of two linears, d_model {row['d_model']} and d_ff {row['d_ff']}, have "
            f"{row['parameters']:,} parameters. Weights, gradients and AdamW's moments in f32 take "
            f"{row['state_bytes'] / 1e12:.3f} TB = {row['state_bytes'] / GIB:.0f} GiB, the memory of "
            f"{row['devices_80gb']:.1f} devices of 80 GB ({row['devices_80gib']:.1f} of 80 GiB). Saved for backward "
            f"in bf16: {row['saved_bytes_per_token']:,} bytes a token, the inputs of both linears of every block."
        )
        page.text(
            "(b) A device holds (16 P + A / 2) / N + A / 2 bytes, A the saved activations; as A goes to 0, "
            f"{row['fsdp_devices']} devices are enough for 95 GB each."
        )
        page.text(
            f"(c) With C = {MESH['flops_per_second']:g} FLOP/s and W = {MESH['bytes_per_second']:g} bytes/s of an "
            f"axis, both ways (the assumption behind the figures), alpha = C / W = {row['alpha']:.0f}. On a mesh of "
            f"{MESH['fsdp']} x {MESH['tensor']} ({MESH['fsdp_axes']} and {MESH['tensor_axes']} axes) the sharded "
            f"weights are hidden from {row['fsdp_tokens']:,.0f} tokens on ({row['fsdp_tokens_per_device']:.0f} a "
            f"device); tensor parallelism wants d_ff of at least {row['tensor_d_ff']:,.0f}, which "
            f"{'holds' if row['tensor_met'] else 'does not hold'}. If both share the wire it takes "
            f"{row['shared_wire_tokens']:,.0f} tokens ({row['shared_wire_tokens_per_device']:.0f} a device). The "
            f"best mesh of any shape would need {row['optimum_tokens_per_device']:.0f} tokens a device."
        )
        page.text(
            "(d) To shrink the batch further: recompute activations, fill a pipeline with micro-batches, communicate "
            "in lower precision, accumulate gradients, and overlap what remains."
        )


# What each strategy sends, for a layer of three matrices.
SENT = {
    "data": "Forward sends nothing, backward all-reduces the gradients",
    "fsdp": "Forward gathers the weights, backward gathers them again and reduce-scatters the gradients",
    "tensor": "Both passes gather activations into the layer and reduce-scatter those that leave it",
}


def report_parallel(page, records):
    page.question(
        f"One feed-forward of {LAYER['d_model']:g} x {LAYER['d_ff']:g} on {LAYER['devices']:g} devices, "
        f"{LAYER['tokens']:,.0f} tokens: which parallelism stays bound by compute, and up to how many devices?"
    )
    rows = valued(records.only(list(STRATEGIES.values())))
    names = ("forward_compute", "forward_comm", "backward_compute", "backward_comm")
    for row in rows:
        row |= {name: row[name] * 1e3 for name in names}
        row |= {
            name: "any" if row[name] is None else f"{row[name]:.0f}"
            for name in ("forward_devices", "backward_devices")
        }
        limits = [f"{row[f'{way}_devices']} devices in {way}" for way in ("forward", "backward")]
        page.answer(
            STRATEGIES[row["strategy"]],
            f"{SENT[row['strategy']]}: {row['forward_comm']:.2f} and {row['backward_comm']:.2f} ms beside "
            f"{row['forward_compute']:.2f} and {row['backward_compute']:.2f} ms of compute. It stays bound by compute "
            f"up to {' and '.join(limits)}.",
            f"{row['forward_devices']} and {row['backward_devices']} devices",
        )
    page.table(
        pd.DataFrame(rows),
        "parallelism",
        columns=["strategy", *names, "forward_devices", "backward_devices"],
        units=dict.fromkeys(names, "ms"),
    )
    page.text("The layer has three matrices; rates are those of the XXL answer.")
    for row in valued(records.only("fsdp_tp_calcs")):
        page.answer(
            "fsdp_tp_calcs",
            f"Together they stay bound by compute in forward up to {row['overlapped']:,.0f} devices where their "
            f"communication overlaps, and up to about {row['shared']:,.0f} where it shares the wire.",
            f"{row['overlapped']:,.0f} devices",
        )
    page.question("What does a ring that passes whole buffers on cost?")
    for row in valued(records.only("alternate_ring_all_reduce")):
        page.answer(
            "alternate_ring_all_reduce",
            f"Over {row['ranks']} ranks {row['bytes'] / GIB:g} GiB take {row['alternate'] * 1e3:.2f} ms, (N - "
            f"1) S / W, "
            f"and {row['ring'] * 1e3:.2f} ms in the ring that passes pieces, 2 (N - 1) / N S / W: "
            f"{row['alternate'] / row['ring']:.1f} times as long.",
            f"{row['alternate'] / row['ring']:.1f} x the ring's time",
        )
    page.text("S are the bytes, N the ranks, W the bytes/s of a link.")
