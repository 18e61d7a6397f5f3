"""The pages of parity/<module>.py are written from whatever records there are: none missing, some, or ends without a
number. Tried on the committed records, thinned and spoiled by a seeded choice."""

import random
import unittest
from pathlib import Path
from unittest.mock import patch

from parity.core import plot, sweep
from parity.core.record import FILE, load
from parity.core.report import Page
from parity.core.view import Records

COMMITTED = Path(__file__).resolve().parents[1] / "reports" / "cpu" / FILE
MEASURED = "ms error peak_mib tflops samples ratio values series dtypes lists phases".split()
TRIALS = 40


class PagesTest(unittest.TestCase):
    def test_every_page_survives_missing_and_failed_records(self):
        committed = load(COMMITTED).newest()
        self.assertGreater(len(committed), 100)
        for name, module in sweep.discover("parity").items():
            mine = [record for record in committed if record["module"] == name]
            self.assertTrue(mine, f"no record of {name}")
            for trial in range(TRIALS):
                with self.subTest(module=name, trial=trial):
                    self.write(module, name, self.thinned(mine, random.Random(f"{name} {trial}")))

    def thinned(self, records, rng):
        """Some of them or all; a fifth of what is kept has ended without a number."""
        count = rng.choice([1, 2, 5, len(records) // 2, len(records)])
        kept = [dict(record) for record in rng.sample(records, min(count, len(records)))]
        for record in kept:
            if rng.random() < 0.2:
                record["status"], record["message"] = rng.choice(["oom", "error", "unsupported"]), "spoiled"
                for key in MEASURED:
                    record.pop(key, None)
        return kept

    def write(self, module, name, records):
        with patch.object(plot, "write"):  # the drawing itself is core's, and slow
            page = Page(name, Path("nowhere"), "csv")
            module.report(page, Records(records))
        self.assertTrue(page.blocks)


if __name__ == "__main__":
    unittest.main()
