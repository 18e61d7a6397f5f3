"""`python -m parity judge`: somebody else's implementation, or their numbers. docs/judge.md explains it."""

import json
import math

from parity.core.cards import Card
from parity.core.case import ParityError
from parity.core.files import write_whole
from parity.core.tables import Table
from parity.judge import numbers, right
from tandem.library import DTYPES, Library


def main(options, console) -> int:
    """The exit status: 1 if something is wrong or refused."""
    if (options.folder is None) == (options.numbers is None):
        raise ParityError("judge needs a FOLDER or --numbers FILE")
    if (options.peak_tflops is None) != (options.bandwidth is None):
        raise ParityError("--peak-tflops and --bandwidth need each other")
    most = options.peak_tflops and dict.fromkeys(DTYPES, options.peak_tflops)
    with Library(options.library).open() as c:
        bounds = numbers.Bounds(c, most and Card(most, options.bandwidth, math.inf))
        found, page, status = (of_folder if options.folder else of_numbers)(options, console, bounds)
    if options.json:
        write_whole(options.json, json.dumps(found, indent=1) + "\n")
    if options.report:
        write_whole(options.report, "\n".join(page) + "\n")
    return status


def of_folder(options, console, bounds) -> tuple[dict, list[str], int]:
    if not (options.folder / "tests/adapters.py").is_file():
        raise ParityError(f"{options.folder}: there is no tests/adapters.py")
    found, versions, rows = right.judge(options, console, bounds)
    lines, table, timed = numbers.report(rows, bounds, options.reports) if rows else ([], [], [])
    for line in lines + table:
        console.print(line, soft_wrap=True)
    verdicts = [
        {"verdict": record["verdict"], "function": record["deliverable"]}
        | {key: record["case"][key] for key in ("level", "what")}
        | {"finding": "; ".join(right.words_of(record, options.hints)) if record.get("message") else ""}
        for record in found
    ]
    page = [f"# Judged: {options.folder.resolve().name}", "", f"Seed {options.seed}, {versions}.", ""]
    page += Table(verdicts).render("md").splitlines() + times_page(lines, table)
    counted = [record for record in found if options.strict or record["case"]["level"] != "beyond"]
    bad = any(record["verdict"] in right.BAD for record in counted) or any(row.refused for row in rows)
    return {"verdicts": found, "times": timed}, page, int(bad)


def times_page(lines: list[str], table: list[str]) -> list[str]:
    return ["", "## Times", "", "```", *lines, "```", "", *table] if table else []


def of_numbers(options, console, bounds) -> tuple[list[dict], list[str], int]:
    rows, unread = numbers.read(options.numbers)
    numbers.judge(rows, bounds)
    lines, table, found = numbers.report(rows, bounds, options.reports)
    if unread:
        console.print(f"columns that judge does not know: {', '.join(sorted(unread))}")
    for line in [*lines, "", *table]:
        console.print(line)
    page = [f"# Judged: {options.numbers.name}", *times_page(lines, table)]
    return found, page, int(any(row.refused for row in rows))
