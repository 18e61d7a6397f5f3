"""Functions that the tests of the program `tandem` share: its path, calls of it, and the parts of its output."""

import json
import os
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
    """Whether a cell has this text, or this number rounded to the cell's digits. cJSON may change the last bit of a
    double."""
    if isinstance(found, str):
        return found == cell
    try:
        shown = Decimal(cell.replace(",", ""))
    except InvalidOperation:
        return False
    half = Decimal(5).scaleb(shown.as_tuple().exponent - 1)
    return abs(Decimal(found) - shown) <= half + abs(shown) * Decimal("2.3e-16")


class Cli(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """Compiled attention leaves nothing in the user's own folder."""
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        os.environ["XDG_CACHE_HOME"] = folder.name

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.json = self.folder / "records.jsonl"

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

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.json.read_text().splitlines()]
