"""For each case, the time of a user's run, the time of a machine in reports/, and their ratio."""

from collections.abc import Iterable, Mapping

from parity.core.comparison import Comparison, clean, differing
from parity.core.document import Markdown
from parity.core.record import key_of
from parity.core.tables import Table

DIMENSIONS = ("d_model", "d_ff", "layers", "heads", "vocab")  # a size names them


def write(document: Markdown, mine: Iterable[Mapping], theirs: Iterable[Mapping], name: str) -> None:
    """The rows of equal configuration, and the other cases with why they are not compared."""
    others = {key_of(record): record for record in theirs}
    rows, left = [], []
    for record in (r for r in mine if "ms" in r):
        other = others.get(key_of(record))
        hidden = DIMENSIONS if "size" in record["case"] else ()
        case = ", ".join(f"{key} {value}" for key, value in record["case"].items() if key not in hidden)
        there = other is not None and "ms" in other
        why = ", ".join(differing(record, other)) if there else "not measured there"
        if not why and not (clean(record) and clean(other)):
            why = "noisy, or judged wrong"
        if why:
            left.append(f"{record['impl']}, {case} ({why})")
        else:
            both = Comparison.of(record, other, anywhere=True)
            times = {"yours": both.mine, name: both.theirs}
            rows.append({"side": record["impl"], "case": case, **times, f"yours / {name}": both.ratio})
    if rows:
        document.text(f"Beside {name}, in ms:")
        document.table(Table(rows), fold=True)
    if left:
        document.small(f"Not beside {name}: {'; '.join(left)}.")
