"""The nouns of the protocol: a case, a side of it, and the rule that judges an output."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MEASURES = ("error", "time", "memory")


class ParityError(RuntimeError):
    """What a user did, or a machine lacks: the message is all that is to be said."""


def grid(**lists: list) -> Iterator[dict]:
    """Every combination of the listed values, the last name varying fastest."""
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists.keys(), values, strict=True))


class Case:
    """One point of a module's grid: what the record's "case" holds, and how it is to be measured."""

    def __init__(
        self,
        deliverable: str,
        *,
        measure: str = "error",
        seconds: float = 0.2,
        repeats: int | None = None,
        alone: bool = False,
        needs_bytes: int = 0,
        in_turn: bool = False,
        alternate: Sequence[str] = (),
        again: Sequence[str] = (),
        together: int = 1,
        stage: int = 0,
        ahead: bool = False,
        reference: str | None = None,
        config: Mapping[str, Mapping[str, Any]] | None = None,
        **keys: Any,
    ):
        self.deliverable = deliverable
        self.measure = tuple(name for name in MEASURES if name in measure.split())
        unknown = set(measure.split()) - set(MEASURES)
        if unknown or not self.measure:
            raise ValueError(f"measure is {measure!r}, needs words of: {', '.join(MEASURES)}")
        if repeats is not None and repeats < 1:
            raise ValueError(f"repeats is {repeats}, needs at least 1")
        if together < 1:
            raise ValueError(f"together is {together}, needs at least 1")
        for name, sides in (("alternate", alternate), ("again", again)):
            if sides and not in_turn:
                raise ValueError(f"{name} is {', '.join(sides)}, needs in_turn")
        for key, value in keys.items():
            if not isinstance(value, (bool, int, float, str)):
                raise TypeError(f"case key {key} is {value!r}, needs a bool, a number or a string")
        ranks = keys.get("ranks", 1)
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ValueError(f"ranks is {ranks!r}, needs a whole number of at least 1")
        for impl, switches in (config or {}).items():
            for name, value in switches.items():
                if not isinstance(value, (bool, int, float, str)):
                    raise TypeError(
                        f"{impl}'s switch {name} is {value!r}, needs a bool, a number or a string"
                    )
        self.seconds = seconds
        self.repeats = repeats
        self.alone = alone
        self.needs_bytes = needs_bytes
        self.in_turn = in_turn
        self.alternate = tuple(alternate)
        self.again = tuple(again)
        self.together = together
        self.stage = stage
        self.ahead = ahead
        self.reference = reference
        self.config = {impl: dict(switches) for impl, switches in (config or {}).items()}
        self.keys = keys

    def __getattr__(self, key: str) -> Any:
        keys = self.__dict__.get("keys", {})
        if key in keys:
            return keys[key]
        raise AttributeError(
            f"case {self.__dict__.get('deliverable')} has no key {key!r}, only: {', '.join(keys)}"
        )

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
    """One implementation's part in a case."""

    call: Callable[[], Outputs]
    before: Callable[[], None] | None = None
    open: Callable[[], None] | None = None
    close: Callable[[], None] | None = None
    flops: float | None = None
    nbytes: float | None = None
    needs_bytes: int | None = None
    holds: Callable[[], Iterable[Any]] = tuple
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
    if not against:
        raise ValueError("amid() needs the name of a side")
    return Rule("amid", against)
