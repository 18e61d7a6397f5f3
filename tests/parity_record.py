"""Record files: appended records can be read. Records that cannot be read or written stay unchanged. Finished cases are
found."""

import errno
import fcntl
import os
import resource
import signal
import tempfile
import unittest
import unittest.mock
from pathlib import Path

from parity.core.cards import impossible, step_gflop
from parity.core.case import Case
from parity.core.files import write_whole
from parity.core.record import ASIDE, FILE, Finished, Loaded, RecordError, RecordFile, load, prune


class Files(unittest.TestCase):
    def test_only_regular_files_are_replaced(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        os.mkfifo(folder / "fifo")
        (folder / "device").symlink_to("/dev/null")
        for name in ("fifo", "device"):
            before = (folder / name).lstat()
            with self.assertRaisesRegex(OSError, f"not a regular file: '.*{name}'"):
                write_whole(folder / name, "text")
            now = (folder / name).lstat()  # following a link changes its st_atime
            self.assertEqual((now.st_mode, now.st_ino, now.st_ctime_ns), (*before[:2], before.st_ctime_ns))
        self.assertEqual(sorted(os.listdir(folder)), ["device", "fifo"])


class RecordFiles(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.path = self.folder / FILE

    @staticmethod
    def record(count=1, impl="c", **more):
        base = dict(deliverable="d", module="m", case={"count": count}, impl=impl, status="ok")
        return base | dict(threads=2, measure="error time", sides=1, time="2026-11-21T10:00:00Z") | more

    def append(self, *records):
        with RecordFile(self.folder) as file:
            file.append(records)

    def test_what_is_appended_is_read(self):
        self.append(self.record(1), self.record(2))
        self.append(
            self.record(1, status="oom"), self.record(3, peak_mib=float("nan"), series={"a": [float("inf")]})
        )
        loaded = load(self.path)
        self.assertEqual((len(loaded.records), loaded.warnings), (4, []))
        self.assertEqual([r["case"]["count"] for r in loaded.newest()], [1, 2, 3])
        self.assertEqual(loaded.newest()[0]["status"], "oom")
        self.assertEqual((loaded.records[3]["peak_mib"], loaded.records[3]["series"]), (None, {"a": [None]}))

    def test_what_nobody_tried_did_not_run_out_of_memory(self):
        for message, status, words in (
            ("needs 145286 MiB, 73226 MiB are available", "not run", "the largest side needs about 142 GiB"),
            ("rank 0: needs 18432 MiB, 16677 MiB are available", "not run", "rank 0: the largest side needs"),
            ("OutOfMemoryError: CUDA out of memory. Tried to allocate 80 MiB", "oom", "OutOfMemoryError"),
        ):
            with self.subTest(message=message):
                self.append(self.record(1, status="oom", message=message))
                found = load(self.path).records[-1]
                self.assertEqual(found["status"], status)
                self.assertTrue(found["message"].startswith(words), found["message"])

    def test_times_outlive_a_run_of_errors_alone(self):
        timed = self.record(ms={"median": 2.0}, peak_mib=5.0, measure="error time memory", machine="here")
        errors = self.record(error={"rel_l2": 0.1}, measure="error", machine="here", build={"id": "b"})
        for more, kept in (
            ({}, True),
            ({"status": "failed"}, False),
            ({"status": "oom"}, False),
            ({"machine": "there"}, False),
            ({"measure": "error time memory"}, False),
        ):
            with self.subTest(more=more):
                (found,) = Loaded([timed, errors, errors | more]).newest()
                self.assertEqual(found.get("ms"), {"median": 2.0} if kept else None)
                self.assertEqual(found["build"], {"id": "b"})
                self.assertEqual(found.get("earlier"), {"time": timed["time"]} if kept else None)
        (found,) = Loaded([timed, errors | {"measure": "error time", "ms": {"median": 3.0}}]).newest()
        self.assertEqual((found["ms"], found["peak_mib"]), ({"median": 3.0}, 5.0))
        configured = timed | {"build": {"id": "a"}, "config": {"graph": True}}
        (found,) = Loaded([configured, errors | {"config": {"graph": False}}]).newest()
        self.assertNotIn("ms", found)

    def test_a_torn_last_line_is_kept_aside(self):
        self.append(self.record(1))
        whole = self.path.read_bytes()
        self.path.write_bytes(whole + b'{"deliverable": "d", "mod')
        loaded = load(self.path)  # a reader changes nothing
        self.assertEqual(len(loaded.records), 1)
        self.assertIn("line 2: cut off in the middle", loaded.warnings[0])
        self.assertNotEqual(self.path.read_bytes(), whole)
        with RecordFile(self.folder) as file:
            self.assertIn(f"kept in {ASIDE}", file.loaded.warnings[0])
            file.append([self.record(2)])
        self.assertEqual((self.folder / ASIDE).read_text(), '{"deliverable": "d", "mod\n')
        self.assertEqual(len(load(self.path).records), 2)
        self.assertTrue(self.path.read_bytes().startswith(whole))

    def test_a_last_line_that_lacks_only_its_end_is_a_record(self):
        self.append(self.record(1))
        self.path.write_bytes(self.path.read_bytes().rstrip(b"\n"))
        self.append(self.record(2))
        self.assertEqual((len(load(self.path).records), load(self.path).warnings), (2, []))

    def test_lines_that_are_no_records_are_reported_and_stay(self):
        self.append(self.record(1))
        self.path.write_bytes(self.path.read_bytes() + b'nonsense\n[1]\n{"module": "m"}\n\xff\xfe\n\n')
        self.append(self.record(2))
        loaded = load(self.path)
        self.assertEqual(
            [warning.split(": ")[0].split(" ")[-1] for warning in loaded.warnings], ["2", "3", "4", "5"]
        )
        self.assertEqual(len(loaded.records), 2)
        self.assertIn(b"nonsense", self.path.read_bytes())

    def test_a_carriage_return_ends_no_line(self):
        """Python's splitlines() would split the line there. The reader would take the first part for a torn end, and
        the writer would cut the file there."""
        self.append(self.record(1))
        whole = self.path.read_bytes()
        self.path.write_bytes(whole + b"non\rsense\n" + whole.replace(b"}\n", b"}\r\n"))
        self.append(self.record(2))
        loaded = load(self.path)
        self.assertEqual([record["case"]["count"] for record in loaded.records], [1, 1, 2])
        self.assertEqual(len(loaded.warnings), 1)
        self.assertFalse((self.folder / ASIDE).exists())

    def test_what_no_reader_would_take_is_not_written(self):
        self.append(self.record(1))
        before = self.path.read_bytes()
        with RecordFile(self.folder) as file:
            for record, words in (
                (self.record(2, machine=None), "machine is null, needs a string"),
                (
                    self.record(2, build=dict(version="1", commit="<!--", library="l")),
                    'build.commit is "<!--", needs letters',
                ),
                (self.record(2, others=2**63), "others is 9223372036854775808, needs a number"),
                (self.record(2, values={"x": -(2**63)}), "values.x is -9223372036854775808, needs a number"),
                (self.record(2, more="\ud800"), "is not JSON: .*surrogates not allowed"),
            ):
                with self.assertRaisesRegex(RecordError, words):
                    file.append([self.record(3), record])
            self.assertEqual(len(file.loaded.records), 1)
        self.assertEqual(self.path.read_bytes(), before)

    def test_what_is_no_regular_file_is_refused(self):
        """An endless device would be read until memory is full, and a FIFO would never open."""
        os.mkfifo(self.folder / "fifo")
        for target in ("/dev/zero", "/dev/full", "/dev/null", self.folder / "fifo"):
            with self.subTest(target=target):
                self.path.symlink_to(target)
                for act in (lambda: load(self.path), lambda: RecordFile(self.folder)):
                    with self.assertRaisesRegex(RecordError, "cannot be read: Not a regular file"):
                        act()
                self.path.unlink()
                self.append(self.record(1))
                with self.path.open("ab") as file:
                    file.write(b"torn")
                (self.folder / ASIDE).symlink_to(target)
                with self.assertRaisesRegex(
                    RecordError, "cannot be written: (Not a regular file|No such device)"
                ):
                    RecordFile(self.folder)
                self.path.unlink()
                (self.folder / ASIDE).unlink()

    def test_a_file_system_without_locks_is_named_as_such(self):
        failure = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        with (
            unittest.mock.patch.object(fcntl, "flock", side_effect=failure),
            self.assertRaisesRegex(RecordError, "cannot be locked: No locks available"),
        ):
            RecordFile(self.folder)

    def test_an_unreadable_file_is_refused_and_stays(self):
        self.path.mkdir()
        with self.assertRaisesRegex(RecordError, "cannot be read: Is a directory"):
            load(self.path)
        with self.assertRaisesRegex(RecordError, "cannot be read"):
            RecordFile(self.folder)

    def test_a_folder_that_cannot_be_made(self):
        (self.folder / "file").touch()
        with self.assertRaisesRegex(RecordError, "cannot be (read|written): Not a directory"):
            RecordFile(self.folder / "file")

    def test_a_read_only_folder_is_refused_and_stays(self):
        self.append(self.record(1))
        before = self.path.read_bytes()
        os.chmod(self.path, 0o444)
        os.chmod(self.folder, 0o555)
        self.addCleanup(os.chmod, self.folder, 0o755)
        if root := os.geteuid() == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            with self.assertRaisesRegex(RecordError, "cannot be written: Permission denied"):
                RecordFile(self.folder)
        finally:
            if root:
                os.seteuid(0)
        self.assertEqual(self.path.read_bytes(), before)

    def test_one_writer_at_a_time(self):
        with RecordFile(self.folder), self.assertRaisesRegex(RecordError, "another run is writing it"):
            RecordFile(self.folder)
        with self.path.open() as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self.assertRaisesRegex(RecordError, "another run"):
                RecordFile(self.folder)

    def test_pruning_is_whole_or_not_at_all(self):
        self.append(self.record(1), self.record(2), self.record(1, status="failed", message="y"))
        before = self.path.read_bytes()

        def wanted(record):
            return record["case"]["count"] != 1

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # the disk ends in the first line
            with self.assertRaisesRegex(RecordError, "cannot be written: .*; it is as it was"):
                prune(self.folder, wanted)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
        self.assertEqual((self.path.read_bytes(), len(list(self.folder.iterdir()))), (before, 1))
        with RecordFile(self.folder), self.assertRaisesRegex(RecordError, "another run is writing it"):
            prune(self.folder, wanted)
        self.assertEqual(self.path.read_bytes(), before)
        dropped, stay = prune(self.folder, wanted)
        self.assertEqual(([found["status"] for found in dropped], stay), (["ok", "failed"], 1))
        self.assertEqual(self.path.read_bytes(), before.splitlines(keepends=True)[1])
        elsewhere = self.folder / "elsewhere"
        self.path.rename(elsewhere)
        self.path.symlink_to(elsewhere)
        prune(self.folder, lambda record: False)
        self.assertEqual((self.path.is_symlink(), elsewhere.read_bytes()), (True, b""))

    def test_a_writer_that_waited_for_the_pruned_file_writes_to_the_new_one(self):
        self.append(self.record(1))
        whole, lock = self.path.read_bytes(), fcntl.flock

        def late(file, how):
            lock(file, how)
            if not self.path.with_name("new").exists():
                self.path.with_name("new").write_bytes(whole)
                os.link(self.path.with_name("new"), self.path.with_name("link"))
                self.path.with_name("link").replace(self.path)

        with unittest.mock.patch.object(fcntl, "flock", side_effect=late):
            self.append(self.record(2))
        self.assertEqual(len(load(self.path).records), 2)

    def test_what_is_finished(self):
        case = Case("d", measure="time", count=1)
        here = dict(machine="M", host={"model": 1}, build={"id": "1"})
        pair = [self.record(impl=impl, sides=2, **here) for impl in ("c", "torch_eager")]
        late = [record | {"time": "2026-11-21T11:00:00Z"} for record in pair]
        failed = [pair[0] | {"status": "failed"}, pair[1]]
        for records, finished in (
            ([], False),
            (pair, True),
            (pair[:1], False),  # the second line never reached the disk
            ([*pair, late[0]], False),
            ([*pair, *late], True),
            (failed, False),
            ([*failed, *late], True),
            ([*late, *failed], False),
            ([record | {"status": "oom"} for record in pair], True),
            ([record | {"threads": 1} for record in pair], False),
            ([record | {"measure": "error"} for record in pair], False),
            ([record | {"build": {"id": "2"}} for record in pair], False),
            ([record | {"host": {"model": 2}} for record in pair], False),
            ([record | {"machine": "N"} for record in pair], False),
            ([pair[0] | {"config": {"graph": True}}, pair[1]], False),
        ):
            with self.subTest(records=records):
                self.assertEqual(Finished(records).covers("m", case, 2, here), finished)
        graph = Case("d", measure="time", config={"c": {"graph": True}}, count=1)
        captured = [pair[0] | {"config": {"graph": True}}, pair[1]]
        self.assertTrue(Finished(captured).covers("m", graph, 2, here))
        self.assertFalse(Finished(pair).covers("m", graph, 2, here))
        more = Case("d", measure="time", repeats=10, count=1)
        self.assertFalse(Finished([record | {"ms": {"n": 5}} for record in pair]).covers("m", more, 2, here))
        self.assertTrue(Finished([record | {"ms": {"n": 10}} for record in pair]).covers("m", more, 2, here))


# A case of a model with 334.2 MiB of weights.
MODEL = dict(vocab=10_000, d_model=1024, d_ff=4096, layers=4, dtype="f32")


class Limits(unittest.TestCase):
    def test_what_no_machine_can_have_done(self):
        """On an H200: a number at its limit, the next one, the FLOPs of a call, keys of the case, and the words."""
        step = {"pass": "step"}
        for key, most, beyond, flops, case, words in (
            ("tflops", 66.9, 67, 0, {}, "tflops is 67, the card's data sheet has 66.9"),
            ("tflops", 989.4, 990, 0, {"dtype": "bf16_mixed"}, "tflops is 990, the card's data sheet has 989.4"),
            ("gb_s", 4800, 4801, 0, {}, "gb_s is 4801, the card's data sheet has 4800"),
            ("peak_mib", 144_384, 144_385, 0, {}, "peak_mib is 144385, the card's data sheet has 144384"),
            ("ms", 0.001, 0.0009, 0, {}, "ms.min is 0.0009, needs 0.001 at least"),
            ("ms", 2, 1.5, 133.8, {}, "ms.median is 1.5, the data sheet's 66.9 TFLOP/s take 2"),
            ("peak_mib", 331, 330, 0, {}, "peak_mib is 330, the weights alone are 334"),
            ("peak_mib", 166, 165, 0, {"dtype": "f16"}, "peak_mib is 165, the weights alone are 167"),
            ("peak_mib", 993, 992, 0, step, "peak_mib is 992, the weights and AdamW's state alone are 1002"),
            ("peak_mib", 331, 330, 0, step | {"optimizer": "sgd"}, "peak_mib is 330, the weights alone are 334"),
        ):  # fmt: skip
            for value, want in ((most, ""), (beyond, words)):
                value = dict(min=value, median=value) if key == "ms" else value
                record = {"machine": "NVIDIA H200", "device": "cuda", key: value, "case": MODEL | case}
                self.assertEqual(impossible(record, flops), want, record)
        elsewhere = {"machine": "CPU", "case": MODEL | step, "tflops": 1e9, "gb_s": 1e9}
        for ms, want in ((1e-4, ""), (9e-5, "ms.min is 9e-05, needs 0.0001 at least")):
            self.assertEqual(impossible(elsewhere | {"ms": dict(min=ms, median=ms), "peak_mib": 331}), want)
        self.assertEqual(impossible(elsewhere | {"case": MODEL | {"ranks": 2}, "peak_mib": 1}), "")

    def test_the_least_work_of_a_rank_s_step(self):
        case = MODEL | dict(ranks=2, batch=4, context=512, optimizer="adamw")
        self.assertAlmostEqual(step_gflop(case), 6e-9 * 77_358_080 * 4 * 512 / 2)
        for other in ({"pass": "step"} | case, *({k: case[k] for k in case if k != gone} for gone in case)):
            self.assertEqual(step_gflop(other) == 0, "dtype" in other, other)


if __name__ == "__main__":
    unittest.main()
