"""The page of sharded optimizer state: proofs, memory at three points, steps, and what is sent."""

import pandas as pd

from parity.core.comparison import Comparison, ms_of
from parity.shard.memory import memory_of, on_the_wire, sent_of, state_bytes
from parity.shared.bench_ranks import MIB, PARTS, POINTS, elements_of
from parity.shared.pages import last, mark, ran_with
from parity.shared.ranked import whole_of

STATES = ("whole", "tensors", "flat")
WORDS = {"made": "after construction", "before_update": "before the update", "after_update": "after it"}
NAMES = ("size", "dtype", "ranks")


def report(page, records):
    errors = type(records)(r for r in records.records if "steps" in r["case"])
    times = type(records)(r for r in records.records if "warmup" in r["case"])
    parts = of_states(records.only(part="memory"))
    report_proofs(page, errors)
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


def report_proofs(page, errors):
    page.section("optimizer_state_sharding")
    rows, worst = {}, []
    for record in errors.records:
        if record["status"] == "unsupported" or not record["impl"].startswith("c_"):
            continue
        case = record["case"]
        key = (case.get("model", case.get("size")), case["shard"], case["ranks"], record["impl"])
        row = rows.setdefault(key, dict(zip(("model", "split", "ranks", "side"), key, strict=True)))
        row["results"] = row.get("results", 0) + 1
        row["hold"] = row.get("hold", 0) + (record["status"] == "ok")
        far = record.get("error", {}).get("max_abs")
        if far is not None:
            row["largest difference"] = max(far, row.get("largest difference", 0.0))
            worst.append(far)
        row["state of rank 0 (bytes)"] = record.get("values", {}).get("state_bytes")
    page.table(pd.DataFrame([rows[key] for key in sorted(rows)]), "proofs")
    held, results = (sum(row[name] for row in rows.values()) for name in ("hold", "results"))
    page.say(held=held, results=results or None, worst=max(worst, default=None))


def columns_of(memory, rank=None):
    """In MiB, of one rank or of the rank that has the most."""
    found = {}
    for name in (*PARTS, *POINTS, "peak"):
        values = memory.get(f"{name}_mib")
        if values:
            title = f"{WORDS.get(name, name.replace('_', ' '))} (MiB)"
            found[title] = max(values) if rank is None else values[rank]
    return found


def mine_of(parts):
    """The records of C's first side and of its first configuration."""
    first = next((r for r in parts if r["impl"].startswith("c_")), None)
    return [
        r
        for r in parts
        if first and r["impl"] == first["impl"] and all(r["case"][n] == first["case"][n] for n in NAMES)
    ]


def report_memory(page, parts):
    page.section("optimizer_state_sharding_accounting (a)")
    rows, every = [], []
    mine = mine_of(parts)
    for record in parts:
        case, memory = record["case"], record["memory"]
        head = {name: case[name] for name in NAMES} | {"state": case["shard"]}
        every += [
            head | {"side": record["impl"], "rank": rank} | columns_of(memory, rank)
            for rank in range(len(memory["peak_mib"]))
        ]
        if mine and all(case[name] == mine[0]["case"][name] for name in NAMES):
            if record is next(r for r in parts if r["case"] == case):
                arithmetic = {f"{part.replace('_', ' ')}_mib": [mib] for part, mib in memory_of(case).items()}
                named = {k.removesuffix("_mib").replace(" ", "_") + "_mib": v for k, v in arithmetic.items()}
                rows.append({"state": case["shard"], "side": "arithmetic"} | columns_of(named))
            if record["impl"] == mine[0]["impl"] or record["impl"].startswith("torch"):
                rows.append({"state": case["shard"], "side": record["impl"]} | columns_of(memory))
    if mine:
        page.note(
            "{size}, {dtype}, {ranks} ranks; MiB of the rank with the most".format(**mine[0]["case"]) + "."
        )
    page.table(pd.DataFrame(rows), "memory", expected=3)
    page.table(pd.DataFrame(every), "memory_by_rank", more=True)
    bars, told = {}, {}
    for record in mine:
        case, memory = record["case"], record["memory"]
        shard = "not sharded" if case["shard"] == "whole" else f"sharded, {case['shard']}"
        groups = {
            part.replace("_", " "): max(memory[f"{part}_mib"]) for part in PARTS if memory.get(f"{part}_mib")
        }
        bars[f"C, {shard}"] = groups
        told[case["shard"]] = {name: max(memory[f"{name}_mib"]) for name in (*PARTS, *POINTS, "peak")
                               if memory.get(f"{name}_mib")}  # fmt: skip
        predicted = state_bytes(case, elements_of(case))
        told[case["shard"]]["exact"] = [
            round(mib * MIB) for mib in memory["optimizer_state_mib"]
        ] == predicted
    for record in parts:
        if (
            mine
            and record["impl"].startswith("torch")
            and all(record["case"][n] == mine[0]["case"][n] for n in NAMES)
        ):
            memory = record["memory"]
            shard = (
                "not sharded" if record["case"]["shard"] == "whole" else f"sharded, {record['case']['shard']}"
            )
            bars[f"PyTorch, {shard}"] = {
                part.replace("_", " "): max(memory[f"{part}_mib"])
                for part in PARTS
                if memory.get(f"{part}_mib")
            }
    where = "{size}, {dtype}, {ranks} ranks".format(**mine[0]["case"]) if mine else ""
    page.bars(
        "memory", bars, y="MiB of a rank", title=f"Memory with and without sharding of the optimizer, {where}"
    )
    theirs = {r["case"]["shard"]: r["memory"] for r in parts if r["impl"].startswith("torch") and mine
              and all(r["case"][n] == mine[0]["case"][n] for n in NAMES)}  # fmt: skip
    page.say(
        **(mine[0]["case"] if mine else {}),
        c=told,
        torch={shard: {name: max(memory[f"{name}_mib"]) for name in (*POINTS, "peak") if memory.get(f"{name}_mib")}
               for shard, memory in theirs.items()},
    )  # fmt: skip


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
    page.table(pd.DataFrame(rows), "sent", expected=3)
    page.say(**told)
