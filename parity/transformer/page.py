"""The page of transformer."""

import pandas as pd

from parity.shared.pages import held, valued
from parity.transformer.rules import LOSSES_WITHIN, OTHER_SEED, ROUNDING, SMALL_STEPS


def report(page, records):
    exact = records.only("transformer_exactness")
    page.section(
        "transformer_exactness", "Does the model compute what PyTorch's does, from the same weights?"
    )
    rows = []
    for record in exact.only(impl="c").records:
        case, outputs = record["case"], record.get("error", {}).get("outputs", {})
        if case.get("pass") == "steps":  # which has neither logits nor gradients
            continue
        other = exact.only(impl="torch_eager", **case).records
        theirs = other[0].get("error", {}).get("outputs", {}) if other else {}
        row = {key: case[key] for key in ("size", "d_model", "heads", "layers", "seq", "dtype", "attention")}
        for name in ("logits", "loss"):
            row[name] = outputs.get(name, {}).get("rel_l2")
        mine, his = ({k: v for k, v in found.items() if k.startswith("grad.")} for found in (outputs, theirs))
        row["gradients"] = outputs.get("gradients", {}).get("rel_l2")
        row["PyTorch's"] = theirs.get("gradients", {}).get("rel_l2")
        row["worst gradient"] = max((v["rel_l2"] for v in mine.values()), default=None)
        row["PyTorch's worst"] = max((v["rel_l2"] for v in his.values()), default=None)
        for what, title in (("grad", "gradient"), ("weight", "weight")):
            row[f"{title} from PyTorch's"] = record.get("values", {}).get(f"furthest_{what}_rel_l2")
        rows.append(row)
    page.table(by_dtype(rows), "errors_by_dtype")
    page.table(pd.DataFrame(rows), "errors", more=True)
    after = next(iter(valued(exact, size="small", steps=SMALL_STEPS)), {})
    page.say(**held(exact), steps=SMALL_STEPS, far=after.get("furthest_weight_rel_l2"))
    page.method(
        "Errors of logits, loss and gradients are relative L2 errors against the same model in float64. Weights are "
        f"compared with PyTorch's after the AdamW steps: one for the tiny models, {SMALL_STEPS} for `small`."
    )
    report_training(page, records.only("transformer_training"))


def by_dtype(rows):
    """The worst of each dtype, C's beside PyTorch's."""
    frame = pd.DataFrame(rows)
    if frame.empty:
        return frame
    worst = ["logits", "loss", "gradients", "PyTorch's", "worst gradient", "PyTorch's worst"]
    found = frame.groupby("dtype", sort=False)
    return found[worst].max().assign(cases=found.size()).reset_index()[["dtype", "cases", *worst]]


def report_training(page, records):
    page.section("transformer_training", "Does it learn the same as PyTorch, step by step?")
    runs = {}  # the case's keys: {impl: its record with a curve}
    for record in records.records:
        if "series" in record:
            runs.setdefault(tuple(record["case"].items()), {})[record["impl"]] = record
    rows, curves, apart = [], {}, {}
    for keys, sides in runs.items():
        case = dict(keys)
        name = ", ".join([case["attention"], *([f"seed {case['seed']}"] if "seed" in case else [])])
        theirs = sides["torch_eager"]["series"]["loss"] if "torch_eager" in sides else []
        for impl, record in sides.items():
            losses, values = record["series"]["loss"], record["values"]
            steps = list(range(1, len(losses) + 1))
            curves.setdefault(name, {})[impl] = (steps, losses)
            row = {"run": name, "side": impl, "dtype": case["dtype"], "first": losses[0], "last": losses[-1]}
            if impl != "torch_eager" and theirs:
                row |= {"largest difference": values.get("largest"), "mean difference": values.get("mean")}
                distances = [abs(mine - other) or None for mine, other in zip(losses, theirs, strict=True)]
                apart.setdefault(name, {})[impl] = (steps, distances)
            rows.append(row)
    page.table(pd.DataFrame(rows), "losses", digits={"first": 6, "last": 6})
    dtype = rows[0]["dtype"] if rows else ""
    page.plot("loss", curves, x="step", y="loss", log=False, title=f"Loss of the byte-level model, {dtype}")
    page.plot("apart", apart, x="step", y="|loss - PyTorch's loss|", title=f"Losses minus PyTorch's, {dtype}")
    exact = [row for row in valued(records, dtype="f32") if row.get("largest") is not None]
    graphs = [sides for sides in runs.values() if {"c", "c_graph"} <= set(sides)]
    noise = next((sides for sides in runs.values() if {"c", "torch_eager", OTHER_SEED} <= set(sides)), {})
    mean = {impl: record["values"].get("mean") for impl, record in noise.items()}
    page.say(
        f32=max((row["largest"] for row in exact), default=None),
        allowed=LOSSES_WITHIN,
        runs=len(exact) or None,
        mine=mean.get("c"),
        seed=mean.get(OTHER_SEED),
        rounding=mean.get(ROUNDING),
        same=sum(s["c"]["series"]["loss"] == s["c_graph"]["series"]["loss"] for s in graphs)
        if graphs
        else None,
        graphs=len(graphs),
    )
    for row in valued(records)[:1]:
        page.method(
            f"The byte-level model (vocab {row['vocab']}, d_model {row['d_model']}, {row['layers']} layers, context "
            f"{row['context']}, batch {row['batch']}) is trained {row['steps']} steps on this repository's "
            f"Markdown files, "
            "from the same weights and with the same batches. torch_eager_seed has other weights and the same batches."
        )
