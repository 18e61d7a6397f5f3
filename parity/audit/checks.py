"""What records contradict, alone and together. Each check yields a record, which names the place, and words."""

import itertools
import re
import subprocess
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from parity.core.cards import card_of
from parity.core.case import is_judged
from parity.core.comparison import differing
from parity.core.identity import sources_of
from parity.core.record import UNTRIED, grouped
from parity.core.view import number
from parity.judge.numbers import COUNTS, MODEL, PASSES, WORDS, Bounds, Row, judge
from parity.shared.sizes import SIZES
from tandem.library import ROOT

AXES = ("context", "seq", "bytes", "size")
AGREE = {"ms": 0.05, "peak_mib": 0.01}  # by how much two values of one configuration may differ
FALLS = {"ms": 0.05, "peak_mib": 0.001}  # and by how much more work may take less
UNSTEADY = {"cuda": 0.05, "cpu": 0.10}  # std / mean from which on a sentence needs the range
FEW = 5  # samples
LATE_MS = 0.02  # what two events of a GPU tell apart
MIB_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "buffers")
NO_ROOM = re.compile(r"no room for (\d+) bytes on \S+: (\d+) bytes")
PASS = ("size", "layers", "batch", "context", "dtype", "pass", "ranks")  # of a model
WIDE = ("samples", "like", "gap", "reference", "age")  # checks of a whole deliverable
Findings = Iterator[tuple[Mapping, str]]


class Found(NamedTuple):
    check: str
    where: str
    words: str


def where_of(record: Mapping, whole: bool = False) -> str:
    case = {} if whole else record["case"]
    words = [f"{key}={value}" for key, value in case.items() if "size" not in case or key not in MODEL]
    return " ".join([record["folder"], record["deliverable"], record["impl"], *words])


def case_of(record: Mapping) -> Hashable:
    return record["folder"], record["deliverable"], *sorted(map(str, record["case"].items()))


def pass_of(record: Mapping) -> Hashable:
    return record["folder"], *(record["case"].get(key) for key in PASS)


def setting(record: Mapping, *without: str) -> Hashable:
    """What is equal in two results of one thing. How often a side was called before, and whether its phases were timed,
    is no part of it."""
    left = {"warmup", *without, *(MODEL if "size" in without else ())}
    case = [str(pair) for pair in record["case"].items() if pair[0] not in left]
    config = [str(pair) for pair in record.get("config", {}).items() if pair[0] != "timed"]
    same = (record["module"], record["impl"], record["machine"], record.get("host", {}).get("name"))
    return (*same, *sorted(case), "", *sorted(config))


def measured(records: Iterable[Mapping], name: str) -> list[Mapping]:
    return [record for record in records if record["status"] == "ok" and number(record, name) is not None]


def sums(records: Sequence[Mapping]) -> Findings:
    """Parts against their whole: memory by use, kernels of a window, and what a step waits for."""
    for record in records:
        values, memory, series = (record.get(key, {}) for key in ("values", "memory", "series"))
        peaks = [(f"rank {rank}", peak) for rank, peak in enumerate(memory.get("peak_mib", ()))]
        parts = [memory[f"{name}_mib"] for name in MIB_PARTS if f"{name}_mib" in memory]
        wholes = [(*peak, sum(each)) for peak, each in zip(peaks, zip(*parts, strict=True), strict=True)]
        for name, whole in (("live", values.get("live", 0) / 2**20), ("blocks", record.get("peak_mib", 0))):
            part = sum(value for key, value in values.items() if key.startswith(f"{name} ")) / 2**20
            wholes += [(name, whole, part)] if part and whole else []
        for name, whole, part in wholes:
            if abs(part - whole) > 0.002 * whole:
                yield record, f"{name}: memory by use adds up to {part:.0f} MiB, the whole is {whole:.0f}"
        for name, window in values.items():
            head = f"{name.removesuffix('window')}ms "
            busy = sum(value for key, value in values.items() if key.startswith(head))
            if name.endswith(" window") and busy > 1.02 * window:
                yield record, f"{name} is {window:.3f} ms, its kernels take {busy:.3f}"
        if {"exposed", "collectives", "tail"} <= values.keys():
            sent, exposed = values["collectives"], values["exposed"]
            waits = values.get("waits", 0.0) + values["tail"]
            if exposed > 1.1 * sent:
                yield record, f"{exposed:.2f} ms are exposed of collectives of {sent:.2f} ms"
            elif abs(exposed - waits) > 0.1 * exposed and record["case"].get("shard") == "full":
                yield record, f"exposed is {exposed:.2f} ms, waits and tail are {waits:.2f}"
        for rank in (name.removesuffix(" asked") for name in series if name.endswith(" asked")):
            ends = series[f"{rank} end"]
            for at, there in zip(series[f"{rank} asked"], series[f"{rank} there"], strict=True):
                if there - at > LATE_MS and not any(at + LATE_MS < end <= there + LATE_MS for end in ends):
                    words = f"waits {there - at:.3f} ms at {at:.2f} ms, and no gather ends then"
                    yield record, f"rank {rank} {words}"


def categories(records: Sequence[Mapping]) -> Findings:
    """Memory by use that cannot be that use."""
    found = [r for r in records if "activations_mib" in r.get("memory", {}) and not is_judged(r["impl"])]
    for record in found:
        memory = record["memory"]
        weights, before, then = (memory[f"{k}_mib"][0] for k in ("parameters", "made", "before_update"))
        if before < 0.9 * then and before > 1.5 * weights:
            yield record, f"before the first step {before:.0f} MiB are held, the weights are {weights:.0f}"
    for group in grouped(found, pass_of).values():
        low, least = min((r["memory"]["activations_mib"][0], r["impl"]) for r in group)
        for record in group:
            if (mine := record["memory"]["activations_mib"][0]) > 4 * low:
                yield record, f"activations are {mine:.0f} MiB, {low:.0f} in {least} of the same model"


def bounds(records: Sequence[Mapping], limits: Bounds | None) -> Findings:
    """The checks of `parity judge --numbers`: data sheets, passes against each other, dtypes, digits."""
    rows, of = [], {}
    for record in measured(records, "ms") if limits else ():
        case = record["case"]
        phase = case.get("pass", "step" if "size" in case else "forward")
        wanted = {"dtype"} if "op" in case else COUNTS | WORDS.keys() - {"pass"}
        known = {key: value for key, value in case.items() if key in wanted and not isinstance(value, float)}
        rest = [f"{key}={value}" for key, value in case.items() if key not in (*known, "pass")]
        known |= {"id": " ".join([where_of(record, True), *rest]), "card": record["machine"]}
        for name, ms in {phase: record["ms"], **record.get("phases", {})}.items() if phase in PASSES else ():
            rows.append(Row("", known | {"pass": name, "ms": ms["median"], "std": ms["std"]}))
            of[id(rows[-1])] = record
    if limits:
        judge(rows, limits)
    for row in rows:
        for words in row.refused + row.unlikely:
            if not words.startswith("spread"):  # samples() has those
                yield of[id(row)], f"{row.phase}: {words}"


def order(records: Sequence[Mapping]) -> Findings:
    """More tokens, more bytes or a larger model take no less time and no less memory."""
    for name, axis in itertools.product(FALLS, AXES):

        def at(record: Mapping, axis: str = axis) -> float:
            value = record["case"].get(axis, -1)
            return value if axis != "size" else [*SIZES].index(value) if value in SIZES else -1

        having = [record for record in measured(records, name) if at(record) >= 0]
        for group in grouped(having, lambda r, axis=axis: setting(r, axis)).values():
            for less, more in itertools.pairwise(sorted(group, key=at)):
                low, high = number(less, name), number(more, name)
                noise = less["ms"]["std"] + more["ms"]["std"] if name == "ms" else 0.0
                if at(less) < at(more) and low - high > max(noise, FALLS[name] * low):
                    places = more["case"][axis], less["case"][axis]
                    yield more, f"{name} is {high:.4g} at {axis} {places[0]}, {low:.4g} at {places[1]}"


def twice(records: Sequence[Mapping]) -> Findings:
    """Two values for one configuration: in two deliverables, two folders or two processes."""
    for name in AGREE:
        for group in grouped(measured(records, name), setting).values():
            values = {f"{r['folder']} {r['deliverable']}": number(r, name) for r in group}
            apart = max(values.values()) > (1 + AGREE[name]) * min(values.values())
            if apart or len({r["folder"] for r in group}) > 1:
                words = ", ".join(f"{value:.4g} ({place})" for place, value in values.items())
                yield group[0], f"{name} of one configuration is {words}"
    for record in measured(records, "ms"):
        runs = record.get("processes", [1.0])
        if max(runs) > (1 + AGREE["ms"]) * min(runs):
            yield record, f"two processes measured {' and '.join(f'{ms:.4g}' for ms in runs)} ms"


def statuses(records: Sequence[Mapping]) -> Findings:
    """oom is a run that failed on a card that it had alone, and a side is not run for its own need."""
    peaks = {(pass_of(r), r["impl"]): r for r in measured(records, "peak_mib") if "size" in r["case"]}
    for record in (r for r in records if r["status"] in ("oom", "not run")):
        card, words = card_of(record), record.get("message", "")
        fits = peaks.get((pass_of(record), record["impl"]))
        if record["status"] == "not run":
            if "the largest side needs" in words:
                yield record, f"not run, and the need is that of all sides: {words}"
        elif UNTRIED.search(words):
            yield record, f"oom was never tried: {words}"
        elif card and (sizes := NO_ROOM.search(words)):
            mib = sum(map(int, sizes.groups())) / 2**20
            if mib < 0.95 * card.mib:
                words = f"the card has {card.mib}: something else held it"
                yield record, f"oom needed {mib:.0f} MiB in all, {words}"
        elif fits:
            yield record, f"oom, and {fits['deliverable']} measured this pass at {fits['peak_mib']:.0f} MiB"


def samples(records: Sequence[Mapping]) -> Findings:
    """Too few samples for a median, or a spread that needs the range in words."""
    for group in grouped(measured(records, "ms"), lambda r: where_of(r, True)).values():
        few = [r["ms"]["n"] for r in group if r["ms"]["n"] < FEW]
        most = UNSTEADY[group[0].get("device", "cpu")]
        wide = [r["ms"]["std"] / r["ms"]["mean"] for r in group if r["ms"]["std"] > most * r["ms"]["mean"]]
        if few:
            yield group[0], f"{len(few)} of {len(group)} medians are of {min(few)} samples"
        if wide:
            words = f"spread by more than {most:.0%}, up to {max(wide):.0%}"
            yield group[0], f"{len(wide)} of {len(group)} {words}"


def likes(records: Sequence[Mapping]) -> Findings:
    """Two sides of PyTorch in one case that differ in more than one setting."""
    theirs = [r for r in records if not is_judged(r["impl"]) and r.get("config")]
    for run in grouped(theirs, case_of).values():
        for mine, other in itertools.combinations(sorted(run, key=lambda r: r["impl"]), 2):
            differ = differing(mine, other)
            if len(differ) > 1:
                yield mine, f"{mine['impl']} and {other['impl']} differ in {', '.join(differ)} at once"


def gaps(records: Sequence[Mapping]) -> Findings:
    """A size and context that a grid of others leaves out."""
    having = [r for r in records if {"size", "context"} <= r["case"].keys()]
    for group in grouped(having, lambda r: (where_of(r, True), setting(r, "size", "context"))).values():
        there = {(r["case"]["size"], r["case"]["context"]) for r in group}
        sizes, contexts = map(set, zip(*there, strict=True))
        lacks = {*itertools.product(sizes, contexts)} - there
        if len(sizes) > 1 and len(contexts) > 1 and 0 < len(lacks) <= 0.25 * len(there):
            words = ", ".join(f"{size} at {context}" for size, context in sorted(lacks))
            yield group[0], f"the grid of {len(there)} sizes and contexts lacks {words}"


def references(records: Sequence[Mapping]) -> Findings:
    """An average over PyTorch's errors is not over all cases if some have none."""
    for group in grouped(records, lambda r: (r["folder"], r["deliverable"])).values():
        theirs = {(case_of(r), r["impl"]) for r in group if r.get("error", {}).get("rel_l2")}
        mine = [r for r in group if r["impl"] == "c" and r.get("error", {}).get("rel_l2") is not None]
        lacks = [r for r in mine if (case_of(r), r.get("reference", "torch_eager")) not in theirs]
        if 0 < len(lacks) < len(mine):
            yield lacks[0], f"{len(lacks)} of {len(mine)} errors have none of PyTorch to be compared with"


def changed(commit: str, paths: Sequence[str]) -> str | None:
    """The date of the newest change of these paths since a commit; "" if there is none, None if git cannot tell."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%cs", f"{commit}..HEAD", "--", *paths]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def ages(records: Sequence[Mapping], dates: Callable[[str, Sequence[str]], str | None]) -> Findings:
    """Records that are older than the Python or C sources of their module."""
    built = [record for record in records if "build" in record]
    files = {name: sources_of(f"parity.{name}").values() for name in {r["module"] for r in built}}
    paths = {name: [f"impl/{name}", *(str(f.relative_to(ROOT)) for f in of)] for name, of in files.items()}
    for group in grouped(built, lambda r: (r["folder"], r["module"], r["build"]["commit"])).values():
        commit = group[0]["build"]["commit"]
        date = dates(commit, paths[group[0]["module"]])
        if date:
            yield group[0], f"{len(group)} results are of {commit}, the sources changed on {date}"


def audit(records: Sequence[Mapping], limits: Bounds | None, dates: Callable = changed) -> list[Found]:
    """Everything that is found."""
    checks = {"sum": sums, "category": categories, "order": order, "twice": twice, "status": statuses}
    checks |= {"samples": samples, "like": likes, "gap": gaps, "reference": references}
    found = {name: check(records) for name, check in checks.items()}
    found |= {"bound": bounds(records, limits), "age": ages(records, dates)}
    each = (Found(name, where_of(r, name in WIDE), words) for name, of in found.items() for r, words in of)
    return [*dict.fromkeys(each)]
