"""Libraries, drivers and records that cheat. Each row names the status and the field by which the checker must refuse
it."""

import contextlib
import io
import json
import math
import re
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from pathlib import Path
from unittest import mock

import parity_double
import parity_spoil
import torch
from rich.console import Console

from parity import flash
from parity.core import command, ranks, report, sweep, verdict, writeup
from parity.core.case import Case, Side
from parity.core.comparison import Comparison, Rates
from parity.core.device import Cpu
from parity.core.measure import measure_case
from parity.core.record import Loaded
from parity.core.schema import SchemaError, check
from parity.core.view import Records
from parity.core.worker import Settings
from parity.shared import pages
from tandem.library import Library

torch.set_num_threads(1)  # the tensors are small
N, RANKS = 64, 2


class Streams(Cpu):
    """A CPU with a second stream. Its work runs at the next wait for the whole device."""

    def __init__(self):
        self.queued = []

    def synchronize(self):
        while self.queued:
            self.queued.pop()()


# ---- run(x, y, device) returns the sides of a case, y = 0.5 x ----


def sides(tandem, x, **more):
    found = {"c": tandem, "torch_eager": lambda: {"y": 0.5 * x}, "truth": lambda: {"y": 0.5 * x.double()}}
    return found | more


def honest(x, y, device):
    def tandem():
        torch.mul(x, 0.5, out=y)
        return {"y": y}

    return sides(tandem, x)


def only_the_first_launch(x, y, device):
    launches = []

    def tandem():
        if not launches:
            torch.mul(x, 0.5, out=y)
        launches.append(1)
        return {"y": y}

    return sides(tandem, x)


def only_later_launches(x, y, device):
    launches = []

    def tandem():
        torch.mul(x, 0.5 if launches else 0.25, out=y)
        launches.append(1)
        return {"y": y}

    return sides(tandem, x)


def nobody_waits(x, y, device):
    def tandem():
        device.queued.append(lambda: torch.mul(x, 0.5, out=y))
        return {"y": y}

    return sides(tandem, x)


def inputs_in_another_order(x, y, device):
    def tandem():
        x.copy_(x.flip(0))
        torch.mul(x, 0.5, out=y)
        return {"y": y}

    return sides(tandem, x)


def inputs_changed_and_changed_back(x, y, device):
    def tandem():
        torch.mul(x.abs(), 0.5, out=y)
        x.neg_()
        return {"y": y}

    more = {"torch_eager": lambda: {"y": 0.5 * x.abs()}, "truth": lambda: {"y": 0.5 * x.double().abs()}}
    return sides(tandem, x, **more)


def norm_off_by_the_root_of_ranks(x, y, device):
    more = {"torch_eager": lambda: {"y": float(x.norm())}, "truth": lambda: {"y": float(x.double().norm())}}
    return sides(lambda: {"y": float(x.norm()) * math.sqrt(RANKS)}, x, **more)


def no_side_of_c(x, y, device):
    found = honest(x, y, device)
    found["torch_c"] = found.pop("c")
    return found


def no_outputs(x, y, device):
    return sides(dict, x, torch_eager=dict, truth=dict)


def c_judged_by_itself(x, y, device):
    return sides(lambda: {"y": 0.25 * x}, x, reference="c")


def a_record_of_its_own(x, y, device):
    found = honest(x, y, device)
    return found | {"c": Side(lambda: {"y": 0.25 * x}, record={"status": "ok"})}


def another_torch_side_widens_the_limit(x, y, device):
    return sides(lambda: {"y": 0 * x}, x, torch_library=lambda: {"y": 0 * x})


def a_wrong_reference(x, y, device):
    return sides(lambda: {"y": 0.7 * x}, x, torch_eager=lambda: {"y": 0.75 * x})


# ---- sides that cheat while they are timed, from the third call on ----


def halve(x, y):
    torch.mul(x, 0.5, out=y)


def later(x, y):
    threading.Timer(0.05, lambda: halve(x, y)).start()


def from_the_third_call(act):
    def cheat(x, y, device):
        calls = []

        def tandem():
            calls.append(1)
            (halve if len(calls) < 3 else act)(x, y)
            return {"y": y}

        return sides(tandem, x)

    cheat.__name__ = f"{act.__name__}_from_the_third_call"
    return cheat


def nothing(x, y):
    pass


def wrong(x, y):
    torch.mul(x, 0.25, out=y)


def less(x, y):
    torch.mul(x, 0.49995, out=y)


def nothing_of_inputs_that_stay(x, y, device):
    """The truth is a tensor, so inputs cannot change between the calls: the answer of before would be right."""
    return from_the_third_call(nothing)(x, y, device) | {"truth": {"y": 0.5 * x.double()}}


def kept_by_address(x, y, device):
    kept = {}

    def tandem():
        if x.data_ptr() not in kept:
            kept[x.data_ptr()] = 0.5 * x
        return {"y": y.copy_(kept[x.data_ptr()])}

    return sides(tandem, x)


def its_own_memory(x, y, device):
    mine, done = torch.empty_like(x), []

    def tandem():
        if not done:
            done.append(halve(x, mine))
        return {"y": mine}

    return sides(tandem, x)


def never_judged(x, y, device):
    """Its case has no truth."""
    return {"c": lambda: {"y": y.zero_()}, "torch_eager": lambda: {"y": 0.5 * x}}


def nothing_to_judge(x, y, device):
    return {"c": dict, "torch_eager": dict}


def steps(act):
    """Training steps hand out no answer while they are timed. C's third does `act`. Both sides work on y."""

    def cheat(x, y, device):
        calls, first = [], x.clone()

        def tandem():
            calls.append(1)
            y.add_(x if len(calls) < 3 else act(x, first))

        def eager():
            y.add_(x)

        def side(call):
            return Side(call, renew=y.zero_, answer=lambda: {"y": y.clone()})

        return {"c": side(tandem), "torch_eager": side(eager)}

    cheat.__name__ = f"steps_{act.__name__}"
    return cheat


def right(x, first):
    return x


def left_out(x, first):
    return 0.0


def twice(x, first):
    return 2 * x


def of_kept_inputs(x, first):
    return first


TIMED = (
    (honest, "error time", "ok", ""),
    (honest, "time", "ok", ""),
    *((from_the_third_call(act), "error time", "failed", "y") for act in (nothing, wrong, later, less)),
    *((cheat, "error time", "failed", "y") for cheat in (kept_by_address, its_own_memory)),
    (nothing_of_inputs_that_stay, "error time", "failed", "y"),
    (never_judged, "time", "failed", "y"),
    (nothing_to_judge, "time", "ok", "judged"),
    (steps(right), "time", "ok", ""),
    *((steps(act), "time", "failed", "y") for act in (left_out, twice, of_kept_inputs)),
)
SIDES = (
    (honest, "ok", ""),
    (only_the_first_launch, "failed", "y"),
    (only_later_launches, "failed", "y"),
    (nobody_waits, "failed", "y"),
    (inputs_in_another_order, "failed", "x"),
    (inputs_changed_and_changed_back, "failed", "x"),
    (norm_off_by_the_root_of_ranks, "failed", "y"),
    (no_side_of_c, "error", "C"),
    (no_outputs, "failed", "outputs"),
    (c_judged_by_itself, "error", "reference"),
    (a_record_of_its_own, "error", "status"),
    (another_torch_side_widens_the_limit, "failed", "y"),
    (a_wrong_reference, "ok", "judged"),
)
# PyTorch's sides that are named as wrong.
WRONG = {another_torch_side_widens_the_limit: {"torch_library"}, a_wrong_reference: {"torch_eager"}}


class Sides(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.library = Library(parity_double.build(folder))

    def test_each_is_refused(self):
        judged = ((cheat, "error", *expected) for cheat, *expected in SIDES)
        for cheat, measure, status, field in (*judged, *TIMED):
            with self.subTest(cheat.__name__, measure=measure):
                device = Streams()

                def run(case, draw, c, cheat=cheat, device=device):
                    return cheat(draw.normal("x", (N,), "f32"), draw.poisoned((N,), "f32"), device)

                module = types.SimpleNamespace(__name__="parity.zoo", run=run)
                case = Case("zoo", dtype="f32", measure=measure, repeats=5)
                records = measure_case(module, case, self.library, budget=0.01, device=device)
                found = next((r for r in records if r["impl"] == "c"), {"status": "no record"})
                wrong = {r["impl"] for r in records if r["status"] == "failed"} - {"c"}
                self.assertEqual(wrong, WRONG.get(cheat, set()))
                self.assertEqual(found["status"], status, found.get("message"))
                self.assertIn(field, ["", *re.findall(r"\w+", found.get("message", ""))])
                if (measure, status, field) == ("time", "ok", ""):
                    self.assertEqual(found["timed"], "judged")


class Spoilt(unittest.TestCase):
    """A sample of what tests/parity_spoil.py does with all modules."""

    def test_no_wrong_answer_of_any_side_passes(self):
        for module, cases in (
            ("ops", "op=(gemm|softmax_forward),.*(rows=37|m=33|m=128,)"),
            ("attention", "seq=37.*causal=true,dtype=(f32|bf16)"),
        ):
            passed, counts = parity_spoil.run([module], cases)
            self.assertEqual(passed, [])
            self.assertGreater(counts[f"parity.{module}"], 30)


# ---- records ----

MS = {"median": 2.0, "mean": 2.0, "std": 0.1, "min": 1.9, "max": 2.1, "p95": 2.09, "n": 3}
US = {name: value if name == "n" else 1e3 * value for name, value in MS.items()}
RECORD = dict(deliverable="d", module="m", case={}, impl="c", status="ok", ms=MS, samples=[1.9, 2.0, 2.1])
GPU = {"machine": "NVIDIA H100 80GB HBM3", "device": "cuda", "case": {"dtype": "bf16"}}

STEP = dict(vocab=10_000, d_model=2560, d_ff=10_240, layers=32, batch=2, context=512, ranks=2)
STEP |= dict(dtype="bf16_mixed", optimizer="adamw")

FIELDS = (
    ({}, ""),
    ({"ms": US}, "ms.median"),
    ({"samples": [1900.0, 2000.0, 2100.0]}, "ms.median"),
    ({"ms": MS | {"max": 2.1e-3}}, "ms.median"),
    *(
        ({"ms": MS | {key: value}}, f"ms.{key}")
        for key, value in (("mean", 2.05), ("min", 1.8), ("max", 2.2))
    ),
    ({"ms": MS | {"p95": 2.05}}, "ms.p95"),
    *(({"samples": None, "ms": MS | {key: 9.0}}, f"ms.{key}") for key in ("mean", "std", "p95")),
    ({"ms": MS | {"std": 1e-4}}, "ms.std"),
    ({"samples": None, "ms": dict.fromkeys(MS, 1e-9) | {"std": 0.0, "n": 3}}, "ms.min"),
    ({"phases": {"forward": MS | {"mean": 2000.0}}}, "forward.mean"),
    ({"peak_mib": -1.0}, "peak_mib"),
    ({"peak_mib": 1.0, "case": dict(vocab=10_000, d_model=2560, d_ff=10_240, layers=32)}, "peak_mib"),
    *((GPU | {key: value}, key) for key, value in (("tflops", 990.0), ("gb_s", 3353.0), ("peak_mib", 1e9))),
    (GPU | {"tflops": 989.0, "gb_s": 3300.0, "peak_mib": 8e4}, ""),
    ({"samples": None, "device": "cuda", "ms": dict.fromkeys(MS, 5e-4) | {"std": 0.0, "n": 3}}, "ms.min"),
    (GPU | {"case": STEP}, "ms.median"),
    (GPU | {"case": STEP | {"context": 8}}, ""),
    ({"samples": [2.0]}, "ms.n"),
    ({"ratio": {"over": "c", "median": 1.0}}, "ratio.over"),
    ({"status": "error", "message": "died", "ratio": {"over": "torch_eager", "median": 1.0}}, "ratio"),
    ({"status": "failed"}, "message"),
    ({"status": "error", "message": " "}, "message"),
)


class Fields(unittest.TestCase):
    def test_each_is_refused(self):
        for cheat, field in FIELDS:
            with self.subTest(json.dumps(cheat)):
                found = ""
                try:
                    check({key: value for key, value in (RECORD | cheat).items() if value is not None})
                except SchemaError as error:
                    found = str(error).split()[0]
                self.assertEqual(found, field)

    def test_a_wrong_answer_has_no_speed(self):
        eager = RECORD | {"impl": "torch_eager"}
        for status, count in (("ok", 1), ("failed", 0)):
            c = RECORD | {"status": status, "message": "y", "ratio": {"over": "torch_eager", "median": 0.1}}
            row = verdict.Row()
            verdict._add_times(row, sweep.Item("m", "m", Case("d")), [c, eager])
            self.assertEqual((len(row.eager), len(row.fastest)), (count, count))
            self.assertEqual(len(Records([c, eager]).ratio("ms")), count)
            self.assertEqual(Comparison.of(c, eager) is not None, bool(count))


# ---- records of one run, and rates ----

FASTER = {key: value / 1000 if key != "n" else value for key, value in MS.items()}
EAGER = {"impl": "torch_eager", "tflops": 603.0}
PAIRS = (
    ({"tflops": 603.0}, ""),
    ({"ms": FASTER, "samples": None, "tflops": 603.0}, "tflops"),
    (GPU | {"ms": FASTER, "samples": None}, "ms.median"),
    ({"ratio": {"over": "torch_eager", "median": 1.0}}, ""),
    ({"ratio": {"over": "torch_eager", "median": 0.5}}, "ratio.median"),
)


class Together(unittest.TestCase):
    def test_sides_that_contradict_each_other_are_left_out(self):
        for cheat, field in PAIRS:
            with self.subTest(json.dumps(cheat)):
                place = {key: cheat[key] for key in GPU if key in cheat}
                found = Loaded([RECORD | cheat, RECORD | EAGER | place])
                found.records = [{k: v for k, v in r.items() if v is not None} for r in found.records]
                found.leave_out_contradictions(Path("file"))
                self.assertEqual(len(found.records), 0 if field else 2)
                self.assertIn(f": {field}", "".join(found.warnings) or ": ")

    def test_a_rate_is_right_and_quiet(self):
        gemm = RECORD | {"case": {"op": "gemm", "dtype": "bf16"}, "tflops": 500.0}
        for cheat in ({"status": "failed"}, {"ms": MS | {"std": 1.0}}):
            rates = Rates.of([gemm, gemm | {"tflops": 900.0} | cheat])
            self.assertEqual(rates.share(gemm), "100 %")
        self.assertEqual(rates.share(gemm | {"tflops": 505.0}), "101 % (more than possible)")

    def test_the_bound_of_a_card_is_its_data_sheet_s(self):
        rates, record = Rates({"bf16": 500.0}, 2500.0), RECORD | GPU
        self.assertEqual(rates.share(record | {"tflops": 494.7}), "50 %")
        # 2600 of 3352 GB/s, above the copy that was measured.
        self.assertEqual(rates.share(record, 5.2e9), "78 %")
        self.assertEqual(rates.share(record, 6.8e9), "101 % (more than possible)")


# ---- what pages say of records ----

ELSEWHERE = dict(machine="B200", versions={"torch": "1.0.0"})


def result(impl="c", **more):
    return RECORD | dict(impl=impl, time="2026-11-27T10:00:00Z", machine="H100", sides=2) | more


class Sentences(unittest.TestCase):
    def test_a_nan_is_an_infinite_error(self):
        right, wrong = dict(max_abs=1e-7, rel_l2=1e-7, used=0.1), dict(max_abs=None, rel_l2=None, used=None)
        zero_truth = dict(max_abs=0.0, rel_l2=None, used=0.1)
        for error, rel_l2, used in ((right, 1e-7, 0.1), (wrong, math.inf, math.inf), (zero_truth, 0.0, 0.1)):
            records = Records([result(case={"dtype": "f32"}, error=error)])
            (row,) = pages.errors_by(records, ["dtype"])
            self.assertEqual((row["relative error, c"], pages.held(records)["used"]), (rel_l2, used))

    def test_a_time_without_a_verdict_is_marked(self):
        for message, words in (("not judged: no answer", "c (not judged)"), ("", None)):
            (row,) = pages.tabled([result(message=message)], (), lambda record: {})
            self.assertEqual(row.get("noisy"), words)

    def test_every_length_needs_a_clean_comparison(self):
        wide, slow = MS | {"std": 1.0}, MS | dict.fromkeys(("median", "mean", "min", "max"), 9.0)
        for theirs, words in ((MS, None), (wide, None), (slow, "every length")):
            sides = {"c": result(), "torch_eager": result("torch_eager", ms=theirs)}
            found = Comparison.of(*sides.values())
            page = types.SimpleNamespace(note=mock.Mock(), table=mock.Mock(), say=mock.Mock())
            flash.say_grid(page, {("f32", 64, 512, "both"): dict(eager=found, fused=None)}, (), "f32")
            self.assertEqual(page.say.call_args.kwargs["where"], words)

    def test_sides_of_different_runs_are_not_compared(self):
        for cheat in ({"time": "2026-11-27T09:00:00Z"}, *({key: value} for key, value in ELSEWHERE.items())):
            with self.subTest(json.dumps(cheat)):
                stale, c = result("torch_eager", **cheat), result()
                self.assertEqual(Loaded([stale, c]).newest(), [c])
                if "time" not in cheat:
                    self.assertIsNone(Comparison.of(c, stale))
                    self.assertEqual(len(Records([c, stale]).ratio("ms")), 0)

    def test_a_page_is_of_one_card(self):
        old = [result(device="cuda", deliverable=str(i)) for i in range(2)]
        new = result(device="cuda", machine="H200", time="2026-11-28T10:00:00Z")
        self.assertEqual(report.of_module([*old, new], "m"), [new])

    def test_every_commit_is_named(self):
        builds = [dict(commit=f"{i:040x}", dirty=not i) for i in range(0, 9 << 150, 1 << 150)]
        words = writeup.builds_of([result(build=build) for build in builds])
        self.assertEqual(words.count(","), len(builds) - 1)
        self.assertEqual(words.count(" with changes"), 1)


# ---- runs ----

UNSUPPORTED = {"impl": "c", "status": "unsupported", "message": "no"}
RUNS = (
    ([{"impl": "c", "status": "ok"}], 0, 1),
    ([UNSUPPORTED], 1, 0),
    ([UNSUPPORTED, {"impl": "torch_eager", "status": "ok"}], 1, 0),
    ([{"impl": "c", "status": "ok", "message": "not judged: torch_eager is oom"}], 0, 0),
    ([{"impl": "torch_eager", "status": "ok"}], 1, 0),
    ([], 1, 0),
    ([{"impl": "c", "status": "ok"}, {"impl": "torch_eager", "status": "error", "message": "no"}], 1, 0),
)


class Runs(unittest.TestCase):
    def test_no_case_run(self):
        for records, status, hold in RUNS:
            with self.subTest(records=records):
                worker = types.SimpleNamespace(
                    surroundings={"machine": "M", "build": {"library": "1"}},
                    settings=Settings(Path(), 2, 1.0),
                    run=lambda path, case, records=records: records,
                )
                file = types.SimpleNamespace(
                    loaded=types.SimpleNamespace(records=[]), append=lambda records: None
                )
                items = [sweep.Item("m", "m", Case("d"))]
                options = command._parser().parse_args(["run"])
                out = io.StringIO()
                with mock.patch.object(sweep, "Worker", return_value=contextlib.nullcontext(worker)):
                    console = Console(file=out, width=200, markup=False)
                    found = sweep.run_sweep(items, file, worker.settings, console, options)
                self.assertEqual(found, status)
                whole = [{"deliverable": "d", "module": "m", "case": {}} | record for record in records]
                bad = verdict.say(items, whole, console)
                self.assertEqual(bad, sum(record["status"] == "error" for record in records))
                self.assertEqual(re.search(r"^all +(\d) of 1", out.getvalue(), re.MULTILINE)[1], str(hold))


# ---- ranks ----

# A process that connects as each rank in its arguments, one after the other.
POSING = """
import sys
from multiprocessing.connection import Client
pipes = []
for rank in map(int, {ranks!r}):
    pipes.append(Client(sys.argv[1] + "/parent", "AF_UNIX"))
    pipes[-1].send(rank)
for pipe in pipes:
    pipe.recv()
for pipe in pipes:
    pipe.send("")
try:
    pipes[0].recv()
except EOFError:
    pass
"""


class Posing(unittest.TestCase):
    def test_each_is_refused(self):
        for posing, rank in (("01", 1), ("00", 0), ("07", 7)):
            with self.subTest(posing), tempfile.TemporaryDirectory() as folder:
                script = Path(folder) / "posing.py"
                script.write_text(POSING.format(ranks=posing))
                started = []

                def launch(group, command, environment, script=script, started=started):
                    if not started:
                        process = subprocess.Popen(
                            [sys.executable, str(script), command[-1]],
                            stdin=subprocess.DEVNULL,
                            start_new_session=True,
                        )
                        started.append(process)
                        group._processes.append(process)

                with (
                    mock.patch.object(ranks.Group, "_launch", launch),
                    mock.patch.object(ranks, "START_S", 5.0),
                    self.assertRaises(ranks.GroupError) as refused,
                ):
                    ranks.Group(RANKS, Settings(Path(), 1, 0.01)).close()
                self.assertTrue(str(refused.exception).startswith(f"rank {rank} "), refused.exception)


if __name__ == "__main__":
    unittest.main()
