"""A case of `python -m parity diverge` in which an output of C is wrong on rank 1, and a later one on both ranks."""

from parity.shared import diverge


def run(case, draw, c):
    copy = diverge.Outputs.copy

    def wrong(outputs, hook, output):
        status = copy(outputs, hook, output)
        last = next(reversed(outputs.found))
        if last in ("logits", "layers.1.ffn.output")[: c.ranks.rank + 1]:
            outputs.found[last] *= 1.001
        return status

    diverge.Outputs.copy = wrong  # this process runs only this case
    return diverge.run(case, draw, c)
