"""`python -m parity judge`: somebody else's implementation, or their numbers. docs/judge.md explains it."""

import json
import math

from parity.core.cards import Card
from parity.core.case import ParityError
from parity.core.files import write_whole
from parity.judge import numbers, right
from tandem.library import DTYPES, Library


def main(options, console) -> int:
    """The exit status: 1 if something is wrong or refused."""
    if (options.folder is None) == (options.numbers is None):
        raise ParityError("judge needs a FOLDER or --numbers FILE")
    found, status = (of_folder if options.folder else of_numbers)(options, console)
    if options.json:
        write_whole(options.json, json.dumps(found, indent=1) + "\n")
    return status


def of_folder(options, console) -> tuple[list[dict], int]:
    if not (options.folder / "tests/adapters.py").is_file():
        raise ParityError(f"{options.folder}: there is no tests/adapters.py")
    console.print(f"seed {options.seed}")
    found = right.judge(options, console)
    counted = [record for record in found if options.strict or record["case"]["level"] == "course"]
    return found, int(any(record["verdict"] in right.BAD for record in counted))


def of_numbers(options, console) -> tuple[list[dict], int]:
    if (options.peak_tflops is None) != (options.bandwidth is None):
        raise ParityError("--peak-tflops and --bandwidth need each other")
    rows, unread = numbers.read(options.numbers)
    most = options.peak_tflops and dict.fromkeys(DTYPES, options.peak_tflops)
    with Library(options.library).open() as c:
        bounds = numbers.Bounds(c, most and Card(most, options.bandwidth, math.inf))
        numbers.judge(rows, bounds)
        lines, found = numbers.report(rows, bounds, options.reports)
    if unread:
        console.print(f"columns that judge does not know: {', '.join(sorted(unread))}")
    for line in lines:
        console.print(line)
    return found, int(any(row.refused for row in rows))
