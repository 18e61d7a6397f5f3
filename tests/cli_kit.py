"""Functions that the tests of the program `tandem` share: its path, calls of it, and the parts of its output."""

import json
import re
import subprocess
import sys
import tempfile
import unittest
from decimal import Decimal, InvalidOperation
from pathlib import Path

TINY = "--d-model 16 --d-ff 24 --layers 2 --heads 2 --vocab 17 --batch 2 --context 8 --warmup 1 --steps 3".split()
MODEL = TINY[: TINY.index("--warmup")]
SHORT = "--batch 2 --heads 3 --head-dim 8 --warmup 1 --iters 3".split()
_path = ""


def main():
    """Runs the tests of a file. Its first argument is the path of tandem."""
    global _path
    _path = sys.argv.pop(1)
    unittest.main()


def program() -> str:
    return _path


def run(*args, stdout=subprocess.PIPE):
    return subprocess.run(
        [program(), *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


def tables(text: str) -> list[list[dict[str, str]]]:
    """Returns the Markdown tables of an output, with a dict for each row. Fails unless the columns are aligned."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = block.splitlines()
        assert len({len(line) for line in lines}) == 1, f"ragged table:\n{block}"
        rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
        assert all(re.fullmatch(r"-+:?", cell) for cell in rows[1]), block
        found.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return found


def is_printed(found, cell: str) -> bool:
    """Whether a cell has this text, or this number rounded to the cell's digits."""
    if isinstance(found, str):
        return found == cell
    try:
        shown = Decimal(cell.replace(",", ""))
    except InvalidOperation:
        return False
    return abs(Decimal(found) - shown) <= Decimal(5).scaleb(shown.as_tuple().exponent - 1)


class Cli(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def succeed(self, *args) -> str:
        done = run(*args)
        self.assertEqual((done.returncode, done.stderr), (0, ""), args)
        self.assertTrue(done.stdout)
        return done.stdout

    def refuse(self, status: int, message: str, *args):
        """Checks the exit status and the first line of standard error. Standard output must be empty."""
        done = run(*args)
        self.assertEqual((done.returncode, done.stdout), (status, ""), (args, done.stderr))
        self.assertIn(message, done.stderr.splitlines()[0], args)

    def rows(self, *args) -> tuple[list[dict], str]:
        """Returns the rows of a command with --json, with the number or text of each cell, and its other output. Checks
        that the tables show the same numbers."""
        done = run(*args, "--json")
        self.assertEqual(done.returncode, 0, (args, done.stderr))
        return self.check_rows(args, done.stdout, done.stderr), done.stderr

    def check_rows(self, args, stdout, stderr) -> list[dict]:
        found = [json.loads(line) for line in stdout.splitlines()]
        shown = [row for table in tables(stderr) for row in table]
        self.assertEqual(len(found), len(shown), args)
        for line, row in zip(found, shown, strict=True):
            self.assertEqual(line["command"], args[0])
            self.assertLessEqual({*args[1:], "--json"}, set(line["argv"]))
            cells = {re.sub(r"[^a-z0-9]+", "_", head.lower()).strip("_"): cell for head, cell in row.items()}
            self.assertEqual(list(line["row"]), [key for key, cell in cells.items() if cell], args)
            for key, value in line["row"].items():
                self.assertTrue(is_printed(value, cells[key]), (args, key, value, cells[key]))
        return [line["row"] for line in found]
