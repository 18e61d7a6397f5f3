"""The page of data parallelism: answers, steps by strategy, what communication takes, overlap as a picture, and the
model of buckets."""

import pandas as pd

from parity.ddp.communication import behind, fitted, handout_optimum, optimum, overlapped, times_of
from parity.shared.bench_ranks import MIB
from parity.shared.pages import on_gpu, ranged
from parity.shared.ranked import NARROW, has_windows, ratio_of, spread_of, told_of, told_words, turns_of

PROOFS = {
    "naive": "naive_ddp",
    "flat": "naive_ddp",
    "overlap": "ddp_overlap_individual_parameters",
    "bucketed": "ddp_overlap_bucketed",
}
TIMES = {
    "naive": "naive_ddp_benchmarking",
    "flat": "minimal_ddp_flat_benchmarking",
    "overlap": "ddp_overlap_individual_parameters_benchmarking",
    "bucketed": "ddp_bucketed_benchmarking (a)",
}
STRATEGIES = tuple(PROOFS)

RIGHT = "Are the weights those of one process?"
HOW_LONG = "How long does a step take, by strategy?"
TAKES = "What does communication take of a step?"
OVERLAP = "How much of it lies beside the backward pass?"
BUCKETS = "How large should a bucket be?"
FLOOR = "How short could a step be?"
WAY = ("size", "dtype", "optimizer", "ranks")  # what steps of one table may differ in


def report(page, records):
    errors = type(records)(r for r in records.records if "steps" in r["case"])
    times = type(records)(r for r in records.records if "warmup" in r["case"])
    runs = [r for r in records.only(part="communication").records if "values" in r]
    sides = records.impls()
    runs.sort(key=lambda r: (sides.index(r["impl"]), *order_of(r["case"])))
    links = links_of(records.only(part="fit").records)
    page.question(RIGHT)
    rows, held = proofs(errors)
    page.table(rows, "proofs")
    page.question(HOW_LONG)
    frame, said = by_strategy(times)
    fewest = frame[frame["ranks"] == frame["ranks"].min()] if len(frame) else frame
    page.table(fewest, "steps")
    if len(fewest) < len(frame):
        page.table(frame, "steps_of_all_ranks")
    for words in order_words(runs):
        page.text(words)
    if on_gpu(times) and len(frame):
        page.text(
            "C's steps are captured, PyTorch's queued, but for `torch_ddp_graph`. Queued steps wait for their host "
            "where kernels are short: those that 16 bits do not shorten say more of this host than of the GPUs."
        )
        page.text(nccl_words(times, runs))
    page.question(TAKES)
    first = [r for strategy in STRATEGIES for r in alike(runs, runs[0], strategy)] if runs else []
    page.table(pd.DataFrame([taken(r, links) for r in first]), "communication")
    if len(first) < len(runs):
        page.table(pd.DataFrame([taken(r, links) for r in runs]), "communication_of_all")
    page.question(OVERLAP)
    report_overlap(page, runs)
    page.question(BUCKETS)
    report_buckets(page, runs, links)
    page.question(FLOOR)
    report_floor(page, runs, links)
    for strategy, row in PROOFS.items():
        if strategy != "flat" and held.get(row):
            page.answer(
                row, f"{held[row]}: no further from float64 than PyTorch's.", held[row], question=RIGHT
            )
    more = words_of(runs, links)
    for strategy, row in TIMES.items():
        words, figure = [more.get(strategy, "")], ""
        if said.get(strategy):
            text, figure = spread_of(said[strategy])
            compiled = compiled_words(frame) if strategy == "bucketed" else ""
            text += f" ({varied(times, strategy)})"
            words = [f"A step takes, times eager PyTorch's of the same strategy, {text}{compiled}.", *words]
        if any(words):
            page.answer(row, " ".join(filter(None, words)), figure, question=HOW_LONG)
    captured = "; `torch_ddp_graph` is that step as one CUDA graph" if "torch_ddp_graph" in sides else ""
    page.method(
        f"Every rank is a process of this host; all sides run in the same processes, {turns_of(on_gpu(records))}, "
        "and a sample is the time of the slowest rank. Each rank has its own batch. `torch_ddp` is the assignment's "
        "own way for naive, flat and overlap, and PyTorch's DistributedDataParallel for buckets, over Gloo on the "
        "CPU and NCCL on GPUs; `torch_ddp_compiled` compiles the blocks with fused attention, and in bf16_mixed "
        f"sends bf16, as C and `torch_ddp_compressed` do{captured}. Toy models are the course's, one with a frozen "
        "bias and one with a tied weight; ranks begin with other weights, and rank 0's count. All ranks must have the "
        "same bits."
    )
    graphs = (
        " On GPUs the steps of the first two series are captured as graphs, in which nothing is watched; those of "
        "`tail`, `collectives` and `beside` are queued, so that `slowed` is of both kinds."
    )
    page.method(
        "What communication takes is measured by C's own benchmark in three series of steps, in the mean of the "
        "ranks' medians. `collectives` is how long a step's collectives ran, one after the other; `exposed` a step "
        "less the same step without communication; `tail` the time from the end of the backward pass, for which the "
        "device is waited, to the end of the last collective. `slowed`, exposed less tail, is what collectives take "
        "from the passes beside them, less what waiting for the device itself costs. `beside` is the share of the "
        "collectives' time ahead of the end of backward, `calls and bytes` what the fit below says of them. Times "
        "of collectives are a rank's own, with what it waits for the others."
        + (graphs if on_gpu(records) else "")
    )


def links_of(records):
    """{(side, whether of 16 bits): times of all-reduces by size}."""
    return {(r["impl"], r["case"].get("dtype") in NARROW): r["series"] for r in records if "series" in r}


def link_of(links, record):
    """Those that a step's collectives are as; f32's where there are no others; None without."""
    impl = record["impl"]
    return links.get((impl, record["case"]["dtype"] in NARROW), links.get((impl, False)))


def order_of(case):
    dtypes = ("f32", "bf16", "bf16_mixed")
    return dtypes.index(case["dtype"]), STRATEGIES.index(case["strategy"]), case.get("bucket_mb", 0)


def taken(record, links):
    """A row of the three numbers, which are not the same."""
    values = record["values"]
    row = keyed(record) | {
        "step (ms)": values["step"],
        "without (ms)": values["without"],
        "exposed (ms)": values["exposed"],
        "tail (ms)": values["tail"],
        "slowed (ms)": values["exposed"] - values["tail"],
        "collectives (ms)": values["collectives"],
        "beside": f"{100 * hidden(values):.0f} %",
        "calls": values["calls"],
        "MiB": values["bytes"] / MIB,
    }
    if link_of(links, record):
        o, w = fitted(link_of(links, record))
        row |= {"calls and bytes (ms)": 1e3 * (values["calls"] * o + values["bytes"] / w)}
    return row


def hidden(values):
    return values["beside"] / values["collectives"] if values["collectives"] else 0.0


def keyed(record):
    case = record["case"]
    row = {"side": record["impl"]} | {name: case[name] for name in ("dtype", "optimizer", "strategy")}
    return row | {"bucket (MiB)": case.get("bucket_mb")}


def where(record):
    case = record["case"]
    return f"{record['impl'].removeprefix('c_')}, {case['size']}, {case['dtype']}, {case['ranks']} ranks"


def alike(runs, record, strategy):
    """Of the same side and way, by this strategy."""
    case = record["case"]
    return [
        r
        for r in runs
        if r["impl"] == record["impl"]
        and r["case"]["strategy"] == strategy
        and all(r["case"][name] == case[name] for name in WAY)
    ]


# ---- overlap ----


def drawn_pair(runs):
    """The runs whose timelines are drawn: naive, and in buckets; None where there are none."""
    for naive in runs:
        if naive["case"]["strategy"] == "naive" and "series" in naive:
            bucketed = [r for r in alike(runs, naive, "bucketed") if "series" in r]
            if bucketed:
                return naive, bucketed[0]
    return None


def report_overlap(page, runs):
    rows = []
    for record in runs:
        if "series" in record:
            shares = [overlapped(record["series"], rank) for rank in range(record["case"]["ranks"])]
            rows.append(
                keyed(record)
                | {
                    f"beside backward, rank {rank}": f"{100 * share:.0f} %"
                    for rank, share in enumerate(shares)
                }
            )
    page.table(pd.DataFrame(rows), "overlap")
    pair = drawn_pair(runs)
    if pair:
        page.timeline(
            "timeline",
            {name_of(record["case"]): bars_of(record["series"]) for record in pair},
            x="ms since the step began",
            title=f"The last watched step of {where(pair[0])}: passes, and collectives under them",
        )
        page.text("Table and picture are of one step, the last that was watched, by its intervals.")


def name_of(case):
    return f"{case['strategy']}, {case['bucket_mb']:g} MiB" if "bucket_mb" in case else case["strategy"]


def bars_of(series):
    """{row: {what: [(begin, end)]}} of every rank."""
    found = {}
    for rank in range(sum(name.endswith("passes") for name in series)):
        forward, backward, end = series[f"{rank} passes"]
        found[f"rank {rank}"] = {
            "forward": [(0.0, forward)],
            "backward": [(forward, backward)],
            "after": [(backward, end)],
        }
        calls = zip(series[f"{rank} begin"], series[f"{rank} end"], strict=True)
        found[f"rank {rank}, sent"] = {"collective": list(calls)}
    return found


# ---- buckets ----


def predictions(runs, links):
    """A row for each run in buckets of which model and floor are known."""
    rows = []
    for record, (forward, backward, rest), sending, (o, w) in modelled(runs, links):
        values = record["values"]
        tail = behind(values["calls"], values["bytes"], backward, o, w)
        floor = forward + max(backward, sending) + rest / values["calls"]
        rows.append(
            {
                "model": keyed(record)
                | {
                    "calls": values["calls"],
                    "behind backward, model (ms)": tail,
                    "exposed (ms)": values["exposed"],
                    "step, model (ms)": values["without"] + tail,
                    "step (ms)": values["step"],
                    "model / step": (values["without"] + tail) / values["step"],
                },
                "floor": keyed(record)
                | {
                    "forward (ms)": forward,
                    "backward (ms)": backward,
                    "sending (ms)": sending,
                    "last update (ms)": rest / values["calls"],
                    "floor (ms)": floor,
                    "step (ms)": values["step"],
                    "step / floor": values["step"] / floor,
                    "step / without": values["step"] / values["without"],
                },
            }
        )
    return rows


def modelled(runs, links):
    """(run in buckets, its way's passes, ms of sending everything, (o, w)), where its way was run one by one."""
    for record in runs:
        naive = [r for r in alike(runs, record, "naive") if "series" in r]
        if record["case"]["strategy"] == "bucketed" and naive and link_of(links, record):
            o, w = fitted(link_of(links, record))
            ran = [r["values"]["collectives"] for s in STRATEGIES for r in alike(runs, record, s)]
            sending = min(1e3 * record["values"]["bytes"] / w, *ran)
            yield record, passes(naive[0]), sending, (o, w)


def passes(naive):
    """ms of forward, of backward and of the rest of a step without communication, in the mean of the ranks."""
    ends = [values for name, values in naive["series"].items() if name.endswith("passes")]
    forward, backward = (sum(e[0] for e in ends) / len(ends), sum(e[1] - e[0] for e in ends) / len(ends))
    whole = naive["values"]["without"]
    if forward + backward >= whole:  # a step that is watched is slower
        fits = whole / (forward + backward)
        return fits * forward, fits * backward, 0.0
    return forward, backward, whole - forward - backward


def report_buckets(page, runs, links):
    page.table(pd.DataFrame([row["model"] for row in predictions(runs, links)]), "buckets")
    rows = []
    for (impl, narrow), series in links.items():
        o, w = fitted(series)
        row = {
            "side": impl,
            "of": "16 bits" if narrow else "f32",
            "o (ms a call)": 1e3 * o,
            "w (GB/s)": w / 1e9,
        }
        for nbytes, ms in zip(series["bytes"], times_of(series), strict=True):
            row |= {f"{nbytes / MIB:g} MiB (ms)": ms, "model / it": 1e3 * (o + nbytes / w) / ms}
            row[f"model / it, {nbytes / MIB:g} MiB"] = row.pop("model / it")
        rows.append(row)
    page.table(pd.DataFrame(rows), "fit")
    page.table(pd.DataFrame(best_buckets(runs, links)), "optimum")
    if rows:
        page.text(
            "Of s bytes in n buckets each is sent in c = s / (n w) + o, with w bytes a second and o seconds a call. "
            "Buckets become final at equal distances of the backward pass, which takes T, and are sent one after "
            "the other: the first begins at T / n, so that the last ends max(c, T / n + n c - T) behind backward. "
            "Where sending takes longer than backward, s / w > T, the second counts, T / n + s / w + n o - T, whose "
            "derivative is zero at n = sqrt(T / o). Where a bucket is sent for as long as the next is computed, s / "
            "w = T, it is s / (n w) + n o, as the handout has it, and least at n = sqrt(s / (o w)), buckets of "
            "sqrt(s w o) bytes. Where backward takes longer, more buckets help until their calls no longer hide. "
            f"{fit_words(links)} The model has nothing of what collectives take from the passes beside them: on a CPU "
            "its cores, on a GPU its multiprocessors."
        )


def fit_words(links):
    """What o and w are fitted to."""
    said = "o and w are fitted to the all-reduces above, "
    if any("device_ms" in series for series in links.values()):
        return (
            said + "by how long they ran, one behind the other: no host waits for those of a captured step."
        )
    return said + "each to its end, so that o has what a host waits for one."


def best_buckets(runs, links):
    """A row for each side and way: the model's best buckets, and the handout's."""
    rows = {}
    for record, (_, backward, _), _, (o, w) in modelled(runs, links):
        case, nbytes = record["case"], record["values"]["bytes"]
        calls = optimum(nbytes, backward, o, w)
        key = (record["impl"], *(case[name] for name in WAY))
        rows[key] = {"side": record["impl"]} | {name: case[name] for name in ("dtype", "optimizer")}
        rows[key] |= {
            "backward (ms)": backward,
            "s / w (ms)": 1e3 * nbytes / w,
            "best n": calls,
            "best bucket (MiB)": nbytes / calls / MIB,
            "behind backward (ms)": behind(calls, nbytes, backward, o, w),
            "by the handout's formula (MiB)": handout_optimum(nbytes, o, w) / MIB,
        }
    return list(rows.values())


def report_floor(page, runs, links):
    rows = [row["floor"] for row in predictions(runs, links)]
    page.table(pd.DataFrame(rows), "floor")
    if rows:
        page.text(
            "The floor is forward, the longer of backward and sending all gradients, and the update of the last "
            "bucket: as large a part of what follows backward without communication as the bucket is of all "
            "gradients. Sending takes what the fit says, or the fewest ms that the collectives of a strategy ran. "
            "Forward and backward are those of `naive`, whose collectives lie behind them, shortened in proportion "
            "where they, being watched, took longer than a whole step without communication. Where updates take "
            "longer than communication leaves them, as AdamW's in bf16_mixed, no step is shorter than one without "
            "it, which the last column stands for."
        )


# ---- words ----


def nccl_words(times, runs):
    """What NCCL was told, and whether it goes between GPUs directly, where records say it."""
    mine = [r for r in times.records if r["impl"].startswith("c_") and "ms" in r]
    unsaid = (
        "" if told_of(mine) else "Records do not say whether C told NCCL how many multiprocessors to take. "
    )
    return unsaid + told_words(mine, "`td_ddp_nccl_ctas`", "C's gradients", has_windows([*mine, *runs]))


def order_words(runs):
    """How strategies stand to each other, and what they send: a paragraph for each way of the first side."""
    said = []
    for first in firsts(runs):
        best = {
            strategy: min(alike(runs, first, strategy), key=step_of, default=None) for strategy in STRATEGIES
        }
        if None in best.values():
            continue
        by_step = sorted(best, key=lambda strategy: -step_of(best[strategy]))
        words = " > ".join(f"{strategy} {step_of(best[strategy]):.1f}" for strategy in by_step)
        said.append(
            f"Longest first, in ms ({where(first)}, C's own benchmark, the best bucket): {words}; "
            f"{' > '.join(STRATEGIES)} {'holds' if tuple(by_step) == STRATEGIES else 'does not hold'}: {sent(best)}."
        )
    return said


def firsts(runs):
    """The first side's first run of each way."""
    found = {}
    for record in runs:
        if record["impl"] == runs[0]["impl"]:
            found.setdefault(tuple(record["case"][name] for name in WAY), record)
    return found.values()


def step_of(record):
    return record["values"]["step"]


def sent(best):
    """What each strategy sends, and what of it is exposed."""
    each = []
    for strategy, record in best.items():
        v = record["values"]
        calls = f"{v['calls']} call{'s' if v['calls'] > 1 else ''}"
        if hidden(v) > 0:
            calls += f", {100 * hidden(v):.0f} % of their time beside backward"
        each.append(f"`{strategy}` sends {calls}, {v['exposed']:.1f} ms exposed")
    return "; ".join(each)


def words_of(runs, links):
    """{strategy: one or two sentences} of the first side and way that was run."""
    first = next(iter(runs), None)
    if first is None:
        return {}
    by = {strategy: alike(runs, first, strategy) for strategy in STRATEGIES}
    found, at = {}, where(first)
    if by["naive"]:
        v = by["naive"][0]["values"]
        found["naive"] = (
            f"Communication is exposed for {v['exposed']:.1f} of {v['step']:.1f} ms, "
            f"{100 * v['exposed'] / v['step']:.0f} % of the step, in {v['calls']} calls ({at})."
        )
    if by["naive"] and by["flat"]:
        one, all_in_one = by["naive"][0]["values"], by["flat"][0]["values"]
        found["flat"] = (
            f"One call instead of {one['calls']}: communication is exposed for {all_in_one['exposed']:.1f} ms where "
            f"`naive` has {one['exposed']:.1f} ({at})."
        )
    if by["naive"] and by["overlap"]:
        one, v = by["naive"][0]["values"], by["overlap"][0]["values"]
        found["overlap"] = (
            f"{100 * hidden(v):.0f} % of the collectives' time lies beside backward, and "
            f"{v['exposed']:.1f} ms are exposed where `naive` has {one['exposed']:.1f} ({at})."
        )
    found_by_model = [row["model"] for row in predictions(by["naive"] + by["bucketed"], links)]
    if by["bucketed"] and found_by_model:
        best = min(by["bucketed"], key=lambda r: r["values"]["step"])
        by_model = best_buckets(by["naive"] + by["bucketed"], links)[0]["best bucket (MiB)"]
        found["bucketed"] = (
            f"Buckets of {best['case']['bucket_mb']:g} MiB give the shortest step, {best['values']['step']:.1f} ms "
            f"with {best['values']['exposed']:.1f} exposed ({at}). By the model the best has {by_model:.2g} MiB there, "
            f"and steps are {ranged([row['model / step'] for row in found_by_model])} times those measured."
        )
    return found


def varied(times, strategy):
    """The largest std / mean of a strategy's steps, in words: PyTorch's may be the host's time, and vary with it."""
    most = {"C": 0.0, "PyTorch": 0.0}
    for record in times.records:
        if record["case"]["strategy"] == strategy and "ms" in record:
            who = "C" if record["impl"].startswith("c_") else "PyTorch"
            most[who] = max(most[who], record["ms"]["std"] / record["ms"]["mean"])
    return "std / mean up to " + ", ".join(f"{100 * share:.0f} % in {who}" for who, share in most.items())


def compiled_words(frame):
    """C's bucketed step over PyTorch's compiled ones, queued and captured."""
    said = []
    for best, words in (("compiled", "its compiled one"), ("graph", "that one captured as a graph")):
        names = [name for name in frame if name.endswith(f" / {best}")]
        ratios = [value for name in names for value in frame[name].dropna()]
        if ratios:
            said.append(f"{ranged(ratios)} times {words}")
    return "".join(f", and {words}" for words in said)


# ---- proofs and steps ----


def proofs(errors):
    """By strategy and side: how many results hold; and in words by deliverable."""
    rows, held = {}, {}
    for record in errors.records:
        if not record["impl"].startswith("c_") or record["status"] == "unsupported":
            continue
        case = record["case"]
        key = (case["strategy"], record["impl"])
        row = rows.setdefault(key, {"strategy": key[0], "side": key[1], "results": 0, "hold": 0})
        row["results"] += 1
        row["hold"] += record["status"] == "ok"
        count = held.setdefault(record["deliverable"], [0, 0])
        count[0] += record["status"] == "ok"
        count[1] += 1
    ordered = [rows[key] for key in sorted(rows, key=lambda key: (STRATEGIES.index(key[0]), key[1]))]
    return pd.DataFrame(ordered), {row: f"{ok} of {of} results hold" for row, (ok, of) in held.items()}


def by_strategy(times):
    """A row for each way and size of bucket; and by strategy C's step over PyTorch's, and of what."""
    rows, said = {}, {}
    for record in times.records:
        if "ms" not in record:
            continue
        case = record["case"]
        way = tuple(case[name] for name in WAY)
        row = rows.setdefault(
            (*way, STRATEGIES.index(case["strategy"]), case.get("bucket_mb", 0)),
            dict(zip(WAY, way, strict=True))
            | {"strategy": case["strategy"], "bucket (MiB)": case.get("bucket_mb")},
        )
        row[f"{record['impl']} (ms)"] = record["ms"]["median"]
        ratio = ratio_of(record, times, "torch_ddp")
        if ratio:
            bucketed = f", buckets of {case['bucket_mb']:g} MiB" if "bucket_mb" in case else ""
            words = (
                f"{record['impl'].removeprefix('c_')} ({case['size']}, {case['dtype']}, "
                f"{case['ranks']} ranks{bucketed})"
            )
            said.setdefault(case["strategy"], []).append((ratio, words))
    for row in rows.values():
        for best in ("compiled", "graph"):
            ms = row.get(f"torch_ddp_{best} (ms)")
            for name in [name for name in row if ms and name.startswith("c_") and name.endswith(" (ms)")]:
                row[f"{name.removesuffix(' (ms)')} / {best}"] = row[name] / ms
    return pd.DataFrame([rows[key] for key in sorted(rows)]), said
