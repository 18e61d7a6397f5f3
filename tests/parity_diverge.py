"""`python -m parity diverge` names the first output that is wrong."""

import contextlib
import io
import re
import sys
import types
import unittest
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console

from parity.core.command import _parser, main
from parity.core.measure import measure_case
from parity.shared import diverge
from tandem.library import Library, default_library

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = default_library()


class Diverge(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.library = Library(LIBRARY)
        cls.library.set_threads(1)

    def said(self, *arguments, here=True):
        """Returns (exit status, output). `here`: runs in this process."""

        def records_of(case, settings):
            return [measure_case(diverge, case, self.library, budget=0.0)]

        out, err = io.StringIO(), io.StringIO()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            if here:
                stack.enter_context(patch.object(diverge, "records_of", records_of))
            status = main("parity", ["diverge", "--library", str(LIBRARY), *arguments])
        return status, out.getvalue() + err.getvalue()

    def changed(self, wrong, change):
        """Returns the message if C's output of this name is wrong."""
        copy = diverge.Outputs.copy

        def faulty(outputs, hook, output):
            status = copy(outputs, hook, output)
            if next(reversed(outputs.found)) == wrong:
                outputs.found[wrong] = change(outputs.found[wrong])
            return status

        with patch.object(diverge.Outputs, "copy", faulty):
            return self.said("--until", "backward")

    def test_a_right_step_is_within_the_rule(self):
        for count, way in (103, ""), (112, "--dtype bf16_mixed --checkpoint 1 --optimizer sgd --all"):
            status, text = self.said(*way.split())
            self.assertEqual(status, 0, text)
            self.assertIn(f"{count} outputs, and all are within the rule", text)
        for name in ("layers.0.attn.q (recomputed)", "layers.1.middle.grad.rounded", "\nlm_head.weight  "):
            self.assertIn(name, text)

    def test_the_first_wrong_output_is_named(self):
        status, text = self.changed("layers.0.attn.q.grad", torch.neg)
        self.assertEqual(status, 1, text)
        self.assertIn("1 is outside the rule. The first: layers.0.attn.q.grad\n", text)
        self.assertRegex(text, r"C +rel_l2 2, .*\n +PyTorch +rel_l2 [\d.]+e-07")
        self.assertIn("all are about -1 times the truth", text)
        self.assertIn("the output before it: layers.0.attn.o.grad\n", text)

    def test_an_output_that_is_not_written_is_wrong(self):
        status, text = self.changed(
            "layers.0.attn.q.grad", lambda found: found.view(torch.int32).fill_(-1).view(torch.float32)
        )
        self.assertEqual(status, 1, text)
        self.assertIn("The first: layers.0.attn.q.grad\n", text)

    def test_a_wrong_weight_shows_in_all_that_follows(self):
        load = diverge.TandemTrainer.begin

        def begin(model, state):
            load(model, state | {"layers.0.ln2.weight": state["layers.0.ln2.weight"].flip(0)})

        with patch.object(diverge.TandemTrainer, "begin", begin):
            status, text = self.said("--until", "loss")
        self.assertEqual(status, 1, text)
        self.assertRegex(text, r"30 outputs; 2\d are outside the rule. The first: layers.0.ln2.output\n")

    def test_the_rank_is_named(self):
        paths = [str(ROOT), str(ROOT / "tests"), *sys.path]  # which ranks get
        fake = patch.object(diverge, "__name__", "parity_double.diverged")
        with patch("sys.path", paths), fake:
            status, text = self.said("--ranks", "2", "--threads", "1", "--until", "loss", here=False)
        self.assertEqual(status, 1, text)
        # the others: logits on both ranks, and the loss, which is judged from these logits
        self.assertIn("; 3 are outside the rule. The first of rank 1: layers.1.ffn.output\n", text)
        self.assertIn("about 1.001 times the truth", text)

    def test_ranks_update_with_the_average(self):
        for way in (["--optimizer", "sgd"], ["--shard", "tensors", "--dtype", "bf16_mixed"]):
            status, text = self.said("--ranks", "2", "--threads", "1", "--all", *way, here=False)
            self.assertEqual(status, 0, text)
            errors = re.findall(r"layers.0.ln1.output +(C \S+ +PyTorch \S+)", text)
            self.assertNotEqual(*errors, "both ranks have the same tokens")

    def test_what_is_said_of_ranks(self):
        of_ranks, out = [], io.StringIO()
        for rank, used in enumerate([(0.25, 0.75, 1.5), (0.125, 1.25, 1)]):
            sides = [
                {
                    name: {"used": u, "rel_l2": u + k, "max_abs": u + 9 * k}
                    for name, u in zip("abc", used, strict=True)
                }
                for k in (1, 2)
            ]
            of_ranks.append(
                ({"error": {"outputs": sides[0]}, "message": f"b: why {rank}; c: also"}, sides[1])
            )
        options = types.SimpleNamespace(size="tiny", dtype="f32", all=True)
        self.assertEqual(diverge.say(of_ranks, options, Console(file=out, soft_wrap=True)), 1)
        wanted = """rank 0 a C 1.25e+00 PyTorch 2.25e+00 25.0% of what is allowed rank 1 a C 1.12e+00 PyTorch
            2.12e+00 12.5% of what is allowed rank 0 b C 1.75e+00 PyTorch 2.75e+00 75.0% of what is allowed
            rank 1 b C 2.25e+00 PyTorch 3.25e+00 125.0% of what is allowed <-- rank 0 c C 2.50e+00 PyTorch
            3.50e+00 150.0% of what is allowed <-- rank 1 c C 2.00e+00 PyTorch 3.00e+00 100.0% of what is allowed
            tiny in f32: 3 outputs; 2 are outside the rule. The first of rank 1: b C rel_l2 2.25, largest error 10.2
            PyTorch rel_l2 3.25, largest error 19.2 why 1 the output before it: a"""
        self.assertEqual(out.getvalue().split(), wanted.split())
        for (mine, _), name in zip(of_ranks, "cb", strict=True):
            mine["error"]["outputs"][name]["used"] = 0.5
        self.assertEqual(diverge.say(of_ranks, options, Console(file=out, soft_wrap=True)), 0)
        self.assertIn(
            "all are within the rule. The largest error is 100% of what is allowed: c\n", out.getvalue()
        )

    def test_the_side_that_failed_is_named(self):
        given = []

        def records_of(case, settings):
            given.append(settings)
            lost = dict(impl="torch_eager", status="oom", message="no room")
            return [[dict(impl="c", status="ok"), lost]]

        with patch.object(diverge, "records_of", records_of):
            for ranks, where in ((1, ""), (2, "rank 0: ")):
                how = "--threads", "3", "--library", "other.so", "--ranks", str(ranks)
                status, text = self.said(*how, here=False)
                self.assertEqual((status, str(given[-1].library), given[-1].threads), (2, "other.so", 3))
                self.assertIn(f"error: {where}torch_eager is oom: no room", text)

    def test_a_case_has_the_options(self):
        keys = dict(layers=5, batch=3, context=7, dtype="bf16", attention="naive", keep="all", seed=9)
        keys |= dict(optimizer="sgd", until="backward", ranks=4, strategy="flat", shard="full")
        way = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        case = diverge.case_of(_parser().parse_args(["diverge", *way, "--backend", "mpi"]))
        self.assertEqual([{key: case.get(key) for key in keys}, *case.config], [keys, "c_mpi"])
        case = diverge.case_of(_parser().parse_args("diverge --checkpoint 3 --until loss".split()))
        how = dict(keep="inputs", checkpoint_layers=3, update="none")
        self.assertEqual(
            [{key: case[key] for key in how}, case.config["c"]], [how, diverge.c_switches(**how)]
        )

    def test_what_cannot_run_is_said(self):
        self.assertEqual(self.said("--dtype", "tf32")[0], 2)
        self.assertRegex(self.said("--dtype", "tf32")[1], "^error: c is .*tf32 is set: the cpu multiplies")
        self.assertIn("--size is 'no', needs one of: tiny, small", self.said("--size", "no")[1])


if __name__ == "__main__":
    unittest.main()
