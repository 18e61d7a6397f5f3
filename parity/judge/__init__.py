"""`python -m parity judge`: somebody else's numbers. docs/judge.md explains it."""

import json
import math

from parity.core.cards import Card
from parity.core.case import ParityError
from parity.core.draw import DTYPES
from parity.core.files import write_whole
from parity.core.library import Library
from parity.judge import numbers


def main(options, console) -> int:
    """The exit status: 1 if something was refused."""
    if (options.peak_tflops is None) != (options.bandwidth is None):
        raise ParityError("--peak-tflops and --bandwidth need each other")
    rows, unread = numbers.read(options.numbers)
    other = options.peak_tflops and Card(
        dict.fromkeys(DTYPES, options.peak_tflops), options.bandwidth, math.inf
    )
    with Library(options.library).open() as c:
        bounds = numbers.Bounds(c, other)
        numbers.judge(rows, bounds)
        lines, found = numbers.report(rows, bounds, options.reports)
    if unread:
        console.print(f"columns that judge does not know: {', '.join(sorted(unread))}")
    for line in lines:
        console.print(line)
    if options.json:
        write_whole(options.json, json.dumps(found, indent=1) + "\n")
    return int(any(row.refused for row in rows))
