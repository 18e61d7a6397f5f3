"""Whether an answer is right: its errors against a float64 truth, and the rule that they must obey.

docs/parity.md has the rule, and parity/core/allowance.py its limits. A record says which share of its limit an error
uses.

A case of dtype TF32 rounds the inputs of products, and eps is TF32's. PyTorch multiplies some shapes in f32 all the
same. So modules may bring a side that rounds the inputs of each product. Then eps is the output's again.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from parity.core.allowance import (
    LEANING_NUMBERS,
    LONG_ROW,
    RARE,
    Allowance,
    Orders,
    allow,
    factor,
    leaning,
    no_measures,
    relative,
)
from parity.core.case import Outputs, Rule, is_judged, parity
from parity.core.draw import bits, left_poisoned
from tandem.library import NAMES

EPS = {"tf32": 2.0**-10}  # of dtypes that are no output's
# Of a timed answer: the limit in u by norm, an eighth of which a common factor may be, and the smallest one.
TIMED, TIMED_LEAST = 8.0, 2.0**-13
NOISE = 0.25  # of the reference: the largest distance of a side that stands for noise


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
        worst: dict[str, Any] = {}
        for key in ("max_abs", "rel_l2", "ulp_max", "used"):
            values = [found[key] for found in measured.values() if key in found]
            worst |= {key: _max(torch.tensor(values, dtype=torch.float64))} if values else {}
        worst["truth"] = "float64"
        if len(measured) > 1:
            worst["outputs"] = measured
        return worst


def judge(
    sides: Mapping, truth: Outputs, rules: Mapping, reference: str | None, eps=None, equals=(), longest=1
) -> dict[str, Verdict]:
    """The verdict of each side. PyTorch's sides are asked only whether they may be a measure of C's. `eps` replaces
    that of an output's dtype. `equals`: the reference's answers with sums in other orders, which may lack outputs;
    `longest`: the terms of their longest sum."""
    judged, verdicts = Judge(sides, truth, rules, reference, eps, equals, longest), {}
    truth = judged.truth
    for impl, outputs in judged.sides.items():
        refused = [(name, why) for (side, name), why in judged.refused.items() if (side or reference) == impl]
        found = verdicts[impl] = Verdict([f"{name}: {why}" for name, why in refused])
        used = judged.judge(outputs, found.complaints) if is_judged(impl) else {}
        for name, value in outputs.items():
            if name not in truth or isinstance(value, str):
                continue
            if value.shape == truth[name].shape:
                found.outputs[name] = _measure(value, truth[name])
                if name in used:
                    found.outputs[name]["used"] = used[name]
            elif found.passed:
                shapes = f"is {list(value.shape)}, its truth {list(truth[name].shape)}"
                raise ProtocolError(f"{impl}: {name} {shapes}")
    return verdicts


def timed_complaints(
    compared: Mapping[str, Mapping[str, tuple]], eps: float | None, rules: Mapping[str, Rule]
) -> list[str]:
    """What is wrong with a timed answer, by the norm and a common factor: {by what: {output: (answer, right one)}}.
    A rule within() names the limit by norm."""
    found = []
    for what, pairs in compared.items():
        for name, (value, right) in _tensors_of(pairs):
            if value.shape != right.shape:
                words = f"shape is {list(value.shape)} while timed, expected {list(right.shape)}"
                found.append(f"{name}: {words}")
                continue
            u = (torch.finfo(value.dtype).eps if eps is None else eps) / 2
            most = rule_of(name, rules).rel_l2 or max(TIMED * u, TIMED_LEAST)
            finite = right.double().isfinite()
            mine, exact = (torch.where(finite, x.double(), 0.0) for x in (value, right))
            far, common = relative(mine - exact, exact), factor(mine, exact)
            if not (far <= most and abs(common - 1) <= most / TIMED) and exact.any():
                words = f"rel_l2 {far:.3g}, a factor of {common:.5g}"
                found.append(f"{name}: while timed it is off {what} by {words}")
    return found


def _tensors_of(pairs: Mapping[str, tuple]) -> list[tuple[str, list[torch.Tensor]]]:
    """The names and tensors of the pairs that are floating point."""
    both = ((name, [*_tensors(dict(enumerate(pair))).values()]) for name, pair in pairs.items())
    tensors = ((name, pair) for name, pair in both if not isinstance(pair[0], str))
    return [(name, pair) for name, pair in tensors if pair[0].is_floating_point()]


def rule_of(name: str, rules: Mapping[str, Rule]) -> Rule:
    """The first whose pattern the output's name matches."""
    return next((rules[pattern] for pattern in rules if fnmatchcase(name, pattern)), parity())


class Measure:
    """What an output under parity() is held to. Numbers whose truth is not finite are 0 here; their places count."""

    def __init__(self, judge: "Judge", name: str, dtype: torch.dtype):
        truth = judge.truth[name]
        self.finite, self.eps, self.dtype = _rounded(truth, dtype).isfinite(), judge.eps, dtype
        self.truth = torch.where(self.finite, truth, 0.0)
        self.torchs = {impl: self.of(x) for impl, x in judge.torchs(name).items()}
        self.orders = Orders([self.of(found[name]) for found in judge.equals if name in found], self.truth)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.finite, x, 0)

    @functools.cached_property
    def allowed(self) -> Allowance:
        return allow(self.truth, [*self.torchs.values()], self.orders, self.dtype, self.eps)


class Judge:
    """What C's outputs are held to."""

    def __init__(self, sides, truth, rules, reference, eps=None, equals=(), longest=1):  # as judge() has them
        self.sides, self.truth = {impl: _tensors(outputs) for impl, outputs in sides.items()}, _tensors(truth)
        self.rules, self.reference, self.eps = rules, reference, eps
        self.equals = [_tensors(outputs) for outputs in equals]
        self.refused: dict[tuple[str, str], str] = {}  # (side, output): why it is no measure
        self.measures: dict[str, Measure] = {}
        self.refuse_measures(longest)

    def refuse_measures(self, longest: int) -> None:
        """Fills `refused`. The side "" stands for the equals."""
        for name, theirs in self.sides.get(self.reference, {}).items():
            rule, truth = rule_of(name, self.rules), self.truth.get(name)
            if rule.kind == "amid" and name in self.sides.get(rule.against, {}):
                noise = relative(self.sides[rule.against][name].double() - theirs.double(), theirs.double())
                if not noise <= NOISE:
                    words = f"no measure: its distance from {self.reference} is {noise:.3g}, at most {NOISE} is noise"
                    self.refused[rule.against, name] = words
            if rule.kind != "parity" or truth is None or isinstance(theirs, str):
                continue
            if theirs.is_floating_point() and theirs.shape == truth.shape:
                self.measures[name] = Measure(self, name, theirs.dtype)
        # Products that round their inputs to TF32 do so in each order of their sums, to the nearest.
        eps, apart = EPS["tf32"] / 4 if self.reference == "torch_tf32" else self.eps, self.apart()
        for name, known in self.measures.items():
            why = no_measures(known.torchs, known.orders, known.truth, eps, longest, apart)
            for impl, words in why.items():
                who = "no measure: " if impl else "no measure: with sums in other orders "
                self.refused[impl, name] = who + words
            known.torchs = {impl: x for impl, x in known.torchs.items() if impl not in why}

    def apart(self) -> float:
        """The largest std of the factors of two equals. A std of two says little, so that of all outputs counts."""
        pairs = [known.orders for known in self.measures.values() if len(known.orders) == 2]
        return max((orders.apart for orders in pairs), default=0.0)

    def judge(self, got: Outputs, complaints: list[str]) -> dict[str, float]:
        """Adds what is wrong. Returns the share of the allowance that the error takes, of outputs under parity()."""
        got, reference = _tensors(got), self.sides.get(self.reference)
        expected = self.truth if reference is None else reference
        if set(got) != set(expected) or not got:
            complaints.append(f"outputs are {_listed(got)}, expected {_listed(expected)}")
            return {}
        used = {}
        for name, value in got.items():
            complaint = _shape_complaint(value, expected[name], reference is not None)
            if not complaint and not isinstance(value, str):
                theirs = None if reference is None else reference[name]
                complaint, share = self.compare(rule_of(name, self.rules), name, value, theirs)
                used |= {} if share is None else {name: share}
            if complaint:
                complaints.append(f"{name}: {complaint}")
        return used

    def compare(self, rule: Rule, name: str, value, theirs) -> tuple[str, float | None]:
        if rule.kind == "amid":
            noise = None if theirs is None else self.sides.get(rule.against, {}).get(name)
            return _amid(name, value, theirs, noise, rule.against), None
        truth = self.truth.get(name)
        if truth is not None and truth.shape != value.shape:
            raise ProtocolError(f"an output of shape {list(value.shape)} has a truth of {list(truth.shape)}")
        unwritten = left_poisoned(value) if value.is_floating_point() else 0
        if unwritten:
            return f"{unwritten} of {value.numel()} elements were never written", None
        if rule.kind == "parity":
            if truth is None:
                words = "the parity rule on an output that the truth lacks; name another rule for it"
                raise ProtocolError(words)
            if not value.is_floating_point():
                complaint = _different(value.double() != truth, value, truth)
                return complaint, math.inf if complaint else 0.0
            known = self.measures.get(name) or Measure(self, name, value.dtype)
            return _parity(value, truth, known, self.apart())
        if rule.kind == "within":
            target = theirs if truth is None else truth
            if target is None:
                raise ProtocolError("rule within() without a truth or a torch side to compare with")
            return _within(rule, value, target.double()), None
        if rule.against == "torch":
            if theirs is None:
                raise ProtocolError("rule equal() without a torch side to compare with")
            return _different(bits(value) != bits(theirs), value, theirs), None
        if truth is None:
            raise ProtocolError('rule equal("truth") on an output that the truth lacks')
        wide = value.double()
        return _different((wide != truth) & ~(wide.isnan() & truth.isnan()), value, truth), None

    def torchs(self, name: str) -> dict[str, torch.Tensor]:
        """PyTorch's answers of one precision, the reference's first."""
        theirs = self.sides.get(self.reference, {}).get(name)
        if theirs is None:
            return {}
        found = {self.reference: theirs} | {
            impl: outputs[name]
            for impl, outputs in self.sides.items()
            if not is_judged(impl) and impl != self.reference and name in outputs and self.eps is None
        }
        return {impl: x for impl, x in found.items() if x.shape == theirs.shape and x.dtype == theirs.dtype}


def _shape_complaint(value, expected, same_dtype: bool) -> str:
    if isinstance(value, str) or isinstance(expected, str):
        return "" if value == expected else f"is {value!r}, expected {expected!r}"
    if value.shape != expected.shape:
        return f"shape is {list(value.shape)}, expected {list(expected.shape)}"
    if same_dtype and value.dtype != expected.dtype:
        return f"dtype is {value.dtype}, expected {expected.dtype}"
    return ""


def _parity(value: torch.Tensor, truth: torch.Tensor, known: Measure, apart: float) -> tuple[str, float]:
    """What is wrong, and the share of the allowance that the error uses."""
    complaint = _kind_complaint(value, truth)
    if complaint:
        return complaint, math.inf
    # Where the truth is not finite, and its place was compared, nothing is allowed and nothing is off.
    exact, mine, allowed = known.truth, known.of(value), known.allowed
    off = mine.double() - exact
    norm = relative(off, exact)
    share = _share(off.abs(), allowed.elements)
    rare = share > 1
    if int(rare.sum()) <= share.numel() // RARE and bool((off[rare].abs() <= allowed.rarely).all()):
        share = torch.where(rare, off.abs() / allowed.rarely, share)
    used = max(_quotient(norm, allowed.norm), _max(share))
    over = []
    if not norm <= allowed.norm:
        over.append(f"rel_l2 {norm:.3g} exceeds {allowed.norm:.3g} ({_bars(allowed)})")
    if not bool((share <= 1).all()):
        count = int((~(share <= 1)).sum())
        over.append(f"{count} of {share.numel()} elements are off by more than is allowed")
    if allowed.rows is not None and not bool((off.square().mean(-1).sqrt() <= allowed.rows).all()):
        over.append("a row is off as a whole")
    elif len(known.orders) and exact.dim() > 1 and exact.shape[-1] >= LONG_ROW:
        unlike = known.orders.off.square().mean(0).sum(-1) < exact.square().sum(-1) / 4
        empty = int(((mine == 0).all(-1) & unlike).sum())
        over += [f"{empty} rows are 0, and PyTorch's are not"] * bool(empty)
    if not over and value.dtype.itemsize < 4 and value.numel() >= LEANING_NUMBERS and exact.any():
        common, most = leaning(mine, exact, known.orders, apart)
        if not abs(common) <= most:
            used = max(used, abs(common) / most)
            words = f"all are about {1 + common:.5g} times the truth rounded once"
            over.append(f"{words}, off by {most:.2g} is allowed")
    if not over:
        return "", used
    found = f"{'; '.join(over)}; {_worst(mine, exact, [*known.torchs.values()], share)}"
    pattern = _pattern(mine.double(), exact, share > 1)
    return f"{found}; {pattern}" if pattern else found, used


def _bars(allowed: Allowance) -> str:
    if allowed.torch_rel_l2 is None:
        return "there is no PyTorch's"
    words = f"PyTorch's is {allowed.torch_rel_l2:.3g}"
    return words if allowed.equals_rel_l2 is None else f"{words}, in other orders {allowed.equals_rel_l2:.3g}"


def _share(off: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """off / allowed; 0 where nothing is off, infinity where something is and nothing is allowed."""
    return torch.where(off == 0, 0.0, off / allowed)


def _quotient(value: float, limit: float) -> float:
    return value / limit if limit > 0 else (0.0 if value == 0 else math.inf)


def _worst(value, truth, torchs, share) -> str:
    """The element furthest beyond its allowance, with what each side has there."""
    at = torch.unravel_index(share.argmax(), share.shape)
    index = [int(i) for i in at]
    words = f"the worst, {index}, is {float(value[at]):.9g}, truth {float(truth[at]):.9g}"
    return f"{words}, PyTorch {float(torchs[0][at]):.9g}" if torchs else words


def _pattern(value: torch.Tensor, truth: torch.Tensor, wrong: torch.Tensor) -> str:
    """What the wrong elements have in common, in words; "" if nothing that is looked for."""
    if value.numel() > 1 and not bool(value.any()):
        return "all are 0"
    off = value - truth
    common = factor(value, truth)
    if float((value - common * truth).norm()) < 0.5 * float(off.norm()) and value.numel() > 1:
        return f"all are about {common:.5g} times the truth"
    if not bool(wrong.any()):
        return ""
    if bool((value[wrong] == 0).all()):
        return "all that are wrong are 0"
    places = wrong.nonzero()
    for dim in range(wrong.dim()):
        where = places[:, dim].unique()
        if len(where) == 1 and wrong.shape[dim] > 1 and len(places) > 1:
            last = " (the last)" if int(where) == wrong.shape[dim] - 1 else ""
            place = f"index {int(where)}{last} in dimension {dim} of {list(wrong.shape)}"
            return f"all that are wrong have {place}"
    return ""


def _within(rule: Rule, value: torch.Tensor, target: torch.Tensor) -> str:
    complaint = _kind_complaint(value, target)
    if complaint:
        return complaint
    finite = target.isfinite()
    mine = _errors(value.double()[finite], target[finite])
    limits = {"rel_l2": rule.rel_l2, "max_abs": rule.max_abs}
    over = {key: limit for key, limit in limits.items() if limit is not None and not mine[key] <= limit}
    words = [f"{key} {mine[key]:.3g} exceeds {limit:.3g}" for key, limit in over.items()]
    pattern = _pattern(value.double(), target, torch.zeros_like(target, dtype=torch.bool)) if over else ""
    return "; ".join([*words, pattern] if pattern else words)


def _amid(name: str, value, reference, other, other_name: str) -> str:
    """The distances, from one side, of an answer and of another whose distance is noise."""
    if other is None:
        return f"not judged: there is no {name} of {other_name} to say how much is noise"
    mine, noise = ((x.double() - reference.double()).abs() for x in (value, other))
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
            counts, first = (int(mine.sum()), int(theirs.sum())), wrong.nonzero()[0].tolist()
            return "{} at {} elements, expected at {} (first difference at {})".format(name, *counts, first)
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
    return {"max_abs": _max(difference.abs()), "rel_l2": relative(difference, truth)}


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
    if not isinstance(outputs, Mapping):
        raise ProtocolError(f"a side returned {type(outputs).__name__}, needs a dict of outputs")
    result = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            result[name] = value.detach()
        elif isinstance(value, str):
            result[name] = value
        elif isinstance(value, (int, float)):
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            result[name] = torch.tensor(value, dtype=dtype)
        else:
            kind = type(value).__name__
            raise ProtocolError(f"output {name} is a {kind}, needs a tensor, number or string")
    return result


def _different(wrong: torch.Tensor, value: torch.Tensor, expected: torch.Tensor) -> str:
    count = int(wrong.sum())
    if not count:
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    first = f"the first, {list(at)}, is {value[at].item()!r}, expected {expected[at].item()!r}"
    return f"{count} of {wrong.numel()} elements differ; {first}"


def _max(values: torch.Tensor) -> float:
    """The largest; 0 of none; NaN if one is NaN."""
    return float(values.max()) if values.numel() else 0.0


def _listed(outputs: Outputs) -> str:
    def dtype(value):
        return "text" if isinstance(value, str) else NAMES.get(value.dtype, str(value.dtype))

    return ", ".join(f"{name} ({dtype(value)})" for name, value in sorted(outputs.items())) or "none"
