"""The records of a machine as a data frame."""

from parity.core.record import load
from parity.core.view import Records

frame = Records(load("reports/cpu/records.jsonl").newest()).only("flash_benchmarking").frame
print(frame[["impl", "seq", "pass", "ms"]].dropna().head())
