"""Random tests of the code between a sweep and its pages: corrupt record files, kills, full disks.

Each test runs for a bounded time from a fixed seed. TANDEM_FUZZ_SEED and TANDEM_FUZZ_SECONDS (of each test) change
both. The first case has this seed, and each next case a seed larger by one. A failure prints the seed of its case: with
it and TANDEM_FUZZ_SECONDS=0 the case runs alone.
"""

import contextlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections import Counter
from pathlib import Path
from unittest import mock

import parity_double
import torch

from parity.core import command, compare, document, report, sweep, worker
from parity.core.case import Case
from parity.core.record import ASIDE, FILE, Finished, RecordError, RecordFile, key_of, load
from parity.core.schema import SchemaError, parse
from parity.core.view import MEASURED, Records

ROOT = Path(__file__).resolve().parents[1]
CASES = 6  # cases of the fake module, each with two sides
SLEEP = "0.2"  # seconds of each case that may be killed
PATIENCE = 120.0  # for a process of the test's own

torch.set_num_threads(1)

SCALARS = (None, True, False, 0, 1, -1, 2**63 - 1, 2**63, -(2**70), 0.5, -0.0, 1e308, 5e-324)
SCALARS += float("nan"), float("inf")
STRINGS = (*"|c|ok|cuda|1|\0|\n|\x1b[31m|é|\u2028|\ud800|\U0001f600".split("|"), "x" * 5000, "a=1,b")
TEXTS = ("[" * 100_000, '{"a":' * 20_000, "9" * 5000, *'1e999 -1e999 NaN nul " "\\ "\\u12 \\ {} []'.split())
TEXTS += (*" |\t|\r|\n|\r\n|\0|,|}|}{|\ufeff|/*|'c'|1.|01|+1|0x1|\"\\ud800\"".split("|"),)
BYTES = b"\r|\n|\xff|\xc0\xaf|\xed\xa0\x80|\xe2\x82|\xf4\x90\x80\x80|\xef\xbb\xbf|\x00|\x7f|\x80".split(b"|")


def fuzz(default: float, act) -> None:
    """Calls act(rng) with consecutive seeds until the time is over, at least once."""
    seed = int(os.environ.get("TANDEM_FUZZ_SEED", "1"))
    end = time.monotonic() + float(os.environ.get("TANDEM_FUZZ_SECONDS", default))
    first = seed
    while True:
        try:
            act(random.Random(seed))
        except BaseException:
            print(f"TANDEM_FUZZ_SEED={seed} TANDEM_FUZZ_SECONDS=0 runs this case alone", file=sys.stderr)
            raise
        seed += 1
        if time.monotonic() >= end:
            break
    print(f"{seed - first} cases", end=" ... ", file=sys.stderr, flush=True)


def value(rng: random.Random, deeper: int = 2):
    """Returns a random JSON value."""
    if deeper and rng.random() < 0.3:
        items = [value(rng, deeper - 1) for _ in range(rng.randrange(4))]
        return items if rng.random() < 0.5 else {rng.choice(STRINGS): item for item in items}
    return rng.choice(SCALARS) if rng.random() < 0.6 else rng.choice(STRINGS)


def places(node, found: list) -> list:
    """Returns (container, key) of every value inside."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        found.append((node, key))
        if isinstance(node[key], (dict, list)):
            places(node[key], found)
    return found


def mutated_value(rng: random.Random, line: bytes) -> bytes:
    """Changes some values, keys or depths of the line. It stays valid JSON."""
    record = json.loads(line)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        # Half of the choices are the record's own keys, because series and samples have most of the values.
        inside = [(record, key) for key in record] if rng.random() < 0.5 else places(record, [])
        if not inside:
            break
        node, key = rng.choice(inside)
        way = rng.randrange(6)
        if way == 0 and isinstance(node, dict):
            del node[key]
        elif way == 1 and isinstance(node, dict):
            node[rng.choice(STRINGS)] = node.pop(key)
        elif way == 2:
            other, its = rng.choice(inside)
            node[key], other[its] = other[its], node[key]
        elif way == 3:
            for _ in range(rng.choice((1, 5, 14, 20, 200))):
                node[key] = [node[key]] if rng.random() < 0.5 else {"a": node[key]}
        elif way == 4 and isinstance(node, dict):
            node[rng.choice(STRINGS)] = value(rng)
        else:
            node[key] = value(rng)
        with contextlib.suppress(RecursionError):
            json.dumps(record)
            continue
        break  # a swap made a value contain itself
    try:
        return json.dumps(record, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    except (RecursionError, ValueError):
        return b"[" * 500


def mutated_bytes(rng: random.Random, line: bytes) -> bytes:
    """Damages the line as a full disk, an editor or a dead writer may do."""
    for _ in range(rng.choice((1, 1, 2, 8))):
        a, b = sorted(rng.choices(range(len(line) + 1), k=2))
        way = rng.randrange(7)
        if way == 0:
            line = line[:a]
        elif way == 1:
            line = line[:a] + line[b:]
        elif way == 2:
            line = line[:b] + line[a:]
        elif way == 3 and a < len(line):
            line = line[:a] + bytes([line[a] ^ 1 << rng.randrange(8)]) + line[a + 1 :]
        elif way == 4:
            line = line[:a] + rng.choice(BYTES) + line[a:]
        elif way == 5:
            line = line[:a] + rng.choice(TEXTS).encode() + line[a:]
        else:
            line = line[:a] + rng.choice(TEXTS).encode() + line[b:]
    return line


def mutated(rng: random.Random, line: bytes) -> bytes:
    return mutated_value(rng, line) if rng.random() < 0.6 else mutated_bytes(rng, line)


class Lines(unittest.TestCase):
    def test_a_line_is_a_record_or_says_why_not(self):
        """Every reader of records can read a valid record."""
        committed = (ROOT / "reports/cpu/records.jsonl").read_bytes().splitlines()
        committed += (ROOT / "reports/h200/records.jsonl").read_bytes().splitlines()[::7]
        taken = Counter()

        def case(rng):
            line = rng.choice(committed)
            before = parse(line)
            try:
                after = parse(mutated(rng, line))
            except SchemaError as error:
                self.assertTrue(str(error).isprintable(), repr(error))
                self.assertLess(len(str(error)), 20_000)
                taken[False] += 1
                return
            taken[True] += 1
            self.read(after, before)

        fuzz(4, case)
        if sum(taken.values()) > 100:
            self.assertGreater(min(taken.values()), sum(taken.values()) // 20, taken)

    def read(self, after, before):
        pair, records = {key_of(after): after}, Records([after, before])
        list(compare.moves({key_of(before): before}, pair, common=False, same_machine=True))
        list(compare.moves(pair, {key_of(after): before}, common=True, same_machine=False))
        self.assertIn(len({record.get("machine") for record in (before, after)}), (1, 2))
        for name in MEASURED:
            records.ratio(name)
        records.error_ratio()
        records.impls()
        keys = dict.fromkeys([*before["case"], *after["case"]])
        for key in keys:
            records.values(key)
        report.provenance([after, before])
        report.verdict([after, before])
        report._summary([after, before])
        list(report._gone([after, before]))
        report._troubles([after, before])
        finished = Finished([before, after])
        finished.seconds(after["module"], Case(after["deliverable"], **after["case"]))


class Files(unittest.TestCase):
    """Record files of a module that works, run by a worker that answers from memory."""

    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.library = parity_double.build(cls.folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        os.environ.pop("FAKES_LOG", None)
        settings = worker.Settings(cls.library, 2, 0.1)
        items = sweep.select(sweep.discover("parity_double.fakes"), "full", ["scale"])
        with worker.Worker(settings) as measuring:
            answers = {item.case.name: measuring.run(item.path, item.case) for item in items}
            cls.worker = types.SimpleNamespace(
                surroundings=measuring.surroundings,
                settings=settings,
                run=lambda path, case: answers[case.name],
            )

    def setUp(self):
        self.enterContext(mock.patch.object(document.Markdown, "picture"))
        for module in (sweep, command):
            self.enterContext(mock.patch.object(module, "Worker", self.answering, create=True))

    def answering(self, *_settings):
        return contextlib.nullcontext(self.worker)

    def main(self, *arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command.main("parity_double.fakes", [*map(str, arguments)])
        self.assertNotIn("Traceback", err.getvalue())
        return status, out.getvalue(), err.getvalue()

    def sweep(self, reports):
        of = ("--module", "scale", "--profile", "full")
        return self.main("run", "--reports", reports, "--library", self.library, *of)

    @contextlib.contextmanager
    def reports(self):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "local").mkdir()
            yield Path(folder), Path(folder) / "local" / FILE

    def test_a_corrupt_file_costs_its_corrupt_lines(self):
        with self.reports() as (reports, file):
            self.assertEqual(self.sweep(reports)[0], 0)
            whole = file.read_bytes().splitlines(keepends=True)
        self.assertEqual(len(whole), 2 * CASES)

        def case(rng):
            lines = list(whole) * rng.choice((1, 1, 2))
            for i in rng.sample(range(len(lines)), rng.choice((1, 1, 2, 5))):
                lines[i] = mutated(rng, lines[i].rstrip(b"\n")) + rng.choice((b"\n",) * 9 + (b"", b"\r\n"))
            with self.reports() as (reports, file):
                file.write_bytes(b"".join(lines))
                self.check(reports, file, whole)

        fuzz(6, case)

    def check(self, reports, file, whole):
        content = file.read_bytes()
        lines = [line for line in content.split(b"\n") if line.strip()]
        loaded = load(file)
        self.assertEqual(len(loaded.records) + len(loaded.warnings), len(lines))
        kept = Counter(json.dumps(record) for record in loaded.records)
        for line, count in Counter(line for line in lines if line + b"\n" in whole).items():
            self.assertGreaterEqual(kept[json.dumps(json.loads(line))], count)

        status, _, err = self.main("report", "--reports", reports)
        self.assertTrue(
            status == 0 or (status == 2 and ("no records" in err or "report() failed" in err)), err
        )
        status, out, err = self.main("list", "--reports", reports, "--module", "scale")
        self.assertEqual((status, out.count("scale/scaling")), (0, CASES - 1), err)
        with self.reports() as (_, good):
            good.write_bytes(b"".join(whole))
            for pair in ((file, good), (good, file)):
                status, _, err = self.main("compare", *pair)
                self.assertTrue(status in (0, 1) or "holds no records" in err, err)
        status, _, err = self.main("prune", "--dry-run", "--reports", reports)
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(file.read_bytes(), content)  # nothing was written so far

        status, out, err = self.sweep(reports)
        if status == 2:  # a complete record of another machine or device
            self.assertIn("holds records of", err)
            return
        self.assertEqual(status, 0, err)
        torn = 0 if loaded.torn_at is None else len(content) - loaded.torn_at
        self.assertTrue(file.read_bytes().startswith(content[: len(content) - torn]))
        if torn:
            self.assertEqual((file.parent / ASIDE).read_bytes(), content[-torn:] + b"\n")
        status, out, err = self.sweep(reports)
        self.assertEqual(status, 0, err)
        self.assertIn(f"{CASES} cases are finished", out)
        status, out, err = self.main("prune", "--reports", reports)
        self.assertEqual((status, err), (0, ""))
        after = load(file)
        self.assertEqual(len(after.warnings), len(loaded.warnings) - (torn > 0))
        self.assertIn(f"; {len(after.records)} stay\n", out)

    def test_a_disk_that_ends_anywhere_keeps_what_was_whole(self):
        """Each sweep may write a random number of bytes more. After the sweep the limit is removed."""

        def case(rng):
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            with self.reports() as (reports, file):
                records = []
                for _ in range(rng.randrange(1, 4)):
                    size = file.stat().st_size if file.exists() else 0
                    # Python ignores SIGXFSZ: the write is cut short, the next one fails.
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size + rng.randrange(6000), limits[1]))
                    try:
                        status, _, err = self.sweep(reports)
                    finally:
                        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                    loaded = load(file)
                    self.assertEqual(loaded.warnings, [])
                    self.assertEqual(loaded.records[: len(records)], records)
                    records = loaded.records
                    if status:
                        self.assertEqual(status, 2)
                        self.assertIn("cannot be written: File too large; the ", err)
                        self.assertIn(f"the {len(records)} records before are intact", err)
                self.assertEqual(self.sweep(reports)[0], 0)
                self.complete(load(file))

        fuzz(2, case)

    def complete(self, loaded):
        """Every result exists exactly once."""
        found = Counter(map(key_of, loaded.records))
        self.assertEqual((loaded.warnings, len(found), set(found.values())), ([], 2 * CASES, {1}))


class Kills(unittest.TestCase):
    """kill -9 at random times, of the sweep or of a process that measures for it."""

    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.library = parity_double.build(cls.folder)
        cls.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "FAKES_SLEEP": SLEEP,
        }
        cls.environment.pop("FAKES_LOG", None)

    def start(self, reports):
        arguments = ["run", "--reports", str(reports), "--library", str(self.library)]
        arguments += ["--module", "scale", "--profile", "full", "--budget", "0.05"]
        code = (
            "import sys, parity_double; from parity.core.command import main; "
            f"sys.exit(main('parity_double.fakes', {arguments!r}))"
        )
        said = (reports / "said").open("w+")
        self.addCleanup(said.close)
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=said, stderr=said, env=self.environment
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process, said

    def finish(self, process, said):
        status = process.wait(PATIENCE)
        said.seek(0)
        text = said.read()
        self.assertNotIn("Traceback", text)
        return status, text

    @staticmethod
    def helpers(pid):
        """The measuring processes, and the process that forks them."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                words = (folder / "cmdline").read_bytes()
                parents[int(folder.name)] = (int(fields[1]), fields[0] != "Z" and b"forkserver" in words)
        found, new = set(), {pid}
        while new:
            new = {child for child, (parent, _) in parents.items() if parent in new} - found
            found |= new
        return sorted(child for child in found if parents[child][1])

    def kill(self, rng, reports, whom):
        """Starts a sweep. Kills it or one of its helpers after it has locked the file."""
        process, said = self.start(reports)
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and not self.is_held(reports):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)
        time.sleep(rng.choice((0.0, 0.1, 1.0, 3.0)) * rng.random())
        if whom == "sweep":
            process.kill()
            process.wait()
            return
        while process.poll() is None:
            helpers = self.helpers(process.pid)
            if helpers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(helpers), signal.SIGKILL)
                break
            time.sleep(0.01)
        self.finish(process, said)

    @staticmethod
    def is_held(reports):
        if not (reports / "local" / FILE).exists():
            return False
        try:
            with RecordFile(reports / "local"):
                return False
        except RecordError:
            return True

    def test_the_completed_run_has_every_result_once(self):
        def case(rng):
            with tempfile.TemporaryDirectory() as folder:
                reports = Path(folder)
                for one in rng.sample(("sweep", "helper"), 2):
                    self.kill(rng, reports, one)
                    loaded = load(reports / "local" / FILE)
                    self.assertEqual(loaded.warnings, [])
                status, said = self.finish(*self.start(reports))
                self.assertEqual(status, 0, said)
                loaded = load(reports / "local" / FILE)
                self.assertEqual((loaded.warnings, (reports / "local" / ASIDE).exists()), ([], False))
                self.assertEqual(len(loaded.newest()), 2 * CASES)
                self.assertEqual({record["status"] for record in loaded.newest()}, {"ok"})
                self.assertEqual({record["status"] for record in loaded.records} - {"ok", "error"}, set())
                # A result that a kill damaged is measured once more; every other one exists exactly once.
                spoiled = {key_of(r)[:2] for r in loaded.records if r["status"] == "error" or "message" in r}
                whole = Counter(key_of(r) for r in loaded.records if key_of(r)[:2] not in spoiled)
                self.assertLessEqual(set(whole.values()), {1})

        fuzz(1, case)


if __name__ == "__main__":
    unittest.main()
