"""Checks that the table of results in README.md agrees with the records: results.py [--write].

Each row of ROWS is one case on one machine, with the newest record of each side in reports/<machine>/. --write puts the
table into README.md. Eager PyTorch waits for its host, so runs in several processes give a range.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- results, by ci/check/results\.py --write -->\n)(?:\|.*\n)*(<!-- end -->)")
# Sides that do not do what C's side does: there is no ratio. torch_zero is not captured, and C's step is.
OTHER_WORK = {("optimizer_state_sharding_accounting", "torch_zero"), ("operations", "torch_compile")}
NAMES = {"cpu": "2 CPU cores", "h100": "H100", "h100x2": "2 H100"}
SIDES = {
    "torch_compile": "torch.compile",
    "torch_compile_graph": "compiled, CUDA graph",
    "torch_cudnn": "cuDNN attention",
    "torch_ddp_graph": "DDP, compiled, CUDA graph",
    "torch_eager": "eager",
    "torch_flash": "fused attention",
    "torch_nccl": "torch.distributed",
    "torch_zero": "ZeroRedundancyOptimizer, not captured",
}
BF16 = {"dtype": "bf16_mixed", "pass": "step", "context": 512}
HEADS = {"heads": 16, "seq": 16384, "head_dim": 64, "dtype": "bf16"}
XL = {"size": "xl", "dtype": "bf16_mixed", "bucket_mb": 100}
PLAIN = {"trans_a": False, "trans_b": False, "dtype": "f32"}

# machine, title, deliverable, keys that only this case has, C's side, measured key
ROWS = [
    ("h100", "Training step of xl, bf16 mixed (ms)", "torch_compile",
     {"size": "xl", **BF16}, "c_graph_overlap", "ms"),
    ("h100", "Training step of small, bf16 mixed (ms)", "torch_compile",
     {"size": "small", **BF16}, "c_graph_overlap", "ms"),
    ("h100", "Peak memory of a step of 2.7B, f32 (MiB)", "memory_profiling",
     {"size": "2.7B", "dtype": "f32", "context": 512, "pass": "step"}, "c", "peak_mib"),
    ("h100", "Attention forward, 16 heads of 64, 16384 tokens, bf16 (ms)", "flash_benchmarking",
     {**HEADS, "pass": "forward"}, "c", "ms"),
    ("h100", "Attention backward, 1 head of 128, 32768 tokens, bf16 (ms)", "flash_benchmarking",
     {"heads": 1, "seq": 32768, "head_dim": 128, "dtype": "bf16", "pass": "backward"}, "c", "ms"),
    ("h100", "AdamW of 128.6 million bf16 weights; moments: f32 in C, bf16 in PyTorch (ms)", "operations",
     {"op": "adamw_step", "count": 128625408, "dtype": "bf16"}, "c", "ms"),
    ("h100x2", "All-reduce of 1 GiB over NCCL, back to back (ms)", "distributed_communication_single_node",
     {"bytes": 2**30, "collective": "all_reduce", "calls": 2}, "c_nccl", "ms"),
    ("h100x2", "Data-parallel step of xl, bf16 mixed (ms)", "ddp_bucketed_benchmarking", XL, "c_nccl", "ms"),
    ("h100x2", "The same with sharded optimizer state (ms)", "optimizer_state_sharding_accounting",
     {**XL, "shard": "flat"}, "c_nccl", "ms"),
    ("cpu", "Attention forward, batch 8, one head of 64, 2048 tokens, f32 (ms)", "flash_benchmarking",
     {"batch": 8, "seq": 2048, "pass": "forward"}, "c", "ms"),
    ("cpu", "GEMM of 512 x 768 x 3072, f32 (ms)", "operations",
     {"op": "gemm", "m": 512, "n": 768, "k": 3072, **PLAIN}, "c", "ms"),
]  # fmt: skip


def value(record: Mapping[str, Any], key: str) -> float | None:
    found = record.get(key)
    return found["median"] if isinstance(found, dict) else found


def sides(
    lines: Iterable[str], deliverable: str, keys: Mapping[str, Any], key: str
) -> dict[str, list[float]]:
    """{side: its values, the newest last} of the case that has the keys. Exactly one case must have them."""
    found, cases = {}, set()
    for line in lines:
        if f'"{deliverable}"' not in line or f'"{key}"' not in line:
            continue
        record = json.loads(line)
        case = record["case"]
        if record["deliverable"] != deliverable or any(case.get(name) != want for name, want in keys.items()):
            continue
        if (now := value(record, key)) is not None:
            cases.add(json.dumps(case, sort_keys=True))
            found.setdefault(record["impl"], []).append(now)
    if len(cases) != 1:
        raise SystemExit(f"results: {deliverable} with {dict(keys)} is {len(cases)} cases, needs one")
    return found


def several(values: list[float]) -> str:
    """The newest, or all if they differ by more than 5 %."""
    low, high = min(values), max(values)
    return f"{number(low)} to {number(high)}" if high > 1.05 * low else number(values[-1])


def number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def table(root: Path) -> str:
    lines = [
        "| machine | what | C | eager PyTorch | fastest PyTorch | C / fastest |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    records = {name: (root / f"reports/{name}/records.jsonl").read_text().splitlines() for name, *_ in ROWS}
    for machine, what, deliverable, keys, side, key in ROWS:
        found = sides(records[machine], deliverable, keys, key)
        theirs = {impl: values[-1] for impl, values in found.items() if impl.startswith("torch")}
        mine = found[side][-1]
        best = min(theirs, key=theirs.__getitem__)
        eager = next((impl for impl in ("torch_eager", "torch_ddp", "torch_zero") if impl in theirs), best)
        cells = [number(mine), several(found[eager])]
        cells += [
            f"{number(theirs[best])} ({SIDES[best]})",
            "" if (deliverable, best) in OTHER_WORK else f"{mine / theirs[best]:.2f}",
        ]
        lines.append(f"| {NAMES[machine]} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    page = ROOT / "README.md"
    text = page.read_text()
    if not BLOCK.search(text):
        print("results: README.md has no table of results")
        return 1
    whole = BLOCK.sub(lambda match: f"{match[1]}{table(ROOT)}\n{match[2]}", text)
    if "--write" in sys.argv[1:]:
        page.write_text(whole)
    elif whole != text:
        print("results: the records say something else than README.md: run ci/check/results.py --write")
        return 1
    print(f"results: {len(ROWS)} rows are what the records say")
    return 0


if __name__ == "__main__":
    sys.exit(main())
