"""Groups of ranks: a rank's answer becomes a result of the case, and no rank process is left over."""

import itertools
import multiprocessing
import os
import tempfile
import time
import unittest
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import parity_double
import torch
from parity_double.fakes import trouble

from parity import ddp, shard
from parity.core import rank, ranks
from parity.core.case import Case
from parity.core.draw import Draw
from parity.core.worker import Settings, Worker
from parity.shared.bench_ranks import elements_of
from ref import shard as ref
from tandem.library import default_library

ROOT = Path(__file__).resolve().parents[1]
FAKES = "parity_double.fakes.trouble"


def children(folder):
    """Returns the processes that have this folder as an argument."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(process.name)
        except OSError:
            continue
    return found


class Groups(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        library = parity_double.build(folder)
        cls.settings = Settings(library, 1, 0.01, wait=3.0)

    def test_a_rank_that_died_is_named_before_silent_ones(self):
        group, ends = ranks.Group.__new__(ranks.Group), [multiprocessing.Pipe() for _ in range(3)]
        group.ranks, group._pipes = 3, {number: mine for number, (mine, _) in enumerate(ends)}
        ends[1][1].close()
        short = unittest.mock.patch.multiple(ranks, CASE_S=0.1, REST_S=0.1)
        with short, self.assertRaisesRegex(ranks.GroupError, "^rank 1 of 3 died$"):
            group.run(FAKES, trouble.case_of("ranks"))

    def test_a_case_is_what_all_ranks_make_of_it(self):
        with Worker(self.settings) as worker:
            fine, wrong, died = (
                worker.run(FAKES, trouble.case_of(way)) for way in ("ranks", "rank_wrong", "rank_dies")
            )
            self.assertEqual([(r["impl"], r["status"]) for r in fine], [("torch_eager", "ok"), ("c", "ok")])
            self.assertEqual({r["case"]["ranks"] for r in fine}, {2})
            self.assertEqual([r["status"] for r in wrong], ["ok", "failed"])
            self.assertRegex(wrong[1]["message"], "^rank 1: .*1 of 64 elements")
            self.assertGreater(wrong[1]["error"]["max_abs"], 1e-4)
            self.assertEqual([(r["impl"], r["status"]) for r in died], [("c", "error")])
            self.assertRegex(died[0]["message"], "^rank [01] of 2 died$")
            # a new group of ranks
            self.assertEqual(worker.run(FAKES, trouble.case_of("ranks"))[1]["status"], "ok")
            folder = worker._groups[2]._folder.name
            self.assertNotEqual(children(folder), [])
            late = worker.run(FAKES, trouble.case_of("rank_late"))
            self.assertEqual(late[1]["status"], "error")
            self.assertIn(
                "rank 0: TimeoutError: rank 1 of 2 did not come to a call in 3 s", late[1]["message"]
            )
            end = time.monotonic() + 10  # mpirun was killed before its ranks
            while children(folder) and time.monotonic() < end:
                time.sleep(0.1)
            self.assertEqual(children(folder), [])
            self.assertFalse(Path(folder).exists())

    def test_ranks_that_cannot_start(self):
        with self.assertRaisesRegex(ranks.GroupError, "a rank ended with status 2 before it was ready"):
            ranks.Group(1, self.settings, "calendar")  # its argument is no year
        with self.assertRaisesRegex(
            ranks.GroupError, "could not start: FileNotFoundError: no library at /none"
        ):
            ranks.Group(1, Settings(Path("/none"), 1, 0.01))

    def test_more_ranks_than_gpus(self):
        with unittest.mock.patch("torch.cuda.device_count", return_value=2):
            self.assertEqual(ranks.missing(Case("trouble", ranks=2), "cuda"), "")
            worker = Worker(Settings(Path("/none"), 1, 0.01, device="cuda"))
            found = worker.run(FAKES, Case("trouble", way="ranks", ranks=4))
        self.assertEqual(
            (found[0]["status"], found[0]["message"]), ("unsupported", "4 ranks need 4 GPUs, here are 2")
        )
        self.assertEqual(ranks.missing(Case("trouble", ranks=64), "cpu"), "")

    def test_ranks_that_share_a_gpu(self):
        share = unittest.mock.patch.dict("os.environ", TD_SHARE_GPU="1")
        with unittest.mock.patch("torch.cuda.device_count", return_value=2), share:
            self.assertEqual(ranks.missing(Case("trouble", ranks=4), "cuda"), "")
            timed = Case("trouble", ranks=4, measure="time")
            self.assertEqual(ranks.missing(timed, "cuda"), "ranks share a GPU: times would say nothing")
            self.assertEqual([ranks.gpu_of(rank) for rank in range(3)], ["cuda:0", "cuda:1", "cuda:0"])
            hosts = {ranks.rank_variables(rank, 4)["NCCL_HOSTID"] for rank in range(4)}
        self.assertEqual(len(hosts), 4)
        self.assertNotIn("NCCL_HOSTID", ranks.rank_variables(0, 4))


class Toys(unittest.TestCase):
    def test_ranks_begin_with_different_weights(self):
        # so that a library that sends none is noticed
        case, begun = next(case for case in ddp.cases("quick", "cpu") if "model" in case), []
        container = unittest.mock.Mock(side_effect=lambda *how: begun.append(how[-1].state_dict()) or 1 / 0)
        with unittest.mock.patch.object(ddp, "Container", container):
            for rank in range(2):
                sides = ddp.toys(case, Draw("toys"), unittest.mock.Mock(**{"ranks.rank": rank}))
                self.assertRaises(ZeroDivisionError, sides["c_gloo"])
        for name in [name for name in begun[0] if "weight" in name]:
            self.assertFalse(torch.equal(begun[0][name], begun[1][name]))


class Switches(unittest.TestCase):
    def test_gradients_of_several_micro_batches_are_held(self):
        every = itertools.product((ddp, shard), ("quick", "full"), ("cpu", "cuda"))
        cases = [case for module, *how in every for case in module.cases(*how) if "micro_batches" in case]
        kept = {of["gradients"] for case in cases for of in case.config.values() if "gradients" in of}
        self.assertEqual(kept, {"held"})


class Memory(unittest.TestCase):
    """On a CPU the bytes of two ranks are exact: each rank's tensors, and what C says of fully sharded weights."""

    def test_each_rank_has_its_share(self):
        cases = {case.shard: case for case in shard.cases("quick", "cpu") if case.get("part") == "memory"}
        elements, parts = elements_of(cases["tensors"]), ("parameters", "gradients", "optimizer_state")
        counts = [count for count, _ in elements]
        with Worker(Settings(default_library(), 1, 0.01)) as worker:
            found = [
                record for kind in ("tensors", "full") for record in worker.run("parity.shard", cases[kind])
            ]
        for record in found:
            self.assertEqual(record["status"], "ok", record.get("message"))
            memory = {key: [round(mib * 2**20) for mib in of] for key, of in record["memory"].items()}

            def total(*names, memory=memory):
                return [sum(of) for of in zip(*(memory[f"{name}_mib"] for name in names), strict=True)]

            if record["impl"].startswith("c"):
                wanted = [total(*parts, "activations", "buffers")] * 4
                self.assertGreater(record["collective_bytes"], 4 * sum(counts))
            else:
                wanted = [total("parameters"), total(*parts), total(*parts), total(*parts, "activations")]
            self.assertEqual([total(at) for at in ("made", "before_update", "after_update", "peak")], wanted)
            if record["case"]["shard"] == "tensors":
                shares = [[4 * sum(counts)] * 2, [8 * load for load in ref.loads(counts, 2)]]
                self.assertEqual([total("parameters"), total("optimizer_state")], shares)
            for part in parts if "values" in record else ():
                self.assertAlmostEqual(total(part)[1] / record["values"][f"predicted {part}"], 1, delta=1e-3)


class Combined(unittest.TestCase):
    def test_the_worst_rank_counts(self):
        def record(status, rel_l2=None, message=None, seconds=1.0, ms=2.0):
            found = {"impl": "c", "status": status, "seconds": seconds, "ms": {"median": ms}}
            found |= {"error": {"rel_l2": rel_l2}} if rel_l2 is not None else {}
            return found | ({"message": message} if message else {})

        ranked = [[record("ok", 1e-7)], [record("ok", 3e-7, seconds=2.0)], [record("ok", 2e-7)]]
        self.assertEqual(ranks.combined(ranked), [record("ok", 3e-7, seconds=2.0)])
        order = ("error", "failed", "oom", "not run", "unsupported", "ok")
        for worse, better in itertools.combinations(order, 2):
            ranked = [record(better, 9.0, "b"), record(worse, None, "w"), record(worse, 1.0, "x", 3.0, 9.0)]
            for at, of in ((2, ranked), (1, [*ranked[:2], ranked[1]])):
                wanted = {"error": {"rel_l2": 9.0}} | of[at] | {"ms": {"median": 2.0}}
                wanted["message"] = f"rank {at}: {of[at]['message']}"
                self.assertEqual(ranks.combined([[one] for one in of]), [wanted])


class Together(unittest.TestCase):
    def test_all_get_the_largest_and_the_one_that_does_not_come_is_named(self):
        folder, values = self.enterContext(tempfile.TemporaryDirectory()), torch.randn(40, 3).tolist()
        path = Path(folder, "page")

        def largest(me):
            together = rank.Together(path, me, 3, 9.0)
            return [together.largest(row[me]) for row in values]

        with ThreadPoolExecutor(3) as pool:
            self.assertEqual([*pool.map(largest, range(3))], [[*map(max, values)]] * 3)
        late = rank.Together(path.with_name("another"), 0, 3, 0.05)
        self.assertRaisesRegex(TimeoutError, "rank 1 of 3 did not come to a call in 0.05 s", late.barrier)

    def test_a_sample_is_the_slowest_rank_s(self):
        seen = unittest.mock.Mock(**{"together.largest.return_value": 6.0})
        self.assertEqual(rank.RankDevice(seen.device, seen.together).timed_ms(seen.call, 3), (2.0, 0.0))
        names = [f"{name}{how or ''}" for name, _, how in seen.mock_calls]
        before = ["device.synchronize", "together.barrier{'exact': True}", *["call"] * 3]
        self.assertEqual(names, [*before, "device.synchronize", "together.largest"])


if __name__ == "__main__":
    unittest.main()
