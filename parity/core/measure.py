"""One case: every side of it computed, judged, timed and weighed, and a record of each."""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from parity.core import clock, memory
from parity.core.case import Case, Outputs, Side, seed_of
from parity.core.device import Cpu, Device, DeviceLost
from parity.core.draw import Draw
from parity.core.equals import Sequential
from parity.core.judge import EPS, ProtocolError, is_judged, judge, rule_of
from parity.core.library import Library, Session

MIB = 2**20
# How many answers with other orders of summation are formed, by the numbers that an answer has: the fewer,
# the more answers it takes to tell what is noise.
SHOWN = 5  # complaints of a side
OWN = {"impl", "status", "error", "ms", "samples", "ratio"}  # keys of a record that no side may set
EQUALS = ((2**14, 16), (2**18, 4), (math.inf, 2))


@dataclass
class Result:
    """What is known of one side so far; a status other than "ok" ends its part in the case."""

    status: str = "ok"
    message: str = ""
    measured: dict[str, Any] = field(default_factory=dict)

    def end(self, error: BaseException) -> None:
        self.status, self.message = status_of(error)
        self.measured = {}


def status_of(error: BaseException) -> tuple[str, str]:
    """How an exception is recorded: (status, message)."""
    message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if memory.is_out_of_memory(error):
        return "oom", message
    if getattr(error, "status", None) == "TD_UNSUPPORTED" or isinstance(error, NotImplementedError):
        return "unsupported", message
    return "error", message


def summary(complaints: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(complaints) - SHOWN
    return "; ".join([*complaints[:SHOWN], *([f"and {more} more outputs"] if more > 0 else [])])


class Measurement:
    """One run of one case: all its sides at once, or each by itself where together they would not fit."""

    def __init__(
        self,
        case: Case,
        plan: Mapping[str, Any],
        draw: Draw,
        c: Session,
        calling: Callable[[str], None],
        device: Device | None = None,
        dump: Path | None = None,
    ):
        self.case, self.draw, self.c, self.calling, self.dump = case, draw, c, calling, dump
        self.device = device or Cpu()
        self.measure = case.measure
        self.others = 0
        plan = dict(plan)
        self.truth = plan.pop("truth", {})
        self.rules = plan.pop("rule", {})
        self.equal = plan.pop("equal", None)
        self.reference = plan.pop("reference", None) or _reference(plan)
        if is_judged(self.reference or ""):
            raise ProtocolError(f"the reference is {self.reference}, needs a side of PyTorch")
        if case.reference not in (None, self.reference):
            raise ProtocolError(f"run() is judged against {self.reference}, its case says {case.reference}")
        self.sides = {impl: self._side(impl, value) for impl, value in plan.items()}
        self.results = {impl: Result() for impl in self.sides}
        unknown = set(case.config) - set(self.sides)
        if unknown:
            raise ProtocolError(f"the case has a config of {', '.join(sorted(unknown))}, run() no such side")
        self.outputs: dict[str, Outputs] = {}
        self.copies: dict[str, list[Outputs]] = {}  # of C's outputs, by call
        self.complaints: dict[str, list[str]] = {}
        self.opened: list[str] = []
        self.held: dict[str, int] = {}  # by PyTorch before the sides of a turn were opened
        if not self.sides:
            raise ProtocolError("run() returned no side")
        if "error" in self.measure and not any(map(is_judged, self.sides)):
            raise ProtocolError("run() returned no side of C to judge")

    def run(self, budget: float) -> None:
        if self.case.in_turn:
            self.device.release()
        turns = self.turns()
        for impls in turns:
            self._open(impls)
            if "error" in self.measure:
                self.error(impls)
                if not self.case.in_turn:
                    self.judge()  # before later calls overwrite the outputs
            timings = self.time(impls, budget) if "time" in self.measure else {}
            if "memory" in self.measure:
                self.memory(impls)
            self.compare(timings)
            self._close()
            if self.case.in_turn and len(impls) > 1:
                turns += self.alone_again(impls)
        if "error" in self.measure and self.case.in_turn:
            self.judge()

    def turns(self) -> list[list[str]]:
        """The sides that are opened together, and whose calls alternate."""
        if not self.case.in_turn:
            return [list(self.sides)]
        few, room = [], self.device.available_bytes() if self.case.alternate else 0
        for impl in self.case.alternate:
            room -= self.needs(impl)
            if room >= 0 and impl in self._alive():
                few.append(impl)
        first = [few] if len(few) > 1 else []
        return first + [[impl] for impl in self.sides if not first or impl not in few]

    def leave(self, impls: Sequence[str]) -> None:
        """Only these sides, and only their time."""
        self.measure = tuple(name for name in self.measure if name == "time")
        self.sides = {impl: side for impl, side in self.sides.items() if impl in impls}
        self.results = {impl: Result() for impl in self.sides}

    def give_up(self, given_up: Mapping[str, tuple[str, str]]) -> None:
        """Sides that are known to fail: they ended an earlier process, or want more memory than there is."""
        wanted = {impl: self.needs(impl) for impl in self.sides}
        room = self.device.available_bytes() if any(wanted.values()) else 0
        for impl, needs in wanted.items():
            if impl in given_up:
                self.results[impl] = Result(*given_up[impl])
            elif needs > room:
                self.results[impl] = Result(
                    "oom", f"needs {needs // MIB} MiB, {room // MIB} MiB are available"
                )

    def alone_again(self, impls: Iterable[str]) -> list[list[str]]:
        """Turns for those that found no room beside others: what they need is known about, not exactly."""
        found = [impl for impl in impls if self.results[impl].status == "oom"]
        self.results |= {impl: Result() for impl in found}
        return [[impl] for impl in found]

    def needs(self, impl: str) -> int:
        """Bytes that the side is known to need."""
        needs = self.sides[impl].needs_bytes if impl in self.sides else 0
        return self.case.needs_bytes if needs is None else needs

    def error(self, impls: Iterable[str]) -> None:
        """The outputs of each side, and what C did that it may not. C is called twice, because a captured graph may do
        less in a later launch."""
        for impl in self._alive(impls):
            if not is_judged(impl):
                self._attempt(impl, lambda impl=impl: self.outputs.update({impl: self._call(impl)}))
                continue
            self.copies[impl], kept = [], self.draw.kept()
            for _ in range(2):
                self.draw.restore(kept, self.outputs.get(impl, {}).values())
                self._attempt(impl, lambda impl=impl: self._call_c(impl))
                known = [text for texts in self.complaints.values() for text in texts]
                found = [text for text in self.draw.complaints() if text not in known]
                self.complaints.setdefault(impl, []).extend(found)
                if not self._alive([impl]):
                    break
        self.calling("")

    def _call_c(self, impl: str) -> None:
        """Copies the outputs before the device is waited for: the copy lacks work that the call left to another
        stream."""
        found = self.outputs[impl] = self._call(impl)
        copied = {name: _copy(value) for name, value in found.items()}
        if not any(_same(copied, before) for before in self.copies[impl]):
            self.copies[impl].append(copied)

    def judge(self) -> None:
        try:
            truth = self.truth() if callable(self.truth) else self.truth
            alive = {impl: self.copies.get(impl, [self.outputs[impl]]) for impl in self._alive()}
            lost = self.reference is not None and self.reference not in alive
            judged = {impl: o for impl, o in alive.items() if not (lost and is_judged(impl))}
            first, last = ({impl: o[call] for impl, o in judged.items()} for call in (0, -1))
            # A reference that rounds to TF32 itself has that rounding in its own error.
            eps = None if self.reference == "torch_tf32" else EPS.get(self.case.get("dtype"))
            self.save(truth)
            equals = [] if lost else self.equals(truth)
            verdicts = judge(first, truth, self.rules, self.reference, eps, equals)
            if any(len(calls) > 1 for calls in judged.values()):
                later = judge(last, truth, self.rules, self.reference, eps, equals)
                verdicts |= {impl: later[impl] for impl, found in verdicts.items() if found.passed}
        except DeviceLost:
            raise
        except Exception as error:  # the truth failed, or the module broke the protocol
            for impl in filter(is_judged, self._alive()):
                self.results[impl].end(error)
            return
        for impl in filter(is_judged, alive):
            if lost:
                self.results[
                    impl
                ].message = f"not judged: {self.reference} is {self.results[self.reference].status}"
        for impl, verdict in verdicts.items():
            if verdict.error():
                self.results[impl].measured["error"] = verdict.error()
            found = self.complaints.get(impl, []) + verdict.complaints
            if found:
                self.results[impl].status, self.results[impl].message = "failed", summary(found)

    def save(self, truth: Outputs) -> None:
        """The case's tensors as a file, where that was asked for."""
        if self.dump is None:
            return
        self.dump.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w=.,-]+", "_", self.case.name)
        inputs = self.draw.inputs()
        torch.save(
            {"case": self.case.name, "inputs": inputs, "sides": self.outputs, "truth": dict(truth)},
            self.dump / f"{name}.pt",
        )

    def equals(self, truth: Outputs) -> list[Outputs]:
        """Answers of the reference's formula, with the sums of each in an order of its own; none where no output is
        judged by them."""
        if self.reference is None or (self.case.in_turn and self.equal is None):
            return []  # in turn the reference is closed by now
        call = self.equal or (lambda: self._call(self.reference))
        known = self.outputs[self.reference]
        if all(rule_of(name, self.rules).kind != "parity" for name in known if name in truth):
            return []
        # The reference's own tensors may be written again.
        self.outputs[self.reference] = {name: _copy(value) for name, value in known.items()}
        numbers = sum(value.numel() for value in known.values() if isinstance(value, torch.Tensor))
        count = next(count for limit, count in EQUALS if numbers <= limit)
        found = []
        names = [] if self.c.ranks is None else [f"rank {self.c.ranks.rank}"]
        for index in range(count):
            seed = seed_of(self.case.name, f"equal {index}", *names)
            tf32 = self.case.get("dtype") == "tf32" and self.reference != "torch_tf32"
            with Sequential(seed, tf32=tf32, truncates=self.device.torch.type == "cuda"):
                found.append({name: _copy(value) for name, value in call().items()})
        return found

    def time(self, impls: Iterable[str], budget: float) -> dict[str, clock.Timing]:
        sides = {impl: self.sides[impl] for impl in self._alive(impls)}
        if not sides:
            return {}
        options = {} if "warmup" not in self.case else {"warmup": self.case.warmup}
        self.others = clock.others_running()
        timings = clock.time_sides(
            sides,
            repeats=self.case.repeats,
            budget=budget,
            calling=self.calling,
            device=self.device,
            together=self.case.together,
            **options,
        )
        for impl, timing in timings.items():
            if timing.failure is not None:
                self.results[impl].end(timing.failure)
        return timings

    def compare(self, timings: Mapping[str, clock.Timing]) -> None:
        """What the samples say: statistics, rates, and, of sides that alternated, the ratio to the reference, sample by
        sample."""
        over = self.reference
        if self.case.in_turn:
            over = next((impl for impl in timings if impl.startswith("torch")), None)
        reference = timings.get(over)
        for impl, timing in timings.items():
            if timing.failure is not None or self.results[impl].status not in ("ok", "failed"):
                continue
            measured = self.results[impl].measured
            measured["ms"] = timing.stats()
            if self.case.get("ranks", 1) == 1:  # ranks are others to each other
                measured["others"] = self.others
            if timing.first_ms is not None:
                measured["first_ms"] = round(timing.first_ms, 3)
            if self.case.together > 1:
                measured["together"] = self.case.together
            seconds = measured["ms"]["median"] / 1e3
            if self.sides[impl].flops:
                measured["tflops"] = self.sides[impl].flops / seconds / 1e12
            if self.sides[impl].nbytes:
                measured["gb_s"] = self.sides[impl].nbytes / seconds / 1e9
            if is_judged(impl) and reference is not None and reference.failure is None:
                measured["ratio"] = {"over": over, **clock.ratio(timing.samples, reference.samples)}
            measured["samples"] = [round(sample, 6) for sample in timing.samples]

    def memory(self, impls: Iterable[str]) -> None:
        for impl in self._alive(impls):
            self._attempt(impl, lambda impl=impl: self._weigh(impl))

    def records(self) -> list[dict]:
        found = []
        for impl, result in self.results.items():
            record = {"impl": impl, "status": result.status, **result.measured}
            if result.message:
                record["message"] = result.message
            if result.status in ("ok", "failed"):
                further = self.sides[impl].record
                further = further() if callable(further) else further
                if OWN & set(further):
                    raise ProtocolError(f"{impl} sets {', '.join(sorted(OWN & set(further)))} of its record")
                record.update(further)
            found.append(record)
        return found

    def _weigh(self, impl: str) -> None:
        side, measured = self.sides[impl], self.results[impl].measured
        held = {tensor.data_ptr(): tensor.nbytes for tensor in side.holds()}
        if is_judged(impl):
            session = self.c.side(impl)
            outputs = self.outputs[impl] if impl in self.outputs else self._call(impl)
            outside = {k: v for k, v in outputs.items() if not _is_among(v, held)}
            nbytes = session.bytes_peak() + memory.outside_bytes(outside, session.on_device)
            measured["peak_mib"] = (nbytes + sum(held.values())) / MIB
            return
        before = self.device.held_by_torch()
        peaks = self.device.peak_of_torch(lambda: self._call(impl))
        for name, nbytes in peaks.items():
            # In its turn everything that PyTorch has come to hold since the side was opened is the side's
            # own.
            own = before[name] - self.held[name] if self.held else sum(held.values())
            measured[f"{name}_mib"] = (nbytes + own) / MIB

    def _open(self, impls: Iterable[str]) -> None:
        if self.case.in_turn:
            self.held = self.device.held_by_torch()
        self.opened = self._alive(impls)
        for impl in self.opened:
            if self.sides[impl].open is not None:
                self._attempt(impl, self.sides[impl].open)

    def _close(self) -> None:
        """Also of a side that failed: what it has opened goes back."""
        for impl in self.opened:
            if self.sides[impl].close is not None:
                self._attempt(impl, self.sides[impl].close)
        self.calling("")
        if self.case.in_turn:
            self.device.release()

    def _call(self, impl: str) -> Outputs:
        side = self.sides[impl]
        if side.before is not None:
            side.before()
        return side.call()

    def _attempt(self, impl: str, act: Callable[[], object]) -> None:
        self.calling(impl)
        try:
            act()
            self.device.synchronize()
        except DeviceLost:
            raise
        except Exception as error:  # any failure of a side is a result, never the end of the sweep
            self.results[impl].end(error)
            self.device.check_alive()
        if self.results[impl].status not in ("ok", "failed"):
            self.device.release()  # now that the exception and its frames are gone

    def _alive(self, impls: Iterable[str] | None = None) -> list[str]:
        """Those of `impls`, or of all, that nothing has ended."""
        found = self.results if impls is None else impls
        return [impl for impl in found if self.results[impl].status in ("ok", "failed")]

    def _side(self, impl: str, value: Any) -> Side:
        if isinstance(value, Side):
            return value
        if callable(value):
            return Side(value)
        if self.measure != ("error",):
            raise ProtocolError(f"{impl} is no function, and its {' and '.join(self.measure)} is asked for")
        return Side(lambda: value)


def measure_case(
    module: ModuleType,
    case: Case,
    library: Library,
    *,
    budget: float,
    given_up: Mapping[str, tuple[str, str]] | None = None,
    calling: Callable[[str], None] = lambda impl: None,
    device: Device | None = None,
    dump: Path | None = None,
    only: Sequence[str] = (),
    ranks: Any = None,
) -> list[dict]:
    """The records of one case, without what every record of a run has in common. `only`: the time of these sides.
    `ranks`: of a case of several, who this one is (rank.Ranks).

    `calling` hears the name of the side that runs next, so that whoever watches knows whose fault a crash was. Into the
    folder `dump` go the tensors of a case whose answers are judged.
    """
    device = device or Cpu()
    started = time.perf_counter()
    device.precision(case.get("dtype"))
    with library.open(device) as c:
        draw = Draw(case.name, device.torch)
        try:
            c.ranks = ranks
            if ranks is not None and "time" in case.measure and case.repeats is None:
                raise ProtocolError(
                    "a case of several ranks needs to say its repeats, which are then the same on all"
                )
            run = Measurement(case, module.run(case, draw, c), draw, c, calling, device, dump)
            if only:
                run.leave(only)
            run.give_up(given_up or {})
            run.run(budget)
            records = run.records()
        except DeviceLost:
            raise
        except Exception as error:  # before there were sides to blame
            status, message = status_of(error)
            records = [{"impl": "c", "status": status, "message": message}]
            device.check_alive()
        run = draw = None
    device.end_case()
    for record in records:
        record["measure"] = " ".join(case.measure)
        record["threads"] = torch.get_num_threads()
        record["seconds"] = round(time.perf_counter() - started, 3)
        record["sides"] = len(records)
        if case.reference:
            record["reference"] = case.reference
        if record["impl"] in case.config:
            record["config"] = case.config[record["impl"]]
    head = {"deliverable": case.deliverable, "module": module.__name__.rpartition(".")[2], "case": case.keys}
    return [head | record for record in records]


def _reference(plan: Mapping[str, Any]) -> str | None:
    """The side that C is judged against: eager PyTorch, else the first of PyTorch's."""
    torches = [impl for impl in plan if impl.startswith("torch")]
    return "torch_eager" if "torch_eager" in torches else next(iter(torches), None)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(mine: Outputs, other: Outputs) -> bool:
    """Whether all are equal; NaN equals nothing."""
    return mine.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in mine.items()
    )


def _is_among(value: Any, held: Mapping[int, int]) -> bool:
    return isinstance(value, torch.Tensor) and value.data_ptr() in held
