"""The commands of the program `tandem` in one process: their tables, records and files.

Run by CTest as  python3 cli_commands.py PATH_OF_TANDEM ; Python's standard library is all it needs.
"""

import contextlib
import json
import os
import pickle
import re
import resource
import signal
import subprocess

from cli_kit import MODEL, SHORT, TINY, Cli, main, program, tables

# The columns of nsys' cuda_gpu_kern_sum.
SUMMARY = [
    "Time (%)",
    "Total Time (ns)",
    "Instances",
    "Avg (ns)",
    "Med (ns)",
    "Min (ns)",
    "Max (ns)",
    "StdDev (ns)",
    "Name",
]


class Commands(Cli):
    def test_bench(self):
        for mode, timed, passes in (
            ("forward", "whole", ["inference"]),
            ("backward", "whole", ["step"]),
            ("train", "whole", ["step"]),
            ("forward", "phases", ["inference"]),
            ("backward", "phases", ["forward", "backward", "step"]),
            ("train", "phases", ["forward", "backward", "optimizer", "step"]),
            ("train", "events", ["forward", "backward", "optimizer", "step"]),
        ):
            with self.subTest(mode=mode, timed=timed):
                how = ["--mode", mode, *(["--timed", timed] if timed != "whole" else [])]
                rows, text = self.rows("bench", *TINY, *how, "--threads", "1")
                self.assertEqual([row["pass"] for row in rows], passes)
                self.assertIn("custom: d_model 16, d_ff 24, layers 2, heads 2, vocab 17", text)
                self.assertEqual("loss" in text, mode != "forward")
                update = "along" if timed == "whole" else "after"
                said = {"whole": "whole steps", "phases": "phases apart", "events": "phases by events"}[timed]
                self.assertIn(f"{said}, queued", text)
                self.assertEqual(f"weights updated {update} the backward pass" in text, mode == "train")
                for row in rows:
                    self.assertTrue(0 < row["min_ms"] <= row["median_ms"], row)
                    self.assertAlmostEqual(row["tokens_s"] * row["median_ms"] / 16e3, 1)

    def test_bench_takes_every_attention_dtype_and_a_named_size(self):
        for dtype in ("f32", "bf16"):
            for attention in ("naive", "flash"):
                text = self.succeed("bench", *TINY, "--dtype", dtype, "--attention", attention)
                self.assertIn(f"parameters, {dtype}, {attention} attention", text)
        args = (
            "bench --batch 1 --context 4 --warmup 0 --steps 1 --mode forward --size small --layers 12".split()
        )
        self.assertIn("small: d_model 768", self.succeed(*args))

    def test_bench_runs_the_step_as_it_is_told(self):
        found = []
        usual = {"update": "along", "keep": "all", "gradients": "transient"}
        ways = [{}, {"keep": "most"}, {"gradients": "held"}, {"update": "after"}]
        ways += [{"keep": "inputs", "checkpoint_layers": layers} for layers in (1, 2)]
        ways += [{"keep": "attention", "checkpoint_layers": 1, "kept_layers": 2}]
        for way in ways:
            options = [
                text for name, value in way.items() for text in (f"--{name.replace('_', '-')}", str(value))
            ]
            if way.get("update") == "after":  # these options mean the same
                options = ["--update-sms", "0"]
            text = self.succeed("bench", *TINY, "--batch", "8", "--context", "64", *options, "--queued")
            found.append(re.search(r"peak memory ([\d.]+) MiB; (loss .*)", text).groups())
            now = usual | way
            layers = (
                f", checkpoints of {way['checkpoint_layers']} layers" if "checkpoint_layers" in way else ""
            )
            layers += ", the last of at least 2" if "kept_layers" in way else ""
            self.assertIn(
                f"weights updated {now['update']} the backward pass; backward finds {now['keep']} of forward{layers}; "
                f"gradients are {now['gradients']}\n",
                text,
            )
        self.assertEqual(len({loss for _, loss in found}), 1)
        self.assertEqual(len({peak for peak, _ in found[:3]}), 3)

    def test_bench_adds_micro_batches_up(self):
        (row,), text = self.rows("bench", *TINY, "--micro-batches", "3", "--peak-tflops", "0.5")
        self.assertIn("; 3 micro-batches a step", text)
        self.assertIn("; gradients are held", text)
        context, tokens = 8, 3 * 16
        self.assertAlmostEqual(row["tokens_s"] * row["median_ms"] / (tokens * 1e3), 1)
        percent, counted = re.search(
            r"; ([\d.]+) % of 0.5 TFLOP/s by the model's ([\d.]+) GFLOP", text
        ).groups()
        # A step has the FLOPs of 3 forward passes: 2 for each weight of the linear layers, and the unmasked
        # part of attention.
        d, f, vocab, layers = 16, 24, 17, 2
        products = tokens * 2 * (layers * (4 * d * d + 3 * d * f) + d * vocab)
        products += 0.5 * layers * 4 * tokens * context * d
        self.assertAlmostEqual(float(counted), 3 * products / 1e9, places=3)
        share = 3 * products / (row["median_ms"] / 1e3) / 0.5e12
        self.assertAlmostEqual(float(percent), 100 * share, delta=0.0051)

    def test_memory(self):
        """The tables follow the switches."""
        for name, how in (
            ("inference", ["--pass", "inference"]),
            ("forward", ["--pass", "forward", "--attention", "naive"]),
            ("step", ["--update", "after", "--gradients", "held"]),
            ("step", ["--keep", "inputs", "--dtype", "bf16_mixed"]),
        ):
            with self.subTest(how=how):
                rows, text = self.rows("memory", *MODEL, *how, "--threads", "1")
                self.assertIn("custom: d_model 16, d_ff 24, layers 2, heads 2, vocab 17", text)
                after = "after" in how
                phases = {"inference": 2, "forward": 2, "step": 4 if after else 3}[name]
                names = ["create", "forward", "backward", "optimizer"][:phases]
                peaks = [row for row in rows if "blocks" in row]
                self.assertEqual([row["phase"] for row in peaks], [*names, "all"])
                updated = f"weights updated {'after' if after else 'along'} the backward pass"
                self.assertEqual(updated in text, name == "step")
                parts = ("weights", "gradients", "optimizer_state", "activations", "scratch")
                self.assertEqual(sum(peaks[-1][part] for part in parts), peaks[-1]["tensors"])
                sizes = [row for row in rows if "mib_by_the_arithmetic" in row]
                self.assertEqual(sizes[0]["mib"], 2 * 8 * 16 * 4 / 2**20)
                scores = 2 * 2 * 8 * 8 * 4 / 2**20 if "naive" in how else "never in memory"
                self.assertEqual(sizes[1]["mib"], scores)
                self.assertEqual(sizes[2]["mib"] > 0, name != "inference")
                for size in sizes[:2]:
                    self.assertIn(size["mib"], (size["mib_by_the_arithmetic"], "never in memory"))
                self.assertEqual(any("share" in row for row in rows), name != "inference")
                self.assertTrue({row["phase"] for row in rows if "first_under" in row} <= set(names))

    def test_files_are_whole_or_not_there(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores the signal, and so would its child

        whole = {}
        for command, *kinds in (["memory", "snapshot", "events", "timeline"], ["trace", "trace", "svg"]):
            words = MODEL if command == "memory" else TINY
            paths = {kind.replace("svg", "timeline"): self.folder / f"{command}-{kind}" for kind in kinds}
            options = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
            self.succeed(command, *words, *options)
            whole |= {path: path.read_bytes() for path in paths.values()}
            self.assertTrue(all(len(data) > 1000 for data in whole.values()))
            for kind, path in paths.items():
                # A limit on the size of files gives an error of the write, as a full disk does.
                done = subprocess.run(
                    [program(), command, *words, f"--{kind}", str(path), "--json"],
                    capture_output=True,
                    text=True,
                    preexec_fn=limit,
                    check=False,
                    # the limit would cut the counts of coverage off too
                    env={**os.environ, "GCOV_PREFIX": "/dev/null"},
                )
                self.assertEqual(done.returncode, 1)
                self.assertTrue(json.loads(done.stdout.splitlines()[0])["row"], "the result was lost")
                self.assertRegex(
                    done.stderr, rf"(?m)^tandem {command}: cannot write '{path}.*': File too large$"
                )
        self.assertEqual({path: path.read_bytes() for path in self.folder.iterdir()}, whole)
        events = json.loads(whole[self.folder / "trace-trace"])["traceEvents"]
        self.assertEqual({event["ph"] for event in events}, {"M", "X"})
        steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep")]
        self.assertEqual(steps, [f"ProfilerStep#{i}" for i in range(len(steps))])
        self.assertIn(b"<title>backward: ", whole[self.folder / "trace-svg"])

    def test_a_kill_in_the_middle_leaves_no_half_file(self):
        file = self.folder / "file"
        for words, read in (
            (["memory", *MODEL, "--layers", "500", "--snapshot"], pickle.loads),
            (["trace", *TINY, "--layers", "100", "--trace"], json.loads),
        ):
            for wait in (0.0, 0.02, 0.05, 0.1, 0.2):
                file.write_bytes(b"old")
                child = subprocess.Popen([program(), *words, str(file)], stdout=subprocess.DEVNULL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(wait)
                child.kill()
                child.wait()
                data = file.read_bytes()
                self.assertTrue(data == b"old" or read(data))

    def test_trace(self):
        """The tables follow the model's operations."""
        same = []  # of medians of other steps than the timer's: two may be alike to the nanosecond, not all
        for how in (
            ["--attention", "naive"],
            ["--timed", "whole", "--dtype", "bf16_mixed"],
            ["--mode", "forward"],
            ["--mode", "backward", "--keep", "inputs"],
        ):
            with self.subTest(how=how):
                found, text = self.rows("trace", *TINY, *how, "--top", "3")
                times, *rest = tables(text)
                names = ["forward", "backward", "optimizer", "step"]
                if "forward" in how:
                    names = ["inference"]
                elif "whole" in how:
                    names = ["step"]
                elif "backward" in how:
                    names = ["forward", "backward", "step"]
                self.assertEqual([row["pass"] for row in times], names)
                for row in found[: len(names)]:
                    if "whole" in how:
                        self.assertEqual(row["events_ms"], row["timer_ms"])
                    else:
                        same.append(row["events_ms"] == row["timer_ms"])
                    self.assertLessEqual(row["busy_ms"], row["window_ms"] * (1 + 1e-9))
                    self.assertEqual(row["activities"], int(row["activities"]))
                classes = [row for row in found if "all_ms" in row]
                for row in classes:
                    self.assertAlmostEqual(row["of_forward"] + row["difference_in_points"], row["of_all"])
                self.assertAlmostEqual(
                    sum(row["all_ms"] for row in classes) / found[len(names) - 1]["sum_ms"], 1
                )
                # GEMMs: four in each of two layers, one in the head; in naive attention of each layer one for
                # scores and two for values.
                products = 2 * 4 + 1 + (2 * 3 if "naive" in how else 0)
                self.assertIn(f"Forward has {products} GEMMs", text)
                parts = {row["part"] for row in found if "part" in row}
                self.assertEqual("computing softmax" in parts, "naive" in how)
                self.assertEqual("all in one" in parts, "naive" not in how)
                kernels = [table for table in rest if "Instances/pass" in table[0]]
                self.assertEqual(len(kernels), 1 if "forward" in how else 3 if "backward" in how else 4)
                self.assertEqual(list(kernels[0][0])[:9], SUMMARY)
                self.assertTrue(all(len(table) <= 3 for table in kernels))
                self.assertIn("; 0 without a range, 0 without times, 0 dropped", text)
        self.assertFalse(all(same))

    def test_attention_and_flash(self):
        for command in ("attention", "flash"):
            for flags in ([], ["--causal"], ["--dtype", "bf16"]):
                with self.subTest(command=command, flags=flags):
                    rows, _ = self.rows(command, *SHORT, *flags, "--seq", "16,33")
                    passes = [(16, "forward"), (16, "backward"), (33, "forward"), (33, "backward")]
                    self.assertEqual([(row["seq"], row["pass"]) for row in rows], passes)
                    for row in rows:
                        flops = 4 * 6 * row["seq"] ** 2 * 8 * (0.5 if "--causal" in flags else 1)
                        flops *= 2.5 if row["pass"] == "backward" else 1
                        self.assertAlmostEqual(row["gflop_s"] * row["median_ms"] * 1e6 / flops, 1)
                        saved = 6 * row["seq"] * (row["seq"] if command == "attention" else 1)
                        saved *= 2 if command == "attention" and "bf16" in flags else 4
                        self.assertGreaterEqual(row["saved_mib"], saved / 2**20)

    def test_attention_without_the_memory_is_a_row(self):
        rows, _ = self.rows(*"attention --seq 16,4000000 --warmup 0 --iters 1".split())
        self.assertEqual([row["mean_ms"] == "oom" for row in rows], [False, False, True, True])

    def test_precision(self):
        loops, toy = tables(self.succeed("precision"))
        sums = {(row["accumulator"], row["addend"], row["method"]): row for row in loops}
        self.assertEqual([row["sum"] for row in loops[:4]], ["10.0001", "9.9531", "10.0021", "10.0021"])
        exactly = ["10.000133514404297", "9.953125", "10.00213623046875", "10.00213623046875"]
        self.assertEqual([row["exactly"] for row in loops[:4]], exactly)
        self.assertEqual(sums["bf16", "bf16", "sequential"]["sum"], "4.0000")
        self.assertIn("stalls after 350", sums["bf16", "bf16", "sequential"].values())
        self.assertEqual(sums["bf16", "bf16", "Kahan"]["exactly"], "10")
        self.assertEqual(len(toy), 12)
        self.assertEqual(
            list(toy[0].values()),
            ["CUDA", "f16", "cross_entropy_loss", "f32", "f16", "f16", "f32", "f16", "f32", "f32"],
        )
        few = tables(self.succeed("precision", "--count", "3", "--value", "-0.5"))[0]
        self.assertEqual({row["exactly"] for row in few}, {"-1.5"})
        (ops,) = tables(self.succeed("precision", "--ops"))
        found = {(row["device"], row["operation"]): row["rule"] for row in ops}
        self.assertEqual(len(found), len(ops))
        self.assertEqual(found["CUDA", "layer_norm"], "f32")
        self.assertNotIn(("CPU", "layer_norm"), found)

    def test_sizes(self):
        names = ["small", "medium", "large", "xl", "2.7B", "8B", "10B"]
        (rows,) = tables(self.succeed("sizes"))
        self.assertEqual([row["size"] for row in rows], names)
        self.assertEqual(rows[0]["parameters"], "128,625,408")
        self.assertEqual(rows[4]["head_dim"], "80")
        self.assertEqual(rows[5]["parameters"], "8,125,698,048")
        self.assertEqual([row["forward TFLOP"] for row in rows][:2], ["0.534", "1.794"])
        (rows,) = tables(self.succeed("sizes", "--batch", "8", "--context", "512"))
        self.assertEqual(rows[0]["forward TFLOP"], "1.068")

    def test_account(self):
        whole = self.succeed("account")
        for figure in (
            "3,406,809,600", "12995.95", "14.192", "50.77", "8,125,698,048", "219,848,638,464", "17,547,264",
            "2555.6", "20444", "10222", "25302", "61.3", "89.4", "235.1", "16512",
        ):  # fmt: skip
            self.assertIn(figure, whole)
        sections = "parameters flops activations training fsdp attention ddp xxl parallel operations".split()
        self.assertEqual("".join(self.succeed("account", name) for name in sections), whole)
        self.assertEqual(self.succeed("account", "xxl", "ddp"), self.succeed("account", "ddp", "xxl"))
        self.assertTrue(all(tables(whole)))


if __name__ == "__main__":
    main()
