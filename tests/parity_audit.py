"""The audit: what a strict reader once found in records like these, planted faults, and the committed records."""

import argparse
import copy
import io
import re
import shutil
import tempfile
import unittest
from pathlib import Path

from rich.console import Console

from parity import audit
from parity.audit import checks
from parity.core.record import RecordError
from parity.judge.numbers import Bounds
from tandem.library import ROOT, Library, default_library

LIBRARY = default_library()
H100 = "NVIDIA H100 80GB HBM3"
STEP = dict(size="xl", batch=4, context=512, dtype="bf16_mixed")
BIG = dict(size="2.7B", batch=4, context=2048, dtype="f32")
RANKS = dict(size="xl", batch=2, context=128, dtype="f32", ranks=2)
EAGER, COMPILED = (
    dict(compiled=compiled, attention=attention, optimizer=optimizer)
    for compiled, attention, optimizer in ((False, "scores", "loop"), (True, "fused", "fused"))
)


def made(deliverable, impl, case, ms=None, module="bench", folder="h100", n=10, std=0.001, **more):
    """A record; `ms` is its median."""
    found = {"deliverable": deliverable, "module": module, "case": case, "impl": impl, "status": "ok"}
    found |= {"machine": H100, "device": "cuda", "folder": folder, "build": {"commit": "abc"}}
    return found | ({"ms": times(ms, n, std)} if ms else {}) | more


def times(ms, n=10, std=0.001):
    return {"median": ms, "mean": ms, "std": std * ms, "min": 0.99 * ms, "max": 1.01 * ms, "n": n}


def oom(deliverable, impl, case, message, **more):
    return made(deliverable, impl, case, status="oom", message=message, **more)


def memory(
    impl, deliverable="optimizer_state_sharding_accounting", made_mib=7700, peak=31_000, activations=510
):
    """What a rank holds: weights and gradients of 7,600 MiB, and 15,200 of optimizer state."""
    parts = dict(parameters=7600, gradients=7600, optimizer_state=15_200, buffers=90, activations=activations)
    parts |= dict(made=made_mib, before_update=30_490, peak=peak)
    found = {f"{name}_mib": [value, value] for name, value in parts.items()}
    return made(deliverable, impl, RANKS | {"part": "memory"}, module="shard", folder="h100x2", memory=found)


def communication(module, case, **values):
    return made("accounting", "c_nccl", case, module=module, folder="h100x2", values=values)


def waiting(there):
    """Rank 0 asks for weights at 9 ms, and its gathers end at 3 and 12 ms."""
    series = {"calls": [2, 2], "0 end": [3.0, 12.0], "0 asked": [1.0, 9.0], "0 there": [3.0, there]}
    return [made("fsdp_accounting", "c_nccl", RANKS, module="shard", series=series)]


def collective(folder, ms):
    return made("all", "c_nccl", dict(bytes=2**30, ranks=2), ms, module="comm", folder=folder)


def grid(*lacks):
    sizes = (
        (size, context) for size in ("small", "large", "xl", "2.7B") for context in (128, 256, 512, 1024)
    )
    cases = (
        dict(size=size, context=context, batch=4) for size, context in sizes if (size, context) not in lacks
    )
    return [made("nsys_profile", "c", case, module="trace") for case in cases]


def errors(*found):
    cases = [{"seq": 128 * (i + 1)} for i in range(len(found))]
    mine = [made("flash_forward", "c", case, module="flash", error={"rel_l2": 1e-6}) for case in cases]
    pairs = zip(cases, found, strict=True)
    theirs = [
        made("flash_forward", "torch_eager", c, module="flash", error={"rel_l2": e}) for c, e in pairs if e
    ]
    return mine + theirs


# Row of the reader's list: records like those that were read, the check, and words of its finding.
READ = {
    "V2, errors of all cases": (errors(1e-6, 1e-6, None), "reference", "1 of 3 errors have none"),
    "V2, another reference": (
        [r | {"reference": "torch_flash"} if r["impl"] == "c" else r for r in errors(1e-6)] + errors(1e-6),
        "reference",
        "1 of 2 errors have none",
    ),
    "V3, three changes and one name": (
        [
            made("b", "torch_eager", STEP, 295.0, config=EAGER),
            made("b", "torch_compile", STEP, 88.8, config=COMPILED),
        ],
        "like",
        "differ in attention .fused, scores., optimizer .fused, loop., compilation .yes, no. at once",
    ),
    "V4, 295 and 275 ms": (
        [made("a", "torch_eager", STEP, 294.6), made("b", "torch_eager", STEP | {"warmup": 1}, 275.0)],
        "twice",
        r"294.6 \(h100 a\), 275 \(h100 b\)",
    ),
    "V4, two processes": (
        [made("a", "c", STEP, 294.6, processes=[318.6, 294.6])],
        "twice",
        "318.6 and 294.6 ms",
    ),
    "V4, a longer context is faster": (
        [made("a", "c", STEP | {"context": context}, ms) for context, ms in ((384, 130.0), (512, 94.0))],
        "order",
        "94 at context 512, 130 at 384",
    ),
    "V6, three samples": ([made("a", "c", STEP, 9.0, n=3)], "samples", "1 of 1 medians are of 3"),
    "V7, never run": (grid(("2.7B", 1024)), "gap", "15 sizes and contexts lacks 2.7B at 1024"),
    "V8, one need for all sides": (
        [
            oom("m", "c", BIG, "the largest side needs about 142 GiB, 72 GiB are available")
            | {"status": "not run"}
        ],
        "status",
        "not run, and the need is that of all sides: the largest side needs about 142",
    ),
    "V9, the harness held the rest": (
        [
            oom(
                "g",
                "c",
                BIG,
                "no room for 27254477056 bytes on cuda:0: 43864030976 bytes in 3 blocks are in use",
            )
        ],
        "status",
        "67824 MiB in all, the card has 81920",
    ),
    "V10, measured elsewhere": (
        [oom("a", "torch_eager", BIG, "CUDA out of memory"), made("m", "torch_eager", BIG, peak_mib=67_090)],
        "status",
        "m measured this pass at 67090 MiB",
    ),
    "V11, two definitions of exposed": (
        [
            communication(
                "shard", RANKS | {"shard": "full"}, exposed=4.93, waits=0.926, tail=0.526, collectives=46.9
            )
        ],
        "sum",
        "exposed is 4.93 ms, waits and tail are 1.45",
    ),
    "waits beyond what is exposed": (
        [communication("s", RANKS | {"shard": "full"}, exposed=1.0, waits=0.9, tail=0.5, collectives=9.0)],
        "sum",
        "exposed is 1.00 ms, waits and tail are 1.40",
    ),
    "V12, more exposed than sent": (
        [communication("ddp", RANKS, exposed=60.16, tail=39.1, collectives=37.7)],
        "sum",
        "60.16 ms are exposed of collectives of 37.70",
    ),
    "V13, strategies inside their spread": (
        [made("d", "torch_ddp", RANKS | {"strategy": s}, 270.0, std=0.1) for s in ("naive", "flat")],
        "samples",
        "2 of 2 spread by more than 5%, up to 10%",
    ),
    "V14, columns that do not add up": (
        [memory("torch_ddp", peak=30_875)],
        "sum",
        "rank 0: .* adds up to 31000 MiB",
    ),
    "V14, no activations": (
        [memory("torch_ddp", activations=7748, peak=38_238), memory("torch_fsdp")],
        "category",
        "activations are 7748 MiB, 510 in torch_fsdp",
    ),
    "V15, buckets at construction": (
        [memory("torch_ddp", made_mib=15_432)],
        "category",
        "15432 MiB are held, the weights are 7600",
    ),
    "V17, two folders": (
        [collective("h100x2", 3.371), collective("h100x4", 3.354)],
        "twice",
        "3.371 .*x2.* 3.354 .*x4",
    ),
    "V18, an estimate on the CPU": (
        [
            oom(
                "all",
                "c_gloo",
                dict(bytes=2**30, ranks=6),
                "rank 0: needs 18432 MiB, 16677 MiB are available",
            )
        ],
        "status",
        "never tried: rank 0: needs 18432",
    ),
    "V19, memory falls with the context": (
        [
            made("m", "torch_eager", BIG | {"context": c}, peak_mib=mib)
            for c, mib in ((128, 52_539), (256, 52_329))
        ],
        "order",
        "peak_mib is 5.233e.04 at context 256",
    ),
    "V20, a wait without a gather": (waiting(9.066), "sum", "rank 0 waits 0.066 ms at 9.00 ms"),
}


def right():
    """Records without a fault: steps of two sizes on two sides, memory of a rank, a profile, a communicator."""
    found = []
    for size, unit in (("medium", 0.2), ("xl", 1.0)):
        for context in (128, 256, 512):
            for impl, slow in (("c", 0.61), ("torch_eager", 1.27)):
                passes = dict(forward=252.1 * context, backward=503.3 * context, optimizer=30_171)
                passes = {name: times(unit * slow * ms / 512) for name, ms in passes.items()}
                total = sum(ms["median"] for ms in passes.values())
                case = dict(size=size, batch=4, context=context, dtype="f32", **{"pass": "step"})
                peak = 1000 * context * unit + 40_000 * unit
                config = EAGER | {"compiled": impl == "c"}
                how = dict(phases=passes, peak_mib=peak / 8, config=config, processes=[total, 1.02 * total])
                found.append(made("benchmarking_script", impl, case, total, **how))
    blocks = {"blocks weights": 3 * 2**30, "blocks activations": 2**30, "live": 2**30, "live weights": 2**30}
    kernels = {"forward window": 9.0, "forward ms matmul": 7.0, "forward ms softmax": 1.5}
    found.append(made("memory_profiling", "c", STEP, module="memory", peak_mib=4096, values=blocks))
    found.append(made("nsys_profile", "c", STEP, module="trace", values=kernels))
    found += [
        memory("torch_ddp"),
        memory("torch_fsdp", "fsdp_accounting"),
        *waiting(12.0),
        *errors(1e-6, 2e-6),
    ]
    found.append(copy.deepcopy(found[0]) | {"deliverable": "torch_compile", "config": COMPILED})
    slower(found[-1], 1.2)  # with other settings
    return [*found, communication("ddp", RANKS, exposed=31.0, tail=31.0, collectives=30.0)]


def first(records, **wanted):
    return next(r for r in records if all(r.get(key) == value for key, value in wanted.items()))


def slower(record, factor):
    record["ms"] = times(record["ms"]["median"] * factor)
    record.pop("phases")


def again(records):
    records.append(copy.deepcopy(records[0]) | {"deliverable": "torch_compile"})
    slower(records[-1], 1.2)


# A fault, what plants it in right(), the check that must find it, and words of the finding.
PLANTED = {
    "blocks are less than the peak": (
        lambda r: first(r, module="memory")["values"].update({"blocks weights": 2**29}),
        ("sum", "blocks: memory by use adds up to 1536"),
    ),
    "live memory is less than its parts": (
        lambda r: first(r, module="memory")["values"].update({"live weights": 2**31}),
        ("sum", "live: memory by use adds up to 2048 MiB, the whole is 1024"),
    ),
    "kernels exceed their window": (
        lambda r: first(r, module="trace")["values"].update({"forward ms matmul": 8.5}),
        ("sum", "its kernels take 10.000"),
    ),
    "the device is not waited for": (lambda r: slower(r[10], 0.02), ("bound", "step: bound")),
    "forward takes the whole step": (
        lambda r: r[0]["phases"].update(forward=times(r[0]["ms"]["median"])),
        ("bound", "parts: forward"),
    ),
    "backward is faster than forward": (
        lambda r: r[0]["phases"].update(backward=times(r[0]["phases"]["forward"]["median"] / 3)),
        ("bound", "backward: faster than forward"),
    ),
    "a larger model is faster": (lambda r: slower(r[6], 0.1), ("order", "at size xl")),
    "a second value": (again, ("twice", "of one configuration")),
    "a size is missing": (lambda r: [r.pop(0), r.pop(0)], ("gap", "lacks medium at 128")),
    "the sources changed": (
        lambda r: first(r, module="trace")["build"].update(commit="old"),
        ("age", "of old"),
    ),
}


class Audit(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        opened = Library(LIBRARY).open()
        cls.limits = Bounds(opened.__enter__(), None)
        cls.addClassCleanup(opened.__exit__, None, None, None)

    def found(self, records):
        dates = lambda commit, paths: "2026-11-27" if commit == "old" else ""  # noqa: E731
        return checks.audit(records, self.limits, dates)

    def test_what_a_reader_found_is_found(self):
        for name, (records, check, words) in READ.items():
            with self.subTest(name):
                found = [f.words for f in self.found(records) if f.check == check]
                self.assertTrue(any(re.search(words, text) for text in found), found)

    def test_a_pass_is_another_one_if_a_key_differs(self):
        ended = oom("a", "torch_eager", BIG, "CUDA out of memory")
        for key in ("size", "layers", "batch", "context", "dtype", "pass", "ranks", None):
            with self.subTest(key):
                case = BIG | ({key: 3} if key else {})
                found = self.found([ended, made("m", "torch_eager", case, peak_mib=67_090)])
                self.assertEqual(any("measured this pass" in f.words for f in found), key is None, found)

    def test_right_records_have_no_finding(self):
        self.assertEqual(self.found(right()), [])

    def test_planted_faults_are_found(self):
        for name, (plant, (check, words)) in PLANTED.items():
            with self.subTest(name):
                records = right()
                plant(records)
                found = [f.words for f in self.found(records) if f.check == check]
                self.assertTrue(any(words in text for text in found), self.found(records))

    def test_an_entry_explains_its_findings_alone(self):
        found = [checks.Found("sum", "h100 a c", "x"), checks.Found("order", "h100 a c", "x")]
        known = [
            {"check": "sum", "pattern": "h100 a", "most": ""},
            {"check": "gap", "pattern": "", "most": ""},
        ]
        self.assertEqual(audit.explain(found, known), (found[1:], [found[:1], []]))
        known[0]["most"] = "1"
        self.assertEqual(audit.explain(found[:1] * 2, known), (found[:1], [found[:1], []]))

    def test_the_committed_records_have_nothing_unknown(self):
        text = io.StringIO()
        options = argparse.Namespace(reports=ROOT / "reports", library=LIBRARY, all=False)
        status = audit.main(options, Console(file=text, soft_wrap=True))
        self.assertEqual(status, 0, text.getvalue())
        self.assertIn(" 0 findings are not known", text.getvalue())
        with tempfile.TemporaryDirectory() as own:  # the known findings are not of these records
            options.reports = Path(own)
            with self.assertRaisesRegex(RecordError, f"no records.jsonl in {own}/.*: nothing to audit"):
                audit.main(options, Console(file=text))
            Path(own, "mine").mkdir()
            shutil.copy(ROOT / "reports/h100x4/records.jsonl", Path(own, "mine"))
            self.assertEqual(audit.main(options, Console(file=text, soft_wrap=True)), 1)
        self.assertRegex(text.getvalue(), "audit: 32 results; [1-9].* findings are not known; known: none")


if __name__ == "__main__":
    unittest.main()
