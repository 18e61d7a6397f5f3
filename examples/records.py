"""Loads the records of a machine into a data frame."""

import pandas

from parity.core.record import load

frame = pandas.json_normalize(load("reports/cpu/records.jsonl").newest())
frame = frame[frame.deliverable == "flash_benchmarking"]
print(frame[["impl", "case.seq", "case.pass", "ms.median"]].dropna().head())
