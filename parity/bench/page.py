"""The page of bench: phases of the models' steps, warm-up, precision, compiling, checkpoints."""

import itertools
import math
import re

from parity.bench.classes import GROUPS
from parity.bench.drivers import COLD, PHASES, WARMUPS, WHOLE_CONTEXT
from parity.core.cards import peak_of
from parity.core.clock import statistics
from parity.core.comparison import ADAMW_BYTES, clean, differing, ms_of
from parity.core.tables import Spread
from parity.core.view import number
from parity.shared.pages import MIB, by_case, extent, mark, on_gpu
from parity.shared.sizes import extents

COMPILED = ("torch_compile", "torch_compile_graph")
COURSE = ("torch_eager_attention", "torch_eager_fused", "torch_compile_course")
# The side from which each side differs by one change.
CHANGES = {
    "torch_eager": None,
    "torch_compile_course": "torch_eager",
    "torch_eager_attention": "torch_eager",
    "torch_eager_fused": "torch_eager_attention",
    "torch_compile": "torch_eager_fused",
    "torch_compile_graph": "torch_compile",
    "c": None,
    "c_graph": "c",
    "c_graph_overlap": "c_graph",
}
SPENT = {"c_graph_overlap": "mine", "c_graph": "after", "torch_compile_graph": "theirs"}
ORDER = ("c", "c_graph", "c_graph_overlap", "torch_eager", *COURSE, *COMPILED)
BOTH = ("c", "torch_eager")
HELD_UNTIL = (
    "2026-11-28T19:15"  # records before this: our harness held the first weights on the card meanwhile
)
LARGEST = "10B"  # 2026 has its forward pass
SLOWER = 1.1  # times a settled step: what a first step takes at least for a sentence


def report(page, records):
    grid = in_order(records.only(["benchmarking_script", "benchmarking_mixed_precision"]))
    warm = grid.where(lambda r: r["case"]["warmup"] > 0 and not is_cold(r))
    compiled = in_order(records.only("torch_compile"))
    page.section("benchmarking_script (a)")
    page.say()
    report_phases(page, warm)
    report_warmup(page, grid)
    report_precision(page, warm)
    report_compiled(page, compiled, warm)
    report_checkpoints(page, records.only("gradient_checkpointing").records)
    page.method("steps")


def is_cold(record):
    """Whether it has all steps of a process, from the first one on."""
    case = record["case"]
    return "device" in record and case["warmup"] == 0 and (case["dtype"], case["context"]) in COLD


def in_order(records):
    """By dtype, size, context and side, whatever order they ran in."""
    dtypes = ("f32", "tf32", "bf16_mixed")

    def place(record):
        case, impl = record["case"], record["impl"]
        dtype = dtypes.index(case["dtype"]) if case["dtype"] in dtypes else len(dtypes)
        side = ORDER.index(impl) if impl in ORDER else len(ORDER)
        return dtype, *extent(case), side, -case["warmup"]

    return records.ordered(place)


def phases_of(record):
    phases = record.get("phases", {})
    return {name: Spread(phases[name]["mean"], phases[name]["std"]) for name in PHASES if name in phases}


def asked_context(records):
    """512, if it has as many sizes as any other context."""

    def order(context):
        return len(records.only(context=context).values("size")), context == WHOLE_CONTEXT, context

    return max(records.values("context"), key=order, default=0)


def report_phases(page, warm):
    page.section("benchmarking_script (b)")
    f32 = warm.only(dtype="f32", impl=list(BOTH), **{"pass": "step"})
    asked = f32.only(context=asked_context(f32))
    rows = []
    forward = warm.only(dtype="f32", impl=list(BOTH), size=LARGEST, **{"pass": "inference"}).records
    for record in [*asked.records, *forward]:
        size, impl = record["case"]["size"], record["impl"]
        row = {"size": size, "side": impl}
        if any(row == {name: other[name] for name in row} for other in rows):
            continue
        if "ms" not in record:
            rows.append(row | {"step": record["status"]})
            continue
        ms, warmup = record["ms"], record["case"]["warmup"]
        row |= phases_of(record)
        row |= {"step": Spread(ms["mean"], ms["std"])} if record not in forward else {}
        row |= {"warm-up steps": warmup, "steps": ms["n"]}
        mark(row, record)
        rows.append(row | {"% of the bound": page.rates.share(record, ADAMW_BYTES * extents(size)[1])})
    page.note(
        f"f32, batch 4, context {asked_context(f32)}; means ± standard deviations in ms. A step is longer than "
        "the sum of its passes, by what lies between them. % of the bound: of the median."
    )
    page.table(rows, "phases", units=dict.fromkeys((*PHASES, "step"), "ms"), expected=2 * 5)
    ended = [r for r in asked.only(impl="torch_eager").records if r["status"] == "oom"]
    lost = list(dict.fromkeys(r["case"]["size"] for r in ended))
    same = {"impl": "torch_eager", "part": "peaks", "dtype": "f32", "pass": "step", "size": lost}
    alone = page.others.only("memory_profiling", context=asked_context(f32), **same) if lost else None
    alone = alone and alone.where(lambda r: r.get("peak_mib")).first()
    if lost:
        why = "out of memory" + ", because our harness holds weights as well" * bool(held_weights(ended))
        page.lacks(f"PyTorch's {', '.join(lost)} in f32: {why}")
    sizes = [size for size in asked.values("size") if clean(asked.first(impl="c", size=size))]
    forwards = []
    for size in sizes:
        mine, theirs = (asked.first(impl=impl, size=size) for impl in BOTH)
        row = {"size": size} | {phase: phase_ms(mine, phase) for phase in PHASES}
        forwards.append(row | {f"torch_{phase}": phase_ms(theirs, phase) for phase in PHASES})
    both, spreads = [row for row in forwards if row["torch_forward"]], {}
    ends = {"small": forwards[:1], "large": forwards[-1:], "most": both[-1:]}
    for record in filter(clean, asked.records):
        found = {name: of for name, of in phases_of(record).items() if of.mean}
        for phase, spread in found.items():
            told = (spread.std / spread.mean, phase, record["case"]["size"], spread)
            spreads[record["impl"]] = max(told, spreads.get(record["impl"], told))
    page.say(
        **{name: row for name, found in ends.items() for row in found},
        spreads=spreads,
        several=len(sizes) > 1,
        lost=lost,
        held=held_weights(ended),
        alone=alone and alone["case"] | {"peak": alone["peak_mib"]},
    )
    order = ["dtype", "size", "context", "pass", "side", *PHASES, "median", "n", "MFU", "peak", "status"]
    page.table(map(step_row, warm.records), "steps", order, {"median": "ms", "peak": "MiB"}, more=True)


def held_weights(records):
    return any(record.get("time", "") < HELD_UNTIL for record in records) or None


def phase_ms(record, phase):
    """The mean of a phase; None if it was not timed."""
    return (record or {}).get("phases", {}).get(phase, {}).get("mean")


def step_row(record):
    row = {name: record["case"][name] for name in ("dtype", "size", "context", "pass")}
    row |= {"side": record["impl"], "peak": record.get("peak_mib"), "status": record["status"]}
    if "ms" in record:
        peak = peak_of(record)
        share = f"{100 * record['tflops'] / peak:.0f} %" if peak and record.get("tflops") else None
        row |= phases_of(record) | {"median": record["ms"]["median"], "n": record["ms"]["n"], "MFU": share}
    return row


def report_warmup(page, grid):
    """The ten steps after w warm-up steps of one run, all of whose steps were timed. On a CPU each w has its run."""
    page.section("benchmarking_script (c)")
    rows, firsts = {}, {}
    cold = [(r["case"]["dtype"], r["case"]["context"]) for r in grid.records if is_cold(r)]
    setting = next((of for of in COLD if of in cold), None)
    for record in grid.records:
        case, steps = record["case"], record.get("samples", [])
        key = {"size": case["size"], "pass": case["pass"], "side": record["impl"]}
        found, settled = {}, None
        if is_cold(record) and (case["dtype"], case["context"]) != setting:
            continue
        if is_cold(record) and len(steps) > max(WARMUPS) + 1:
            for warmup in WARMUPS:
                found[warmup] = statistics(steps[warmup : warmup + len(steps) - max(WARMUPS)])
            settled = statistics(steps[max(WARMUPS) :])["median"]
        elif (case["context"], case["dtype"]) == (128, "f32") and "ms" in record and "device" not in record:
            found[case["warmup"]] = record["ms"]
        row = rows.setdefault(tuple(key.values()), key)
        row |= {f"w = {warmup}": Spread(ms["mean"], ms["std"]) for warmup, ms in found.items()}
        if 0 in found and steps:
            usual = settled or record["ms"]["median"]
            row |= {"first step": steps[0], "settled": settled, "first / settled": steps[0] / usual}
            firsts.setdefault(record["impl"], []).append((steps[0], usual, case))
    steps_after = [f"w = {w}" for w in WARMUPS]
    names = ["size", "pass", "side", "first step", *steps_after, "settled", "first / settled"]
    for *_, case in itertools.islice(itertools.chain(*firsts.values()), 1):
        page.note(
            "{dtype}, batch {batch}, context {context}; whole steps. Mean ± standard deviation in ms of the ten steps "
            "after w warm-up steps. settled: the median after the fifth.".format(**case)
        )
    shown = [row for row in rows.values() if "w = 0" in row]
    page.table(shown, "warmup", names, dict.fromkeys(("first step", "settled"), "ms"), expected=2)
    ratios = [first / settled for found in firsts.values() for first, settled, _ in found]
    told = {}
    if ratios and min(ratios) > SLOWER:  # else it is noise
        for impl, found in firsts.items():
            start, settled, case = max(found, key=lambda times: times[0] / times[1])
            told[impl] = {"first": start, "settled": settled, "size": case["size"]}
            row = rows[case["size"], case["pass"], impl]
            means = {f"w{warmup}": row.get(f"w = {warmup}") for warmup in WARMUPS}
            told[impl] |= means | {"steady": steady([means[name] for name in ("w1", "w2", "w5")])}
    dtype, context = setting or (None, None)
    same = setting == ("f32", WHOLE_CONTEXT) or None  # as in (b)
    page.say(**told, dtype=dtype, context=context, same=same, gpu=on_gpu(grid) if told else None)


def steady(spreads):
    """Whether these means differ by no more than their deviations, or by 1 %."""
    means = [spread.mean for spread in spreads if spread]
    most = max((max(spread.std, 0.01 * spread.mean) for spread in spreads if spread), default=0.0)
    return (len(means) == len(spreads) and max(means) - min(means) <= most) or None


def report_precision(page, warm):
    """Forward and backward with and without bf16; forward alone if no step was measured with bf16."""
    page.section("benchmarking_mixed_precision (c)")
    bf16 = warm.only(dtype=["bf16_mixed", "bf16"])
    context, passes = asked_context(bf16), ("forward", "backward", "whole")
    rows, found, lost = [], {}, []
    for record in bf16.only(context=context, impl=list(BOTH)).records:
        case, impl = record["case"], record["impl"]
        same = {"size": case["size"], "context": context, "pass": case["pass"]}
        base = warm.first(impl=impl, dtype="f32", **same)
        if not (base and "ms" in base and "ms" in record):
            lost += [f"{impl} of {case['size']}"] * (case["pass"] == "step")
            continue
        row = {"size": case["size"], "pass": case["pass"], "side": impl}
        for what in passes:
            wide, low = (r["ms"]["mean"] if what == "whole" else phase_ms(r, what) for r in (base, record))
            if wide and low:
                row |= {f"{what} f32": wide, f"{what} bf16": low, f"{what}, f32 / bf16": wide / low}
        for one, name in ((base, "f32"), (record, "bf16")):
            mark(row, one, name)
            for what in passes[:2]:
                if what in one.get("phases", {}):
                    mark(row, one | {"ms": one["phases"][what]}, f"{what} {name}")
        rows.append(row)
        if clean(base) and clean(record):
            found.setdefault((case["pass"], impl), []).append(row)
    warmups = {
        r["case"]["size"]: r["case"]["warmup"] for r in bf16.only(context=context, impl=list(BOTH)).records
    }
    few = [f"of {size} {count}" for size, count in warmups.items() if count < max(warmups.values())]
    page.note(
        f"Batch 4, context {context}, means in ms; the device is waited for after each phase. f32: without TF32. "
        f"whole: forward alone, or a step with its optimizer. Warm-up steps: {max(warmups.values(), default=0)}"
        f"{', in bf16 ' * bool(few)}{' and '.join(few)}."
    )
    order = [f"{what}{end}" for what in passes for end in (" f32", " bf16", ", f32 / bf16")]
    units = {name: "ms" for name in order if "/" not in name}
    asked = [row for row in rows if row["pass"] == "step" or row["size"] == LARGEST]
    page.table(asked or rows, "precision", ["size", "side", *order], units, expected=10)
    if lost:
        page.lacks(f"{', '.join(lost)}, without a time in both dtypes")
    mine = found.get(("step", "c")) or found.get(("inference", "c")) or []
    page.say(
        **({key.replace(" ", "_"): value for key, value in mine[-1].items()} if mine else {}),
        ends={impl: rows for (what, impl), rows in found.items() if what == "step"},
        gpu=on_gpu(warm) if mine else None,
    )


def report_compiled(page, compiled, others):
    page.section("torch_compile (b)")
    whole = compiled.where(lambda r: "part" not in r["case"])
    steps, forward = (whole.only(**{"pass": what}) for what in ("step", "inference"))
    rows = []
    for (size,), sides in by_case(whole, ["size"]).items():
        for impl in (impl for impl in CHANGES if impl in sides):
            step, alone = (found.first(impl=impl, size=size) for found in (steps, forward))
            base = CHANGES[impl]
            while base and base not in sides:
                base = CHANGES[base]
            other = base and (steps if step else forward).first(impl=base, size=size)
            row = {"size": size, "side": impl, "base": base}
            row["changes"] = ", ".join(differing(step or alone, other)) if other else None
            for what, record in (("forward", alone), ("step", step)):
                row[f"{what} (ms)"] = (record and number(record, "ms")) or (record or {}).get("status")
                mark(row, record, what)
            row |= {"peak (MiB)": (step or {}).get("peak_mib"), "% of the bound": page.rates.share(step)}
            rows.append(row)
    page.note(
        f"Batch 4, context {WHOLE_CONTEXT}, bf16_mixed: the forward pass without gradients, and a whole step. changes: "
        "what the side has other than the side `base` (its own first)."
    )
    page.table(rows, "changes", expected=len(CHANGES) * 2)  # a small and a large size
    if not any(impl in whole.impls() for impl in COURSE):
        page.lacks("the unchanged model compiled, and one change at a time")
    spent = report_classes(page, compiled.only(part="classes"), steps)
    page.say(step=said_of(steps, others), forward=said_of(forward, others), classes=spent)


def report_classes(page, records, steps):
    """Captured steps by what ran; returns the times of C's with the update along and after, and of PyTorch's."""
    rows, told = [], {}
    for record in (r for r in records.records if "GEMM" in r.get("values", {})):
        values = record["values"]
        row = {"size": record["case"]["size"], "side": record["impl"]}
        row |= {f"{name} (ms)": values[name] for name in (*GROUPS, "idle")}
        row |= {"sum (ms)": sum(values[name] for name in (*GROUPS, "idle"))}
        told |= {"size": row["size"], SPENT.get(record["impl"]): values | {"step": row["sum (ms)"]}}
        alone = steps.first(impl=record["impl"], size=row["size"])
        rows.append(row | {"without a profiler (ms)": ms_of(alone)})
    page.note(
        "Where the time of a captured step goes, by PyTorch's profiler for all sides. While kernels of several groups "
        "run, the time counts for the first of them. optimizer alone: no other kernel runs."
    )
    page.table(rows, "classes")
    return told


def said_of(records, others):
    """The largest size that eager and compiled PyTorch have clean times of, and the smallest; what else differs."""
    sizes = {size: sides for (size,), sides in by_case(records, ["size"]).items() if fastest(sides, COMPILED)}
    usable = {size: sides for size, sides in sizes.items() if clean(sides.get("torch_eager"))}
    if not usable:
        return None
    (least, *_), (*_, size) = usable, usable
    told, small = ({impl: ms_of(r) for impl, r in usable[s].items()} | {"size": s} for s in (size, least))
    mine, best = (fastest(usable[size], impls) for impls in (ORDER[:3], COMPILED))
    eager, compiled = usable[size]["torch_eager"], usable[size].get("torch_compile")
    told |= {"c": ms_of(mine), "best": ms_of(best), "c_differ": differing(best, mine)}
    told["update_differs"] = told["c_differ"] == ["update (after, along)"]
    told["differ"] = [of for of in differing(compiled, eager) if not of.startswith("compilation")]
    told["course"] = "torch_compile_course" in usable[size] or None
    told["small"] = small if least != size else None
    same = {name: eager["case"][name] for name in ("size", "context", "dtype", "pass")}
    again = [ms for ms in map(ms_of, others.only(impl="torch_eager", **same).records) if ms]
    series = [ms_of(eager), *again]
    apart = max(series) / min(series) - 1
    return told | ({"others": again, "apart": apart} if apart > 0.05 else {})


def fastest(sides, impls):
    return min((sides[impl] for impl in impls if clean(sides.get(impl))), key=ms_of, default=None)


def place(record):
    case = record["case"]
    return *extent(case), case.get("checkpoint_layers", 0)


def report_checkpoints(page, records):
    page.section("gradient_checkpointing")
    rows, peaks = [], {}
    activations = {"c_keep_all": "all_mib", "c_keep_most": "most_mib", "c_checkpoint": "inputs_mib"}
    for record in sorted(records, key=place):
        case, impl, peak = record["case"], record["impl"], record.get("peak_mib")
        row = {name: case[name] for name in ("size", "context", "dtype")} | {"side": impl}
        row["layers per checkpoint"] = str(case["checkpoint_layers"]) if "checkpoint" in impl else None
        row |= {"time": ms_of(record), "peak": peak}
        mark(row, record)
        row["activations by the arithmetic"] = record.get("values", {}).get(activations.get(impl))
        rows.append(row | {"status": record["status"]})
        if peak and "checkpoint" in impl:
            sides = peaks.setdefault((case["size"], case["context"]), {})
            sides.setdefault(impl, {})[case["checkpoint_layers"]] = record
    sizes = {"peak": "MiB", "activations by the arithmetic": "MiB"}
    asked = any((r["case"]["size"], r["case"]["context"]) == ("2.7B", 2048) for r in records)
    page.note("2.7B is the xl of 2026. Batch 4.")
    page.table(rows, "checkpointing", units={"time": "ms"} | sizes)
    chosen = max(
        (key for key in peaks if "c_checkpoint" in peaks[key]),
        key=lambda key: (len(peaks[key]["c_checkpoint"]), key[1], key[0] == "2.7B"),
        default=None,
    )
    if chosen is None:
        return
    if not asked:
        page.lacks("the xl of 2026 (2.7B here) at context 2048")
    found = peaks[chosen]["c_checkpoint"]
    lowest = {impl: min(of.values(), key=lambda r: r["peak_mib"]) for impl, of in peaks[chosen].items()}
    said = {i: {"best": r["case"]["checkpoint_layers"], "peak": r["peak_mib"]} for i, r in lowest.items()}
    one, record = found.get(1), lowest["c_checkpoint"]
    case = record["case"]
    base = next((r for r in records if r["impl"] == "c_keep_all" and one and r["case"] == one["case"]), None)
    told = {"size": chosen[0], "context": chosen[1], "batch": case["batch"]} | said["c_checkpoint"]
    for name, of in (("", one), ("all_", base)):
        told |= {f"{name}ms": ms_of(of), f"{name or 'one_'}peak": (of or {}).get("peak_mib")}
    lost = one and not ms_of(base)
    told |= {"other": len(found) > 1, "torch": said.get("torch_checkpoint"), "asked": asked, "lost": lost}
    room = re.search(r"no room for (\d+) bytes .*: (\d+) bytes", (base or {}).get("message", ""))
    told["asked_mib"] = sum(map(int, room.groups())) / MIB if room else None
    told["next"] = change_of(found)
    if base is None:
        page.lacks("a step that keeps all activations")
    page.say(**told, **arithmetic(found))
    page.method("checkpoints")


def change_of(found):
    """From checkpoints of one layer to the next size: of the measured peak, and by the arithmetic."""
    larger = next((k for k in sorted(found) if k > 1), None)
    if 1 not in found or larger is None:
        return None
    change = [found[k]["peak_mib"] - found[k]["values"]["inputs_mib"] for k in (1, larger)]
    predicted = found[larger]["values"]["inputs_mib"] - found[1]["values"]["inputs_mib"]
    return {"k": larger, "predicted": predicted, "measured": predicted + change[1] - change[0]}


def arithmetic(found):
    """The parts of the formula for activations, in MiB, from what records of C have for each k."""
    case, values = found[min(found)]["case"], found[min(found)]["values"]
    layers, k = case["layers"], case["checkpoint_layers"]
    each = case["batch"] * case["context"] * case["d_model"] * 4 / MIB
    layer = (values["all_mib"] - values["inputs_mib"] + layers // k * each) / (layers - k)
    sums = {of: found[of]["values"]["inputs_mib"] for of in sorted(found) if layers % of == 0}
    levels = math.ceil(math.log2(layers))
    told = {"layers": layers, "input": each, "layer": layer, "rest": values["all_mib"] - layers * layer}
    told |= {"levels": levels, "halved": levels * each + layer}
    return told | {"sums": sums, "model": (layers * each / layer) ** 0.5}
