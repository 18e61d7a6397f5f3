"""One case: every side of it computed, judged, timed and weighed, and a record of each."""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from parity.core import clock, memory
from parity.core.case import Case, Outputs, Side, is_judged, seed_of
from parity.core.device import Cpu, Device
from parity.core.draw import Draw
from parity.core.equals import Sequential
from parity.core.judge import EPS, ProtocolError, judge, rule_of, timed_complaints
from tandem.library import Library, Session

MIB, GIB = 2**20, 2**30
SHOWN = 5  # complaints of a side
OWN = {"impl", "status", "error", "ms", "samples", "ratio"}  # keys of a record that no side may set
# (numbers of an answer, answers with other orders of summation): the noise of few numbers needs more answers.
EQUALS = ((2**14, 16), (2**18, 4), (math.inf, 2))


@dataclass
class Part:
    """One side of the case and its results so far. After a status other than "ok" or "failed" the side runs no more."""

    impl: str
    side: Side
    status: str = "ok"
    message: str = ""
    measured: dict[str, Any] = field(default_factory=dict)
    outputs: Outputs = field(default_factory=dict)  # of the last call
    copies: list[Outputs] = field(default_factory=list)  # of C's outputs, as its calls left them
    complaints: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.status in ("ok", "failed")

    def end(self, error: BaseException) -> None:
        self.status, self.message = status_of(error)
        self.measured = {}

    def call(self) -> Outputs:
        if self.side.before is not None:
            self.side.before()
        found = self.side.call()
        return {} if found is None else found

    def answer(self) -> None:
        self.outputs = self.call()

    def answer_copied(self) -> None:
        """Copies the outputs before the device is waited for: a copy lacks work that is left to another stream."""
        self.answer()
        copied = {name: _copy(value) for name, value in self.outputs.items()}
        if not any(_same(copied, before) for before in self.copies):
            self.copies.append(copied)


def status_of(error: BaseException) -> tuple[str, str]:
    """(status, message) of the record."""
    message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if memory.is_out_of_memory(error):
        return "oom", message
    if getattr(error, "status", None) == "TD_UNSUPPORTED" or isinstance(error, NotImplementedError):
        return "unsupported", message
    return "error", message


def summary(complaints: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(complaints) - SHOWN
    return "; ".join(complaints[:SHOWN] + ([f"and {more} more outputs"] if more > 0 else []))


def completed(records: list[dict], module: str, case: Case, threads: int) -> list[dict]:
    """The records with the keys that all sides of the case have in common, and the sides' config."""
    head = {"deliverable": case.deliverable, "module": module.rpartition(".")[2], "case": case.keys}
    tail = {"measure": " ".join(case.measure), "threads": threads, "sides": len(records)}
    configs = {impl: {"config": switches} for impl, switches in case.config.items()}
    return [head | record | tail | configs.get(record["impl"], {}) for record in records]


class Measurement:
    """One run of one case: all its sides at once, or one after the other."""

    def __init__(
        self, case: Case, plan: Mapping, draw: Draw, c: Session, calling: Callable, device=None, dump=None
    ):
        self.case, self.draw, self.c, self.calling, self.dump = case, draw, c, calling, dump
        self.device = device or Cpu()
        self.measure = case.measure
        self.others = 0
        self.held: dict[str, int] = {}  # by PyTorch before the sides of a turn were opened
        plan = dict(plan)
        self.truth, self.rules = plan.pop("truth", {}), plan.pop("rule", {})
        self.equal, self.sample = plan.pop("equal", None), plan.pop("sample", None)
        self.timed: dict[str, Outputs] = {}  # of the last timed call, whose inputs were changed
        self.changes = callable(self.truth) or not self.truth
        named = plan.pop("reference", None)
        self.named = {"reference": named} if named else {}
        torches = [impl for impl in plan if impl.startswith("torch")]
        self.reference = named or ("torch_eager" if "torch_eager" in torches else next(iter(torches), None))
        if is_judged(self.reference or ""):
            raise ProtocolError(f"the reference is {self.reference}, needs a side of PyTorch")
        self.parts = {impl: Part(impl, self._side(impl, value)) for impl, value in plan.items()}
        unknown = set(case.config) - set(self.parts)
        if unknown:
            raise ProtocolError(f"the case has a config of {', '.join(sorted(unknown))}, run() no such side")
        if not self.parts:
            raise ProtocolError("run() returned no side")
        if "error" in self.measure and not any(map(is_judged, self.parts)):
            raise ProtocolError("run() returned no side of C to judge")

    def run(self, budget: float) -> None:
        in_turn, everyone = self.case.in_turn, list(self.parts.values())
        if in_turn:
            self.device.release()
        for parts in [[part] for part in everyone] if in_turn else [everyone]:
            if in_turn:
                self.held = self.device.held_by_torch()
            opened = self._alive(parts)
            self._attempt_each("open", opened)
            if "error" in self.measure:
                self.error(parts)
                if not in_turn:
                    self.judge()  # before later calls overwrite the outputs
            timings = self.time(parts, budget) if "time" in self.measure else {}
            for part in self._alive(parts) if "memory" in self.measure else ():
                self._attempt(part, lambda part=part: self._weigh(part))
            self.compare(timings)
            if not in_turn:
                self.judge_timed()
            self._attempt_each("close", opened)  # also of a side that failed
            self.calling("")
            if in_turn:
                self.device.release()
        if in_turn:
            if "error" in self.measure:
                self.judge()
            self.judge_timed()

    def leave(self, impls: Sequence[str]) -> None:
        """Only these sides, and only their time."""
        self.measure = tuple(name for name in self.measure if name == "time")
        self.parts = {impl: part for impl, part in self.parts.items() if impl in impls}

    def give_up(self, given_up: Mapping[str, tuple[str, str]]) -> None:
        """Sides that are known to fail: they ended an earlier process, or need more memory than there is."""
        own = {impl: part.side.needs_bytes for impl, part in self.parts.items()}
        wanted = {impl: self.case.needs_bytes if need is None else need for impl, need in own.items()}
        room = self.device.available_bytes() if any(wanted.values()) else 0
        for impl, part in self.parts.items():
            if impl in given_up:
                part.status, part.message = given_up[impl]
            elif wanted[impl] > room:
                words = f"needs about {wanted[impl] / GIB:.0f} GiB, {room / GIB:.0f} GiB are available"
                part.status, part.message = "not run", words

    def error(self, parts: Iterable[Part]) -> None:
        """The outputs of each side. C is called twice, because a captured graph may do less in a later launch."""
        for part in self._alive(parts):
            if not is_judged(part.impl):
                self._attempt(part, part.answer)
                continue
            kept = self.draw.kept()
            for _ in range(2):
                self.draw.restore(kept, part.outputs.values())
                self._attempt(part, part.answer_copied)
                known = [text for other in self.parts.values() for text in other.complaints]
                part.complaints += [text for text in self.draw.complaints() if text not in known]
                if not part.alive:
                    break
        self.calling("")

    def judge(self) -> None:
        alive = {part.impl: part for part in self._alive()}
        lost = self.reference is not None and self.reference not in alive
        try:
            truth = self.truth() if callable(self.truth) else self.truth
            asked = {impl: part for impl, part in alive.items() if not (lost and is_judged(impl))}
            judged = {impl: part.copies or [part.outputs] for impl, part in asked.items()}
            first, last = ({impl: calls[call] for impl, calls in judged.items()} for call in (0, -1))
            # A reference that rounds to TF32 itself has that rounding in its own error.
            eps = None if self.reference == "torch_tf32" else EPS.get(self.case.get("dtype"))
            self.save(truth)
            orders = ([], 1) if lost else self.equals(truth)
            verdicts = judge(first, truth, self.rules, self.reference, eps, *orders)
            if any(len(calls) > 1 for calls in judged.values()):
                later = judge(last, truth, self.rules, self.reference, eps, *orders)
                verdicts |= {impl: later[impl] for impl, found in verdicts.items() if found.passed}
        except Exception as error:  # the truth failed, or the module broke the protocol
            for impl in filter(is_judged, alive):
                alive[impl].end(error)
            return
        wrong = not lost and self.reference is not None and bool(verdicts[self.reference].complaints)
        status = "failed" if wrong else self.parts[self.reference].status if lost else ""
        for impl in filter(is_judged, alive if status else ()):
            alive[impl].message = f"not judged: {self.reference} is {status}"
        for impl, verdict in verdicts.items():
            part = alive[impl]
            if verdict.error():
                part.measured["error"] = verdict.error()
            found = part.complaints + ([] if wrong and is_judged(impl) else verdict.complaints)
            if found:
                part.status, part.message = "failed", summary(found)

    def save(self, truth: Outputs) -> None:
        """The case's tensors as a file, if --dump asks for it."""
        if self.dump is None:
            return
        self.dump.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w=.,-]+", "_", self.case.name)
        sides = {impl: part.outputs for impl, part in self.parts.items() if part.outputs}
        content = {"case": self.case.name, "inputs": self.draw.inputs(), "sides": sides, "truth": dict(truth)}
        torch.save(content, self.dump / f"{name}.pt")

    def equals(self, truth: Outputs) -> tuple[list[Outputs], int]:
        """Answers of the reference's formula with sums in other orders, none if no output is judged by them, and the
        terms of their longest sum."""
        if self.reference is None or (self.case.in_turn and self.equal is None):
            return [], 1  # in turn the reference is closed by now
        reference = self.parts[self.reference]
        call, known = self.equal or reference.call, reference.outputs
        if all(rule_of(name, self.rules).kind != "parity" for name in known if name in truth):
            return [], 1
        # The reference's own tensors may be written again.
        reference.outputs = {name: _copy(value) for name, value in known.items()}
        numbers = sum(value.numel() for value in known.values() if isinstance(value, torch.Tensor))
        count = next(count for limit, count in EQUALS if numbers <= limit)
        found, longest = [], 1
        names = [] if self.c.ranks is None else [f"rank {self.c.ranks.rank}"]
        tf32 = self.case.get("dtype") == "tf32" and self.reference != "torch_tf32"
        for index in range(count):
            if names:
                self.c.ranks.wanted = count - index
            seed = seed_of(self.case.name, f"equal {index}", *names)
            with Sequential(seed, tf32=tf32, truncates=self.device.torch.type == "cuda") as mode:
                found.append({name: _copy(value) for name, value in call().items()})
            longest = max(longest, mode.longest)
        return found, longest

    def time(self, parts: Iterable[Part], budget: float) -> dict[str, clock.Timing]:
        sides = {part.impl: replace(part.side, answer=None) for part in self._alive(parts)}
        if not sides:
            return {}
        self.others = clock.others_running()
        warmup = self.case.get("warmup", clock.WARMUP)
        how = dict(warmup=warmup, repeats=self.case.repeats, together=self.case.together, budget=budget)
        how |= dict(device=self.device, before_last=lambda timings: self.before_last(sides, timings))
        timings = clock.time_sides(sides, calling=self.calling, **how)
        for impl, timing in timings.items():
            if timing.failure is not None:
                self.parts[impl].end(timing.failure)
            else:
                self.timed[impl] = {name: _copy(value) for name, value in timing.outputs.items()}
        self.draw.change(False)
        return timings

    def before_last(self, sides: Mapping[str, Side], timings: Mapping[str, clock.Timing]) -> None:
        """What the last timed call finds: other inputs, and no answer of before. So an answer that is kept is wrong."""
        for impl, side in sides.items():
            side.before, side.answer = side.renew or side.before, self.parts[impl].side.answer
        if self.changes and any(timing.outputs or sides[impl].answer for impl, timing in timings.items()):
            self.draw.change(True)
        for impl in filter(is_judged, timings):
            self.draw.poison(timings[impl].outputs.values())

    def judge_timed(self) -> None:
        """Compares the last timed call of each side with the truth of the changed inputs, or with a sample of it. If
        the case has no truth, C's call is compared with PyTorch's as well."""
        timed = [part for impl, part in self.parts.items() if impl in self.timed and part.status == "ok"]
        if self.changes and any(self.timed.values()):
            self.draw.change(True)
        try:
            self._judge_timed(sorted(timed, key=lambda part: is_judged(part.impl)))
        except Exception as error:  # the truth failed
            for part in timed:
                part.message = f"not judged: {status_of(error)[1]}" if is_judged(part.impl) else part.message
        finally:
            self.draw.change(False)

    def _judge_timed(self, timed: Sequence[Part]) -> None:
        truth = (self.truth() if callable(self.truth) else self.truth) if any(self.timed.values()) else {}
        theirs: dict[str, Outputs] = {}
        for part in timed:
            outputs = self.timed[part.impl]
            exact = {"the truth": {name: (outputs[name], truth[name]) for name in outputs if name in truth}}
            if self.sample and outputs:
                exact["the truth"] |= self.sample(outputs)
            for impl, other in theirs.items() if is_judged(part.impl) and not truth else ():
                exact[impl] = {name: (outputs[name], other[name]) for name in outputs if name in other}
            found = timed_complaints(exact, EPS.get(self.case.get("dtype")), self.rules)
            if found:
                part.status, part.message = "failed", summary(found)
            elif not is_judged(part.impl):
                theirs |= {} if theirs or not outputs else {part.impl: outputs}
            elif any(exact.values()):
                part.measured["timed"] = "judged"
            elif "error" not in self.measure:
                part.message = "not judged: no answer of its timed calls has another to be compared with"

    def compare(self, timings: Mapping[str, clock.Timing]) -> None:
        """Statistics and rates of the samples; of sides that alternated, the ratio to the reference by sample."""
        reference = timings.get(self.reference)
        for impl, timing in timings.items():
            part = self.parts[impl]
            if timing.failure is not None or not part.alive:
                continue
            measured = part.measured
            measured["ms"] = clock.statistics(timing.samples)
            if self.case.get("ranks", 1) == 1:  # ranks are others to each other
                measured["others"] = self.others
            if timing.first_ms is not None:
                measured["first_ms"] = round(timing.first_ms, 3)
            if self.case.together > 1:
                measured["together"] = self.case.together
            seconds = measured["ms"]["median"] / 1e3
            if part.side.flops:
                measured["tflops"] = part.side.flops / seconds / 1e12
            if part.side.nbytes:
                measured["gb_s"] = part.side.nbytes / seconds / 1e9
            if is_judged(impl) and reference is not None and reference.failure is None:
                measured["ratio"] = {"over": self.reference, **clock.ratio(timing.samples, reference.samples)}
            measured["samples"] = [round(sample, 6) for sample in timing.samples]

    def records(self) -> list[dict]:
        found = []
        for impl, part in self.parts.items():
            record = {"impl": impl, "status": part.status, **part.measured, **self.named}
            if part.message:
                record["message"] = part.message
            if part.alive:
                further = part.side.record
                further = further() if callable(further) else further
                if OWN & set(further):
                    raise ProtocolError(f"{impl} sets {', '.join(sorted(OWN & set(further)))} of its record")
                record.update(further)
            found.append(record)
        return found

    def _weigh(self, part: Part) -> None:
        held = {tensor.data_ptr(): tensor.nbytes for tensor in part.side.holds()}
        if is_judged(part.impl):
            session = self.c.side(part.impl)
            outputs = (part.outputs or part.call()).values()
            outside = [x for x in outputs if isinstance(x, torch.Tensor) and x.data_ptr() not in held]
            nbytes = session.bytes_peak() + memory.outside_bytes(outside, session.on_device)
            part.measured["peak_mib"] = (nbytes + sum(held.values())) / MIB
            return
        before = self.device.held_by_torch()
        for name, nbytes in self.device.peak_of_torch(part.call).items():
            # In its turn everything that PyTorch has allocated since the side was opened is the side's own.
            own = before[name] - self.held[name] if self.held else sum(held.values())
            part.measured[f"{name}_mib"] = (nbytes + own) / MIB

    def _attempt_each(self, act: str, parts: Iterable[Part]) -> None:
        """Calls `open` or `close` of the sides that have it."""
        for part in parts:
            if getattr(part.side, act) is not None:
                self._attempt(part, getattr(part.side, act))

    def _attempt(self, part: Part, act: Callable[[], object]) -> None:
        self.calling(part.impl)
        try:
            act()
            self.device.synchronize()
        except Exception as error:  # any failure of a side is a result, never the end of the sweep
            part.end(error)
            self.device.check_alive()
        if not part.alive:
            self.device.release()  # now that the exception and its frames are gone

    def _alive(self, parts: Iterable[Part] | None = None) -> list[Part]:
        """Those of `parts`, or of all, that nothing has ended."""
        return [part for part in (self.parts.values() if parts is None else parts) if part.alive]

    def _side(self, impl: str, value: Any) -> Side:
        if isinstance(value, Side) or callable(value):
            return value if isinstance(value, Side) else Side(value)
        if self.measure != ("error",):
            raise ProtocolError(f"{impl} is no function, and its {' and '.join(self.measure)} is asked for")
        if not isinstance(value, Mapping):
            return Side(lambda: value)
        return Side(lambda: {name: _copy(x) for name, x in value.items()})


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
    """The records of one case, without the keys that a run adds. `only`: the time of these sides. `ranks`: rank.Ranks.
    `calling` hears the side that runs next, which a crash ends. `dump`: a folder for the tensors of judged cases."""
    device = device or Cpu()
    started = time.perf_counter()
    device.precision(case.get("dtype"))
    with library.open(device) as c:
        draw = Draw(case.name, device.torch)
        try:
            c.ranks = ranks
            if ranks is not None and "time" in case.measure and case.repeats is None:
                words = "a case of ranks needs to say its repeats, which are the same on all ranks"
                raise ProtocolError(words)
            run = Measurement(case, module.run(case, draw, c), draw, c, calling, device, dump)
            if only:
                run.leave(only)
            run.give_up(given_up or {})
            run.run(budget)
            records = run.records()
        except Exception as error:  # before there were sides to blame
            status, message = status_of(error)
            records = [{"impl": "c", "status": status, "message": message}]
            device.check_alive()
        run = draw = None
    device.end_case()
    for record in records:
        record["seconds"] = round(time.perf_counter() - started, 3)
    return completed(records, module.__name__, case, torch.get_num_threads())


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(mine: Outputs, other: Outputs) -> bool:
    """Whether all are equal; NaN equals nothing."""
    return mine.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in mine.items()
    )
