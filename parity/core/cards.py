"""What GPUs can do by their vendor's data sheets: no result may be faster.

Sources: NVIDIA's data sheets of H100 SXM (2023), H200 (2024), A100 80 GB SXM (2021), GB200's B200 (2025) and L4 (2023),
and the white paper of Ada (2022) for the RTX 4090. Dense products; the fastest form of each card.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Dense matrix products in TFLOP/s by dtype, the memory, and the links to other cards in one direction."""

    tflops: Mapping[str, float]
    gb_s: float
    mib: int
    link_gb_s: float = math.inf


HOPPER = {"bf16": 989.4, "f16": 989.4, "tf32": 494.7, "f32": 66.9}
CARDS = {
    "H100 80GB HBM3": Card(HOPPER, 3352, 81_920, 450),
    "NVIDIA H200": Card(HOPPER, 4800, 144_384, 450),
    "A100": Card({"bf16": 312, "f16": 312, "tf32": 156, "f32": 19.5}, 2039, 81_920, 300),
    "B200": Card({"bf16": 2500, "f16": 2500, "tf32": 1250, "f32": 90}, 8000, 196_608, 900),
    "RTX 4090": Card({"bf16": 165.2, "f16": 330.3, "tf32": 82.6, "f32": 82.6}, 1008, 24_576, 32),
    "NVIDIA L4": Card({"bf16": 121, "f16": 121, "tf32": 60, "f32": 30.3}, 300, 24_576, 32),
}
SHORTEST_MS = {"cuda": 1e-3}  # of a call; on other machines a tenth. A launch takes 2e-3.
# What a library may do for f32 if the variable is set: products of other dtypes.
EMULATED = "CUBLAS_EMULATE_SINGLE_PRECISION"


def card_of(record: Mapping) -> Card | None:
    return next(
        (card for name, card in CARDS.items() if re.search(rf"\b{name}\b", record.get("machine", ""))), None
    )


def peak_of(record: Mapping) -> float | None:
    """The peak of the dtype in which the record's GEMMs are computed, in TFLOP/s; None if CARDS has no such machine."""
    card, dtype = card_of(record), str(record["case"].get("dtype", "")).removesuffix("_mixed")
    return card.tflops.get(dtype) if card and EMULATED not in record.get("versions", {}) else None


def parameters(case: Mapping) -> int:
    """Of a case's model, whose token embedding has vocab times d_model of them; 0 of a case without a model."""
    if not {"vocab", "d_model", "d_ff", "layers"} <= set(case):
        return 0
    d_model, layer = case["d_model"], 4 * case["d_model"] + 3 * case["d_ff"] + 2
    return 2 * case["vocab"] * d_model + case["layers"] * d_model * layer + d_model


def weights_mib(case: Mapping) -> float:
    """The weights of a case's model on one device; 0 of a case without a whole model there."""
    return (
        0
        if "ranks" in case
        else parameters(case) * (2 if case.get("dtype") in ("bf16", "f16") else 4) / 2**20
    )


def step_gflop(case: Mapping) -> float:
    """The least of one rank's training step, whose batch may be that of all ranks; 0 of other cases."""
    if not {"ranks", "batch", "context", "optimizer"} <= set(case) or "pass" in case or not parameters(case):
        return 0
    weights = parameters(case) - case["vocab"] * case["d_model"]
    return 6e-9 * weights * case["batch"] * case["context"] / case["ranks"]


def impossible(record: Mapping, flops: float | None = None) -> str:
    """What no machine can have done, in words that begin with the key; "" if nothing. `flops` of one call in units of
    1e9, if another side tells."""
    card, peak, ms = card_of(record), peak_of(record), record.get("ms")
    tflops = record.get("tflops")
    shortest = SHORTEST_MS.get(record.get("device"), 1e-4)
    if ms and ms["min"] < shortest:
        return f"ms.min is {ms['min']:g}, needs {shortest:g} at least"
    if peak and ms and flops and flops / ms["median"] > peak:
        return f"ms.median is {ms['median']:g}, the data sheet's {peak} TFLOP/s take {flops / peak:.4g}"
    for key, value, most in (
        ("tflops", tflops, peak),
        ("gb_s", record.get("gb_s"), card and card.gb_s),
        ("peak_mib", record.get("peak_mib"), card and card.mib),
    ):
        if value is not None and most is not None and value > most:
            return f"{key} is {value:g}, the card's data sheet has {most:g}"
    case, weights = record["case"], weights_mib(record["case"])
    state = bool(card) and case.get("pass") == "step" and case.get("optimizer", "adamw") == "adamw"
    for what, least in ("", weights), ("and AdamW's state ", 3 * weights * state):
        if record.get("peak_mib") is not None and record["peak_mib"] < 0.99 * least:
            return f"peak_mib is {record['peak_mib']:g}, the weights {what}alone are {least:.0f}"
    return ""
