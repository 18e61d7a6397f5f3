"""tests/parity_spoil.py [MODULE...]: each side of the quick cases gives wrong answers, and judge() must refuse them.

Each judged case runs once. Then its outputs are spoilt and judged again: C's, PyTorch's, and PyTorch's with the formula
of the equals. A wrong answer of C needs a complaint for each output that is far off; a wrong answer of a PyTorch side,
one that names the side. Prints what passes, and exits with 1 if something does.
"""

import collections
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from parity.core import measure, rank, sweep
from parity.core.allowance import relative
from parity.core.case import is_judged
from parity.core.judge import Judge, judge, rule_of
from parity.core.ranks import Group, missing, runs_ranks
from parity.core.worker import Settings, open_library
from tandem.library import default_library

NOTES = "TANDEM_SPOILT"  # names the file to which the processes write


def rolled(x):
    return x.flatten().roll(x.numel() // 2 + 1).view_as(x)


SPOILS = {
    "zeros": torch.zeros_like,
    "sign": lambda x: -x,
    "stale": rolled,
    "noise": lambda x: x + rolled(x),  # no common factor
    "scale": lambda x: (1.01 * x.double()).to(x.dtype),
}
FAR = 0.6  # relative error from which on any rule must refuse
MOST = 2**18  # numbers of a case; larger ones would take most of the time
MANY = 4096  # numbers of 16 bits in which 1 % must be seen


def number(value):
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def spoilt(outputs, spoil):
    return {
        name: SPOILS[spoil](number(value)) if is_number(value) else value for name, value in outputs.items()
    }


def is_number(value):
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())


def must(name, value, right, judged, mine):
    """Whether a wrong answer must be refused. In 16 bits a factor shows only if the right answer is just rounded."""
    rule, exact = rule_of(name, judged.rules), judged.truth.get(name)
    if not is_number(value) or exact is None or not (mine or rule.kind == "parity"):
        return False
    value, exact = number(value), exact.double()
    if not exact.isfinite().all() or not exact.any():
        return False
    off, least = (relative(x.double() - exact, exact) for x in (value, number(right)))
    u = torch.finfo(value.dtype).eps / 2
    rounding = relative(exact.to(value.dtype).double() - exact, exact)
    seen = value.dtype.itemsize >= 4 or (value.numel() >= MANY and least < 1.25 * rounding)
    return off > FAR or (rule.kind == "parity" and seen and off > 0.009 and least < 1e-3 + u)


def spoiling(module, case):
    """judge(), which also judges each side of the case spoilt, and writes what passes."""
    seen = []

    def judging(sides, truth, *how):
        found = judge(sides, truth, *how)
        numbers = sum(number(x).numel() for x in truth.values() if is_number(x))
        if not seen and numbers <= MOST and not any(verdict.complaints for verdict in found.values()):
            seen.append(1)
            with open(os.environ[NOTES], "a") as notes:
                for *line, names, count in passing(sides, truth, *how):
                    line = [module, case.name if names else "", *line, names, count]
                    notes.write(json.dumps(line) + "\n")
        return found

    return judging


def passing(sides, truth, rules, reference, eps, equals=(), longest=1):
    """(side, what was done to it, outputs that pass, how many were judged). All sides of PyTorch are spoilt at once,
    because each is judged by the equals alone; then the formula of the equals is spoilt as well."""
    how = truth, rules, reference, eps
    right = Judge(sides, *how, equals, longest)
    for spoil in SPOILS:
        wrong, theirs = {impl: spoilt(outputs, spoil) for impl, outputs in sides.items()}, dict(sides)
        names = {
            impl: [n for n, v in outputs.items() if must(n, v, sides[impl][n], right, is_judged(impl))]
            for impl, outputs in wrong.items()
        }
        for impl, outputs in wrong.items():
            if is_judged(impl):
                right.judge(outputs, said := [])
                passed = [n for n in names[impl] if not any(text.startswith(f"{n}: ") for text in said)]
                yield impl, spoil, passed, len(names[impl])
            else:
                theirs[impl] = outputs
        for what, orders in {"": equals, " formula": [spoilt(equal, spoil) for equal in equals]}.items():
            refused = {side or reference for side, _ in Judge(theirs, *how, orders, longest).refused}
            for impl in [impl for impl in names if not is_judged(impl)] if not what else [reference]:
                if names.get(impl):
                    yield impl, spoil + what, [] if impl in refused else names[impl], 1


def measure_case(module, case, *arguments, **how):
    first = how.get("ranks") is None or how["ranks"].rank == 0
    measure.judge = spoiling(module.__name__, case) if first else judge
    return measure.measure_case(module, case, *arguments, **how)


def run(modules, pattern="", most=None):
    """(what passes, how many wrong answers were judged by module) of the quick cases."""
    library = default_library()
    settings = Settings(library, torch.get_num_threads(), 0.1)
    groups, counts, passed = {}, collections.Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        os.environ[NOTES] = str(notes)
        opened = open_library(settings)
        items = sweep.select(sweep.discover("parity"), "quick", modules, pattern, ["error"])
        for item in items[:most]:
            module = sys.modules[item.path]
            if runs_ranks(module, item.case):
                if not missing(item.case, "cpu"):
                    ranks = item.case.ranks
                    groups.setdefault(ranks, None)
                    groups[ranks] = groups[ranks] or Group(ranks, settings, "parity_spoil")
                    groups[ranks].run(item.path, item.case)
            else:
                measure_case(module, item.case, opened, budget=0.1)
        for group in groups.values():
            group.close()
        for line in notes.read_text().splitlines():
            *what, names, judged = json.loads(line)
            counts[what[0]] += judged
            passed += [(*what, names)] if names else []
    return passed, counts


def main(modules):
    passed, counts = run(modules)
    for module, case, impl, spoil, names in passed:
        print(f"passes: {module.rpartition('.')[2]}/{case} {impl} {spoil}: {', '.join(names[:5])}")
    print(", ".join(f"{name.rpartition('.')[2]} {count}" for name, count in counts.items()))
    print(f"{sum(counts.values())} wrong answers, {len(passed)} times some passed")
    return 1 if passed else 0


if __name__ == "__main__":
    if sys.argv[1:] and Path(sys.argv[1]).is_dir():  # a rank, started by Group
        rank.measure_case = measure_case
        rank.main(Path(sys.argv[1]))
    else:
        sys.exit(main(sys.argv[1:]))
