"""The page of fully sharded weights: proofs, memory of a rank, steps, and whether gathers end in time."""

from parity.core.cards import peak_of
from parity.core.comparison import NOISY, Comparison, differing, loaded, ms_of
from parity.ddp.page import MINE, bars_of
from parity.shared.bench_ranks import CALLS
from parity.shared.pages import MIB, extent, report_proofs, setup, tabled
from parity.shared.ranked import whole_of

SHAPE = ("size", "dtype", "batch", "context", "ranks")
STATE = ("parameters", "gradients", "optimizer_state")
PARTS = (*STATE, "gathered", "reduced", "peak")
# Of the leaderboard of 2026, on two B200s: the best listed step, which is not verified, and the baseline.
PUBLISHED_MS, NAIVE_MS = 3837.0, 10_000.0
LATE_MS = 0.02  # what two events of a GPU and the clock of collectives tell apart
GATHER = CALLS.index("all_gather")
NUMBERS = {"step": "step", "ideal": "without communication", "exposed_ms": "exposed"}
NUMBERS |= {"waits_ms": "waits", "stretch": "slower compute"}


def report(page, records):
    report_proof(page, records.only("fsdp"))
    page.section("fsdp_accounting")
    parts = [r for r in records.only("fsdp_accounting", part="memory").records if r["status"] == "ok"]
    mine = [r for r in parts if r["impl"] in MINE and "memory" in r and r["case"]["shard"] == "full"]
    mine.sort(key=lambda r: (extent(r["case"]), -MINE.index(r["impl"])))
    report_memory(page, mine, [r for r in parts if "memory" in r])
    report_steps(page, records)
    report_gathers(page, [r for r in mine if "0 asked" in r.get("series", {})])
    told = {"timed": timed_of(records)}
    if mine:
        largest = mine[-1]
        told |= largest["case"] | memory_of(largest) | {"noisy": noisy(largest) or None}
        base = next((r for r in parts if whole_peak(r) and same_shape(r, largest)), None)
        if base:
            told |= {
                "peak": max(largest["memory"]["peak_mib"]),
                "whole_peak": whole_peak(base),
                "whole_held": held(base),
            }
        else:
            page.lacks("the peak of a step without sharding")
        if noisy(largest):
            page.lacks("times of a machine that was not loaded")
        else:
            told |= numbers_of(largest) | in_time(largest.get("series", {}))
        draw(page, largest)
    page.say(**told)
    page.method("fsdp")
    report_leaderboard(page, records.only("leaderboard"))


def report_proof(page, proofs):
    page.section("fsdp")
    found = []
    for record in proofs.records:
        case = record["case"]
        found.append(record | {"case": case | {"dtype": case.get("compute", case["dtype"])}})
    values = [r["values"] for r in found if r["case"]["dtype"] == "f32" and "values" in r]
    exact = [of for of in values if "apart_whole" in of]
    told = max(exact, key=lambda values: values["apart_average"], default={})
    report_proofs(page, found, "fsdp", ("model", "dtype", "ranks"), **told)


def report_leaderboard(page, records):
    page.section("leaderboard (2026)")
    rows, told = [], {}
    timed = [r for r in records.records if "ms" in r]
    for record in sorted(timed, key=lambda r: -r["ms"]["median"]):  # the fastest one is told
        case, ms, peak = record["case"], record["ms"]["median"], peak_of(record)
        tokens = 1e3 * case["batch"] * case["context"] * case["ranks"] / ms
        told = record["values"] | {"step": ms, "tokens": tokens, "ranks": case["ranks"]}
        told |= {"rate": record["tflops"], "most": record["peak_mib"]}
        told |= {"layers": case["layers"], "again": case["layers"] - case.get("kept_layers", 1)}
        told["mfu"] = record["tflops"] / peak if peak else None
        row = {name: case[name] for name in SHAPE} | {"layers that run again": told["again"]}
        row |= {"side": record["impl"], "step (ms)": ms}
        row |= {"min (ms)": record["ms"]["min"], "n": record["ms"]["n"], "tokens/s": tokens}
        row |= {"TFLOP/s a GPU": record["tflops"], "MFU": f"{100 * told['mfu']:.1f} %" if peak else None}
        rows.append(row | {"peak memory of a GPU (MiB)": told["most"]})
    page.table(rows, "leaderboard_2026")
    if told:
        page.say(
            **told,
            published=PUBLISHED_MS,
            naive=NAIVE_MS,
            machine=page.machine,
            other="B200" not in page.machine,
        )
        page.method("leaderboard", **told)


def held(record):
    """MiB of weights, gradients and optimizer state on the rank with the most, without buffers."""
    return sum(max(record["memory"].get(f"{part}_mib", [0.0])) for part in STATE)


def whole_peak(record):
    """MiB of C without sharding."""
    mine = record["impl"] in MINE and record["case"]["shard"] == "whole"
    return max(record["memory"]["peak_mib"]) if mine and "memory" in record else None


def same_shape(one, other):
    return all(one["case"][name] == other["case"][name] for name in SHAPE[:-1])  # whatever the ranks


def memory_of(record):
    return {name: record["values"][f"predicted {name}"] / MIB for name in ("whole", "total")}


def report_memory(page, mine, parts):
    rows, seen = [], set()
    for record in [*mine, *(r for r in parts if r not in mine)]:
        head = {name: record["case"][name] for name in SHAPE}
        if record in mine and tuple(head.values()) not in seen:
            seen.add(tuple(head.values()))
            values = record["values"]
            sums = memory_of(record)
            parts_of = {f"{name} (MiB)": values[f"predicted {name}"] / MIB for name in STATE}
            rows.append(head | {"side": "arithmetic, not sharded", "sum (MiB)": sums["whole"]})
            rows.append(head | {"side": "arithmetic", "sum (MiB)": sums["total"]} | parts_of)
        of_rank = {f"{name} (MiB)": max(record["memory"].get(f"{name}_mib", [None])) for name in PARTS}
        side = record["impl"] + ", not sharded" * (record["case"]["shard"] == "whole")
        rows.append(head | {"side": side, "sum (MiB)": held(record)} | of_rank)
    order = list(dict.fromkeys(tuple(row[name] for name in SHAPE) for row in rows))
    rows.sort(key=lambda row: order.index(tuple(row[name] for name in SHAPE)))
    setups = "; ".join(dict.fromkeys(setup(record["case"]) for record in parts))
    page.note(
        f"{setups}: MiB of the rank with the most. sum: weights, gradients and optimizer state. C's buffers are "
        "gathered, for gathered weights, and reduced, for gradients that are not yet reduced. peak: with activations."
    )
    titled = [{title.replace("_", " "): cell for title, cell in row.items()} for row in rows]
    page.table(titled, "fsdp_memory", expected=4)


def noisy(record):
    """Whether no sentence may be formed of its times."""
    return loaded(record) or record["values"].get("spread", 0.0) > NOISY


def report_steps(page, records):
    times = records.only("fsdp_accounting").where(lambda r: "warmup" in r["case"] and "ms" in r)
    flat = records.only("optimizer_state_sharding_accounting", shard="flat").where(lambda r: "ms" in r)

    def cells(record):
        return {f"{record['impl']} (ms)": record["ms"]["median"]}

    rows = tabled(times.records, SHAPE, cells)
    for row in rows:
        for side in MINE:
            of_zero = flat.only(impl=side, **{name: row[name] for name in SHAPE})
            found = [ms for ms in map(ms_of, of_zero.records) if ms]
            if f"{side} (ms)" in row and found:
                row[f"{side}, ZeRO-1 (ms)"] = min(found)
    if rows:
        page.note(
            "Steps in ms, batch of a rank; a sample is the time of the slowest rank. C keeps all activations, or most: "
            "without norms and gates, which backward computes again. Its gradients are in two buffers that all units "
            "share, or transient: in the memory of activations that are no longer needed."
        )
    else:
        page.lacks("steps")
    page.table(rows, "fsdp_steps")


def timed_of(records):
    """The steps of the largest model: C's, the fastest of fully_shard, and C's without sharding."""
    times = records.only("fsdp_accounting").where(lambda r: "warmup" in r["case"])
    case = max((r["case"] for r in times.records), key=extent, default=None)
    of = {r["impl"]: r for r in times.records if r["case"] == case}
    side = next((side for side in MINE if side in of), None)
    theirs = [r for impl, r in of.items() if impl.startswith("torch") and ms_of(r)]
    if side is None or not theirs:
        return None
    best, whole = min(theirs, key=ms_of), of.get(whole_of(side))
    steps = {"mine": ms_of(of[side]), "theirs": ms_of(best), "whole": ms_of(whole)}
    compared = Comparison.of(of[side], whole)
    steps["equal"] = compared and compared.verdict == "equal"
    steps |= {"differ": differing(best, of[side]), "whole_differ": differing(of[side], whole)}
    return case | steps | {"compiled": best["impl"] == "torch_fsdp_compiled"}


def numbers_of(record):
    """What communication takes of a step: exposed, as docs/ranks.md defines it; of that waits, and the rest, by which
    compute takes longer."""
    values = record["values"]
    exposed, waits = values["step"] - values["without"], values["waits"] + values["tail"]
    found = {"step": values["step"], "ideal": values["without"], "exposed_ms": exposed}
    return found | {"waits_ms": waits, "stretch": exposed - waits}


def gathers_of(series, rank):
    """Of each gather its pass, and how many ms it ends after the device came to the layer that reads it; 0: before."""
    forward_ms = series[f"{rank} passes"][0]
    reads = list(zip(series[f"{rank} asked"], series[f"{rank} there"], strict=True))
    found = []
    for call, end in zip(series["calls"], series[f"{rank} end"], strict=True):
        if call == GATHER:
            late = [end - asked for asked, there in reads if asked + LATE_MS < end <= there + LATE_MS]
            found.append(("forward" if end <= forward_ms else "backward", min(late, default=0.0)))
    return found


def ranks_of(series):
    return range(sum(name.endswith(" asked") for name in series))


def in_time(series):
    late = [ms for rank in ranks_of(series) for _, ms in gathers_of(series, rank)]
    if not late:
        return {}
    return {"gathers": len(late), "in_time": sum(ms == 0 for ms in late), "latest": max(late)}


def report_gathers(page, records):
    rows, numbers = [], []
    for record in records:
        series, head = record["series"], {name: record["case"][name] for name in SHAPE}
        head |= {"side": record["impl"]} | ({"noisy": record["impl"]} if noisy(record) else {})
        numbers.append(head | {f"{NUMBERS[name]} (ms)": ms for name, ms in numbers_of(record).items()})
        for rank in ranks_of(series):
            found = gathers_of(series, rank)
            for name in dict.fromkeys(name for name, _ in found):
                late = [ms for of, ms in found if of == name]
                row = head | {"rank": rank, "pass": name, "gathers": len(late)}
                row |= {"in time": sum(ms == 0 for ms in late), "latest (ms)": max(late)}
                rows.append(row | {"late in all (ms)": sum(late)})
    if rows:
        page.note(
            "Gathers of one step: in time if it ends before the device comes to the layer that reads it; latest: how "
            "long after that the last one ends. The first layer waits for its own gather."
        )
    page.table(rows, "fsdp_gathers")
    if numbers:
        page.note(
            "What communication takes of a step that is queued. exposed: the step less the same step without "
            "communication. waits: a pass waits for weights, or the step for the last gradients. The rest is slower "
            "compute."
        )
    page.table(numbers, "fsdp_exposed")
    if not rows:
        page.lacks("whether gathers end in time")


def draw(page, record):
    """Two ranks in one step: passes and their waits, and what each rank sends."""
    series = record.get("series", {})
    if "calls" not in series:
        return
    rows = bars_of(series)
    for rank in ranks_of(series):
        waits = zip(series[f"{rank} asked"], series[f"{rank} there"], strict=True)
        rows[f"rank {rank}"]["waiting for weights"] = [(a, b) for a, b in waits if b - a > LATE_MS]
        sent = rows[f"rank {rank} sends"].pop("communication")
        for call, span in zip(series["calls"], sent, strict=True):
            rows[f"rank {rank} sends"].setdefault(CALLS[call].replace("_", "-"), []).append(span)
    page.note("One step: what a rank computes, and below it what it gathers and reduces.")
    title = f"One training step with fully sharded weights, {setup(record['case'])}"
    page.timeline("timeline", {"": rows}, x="ms since the step began", title=title)
