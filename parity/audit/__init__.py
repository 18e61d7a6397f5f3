"""`python -m parity audit`: what records contradict. docs/parity.md explains it.

A row of known.csv has a check, a pattern of places and words, the most findings that it takes, the reason, and what
mends them: `right` if nothing is wrong, `words` if a page should say it, `run` if the case has to run again."""

import csv
import re
from collections import Counter
from pathlib import Path

from parity.audit.checks import Found, audit, changed
from parity.core.record import FILE, RecordError, load
from parity.judge.numbers import Bounds
from tandem.library import Library, default_library

KNOWN = Path(__file__).with_name("known.csv")
REPORTS = Path(__file__).parents[2] / "reports"  # known.csv is of the records there


def explain(found, known):
    """The findings without a row, and the findings of each row. A row takes `most` findings, or any number if it has no
    `most`."""
    left, of = [], [[] for _ in known]
    for finding in found:
        text = f"{finding.where}: {finding.words}"
        rows = (i for i, row in enumerate(known) if row["check"] == finding.check)
        rows = (i for i in rows if len(of[i]) < int(known[i]["most"] or len(found)))
        row = next((i for i in rows if re.search(known[i]["pattern"], text)), None)
        (left if row is None else of[row]).append(finding)
    return left, of


def main(options, console) -> int:
    """The exit status: 1 if a finding is not known, or a row of known.csv has no finding."""
    paths = [path for path in sorted(options.reports.glob(f"*/{FILE}")) if path.parent.name[:5] != "local"]
    if not paths:
        raise RecordError(f"no {FILE} in {options.reports}/*: nothing to audit")
    with KNOWN.open(newline="") as file:
        known = [*csv.DictReader(file)] if options.reports.samefile(REPORTS) else []
    loaded = {path.parent.name: load(path) for path in paths}
    records = [r | {"folder": name} for name, of in loaded.items() for r in of.newest()]
    refused = [Found("record", name, words) for name, of in loaded.items() for words in of.warnings]
    path, unchecked = options.library or default_library(), {}
    if path.is_file():
        with Library(path).open() as c:
            found = audit(records, Bounds(c, None))
    else:
        found, unchecked["bound"] = audit(records, None), f"no library at {path}"
    commits = {record["build"]["commit"] for record in records if "build" in record}
    if unheard := [commit for commit in commits if changed(commit, ["parity"]) is None]:
        unchecked["age"] = f"git does not know {len(unheard)} of the {len(commits)} commits of results"
    left, of = explain(refused + found, known)
    for finding in left:
        console.print(f"{finding.check}: {finding.where}\n    {finding.words}")
    mends, stale = Counter(), 0
    for row, findings in zip(known, of, strict=True):
        mends[row["mend"]] += len(findings)
        words = f"{row['check']}, {len(findings)} known ({row['mend']}): {row['reason']}"
        if not findings and row["check"] not in unchecked:
            stale += 1
            console.print(f"{KNOWN.name} has a row without a finding, remove it: {words}")
        elif options.all:
            console.print("\n    ".join([words, *(f"{f.where}: {f.words}" for f in findings)]))
    words = ", ".join(f"{count} {mend}" for mend, count in mends.items()) or "none"
    console.print(f"audit: {len(records)} results; {len(left)} findings are not known; known: {words}")
    for check, why in unchecked.items():
        console.print(f"audit: {check} was not checked: {why}")
    return int(bool(left or stale))
