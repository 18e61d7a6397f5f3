"""The page of sharded optimizer state: proofs, memory at three points, steps, and what is sent."""

from parity.core.comparison import Comparison, differing, ms_of
from parity.shard import full_page
from parity.shard.memory import memory_of, on_the_wire, sent_of, state_bytes
from parity.shared.bench_ranks import PARTS, POINTS, elements_of
from parity.shared.pages import MIB, by_case, report_proofs, setup, tabled
from parity.shared.ranked import whole_of

STATES = ("whole", "tensors", "flat")
WORDS = {"made": "after construction", "before_update": "before the update", "after_update": "after it"}
NAMES = ("size", "dtype", "ranks")
LIVING = ("parameters", "gradients", "optimizer_state", "buffers")


def report(page, records):
    split = records.only("optimizer_state_sharding_accounting")
    times = split.where(lambda r: "warmup" in r["case"])
    parts = of_states(split.only(part="memory"))
    page.section("optimizer_state_sharding")
    proofs = records.only("optimizer_state_sharding")
    report_proofs(page, proofs.records, "proofs", ("model", "shard", "ranks"))
    report_memory(page, parts)
    report_steps(page, times)
    report_sent(page, parts)
    page.method("steps")
    page.method("memory")
    full_page.report(page, records)


def of_states(parts):
    """Records with memory: f32 first, the states in their order, C's sides first."""
    order = {impl: i for i, impl in enumerate(parts.impls())}

    def place(record):
        case = record["case"]
        return case["ranks"], case["dtype"] != "f32", STATES.index(case["shard"]), order[record["impl"]]

    return sorted((r for r in parts.records if "memory" in r and r["status"] == "ok"), key=place)


def columns_of(memory):
    """MiB of the rank that has the most."""
    found = {name: memory.get(f"{name}_mib") for name in (*PARTS, *POINTS, "peak")}
    return {name: max(of) for name, of in found.items() if of}


def titled(columns):
    return {f"{WORDS.get(name, name.replace('_', ' '))} (MiB)": mib for name, mib in columns.items()}


def of_first(parts):
    """The records of C's first side and of PyTorch, of the first configuration."""
    first = next((r for r in parts if r["impl"].startswith("c_")), None)
    alike = [r for r in parts if first and all(r["case"][n] == first["case"][n] for n in NAMES)]
    return [r for r in alike if r["impl"] in (first["impl"], "torch_ddp", "torch_zero")]


def report_memory(page, parts):
    page.section("optimizer_state_sharding_accounting (a)")
    rows, told = [], {"c": {}, "torch": {}}
    first = of_first(parts)
    for record in first:
        case, columns = record["case"], columns_of(record["memory"])
        shard, arithmetic = case["shard"], memory_of(case)
        if not any(row["state"] == shard for row in rows):
            rows.append({"state": shard, "side": "arithmetic"} | titled(arithmetic))
        if "peak" in columns:  # what the other columns leave of it, which are activations and more
            columns["rest"] = columns["peak"] - sum(columns.get(name, 0.0) for name in LIVING)
            columns = {name: mib for name, mib in columns.items() if name != "activations"}
        rows.append({"state": shard, "side": record["impl"]} | titled(columns))
        mine = record["impl"].startswith("c_")
        moments = [round(mib * MIB) for mib in record["memory"].get("optimizer_state_mib", ())]
        told["c" if mine else "torch"][shard] = columns | {
            "exact": moments == state_bytes(case, elements_of(case)),
            "every_gradient": arithmetic["gradients"],
            "reused": arithmetic["gradients"] - columns.get("gradients", 0.0),
        }
    where = setup(first[0]["case"]) if first else ""
    page.note(
        f"{where}; MiB of the rank with the most, in the second step. whole: not sharded. tensors: a parameter's "
        "state has one owner. flat: every rank has the same share of all state. rest: the peak less the first four "
        "columns."
    )
    page.table(rows, "memory", expected=3)
    page.say(**(first[0]["case"] if first else {}), **told)


def report_steps(page, times):
    page.section("optimizer_state_sharding_accounting (b)")
    timed = times.where(lambda r: "ms" in r)
    timed = type(times)([*timed.records, *unsharded(page.others, timed.only(impl="torch_zero").records)])
    titles = {"bucket_mb": "bucket (MiB)", "shard": "split"}
    keys = {name: name for name in (*NAMES, "batch", "context")} | titles
    sides, impls = by_case(timed, keys), timed.impls()

    def cells(record):
        return {f"{record['impl']} (ms)": record["ms"]["median"]}

    rows = tabled(timed.records, keys, cells, order=lambda key: key)
    columns = sorted({name for row in rows for name in row} - {*keys.values(), "noisy"})
    page.table(rows, "steps", [*keys.values(), *columns], expected=2)
    if not any("whole" in impl for impl in impls):
        page.lacks("steps without sharding")
    told = {}
    for key in sorted(sides, key=lambda key: (key[1] != "f32", key[2])):
        found = sides[key]
        mine = next((impl for impl in found if whole_of(impl) in found), None)
        if mine and key[-1] not in told:
            told = dict(zip(NAMES, key, strict=False)) | told
            told[key[-1]] = Comparison.of(found[mine], found[whole_of(mine)])
            told[f"{key[-1]}_differ"] = differing(found[whole_of(mine)], found[mine])
            told[f"torch_{key[-1]}"] = ms_of(found.get("torch_zero"))
            told.setdefault("differ", differing(found[mine], found.get("torch_zero")))
            told.setdefault("torch_ddp", ms_of(found.get("torch_ddp")))
            theirs = Comparison.of(found.get("torch_zero"), found.get("torch_ddp"))
            told.setdefault("torch_equal", theirs and theirs.verdict == "equal")
    page.say(**told)


def unsharded(records, sharded):
    """PyTorch's steps without sharding for its sharded ones, if they are of the same build and day, as records of the
    sharded cases."""
    for zero in sharded:
        case = {name: zero["case"][name] for name in (*NAMES, "bucket_mb", "batch", "context")}
        for record in records.only("ddp_bucketed_benchmarking", impl="torch_ddp", **case).records:
            if "ms" in record and run_of(record) == run_of(zero):
                yield record | {"case": zero["case"]}


def run_of(record):
    return record.get("build", {}).get("commit"), record.get("time", "")[:10]


def calls_of(case, buckets):
    """With as many buckets of gradients as DDP has."""
    if case["shard"] == "whole":
        return buckets
    return 2 * buckets if case["shard"] == "flat" else buckets + 9 * case["layers"] + 3


def report_sent(page, parts):
    page.section("optimizer_state_sharding_accounting (c)")
    rows, of_whole, told = [], {}, {}
    for record in parts:
        case, calls = record["case"], record.get("collectives")
        key = (*(case[name] for name in NAMES), record["impl"])
        if case["shard"] == "whole":
            of_whole[key] = record
        whole = of_whole.get(key)
        if whole is None or "collective_bytes" not in record:
            continue
        # All ways send as many bytes of gradients; the rest is new weights.
        sent = whole["collective_bytes"]
        measured = on_the_wire(case, sent, record["collective_bytes"] - sent)
        ratio = measured / on_the_wire(case | {"shard": "whole"}, sent, 0)
        row = dict(zip((*NAMES, "side"), key, strict=True)) | {"state": case["shard"]}
        row |= {"calls, formula": calls_of(case, whole["collectives"]), "calls": calls}
        row |= {"sent, formula (MiB)": on_the_wire(case, *sent_of(case)) / MIB, "sent (MiB)": measured / MIB}
        rows.append(row | {"times DDP's": ratio})
        told.setdefault(case["shard"], {"ratio": ratio, "calls": calls})
    page.table(rows, "sent", expected=3)
    page.say(**told)
