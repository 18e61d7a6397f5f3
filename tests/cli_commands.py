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
from pathlib import Path

from cli_kit import MODEL, SHORT, TINY, Cli, main, program, run, tables

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
                self.json.unlink(missing_ok=True)
                how = ["--mode", mode, *(["--timed", timed] if timed != "whole" else [])]
                text = self.succeed("bench", *TINY, *how, "--threads", "1", "--json", str(self.json))
                (rows,) = tables(text)
                self.assertEqual([row["pass"] for row in rows], passes)
                self.assertIn("custom: d_model 16, d_ff 24, layers 2, heads 2, vocab 17", text)
                self.assertEqual("loss" in text, mode != "forward")
                found = self.records()
                self.assertEqual([record["case"]["pass"] for record in found], passes)
                config = dict(attention="flash", graph=False, timed=timed)
                config |= dict(keep="all", gradients="transient") if mode != "forward" else {}
                update = "along" if timed == "whole" else "after"
                config |= dict(update=update) if mode == "train" else {}
                said = {"whole": "whole steps", "phases": "phases apart", "events": "phases by events"}[timed]
                self.assertIn(f"{said}, queued", text)
                self.assertEqual(f"weights updated {update} the backward pass" in text, mode == "train")
                for row, record in zip(rows, found, strict=True):
                    self.check_bench_record(row, record)
                    self.assertEqual(record["config"], config)

    def check_bench_record(self, row, record):
        case = dict(record["case"])
        self.assertEqual(case.pop("pass"), row["pass"])
        expected = {"d_model": 16, "d_ff": 24, "layers": 2, "heads": 2, "vocab": 17, "batch": 2, "context": 8}
        self.assertEqual(case, {**expected, "dtype": "f32", "attention": "flash", "warmup": 1})
        impl = "c_overlap" if record["config"].get("update") == "along" else "c"
        self.check_record(record, "benchmarking_script", "bench", row, impl)
        self.assertEqual(record["threads"], 1)
        tokens = 16 / (record["ms"]["median"] / 1e3)
        self.assertAlmostEqual(record["tokens_per_second"], tokens, delta=1e-9 * tokens)
        self.assertAlmostEqual(float(row["tokens/s"]), tokens, delta=0.51)

    def check_record(self, record, deliverable, module, row, impl="c"):
        self.assertEqual((record["deliverable"], record["module"]), (deliverable, module))
        self.assertEqual((record["impl"], record["status"]), (impl, "ok"))
        self.assertTrue(record["machine"])
        self.assertRegex(record["versions"]["tandem"], r"^\d+\.\d+\.\d+$")
        build, host = record["build"], record["host"]
        self.assertEqual([*build], ["version", "commit", "dirty", "library"])
        version = run("--version").stdout
        self.assertIn(f"tandem {build['version']}\ncommit {build['commit']}", version)
        self.assertEqual(build["dirty"], " with changes," in version)
        self.assertIn(f", build {build['library']}\n", version)
        self.assertEqual(record["machine"], f"{host['name']}, {host['cores']} threads")
        self.assertEqual(host["cores"], len(os.sched_getaffinity(0)))
        said = dict(re.findall(r"^(\w[\w ]*\w)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
        for key, name in (("cpu family", "family"), ("model", "model"), ("stepping", "stepping")):
            self.assertEqual(host.get(name), int(said[key]) if key in said else None)
        self.assertEqual("avx2" in host["isa"].split(), "avx2" in said.get("flags", "").split())
        self.assertRegex(record["time"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertGreater(record["peak_mib"], 0)
        ms, samples = record["ms"], sorted(record["samples"])
        self.assertEqual(ms["n"], 3)
        self.assertEqual(len(samples), 3)
        self.assertGreater(samples[0], 0)
        self.assertEqual((ms["min"], ms["median"], ms["max"]), tuple(samples))
        self.assertAlmostEqual(ms["mean"], sum(samples) / 3, places=9)
        for key in ("mean", "std", "median", "min"):
            self.assertAlmostEqual(float(row[f"{key} ms"]), ms[key], delta=0.00051)

    def test_bench_takes_every_attention_dtype_and_a_named_size(self):
        for dtype in ("f32", "bf16"):
            for attention in ("naive", "flash"):
                self.succeed(
                    "bench", *TINY, "--dtype", dtype, "--attention", attention, "--json", str(self.json)
                )
        found = self.records()
        self.assertEqual(len(found), 4)  # earlier lines stay
        self.assertEqual(
            [(r["case"]["dtype"], r["case"]["attention"]) for r in found],
            [("f32", "naive"), ("f32", "flash"), ("bf16", "naive"), ("bf16", "flash")],
        )
        self.assertNotIn("size", found[0]["case"])
        self.json.unlink()
        args = (
            "bench --batch 1 --context 4 --warmup 0 --steps 1 --mode forward --size small --layers 12".split()
        )
        self.assertIn("small: d_model 768", self.succeed(*args, "--json", str(self.json)))
        self.assertEqual(self.records()[0]["case"]["size"], "small")

    def test_bench_runs_the_step_as_it_is_told(self):
        printed = []
        default = dict(
            attention="flash", graph=False, timed="whole", keep="all", gradients="transient", update="along"
        )
        ways = [{}, {"keep": "most"}, {"gradients": "held"}, {"update": "after"}]
        ways += [{"keep": "inputs", "checkpoint_layers": layers} for layers in (1, 2)]
        ways += [{"keep": "attention", "checkpoint_layers": 1, "kept_layers": 2}]
        for way in ways:
            options = [
                text for name, value in way.items() for text in (f"--{name.replace('_', '-')}", str(value))
            ]
            if way.get("update") == "after":  # these options mean the same
                options = ["--update-sms", "0"]
            text = self.succeed("bench", *TINY, *options, "--queued", "--json", str(self.json))
            printed.append(re.search(r"peak memory ([\d.]+) MiB; (loss .*)", text).groups())
        self.assertEqual(len({loss for _, loss in printed}), 1)
        found = self.records()
        peaks = [record["peak_mib"] for record in found]
        self.assertEqual([record["config"] for record in found], [default | way for way in ways])
        self.assertEqual([record["impl"] for record in found], ["c_overlap"] * 3 + ["c"] + ["c_overlap"] * 3)
        self.assertEqual([f"{peak:.1f}" for peak in peaks], [peak for peak, _ in printed])
        self.assertEqual(len(set(peaks[:3])), 3)

    def test_bench_adds_micro_batches_up(self):
        text = self.succeed(
            "bench", *TINY, "--micro-batches", "3", "--peak-tflops", "0.5", "--json", str(self.json)
        )
        self.assertIn("; 3 micro-batches a step", text)
        (record,) = self.records()
        self.assertEqual(record["case"]["micro_batches"], 3)
        self.assertEqual(record["config"]["gradients"], "held")
        tokens = 3 * record["case"]["batch"] * record["case"]["context"]
        rate = tokens / (record["ms"]["median"] / 1e3)
        self.assertAlmostEqual(record["tokens_per_second"] / rate, 1)
        percent, counted = re.search(
            r"; ([\d.]+) % of 0.5 TFLOP/s by the model's ([\d.]+) GFLOP", text
        ).groups()
        self.assertAlmostEqual(float(counted), record["model_flops"] / 1e9, places=3)
        share = record["model_flops"] / (record["ms"]["median"] / 1e3) / 0.5e12
        self.assertAlmostEqual(float(percent), 100 * share, delta=0.0051)
        # A step has the FLOPs of 3 forward passes: 2 for each weight of the linear layers, and the unmasked
        # part of attention.
        d, f, vocab, layers = 16, 24, 17, 2
        context = record["case"]["context"]
        products = tokens * 2 * (layers * (4 * d * d + 3 * d * f) + d * vocab)
        products += 0.5 * layers * 4 * tokens * context * d
        self.assertEqual(record["model_flops"], 3 * products)

    def test_records_name_what_limits_the_processor(self):
        limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
        subprocess.run(
            [program(), "bench", *TINY, "--json", str(self.json)],
            check=True,
            stdout=subprocess.DEVNULL,
            env=limited,
        )
        self.assertEqual(self.records()[0]["host"]["limits"]["ONEDNN_MAX_CPU_ISA"], "AVX2")

    def test_bench_without_the_memory_leaves_records(self):
        args = "bench --size 10B --batch 4096 --context 2048 --mode backward --json".split()
        done = run(*args, str(self.json))
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertEqual([r["status"] for r in self.records()], ["oom"])
        self.assertNotIn("ms", self.records()[0])

    def test_memory(self):
        """Tables and records have the same numbers, and the tables follow the switches."""
        for name, how in (
            ("inference", ["--pass", "inference"]),
            ("forward", ["--pass", "forward", "--attention", "naive"]),
            ("step", ["--update", "after", "--gradients", "held"]),
            ("step", ["--keep", "inputs", "--dtype", "bf16_mixed"]),
        ):
            with self.subTest(how=how):
                self.json.unlink(missing_ok=True)
                text = self.succeed("memory", *MODEL, *how, "--threads", "1", "--json", str(self.json))
                self.assertIn("custom: d_model 16, d_ff 24, layers 2, heads 2, vocab 17", text)
                peaks, largest, sizes, *saved = tables(text)
                (record,) = self.records()
                values = record["values"]
                after = "after" in how
                phases = {"inference": 2, "forward": 2, "step": 4 if after else 3}[name]
                names = ["create", "forward", "backward", "optimizer"][:phases]
                self.assertEqual([row["phase"] for row in peaks], [*names, "all"])
                self.assertEqual([key[8:] for key in values if key.startswith("peak_in_")], names)
                self.assertEqual(record["impl"], "c_overlap" if name == "step" and not after else "c")
                self.assertEqual((record["deliverable"], record["module"]), ("memory_profiling", "memory"))
                self.assertEqual(record["case"]["pass"], name)
                self.assertEqual(
                    record["config"].get("update"), {"step": "after" if after else "along"}.get(name)
                )
                self.assertEqual(self.parts(values, "allocated_"), values["peak_bytes"])
                self.assertEqual(self.parts(values, "live_"), values["live_bytes"])
                self.assertEqual(float(peaks[-1]["blocks"]), round(values["peak_bytes"] / 2**20, 2))
                self.assertEqual(float(peaks[-1]["tensors"]), round(values["live_bytes"] / 2**20, 2))
                self.assertEqual(values["peak_bytes"] / 2**20, record["peak_mib"])
                self.assertEqual(values["residual_bytes"], 2 * 8 * 16 * 4)
                scores = "naive" in how
                self.assertEqual(values["scores_bytes"], 2 * 2 * 8 * 8 * 4 if scores else 0)
                self.assertEqual(sizes[1]["MiB"], "0.001" if scores else "never in memory")
                self.assertEqual(values["saved_bytes"] > 0, name != "inference")
                self.assertEqual(len(saved), 1 if name != "inference" else 0)
                self.assertEqual({row["phase"] for row in largest} <= set(names), True)

    def parts(self, values, what):
        """The sum over the five categories."""
        categories = ("weights", "gradients", "optimizer_state", "activations", "scratch")
        return sum(values[what + category] for category in categories)

    def test_memory_files_are_whole_or_not_there(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores the signal, and so would its child

        kinds = ("snapshot", "events", "timeline")
        files = [self.folder / kind for kind in kinds]
        options = [word for kind, file in zip(kinds, files, strict=True) for word in (f"--{kind}", str(file))]
        self.succeed("memory", *MODEL, *options)
        whole = [file.read_bytes() for file in files]
        self.assertTrue(all(len(data) > 1000 for data in whole))
        self.assertEqual(sorted(self.folder.iterdir()), sorted(files))
        for kind, file in zip(kinds, files, strict=True):
            # A limit on the size of files gives an error of the write, as a full disk does.
            done = subprocess.run(
                [program(), "memory", *MODEL, f"--{kind}", str(file), "--json", "-"],
                capture_output=True,
                text=True,
                preexec_fn=limit,
                check=False,
                # the limit would cut the counts of coverage off too
                env={**os.environ, "GCOV_PREFIX": "/dev/null"},
            )
            self.assertEqual(done.returncode, 1)
            self.assertGreater(json.loads(done.stdout)["values"]["peak_bytes"], 0, "the result was lost")
            self.assertRegex(done.stderr, rf"(?m)^tandem memory: cannot write '{file}.*': File too large$")
        self.assertEqual([file.read_bytes() for file in files], whole)
        self.assertEqual(sorted(self.folder.iterdir()), sorted(files))

    def test_memory_killed_in_the_middle_leaves_no_half_file(self):
        file = self.folder / "snapshot"
        for wait in (0.0, 0.02, 0.05, 0.1, 0.2):
            file.write_bytes(b"old")
            child = subprocess.Popen(
                [program(), "memory", *MODEL, "--layers", "500", "--snapshot", str(file)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait)
            child.kill()
            child.wait()
            data = file.read_bytes()
            self.assertTrue(data == b"old" or isinstance(pickle.loads(data), dict))

    def test_memory_without_the_memory_leaves_a_record(self):
        done = run(
            "memory", "--size", "10B", "--batch", "4096", "--context", "2048", "--json", str(self.json)
        )
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        (record,) = self.records()
        self.assertEqual(record["status"], "oom")
        self.assertNotIn("values", record)

    def test_trace(self):
        """Tables and records have the same numbers, and the tables follow the model's operations."""
        same = []  # of medians of other steps than the timer's: two may be alike to the nanosecond, not all
        for how in (
            ["--attention", "naive"],
            ["--timed", "whole", "--dtype", "bf16_mixed"],
            ["--mode", "forward"],
            ["--mode", "backward", "--keep", "inputs"],
        ):
            with self.subTest(how=how):
                self.json.unlink(missing_ok=True)
                text = self.succeed("trace", *TINY, *how, "--top", "3", "--json", str(self.json))
                records = self.records()
                times, *rest = tables(text)
                names = ["forward", "backward", "optimizer", "step"]
                if "forward" in how:
                    names = ["inference"]
                elif "whole" in how:
                    names = ["step"]
                elif "backward" in how:
                    names = ["forward", "backward", "step"]
                self.assertEqual([row["pass"] for row in times], names)
                self.assertEqual([record["case"]["pass"] for record in records], names)
                for row, record in zip(times, records, strict=True):
                    values = record["values"]
                    self.assertEqual((record["deliverable"], record["module"]), ("nsys_profile", "trace"))
                    self.assertEqual(float(row["timer ms"]), round(record["ms"]["median"], 3))
                    self.assertEqual(float(row["events ms"]), round(values["events_ms"], 3))
                    if "whole" in how:
                        self.assertEqual(values["events_ms"], record["ms"]["median"])
                    else:
                        same.append(values["events_ms"] == record["ms"]["median"])
                    self.assertEqual(float(row["traced events ms"]), round(values["traced_ms"], 3))
                    self.assertEqual(float(row["window ms"]), round(values["window_ms"], 3))
                    self.assertLessEqual(values["busy_ms"], values["window_ms"] * (1 + 1e-9))
                    parts = sum(values[key] for key in values if key.startswith("ms_"))
                    self.assertAlmostEqual(parts / values["sum_ms"], 1)
                    self.assertEqual(values["dropped"] + values["without_times"], 0)
                    self.assertEqual(values["activities"], int(values["activities"]))
                # GEMMs: four in each of two layers, one in the head; in naive attention of each layer one for
                # scores and two for values.
                products = 2 * 4 + 1 + (2 * 3 if "naive" in how else 0)
                self.assertIn(f"Forward has {products} GEMMs", text)
                first = records[0]["values"]
                if "forward" in how:
                    self.assertEqual(first["products"], products)
                self.assertEqual("attention_ms_softmax" in first, "naive" in how)
                self.assertEqual("attention_ms_fused" in first, "naive" not in how)
                kernels = [table for table in rest if "Instances/pass" in table[0]]
                self.assertEqual(len(kernels), 1 if "forward" in how else 3 if "backward" in how else 4)
                self.assertEqual(list(kernels[0][0])[:9], SUMMARY)
                self.assertTrue(all(len(table) <= 3 for table in kernels))
                self.assertIn("; 0 without a range, 0 without times, 0 dropped", text)
        self.assertFalse(all(same))

    def test_trace_files_are_whole_or_not_there(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

        kinds = ("trace", "timeline")
        files = [self.folder / kind for kind in kinds]
        options = [word for kind, file in zip(kinds, files, strict=True) for word in (f"--{kind}", str(file))]
        self.succeed("trace", *TINY, *options)
        whole = [file.read_bytes() for file in files]
        events = json.loads(whole[0])["traceEvents"]
        self.assertEqual({event["ph"] for event in events}, {"M", "X"})
        steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep")]
        self.assertEqual(steps, [f"ProfilerStep#{i}" for i in range(len(steps))])
        self.assertIn(b"<title>backward: ", whole[1])
        for kind, file in zip(kinds, files, strict=True):
            done = subprocess.run(
                [program(), "trace", *TINY, f"--{kind}", str(file)],
                capture_output=True,
                text=True,
                preexec_fn=limit,
                check=False,
                env={**os.environ, "GCOV_PREFIX": "/dev/null"},
            )
            self.assertEqual(done.returncode, 1)
            said = done.stderr.splitlines()[0]
            self.assertRegex(said, rf"^tandem trace: cannot write '{file}.*': File too large$")
        self.assertEqual([file.read_bytes() for file in files], whole)
        self.assertEqual(sorted(self.folder.iterdir()), sorted(files))

    def test_trace_killed_in_the_middle_leaves_no_half_file(self):
        file = self.folder / "trace"
        for wait in (0.0, 0.05, 0.1, 0.2):
            file.write_bytes(b"old")
            child = subprocess.Popen(
                [program(), "trace", *TINY, "--layers", "100", "--trace", str(file)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait)
            child.kill()
            child.wait()
            data = file.read_bytes()
            self.assertTrue(data == b"old" or json.loads(data)["traceEvents"])

    def test_trace_without_the_memory_leaves_records(self):
        args = "trace --size 10B --batch 4096 --context 2048 --mode backward --json".split()
        done = run(*args, str(self.json))
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertEqual([r["status"] for r in self.records()], ["oom"] * 3)
        self.assertNotIn("values", self.records()[0])

    def test_attention_and_flash(self):
        for command, deliverable in (("attention", "pytorch_attention"), ("flash", "flash_benchmarking")):
            for flags in ([], ["--causal"], ["--dtype", "bf16"]):
                with self.subTest(command=command, flags=flags):
                    self.json.unlink(missing_ok=True)
                    text = self.succeed(command, *SHORT, *flags, "--seq", "16,33", "--json", str(self.json))
                    (rows,) = tables(text)
                    passes = [("16", "forward"), ("16", "backward"), ("33", "forward"), ("33", "backward")]
                    self.assertEqual([(row["seq"], row["pass"]) for row in rows], passes)
                    for row, record in zip(rows, self.records(), strict=True):
                        self.check_record(record, deliverable, command, row)
                        expected = {
                            "batch": 2,
                            "heads": 3,
                            "seq": int(row["seq"]),
                            "head_dim": 8,
                            "warmup": 1,
                        }
                        expected["dtype"] = "bf16" if "bf16" in flags else "f32"
                        expected["causal"] = "--causal" in flags
                        self.assertEqual(record["case"], {**expected, "pass": row["pass"]})
                        flops = 4 * 6 * expected["seq"] ** 2 * 8 * (0.5 if expected["causal"] else 1)
                        flops *= 2.5 if row["pass"] == "backward" else 1
                        tflops = flops / record["ms"]["median"] / 1e9
                        self.assertAlmostEqual(record["tflops"], tflops, delta=1e-9 * tflops)
                        saved = 6 * expected["seq"] * (expected["seq"] if command == "attention" else 1)
                        saved *= 2 if command == "attention" and expected["dtype"] == "bf16" else 4
                        self.assertGreaterEqual(float(row["saved MiB"]), saved / 2**20 - 0.0006)

    def test_attention_without_the_memory_is_a_row(self):
        args = [*"attention --seq 16,4000000 --warmup 0 --iters 1 --json".split(), str(self.json)]
        (rows,) = tables(self.succeed(*args))
        self.assertEqual([row["mean ms"] == "oom" for row in rows], [False, False, True, True])
        self.assertEqual([r["status"] for r in self.records()], ["ok", "ok", "oom", "oom"])

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
