"""Prints times from the records of a machine."""

from parity.core.record import load

for record in load("reports/cpu/records.jsonl").newest():
    if record.get("deliverable") == "flash_benchmarking" and "ms" in record:
        case = record["case"]
        print(record["impl"], case["seq"], case["pass"], record["ms"]["median"])
