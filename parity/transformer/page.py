"""The page of transformer."""

from parity.core.view import number
from parity.shared.pages import by_case, held, valued
from parity.transformer.rules import LOSSES_WITHIN, OTHER_SEED, ROUNDING, SMALL_STEPS


def report(page, records):
    exact = records.only("transformer_exactness")
    question = "Does the model compute what PyTorch's does, from the same weights?"
    page.section("transformer_exactness", question)
    rows = []
    for record in exact.only(impl="c").records:
        case = record["case"]
        if case.get("pass") == "steps":  # which has neither logits nor gradients
            continue
        row = {key: case[key] for key in ("size", "d_model", "heads", "layers", "seq", "dtype", "attention")}
        other = exact.first(impl="torch_eager", **case) or {}
        mine, theirs = (of.get("error", {}).get("outputs", {}) for of in (record, other))
        row |= {name: far(mine.get(name, {})) for name in ("logits", "loss")}
        names = ("gradients", "worst gradient", mine), ("PyTorch's", "PyTorch's worst", theirs)
        for what, worst, outputs in names:
            each = [far(found) for name, found in outputs.items() if name.startswith("grad.")]
            row |= {what: far(outputs.get("gradients", {})), worst: max(each, default=None)}
        for what, title in (("grad", "gradient"), ("weight", "weight")):
            row[f"{title} from PyTorch's"] = record.get("values", {}).get(f"furthest_{what}_rel_l2")
        rows.append(row)
    report_errors(page, rows)
    after = next(iter(valued(exact, size="small", steps=SMALL_STEPS)), {})
    page.say(**held(exact), steps=SMALL_STEPS, far=after.get("furthest_weight_rel_l2"))
    page.method("errors", steps=SMALL_STEPS)
    report_training(page, records.only("transformer_training"))


def far(error):
    return number({"error": error}, "rel_l2")


def report_errors(page, rows):
    """All errors, and the worst of each dtype, of C and of PyTorch."""
    worst = ["logits", "loss", "gradients", "PyTorch's", "worst gradient", "PyTorch's worst"]
    found = {}
    for row in rows:
        of = found.setdefault(row["dtype"], {"dtype": row["dtype"], "cases": 0})
        of["cases"] += 1
        for name in worst:
            of[name] = max((x for x in (of.get(name), row[name]) if x is not None), default=None)
    page.table(found.values(), "errors_by_dtype", ["dtype", "cases", *worst])
    order = ["size", "d_model", "heads", "layers", "seq", "dtype", "attention", *worst]
    order += ["gradient from PyTorch's", "weight from PyTorch's"]
    page.table(rows, "errors", order, more=True)


def report_training(page, records):
    page.section("transformer_training", "Does it learn the same as PyTorch, step by step?")
    drawn = records.where(lambda r: "series" in r)
    runs = list(by_case(drawn, list(dict.fromkeys(key for r in drawn.records for key in r["case"]))).values())
    rows, curves, apart = [], {}, {}
    for sides in runs:
        theirs = sides["torch_eager"]["series"]["loss"] if "torch_eager" in sides else []
        for impl, record in sides.items():
            case, losses, values = record["case"], record["series"]["loss"], record["values"]
            name = ", ".join([case["attention"], *([f"seed {case['seed']}"] if "seed" in case else [])])
            steps = list(range(1, len(losses) + 1))
            curves.setdefault(name, {})[impl] = (steps, losses)
            row = {"run": name, "side": impl, "dtype": case["dtype"], "first": losses[0], "last": losses[-1]}
            if impl != "torch_eager" and theirs:
                row |= {"largest difference": values.get("largest"), "mean difference": values.get("mean")}
                distances = [abs(mine - other) or None for mine, other in zip(losses, theirs, strict=True)]
                apart.setdefault(name, {})[impl] = (steps, distances)
            rows.append(row)
    page.table(rows, "losses", digits={"first": 6, "last": 6})
    dtype = rows[0]["dtype"] if rows else ""
    page.plot("loss", curves, x="step", y="loss", log=False, title=f"Loss of the byte-level model, {dtype}")
    page.plot(
        "apart",
        apart,
        x="step",
        y="|loss - PyTorch's loss|",
        title=f"Distance of losses from PyTorch's, {dtype}",
    )
    exact = [row["largest"] for row in valued(records, dtype="f32") if row.get("largest") is not None]
    both = [sides for sides in runs if {"c", "c_graph"} <= set(sides)]
    graphs = [[sides[impl]["series"]["loss"] for impl in ("c", "c_graph")] for sides in both]
    noise = next((sides for sides in runs if {"c", "torch_eager", OTHER_SEED} <= set(sides)), {})
    mean = {impl: record["values"].get("mean") for impl, record in noise.items()}
    told = {"f32": max(exact, default=None), "allowed": LOSSES_WITHIN, "runs": len(exact) or None}
    told |= {"mine": mean.get("c"), "seed": mean.get(OTHER_SEED), "rounding": mean.get(ROUNDING)}
    same = sum(queued == captured for queued, captured in graphs) if graphs else None
    page.say(**told, same=same, graphs=len(graphs))
    for row in valued(records)[:1]:
        page.method("training", **row)
