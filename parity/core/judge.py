"""Whether an answer is right: errors against a float64 truth, and the rule that they must obey.

The rule is README.md's ("Parity"): non-finite values match in place and sign; then, with eps of the output's dtype,

    rel_l2(c) <= 1.1 rel_l2(torch) + eps / 2     and     max_abs(c) <= 3 max_abs(torch) + eps max|truth|

A case of dtype TF32 asks for products of inputs that were rounded to TF32, and eps is TF32's. Where a shape does not
suit the matrix units PyTorch silently multiplies in f32, which is more than was asked for: modules whose products
follow one another, so that their roundings add up, bring a side that rounds the inputs of each product itself, and eps
is the output's again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from parity.core.case import Outputs, Rule, parity
from parity.core.draw import NAMES, left_poisoned

EPS = {"tf32": 2.0**-10}  # of dtypes that are no output's


class ProtocolError(RuntimeError):
    """A module broke the protocol of parity/core/__init__.py; no answer of C is at fault."""


@dataclass
class Verdict:
    """What is wrong with one side of a case (nothing: it passed), and how far off each output is."""

    complaints: list[str] = field(default_factory=list)
    outputs: dict[str, dict] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.complaints

    def error(self) -> dict:
        """The record's "error": the worst over the outputs, and each of them where there are several."""
        measured = {name: found for name, found in self.outputs.items() if found}
        if not measured:
            return {}
        keys = ("max_abs", "rel_l2", "ulp_max")
        worst: dict[str, Any] = {key: _largest(found[key] for found in measured.values()) for key in keys}
        worst["truth"] = "float64"
        if len(measured) > 1:
            worst["outputs"] = measured
        return worst


def is_judged(impl: str) -> bool:
    return impl == "c" or impl.startswith("c_")


def judge(
    sides: Mapping[str, Outputs],
    truth: Outputs,
    rules: Mapping[str, Rule],
    reference: str | None,
    eps: float | None = None,
):
    """{impl: Verdict}. PyTorch's sides get their errors measured; C's are held to the rules as well, with the eps of
    each output's dtype unless another is given."""
    sides = {impl: _tensors(outputs) for impl, outputs in sides.items()}
    truth = _tensors(truth)
    verdicts = {}
    for impl, outputs in sides.items():
        verdicts[impl] = Verdict()
        if is_judged(impl):
            verdicts[impl].complaints = _complaints(outputs, reference, sides, truth, rules, eps)
        for name, value in outputs.items():
            if name not in truth or isinstance(value, str):
                continue
            if value.shape == truth[name].shape:
                verdicts[impl].outputs[name] = _measure(value, truth[name])
            elif verdicts[impl].passed:
                raise ProtocolError(
                    f"{impl}: {name} is {list(value.shape)}, its truth {list(truth[name].shape)}"
                )
    return verdicts


def _complaints(got: Outputs, name_of_reference: str | None, sides, truth: Outputs, rules, eps) -> list[str]:
    found = []
    reference = sides.get(name_of_reference)
    expected = reference if reference is not None else truth
    if set(got) != set(expected):
        return [f"outputs are {_listed(got)}, expected {_listed(expected)}"]
    for name, value in got.items():
        rule = next((rules[pattern] for pattern in rules if fnmatchcase(name, pattern)), parity())
        complaint = _shape_complaint(value, expected[name], reference is not None)
        if not complaint and rule.kind == "amid":
            complaint = _amid(name, value, reference, sides.get(rule.against), rule.against)
        elif not complaint:
            complaint = _rule_complaint(
                rule, value, None if reference is None else reference[name], truth.get(name), eps
            )
        if complaint:
            found.append(f"{name}: {complaint}")
    return found


def _shape_complaint(value, expected, same_dtype: bool) -> str:
    if isinstance(value, str) or isinstance(expected, str):
        return "" if value == expected else f"is {value!r}, expected {expected!r}"
    if value.shape != expected.shape:
        return f"shape is {list(value.shape)}, expected {list(expected.shape)}"
    if same_dtype and value.dtype != expected.dtype:
        return f"dtype is {value.dtype}, expected {expected.dtype}"
    return ""


def _rule_complaint(rule: Rule, value, reference, truth, eps) -> str:
    if isinstance(value, str):
        return ""  # compared with the shapes
    if truth is not None and truth.shape != value.shape:
        raise ProtocolError(f"an output of shape {list(value.shape)} has a truth of {list(truth.shape)}")
    unwritten = left_poisoned(value) if value.is_floating_point() else 0
    if unwritten:
        return f"{unwritten} of {value.numel()} elements were never written"
    if rule.kind == "equal":
        if rule.against == "torch":
            if reference is None:
                raise ProtocolError("rule equal() without a torch side to compare with")
            return _different(_bits(value) != _bits(reference), value, reference)
        if truth is None:
            raise ProtocolError('rule equal("truth") on an output that the truth lacks')
        wide = value.double()
        return _different((wide != truth) & ~(wide.isnan() & truth.isnan()), value, truth)
    if rule.kind == "within":
        target = truth if truth is not None else reference
        if target is None:
            raise ProtocolError("rule within() without a truth or a torch side to compare with")
        return _within(rule, value, target.double())
    if truth is None:
        raise ProtocolError("the parity rule on an output that the truth lacks; name another rule for it")
    return _parity(value, reference, truth, eps)


def _parity(
    value: torch.Tensor, reference: torch.Tensor | None, truth: torch.Tensor, eps: float | None = None
) -> str:
    complaint = _kind_complaint(value, truth)
    if complaint:
        return complaint
    if not value.is_floating_point():
        return _different(value.double() != truth, value, truth)
    eps = torch.finfo(value.dtype).eps if eps is None else eps
    finite = _rounded(truth, value.dtype).isfinite()
    scale = _max(truth[finite].abs())
    mine = _errors(value.double()[finite], truth[finite])
    theirs = {"rel_l2": 0.0, "max_abs": 0.0}
    if reference is not None:
        # Where PyTorch itself is not finite it sets no bar.
        both = finite & reference.isfinite()
        theirs = _errors(reference.double()[both], truth[both])
    limits = {"rel_l2": 1.1 * theirs["rel_l2"] + eps / 2, "max_abs": 3 * theirs["max_abs"] + eps * scale}
    over = [
        f"{key} {mine[key]:.3g} exceeds {limit:.3g} (PyTorch's is {theirs[key]:.3g})"
        for key, limit in limits.items()
        if not mine[key] <= limit
    ]
    return "; ".join(over)


def _within(rule: Rule, value: torch.Tensor, target: torch.Tensor) -> str:
    complaint = _kind_complaint(value, target)
    if complaint:
        return complaint
    finite = target.isfinite()
    mine = _errors(value.double()[finite], target[finite])
    limits = {"rel_l2": rule.rel_l2, "max_abs": rule.max_abs}
    over = [
        f"{key} {mine[key]:.3g} exceeds {limit:.3g}"
        for key, limit in limits.items()
        if limit is not None and not mine[key] <= limit
    ]
    return "; ".join(over)


def _amid(name: str, value, reference: Outputs | None, other: Outputs | None, other_name: str) -> str:
    """The distances, from one side, of an answer and of another whose distance is noise."""
    if reference is None or other is None or name not in other:
        return f"not judged: there is no {name} of {other_name} to say how much is noise"
    base = reference[name].double()
    mine, noise = ((x.double() - base).abs() for x in (value, other[name]))
    return "; ".join(
        f"{what} distance {got:.3g} exceeds {limit:.3g}, that of {other_name}"
        for what, got, limit in (
            ("mean", float(mine.mean()), float(noise.mean())),
            ("largest", float(mine.max()), float(noise.max())),
        )
        if not got <= limit
    )


def _kind_complaint(value: torch.Tensor, truth: torch.Tensor) -> str:
    """NaN where the truth is NaN, the same infinity where it is infinite (or too large for the dtype)."""
    if not value.is_floating_point():
        return ""
    want = _rounded(truth, value.dtype)
    for name, mine, theirs in (
        ("NaN", value.isnan(), want.isnan()),
        ("+inf", value.isposinf(), want.isposinf()),
        ("-inf", value.isneginf(), want.isneginf()),
    ):
        wrong = mine != theirs
        if bool(wrong.any()):
            return f"{name} at {int(mine.sum())} elements, expected at {int(theirs.sum())} ({_first(wrong)})"
    return ""


def _measure(value: torch.Tensor, truth: torch.Tensor) -> dict:
    want = _rounded(truth, value.dtype)
    finite = want.isfinite()
    same = (value == want) | (value.isnan() & want.isnan())
    if not bool(same[~finite].all()):
        return {"max_abs": math.inf, "rel_l2": math.inf, "ulp_max": math.inf}
    mine, exact = value.double()[finite], truth[finite]
    # An element that cancelled to almost nothing is measured by the typical one: its own ulp says nothing.
    typical = exact.square().mean().sqrt() if exact.numel() else 0.0
    ulps = (mine - exact).abs() / _spacing(exact.abs().clamp(min=typical), value.dtype)
    return {**_errors(mine, exact), "ulp_max": _max(ulps)}


def _errors(value: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    difference = value - truth
    size, off = float(torch.linalg.vector_norm(truth)), float(torch.linalg.vector_norm(difference))
    relative = off / size if size > 0 else (0.0 if off == 0 else math.inf)
    return {"max_abs": _max(difference.abs()), "rel_l2": relative}


def _spacing(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of `dtype` at each magnitude: one unit in the last place."""
    if not dtype.is_floating_point:
        return torch.ones_like(size)
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(size.clamp(min=info.smallest_normal))
    return info.eps * torch.exp2((exponent - 1).double())


def _rounded(truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return truth.to(dtype) if dtype.is_floating_point else truth


def _tensors(outputs: Outputs) -> Outputs:
    """Every output as a tensor or a string."""
    if not isinstance(outputs, Mapping):
        raise ProtocolError(f"a side returned {type(outputs).__name__}, needs a dict of outputs")
    result = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            result[name] = value.detach()
        elif isinstance(value, str):
            result[name] = value
        elif isinstance(value, (bool, int)):
            result[name] = torch.tensor(value, dtype=torch.int64)
        elif isinstance(value, float):
            result[name] = torch.tensor(value, dtype=torch.float64)
        else:
            raise ProtocolError(
                f"output {name} is a {type(value).__name__}, needs a tensor, number or string"
            )
    return result


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(width)


def _different(wrong: torch.Tensor, value: torch.Tensor, expected: torch.Tensor) -> str:
    count = int(wrong.sum())
    if not count:
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{count} of {wrong.numel()} elements differ; the first, {list(at)}, "
        f"is {value[at].item()!r}, expected {expected[at].item()!r}"
    )


def _first(wrong: torch.Tensor) -> str:
    return f"first difference at {wrong.nonzero()[0].tolist()}"


def _max(values: torch.Tensor) -> float:
    """The largest; 0 of none; NaN if one is NaN."""
    return float(values.max()) if values.numel() else 0.0


def _largest(values) -> float:
    values = list(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _listed(outputs: Outputs) -> str:
    def dtype(value):
        return "text" if isinstance(value, str) else NAMES.get(value.dtype, str(value.dtype))

    return ", ".join(f"{name} ({dtype(value)})" for name, value in sorted(outputs.items())) or "none"
