"""`python -m parity judge --numbers FILE`: a table of somebody's times and memory.

A row is refused if no machine can have measured it, if other rows contradict it, or if its spread exceeds its mean. It
is unlikely if the usual cause is a mistake. Bounds count the least that a method can do: causal attention skips the
masked half, f32 is multiplied in TF32, and CACHE bytes need not come from memory.
"""

import csv
import functools
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from parity.core.cards import CARDS, Card, impossible
from parity.core.case import ParityError, is_judged
from parity.core.folder import folder_of
from parity.core.record import FILE, grouped, load
from parity.core.tables import Table
from parity.shared.sizes import SIZES, extents
from tandem.library import DTYPES

CACHE = 128 * 2**20  # more than the L2 of any card here
SUMMED, UNLIKE = 1.1, 1.5  # most of the parts over the whole, and of the whole over its parts
LAUNCHED_MS = 1.0  # a shorter call is mostly launches: parts overlap in the whole
WARM = 5  # calls before the first one that counts; after fewer, a large spread is what the handout asks for
DIGITS = 3  # fewer may be equal by chance
PARTS = {"both": ("forward", "backward"), "step": ("forward", "backward", "optimizer")}
PASSES = ("inference", "forward", "backward", "optimizer", "both", "step")
LOW, LATE = ("bf16", "f16", "bf16_mixed"), ("overlap", "bucketed")
MODEL = ("d_model", "d_ff", "layers", "heads", "vocab")
COUNTS = {*MODEL, *"context seq batch head_dim ranks bytes bucket_mb calls warmup causal".split()}
WORDS = {"pass": PASSES, "dtype": DTYPES} | dict.fromkeys("size strategy shard optimizer collective".split())
MEASURED = ("ms", "std", "mib")
HEADS = {"deliverable": "id", "seq_len": "seq", "d_head": "head_dim", "gpu": "card", "batch_size": "batch"}
HEADS |= {"context_length": "context", "mean": "ms", "mean_ms": "ms", "std_ms": "std", "peak_mib": "mib"}
SAME = {"fp32": "f32", "float32": "f32", "bfloat16": "bf16", "fp16": "f16", "float16": "f16", "full": "step"}
SAME |= dict.fromkeys(("all-reduce", "allreduce"), "all_reduce")
SAME |= {"autocast": "bf16_mixed", "fwd": "forward", "bwd": "backward", "forward+backward": "both"}
WIDE = re.compile(rf"({'|'.join(PASSES)})_({'|'.join(MEASURED)})")  # forward_ms: a row for each pass
NAME = re.compile(r"(?i)[a-z]\d|\d{4}|cpu")  # a card's name has more than its vendor's
FIRST = ("id", "card")
SIDES = ("c", True), ("torch", False)


class Row:
    """A row of the file, or one pass of a row that has several."""

    def __init__(self, where: str, cells: Mapping[str, Any]):
        self.where, self.refused, self.unlikely, self.beside = where, [], [], {}
        self.id, card = (str(cells.get(key, "")) for key in FIRST)
        self.card = re.sub(r"^\d+ ?x ?", "", card)
        known = COUNTS | WORDS.keys()
        self.keys = {key: self.value(key, cell) for key, cell in cells.items() if key in known}
        measured = (self.number(key, cells[key]) if key in cells else None for key in MEASURED)
        self.ms, self.std, self.mib = measured
        self.digits = re.sub(r"[^0-9]", "", str(cells.get("ms", "")).partition("e")[0]).strip("0")
        self.phase = self.keys.get("pass", "forward")
        if (self.ms is None and self.mib is None) or self.ms == 0:
            raise ParityError(f"{where}: ms is {self.ms}, needs a number above 0, or MiB")
        named = extents(self.keys["size"])[0] if self.keys.get("size") in SIZES else {"vocab": 10_000}
        self.shape = named | {name: self.keys[name] for name in MODEL if name in self.keys}
        if "size" in self.keys and len(self.shape) < len(MODEL):
            words = f"needs d_model, d_ff, layers and heads, or one of {', '.join(SIZES)}"
            raise ParityError(f"{where}: size is {self.keys['size']}, {words}")

    def value(self, key: str, cell: Any) -> Any:
        word = SAME.get(str(cell).lower(), str(cell))
        if key in WORDS:
            if WORDS[key] and word not in WORDS[key]:
                raise ParityError(f"{self.where}: {key} is {word!r}, needs one of {', '.join(WORDS[key])}")
            return word
        if key == "causal" and word.lower() in ("true", "false", "0", "1"):
            return word.lower() in ("true", "1")
        number, least = self.number(key, word), int(key != "warmup")
        if number != int(number) or number < least:
            raise ParityError(f"{self.where}: {key} is {cell!r}, needs a whole number of at least {least}")
        return int(number)

    def number(self, key: str, cell: Any) -> float:
        try:
            number = float(cell)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise ParityError(f"{self.where}: {key} is {cell!r}, needs a number of at least 0")
        return number

    def __str__(self) -> str:
        words = (f"{key} {value}" if key in COUNTS else value for key, value in self.keys.items())
        return " ".join(filter(None, (f"{self.where}:", self.id, *words, self.card)))

    def without(self, *names: str) -> tuple:
        """What is equal in rows that differ in these keys only."""
        return self.id, self.card, *sorted(pair for pair in self.keys.items() if pair[0] not in names)


def read(path: Path) -> tuple[list[Row], set[str]]:
    """The rows of a CSV file with a head or of a JSON list of objects, and the columns that nobody reads."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            lines = [(f"row {number}", row) for number, row in enumerate(json.loads(text), 1)]
        else:
            table = csv.DictReader(text.splitlines(), skipinitialspace=True)
            lines = [(f"line {table.line_num}", row) for row in table]
    except (OSError, ValueError, csv.Error) as error:
        raise ParityError(f"{path}: cannot be read: {error}") from error
    unread: set[str] = set()
    rows = [row for where, cells in lines for row in _rows(where, cells, unread)]
    if not rows:
        raise ParityError(f"{path}: no rows; needs a CSV file with a head, or a JSON list of objects")
    return rows, unread


def _rows(where: str, cells: Any, unread: set[str]) -> Iterator[Row]:
    if not isinstance(cells, dict) or None in cells:
        raise ParityError(f"{where}: is no object, or has more cells than the head")
    plain, passes = {}, defaultdict(dict)
    for head, cell in cells.items():
        name = str(head).strip().lower().replace(" ", "_")
        name, found = HEADS.get(name, name), WIDE.fullmatch(name)
        if cell is not None and str(cell).strip():
            (passes[found[1]] if found else plain)[found[2] if found else name] = cell
    unread |= plain.keys() - COUNTS - WORDS.keys() - set(FIRST) - set(MEASURED)
    for more in [more | {"pass": name} for name, more in passes.items()] or [{}]:
        yield Row(where, plain | more)


class Bounds(NamedTuple):
    """The least time of a row: its FLOPs and bytes by libtandem's accounting, on its card."""

    c: Any
    other: Card | None  # of cards that CARDS lacks

    def card(self, row: Row) -> tuple[str, Card | None]:
        """The name of its machine, and what that can do."""
        known = {folder_of(full): (full, card) for full, card in CARDS.items()}
        name = folder_of(row.card) if NAME.search(row.card) else ""
        return known.get(name) or known.get(f"rtx{name}") or ("", self.other)

    def work(self, row: Row, phase: str) -> tuple[float, float]:
        """FLOPs of GEMMs and bytes of one call on one device; zeros if the row does not say its shape."""
        keys, ranks, batch = row.keys, row.keys.get("ranks", 1), row.keys.get("batch", 1)
        width, dtype = (2, "bf16") if keys.get("dtype") in LOW else (4, "f32")
        times = {"inference": 1, "forward": 1, "backward": 2}.get(phase, 3)
        if "bytes" in keys:
            return 0.0, 2.0 * keys["bytes"]
        if {"seq", "head_dim"} <= set(keys):
            sizes = (batch * keys.get("heads", 1), keys["seq"], keys["seq"], keys["head_dim"], width, 1)
            found = self.c.value("td_account_attention_memory", *sizes, keys.get("causal", False))
            return times * found.forward_flops, 4.0 * math.prod(sizes) / keys["seq"]
        if len(row.shape) < len(MODEL):
            return 0.0, 0.0
        model = self.c.struct("td_account_model", row.shape)
        if phase == "optimizer":
            count = self.c.value("td_account_model_parameters", model).total
            moved = self.c.value("td_adamw_cost", count, self.c.enum("td_dtype", dtype)).bytes / ranks
            return 0.0, moved if keys.get("optimizer", "adamw") == "adamw" else 0.0
        flops = self.c.value("td_account_model_flops", model, batch, keys.get("context", 1), True, False)
        return times * flops.forward_matmul / ranks, 0.0

    def least(self, row: Row, *phases: str) -> tuple[float, str]:
        """What these passes take at the least in ms, and why."""
        card, keys, dtype = self.card(row)[1], row.keys, row.keys.get("dtype", "bf16").removesuffix("_mixed")
        if card is None or not phases:
            return 0.0, ""
        peak = card.tflops.get("tf32" if dtype == "f32" else dtype, max(card.tflops.values()))
        flops, nbytes = map(sum, zip(*(self.work(row, phase) for phase in phases), strict=True))
        asked = "all_reduce" if row.id == "distributed_communication_single_node" else ""
        reduced = keys.get("collective", asked) == "all_reduce" and keys.get("ranks", 1) > 1
        sent = keys.get("bytes", 0) if reduced else 0  # a switch may add, so each byte is sent once
        return max(
            (flops / peak / 1e9, f"{flops / 1e12:.3g} TFLOP at {peak:g} TFLOP/s"),
            (max(0.0, nbytes - CACHE) / card.gb_s / 1e6, f"{nbytes / 1e9:.3g} GB at {card.gb_s:g} GB/s"),
            (sent / card.link_gb_s / 1e6, f"{sent / 1e9:.3g} GB at {card.link_gb_s:g} GB/s of the links"),
        )


def judge(rows: Sequence[Row], bounds: Bounds) -> None:
    """Fills `refused` and `unlikely` of the rows. Each finding begins with its kind."""
    for row in rows:
        alone(row, bounds)
    timed = [row for row in rows if row.ms]
    for group in _groups(timed, "pass"):
        _parts({row.phase: row for row in group}, bounds)
    for name, slow, fast in (("dtype", ("f32", "tf32"), LOW), ("strategy", ("naive",), LATE)):
        for group in _groups(timed, name, "bucket_mb"):
            early, late = ([row for row in group if row.keys.get(name) in kind] for kind in (slow, fast))
            for theirs, mine in itertools.product(early, late):
                if mine.ms > theirs.ms + _noise(mine, theirs):
                    word = "16 bits" if name == "dtype" else mine.keys[name]
                    words = f"{word}: slower than {theirs.keys[name]}, which takes {theirs.ms:g} ms"
                    mine.unlikely.append(words)
    for name in ("context", "seq"):
        for group in _groups((row for row in timed if name in row.keys), name):
            for row, longer in itertools.permutations(group, 2):
                less = longer.ms + _noise(row, longer) < row.ms > LAUNCHED_MS
                if less and row.keys[name] < longer.keys[name]:
                    row.unlikely.append(f"order: {name} {longer.keys[name]} takes {longer.ms:g} ms")
    _digits([row for row in timed if len(row.digits) >= DIGITS])


def _groups(rows: Iterable[Row], *names: str) -> Iterable[list[Row]]:
    return grouped(rows, lambda row: row.without(*names)).values()


def _noise(*rows: Row) -> float:
    return sum(row.std or 0.0 for row in rows)


def alone(row: Row, bounds: Bounds) -> None:
    (least, why), (machine, card) = bounds.least(row, row.phase), bounds.card(row)
    if row.ms and row.ms < least:
        row.refused.append(f"bound: {why} take {least:.3g} ms")
    elif row.ms and machine and row.keys.get("dtype") == "f32" and "TFLOP" in why:
        strict = least * card.tflops["tf32"] / card.tflops["f32"]
        row.unlikely += ["f32: on this card only TF32 can be as fast"] if row.ms < strict else []
    if row.ms and (row.std or 0) > row.ms and row.keys.get("warmup", WARM) >= WARM:
        row.refused.append(f"spread: the standard deviation {row.std:g} exceeds the mean {row.ms:g}")
    record = {"case": row.shape | row.keys, "machine": machine, "device": "cuda" * bool(machine)}
    record |= {"peak_mib": row.mib} | ({"ms": {"min": row.ms, "median": row.ms}} if row.ms else {})
    if words := impossible(record):
        row.refused.append(f"{'memory' if 'mib' in words else 'bound'}: {words}")


def _parts(passes: Mapping[str, Row], bounds: Bounds) -> None:
    """Of one case: backward against forward, parts against the whole, and what the whole leaves for a missing part."""
    forward, backward = passes.get("forward"), passes.get("backward")
    if forward and backward and backward.ms + _noise(backward, forward) < forward.ms:
        backward.unlikely.append(f"backward: faster than forward, which takes {forward.ms:g} ms")
    for name, parts in PARTS.items():
        whole, there = passes.get(name), [passes[part] for part in parts if part in passes]
        if not whole or not there:
            continue
        lacks = [part for part in parts if part not in passes]
        times, noise = [part.ms for part in there], _noise(whole, *there)
        listed, long = " + ".join(f"{part.phase} {part.ms:g}" for part in there), whole.ms > LAUNCHED_MS
        if (sum(times) if long else max(times)) > SUMMED * whole.ms + noise:
            whole.refused.append(f"parts: {listed} exceeds {name} {whole.ms:g}")
        elif long and lacks and whole.ms + noise - sum(times) < (least := bounds.least(whole, *lacks)[0]):
            words = f"parts: {name} {whole.ms:g} leaves too little for {' and '.join(lacks)}, at least {least:.3g} ms"
            there[0].refused.append(words)
        elif long and not lacks and whole.ms > UNLIKE * sum(times) + noise:
            whole.refused.append(f"parts: {name} {whole.ms:g} is far above {listed}")


def _digits(rows: Sequence[Row]) -> None:
    """Series of rows that differ in one key and have the same digits."""
    for name in dict.fromkeys(key for row in rows for key in row.keys):
        series: dict[Any, dict[tuple, Row]] = defaultdict(dict)
        for row in rows:
            series[row.keys.get(name)][row.without(name)] = row
        for mine, theirs in itertools.combinations(series.values(), 2):
            both = [(mine[at], theirs[at]) for at in mine if at in theirs]
            same = [pair for pair in both if pair[0].digits == pair[1].digits and pair[0].ms == pair[1].ms]
            same_std = any(row.std and row.std == other.std for row, other in same)
            sure = same_std or any(len(row.digits) > DIGITS + 1 for row, _ in same)
            if (sure or len(same) > 1) and 2 * len(same) > len(both):
                for row, other in same:
                    words = f"equal digits: {other.ms:g} ms as {row.where}, with another {name}"
                    other.unlikely.append(words)


@functools.cache
def _records(reports: Path, card: str) -> list[dict]:
    """Of a card's folders in reports/, such as h100 and h100x2."""
    folders = {path: path.parent.name for path in sorted(reports.glob(f"*/{FILE}"))}
    found = (path for path, name in folders.items() if re.fullmatch(rf"{card}(x\d+)?", name))
    return [record for path in found for record in load(path).newest() if record["status"] == "ok"]


def ours(row: Row, reports: Path, bounds: Bounds) -> dict[str, Any]:
    """Cells of the fastest C side and the fastest PyTorch side that measured this case on this card."""
    machine, cells = bounds.card(row)[0] or row.card, {}
    records = _records(reports, folder_of(machine)) if NAME.search(machine) else []
    found = [record for record in records if _same_case(row, record["case"])]
    found = [record for record in found if record["deliverable"] == row.id] or found
    for (side, c), (what, mine) in itertools.product(SIDES, (("ms", row.ms), ("mib", row.mib))):
        theirs = ((_measured(record, row.phase, what), record["impl"]) for record in found)
        best, impl = min((pair for pair in theirs if pair[0] and is_judged(pair[1]) == c), default=(0, ""))
        if mine and best:
            cells |= {f"{side}_side": impl, f"{side}_{what}": best, f"{side}_{what}_ratio": mine / best}
    return cells


def _same_case(row: Row, case: Mapping) -> bool:
    keys = {key: value for key, value in row.keys.items() if key not in ("pass", "dtype", "warmup")}
    dtype = row.keys.get("dtype", case.get("dtype"))
    named = {"size", "d_model", "seq", "bytes"} & set(keys) and ("ranks" in case) == ("ranks" in keys)
    return named and case.get("dtype") in (dtype, f"{dtype}_mixed") and keys.items() <= case.items()


def _measured(record: Mapping, phase: str, what: str) -> float | None:
    of = record["case"].get("pass", phase)
    if of == phase:
        return record.get("peak_mib") if what == "mib" else record.get("ms", {}).get("median")
    phases = record.get("phases", {}) if (of, what) == ("step", "ms") else {}
    wanted = PARTS["both"] if phase == "both" else (phase,)
    return sum(phases[name]["median"] for name in wanted) if set(wanted) <= set(phases) else None


def verdict(row: Row) -> str:
    return "refused" if row.refused else "unlikely" if row.unlikely else "holds"


def _head(name: str) -> str:
    return name.replace("torch_", "PyTorch's ").replace("c_", "C's ").replace("_", " ")


def report(rows: Sequence[Row], bounds: Bounds, reports: Path) -> tuple[list[str], list[str], list[dict]]:
    """The lines of findings, the lines of a Markdown table, and the objects for --json."""
    lines, cells = [], []
    for row in rows:
        found = row.refused + row.unlikely
        lines += [f"{verdict(row)}: {row}", *(f"    {words}" for words in found)] if found else []
        cell = {"row": row.where, "id": row.id, **row.keys, "card": row.card, "ms": row.ms, "std": row.std}
        cell |= {"mib": row.mib, "bound_ms": bounds.least(row, row.phase)[0] or None, "verdict": verdict(row)}
        cells.append(cell | row.beside | ours(row, reports, bounds))
    heads = {name: _head(name) for cell in cells for name in cell}
    unknown = sorted({row.card or "none" for row in rows if bounds.card(row)[1] is None})
    if unknown:
        lines.append(f"no bound for card {', '.join(unknown)}: give --peak-tflops and --bandwidth")
    lines.append(", ".join(f"{count} {word}" for word, count in Counter(map(verdict, rows)).items()))
    findings = ({"refused": row.refused, "unlikely": row.unlikely} for row in rows)
    found = [cell | more for cell, more in zip(cells, findings, strict=True)]
    return lines, Table(cells, heads).render("md").splitlines(), found
