"""The page of parity/shard."""

import pandas as pd

from parity.shard.memory import memory_of, on_the_wire, sent_of, state_bytes
from parity.shared.bench_ranks import MIB, PARTS, POINTS, elements_of
from parity.shared.pages import on_gpu
from parity.shared.ranked import has_windows, ratio_of, spread_of, told_words, turns_of, whole_of

# ---- the page ----

ACCOUNTING = "optimizer_state_sharding_accounting"
RIGHT = "Are the weights those of one optimizer?"
HOW_LONG = "How long does a step take?"
WHERE = "Where does a rank's memory go, at three points of a step?"
SENT = "How does what is sent differ from ZeRO-1?"
STATES = ("whole", "tensors", "flat")
UNSPLIT = "`c_nccl_whole`: all ranks have and update everything, with gradients reduced in the same buckets. "
UNFUSED = "In some of these steps `torch_zero` has an AdamW that is not fused. "
WORDS = {"made": "made", "before_update": "before the update", "after_update": "after it"}


def report(page, records):
    errors = type(records)(r for r in records.records if "steps" in r["case"])
    times = type(records)(r for r in records.records if "warmup" in r["case"])
    parts = records.only(part="memory")
    page.question(RIGHT)
    rows, held = proofs(errors)
    page.table(rows, "proofs")
    page.question(WHERE)
    said = [report_memory(page, parts)]
    page.question(SENT)
    figure = report_sent(page, parts)
    page.question(HOW_LONG)
    frame, ratios, of_whole = by_kind(times)
    page.table(frame, "steps")
    words = nccl_words(times)
    if words:
        page.text(words)
    if held:
        text = f"{held}: no further from float64 than PyTorch's, the Transformer's updates within 2 %."
        page.answer("optimizer_state_sharding", text, held, question=RIGHT)
    if ratios:
        text, figure = spread_of(ratios)
        said.append(f"A step takes, times PyTorch's, {text}.")
    if of_whole:
        said.append(f"Times C's own, whose ranks have all of the state, it takes {spread_of(of_whole)[0]}.")
    if any(said):
        page.answer(ACCOUNTING, " ".join(filter(None, said)), figure, question=WHERE)
    page.method(
        f"Every rank is a process of this host; all sides run in the same processes, {turns_of(on_gpu(records))}, "
        "and a sample is the time of the slowest rank, until new weights are on all (a captured step of C's gathers "
        "those of the step before). `whole`: every rank has all of the state. `tensors`: a parameter has an owner, "
        "which updates and broadcasts it, behind gradients that are reduced in buckets. `flat`: buckets are reduced "
        "and scattered, and weights gathered. "
        + (UNSPLIT if of_whole else "")
        + (UNFUSED if is_unfused(times) else "")
        + "PyTorch's is ZeroRedundancyOptimizer behind DistributedDataParallel, with f32 gradients in bf16_mixed "
        "(`whole`: DistributedDataParallel and its own AdamW), over Gloo on the CPU and NCCL on GPUs."
    )
    page.method(
        "Memory is that of the second step. C takes all of its memory when a trainer is made; its gradients share "
        "memory with activations, and `gradients` is what they have of their own. PyTorch's points are what its "
        "allocator has given on GPUs, and on a CPU, where it keeps no account, the tensors that live on between "
        "steps; its `activations` are what forward and backward take beyond what was there. `arithmetic` is 4 bytes "
        "an element of weights and gradients and 8 of moments (6, 2 and 8 in bf16_mixed, 4 where a weight is read "
        "in f32), moments of the rank that has most. What is sent is counted in rings, in the mean over ranks: of S "
        "bytes an all-reduce sends 2 (ranks - 1) / ranks S, all others half of it."
    )


def nccl_words(times):
    """What NCCL was told in steps whose state is split, and whether it goes between GPUs directly, where records say
    it."""
    split = [r for r in times.records if r["impl"].startswith("c_") and not r["impl"].endswith("_whole")]
    mine = [r for r in split if "ms" in r]
    return told_words(
        mine,
        "`td_shard_nccl_ctas`, and `td_ddp_nccl_ctas` by tensors",
        "C's gradients, and weights that are gathered flat,",
        has_windows(mine),
    )


def report_memory(page, parts):
    """The table of the rank that has most; the sentence of the answer."""
    rows, every = [], []
    for record in of_states(parts):
        if "memory" not in record:
            continue
        case, memory = record["case"], record["memory"]
        head = {name: case[name] for name in ("size", "dtype", "ranks")} | {"state": case["shard"]}
        for rank in range(len(memory["peak_mib"])):
            every.append(head | {"side": record["impl"], "rank": rank} | columns_of(memory, rank))
        if not matching(rows, head):
            arithmetic = memory_of(case)
            rows.append(
                head | {"side": "arithmetic"} | {name_of(part): mib for part, mib in arithmetic.items()}
            )
        rows.append(head | {"side": record["impl"]} | columns_of(memory))
    page.table(shown(rows), "memory")
    page.table(pd.DataFrame(every), "memory_by_rank")
    return memory_sentence(parts)


def matching(rows, head):
    return [row for row in rows if all(row[name] == value for name, value in head.items())]


def shown(rows):
    """Of the first machine's configuration, and of the first of C's sides, whose memory is that of all."""
    if not rows:
        return pd.DataFrame()
    first = {name: rows[0][name] for name in ("size", "dtype", "ranks")}
    mine = next((row["side"] for row in rows if row["side"].startswith("c_")), None)
    chosen = [row for row in matching(rows, first) if not row["side"].startswith("c_") or row["side"] == mine]
    return pd.DataFrame(chosen).drop(columns=[*first])


def of_states(parts):
    """C's sides first, the states in their order."""
    order = {impl: i for i, impl in enumerate(parts.impls())}
    return sorted(
        parts.records,
        key=lambda r: (
            r["case"]["ranks"],
            r["case"]["dtype"] != "f32",
            STATES.index(r["case"]["shard"]),
            order[r["impl"]],
        ),
    )


def columns_of(memory, rank=None):
    """In MiB, of one rank or of the one that has most."""
    found = {}
    for name in (*PARTS, *POINTS, "peak"):
        values = memory.get(f"{name}_mib")
        if values:
            found[name_of(name)] = max(values) if rank is None else values[rank]
    return found


def name_of(key):
    return f"{WORDS.get(key, key.replace('_', ' '))} (MiB)"


def memory_sentence(parts):
    """Of the rank that has most, before the update: state and all of it, by way."""
    mine = parts.only(impl=next((impl for impl in parts.impls() if impl.startswith("c_")), ""))
    found = [record for record in of_states(mine) if "memory" in record]
    if not found:
        return ""
    case = found[0]["case"]
    alike = [r for r in found if all(r["case"][key] == case[key] for key in ("size", "dtype", "ranks"))]
    words, exact = [], True
    for record in alike:
        memory, predicted = record["memory"], state_bytes(record["case"], elements_of(record["case"]))
        most = {name: max(memory[f"{name}_mib"]) for name in ("optimizer_state", "before_update")}
        exact &= [round(mib * MIB) for mib in memory["optimizer_state_mib"]] == predicted
        words.append(
            f"{most['optimizer_state']:,.1f} of {most['before_update']:,.1f} MiB by `{record['case']['shard']}` "
            f"({max(predicted) / MIB:,.1f} predicted)"
        )
    size = f"{case['size']}, {case['dtype']}, {case['ranks']} ranks"
    said = f"Before the update ({size}) optimizer state takes {', '.join(words)}"
    return f"{said}: on every rank to the byte." if exact else f"{said}."


def report_sent(page, parts):
    """The table of calls and bytes, and the answer under it; the figure of the index."""
    rows, of_whole = [], {}
    for record in of_states(parts):
        if "collective_bytes" not in record:
            continue
        case = record["case"]
        key = (case["size"], case["dtype"], case["ranks"], record["impl"])
        gradients, weights = sent_of(case)
        if case["shard"] == "whole":
            of_whole[key] = record
        whole = of_whole.get(key)
        if whole is None:
            continue
        # What is not gradients, which are as many in all ways, is new weights.
        sent = whole["collective_bytes"]
        measured = on_the_wire(case, sent, record["collective_bytes"] - sent)
        rows.append(
            dict(zip(("size", "dtype", "ranks", "side"), key, strict=True))
            | {
                "state": case["shard"],
                "calls, formula": calls_of(case, whole["collectives"]),
                "calls": record["collectives"],
                "sent, formula (MiB)": on_the_wire(case, gradients, weights) / MIB,
                "sent (MiB)": measured / MIB,
                "times DDP's": measured / on_the_wire(case | {"shard": "whole"}, sent, 0),
            }
        )
    page.table(pd.DataFrame(rows), "sent")
    if not rows:
        return ""
    times = {row["state"]: row["times DDP's"] for row in reversed(rows)}
    calls = {row["state"]: row["calls"] for row in reversed(rows)}
    if len(times) < len(STATES):
        return ""
    page.text(
        f"Both spare the same state, but by `tensors` every rank gets all reduced gradients, of which it uses its own, "
        f"and then each parameter from its owner: {times['tensors']:.2f} times what DDP sends, in {calls['tensors']} "
        f"calls where DDP has {calls['whole']}. ZeRO-1, here `flat`, sends a rank only the gradients that it updates "
        f"with, and gathers weights bucket by bucket: {times['flat']:.2f} times DDP's bytes in {calls['flat']} calls, "
        f"and no rank has more than its share. Buckets are of {parts.records[0]['case']['bucket_mb']} MiB."
    )
    return f"{times['flat']:.2f} x DDP's bytes flat, {times['tensors']:.2f} x by tensors"


def calls_of(case, buckets):
    """Of as many buckets of gradients as DDP has."""
    if case["shard"] == "whole":
        return buckets
    return 2 * buckets if case["shard"] == "flat" else buckets + 9 * case["layers"] + 3


def proofs(errors):
    rows, ok, of = {}, 0, 0
    for record in errors.records:
        if record["status"] == "unsupported":
            continue
        case, mine = record["case"], record["impl"].startswith("c_")
        key = (case.get("model", case.get("size")), case["shard"], case["ranks"], record["impl"])
        names = ("model", "split", "ranks", "side")
        row = rows.setdefault(key, dict(zip(names, key, strict=True)) | {"results": 0, "hold": 0})
        row["results"] += 1
        row["hold"] += record["status"] == "ok"
        row["state of rank 0 (bytes)"] = record.get("values", {}).get("state_bytes")
        ok, of = ok + (mine and record["status"] == "ok"), of + mine
    return pd.DataFrame([rows[key] for key in sorted(rows)]), f"{ok} of {of} results hold" if of else ""


def is_unfused(times):
    return any(not record.get("config", {}).get("fused") for record in times.only(impl="torch_zero").records)


def by_kind(times):
    """The table, and [(ratio, of what)] of C's steps to PyTorch's and to its own with all of the state."""
    rows, said, of_whole = {}, [], []
    for record in times.records:
        if "ms" not in record:
            continue
        case = record["case"]
        key = (case["size"], case["dtype"], case["ranks"], case["bucket_mb"], case["shard"])
        names = ("size", "dtype", "ranks", "bucket (MiB)", "split")
        row = rows.setdefault(key, dict(zip(names, key, strict=True)))
        row[f"{record['impl']} (ms)"] = record["ms"]["median"]
        ratio = ratio_of(record, times, "torch_zero")
        if not ratio or record["impl"].endswith("_whole"):
            continue
        words = (
            f"{case['shard']}, {record['impl'].removeprefix('c_')} ({case['size']}, {case['dtype']}, "
            f"{case['ranks']} ranks)"
        )
        said.append((ratio, words))
        unsplit = [
            r["ms"]["median"]
            for r in times.only(impl=whole_of(record["impl"])).records
            if r["case"] == case and "ms" in r
        ]
        if unsplit:
            row[f"{record['impl']} / {whole_of(record['impl'])}"] = record["ms"]["median"] / unsplit[0]
            of_whole.append((record["ms"]["median"] / unsplit[0], words))
    return pd.DataFrame([rows[key] for key in sorted(rows)]), said, of_whole
