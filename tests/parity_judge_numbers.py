"""Tables of times and memory: each wrong row must be found for its own reason, and no right one."""

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path

from parity.core import command
from parity.core.record import load
from parity.judge import numbers
from tandem.library import ROOT, Library, default_library

LIBRARY = default_library()
HEAD = "id,size,context,batch,dtype,pass,card,ms,std,MiB\n"
FLASH = "id,seq,head_dim,heads,batch,dtype,causal,pass,card,ms\n"
WIDE = "size,context,batch,dtype,card,forward_ms,backward_ms,both_ms\n"
DDP = "id,size,context,batch,ranks,strategy,dtype,pass,card,ms,std\n"
# What is wrong: the table, "verdict kind" of each row that is found.
ZOO = {
    "the device is not waited for after forward": (
        HEAD + "benchmarking_script,xl,512,4,f32,forward,H100,14.8,0.2,\n",
        {0: "refused bound"},
    ),
    "kernels of attention are only queued": (
        FLASH + "flash_benchmarking,16384,64,16,1,bf16,true,both,A100,5.1\n",
        {0: "refused bound"},
    ),
    "a spread above its mean": (
        HEAD + "benchmarking_script,medium,256,4,f32,forward,4090,31.2,44.9,\n",
        {0: "refused spread"},
    ),
    "forward holds backward": (
        HEAD
        + "benchmarking_script,large,512,4,f32,forward,H200,401,2,\n"
        + "benchmarking_script,large,512,4,f32,both,H200,408,3,\n",
        {0: "refused parts"},
    ),
    "f32 and bf16 contradict": (
        HEAD
        + "benchmarking_mixed_precision,xl,512,4,f32,forward,H100,252,2,\n"
        + "benchmarking_mixed_precision,xl,512,4,bf16,forward,H100,391,3,\n",
        {1: "unlikely 16 bits"},
    ),
    "the total is not that of its parts": (
        WIDE + "large,256,4,f32,H100,71.2,140.9,163.5\n",
        {2: "refused parts"},
    ),
    "the total is twice its parts": (WIDE + "large,256,4,f32,H100,71.2,140.9,431\n", {2: "refused parts"}),
    "columns are identical": (
        WIDE + "small,128,4,f32,H100,13.1,26.2,39.5\nsmall,256,4,f32,H100,13.1,26.2,39.5\n",
        {3: "unlikely equal digits", 4: "unlikely equal digits", 5: "unlikely equal digits"},
    ),
    "memory below the weights": (
        HEAD + "memory_profiling,2.7B,512,4,f32,forward,H100,,,9100\n",
        {0: "refused memory"},
    ),
    "an all-reduce above the links": (
        "collective,bytes,ranks,dtype,card,ms\nall_reduce,1073741824,4,f32,H100,0.9\nall_reduce,1073741824,4,f32,H100,2.5\n",
        {0: "refused bound"},
    ),
    "memory of a step below AdamW's state": (
        HEAD + "memory_profiling,2.7B,512,4,f32,step,H100,,,20000\n",
        {0: "refused memory"},
    ),
    "memory above the card's": (
        HEAD + "memory_profiling,2.7B,512,4,f32,step,H100,,,91000\n",
        {0: "refused memory"},
    ),
    "backward faster than forward": (
        HEAD
        + "benchmarking_script,medium,512,4,f32,forward,B200,61.3,0.4,\n"
        + "benchmarking_script,medium,512,4,f32,backward,B200,33.8,0.4,\n",
        {1: "unlikely backward"},
    ),
    "overlap slower than naive": (
        DDP + "x,xl,128,2,2,naive,f32,step,H100,288,2\n" + "x,xl,128,2,2,overlap,f32,step,H100,341,2\n",
        {1: "unlikely overlap"},
    ),
    "buckets slower than naive": (
        DDP.replace(",ms", ",bucket_mb,ms")
        + "x,xl,128,2,2,naive,f32,step,H100,,288,2\nx,xl,128,2,2,bucketed,f32,step,H100,25,341,2\n",
        {1: "unlikely bucketed"},
    ),
    "an all-reduce faster than links, named by the id": (
        "id,bytes,ranks,dtype,card,ms\ndistributed_communication_single_node,1073741824,4,f32,H100,0.9\n",
        {0: "refused bound"},
    ),
    "a short context slower than a long one": (
        HEAD
        + "benchmarking_script,medium,128,4,f32,forward,B200,66.1,0.4,\n"
        + "benchmarking_script,medium,256,4,f32,forward,B200,61.3,0.4,\n",
        {0: "unlikely order"},
    ),
    "f32 that is TF32": (
        HEAD + "benchmarking_script,2.7B,512,4,f32,forward,H100,63.4,0.2,\n",
        {0: "unlikely f32"},
    ),
    "an optimizer step faster than memory": (
        HEAD + "benchmarking_script,xl,512,4,f32,optimizer,L4,48.0,0.5,\n",
        {0: "refused bound"},
    ),
}
RIGHT = (  # in other words, and with the mark of a spreadsheet
    f"\ufeff{HEAD}"
    + "benchmarking_script,xl,512,4,fp32,forward,H100,252.4,2.1,\n"
    + "benchmarking_script,xl,512,4,float32,backward,H100,483.4,3.5,\n"
    + "benchmarking_script,xl,512,4,f32,full,H100,798.8,5.0,51076\n"
    + "benchmarking_mixed_precision,xl,512,4,bfloat16,forward,NVIDIA H100 80GB HBM3,75.1,0.3,\n"
)


def judged(text, other=None):
    with tempfile.TemporaryDirectory() as folder, Library(LIBRARY).open() as c:
        (path := Path(folder, "rows")).write_text(text)
        rows = numbers.read(path)[0]
        numbers.judge(rows, numbers.Bounds(c, other))
    return rows


def findings(rows):
    return {
        at: f"{numbers.verdict(row)} {found.partition(':')[0]}"
        for at, row in enumerate(rows)
        for found in row.refused + row.unlikely
    }


class Zoo(unittest.TestCase):
    def test_each_wrong_row_is_found_for_its_reason(self):
        for name, (text, expected) in ZOO.items():
            with self.subTest(name):
                rows = judged(text)
                self.assertEqual(findings(rows), expected, [row.refused + row.unlikely for row in rows])

    def test_no_committed_record_is_refused(self):
        """Their samples have outliers: only their spread may exceed the mean."""
        seen = 0
        for machine in ("cpu", "h100", "h100x2"):
            sides = {}
            for record in load(ROOT / f"reports/{machine}/records.jsonl").newest():
                case = {"id": record["deliverable"], "card": record["machine"]} | record["case"]
                times = {case.get("pass", "step"): record.get("ms")} | record.get("phases", {})
                for name, ms in times.items() if record["status"] == "ok" else ():
                    if name in numbers.PASSES and (ms or record.get("peak_mib")) and "op" not in case:
                        cells = {"ms": ms["mean"], "std": min(ms["std"], ms["mean"])} if ms else {}
                        cells |= {"mib": record["peak_mib"]} if record.get("peak_mib") else {}
                        row = numbers.Row(record["impl"], case | {"pass": name} | cells)
                        sides.setdefault(record["impl"], []).append(row)
            with Library(LIBRARY).open() as c:
                for rows in sides.values():
                    numbers.judge(rows, numbers.Bounds(c, None))
            found = [(str(row), row.refused) for rows in sides.values() for row in rows if row.refused]
            self.assertEqual(found, [])
            seen += sum(map(len, sides.values()))
        self.assertGreater(seen, 1000)


class TheCommand(unittest.TestCase):
    def run_it(self, text, *options):
        with tempfile.TemporaryDirectory() as folder:
            path, out = Path(folder, "rows.csv"), Path(folder, "out.json")
            path.write_text(text)
            with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
                arguments = ["judge", "--numbers", str(path), "--json", str(out), "--library", str(LIBRARY)]
                status = command.main("parity", [*arguments, *options])
            return status, said.getvalue(), json.loads(out.read_text()) if out.exists() else None

    def test_right_rows_hold_and_have_our_row_beside_them(self):
        status, said, rows = self.run_it(RIGHT)
        self.assertEqual((status, [row["verdict"] for row in rows]), (0, ["holds"] * 4), said)
        self.assertEqual(rows[0]["id"], "benchmarking_script")
        for row in rows:
            self.assertAlmostEqual(row["c_ms_ratio"], row["ms"] / row["c_ms"])
        self.assertEqual(rows[2]["torch_side"], "torch_eager")
        self.assertGreater(rows[2]["c_mib"], 30_000)

    def test_another_card_has_the_bound_of_the_options(self):
        text = HEAD + "x,small,512,4,f32,forward,RTX 5090,0.8,0.01,\n"
        self.assertIn("no bound for card RTX 5090", self.run_it(text)[1])
        status, said, _ = self.run_it(text, "--peak-tflops", "200", "--bandwidth", "1792")
        self.assertEqual(status, 1)
        self.assertIn("0.515 TFLOP at 200 TFLOP/s take 2.57 ms", said)

    def test_bad_input_is_named_with_its_value(self):
        for text, words in (
            ("", "no rows"),
            ("[1]", "row 1: is no object"),
            ("[{", "cannot be read"),
            ("ms,size\n1,huge\n", "line 2: size is huge"),
            ("ms,dtype\n1,f31\n", "line 2: dtype is 'f31'"),
            ("ms,batch\n1,1.5\n", "line 2: batch is '1.5'"),
            ("ms\nnan\n", "line 2: ms is 'nan'"),
            ("ms\n0\n", "line 2: ms is 0.0"),
            ("id,ms\nx,\n", "line 2: ms is None"),
            ("ms\n1,2\n", "line 2: is no object, or has more cells"),
        ):
            with self.subTest(text=text):
                status, said, _ = self.run_it(text)
                self.assertEqual(status, 2, said)
                self.assertIn(words, said)
        self.assertIn("need each other", self.run_it(RIGHT, "--bandwidth", "3")[1])


if __name__ == "__main__":
    unittest.main()
