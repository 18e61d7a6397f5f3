"""Records to a ratio, its range and a verdict; which records are too noisy for a sentence; and what a card can do."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parity.core.cards import card_of, peak_of

NOISY = 0.20  # std / mean from which on no sentence is formed
# Bytes that AdamW moves for a parameter of f32: weight, gradient and two moments are read, three are written.
ADAMW_BYTES = 28
# Sides of ranks, whose settings do not state attention.
RANKED = ("c_nccl", "torch_ddp", "torch_zero", "torch_fsdp")


@dataclass(frozen=True)
class Comparison:
    """Of one side's time over another's."""

    mine: float  # ms
    theirs: float  # ms
    low: float  # of the ratio, by the samples' spread
    high: float

    @property
    def ratio(self) -> float:
        return quotient(self.mine, self.theirs)

    @property
    def verdict(self) -> str:
        """A ratio whose range has 1 in it says nothing of who is faster."""
        return "equal" if self.low <= 1 <= self.high else "faster" if self.ratio < 1 else "slower"

    @classmethod
    def of(cls, mine: Mapping | None, theirs: Mapping | None, anywhere: bool = False) -> "Comparison | None":
        """Of two records; None unless both have a time that is not noisy, from one machine with the same versions, or
        with `anywhere` from two. The range of the ratio is that of its quartiles if samples were paired, else it comes
        from the fastest and slowest samples."""
        if not (clean(mine) and clean(theirs) and (anywhere or same_place(mine, theirs))):
            return None
        ms, other = mine["ms"], theirs["ms"]
        paired = mine.get("ratio", {})
        if paired.get("over") == theirs["impl"] and {"p25", "p75"} <= set(paired):
            low, high = paired["p25"], paired["p75"]
        else:
            low, high = ms["min"] / other["max"], ms["max"] / other["min"]
        return cls(ms["median"], other["median"], low, high)


def differing(mine: Mapping | None, theirs: Mapping | None) -> list[str]:
    """What differs between two sides besides what their ratio is about, as "attention (fused, scores)". A setting that
    one of them does not state is no difference."""
    sides = [traits(record) for record in (mine, theirs) if record]
    return [
        f"{name} ({value}, {sides[1][name]})"
        for name, value in (sides[0] if len(sides) == 2 else {}).items()
        if sides[1].get(name, value) != value
    ]


def traits(record: Mapping) -> dict[str, str]:
    """How a side computes, in the words of one list for C and PyTorch."""
    config = record.get("config", {})
    words = {"flash": "fused", "naive": "scores"}
    names = ("attention", "optimizer", "keep", "gradients", "update")
    found = {name: words.get(config[name], config[name]) for name in names if name in config}
    found = {name.replace("keep", "kept activations"): word for name, word in found.items()}
    if record["impl"].startswith("torch"):
        found.setdefault("update", "after")
    if record["impl"].startswith(RANKED) and config:
        mine = record["impl"].startswith("c_") or config.get("compiled")
        found.setdefault("attention", "fused" if mine else "scores")
    captured = config.get("graph", config.get("captured", False))
    found["capture"] = "one CUDA graph" if captured else "queued"
    found |= {"compilation": "yes" if config["compiled"] else "no"} if "compiled" in config else {}
    if record["impl"].startswith("c_nccl") and config:
        found["SMs of NCCL"] = str(config.get("nccl_ctas", "as many as NCCL chooses"))
    if "compressed" in config or record["case"].get("dtype") != "bf16_mixed":
        found["gradients sent in"] = "bf16" if config.get("compressed") else "f32"
    return found if config else {}


def same_place(mine: Mapping, theirs: Mapping) -> bool:
    """Whether two records are of one machine with the same versions."""
    return all(mine.get(key) == theirs.get(key) for key in ("machine", "device", "host", "versions"))


def noisy(record: Mapping) -> bool:
    """Whether its samples lie too far apart, or others worked on the machine while it was measured."""
    if "ms" not in record:
        return False
    return loaded(record) or record["ms"]["std"] > NOISY * record["ms"]["mean"]


def loaded(record: Mapping) -> bool:
    """Whether other programs ran on the CPU meanwhile."""
    cores = record.get("host", {}).get("cores", 1)
    return record.get("device") != "cuda" and record.get("others", 0) > cores / 2


def clean(record: Mapping | None) -> bool:
    """Whether it has a time that a sentence may use; a wrong answer has none."""
    return record is not None and "ms" in record and record["status"] == "ok" and not noisy(record)


def ms_of(record: Mapping | None) -> float | None:
    return record["ms"]["median"] if clean(record) else None


def quotient(mine: Any, theirs: Any) -> float | None:
    """Of two sides' numbers; None if one has none. Nothing else divides one side by another."""
    numbers = all(isinstance(value, (int, float)) for value in (mine, theirs))
    return mine / theirs if numbers and theirs else None


def geomean(values: Iterable[float]) -> float | None:
    found = [value for value in values if value and value > 0]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None


@dataclass(frozen=True)
class Rates:
    """The fastest that a machine was measured at, without noise: TFLOP/s of a GEMM by dtype, GB/s of a copy. The data
    sheet of a card is the bound there; the machines that CARDS lacks have no other bound than these."""

    gemm: Mapping[str, float]
    copy: float

    @classmethod
    def of(cls, records: Iterable[Mapping]) -> "Rates":
        gemm: dict[str, float] = {}
        copy = 0.0
        for record in filter(clean, records):
            case = record["case"]
            if case.get("op") == "gemm" and record.get("tflops"):
                gemm[case["dtype"]] = max(gemm.get(case["dtype"], 0.0), record["tflops"])
            if case.get("op") == "copy" and record.get("gb_s"):
                copy = max(copy, record["gb_s"])
        return cls(gemm, copy)

    def share(self, record: Mapping | None, nbytes: float = 0.0) -> str | None:
        """How much of the tighter bound (FLOPs, bytes) a record reaches. More than all of it is marked. None if no
        rate of its dtype is known."""
        if record is None or "ms" not in record:
            return None
        flops, card = record.get("tflops"), card_of(record)
        rate = peak_of(record) or self.gemm.get(record["case"].get("dtype", "").removesuffix("_mixed"))
        if flops and not rate:
            return None
        shares = [flops / rate] if flops else []
        if nbytes and (gb_s := card.gb_s if card else self.copy):
            shares.append(nbytes / record["ms"]["median"] / 1e6 / gb_s)
        most = f"{100 * max(shares):.0f}" if shares else "0"
        return f"{most} %{' (more than possible)' if int(most) > 100 else ''}" if shares else None
