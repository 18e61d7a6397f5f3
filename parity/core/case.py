"""The nouns of the protocol: a case, a side of it, and the rule that judges an output."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MEASURES = ("error", "time", "memory")
BAD = ("failed", "error")  # status of a record that says that something is wrong


class ParityError(RuntimeError):
    """What a user did, or a machine lacks: the message is all that is to be said."""


def grid(**lists: list) -> Iterator[dict]:
    """Every combination of the listed values, the last name varying fastest."""
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists.keys(), values, strict=True))


# How a case is measured, as core/__init__.py explains, and what holds where a module does not say.
OPTIONS = dict(measure="error", seconds=0.2, repeats=None, alone=False, needs_bytes=0, in_turn=False)
OPTIONS |= dict(again=(), together=1, stage=0, config=None)


class Case:
    """One point of a module's grid: what the record's "case" holds, and how it is to be measured."""

    def __init__(self, deliverable: str, **given: Any):
        """OPTIONS by their names; all others are the case's keys."""
        self.deliverable = deliverable
        vars(self).update({name: given.pop(name, default) for name, default in OPTIONS.items()})
        self.keys, words = given, self.measure.split()
        self.measure = tuple(name for name in MEASURES if name in words)
        self.again = tuple(self.again)
        self.config = {impl: dict(switches) for impl, switches in (self.config or {}).items()}
        if set(words) - set(MEASURES) or not words:
            raise ValueError(f"measure is {' '.join(words)!r}, needs words of: {', '.join(MEASURES)}")
        for name in ("repeats", "together"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, needs at least 1")
        if self.again and not self.in_turn:
            raise ValueError(f"again is {', '.join(self.again)}, needs in_turn")

    def __getattr__(self, key: str) -> Any:
        keys = self.__dict__.get("keys", {})
        if key in keys:
            return keys[key]
        deliverable = self.__dict__.get("deliverable")
        raise AttributeError(f"case {deliverable} has no key {key!r}, only: {', '.join(keys)}")

    def __getitem__(self, key: str) -> Any:
        return self.keys[key]

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def get(self, key: str, default: Any = None) -> Any:
        return self.keys.get(key, default)

    @property
    def name(self) -> str:
        """Readable, unique within a module, and the seed of the case's inputs."""
        return case_name(self.deliverable, self.keys)

    def __repr__(self) -> str:
        return f"<Case {self.name}>"


def is_judged(impl: str) -> bool:
    """Whether a side is C's."""
    return impl == "c" or impl.startswith("c_")


def case_name(deliverable: str, keys: Mapping[str, Any]) -> str:
    words = (f"{key}={json.dumps(value).strip(chr(34))}" for key, value in keys.items())
    return f"{deliverable}/{','.join(words)}"


def seed_of(*names: str) -> int:
    """63 bits that depend on every name, the same on every machine."""
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


Outputs = dict[str, Any]


@dataclass
class Side:
    call: Callable[[], Outputs]
    before: Callable[[], None] | None = None
    open: Callable[[], None] | None = None
    close: Callable[[], None] | None = None
    flops: float | None = None
    nbytes: float | None = None
    needs_bytes: int | None = None
    holds: Callable[[], Iterable[Any]] = tuple
    renew: Callable[[], None] | None = None
    answer: Callable[[], Outputs] | None = None
    record: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """How one output is judged; made by parity(), equal(), within() and amid()."""

    kind: str
    against: str = "torch"
    rel_l2: float | None = None
    max_abs: float | None = None


def parity() -> Rule:
    """The rule of the house: non-finite values match, and the error is about PyTorch's own or less."""
    return Rule("parity")


def equal(against: str = "torch") -> Rule:
    """The same bits as "torch", the reference side, or exactly the value of the "truth"."""
    if against not in ("torch", "truth"):
        raise ValueError(f"equal({against!r}), needs 'torch' or 'truth'")
    return Rule("equal", against)


def within(*, rel_l2: float | None = None, max_abs: float | None = None) -> Rule:
    """An error against the truth (or, where it lacks the output, against the reference) of at most this."""
    if rel_l2 is None and max_abs is None:
        raise ValueError("within() needs rel_l2, max_abs or both")
    return Rule("within", "truth", rel_l2, max_abs)


def amid(against: str) -> Rule:
    """No further from the reference, in the mean and at the most, than the side `against` is: within its noise."""
    return Rule("amid", against)
