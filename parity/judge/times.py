"""Times of somebody's attention. examinee.Clock takes them; a row of them is judged as a row of numbers.py is."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from parity import flash
from parity.core import Case
from parity.core.device import Device
from parity.core.measure import measure_case
from parity.judge import numbers
from tandem.library import Library

# Of the handout's grid, with batch 1, a causal mask and head_dim 64:
# (part of the adapter's name, device): lengths.
SHAPES = {
    ("pytorch", "cpu"): ((512, "f32"), (2048, "f32")),
    ("pytorch", "cuda"): ((512, "f32"), (512, "bf16")),
    ("triton", "cpu"): ((512, "f32"),),  # of a function that runs there, as our bridge's does
    ("triton", "cuda"): ((512, "bf16"), (4096, "bf16"), (16384, "bf16"), (4096, "f32")),
}
PASSES = ("forward", "backward", "both")
# Of the judged timed call. A Triton function may multiply f32 in TF32.
NEAR = {"f32": 1e-5, "triton": 2e-3, "16 bits": 1e-2}
SIDES = ("eager", "compiled", "fused")
BUDGET_S, C_BUDGET_S = 1.0, 0.2
L2_MIB, FEWEST, MOST = 32, 3, 1024  # of a CPU; sets of inputs


def cases(adapter: str, device: torch.device, seed: int) -> Iterator[Case]:
    shapes = [shapes for (part, kind), shapes in SHAPES.items() if part in adapter and kind == device.type]
    for (seq, dtype), phase in itertools.product(*shapes, PASSES) if shapes else ():
        keys = dict(batch=1, heads=1, seq=seq, seq_k=0, head_dim=64, causal=True, dtype=dtype, strided=False)
        what = f"{phase}, {seq} tokens, {dtype}"
        yield Case(adapter, level="times", what=what, call="times", seed=seed, **keys, **{"pass": phase})


def request_of(case: Case, tensors: Mapping[str, torch.Tensor], draw) -> dict[str, Any]:
    """How many sets of inputs there are, which the judged call finds, and what runs beside: two L2 caches of inputs."""
    l2, nbytes = L2_MIB * 2**20, sum(tensor.nbytes for tensor in tensors.values())
    if draw.device.type == "cuda":
        l2 = torch.cuda.get_device_properties(draw.device).L2_cache_size
    sets = min(max(FEWEST, -(-2 * l2 // nbytes)), MOST)
    return dict(sets=sets, turn=int(draw.integers("turn", (1,), high=sets)), budget=BUDGET_S, beside=SIDES)


def near(case: Case) -> float:
    """The most by the norm alone: the first row of a causal gradient is 0 in PyTorch's answer."""
    exact = case.get("dtype", "f32") == "f32"
    return NEAR["16 bits" if not exact else "triton" if "triton" in case.deliverable else "f32"]


def notes(timed: Mapping[str, Any]) -> list[str]:
    """What a reader of a time must know of its calls."""
    found = [] if timed["settled"] else ["has not settled"]
    found += ["compiled in timed calls"] if timed["compiled"] else []
    found += [f"{timed['persisting'] / 2**20:g} MiB of L2 are set aside"] if timed["persisting"] else []
    first, last = timed["mhz"]
    steady = f"clock {last} MHz" if last and last == first else ""
    return found + [steady or f"clock {first} to {last} MHz"] * bool(first and last)


class Rows:
    """The rows of one run, in numbers.py's form."""

    def __init__(self, library: Library, device: Device, bounds: numbers.Bounds):
        how = dict(library=library, device=device, budget=C_BUDGET_S)
        self.measure = functools.partial(measure_case, flash, **how)
        self.device, self.bounds, self.rows = device, bounds, []
        self.card = torch.cuda.get_device_name(device.torch) if device.torch.type == "cuda" else "cpu"
        self.c_ms = functools.cache(self.c_ms)

    def c_ms(self, phase: str, seq: int, dtype: str) -> float | None:
        keys = dict(batch=1, heads=1, seq=seq, head_dim=64, dtype=dtype)
        records = self.measure(flash.timed_case(self.device.torch.type, None, phase, **keys), only=("c",))
        return next((record["ms"]["median"] for record in records if "ms" in record), None)

    def add(self, adapter: str, case: Mapping[str, Any], timed: Mapping[str, Any], words: str) -> None:
        """`words`: why its calls are refused, or nothing."""
        keys = ("pass", "seq", "head_dim", "batch", "heads", "dtype", "causal", "ranks", "optimizer")
        cells = {name: case[name] for name in keys if name in case} | {"ms": timed["ms"]}
        attends = "seq" in case
        cells |= {"id": "flash_benchmarking" if attends else "step", "card": self.card if attends else "cpu"}
        name = adapter.removeprefix("get_").replace("flashattention_autograd_function_", "")
        row = numbers.Row(name, cells)
        row.refused += [words] if words else []
        numbers.alone(row, self.bounds)
        row.std = timed["std"]  # a busy machine refuses nobody
        row.beside = {"calls": timed["n"], "first_ms": timed["first_ms"]}
        row.beside |= {f"their_{name}": ms for name, ms in timed["beside"].items() if isinstance(ms, float)}
        row.beside |= {"C_here": self.c_ms(case["pass"], case["seq"], case["dtype"])} if attends else {}
        row.beside["noted"] = ", ".join(notes(timed))
        self.rows.append(row)
