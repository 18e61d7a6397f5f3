"""tests/parity_spoil.py [MODULE...]: each side of the quick cases gives wrong answers, and judge() must refuse them.

All modules take about five minutes of two cores. Each judged case runs once. Then all outputs of one side at a time are
spoilt, and judged again. A wrong answer of C needs a complaint for each output that is far off; a wrong answer of a
PyTorch side, one that names the side. Prints what passes, and exits with 1 if something does.
"""

import collections
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from parity.core import measure, rank, sweep
from parity.core.case import is_judged
from parity.core.judge import judge, rule_of
from parity.core.ranks import Group, missing, runs_ranks
from parity.core.worker import Settings, open_library
from tandem.library import default_library

NOTES = "TANDEM_SPOILT"  # names the file to which the processes write
SPOILS = {
    "zeros": torch.zeros_like,
    "sign": lambda x: -x,
    "stale": lambda x: x.flatten().roll(x.numel() // 2 + 1).view_as(x),
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


def must(name, value, right, truth, rules, mine):
    """Whether a wrong answer must be refused. In 16 bits a factor shows only if the right answer is just rounded."""
    value, rule = number(value), rule_of(name, rules)
    exact = truth.get(name)
    if exact is None or not (mine or rule.kind == "parity"):
        return False
    exact = number(exact).double()
    if not exact.isfinite().all() or not exact.any():
        return False
    off, least = (float((x.double() - exact).norm() / exact.norm()) for x in (value, number(right)))
    u = torch.finfo(value.dtype).eps / 2
    rounding = float((exact.to(value.dtype).double() - exact).norm() / exact.norm())
    seen = value.dtype.itemsize >= 4 or (value.numel() >= MANY and least < 1.25 * rounding)
    return off > FAR or (rule.kind == "parity" and seen and off > 0.009 and least < 1e-3 + u)


def spoiling(module, case):
    """judge(), which also judges each side of the case spoilt, and writes what passes."""
    seen = []

    def judging(sides, truth, rules, reference, eps, equals=(), longest=1):
        how = (rules, reference, eps)
        found = judge(sides, truth, *how, equals, longest)
        numbers = sum(number(x).numel() for x in truth.values() if is_number(x))
        if seen or numbers > MOST or any(verdict.complaints for verdict in found.values()):
            return found
        seen.append(1)
        for impl, spoil in ((impl, spoil) for impl in sides for spoil in SPOILS):
            mine, wrong = is_judged(impl), spoilt(sides[impl], spoil)
            names = [
                n for n, v in wrong.items() if is_number(v) and must(n, v, sides[impl][n], truth, rules, mine)
            ]
            for others in (
                [equals] if mine or impl != reference else [equals, [spoilt(e, spoil) for e in equals]]
            ):
                if not names:
                    continue
                said = judge(sides | {impl: wrong}, truth, *how, others, longest)[impl].complaints
                passed = [name for name in names if not any(text.startswith(f"{name}: ") for text in said)]
                if passed and (mine or not said):
                    line = [module, case.name, impl, spoil, "formula" if others is not equals else "", passed]
                else:
                    line = [module, "", impl, spoil, "", []]
                with open(os.environ[NOTES], "a") as notes:
                    notes.write(json.dumps([*line, 1 if not mine else len(names)]) + "\n")
        return found

    return judging


def measure_case(module, case, *arguments, **how):
    measure.judge = spoiling(module.__name__, case)
    return measure.measure_case(module, case, *arguments, **how)


def run(modules, pattern="", most=None):
    """(what passes, how many wrong answers were judged by module) of the quick cases."""
    library = Path(os.environ.get("TANDEM_LIBRARY") or default_library())
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
    for module, case, impl, spoil, formula, names in passed:
        print(f"passes: {module.rpartition('.')[2]}/{case} {impl} {spoil} {formula}: {', '.join(names[:5])}")
    print(", ".join(f"{name.rpartition('.')[2]} {count}" for name, count in counts.items()))
    print(f"{sum(counts.values())} wrong answers, {len(passed)} times some passed")
    return 1 if passed else 0


if __name__ == "__main__":
    if sys.argv[1:] and Path(sys.argv[1]).is_dir():  # a rank, started by Group
        rank.measure_case = measure_case
        rank.main(Path(sys.argv[1]))
    else:
        sys.exit(main(sys.argv[1:]))
