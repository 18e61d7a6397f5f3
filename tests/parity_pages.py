"""The pages of parity/<module>.py are written from any records: all, some, or records without a number. The tests use
the committed records and invented records of a GPU. A seeded choice removes and damages some of them."""

import contextlib
import copy
import io
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from parity import attention, bench, memory, trace, transformer
from parity.bench import classes, drivers
from parity.bench import page as bench_page
from parity.core import Case, grid, plot, report, sweep, words
from parity.core.clock import statistics
from parity.core.command import main
from parity.core.document import Figure, Tabled
from parity.core.draw import Draw
from parity.core.measure import measure_case
from parity.core.record import FILE, load
from parity.core.report import Page
from parity.core.tables import PREAMBLE, Spread, Table
from parity.core.view import Records
from parity.shared.model import TandemTrainer
from tandem.library import Library, default_library

COMMITTED = Path(__file__).resolve().parents[1] / "reports" / "cpu" / FILE
NEWEST = load(COMMITTED).newest()
WRITTEN = Path(__file__).resolve().parent / "files" / "pages.md"
MEASURED = """ms error peak_mib requested_mib tflops gb_s samples first_ms ratio values series dtypes lists
phases""".split()
TRIALS = 12
CHOSEN = ("attention", "bench", "comm", "ddp", "memory", "shard", "trace")
TIMELINES = ("ddp", "memory", "shard")
RANKED = ("ddp", "shard")  # in these modules each case has other sides
COMMUNICATION = "step without exposed collectives beside tail".split()
# The sides that pages read. IMPLS has the modules whose pages read others.
SIDES = ["c", "torch_eager"]
IMPLS = {
    "memory": ["c", "c_naive", "torch_eager"],
    "ops": ["c", "torch_eager", "torch_compile", "torch_library"],
    "flash": ["c", "c_naive", "torch_eager", "torch_flash", "torch_cudnn", "torch_efficient"],
    "attention": ["c", "c_flash", "torch_eager", "torch_compile"],
    "transformer": ["c", "c_graph", "torch_eager", "torch_eager_f32", "torch_eager_seed"],
    "bench": list(bench_page.CHANGES),
}
VALUES = """tokens flops account_mib saved_mib matrix_mib flash_mib forward_peak_mib backward_peak_mib end_80_gib
bytes largest mean
furthest_grad_rel_l2 furthest_weight_rel_l2 swapped""".split()


# A number that is no part of a name such as bf16, 2.7B or H100.
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w|\.\d)")


def beyond_limits(sentence):
    """Whether a sentence has more than 25 words or 5 numbers; what is set as code counts, too."""
    return len(sentence.split()) > 25 or len(NUMBER.findall(sentence)) > 5


class PagesTest(unittest.TestCase):
    def test_every_page_survives_missing_and_failed_records(self):
        self.assertGreater(len(NEWEST), 100)
        for name, module in sweep.discover("parity").items():
            mine = [record for record in NEWEST if record["module"] == name]
            # a new module may have no results yet; ci/check/rooms.py checks that the map says so
            if not mine:
                mine = [
                    invented(name, case, impl, gpu=False)
                    for case in module.cases("full", "cpu")
                    for impl in IMPLS.get(name, SIDES)
                ]
            for trial in range(TRIALS):
                with self.subTest(module=name, trial=trial):
                    self.write(module, name, thinned(mine, random.Random(f"{name} {trial}")))

    def test_every_page_is_written_from_the_records_of_every_profile(self):
        for name, module in sweep.discover("parity").items():
            if name in ("accounting", "precision"):
                continue  # arithmetic has no device
            for profile, device in (("quick", "cpu"), ("quick", "cuda"), ("full", "cuda")):
                mine = all_invented(name, module, profile, device)
                if not mine:
                    continue
                page = self.write(module, name, mine)
                if (profile, device) == ("full", "cuda"):
                    rows = {section.row for section in page.sections} | {"method"}
                    headings = {
                        re.sub(r" working$|^(method) .*", r"\1", row) for row in words.templates(name)
                    }
                    self.assertLessEqual(headings, rows)
                if (profile, device) == ("full", "cuda") and name in ("bench", "trace", *TIMELINES):
                    for section in page.sections:
                        lacks = [what for what in section.lacks if "naive's" not in what]  # of random times
                        self.assertEqual(lacks, [], f"{name}, {section.row}")
                for trial in range(TRIALS // 4):
                    with self.subTest(module=name, profile=profile, device=device, trial=trial):
                        self.write(module, name, thinned(mine, random.Random(f"{name} {trial}")))

    def write(self, module, name, records):
        page = Page(name, "NVIDIA H100")
        module.report(page, Records(records))
        for section in page.sections:
            self.assertTrue(section.question)
            for sentence in [*section.answer, *section.notes]:
                self.assertFalse(beyond_limits(sentence), sentence)
                self.assertNotRegex(sentence, r"\bnan\b|None|\{")
        for section in page.shown():
            for block in section.blocks:
                if isinstance(block, Tabled):
                    self.assertTrue(block.table.rows and block.table.titles)
        return page


DECIMAL = re.compile(r"-?\d+\.\d+(?:e-\d+)?")


class Committed(unittest.TestCase):
    """The pages in reports/ are what `parity report --machine NAME` and `parity writeup` make of the records there."""

    def test_the_pages_are_what_the_records_say(self):
        committed, written = COMMITTED.parents[1], Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(contextlib.redirect_stdout(io.StringIO()))
        for path in committed.glob(f"[!l]*/{FILE}"):
            (written / path.parent.name).mkdir()
            shutil.copy(path, written / path.parent.name)
            with patch.object(Figure, "saved", return_value=b"the write-up draws most pictures again"):
                how = ["report", "--machine", path.parent.name, "--reports", str(written)]
                self.assertEqual(main("parity", how), 0)
        self.assertEqual(main("parity", ["writeup", "--reports", str(written)]), 0)
        there, here = ({path.relative_to(of) for path in of.rglob("*.*")} for of in (committed, written))
        self.assertEqual(here, {path for path in there if not path.parts[0].startswith("local")})
        for path in [path for path in sorted(here) if path.suffix == ".md" or path.parent.name == "figures"]:
            texts = [(of / path).read_text() for of in (committed, written)]
            numbers = [[float(number) for number in DECIMAL.findall(text)] for text in texts]
            if path.suffix == ".svg":  # the last digits of a place depend on the processor
                texts = [DECIMAL.sub("#", text) for text in texts]
            for old, new in zip(*map(str.splitlines, texts), strict=True):
                self.assertEqual(old, new, f"{path}: python -m parity report and writeup renew it")
            self.assertTrue(all(abs(a - b) < 0.01 for a, b in zip(*numbers, strict=True)), path)


class Invented(unittest.TestCase):
    """Pages and write-ups of invented records, of which some are noisy or have no number, are those that
    `python tests/parity_pages.py renew` wrote."""

    def test_pages_are_as_they_were(self):
        for old, new in zip(WRITTEN.read_text().splitlines(), written().splitlines(), strict=True):
            self.assertEqual(old, new, f"{WRITTEN}: python tests/parity_pages.py renew")


def written():
    """The text of all pages with few rows of each table, and a number for the content of each picture."""
    modules, render, texts = sweep.discover("parity"), Table._md, []

    def few(table):
        shown = copy.copy(table)
        shown.rows = table.rows[:: max(1, len(table.rows) // 5)]
        return render(shown)

    def content(kind):
        def told(content, **how):  # the last digits depend on the processor
            return DECIMAL.sub(lambda found: f"{float(found[0]):.4g}", json.dumps([kind, str(content), how]))

        return told

    kinds = {kind: content(kind) for kind in ("curves", "stack", "timeline", "bars")}
    draw = patch.multiple(plot, save=lambda drawn, form: drawn.encode(), **kinds)
    quiet = contextlib.redirect_stdout(io.StringIO())
    with patch.object(Table, "_md", few), draw, quiet, tempfile.TemporaryDirectory() as folder:
        reports = Path(folder)
        for machine in ("cpu", "h100", "h200x2"):
            rng, records = random.Random(machine), []
            for name, module in modules.items():
                mine = [record for record in NEWEST if record["module"] == name]
                if name not in ("accounting", "precision"):
                    mine = all_invented(name, module, "full", "cpu" if machine == "cpu" else "cuda")
                records += [record | {"machine": machine} for record in thinned(mine, rng, 0.75)]
            report.write(modules, records, reports / machine, gone=records[::40], single=machine == "h200x2")
            (reports / machine / FILE).write_text("".join(json.dumps(record) + "\n" for record in records))
        main("parity", ["writeup", "--reports", folder])
        for path in sorted(reports.rglob("*.*")):
            if path.suffix == ".svg":
                texts.append(f"{path.name}: {zlib.crc32(path.read_bytes())}\n")
            elif path.suffix == ".md" and path.parent.name not in ("cpu", "h200x2"):
                texts.append(path.read_text())
    return "".join(texts)


def thinned(records, rng, share=None):
    """A share of the records, else a few, half or all, each with its origin. A tenth has no number, a tenth is
    noisy."""
    count = int(share * len(records)) if share else rng.choice([1, 2, 5, len(records) // 2, len(records)])
    kept = [dict(record) for record in rng.sample(records, min(count, len(records)))]
    for i, record in enumerate(kept):
        record["time"] = f"2026-01-{1 + i % 28:02}T00:00:00"
        record["build"] = {"library": "lib", "version": "1", "commit": 40 * "c", "dirty": i % 7 == 0}
        chance = rng.random()
        if chance < 0.1:
            record["status"], record["message"] = rng.choice(["oom", "not run", "error", "failed"]), "spoiled"
            for key in MEASURED:
                record.pop(key, None)
        elif chance < 0.2 and "ms" in record:
            record |= {"ms": statistics([1.0, 3.0]), "samples": [1.0, 3.0]}
    return kept


class Apart(unittest.TestCase):
    def assert_apart(self, figure):
        """Returns the boxes of title, machine, legend and axes with their labels."""
        figure.canvas.draw()
        renderer = figure.canvas.get_renderer()
        boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in figure.texts]
        boxes += [("legend", legend.get_window_extent(renderer)) for legend in figure.legends]
        boxes += [(f"axes {i}", axes.get_tightbbox(renderer)) for i, axes in enumerate(figure.axes)]
        width, height = figure.canvas.get_width_height()
        for name, box in boxes:
            self.assertTrue(box.x0 >= -1 and box.x1 <= width + 1, f"{name} is cut: {box}")
            self.assertTrue(box.y0 >= -1 and box.y1 <= height + 1, f"{name} is cut: {box}")
        self.assert_none_over_another(boxes)
        for axes in figure.axes:
            texts = [axes.title, axes._left_title, *axes.texts, *axes.get_xticklabels()]
            drawn = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]
            self.assert_none_over_another(drawn)
        plot.plt.close(figure)

    def assert_none_over_another(self, boxes):
        for (one, a), (other, b) in itertools.combinations(boxes, 2):
            wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
            self.assertFalse(wide > 1 and high > 1, f"{one} lies over {other}")

    @staticmethod
    def pictures(pages):
        return [b for page in pages for s in page.shown() for b in s.blocks if isinstance(b, Figure)]


class Timelines(Apart):
    """Invented records of a GPU: memory by category, kernels, and ranks by strategy."""

    def test_they_are_drawn(self):
        modules = {name: module for name, module in sweep.discover("parity").items() if name in TIMELINES}
        records = [r for name, module in modules.items() for r in all_invented(name, module, "full", "cuda")]
        pages, broken = report.pages_of(modules, records)
        self.assertEqual(broken, [])
        drawn = {picture.name: picture for picture in self.pictures(pages.values())}
        for name in TIMELINES:
            self.assert_apart(drawn[f"{name}_timeline"].draw())

    def test_a_phase_without_events_has_no_band(self):
        bands = {"create": 0.03, "forward": 0.5, "backward": 1.0, "optimizer": 0.0}
        figure = plot.stack({"": ({"weights": [1.0, 2.0, 1.0]}, bands)}, x="x", y="y", title="t")
        boxes = [patch.get_bbox() for patch in figure.axes[0].patches]
        self.assertEqual([(box.x0, box.x1) for box in boxes], [(0, 3), (3, 50), (50, 100)])
        plot.plt.close(figure)


class Drawn(Apart):
    """The tables and pictures of committed records."""

    @classmethod
    def setUpClass(cls):
        chosen = {name: module for name, module in sweep.discover("parity").items() if name in CHOSEN}
        pages, broken = report.pages_of(chosen, NEWEST)
        assert not broken, broken
        cls.pages = list(pages.values())

    @unittest.skipUnless(shutil.which("pdflatex"), "no pdflatex: apt-get install texlive-latex-recommended")
    def test_latex_tables_fit_the_page(self):
        tables = [tabled for page in self.pages for _, tabled in page.more]
        blocks = [block for page in self.pages for section in page.shown() for block in section.blocks]
        tables += [block for block in blocks if isinstance(block, Tabled)]
        self.assertGreater(len(tables), 20)
        inputs = "\n\n".join(of.table.render("latex", of.name, f"tab:{i}") for i, of in enumerate(tables))
        passes, sides = ("forward", "backward", "both"), ("c", "eager", "fused")
        row = {"dtype": "bf16", "head_dim": 16, "seq": 65536} | {
            f"{p} {s}": 0.00826 for p in passes for s in sides
        }
        row |= {
            "% of the bound, both": "70 %",
            "noisy": "forward eager, backward eager, both eager, both fused",
        }
        inputs += "\n\n" + Table([row] * 3).render("latex")
        head = [r"\documentclass[a4paper]{article}", r"\usepackage[margin=2.5cm]{geometry}", PREAMBLE]
        whole = "\n".join([*head, r"\begin{document}", inputs, r"\end{document}"])
        folder = self.enterContext(tempfile.TemporaryDirectory())
        Path(folder, "all.tex").write_text(whole)
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
        run = subprocess.run(command, cwd=folder, capture_output=True, encoding="latin-1")
        self.assertEqual(run.returncode, 0, run.stdout[-2000:])
        over = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt too wide", run.stdout)]
        self.assertLess(max(over, default=0.0), 5.0)

    def test_parts_of_a_picture_do_not_overlap(self):
        found = self.pictures(self.pages)
        self.assertGreater(len(found), 8)
        for picture in found:
            with self.subTest(picture=picture.name):
                self.assert_apart(picture.draw())


class Memory(unittest.TestCase):
    def test_a_pass_needs_the_memory_of_its_largest_side(self):
        peaks = {}
        for record in load(COMMITTED.parents[1] / "h100" / FILE).newest():
            case = record["case"]
            if case.get("part") == "peaks" and case["pass"] in ("forward", "step"):
                key = (case["size"], case["dtype"], case["context"], case["pass"])
                peaks[key] = max(peaks.get(key, 0), record.get("peak_mib") or 0)
        for key, peak in peaks.items():
            if peak:
                needs = memory.peaks_case("cuda", *key).needs_bytes / 2**20
                self.assertTrue(peak <= needs <= 1.05 * peak, f"{key}: {needs:.0f} for {peak:.0f} MiB")

    def test_the_memory_of_attention_is_measured_alone(self):
        with Library(default_library()).open() as c:
            for item in sweep.select({"attention": attention}, "quick", measures=["memory"]):
                sides = attention.run(item.case, Draw(item.name), c)
                mine, theirs = (sides[side].record["values"] for side in ("c", "torch_eager"))
                row = 8 * item.case.seq * 4 / 2**20
                matrix, four = item.case.seq * row, 4 * item.case.head_dim * row
                wanted = dict.fromkeys(("saved_mib", "account_mib"), matrix + four) | {
                    "flash_mib": four + row
                }
                self.assertEqual(mine, wanted)
                wanted = {"saved_mib": 2 * matrix + four + 3 * row, "account_mib": 2 * matrix + four}
                wanted |= dict(matrix_mib=matrix, forward_peak_mib=4 * matrix, backward_peak_mib=8 * matrix)
                self.assertEqual(theirs, wanted | {"end_80_gib": theirs["end_80_gib"]})

    def test_a_record_has_what_was_recorded(self):
        keys = dict(d_model=48, d_ff=100, layers=2, heads=3, vocab=57, batch=2, context=32, dtype="f32")
        how = dict(measure="memory", seconds=5, in_turn=True, config=memory.config_of("f32"), size="tiny")
        case = Case("memory_profiling", part="peaks", **how, **keys, **{"pass": "step"})
        block, mib, names = 4 * 48**2 + 3 * 48 * 100, 2**20, memory.CATEGORIES
        weights = 4 * (2 * (57 * 48 + block) + 5 * 48)
        self.enterContext(patch.object(memory, "POINTS", 7))  # the fullest moment of several counts
        *recorded, eager = measure_case(memory, case, Library(default_library()), budget=0.0)
        found = [eager["values"][name] for name in ("residual", "saved 1 name", "saved 1", "saved 5")]
        self.assertEqual(found, [2 * 32 * 48 * 4, "2x32x100", *[2 * 32 * 100 * 4] * 2])
        for found in recorded:
            values, series = found["values"], found["series"]
            most, parts = max(series["live_mib"]) * mib, (series[f"live {name}"] for name in names)
            self.assertEqual([*map(sum, zip(*parts, strict=True))], series["live_mib"])
            self.assertEqual(max(series["phase ends"]), 1.0)
            live, blocks = ([values[f"{of} {name}"] for name in names] for of in ("live", "blocks"))
            said = [values[name] for name in ("largest 1 name", "largest 1", "largest 1 count", "residual")]
            said += [values["block gradients"], values["live"], most, sum(blocks), live[0], live[2]]
            wanted = ["layers.*.ffn.gate_up", 2 * 32 * 200 * 4, 2, 2 * 32 * 48 * 4, 4 * (block + 2 * 48)]
            wanted += [sum(live), sum(live), found["peak_mib"] * mib, weights, 2 * weights]
            self.assertEqual(said, wanted)
            kept = {values[f"saved {i} name"]: values[f"saved {i}"] for i in range(1, 6)}
            self.assertEqual((len(kept), sum(kept.values()) < values["saved"]), (5, True))

    def test_the_furthest_tensor_is_relative_to_pytorch_s(self):
        mine, theirs = ({"a": torch.tensor([a]), "b": torch.tensor([b])} for a, b in ((9.0, 1.5), (8.0, 1.0)))
        found = transformer.furthest({"grad": {"c": mine, "torch": theirs}, "weight": {"c": mine}})
        self.assertEqual(found, {"furthest_grad": "b", "furthest_grad_rel_l2": 0.5})

    def test_the_sizes_of_both_sides_agree(self):
        case = next(case for case in memory.cases("quick", "cpu") if case.part == "sizes")
        found = measure_case(memory, case, Library(default_library()), budget=0.0)
        self.assertEqual(
            [(record["impl"], record["status"]) for record in found], [("c", "ok"), ("torch_eager", "ok")]
        )


class BenchOnAGpu(unittest.TestCase):
    def test_the_grid_is_whole_and_what_matters_most_comes_first(self):
        bench_grid = ("benchmarking_script", "benchmarking_mixed_precision")
        items = sweep.select({"bench": bench}, "full", device="cuda")
        compiled = [item.case for item in items[:5]]
        self.assertEqual({case.deliverable for case in compiled}, {"torch_compile"})
        self.assertEqual([case.size for case in compiled][:2], ["2.7B", "xl"])
        forward = [item.case for item in items[5:10]]
        self.assertEqual([case.size for case in forward], bench.GPU_SIZES)
        self.assertEqual({case["pass"] for case in forward}, {"inference"})
        rest = [item.case for item in items[10:]]
        steps = [case for case in rest if case["pass"] == "step" and case.deliverable in bench_grid]
        found = {(case.dtype, case.size, case.context) for case in steps}
        sizes, dtypes = ["small", "medium", "large", "xl", "2.7B"], ["f32", "tf32", "bf16_mixed"]
        cells = {tuple(keys.values()) for keys in grid(dtype=dtypes, size=sizes, context=bench.CONTEXTS)}
        cold = {(dtype, size, context) for dtype, context in bench.COLD for size in sizes}
        self.assertEqual(found, cells | cold)
        self.assertEqual({case.repeats for case in steps if case.warmup == 0}, {15})

    def test_steps_are_steady_if_all_means_are_there_and_near(self):
        near, far = [Spread(10.0, 0.5), Spread(10.4, 0.1)], Spread(11.0, 0.1)
        found = [bench_page.steady(means) for means in (near, [*near, None], [*near, far], [None])]
        self.assertEqual(found, [True, None, None, None])

    def test_sides_run_with_the_switches_that_their_records_name(self):
        c = MagicMock()
        c.side.return_value = c
        c.struct = lambda kind, case=None, **fields: fields
        gpu, cpu = (bench.whole("small"), bench.step("small", 128, "f32", "step", warmup=5, repeats=10))
        for case, impl, switches in (
            (gpu, "c_graph_overlap", dict(graph=True, keep="all", gradients="transient", update="along")),
            (gpu, "c_graph", dict(graph=True, keep="all", gradients="transient", update="after")),
            (gpu, "c", dict(graph=False, keep="all", gradients="transient", update="after")),
            (cpu, "c", dict(graph=False, keep="most", gradients="held", update="after")),
        ):
            with self.subTest(impl=impl, device="gpu" if case is gpu else "cpu"):
                self.assertEqual(case.config[impl], case.config[impl] | switches)
                driver = drivers.CDriver(case, c, impl, {}, None, None)
                config = driver.model.config
                self.assertEqual(config["model"]["keep"], switches["keep"])
                self.assertEqual(config["model"]["transient_gradients"], switches["gradients"] == "transient")
                self.assertEqual((config["time"], config["until"]), (switches["update"], "update"))
                self.assertEqual((config["capture"], driver.captured), (switches["graph"],) * 2)
                self.assertEqual(config["model"]["attention"], "flash")
                with patch.object(TandemTrainer, "step") as step, patch.object(TandemTrainer, "begin"):
                    driver.open_whole()
                self.assertEqual(step.call_count, 2 if switches["graph"] else 0)  # the second is captured
        graph, eager = (gpu.config[impl] for impl in ("torch_compile_graph", "torch_eager"))
        self.assertEqual((graph["compiled"], graph["graph"], graph["autocast"]), (True, True, True))
        self.assertEqual((eager["compiled"], eager["graph"], eager["attention"]), (False, False, "scores"))

    def test_a_forward_pass_runs_as_its_record_says(self):
        c = MagicMock()
        c.side.return_value = c
        c.struct = lambda kind, case=None, **fields: fields
        case = bench.whole("small", mode="inference")
        course = ["torch_eager", "torch_eager_attention", "torch_compile_course"]
        impls = ["c", *course, "torch_compile", "c_graph", "torch_compile_graph"]
        self.assertEqual(list(case.config), impls)
        for impl in ("c", "c_graph"):
            with self.subTest(impl=impl):
                driver = drivers.CDriver(case, c, impl, {}, MagicMock(shape=(4, 512)), None)
                config, graph = driver.model.config, impl == "c_graph"
                self.assertEqual((config["until"], config["capture"]), ("forward", graph))
                self.assertEqual((driver.training, driver.captured), (False, graph))
                with patch.object(TandemTrainer, "step") as step, patch.object(TandemTrainer, "begin"):
                    driver.open_whole()
                self.assertEqual(step.call_count, 2 if graph else 0)
        with patch.object(drivers, "torch_model"), patch.object(drivers.ref, "Trainer") as trainer:
            for impl in ("torch_eager", "torch_compile", "torch_compile_graph"):
                drivers.TorchDriver(case, SimpleNamespace(on=MagicMock()), impl, {}, None, None).open()
                given = trainer.call_args.kwargs
                self.assertEqual((given["mode"], given["compiled"]), ("forward", impl != "torch_eager"))

    def test_the_groups_of_a_step_add_up_to_it(self):
        gemm, elementwise, optimizer = 0, 2, 4
        kernels = [(0, 40, gemm), (10, 60, optimizer), (30, 45, elementwise), (70, 100, gemm)]
        found = {name: ms for name, ms in classes.shares(kernels, 1).items() if ms}
        spent = {"GEMM": 0.07, "norms and elementwise": 0.005, "optimizer alone": 0.015, "idle": 0.01}
        self.assertEqual(found.keys(), spent.keys())
        for name, ms in spent.items():
            self.assertAlmostEqual(found[name], ms)

    def test_pytorch_s_side_asks_c_for_nothing(self):
        case = bench.whole("small")
        c = SimpleNamespace(on=SimpleNamespace())  # it has neither structs nor a session
        drivers.TorchDriver(case, c, "torch_eager", {}, None, None)
        self.assertTrue(drivers.TorchDriver(case, c, "torch_compile_graph", {}, None, None).captured)


def plain(module, case, impl, samples=()):
    """Returns a record of a GPU that has only these times."""
    found = dict(
        module=module, impl=impl, status="ok", machine="NVIDIA H200", device="cuda", measure="time memory"
    )
    if case is not None:
        found |= dict(deliverable=case.deliverable, case=case.keys)
    return found | ({"ms": statistics(samples), "samples": list(samples)} if samples else {})


def traced(rng):
    """Returns the values of a trace in a record."""
    values = {name: 0.2 + rng.random() for name in ("forward timer", "forward window", "optimizer busy")}
    for scope in trace.SCOPES:
        values |= {f"{scope} ms {name}": rng.random() for name in ("matmul", "softmax", "elementwise")}
        kernels = [("sm90_xmma_gemm", "matmul", 0.5, 73.0), ("td_softmax", "softmax", 0.1, 12.0)]
        values |= trace.numbered(scope, kernels)
    values |= {f"attention ms {part}": 1 + rng.random() for part in trace.PARTS[:3]}
    return values


def all_invented(name, module, profile, device):
    """Returns records of every case of the profile and every side."""
    return [
        invented(name, case, impl, gpu=device == "cuda")
        for case in module.cases(profile, device)
        for impl in IMPLS.get(name, case.config if name in RANKED and case.config else SIDES)
    ]


def invented(module, case, impl, gpu=True):
    """Returns a record with every number that a page may read."""
    rng = random.Random(f"{case.name} {impl}")
    found = dict(module=module, deliverable=case.deliverable, case=case.keys, impl=impl, status="ok")
    found |= dict(measure=" ".join(case.measure))
    if gpu:
        found |= dict(machine="NVIDIA H100", device="cuda", versions={"cuda": "13.0"})
    if "error" in case.measure:
        found["error"] = {"max_abs": rng.random(), "rel_l2": rng.random(), "ulp_max": 1.0, "truth": "float64"}
    if "time" in case.measure:
        samples = [1 + 0.3 * rng.random() for _ in range(case.repeats or 5)]  # not noisy
        found |= {"ms": statistics(samples), "samples": samples, "first_ms": 30.0}
        if not case.in_turn:
            found["ratio"] = {"median": 1.0}
        found |= {"tflops": rng.random(), "gb_s": rng.random() * 4000}
    if "memory" in case.measure or case.deliverable == "leaderboard":
        found |= {"peak_mib": 10 * rng.random(), "requested_mib": 9.0}
    found["phases"] = dict.fromkeys(("forward", "backward", "optimizer"), statistics([rng.random(), 1.0]))
    found["values"] = {name: 1 + rng.random() for name in VALUES} | {
        "furthest_grad": "a",
        "furthest_weight": "b",
    }
    if case.deliverable == "leaderboard":
        found["values"] |= {"first_loss": 12.0, "last_loss": 11.0}
    if case.deliverable == "torch_compile":
        found["values"] |= {name: rng.random() for name in (*classes.GROUPS, "idle")}
    if case.deliverable == "nsys_profile":
        found["values"] |= traced(rng)
        found["series"] = {f"{name} {end}": [1.0, 3.0] for name in trace.CLASSES for end in ("begin", "end")}
    if case.deliverable == "memory_profiling":
        layers = ["live_mib", *(f"live {name}" for name in memory.CATEGORIES)]
        found["series"] = {name: [rng.random() for _ in range(20)] for name in layers}
        found["series"]["phase ends"] = [0.2, 0.7, 1.0, 0.0]
        found["values"] |= {"residual": 2**20, "scores": 2**20, "saved": 2**24}
        for i in range(1, memory.CONTRIBUTORS + 1):
            found["values"] |= {f"saved {i} name": "4x4", f"saved {i}": 2**20}
            found["values"] |= {f"largest {i} name": "layers.*.ffn.hidden", f"largest {i} label": "w1"}
            found["values"] |= {f"largest {i}": 2**20, f"largest {i} count": 4}
    if case.deliverable == "transformer_training":
        found["series"] = {"loss": [5.0 - rng.random() for _ in range(case.steps)]}
    if case.get("part") == "memory":
        parts = (
            "made before_update after_update parameters gradients optimizer_state activations peak".split()
        )
        found["memory"] = {f"{part}_mib": [1 + rng.random() for _ in range(case.ranks)] for part in parts}
        found |= {"collectives": 3, "collective_bytes": 2**22}
    if case.get("part") == "memory" and case.shard == "full":
        found["values"] = {name: 1 + rng.random() for name in (*COMMUNICATION, "waits")}
        sizes = ("parameters", "gradients", "optimizer_state", "total", "whole", "block")
        found["values"] |= {f"predicted {name}": 2**20 for name in sizes}
        found["series"] = {"calls": [2, 2, 1, 0]}
        for rank in range(case.ranks):
            found["series"] |= {f"{rank} passes": [1.0, 3.0, 4.0]}
            found["series"] |= {f"{rank} begin": [0.0, 0.1, 2.0, 3.0], f"{rank} end": [0.5, 0.9, 2.5, 3.2]}
            found["series"] |= {f"{rank} asked": [0.1, 1.1], f"{rank} there": [0.5, 1.1]}
    if case.get("part") == "communication":
        found["values"] = {name: 1 + rng.random() for name in COMMUNICATION} | {"calls": 3, "bytes": 2**22}
        for rank in range(case.ranks):
            found.setdefault("series", {}).update(
                {f"{rank} passes": [1.0, 3.0, 4.0], f"{rank} begin": [2.0], f"{rank} end": [3.5]}
            )
    return found


if __name__ == "__main__":
    if "renew" in sys.argv:
        sys.exit(not WRITTEN.write_text(written()))
    unittest.main()
