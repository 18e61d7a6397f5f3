"""The handout's nsys_profile in PyTorch, with PyTorch's profiler: the activities in the phases of a step, and inside
attention."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from ref.attention import masked_scores
from ref.ops import softmax
from ref.transformer import AdamW, Transformer, cross_entropy

PHASES = ("forward", "loss", "backward", "optimizer")
# The handout's names of the parts of "scaled dot product attention".
PARTS = {
    "scores": "computing attention scores",
    "softmax": "computing softmax",
    "values": "final matmul",
}


def annotated_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """ref.attention with the handout's ranges around its parts."""
    with record_function("scaled dot product attention"):
        with record_function(PARTS["scores"]):
            scores = masked_scores(q, k, causal)
        with record_function(PARTS["softmax"]):
            weights = softmax(scores)
        with record_function(PARTS["values"]):
            return weights @ v


@dataclass
class Activity:
    """A kernel, copy or fill on a GPU; on a CPU an operation, without the time of operations that it calls."""

    name: str
    step: int
    phase: str  # "": outside of all phases
    part: str  # a key of PARTS if it belongs to attention in the forward pass; else ""
    begin: float  # microseconds
    end: float


@dataclass
class Profiled:
    steps: int
    timer: dict[str, list[float]]  # ms of each phase without the profiler, synchronised
    activities: list[Activity]  # of all steps


class Profiler:
    """Steps of a model on one batch, synchronised after each phase, as the handout asks."""

    def __init__(
        self,
        model: Transformer,
        ids: Tensor,
        targets: Tensor,
        autocast: bool = False,
        synchronize: Callable[[], None] = lambda: None,
    ):
        self.model, self.ids, self.targets, self.synchronize = model, ids, targets, synchronize
        self.autocast = torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast)
        self.optimizer = AdamW(model.parameters())
        for block in model.layers:
            block.attn.attend = annotated_attention

    def step(self, timer: dict[str, list[float]]) -> None:
        self.model.zero_grad(set_to_none=True)
        with self.autocast:
            with self.phase("forward", timer):
                logits = self.model(self.ids)
            with self.phase("loss", timer):
                loss = cross_entropy(logits, self.targets)
        with self.phase("backward", timer):
            loss.backward()
        with self.phase("optimizer", timer):
            self.optimizer.step()

    @contextmanager
    def phase(self, name: str, timer: dict[str, list[float]]):
        self.synchronize()
        start = perf_counter()
        with record_function(name):
            yield
            self.synchronize()
        timer[name].append(1e3 * (perf_counter() - start))

    def run(self, warmup: int, steps: int) -> Profiled:
        timer, unread = ({name: [] for name in PHASES} for _ in range(2))
        for _ in range(warmup):
            self.step(unread)
        for _ in range(steps):
            self.step(timer)
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.ids.is_cuda
        with profile(activities=kinds) as profiler:
            for _ in range(steps):
                self.step(unread)
        activities = on_gpu(recorded(profiler)) if self.ids.is_cuda else on_cpu(operations(profiler))
        return Profiled(steps, timer, activities)


@dataclass
class Event:
    """A record of the profiler; times in microseconds."""

    name: str
    on_host: bool
    begin: float
    end: float
    number: int = 0  # set by recorded(): the id of a CUDA call, which its kernel shares
    annotation: bool = False  # set by recorded()
    own: float = 0.0  # set by operations(): time without the operations that it calls


def recorded(profiler: profile) -> list[Event]:
    """The profiler's raw records. profiler.events() would take many seconds for the hundred thousand of a step."""
    results = profiler.profiler.kineto_results
    start = results.trace_start_ns()
    return [
        Event(
            found.name(),
            found.device_type() == DeviceType.CPU,
            (found.start_ns() - start) / 1e3,
            (found.end_ns() - start) / 1e3,
            found.correlation_id(),
            found.is_user_annotation(),
        )
        for found in results.events()
    ]


def operations(profiler: profile) -> list[Event]:
    """The host's operations, with their own time."""
    return [
        Event(
            found.name,
            True,
            found.time_range.start,
            found.time_range.end,
            own=found.self_cpu_time_total,
        )
        for found in profiler.events()
        if found.device_type == DeviceType.CPU
    ]


def ranges_of(events: list[Event], names: tuple[str, ...]) -> list[tuple[float, float, str]]:
    """Begin, end and name of the host's ranges with these names, in order."""
    return sorted(
        (event.begin, event.end, event.name) for event in events if event.on_host and event.name in names
    )


def range_at(ranges: list[tuple[float, float, str]], time: float) -> tuple[int, str]:
    """The number and the name of the range that contains the time; "" for none. Ranges do not overlap."""
    low, high = 0, len(ranges)
    while low < high:
        middle = (low + high) // 2
        if ranges[middle][0] <= time:
            low = middle + 1
        else:
            high = middle
    return (low - 1, ranges[low - 1][2]) if low > 0 and time < ranges[low - 1][1] else (0, "")


def on_gpu(events: list[Event]) -> list[Activity]:
    """The activities of a GPU. A kernel's own time gives its phase, because phases end when the device is done; this
    also holds for kernels that autograd's thread launched. The time of the launch gives the part of attention."""
    phases, parts = ranges_of(events, PHASES), ranges_of(events, tuple(PARTS.values()))
    words = {name: part for part, name in PARTS.items()}
    launched: dict[int, str] = {}
    for event in events:
        # A kernel has the id of the CUDA call that launched it. Operations have ids of another kind.
        if event.on_host and event.name.startswith("cu"):
            _, part = range_at(parts, event.begin)
            if part:
                launched[event.number] = words[part]
    found = []
    for event in events:
        if not event.on_host and not event.annotation:
            number, phase = range_at(phases, event.begin)
            part = launched.get(event.number, "") if phase == "forward" else ""
            found.append(Activity(event.name, number // len(PHASES), phase, part, event.begin, event.end))
    return found


def on_cpu(events: list[Event]) -> list[Activity]:
    """The activities of a CPU: operations, without the time of operations that they call."""
    phases, parts = ranges_of(events, PHASES), ranges_of(events, tuple(PARTS.values()))
    words = {name: part for part, name in PARTS.items()}
    found = []
    for event in events:
        if not event.name.startswith("aten::"):
            continue
        number, phase = range_at(phases, event.begin)
        part = words.get(range_at(parts, event.begin)[1], "") if phase == "forward" else ""
        end = event.begin + event.own
        found.append(Activity(event.name, number // len(PHASES), phase, part, event.begin, end))
    return found


def flops(model: Transformer, ids: Tensor, targets: Tensor) -> dict[str, int]:
    """FLOPs of GEMMs: of the forward pass, of the scores and the values of all layers, and of forward and backward."""
    found = {"scores": 0, "values": 0}

    def counted(name: str, function: Callable[[], Tensor]) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            result = function()
        found[name] += counter.get_total_flops()
        return result

    def attend(q, k, v, causal):
        scores = counted("scores", lambda: masked_scores(q, k, causal))
        return counted("values", lambda: softmax(scores) @ v)

    for block in model.layers:
        block.attn.attend = attend
    with FlopCounterMode(display=False) as whole:
        logits = model(ids)
        found["forward"] = whole.get_total_flops()
        cross_entropy(logits, targets).backward()
    return found | {"step": whole.get_total_flops()}
