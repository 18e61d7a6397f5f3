"""The keys and values of a record. A line that keeps to them can be read by everything that reads records."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from parity.core.cards import impossible, step_gflop
from parity.core.clock import statistics

MOST_WHOLE = 2**63
SHOWN = 40  # characters of a wrong value in a message
SAME = 1e-3  # by how much of it a number may differ from what samples or other numbers say: they are rounded


class SchemaError(ValueError):
    """The line is no record; the message says which key is wrong, and what it needs."""


@dataclass(frozen=True)
class Kind:
    """What one value may be."""

    words: str
    types: Any  # a whole number has less than 2^63
    fits: Callable[[Any], bool] = lambda value: True
    flag: bool = False  # true and false as well, which Python counts as numbers

    def holds(self, value: Any) -> bool:
        known = isinstance(value, self.types) and (self.flag or not isinstance(value, bool))
        small = not isinstance(value, int) or abs(value) < MOST_WHOLE
        return known and small and self.fits(value)


@dataclass(frozen=True)
class Each:
    """An object with any keys, or a list. All its values are of one kind, but for the keys in `named`."""

    kind: Any
    type: type = dict
    named: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Keys:
    """An object that has the keys of `must` and may have those of `may`. Any other key may hold anything."""

    must: Mapping[str, Any] = field(default_factory=dict)
    may: Mapping[str, Any] = field(default_factory=dict)


def _one_of(*words: str) -> Kind:
    return Kind(f"one of {', '.join(words)}", str, words.__contains__)


REAL, NULL = (int, float), type(None)
TEXT = Kind("a string", str)
# What a page or a line of output is keyed by.
NAME = Kind("a name", str, lambda value: value != "" and value.isprintable())
NUMBER = Kind("a number", REAL)
TIME = Kind("a number of at least 0", REAL, lambda value: value >= 0)
# Pages divide by these.
POSITIVE = Kind("a number above 0", REAL, lambda value: value > 0)
COUNT = Kind("a whole number of at least 1", int, lambda value: value >= 1)
# A number that was not finite is written as null.
MEASURED = Kind("a number or null", (*REAL, NULL))
SIZE = Kind("a number of at least 0 or null", (*REAL, NULL), lambda value: value is None or value >= 0)
FLAG = Kind("true or false", bool, flag=True)
SCALAR = Kind("a number, a string, true, false or null", (*REAL, str, NULL), flag=True)
KEY = Kind("a number, a string, true or false", (*REAL, str), flag=True)

TIMES = dict.fromkeys(("median", "mean", "max", "p95"), POSITIVE)
STATISTICS = Keys(must=TIMES | {"std": TIME, "min": TIME, "n": COUNT})
WORDS = re.compile(r"[\w.+-]*", re.ASCII)
WORD = Kind("letters, digits and any of . + - _", str, WORDS.fullmatch)
BUILD = Keys(must={"version": WORD, "commit": WORD, "library": WORD}, may={"dirty": FLAG, "id": NAME})
NUMBERS = dict.fromkeys(("family", "model", "stepping", "l3_mib"), NUMBER)
HOST = Keys(must={"name": TEXT}, may=NUMBERS | {"isa": TEXT, "cores": COUNT, "limits": Each(TEXT)})
ERROR = dict.fromkeys(("max_abs", "rel_l2", "ulp_max", "used"), MEASURED) | {"truth": TEXT}

RECORD = Keys(
    must={
        "deliverable": NAME,
        "module": NAME,
        "case": Each(KEY, named={"ranks": COUNT}),
        "impl": NAME,
        "status": _one_of("ok", "failed", "error", "oom", "not run", "unsupported"),
    },
    may={
        **dict.fromkeys(("measure", "message", "machine", "time"), TEXT),
        "reference": NAME,
        "device": _one_of("cpu", "cuda"),
        "versions": Each(TEXT),
        "build": BUILD,
        "config": Each(KEY),
        "host": HOST,
        "others": NUMBER,
        **dict.fromkeys(("threads", "sides", "together"), COUNT),
        **dict.fromkeys(("seconds", "first_ms", "tflops", "gb_s", "peak_mib", "requested_mib"), SIZE),
        "ms": STATISTICS,
        "ratio": Keys(may={"over": NAME, "median": NUMBER, "p25": NUMBER, "p75": NUMBER}),
        "error": Keys(may=ERROR | {"outputs": Each(Keys(may=ERROR))}),
        "processes": Each(POSITIVE, list),
        "samples": Each(MEASURED, list),
        "phases": Each(STATISTICS),
        "series": Each(Each(MEASURED, list)),
        "values": Each(SCALAR),
        "dtypes": Each(TEXT),
        "lists": Each(Each(TEXT, list)),
    },
)


def parse(line: bytes) -> dict:
    """The record that a line holds; SchemaError if it holds none."""
    try:
        record = json.loads(line.decode())
        # Numbers that are not finite, and halves of surrogate pairs, are no JSON that others read.
        json.dumps(record, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise SchemaError("it is not UTF-8") from error
    except RecursionError as error:
        raise SchemaError("it nests too deep") from error
    except ValueError as error:
        raise SchemaError(f"it is not JSON: {error}") from error
    check(record)
    return record


def check(record: Any) -> None:
    """SchemaError unless it is a record."""
    _fits(record, RECORD, ())
    _agrees(record)


def _refuse(path: tuple, words: str) -> NoReturn:
    """`path`: a value's key and the path of what holds it; () of the record."""
    keys: list[str] = []
    while path:
        key, path = path
        keys.insert(0, _word(key))
    raise SchemaError(f"{'.'.join(keys) or 'it'} {words}")


def _fits(value: Any, kind: Any, path: tuple) -> None:
    if isinstance(kind, Kind):
        if not kind.holds(value):
            _refuse(path, f"is {_shown(value)}, needs {kind.words}")
        return
    wanted = kind.type if isinstance(kind, Each) else dict
    if not isinstance(value, wanted):
        _refuse(path, f"is {_shown(value)}, needs {'a list' if wanted is list else 'an object'}")
    if isinstance(kind, Each):
        kinds = [(key, kind.named.get(key, kind.kind)) for key, _ in _items(value)]
    else:
        for key in kind.must:
            if key not in value:
                _refuse(path, f"has no {key}")
        kinds = [(key, wants) for key, wants in {**kind.must, **kind.may}.items() if key in value]
    for key, wants in kinds:
        _fits(value[key], wants, (key, path))


def _items(value: Any) -> Iterable:
    return value.items() if isinstance(value, dict) else enumerate(value)


def _agrees(record: Mapping) -> None:
    """Keys that must agree."""
    status, ms, samples = record["status"], record.get("ms"), record.get("samples")
    if status in ("failed", "error") and not record.get("message", "").strip():
        raise SchemaError(f"message is missing, status {status} needs one")
    if "ratio" in record and status not in ("ok", "failed"):
        raise SchemaError(f"ratio is there, status {status} has none")
    if record.get("ratio", {}).get("over") == record["impl"]:
        raise SchemaError(f"ratio.over is {_shown(record['impl'])}, needs another side")
    for name, found in {"ms": ms, **record.get("phases", {})}.items() if ms else ():
        for key in ("median", "mean", "p95"):
            if not found["min"] * (1 - SAME) <= found[key] <= found["max"] * (1 + SAME):
                raise SchemaError(f"{name}.{key} is {found[key]}, needs {found['min']} to {found['max']}")
        if found["std"] > (found["max"] - found["min"]) * (1 + SAME):
            span = f"{found['min']} to {found['max']}"
            raise SchemaError(f"{name}.std is {found['std']}, the samples lie {span}")
    if ms and samples and None not in samples:
        if len(samples) != ms["n"]:
            raise SchemaError(f"ms.n is {ms['n']}, there are {len(samples)} samples")
        for key, value in statistics(samples).items():
            if not math.isclose(ms[key], value, rel_tol=SAME, abs_tol=1e-6):
                raise SchemaError(f"ms.{key} is {ms[key]}, that of the samples {value}")
    if words := impossible(record, step_gflop(record["case"])):
        raise SchemaError(words)


def disagreement(mine: Mapping, theirs: Mapping) -> str:
    """What two sides of a run of a case contradict each other in, in words that begin with the key; "" if nothing. All
    sides count the FLOPs of the method."""
    if not ("ms" in mine and "ms" in theirs):
        return ""
    flops = [r["tflops"] * r["ms"]["median"] if r.get("tflops") else None for r in (mine, theirs)]
    if all(flops) and not math.isclose(*flops, rel_tol=SAME):
        return f"tflops times ms is {flops[0]:.6g}, and {flops[1]:.6g} of {theirs['impl']}"
    if flops[1] and not flops[0] and (words := impossible(mine, flops[1])):
        return words
    ratio, pairs = mine.get("ratio", {}), [r.get("samples", ()) for r in (mine, theirs)]
    paired = ratio.get("over") == theirs["impl"] and "median" in ratio and len(pairs[0]) == len(pairs[1])
    if paired and pairs[0] and all(min(samples) > 0 for samples in pairs if None not in samples):
        middle = float(np.median(np.divide(*pairs)))
        if not math.isclose(ratio["median"], middle, rel_tol=SAME + 1e-6 / min(map(min, pairs))):
            return f"ratio.median is {ratio['median']:.6g}, that of the samples {middle:.6g}"
    return ""


def _word(key: str | int) -> str:
    word = str(key)
    return word if word.isprintable() and len(word) <= SHOWN else _shown(word)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
