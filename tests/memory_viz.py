"""Reads snapshots of `tandem memory` with PyTorch's tools, as its viewer does.

Run by CTest as  python memory_viz.py PATH_OF_TANDEM  with the Python that has PyTorch.
"""

import collections
import itertools
import json
import pickle
import pickletools
import re
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree
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
COLOURS = ("#4477aa", "#ee6677", "#ccbb44", "#228833", "#aaaaaa")
CATEGORIES = ("weights", "gradients", "optimizer state", "activations", "scratch")
# What a tensor's name says; the first rule that fits.
RULES = (
    (r"\.weight(\.high|\.low)?$", "weights"),
    (r"\.weight\.grad$", "gradients"),
    (r"\.exp_avg(_sq)?$", "optimizer state"),
    (r"\.grad$|(^|\.)(ids|targets|work|step)$|^rope\.", "scratch"),
    ("", "activations"),
)

tandem = ""


def frames_of(label):
    parts = label.split("/")
    frames = [{"filename": "/".join(parts[:i]), "line": 0, "name": part} for i, part in enumerate(parts)]
    return frames[::-1] if label else []


def trace_of(events):
    """(time_ns, event of the snapshot without its time) of every event."""
    words = {"alloc": ["segment_alloc"], "live": ["alloc"], "dead": ["free_requested", "free_completed"]}
    first = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown"}
    found = [(events["phases"][0]["begin_ns"], first)]
    for event in events["events"]:
        of = {"addr": event["address"], "size": event["bytes"], "stream": 0, "category": event["category"]}
        of["frames"] = frames_of(event["label"])
        found += [(event["time_ns"], {"action": word} | of) for word in words[event["action"]]]
    return found


def block_of(address, size, label=None):
    state = "inactive" if label is None else "active_allocated"
    of = {"address": address, "size": size, "requested_size": 0 if label is None else size}
    return of | {"state": state, "frames": frames_of(label or "")}


def snapshot_of(events, trace):
    """The whole snapshot of a recording whose blocks all exist at the end."""
    left = sorted((e for e in events if e["pair"] is None and e["bytes"]), key=lambda e: e["address"])
    segments = []
    for segment in (e for e in left if e["action"] == "alloc"):
        begin, size = segment["address"], segment["bytes"]
        inside = [e for e in left if e["action"] == "live" and begin <= e["address"] < begin + size]
        blocks, at, sums = [], begin, ("allocated_size", "active_size", "requested_size")
        for e in inside:
            blocks += [block_of(at, e["address"] - at), block_of(e["address"], e["bytes"], e["label"])]
            at = e["address"] + e["bytes"]
        blocks.append(block_of(at, begin + size - at))
        of = {"device": 0, "stream": 0, "segment_pool_id": (0, 0), "is_expandable": False}
        of |= {"address": begin, "total_size": size, "frames": frames_of(segment["label"])}
        of |= dict.fromkeys(sums, sum(e["bytes"] for e in inside))
        of |= {"segment_type": "large" if size > 2**20 else "small"}
        segments.append(of | {"blocks": [block for block in blocks if block["size"]]})
    more = {"allocator_settings": {}, "external_annotations": []}
    return {"segments": segments, "device_traces": [trace]} | more


def columns_of(rows, column):
    """Of each column of the picture: live bytes by category, and allocated bytes, as the last event with the most live
    bytes left them."""
    found, now, live, i = [], (0, 0, {}), collections.Counter(), 0
    for at in range(880):
        chosen, allocated = now, now[1]
        while i < len(rows) and column(i) == at:
            live[rows[i]["category"]] += {"live": 1, "dead": -1}.get(rows[i]["action"], 0) * rows[i]["bytes"]
            now = rows[i]["live_bytes"], rows[i]["allocated_bytes"], live.copy()
            if now[0] >= chosen[0]:
                chosen, allocated = now, max(allocated, now[1])
            i += 1
        found.append(([chosen[2].get(category, 0) for category in CATEGORIES], allocated))
    return found


class VizTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.texts = {}
        for name, way in WAYS.items():
            files = ["--snapshot", cls.path(name, "pickle"), "--events", cls.path(name, "json")]
            files += ["--timeline", cls.path(name, "svg")]
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

    def test_the_snapshot_is_the_events(self):
        for name, events, snapshot in self.each():
            trace, wanted = snapshot["device_traces"][0], trace_of(events)
            self.assertIn(f"\n{len(events['events'])} events, {len(trace)} in a snapshot\n", self.texts[name])
            self.assertIn(f"\n{len(trace)} entries\n", _memory_viz.trace(snapshot))
            epochs = [e.pop("time_us") * 1000 - at for e, (at, _) in zip(trace, wanted, strict=True)]
            self.assertLess(max(epochs) - min(epochs), 1000)  # one clock, in whole microseconds
            self.assertLess(abs(min(epochs) + wanted[0][0] - time.time_ns()), 3600 * 10**9)
            self.assertEqual(snapshot, snapshot_of(events["events"], [event for _, event in wanted]))
            for frame in itertools.chain(*(event["frames"] for event in trace)):
                self.assertTrue(_memory_viz._frame_filter(frame["name"], frame["filename"]))

    def test_the_picture_is_the_events(self):
        for name, events, _ in self.each():
            picture, rows = self.path(name, "svg").read_text(), events["events"]
            xml.etree.ElementTree.fromstring(picture)  # refuses what is no XML
            peak, most = events["live_peak_bytes"], 1.03 * events["peak_bytes"]

            def near(found, bytes, at, most=most):
                self.assertLess(abs(float(found) - (34 + 370 * (1 - bytes / most))), 0.06, at)

            def column(i, rows=rows):
                return int(i / len(rows) * 880)

            self.assertIn(f"<title>memory of one pass: {events['pass']}, on cpu</title>", picture)
            columns = columns_of(rows, column)
            bands = re.findall(r'<path fill="(#\w+)" d="M70 404.0([^"]*)Z"', picture)
            self.assertEqual(tuple(colour for colour, _ in bands), COLOURS)
            places = [(70 + at, 1) for at in range(880)] + [(950 - at, -1) for at in range(880)]
            for k, (_, path) in enumerate(bands):
                edge = re.findall(r"L(\d+) ([\d.]+)h(-?1)", path)
                self.assertEqual([(int(x), int(way)) for x, _, way in edge], places)
                for at, (live, _) in enumerate(columns):
                    near(edge[at][1], sum(live[: k + 1]), (k, at))
                    near(edge[-1 - at][1], sum(live[:k]), (k, at))
            (line,) = re.findall(r'stroke-dasharray="5 3" d="M70 [\d.]+(L[^"]*)"', picture)
            for at, y in enumerate(re.findall(r"L\d+ ([\d.]+)h1", line)):
                near(y, columns[at][1], at)
            x = 70 + column(max(range(len(rows)), key=lambda i: rows[i]["live_bytes"]))
            words = f'cx="{x}" cy="([\\d.]+)" r="4"/>\n<text x="{x + (-8 if x > 510 else 8)}" y="[\\d.]+" '
            words += f'text-anchor="{"end" if x > 510 else "start"}">peak {peak / 2**20:.1f} MiB<'
            (y,) = re.findall(words, picture)
            near(y, peak, "peak")
            ticks = re.findall(r'<text x="64" y="([\d.]+)" text-anchor="end">([\d.]+)</text>', picture)
            name, unit = ("MiB", 2**20) if most >= 2**22 else ("KiB", 2**10)
            self.assertIn(f">{name}</text>", picture)
            for y, value in ticks:
                near(float(y) - 4, float(value) * unit, value)
            self.assertTrue(4 <= len(ticks) <= 9 and float(ticks[-1][1]) * unit > 0.7 * most, ticks)
            legend = re.findall(r'height="12" fill="(#\w+)"/>\n<text [^>]*>([^<]+)<', picture)
            self.assertEqual(legend, [*zip(COLOURS, CATEGORIES, strict=True)])
            words = re.findall(r'<text x="(\d+)" y="\d+"[^>]*>(blocks|event)<', picture)
            self.assertEqual(words, [("750", "blocks"), ("510", "event")])
            found = r'<rect x="(\d+)" y="14" width="(\d+)" [^>]*>\n<text x="(\d+)"[^>]*>(\w+)<'
            ends = [(70 + column(of["first"]), 70 + column(of["end"]), of["name"]) for of in events["phases"]]
            wanted = [(str(x), str(end - x), str((x + end) // 2), word) for x, end, word in ends if end > x]
            self.assertEqual(re.findall(found, picture), wanted)
            fills = ["e6ebf2", "f3f3f3", "e6ebf2", "f3f3f3"][: len(wanted)]
            self.assertEqual(re.findall(r' y="14" [^>]*fill="#(\w+)"', picture), fills)

    def test_names_have_their_categories(self):
        for name, events, _ in self.each():
            live = [event for event in events["events"] if event["action"] == "live"]
            words = {event["label"].rpartition("/")[2]: event["category"] for event in live}
            for word, category in words.items():
                self.assertEqual(category, next(of for rule, of in RULES if re.search(rule, word)), word)
            low, high = ([w[: -len(end)] for w in words if w.endswith(end)] for end in (".low", ".high"))
            self.assertEqual((low, len(low)), (high, (40 * 7 + 1) * (name == "forward")))


if __name__ == "__main__":
    tandem = sys.argv.pop(1)
    unittest.main()
