"""What stands in a record, key by key: a line that keeps to it can be read by all that reads records."""

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_DEPTH = 16  # objects and lists inside each other; ours have 4
MOST_WHOLE = 2**63
SHOWN = 40  # characters of a wrong value in a message
TOO_DEEP = f"it nests deeper than {MOST_DEPTH}"


class SchemaError(ValueError):
    """The line is no record; the message says which key is wrong, and what it needs."""


@dataclass(frozen=True)
class Kind:
    """What one value may be."""

    words: str
    holds: Callable[[Any], bool]


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


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_key(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _one_of(*words: str) -> Kind:
    return Kind(f"one of {', '.join(words)}", lambda value: _is_text(value) and value in words)


TEXT = Kind("a string", _is_text)
# What a page or a line of output is keyed by.
NAME = Kind("a name", lambda value: _is_text(value) and value != "" and value.isprintable())
NUMBER = Kind("a number", _is_number)
TIME = Kind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
# Pages divide by these.
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
COUNT = Kind(
    "a whole number of at least 1", lambda value: isinstance(value, int) and _is_number(value) and value >= 1
)
# A number that was not finite is written as null.
MEASURED = Kind("a number or null", lambda value: value is None or _is_number(value))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
SCALAR = Kind("a number, a string, true, false or null", lambda value: value is None or _is_key(value))
KEY = Kind("a number, a string, true or false", _is_key)

STATISTICS = Keys(
    must={
        "median": POSITIVE,
        "mean": POSITIVE,
        "std": TIME,
        "min": TIME,
        "max": POSITIVE,
        "p95": POSITIVE,
        "n": COUNT,
    }
)
BUILD = Keys(must={"version": TEXT, "commit": TEXT, "library": NAME}, may={"dirty": FLAG, "id": NAME})
HOST = Keys(
    must={"name": TEXT},
    may=dict.fromkeys(("family", "model", "stepping", "l3_mib"), NUMBER)
    | {"isa": TEXT, "cores": COUNT, "limits": Each(TEXT)},
)
ERROR = {"max_abs": MEASURED, "rel_l2": MEASURED, "ulp_max": MEASURED, "used": MEASURED, "truth": TEXT}

RECORD = Keys(
    must={
        "deliverable": NAME,
        "module": NAME,
        "case": Each(KEY, named={"ranks": COUNT}),
        "impl": NAME,
        "status": _one_of("ok", "failed", "error", "oom", "unsupported"),
    },
    may={
        "measure": TEXT,
        "message": TEXT,
        "reference": NAME,
        "machine": TEXT,
        "device": _one_of("cpu", "cuda"),
        "commit": TEXT,
        "time": TEXT,
        "versions": Each(TEXT),
        "build": BUILD,
        "config": Each(KEY),
        "host": HOST,
        "threads": COUNT,
        "others": NUMBER,
        "sides": COUNT,
        "together": COUNT,
        "seconds": MEASURED,
        "first_ms": MEASURED,
        "tflops": MEASURED,
        "gb_s": MEASURED,
        "peak_mib": MEASURED,
        "requested_mib": MEASURED,
        "ms": STATISTICS,
        "ratio": Keys(may={"over": NAME, "median": NUMBER, "p25": NUMBER, "p75": NUMBER}),
        "error": Keys(may=ERROR | {"outputs": Each(Keys(may=ERROR))}),
        "processes": Each(POSITIVE, list),
        "samples": Each(MEASURED, list),
        "phases": Each(STATISTICS),
        "parts": Each(MEASURED),
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
    except UnicodeDecodeError as error:
        raise SchemaError("it is not UTF-8") from error
    except RecursionError as error:
        raise SchemaError(TOO_DEEP) from error
    except ValueError as error:
        raise SchemaError(f"it is not JSON: {error}") from error
    check(record)
    return record


def check(record: Any) -> None:
    """SchemaError unless it is a record."""
    _sound("", record, MOST_DEPTH)
    _fits("", record, RECORD)
    _agrees(record)


def _sound(path: str, value: Any, deeper: int) -> None:
    """What JSON can say, and neither a file nor a sum can hold."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half of a pair of surrogates, escaped
            raise SchemaError(f"{path or 'it'} is {_shown(value)}, which is no Unicode") from error
    elif isinstance(value, float) and not math.isfinite(value):
        raise SchemaError(f"{path} is {value}, needs to be finite")
    elif isinstance(value, int) and abs(value) >= MOST_WHOLE:
        raise SchemaError(f"{path} is {_shown(value)}, needs to be less than 2^63")
    elif isinstance(value, (dict, list)):
        if deeper == 0:
            raise SchemaError(TOO_DEEP)
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            _sound(f"a key of {path or 'it'}", key, 0)
            _sound(_below(path, key), item, deeper - 1)


def _fits(path: str, value: Any, kind: Any) -> None:
    if isinstance(kind, Kind):
        if not kind.holds(value):
            raise SchemaError(f"{path} is {_shown(value)}, needs {kind.words}")
        return
    wanted = kind.type if isinstance(kind, Each) else dict
    if not isinstance(value, wanted):
        words = "a list" if wanted is list else "an object"
        raise SchemaError(f"{path or 'it'} is {_shown(value)}, needs {words}")
    if isinstance(kind, Each):
        for key, item in value.items() if wanted is dict else enumerate(value):
            _fits(_below(path, key), item, kind.named.get(key, kind.kind))
        return
    for key in kind.must:
        if key not in value:
            raise SchemaError(f"{path or 'it'} has no {key}")
    for key, wants in {**kind.must, **kind.may}.items():
        if key in value:
            _fits(_below(path, key), value[key], wants)


def _agrees(record: Mapping) -> None:
    """What its keys say of each other."""
    status, ms, samples = record["status"], record.get("ms"), record.get("samples")
    if status in ("failed", "error") and not record.get("message", "").strip():
        raise SchemaError(f"message is missing, status {status} needs one")
    if "ratio" in record and status not in ("ok", "failed"):
        raise SchemaError(f"ratio is there, status {status} has none")
    if record.get("ratio", {}).get("over") == record["impl"]:
        raise SchemaError(f"ratio.over is {_shown(record['impl'])}, needs another side")
    if ms and not ms["min"] <= ms["median"] <= ms["max"]:
        raise SchemaError(f"ms.median is {ms['median']}, needs {ms['min']} to {ms['max']}")
    if ms and samples and None not in samples:
        if len(samples) != ms["n"]:
            raise SchemaError(f"ms.n is {ms['n']}, there are {len(samples)} samples")
        middle = statistics.median(samples)
        if not math.isclose(ms["median"], middle, rel_tol=1e-3, abs_tol=1e-6):
            raise SchemaError(f"ms.median is {ms['median']}, that of the samples {middle}")


def _below(path: str, key: str | int) -> str:
    word = str(key)
    if not word.isprintable() or len(word) > SHOWN:
        word = _shown(word)
    return f"{path}.{word}" if path else word


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
