"""Whole sweeps over working and failing modules: records, restarts, crashes."""

import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
import unittest.mock
from pathlib import Path

import parity_double
import torch
from rich.console import Console

import parity
from parity.core import sweep, worker
from parity.core.case import Case
from parity.core.command import main
from parity.core.identity import host
from parity.core.record import FILE, load, machine_name
from parity.core.sweep import SelectionError, select

ROOT = Path(__file__).resolve().parents[1]


class Sweeps(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.library = parity_double.build(cls.folder)
        cls.another = parity_double.build(cls.folder, 'FAKE_ID="2"')  # its source of scale has another id
        cls.log = cls.folder / "runs"
        # Set once, because workers see the environment at the start of the first worker.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        os.environ["FAKES_LOG"] = str(cls.log)

    def setUp(self):
        self.reports = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.records = self.reports / "local" / FILE
        self.log.write_text("")

    def arguments(self, command, *more):
        return [command, "--reports", str(self.reports), *more]

    def main(self, command, *more):
        """Runs a command in this process. Returns exit status, stdout and stderr."""
        if command in ("run", "list") and "--library" not in more:
            more = ("--library", str(self.library), *more)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main("parity_double.fakes", self.arguments(command, *more))
        return status, out.getvalue(), err.getvalue()

    def process(self, *more):
        """Starts the command as a process that can be killed. Each case takes half a second."""
        arguments = self.arguments("run", "--library", str(self.library), *more)
        code = (
            "import sys, parity_double; from parity.core.command import main; "
            f"sys.exit(main('parity_double.fakes', {arguments!r}))"
        )
        slow = os.environ | {"FAKES_SLEEP": "0.5"}
        return subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, cwd=self.folder, env=slow
        )

    def runs(self):
        return self.log.read_text().splitlines()

    def test_records_hold_what_was_measured(self):
        status, out, _ = self.main("run", "--module", "scale", "--profile", "full", "--verbose")
        self.assertEqual(status, 0, out)
        self.assertIn("profile full: 6 cases\nto run: 6 cases, about", out)
        self.assertIn("[6/6] scale/scaling/count=1009,dtype=f32: c ok rel_l2", out)
        self.assertIn("12 ok", out)
        records = [json.loads(line) for line in self.records.read_text().splitlines()]
        self.assertEqual(len(records), 12)
        first, timed = records[0], records[8]
        self.assertEqual(
            [*first][:5] + [*first][-3:],
            ["deliverable", "module", "case", "impl", "status", "build", "versions", "time"],
        )
        self.assertEqual((first["module"], first["case"]), ("scale", {"count": 1, "dtype": "f32"}))
        self.assertEqual((first["impl"], first["status"], first["error"]["truth"]), ("c", "ok", "float64"))
        self.assertEqual((first["threads"], first["measure"], first["sides"]), (2, "error", 2))
        build = first["build"]
        self.assertEqual(
            (build.pop("version"), build.pop("commit"), build.pop("dirty")), ("0.0.1", "0123456789", True)
        )
        self.assertEqual((build.pop("library"), [*build]), ("fake1", ["id"]))
        self.assertRegex(build["id"], "^[0-9a-f]{16}$")
        self.assertEqual((first["versions"]["cc"], first["host"]), ("FAKE 1.0", host()))
        self.assertEqual(first["machine"], machine_name())
        self.assertEqual([r.get("config") for r in records[:2]], [None, {"compiled": False}])
        self.assertEqual(records[6]["config"], {"unroll": 16})
        self.assertEqual((timed["ms"]["n"], len(timed["samples"])), (5, 5))
        self.assertEqual(timed["peak_mib"], 4096 * 4 / 2**20)
        self.assertEqual(timed["ratio"]["over"], "torch_eager")
        self.assertAlmostEqual(timed["tflops"], 4096 / timed["ms"]["median"] / 1e9)
        self.assertAlmostEqual(records[9]["peak_mib"], 4096 * 4 / 2**20, delta=1e-4)  # PyTorch's only output

        status, out, _ = self.main("run", "--module", "scale", "--profile", "full")
        self.assertEqual((status, len(self.runs())), (0, 6))
        self.assertIn("6 cases are finished; --redo repeats them", out)
        self.assertNotIn("to run", out)
        self.main("run", "--module", "scale", "--case", "count=1,", "--redo")
        self.assertEqual(self.runs()[6:], ["scaling/count=1,dtype=f32"])

        status, out, _ = self.main("report")
        self.assertEqual(status, 0)
        self.assertIn("holds (6 ok)", (self.reports / "local/README.md").read_text())
        self.assertIn("| times |", (self.reports / "local/scale.md").read_text())
        status, out, _ = self.main("list", "--module", "scale", "--profile", "full")
        self.assertEqual(out.count("done"), 6)
        self.assertIn("(6 of them timed in earlier runs)\nto run: 0 cases", out)

    def test_a_side_that_waits_for_the_host_is_timed_in_two_processes(self):
        status, out, _ = self.main("run", "--module", "twice")
        self.assertEqual(status, 0, out)
        c, eager = (json.loads(line) for line in self.records.read_text().splitlines())
        self.assertNotIn("processes", c)
        slow, fast = eager["processes"]
        self.assertGreater(slow, 30)
        self.assertLess(fast, slow)
        self.assertEqual((eager["ms"]["median"], eager["ms"]["n"]), (fast, 2))
        self.assertLess(max(eager["samples"]), slow)
        self.assertIn("peak_mib", eager, "weighed in the first")
        calls = self.runs()
        self.assertEqual(len(set(calls)), 3)
        self.assertEqual((calls.count("c"), len(calls)), (3, 8), "two samples and one to weigh, c's once")
        self.assertIn("1 cases are finished", self.main("run", "--module", "twice")[1])

    def test_results_of_removed_cases_are_left_out(self):
        self.main("run", "--module", "scale", "--profile", "full")
        line = self.records.read_text().splitlines()[0]
        gone = json.loads(line) | {"case": {"count": 3, "dtype": "f32"}, "status": "failed", "message": "y"}
        with self.records.open("a") as file:
            file.write(json.dumps(gone) + "\n")
        status, out, _ = self.main("report")
        self.assertEqual(status, 0)
        self.assertIn("left out: 1 results of deleted cases", out)
        page = (self.reports / "local" / "scale.md").read_text()
        self.assertRegex(
            page, r"1 results of removed cases .* 1 of them failed: scaling/count=3,dtype=f32 of c\."
        )
        self.assertIn("holds (6 ok)", (self.reports / "local/README.md").read_text())

    def test_results_of_removed_cases_are_pruned(self):
        self.main("run", "--module", "scale", "--profile", "full")
        whole = self.records.read_bytes()
        line = json.loads(whole.splitlines()[0])
        gone = [
            line | {"case": {"count": 3, "dtype": "f32"}, "status": status, "message": "y"}
            for status in ("failed", "ok")
        ]
        gone.append(line | {"module": "left", "status": "ok"})
        alike = line | {"case": line["case"] | {"count": str(line["case"]["count"])}}
        added = "".join(json.dumps(record) + "\n" for record in [*gone, alike]).encode()
        self.records.write_bytes(b"no record\n" + whole + added + b"\xff\n")
        before = self.records.read_bytes()
        status, out, err = self.main("prune", "--dry-run")
        self.assertEqual((status, self.records.read_bytes()), (0, before))
        self.assertIn("would drop 4 records (left 1, scale 3)", out)
        status, out, err = self.main("prune")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(self.records.read_bytes(), b"no record\n" + whole + b"\xff\n")
        impl, name = line["impl"], "scale/scaling/count=3,dtype=f32"
        for said in (f"dropped: {name} {impl}: 1 failed\n", f"dropped: {name} {impl}: 1 ok\n"):
            self.assertIn(said, out)
        self.assertIn(f"dropped 4 records (left 1, scale 3); {len(whole.splitlines())} stay\n", out)
        self.assertIn("dropped 0 records; ", self.main("prune")[1])
        self.assertIn("there is no such file", self.main("prune", "--machine", "elsewhere")[2])
        self.assertFalse((self.reports / "elsewhere").exists())

    def test_a_run_stops_in_time_and_goes_on(self):
        status, out, _ = self.main("run", "--module", "scale", "--within", "0")
        self.assertEqual((status, len(self.runs())), (3, 1))
        self.assertIn("4 cases are left: the time is up", out)
        status, out, _ = self.main("run", "--module", "scale", "--within", "600")
        self.assertEqual((status, len(self.runs())), (0, 5))

    def test_a_run_ends_with_its_verdict_and_a_bad_one_with_what_failed(self):
        how = ("run", "--profile", "full", "--report", "--case", "scaling|way=(fine|wrong)")
        status, out, _ = self.main(*how, "--module", "trouble", "--module", "scale")
        self.assertEqual(status, 1)
        lines = out.splitlines()
        self.assertRegex(out, r"scale +6 cases: none failed, \d+ s; about")
        self.assertRegex(out, r"trouble +2 cases: 1 failed, \d+ s\n")
        self.assertRegex(out, r"\[\d/8\] trouble/trouble/way=wrong: .*c failed")
        self.assertNotIn("way=fine", out)
        pages = self.reports / "local/README.md"
        self.assertTrue(pages.is_file())
        table = lines[lines.index(next(line for line in lines if line.startswith("module "))) + 1 :]
        self.assertRegex(table[0], r"^scale +6 of 6 +\d+\.\d\d +\d+\.\d\d$")
        self.assertRegex(table[1], r"^trouble +1 of 2$")
        self.assertRegex(table[2], r"^all +7 of 8 +\d+\.\d\d +\d+\.\d\d$")
        self.assertEqual(table[4], f"tables and pictures: {pages}")
        self.assertTrue(table[5].startswith("failed: trouble/trouble/way=wrong c: y: rel_l2"))
        self.assertEqual(
            table[6:],
            [
                "1 results are bad, from the lowest module up: 1 of trouble. Begin with trouble/trouble/way=wrong"
            ],
        )

    def test_a_terminal_shows_one_line_a_module(self):
        out = io.StringIO()
        with unittest.mock.patch.dict(os.environ, TERM="xterm"):
            console = Console(file=out, force_terminal=True, width=120)
        cases = [Case("d", n=n) for n in (1, 2)]
        items = [sweep.Item(name, name, case) for name in ("ops", "flash") for case in cases]
        expected = {item.name: 60.0 for item in items}
        with sweep._Watch(console, expected, verbose=False) as watch:
            for item in items:
                watch.begin(item)
                watch.end(item, [{"impl": "c", "status": "ok", "ratio": {"median": 0.5}}])
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
        for name in ("ops", "flash"):
            self.assertRegex(plain, rf"{name} +2 cases: none failed, 0 s")
        self.assertIn("flash 2 of 2, about", plain)
        self.assertNotIn("[1/4]", out.getvalue())

    def test_how_long_a_run_takes(self):
        for seconds, words in ((89.4, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")):
            self.assertEqual(sweep.duration(seconds), words)
        items = [
            sweep.Item("m", "m", Case("d", seconds=10, alone=alone, n=i)) for i, alone in enumerate((0, 1))
        ]
        for known, words in (
            (None, "2 cases, about 24 s"),
            (3, "2 cases, about 10 s (2 of them timed in earlier runs)"),
        ):
            finished = types.SimpleNamespace(seconds=lambda *_, known=known: known)
            self.assertEqual(sweep.describe(items, finished), words)
        with unittest.mock.patch.object(sweep.time, "monotonic", lambda: 100.0):
            watch = sweep._Watch(Console(file=io.StringIO()), {"m/a": 10.0, "m/b": 30.0}, verbose=False)
        watch.past, watch.started = 10.0, 80.0
        with unittest.mock.patch.object(sweep.time, "monotonic", lambda: 100.0):
            for watch.done, left in ((2, 30.0), (3, 60.0)):  # few say little
                self.assertEqual(watch._left(), left)

    def test_a_run_may_end_after_a_bad_case(self):
        few = ("run", "--module", "trouble", "--case", "way=(wrong|names|input)")
        status, out, _ = self.main(*few, "--fail-fast")
        self.assertEqual(status, 1)
        self.assertIn("1 ok, 1 failed\n2 cases are left: a case before them is bad", out)
        status, out, _ = self.main(*few)
        self.assertIn("3 failed", out)
        self.assertNotIn("are left", out)

    def test_a_verdict_is_of_the_build_that_it_was_taken_from(self):
        one = ("run", "--module", "scale", "--module", "early", "--measure", "error")
        self.assertEqual(self.main(*one)[0], 0)
        status, out, _ = self.main(*one)
        self.assertIn("6 cases are finished", out)
        self.assertNotIn("another build", out)
        self.log.write_text("")
        status, out, _ = self.main(*one, "--library", str(self.another), "--keep")
        self.assertIn("6 cases are finished", out)
        self.assertEqual((status, self.runs()), (0, []))
        _, out, _ = self.main(
            "list", "--module", "scale", "--measure", "error", "--library", str(self.another)
        )
        self.assertNotIn("done", out)
        _, out, _ = self.main("list", "--module", "scale", "--measure", "error", "--library", "/nowhere.so")
        self.assertNotIn("done", out)

        status, out, _ = self.main(*one, "--library", str(self.another))
        self.assertEqual((status, len(self.runs())), (0, 4), out)
        # Records of early, whose source did not change.
        self.assertIn("2 cases are finished; --redo repeats them", out)
        self.assertIn(
            "4 cases were measured with another build and are measured again; --keep keeps them", out
        )
        self.main(*one, "--case", "count=1,")  # the first library again
        self.main("report")
        page = (self.reports / "local/scale.md").read_text()
        self.assertIn(
            "C was built as fake1 (tandem 0.0.1, commit 0123456789 with changes): 2 results; fake2", page
        )

    def test_another_configuration_is_measured_again(self):
        one = ("run", "--module", "scale", "--case", "count=1[57],")
        self.main(*one)
        records = [json.loads(line) for line in self.records.read_text().splitlines()]
        for record in records:
            if "unroll" in record.get("config", {}):
                record["config"]["unroll"] = 8
        self.records.write_text("".join(json.dumps(record) + "\n" for record in records))
        self.log.write_text("")
        self.main(*one, "--keep")
        self.assertEqual(self.runs(), ["scaling/count=17,dtype=f32"])

    def test_a_folder_of_another_machine_is_refused(self):
        self.records.parent.mkdir()
        one = ("run", "--module", "scale", "--case", "count=1,")
        record = dict(deliverable="d", module="m", case={}, impl="c", status="ok", machine="NVIDIA H100")
        now = dict(machine=machine_name(), host=host())
        theirs = host() | {"model": 1 + host().get("model", 0)}
        for other, words in (
            (record, "holds records of NVIDIA H100; this is "),
            (record | now | {"host": theirs}, f"model {theirs['model']}"),
            (
                record | now | {"host": host() | {"limits": {"ONEDNN_MAX_CPU_ISA": "SSE41"}}},
                "ONEDNN_MAX_CPU_ISA=SSE41",
            ),
        ):
            self.records.write_text(json.dumps(other) + "\n")
            status, _, err = self.main(*one)
            self.assertEqual((status, self.runs()), (2, []))
            self.assertIn(words, err)
            self.assertIn("Name another folder with --machine", err)
            self.assertEqual(load(self.records).records, [other])
        self.assertEqual(self.main(*one, "--any-machine")[0], 0)
        self.assertEqual(len(load(self.records).records), 3)
        self.records.unlink()
        for _ in range(2):
            self.assertEqual(self.main(*one, "--redo")[0], 0)

    def test_the_lower_stage_runs_first(self):
        status, out, _ = self.main("run", "--module", "early")
        self.assertEqual((status, self.runs()), (0, ["run 3", "run 2", "run 4", "run 1"]), out)
        self.log.write_text("")
        self.main("run", "--module", "early", "--redo", "--measure", "error")
        self.assertEqual(self.runs(), ["run 4", "run 1"])

    def test_a_case_is_judged_whenever_it_runs(self):
        for has, asked, expected in (
            (("error", "time"), ["time"], ("error", "time")),
            (("error", "time", "memory"), ["error"], ("error",)),
            (("time", "memory"), ["time"], ("time",)),
            (("error", "time"), ["memory"], ()),
        ):
            case = Case("d", measure=" ".join(has))
            module = types.SimpleNamespace(__name__="m", cases=lambda profile, device, case=case: [case])
            with contextlib.suppress(SelectionError):
                select({"m": module}, "quick", measures=asked)
            self.assertEqual(case.measure, expected)

    def test_only_what_is_asked_for_is_measured(self):
        status, out, _ = self.main("run", "--module", "scale", "--measure", "memory")
        self.assertEqual(status, 0, out)
        records = [json.loads(line) for line in self.records.read_text().splitlines()]
        self.assertEqual([record["measure"] for record in records], ["memory"] * 2)  # one case, two sides
        self.assertNotIn("ms", records[0])
        status, out, _ = self.main("run", "--module", "scale")  # missing results are measured now
        self.assertEqual((status, len(self.runs())), (0, 6))

    def test_the_tensors_of_a_case_are_saved(self):
        folder = self.reports / "tensors"
        how = ("--module", "trouble", "--case", "way=wrong", "--dump", str(folder))
        self.assertEqual(self.main("run", *how)[0], 1)
        (file,) = folder.iterdir()
        self.assertEqual(file.name, "trouble_way=wrong.pt")
        saved = torch.load(file)
        self.assertEqual([*saved], ["case", "inputs", "sides", "truth"])
        off = saved["sides"]["c"]["y"] - saved["truth"]["y"]
        self.assertEqual(int(off.abs().argmax()), 3)
        self.assertTrue(torch.equal(saved["truth"]["y"], saved["inputs"]["x"].double() * 0.5))

    def test_the_lowest_layer_comes_first(self):
        bad = [
            (sweep.Item(name, "", Case("d", i=i)), {})
            for i, name in enumerate(("flash", "new", "ops", "flash"))
        ]
        self.assertEqual(
            sweep.lowest_floor(bad, {"ops": 0, "attention": 1, "flash": 2, "new": 3}.get),
            "4 results are bad, from the lowest module up: 1 of ops, 2 of flash, 1 of new. Begin with ops/d/i=2",
        )

    def test_every_module_has_a_layer(self):
        self.assertEqual(sorted(parity.FLOORS), [*sweep.discover("parity")])
        items = select(sweep.discover("parity"), "quick")
        self.assertEqual([*dict.fromkeys(item.module for item in items)], [*parity.FLOORS])
        self.assertEqual(sweep.places(items)("none of them"), len(parity.FLOORS))

    def test_a_module_of_ranks_counts_them_or_has_them_started(self):
        modules = sweep.discover("parity")
        several = {name for (name, _), keys in sweep.listed(modules).items() if keys.get("ranks", 1) > 1}
        counted = {name for name, module in modules.items() if hasattr(module, "RUNS_RANKS")}
        self.assertEqual((several, counted), ({"accounting", "comm", "ddp", "shard"}, {"accounting"}))

    def test_everything_that_goes_wrong_is_a_result(self):
        status, out, _ = self.main("run", "--module", "trouble")
        self.assertEqual(status, 1)
        self.assertIn("from the lowest module up:", out)
        self.assertIn("1 of 64 elements are off by more than is allowed; the worst, [3], is", out)
        found = {}
        for record in load(self.records).records:
            found.setdefault(record["case"]["way"], {})[record["impl"]] = (
                record["status"],
                record.get("message", ""),
            )
        c = {way: sides["c"] for way, sides in found.items()}
        torch = {way: sides.get("torch_eager") for way, sides in found.items()}
        for way, status, words in (
            ("fine", "ok", ""),
            ("wrong", "failed", "y: rel_l2"),
            ("unwritten", "failed", "2 of 64 elements were never written"),
            ("nan", "failed", "NaN at 1 elements, expected at 0 (first difference at [5])"),
            ("infinite", "failed", "+inf at 1 elements, expected at 0 (first difference at [5])"),
            ("overrun", "failed", "256 bytes was written beyond its bounds"),
            ("input", "failed", "input x was written"),
            ("names", "failed", "outputs are z (f32), expected y (f32)"),
            ("unsupported", "unsupported", "TD_UNSUPPORTED: as asked"),
            ("ranks", "ok", ""),
            ("raises", "error", "the C side is broken"),
            ("run_raises", "error", "run() is broken"),
            ("truth_raises", "error", "the truth is broken"),
            ("c_oom", "oom", "TD_NO_MEMORY"),
            ("crash", "error", "the process died of SIGSEGV"),
            ("torch_oom", "ok", "not judged: torch_eager is oom"),
            ("killed", "ok", "not judged: torch_eager is error"),
            ("predicted", "ok", "not judged: torch_eager is not run"),
        ):
            with self.subTest(way=way):
                self.assertEqual(c[way][0], status, c[way])
                self.assertIn(words, c[way][1])
        for way, status, words in (("torch_oom", "oom", "can't allocate"), ("predicted", "not run", "needs")):
            with self.subTest(way=way):
                self.assertEqual(torch[way][0], status)
                self.assertIn(words, torch[way][1])
        self.assertEqual(torch["crash"][0], "ok")
        self.assertEqual(torch["killed"][0], "error")
        self.assertIn("the process was killed by SIGKILL", torch["killed"][1])
        self.assertIn("error: trouble/trouble/way=crash c: the process died of SIGSEGV", out)

        self.assertEqual(self.main("report")[0], 0)
        page = (self.reports / "local/trouble.md").read_text()
        self.assertIn("| trouble, way unsupported | c | unsupported | TandemError", page)

        # Failed cases run again; cases with another end do not.
        how = ("--module", "trouble", "--case", "way=(wrong|c_oom|fine|killed|ranks)")
        _, out, _ = self.main("run", *how)
        self.assertIn("3 cases are finished", out)
        self.assertIn("[1/2] trouble/trouble/way=wrong", out)
        self.assertIn("[2/2] trouble/trouble/way=killed", out)

    def test_a_kill_is_out_of_memory_only_where_the_system_says_so(self):
        for counts, status, words in (
            (itertools.count(), "oom", "the system killed the process: out of memory"),
            (itertools.repeat(7), "error", "SIGKILL, but not because memory was full"),
            (itertools.repeat(None), "error", "SIGKILL: out of memory, or somebody"),
        ):
            with (
                self.subTest(status=status),
                unittest.mock.patch.object(worker, "oom_kills", counts.__next__),
            ):
                self.records.unlink(missing_ok=True)
                code, _, _ = self.main("run", "--module", "trouble", "--case", "way=killed")
                found = {record["impl"]: record for record in load(self.records).records}
                self.assertEqual((code, found["c"]["status"]), (1 if status == "error" else 0, "ok"))
                self.assertEqual(found["torch_eager"]["status"], status)
                self.assertIn(words, found["torch_eager"]["message"])
                _, out, _ = self.main("run", "--module", "trouble", "--case", "way=killed")
                self.assertEqual("1 cases are finished" in out, status == "oom")

    def test_a_worker_that_is_killed_while_it_waits_is_replaced(self):
        settings = worker.Settings(self.library, 1, 0.1)
        case = Case("scaling", count=15, dtype="f32")
        with worker.Worker(settings) as measuring:
            os.kill(measuring._process.pid, signal.SIGKILL)
            measuring._process.join()
            records = measuring.run("parity_double.fakes.scale", case)
        self.assertEqual([record["status"] for record in records], ["ok", "ok"])

    def test_a_killed_sweep_goes_on_where_it_was(self):
        sweep = self.process("--module", "scale")
        self.addCleanup(sweep.wait)
        deadline = time.monotonic() + 60
        while not self.records.is_file() or self.records.read_bytes().count(b"\n") < 4:
            self.assertLess(time.monotonic(), deadline)
            self.assertIsNone(sweep.poll())
            time.sleep(0.02)
        sweep.send_signal(signal.SIGKILL)
        sweep.wait()
        finished = {record["case"]["count"] for record in load(self.records).records}
        time.sleep(0.7)  # the worker must have ended too: nothing more runs or is recorded
        before = self.runs()
        time.sleep(0.7)
        self.assertEqual(self.runs(), before)
        status, out, _ = self.main("run", "--module", "scale")
        self.assertEqual(status, 0, out)
        again = [int(name.split("count=")[1].split(",")[0]) for name in self.runs()[len(before) :]]
        self.assertEqual(again, [count for count in (1, 15, 16, 17, 4096) if count not in finished])
        self.assertTrue(2 <= len(finished) < 5)
        self.assertEqual(len(load(self.records).records), 10)

    def test_a_corrupt_line_costs_no_other(self):
        self.main("run", "--module", "scale")
        whole = self.records.read_bytes()
        good = json.loads(whole.splitlines()[0])
        wrong = [
            ("impl", ["c"], 'impl is ["c"], needs a name'),
            ("impl", "", 'impl is "", needs a name'),
            ("module", [], "module is [], needs a name"),
            ("case", {"count": None}, "case.count is null, needs"),
            ("case", {"count": [1]}, "case.count is [1], needs"),
            ("case", {"ranks": 0}, "case.ranks is 0, needs a whole number of at least 1"),
            ("case", {"ranks": "2"}, 'case.ranks is "2", needs a whole number of at least 1'),
            ("status", "fine", 'status is "fine", needs one of ok, failed'),
            ("machine", [], "machine is [], needs a string"),
            ("device", "tpu", 'device is "tpu", needs one of cpu, cuda'),
            ("measure", 0, "measure is 0, needs a string"),
            ("time", True, "time is true, needs a string"),
            ("versions", {"torch": 2}, "versions.torch is 2, needs a string"),
            ("error", [], "error is [], needs an object"),
            ("error", {"rel_l2": "0"}, 'error.rel_l2 is "0", needs a number or null'),
            ("error", {"outputs": {"y": 1}}, "error.outputs.y is 1, needs an object"),
            ("ms", {"median": 1.0}, "ms has no mean"),
            (
                "ms",
                dict.fromkeys(("median", "mean", "std", "min", "max", "p95", "n"), 0),
                "ms.median is 0, needs",
            ),
            ("samples", [1, "2"], 'samples.1 is "2", needs a number'),
            ("series", {"count": 1}, "series.count is 1, needs a list"),
            ("sides", 0, "sides is 0, needs a whole number of at least 1"),
            ("threads", 1.5, "threads is 1.5, needs a whole number"),
            ("peak_mib", 2**70, "peak_mib is 1180591620717411303424, needs a number"),
            ("message", "\ud800", "it is not JSON: 'utf-8' codec can't encode"),
        ]
        lines = [(json.dumps(good | {key: value}), words) for key, value, words in wrong]
        lines += [
            ("[" * 100_000, "it nests too deep"),
            (json.dumps(good).replace('"c"', "NaN"), "it is not JSON: Out of range"),
            (json.dumps(good)[:-1] + ', "peak_mib": 1e999}', "it is not JSON: Out of range"),
            ("[1]", "it is [1], needs an object"),
            ('{"module": "m"}', "it has no deliverable"),
        ]
        ends = whole.splitlines()[1] + b"\n"  # a record after all of them
        self.records.write_bytes(whole + b"".join(line.encode() + b"\n" for line, _ in lines) + ends)
        warnings = [f"line {11 + i}: no record, left out: {words}" for i, (_, words) in enumerate(lines)]
        for command in ("report", "list", "run"):
            with self.subTest(command=command):
                more = () if command == "report" else ("--module", "scale")
                status, out, err = self.main(command, *more)
                self.assertEqual((status, err.count("\n")), (0, len(lines)), err)
                for line, warning in zip(err.splitlines(), warnings, strict=True):
                    self.assertIn(warning, line)
        self.assertIn("5 cases are finished", out)
        for pair in ((self.records, self.records), (self.records.parent, self.records)):
            self.assertEqual(self.compared(*pair), (0, True))

    def compared(self, old, new):
        """Returns the exit status of a comparison, and whether it printed that nothing got worse."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            status = main("parity_double.fakes", ["compare", str(old), str(new)])
        return status, "nothing got worse" in out.getvalue()

    def test_a_mistake_of_the_command_s_own_is_never_worse(self):
        self.main("run", "--module", "scale", "--case", "count=1,")
        with (
            unittest.mock.patch("parity.core.compare.moves", side_effect=ZeroDivisionError("as asked")),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            status = main("parity_double.fakes", ["compare", str(self.records), str(self.records)])
        self.assertEqual(status, 2)
        self.assertIn("ZeroDivisionError: as asked", err.getvalue())

    def test_what_standard_output_does_not_take_is_no_result(self):
        self.main("run", "--module", "scale", "--case", "count=1,")
        code = "import sys; from parity.core.command import main; sys.exit(main('parity_double.fakes', sys.argv[1:]))"
        broken, pipe = os.pipe()
        os.close(broken)
        full = os.open("/dev/full", os.O_WRONLY)
        # Python then buffers standard output, and flushes it again when it ends.
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        try:
            for command, out, words in (
                (self.arguments("list"), full, "error: [Errno 28] No space left on device"),
                (["compare", str(self.records), str(self.records)], pipe, ""),
            ):
                with self.subTest(command=command[0]):
                    done = subprocess.run(
                        [sys.executable, "-c", code, *command],
                        stdout=out,
                        stderr=subprocess.PIPE,
                        text=True,
                        env=buffered,
                    )
                    self.assertEqual(done.returncode, 2, done.stderr)
                    self.assertIn(words, done.stderr)
        finally:
            os.close(full)
            os.close(pipe)

    def test_the_command_line_refuses_clearly(self):
        for arguments, words in (
            (("run", "--budget", "nan"), "argument --budget: 'nan' is no number"),
            (("run", "--budget", "inf"), "argument --budget: inf, needs to be above 0 and at most 86400"),
            (("run", "--budget", "0"), "argument --budget: 0, needs to be above 0"),
            (("run", "--budget", "x"), "argument --budget: 'x' is no number"),
            (("run", "--within=-1"), "argument --within: -1, needs at least 0"),
            (("run", "--threads", "0"), "argument --threads: 0, needs 1 to 4096"),
            (("run", "--threads", "1000000"), "argument --threads: 1000000, needs 1 to 4096"),
            (("run", "--threads", "two"), "argument --threads: 'two' is no whole number"),
        ):
            with self.subTest(arguments=arguments):
                err = io.StringIO()
                with contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as ended:
                    main("parity_double.fakes", list(arguments))
                self.assertEqual(ended.exception.code, 2)
                self.assertIn(words, err.getvalue())
        for arguments, words in (
            (("run", "--module", "nothing"), "no module nothing; there are: early, scale, trouble"),
            (("run", "--case", "("), "is no regular expression"),
            (("run", "--module", "scale", "--case", "q"), "no case for --module scale, --case 'q'\n"),
            (("report",), "no records in"),
            (("report", "--machine", "elsewhere"), "no records in"),
        ):
            with self.subTest(arguments=arguments):
                status, _, err = self.main(*arguments)
                self.assertEqual(status, 2)
                self.assertIn(words, err)
        arguments = self.arguments("run", "--library", "/nowhere.so", "--module", "scale")
        with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(main("parity_double.fakes", arguments), 2)
        self.assertIn("no library at /nowhere.so: build it with cmake --preset default", err.getvalue())


if __name__ == "__main__":
    unittest.main()
