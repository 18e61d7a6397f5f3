"""One case: every side of it computed, judged, timed and weighed, and a record of each."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from parity.core import clock, memory
from parity.core.case import Case, Outputs, Side
from parity.core.draw import Draw
from parity.core.judge import ProtocolError, is_judged, judge
from parity.core.library import Library, Session

MIB = 2**20


@dataclass
class Result:
    """What is known of one side so far; a status other than "ok" ends its part in the case."""

    status: str = "ok"
    message: str = ""
    measured: dict[str, Any] = field(default_factory=dict)

    def end(self, error: BaseException) -> None:
        self.status, self.message = status_of(error)


def status_of(error: BaseException) -> tuple[str, str]:
    """How an exception is recorded: (status, message)."""
    message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if memory.is_out_of_memory(error):
        return "oom", message
    if getattr(error, "status", None) == "TD_UNSUPPORTED" or isinstance(error, NotImplementedError):
        return "unsupported", message
    return "error", message


class Measurement:
    """One run of one case."""

    def __init__(
        self, case: Case, plan: Mapping[str, Any], draw: Draw, c: Session, calling: Callable[[str], None]
    ):
        self.case, self.draw, self.c, self.calling = case, draw, c, calling
        plan = dict(plan)
        self.truth = plan.pop("truth", {})
        self.rules = plan.pop("rule", {})
        self.reference = plan.pop("reference", None) or _reference(plan)
        self.sides = {impl: self._side(impl, value) for impl, value in plan.items()}
        self.results = {impl: Result() for impl in self.sides}
        self.outputs: dict[str, Outputs] = {}
        if not self.sides:
            raise ProtocolError("run() returned no side")

    def give_up(self, given_up: Mapping[str, tuple[str, str]]) -> None:
        """Sides that are known to fail: they ended an earlier process, or want more memory than there is."""
        room = memory.available_bytes()
        for impl, side in self.sides.items():
            needs = self.case.needs_bytes if side.needs_bytes is None else side.needs_bytes
            if impl in given_up:
                self.results[impl] = Result(*given_up[impl])
            elif needs > room:
                self.results[impl] = Result(
                    "oom", f"needs {needs // MIB} MiB, {room // MIB} MiB are available"
                )

    def error(self) -> None:
        complaints: dict[str, list[str]] = {}
        for impl in self._alive():
            self._attempt(impl, lambda impl=impl: self.outputs.update({impl: self._call(impl)}))
            if is_judged(impl):
                known = [text for texts in complaints.values() for text in texts]
                complaints[impl] = [text for text in self.draw.complaints() if text not in known]
        self.calling("")
        try:
            truth = self.truth() if callable(self.truth) else self.truth
            alive = {impl: self.outputs[impl] for impl in self._alive()}
            lost = self.reference is not None and self.reference not in alive
            judged = {impl: o for impl, o in alive.items() if not (lost and is_judged(impl))}
            verdicts = judge(judged, truth, self.rules, self.reference)
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
            found = complaints.get(impl, []) + verdict.complaints
            if found:
                self.results[impl].status, self.results[impl].message = "failed", "; ".join(found)

    def time(self, budget: float) -> None:
        sides = {impl: self.sides[impl] for impl in self._alive()}
        if not sides:
            return
        options = {} if "warmup" not in self.case else {"warmup": self.case.warmup}
        timings = clock.time_sides(
            sides, repeats=self.case.repeats, budget=budget, calling=self.calling, **options
        )
        for impl, timing in timings.items():
            if timing.failure is not None:
                self.results[impl].end(timing.failure)
                continue
            measured = self.results[impl].measured
            measured["ms"] = timing.stats()
            if sides[impl].flops:
                measured["tflops"] = sides[impl].flops / (measured["ms"]["median"] / 1e3) / 1e12
            reference = timings.get(self.reference)
            if is_judged(impl) and reference is not None and reference.failure is None:
                measured["ratio"] = {"over": self.reference, **clock.ratio(timing.samples, reference.samples)}
            measured["samples"] = [round(sample, 6) for sample in timing.samples]

    def memory(self) -> None:
        for impl in self._alive():
            self._attempt(impl, lambda impl=impl: self._weigh(impl))

    def records(self) -> list[dict]:
        found = []
        for impl, result in self.results.items():
            record = {"impl": impl, "status": result.status, **result.measured}
            if result.message:
                record["message"] = result.message
            if result.status in ("ok", "failed"):
                further = self.sides[impl].record
                record.update(further() if callable(further) else further)
            found.append(record)
        return found

    def _weigh(self, impl: str) -> None:
        held = {tensor.data_ptr(): tensor.nbytes for tensor in self.sides[impl].holds()}
        if is_judged(impl):
            session = self.c.side(impl)
            outputs = self.outputs[impl] if impl in self.outputs else self._call(impl)
            outside = {k: v for k, v in outputs.items() if not _is_among(v, held)}
            nbytes = session.bytes_peak() + memory.outside_bytes(outside, session.on_device)
        else:
            nbytes = memory.peak_of_torch(lambda: self._call(impl))
        self.results[impl].measured["peak_mib"] = (nbytes + sum(held.values())) / MIB

    def _call(self, impl: str) -> Outputs:
        side = self.sides[impl]
        if side.before is not None:
            side.before()
        return side.call()

    def _attempt(self, impl: str, act: Callable[[], object]) -> None:
        self.calling(impl)
        try:
            act()
        except Exception as error:  # any failure of a side is a result, never the end of the sweep
            self.results[impl].end(error)

    def _alive(self) -> list[str]:
        return [impl for impl, result in self.results.items() if result.status in ("ok", "failed")]

    def _side(self, impl: str, value: Any) -> Side:
        if isinstance(value, Side):
            return value
        if callable(value):
            return Side(value)
        if self.case.measure != ("error",):
            raise ProtocolError(
                f"{impl} is no function, and its {' and '.join(self.case.measure)} is asked for"
            )
        return Side(lambda: value)


def measure_case(
    module: ModuleType,
    case: Case,
    library: Library,
    *,
    budget: float,
    given_up: Mapping[str, tuple[str, str]] | None = None,
    calling: Callable[[str], None] = lambda impl: None,
) -> list[dict]:
    """The records of one case, without what every record of a run has in common.

    `calling` hears the name of the side that runs next, so that whoever watches knows whose fault a crash was.
    """
    started = time.perf_counter()
    with library.open() as c:
        draw = Draw(case.name)
        try:
            run = Measurement(case, module.run(case, draw, c), draw, c, calling)
            run.give_up(given_up or {})
            if "error" in case.measure:
                run.error()
            if "time" in case.measure:
                run.time(budget)
            if "memory" in case.measure:
                run.memory()
            records = run.records()
        except Exception as error:  # before there were sides to blame
            status, message = status_of(error)
            records = [{"impl": "c", "status": status, "message": message}]
    for record in records:
        record["measure"] = " ".join(case.measure)
        record["threads"] = torch.get_num_threads()
        record["seconds"] = round(time.perf_counter() - started, 3)
        record["sides"] = len(records)
    head = {"deliverable": case.deliverable, "module": module.__name__.rpartition(".")[2], "case": case.keys}
    return [head | record for record in records]


def _reference(plan: Mapping[str, Any]) -> str | None:
    """The side that C is judged against: eager PyTorch, else the first of PyTorch's."""
    torches = [impl for impl in plan if impl.startswith("torch")]
    return "torch_eager" if "torch_eager" in torches else next(iter(torches), None)


def _is_among(value: Any, held: Mapping[int, int]) -> bool:
    return isinstance(value, torch.Tensor) and value.data_ptr() in held
