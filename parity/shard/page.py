"""The page of sharded optimizer state: proofs, memory at three points, steps, and what is sent."""

import pandas as pd

from parity.core.comparison import Comparison, ms_of
from parity.shard.memory import memory_of, on_the_wire, sent_of, state_bytes
from parity.shared.bench_ranks import MIB, PARTS, POINTS, elements_of
from parity.shared.pages import last, mark, ran_with, report_proofs, setup
from parity.shared.ranked import whole_of

STATES = ("whole", "tensors", "flat")
WORDS = {"made": "after construction", "before_update": "before the update", "after_update": "after it"}
NAMES = ("size", "dtype", "ranks")


def report(page, records):
    errors = type(records)(r for r in records.records if "steps" in r["case"])
    times = type(records)(r for r in records.records if "warmup" in r["case"])
    parts = of_states(records.only(part="memory"))
    page.section("optimizer_state_sharding")
    report_proofs(page, errors.records, "proofs", ("model", "shard", "ranks"))
    report_memory(page, parts)
    report_steps(page, times)
    report_sent(page, parts)
    page.method(
        "Every rank is a process of one host; a sample is the time of the slowest rank. whole: every rank "
        "has all of the "
        "state. tensors: a parameter has an owner, which updates and broadcasts it, after gradients were "
        "all-reduced in "
        "buckets. flat: buckets are reduce-scattered and weights are all-gathered, as ZeRO stage 1 does. "
        "PyTorch's side is "
        f"ZeroRedundancyOptimizer with DistributedDataParallel. {ran_with(times)}"
    )
    page.method(
        "Memory is that of the second step, because before the first one there are no moments. C takes all "
        "of its memory "
        "when a trainer is made, and its gradients share memory with activations. PyTorch's points are what "
        "its allocator "
        "has given. arithmetic: 4 bytes an element of weights and gradients and 8 of moments (6, 2 and 8 in "
        "bf16_mixed). "
        "Sent bytes are counted in rings: of S bytes an all-reduce sends 2 (ranks - 1) / ranks S, others half of it."
    )


def of_states(parts):
    """Records with memory: f32 first, the states in their order, C's sides first."""
    order = {impl: i for i, impl in enumerate(parts.impls())}
    found = [r for r in parts.records if "memory" in r and r["status"] == "ok"]
    return sorted(
        found,
        key=lambda r: (
            r["case"]["ranks"], r["case"]["dtype"] != "f32", STATES.index(r["case"]["shard"]), order[r["impl"]],
        ),
    )  # fmt: skip


def columns_of(memory, rank=None):
    """In MiB, of one rank or of the rank that has the most."""
    found = {name: memory.get(f"{name}_mib") for name in (*PARTS, *POINTS, "peak")}
    return {name: max(of) if rank is None else of[rank] for name, of in found.items() if of}


def titled(columns):
    return {f"{WORDS.get(name, name.replace('_', ' '))} (MiB)": mib for name, mib in columns.items()}


def of_first(parts):
    """The records of C's first side and of PyTorch, of the first configuration."""
    first = next((r for r in parts if r["impl"].startswith("c_")), None)
    sides = (first and first["impl"], "torch_ddp", "torch_zero")
    return [
        r
        for r in parts
        if first and r["impl"] in sides and all(r["case"][n] == first["case"][n] for n in NAMES)
    ]


def report_memory(page, parts):
    page.section("optimizer_state_sharding_accounting (a)")
    rows, every, bars, told = [], [], {}, {"c": {}, "torch": {}}
    for record in parts:
        head = {name: record["case"][name] for name in NAMES} | {"state": record["case"]["shard"]}
        for rank in range(len(record["memory"]["peak_mib"])):
            of_rank = titled(columns_of(record["memory"], rank))
            every.append(head | {"side": record["impl"], "rank": rank} | of_rank)
    first = of_first(parts)
    for record in first:
        case, columns = record["case"], columns_of(record["memory"])
        shard, arithmetic = case["shard"], memory_of(case)
        if not any(row["state"] == shard for row in rows):
            rows.append({"state": shard, "side": "arithmetic"} | titled(arithmetic))
        rows.append({"state": shard, "side": record["impl"]} | titled(columns))
        mine = record["impl"].startswith("c_")
        name = f"{'C' if mine else 'PyTorch'}, {'not sharded' if shard == 'whole' else f'sharded, {shard}'}"
        bars[name] = {WORDS[point]: columns[point] for point in POINTS if point in columns}
        told["c" if mine else "torch"][shard] = columns | {
            "exact": [round(mib * MIB) for mib in record["memory"].get("optimizer_state_mib", ())]
            == state_bytes(case, elements_of(case)),
            "every_gradient": arithmetic["gradients"],
            "reused": arithmetic["gradients"] - columns.get("gradients", 0.0),
        }
    if first:
        page.note(f"{setup(first[0]['case'])}; MiB of the rank with the most.")
    page.table(pd.DataFrame(rows), "memory", expected=3)
    page.table(pd.DataFrame(every), "memory_by_rank", more=True)
    where = setup(first[0]["case"]) if first else ""
    title = f"Memory at three points of a step, with and without sharding of the optimizer, {where}"
    page.bars("memory", bars, y="MiB of a rank", title=title, stacked=False)
    page.say(**(first[0]["case"] if first else {}), **told)


def report_steps(page, times):
    page.section("optimizer_state_sharding_accounting (b)")
    rows, sides = {}, {}
    for record in times.records:
        if "ms" not in record:
            continue
        case = record["case"]
        key = (case["size"], case["dtype"], case["ranks"], case["bucket_mb"], case["shard"])
        row = rows.setdefault(key, dict(zip((*NAMES, "bucket (MiB)", "split"), key, strict=True)))
        row[f"{record['impl']} (ms)"] = record["ms"]["median"]
        mark(row, record)
        sides.setdefault(key, {})[record["impl"]] = record
    for key, found in sides.items():
        for impl, record in found.items():
            if whole_of(impl) in found:
                whole = found[whole_of(impl)]
                rows[key][f"{impl} / {whole_of(impl)}"] = record["ms"]["median"] / whole["ms"]["median"]
    frame = pd.DataFrame([rows[key] for key in sorted(rows)])
    if len(frame):
        frame = frame[
            [*(name for name in frame if "_" not in name), *sorted(name for name in frame if "_" in name)]
        ]
    if sides:
        page.note("Batch {batch} a rank, context {context}.".format(**times.records[0]["case"]))
    page.table(last(frame, "noisy"), "steps", expected=2)
    if not any("whole" in impl for found in sides.values() for impl in found):
        page.lacks("steps without sharding")
    told = {}
    for key in sorted(sides, key=lambda key: (key[1] != "f32", key[2])):
        found = sides[key]
        mine = next((impl for impl in found if whole_of(impl) in found), None)
        if mine and key[-1] not in told:
            told[key[-1]] = Comparison.of(found[mine], found[whole_of(mine)])
            told.setdefault("case", dict(zip(NAMES, key, strict=False)))
            told[f"torch_{key[-1]}"] = ms_of(found.get("torch_zero"))
    page.say(**told.pop("case", {}), **told)


def calls_of(case, buckets):
    """With as many buckets of gradients as DDP has."""
    if case["shard"] == "whole":
        return buckets
    return 2 * buckets if case["shard"] == "flat" else buckets + 9 * case["layers"] + 3


def report_sent(page, parts):
    page.section("optimizer_state_sharding_accounting (c)")
    rows, of_whole, told = [], {}, {}
    for record in parts:
        if "collective_bytes" not in record:
            continue
        case = record["case"]
        key = (*(case[name] for name in NAMES), record["impl"])
        if case["shard"] == "whole":
            of_whole[key] = record
        whole = of_whole.get(key)
        if whole is None:
            continue
        # All ways send as many bytes of gradients; the rest is new weights.
        sent, (gradients, weights) = whole["collective_bytes"], sent_of(case)
        measured = on_the_wire(case, sent, record["collective_bytes"] - sent)
        ratio = measured / on_the_wire(case | {"shard": "whole"}, sent, 0)
        rows.append(
            dict(zip((*NAMES, "side"), key, strict=True))
            | {"state": case["shard"], "calls, formula": calls_of(case, whole["collectives"])}
            | {
                "calls": record["collectives"],
                "sent, formula (MiB)": on_the_wire(case, gradients, weights) / MIB,
            }
            | {"sent (MiB)": measured / MIB, "times DDP's": ratio}
        )
        told.setdefault(case["shard"], {"ratio": ratio, "calls": record["collectives"]})
    if rows:
        page.note("Batch {batch} a rank, context {context}.".format(**parts[0]["case"]))
    page.table(pd.DataFrame(rows), "sent", expected=3)
    page.say(**told)
