"""Reads snapshots of `tandem memory` with PyTorch's tools, as its viewer does.

Run by CTest as  python memory_viz.py PATH_OF_TANDEM  with the Python that has PyTorch.
"""

import base64
import json
import pickle
import pickletools
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from torch.cuda import _memory_viz

MODEL = "--d-model 16 --d-ff 24 --layers 40 --heads 2 --vocab 17 --batch 2 --context 8".split()
WAYS = {
    "along": [],
    "after": ["--update", "after", "--gradients", "held", "--attention", "naive"],
    "inference": ["--pass", "inference"],
    "forward": ["--pass", "forward", "--dtype", "bf16_mixed"],
    "checkpoints": ["--keep", "inputs", "--checkpoint-layers", "3"],
}
# The opcodes that a snapshot needs and that the viewer's reader of pickles knows
# (torch/utils/viz/MemoryViz.js).
OPCODES = set(
    """PROTO STOP MARK EMPTY_DICT EMPTY_LIST SETITEMS APPENDS TUPLE2 NEWTRUE NEWFALSE BININT LONG1 BINUNICODE
    LONG_BINPUT LONG_BINGET""".split()
)
MOST_AT_ONCE = 1000  # items of a batch: the viewer passes them as arguments on its stack
CATEGORIES = {"weights", "gradients", "optimizer state", "activations", "scratch", "unknown"}
# events in a snapshot for each of our events
ACTIONS = {"alloc": 1, "free": 1, "live": 1, "dead": 2, "oom": 0}

tandem = ""


class VizTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.texts = {}
        for name, way in WAYS.items():
            files = ["--snapshot", cls.path(name, "pickle"), "--events", cls.path(name, "json")]
            done = subprocess.run(
                [tandem, "memory", *MODEL, *way, *files], capture_output=True, text=True, timeout=300
            )
            if done.returncode != 0 or done.stderr:
                raise AssertionError(f"{name}: {done.stderr}")
            cls.texts[name] = done.stdout

    @classmethod
    def path(cls, name, kind):
        return cls.folder / f"{name}.{kind}"

    def each(self):
        for name in WAYS:
            with self.subTest(way=name):
                events = json.loads(self.path(name, "json").read_text())
                yield name, events, pickle.loads(self.path(name, "pickle").read_bytes())

    def test_pytorch_counts_the_events_that_we_count(self):
        for name, events, snapshot in self.each():
            wanted = 1 + sum(ACTIONS[event["action"]] for event in events["events"])
            (said,) = re.findall(r"^(\d+) events, (\d+) in a snapshot$", self.texts[name], re.MULTILINE)
            self.assertEqual((int(said[0]), int(said[1])), (len(events["events"]), wanted))
            counted = re.findall(r"^(\d+) entries$", _memory_viz.trace(snapshot), re.MULTILINE)
            self.assertEqual(counted, [str(wanted)])

    def test_trace_plot_makes_a_page_that_holds_the_snapshot(self):
        for _, _, snapshot in self.each():
            page = _memory_viz.trace_plot(snapshot)
            (files,) = re.findall(r"const local_files = (\[.*\])\n", page)
            (file,) = json.loads(files)
            self.assertEqual(pickle.loads(base64.b64decode(file["base64"])), snapshot)

    def test_the_other_tools_take_it(self):
        command = [sys.executable, "-m", "torch.cuda._memory_viz", "stats", self.path("after", "pickle")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        self.assertIn("total_reserved", done.stdout)

    def test_only_what_the_viewers_reader_knows(self):
        for name in WAYS:
            depth, items = [], 0
            for op, argument, _ in pickletools.genops(self.path(name, "pickle").read_bytes()):
                self.assertIn(op.name, OPCODES)
                if op.name == "PROTO":
                    self.assertEqual(argument, 2)
                if op.name in ("BININT", "LONG1"):
                    self.assertTrue(0 <= argument < 2**53)
                if op.name == "MARK":
                    depth.append(items)
                    items = 0
                elif op.name in ("APPENDS", "SETITEMS"):
                    self.assertLessEqual(items, MOST_AT_ONCE)
                    items = depth.pop()
                elif op.name == "TUPLE2":
                    items -= 1
                elif op.name not in ("PROTO", "LONG_BINPUT", "STOP"):
                    items += 1

    def test_replaying_it_gives_the_peak(self):
        for _, events, snapshot in self.each():
            (trace,) = snapshot["device_traces"]
            live, alive, peak, segments = 0, {}, 0, {}
            for event in trace:
                if event["action"] == "segment_alloc":
                    segments[event["addr"]] = event["size"]
                if event["action"] == "alloc":
                    self.assertNotIn(event["addr"], alive)
                    alive[event["addr"]] = event["size"]
                    live += event["size"]
                if event["action"] == "free_completed":
                    self.assertEqual(alive.pop(event["addr"]), event["size"])
                    live -= event["size"]
                peak = max(peak, live)
            self.assertEqual(peak, events["live_peak_bytes"])
            self.assertEqual(sum(segments.values()), events["peak_bytes"])
            self.check_segments(snapshot["segments"], segments, alive)

    def check_segments(self, found, segments, alive):
        """The segments must be the blocks that exist at the end. Live and free parts must cover each of them."""
        self.assertEqual({segment["address"]: segment["total_size"] for segment in found}, segments)
        blocks = {}
        for segment in found:
            at, active = segment["address"], 0
            for block in segment["blocks"]:
                self.assertEqual(block["address"], at)
                at += block["size"]
                if block["state"] == "active_allocated":
                    blocks[block["address"]] = block["size"]
                    active += block["size"]
                    self.assertTrue(block["frames"])
            self.assertEqual(at, segment["address"] + segment["total_size"])
            self.assertEqual(active, segment["allocated_size"])
        self.assertEqual(blocks, alive)

    def test_events_carry_categories_and_labels(self):
        for _, events, snapshot in self.each():
            (trace,) = snapshot["device_traces"]
            # the viewer reads categories only if the first event has one
            self.assertEqual(trace[0]["category"], "unknown")
            self.assertLessEqual({event["category"] for event in trace}, CATEGORIES)
            times = [event["time_us"] for event in trace]
            self.assertEqual(times, sorted(times))
            labels = {event["label"] for event in events["events"]}
            frames = {"/".join(reversed([frame["name"] for frame in event["frames"]])) for event in trace[1:]}
            self.assertEqual(frames, labels)
            for event in trace[1:]:
                for frame in event["frames"]:
                    self.assertTrue(_memory_viz._frame_filter(frame["name"], frame["filename"]))


if __name__ == "__main__":
    tandem = sys.argv.pop(1)
    unittest.main()
