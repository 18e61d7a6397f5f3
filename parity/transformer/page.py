"""The page of transformer."""

import pandas as pd

from parity.shared.pages import error_answer, valued
from parity.transformer.rules import (
    LOSSES_WITHIN,
    OTHER_SEED,
    ROUNDING,
    ROUNDINGS,
    SMALL_STEPS,
    WEIGHTS_WITHIN,
)


def report(page, records):
    exact = records.only("transformer_exactness")
    page.question("Does the model compute what PyTorch's does, from the same weights?")
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
    page.table(pd.DataFrame(rows), "errors")
    page.method(
        "Logits, loss and gradients of the first step: relative L2 errors against the same model in "
        "float64 (of small the gradients in the full profile only). The last two columns are the largest "
        "relative L2 distances of a gradient and of a weight tensor from PyTorch's, the weights after the "
        f"AdamW steps: one for the tiny models, {SMALL_STEPS} for `small`, and f32 only, for a bf16 weight "
        "moves by its own rounding."
    )
    answer, figure = error_answer(exact)
    for row in valued(exact, size="small", steps=SMALL_STEPS):
        far = row["furthest_weight_rel_l2"]
        answer += (
            f" After {row['steps']} AdamW steps of `small` the weight furthest from PyTorch's, "
            f"{row['furthest_weight']}, "
            f"is {far:.2g} away ({'within' if far <= WEIGHTS_WITHIN else 'beyond'} {WEIGHTS_WITHIN:g})."
        )
    page.answer("transformer_exactness", answer, figure)

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
    page.question("Does it learn the same, step by step?")
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
    page.table(pd.DataFrame(rows), "losses", digits={"first": 6, "last": 6} if rows else None)
    dtype = rows[0]["dtype"] if rows else ""
    page.plot("loss", curves, x="step", y="loss", log=False, title=f"Loss of the byte-level model, {dtype}")
    for row in valued(records):
        page.method(
            f"A byte-level model (vocab {row['vocab']}, d_model {row['d_model']}, {row['layers']} layers, "
            f"{row['heads']} heads, context {row['context']}, batch {row['batch']}) trained {row['steps']} steps on "
            f"the {row['bytes']} bytes of this repository's hand-written Markdown files, from the same weights and "
            f"with the same batches, in {row['dtype']}. "
            f"The largest difference of a loss is {row['largest']:.2g}{allowed(row)}."
            if row.get("largest") is not None
            else f"Of the run with {row['attention']} attention only C's side has ended."
        )
    exact = [row for row in valued(records, dtype="f32") if row.get("largest") is not None]
    if exact:
        page.answer(
            "transformer_training",
            f"In f32 the {exact[0]['steps']} losses of {len(exact)} runs are within "
            f"{max(row['largest'] for row in exact):.1g} of PyTorch's; {LOSSES_WITHIN:g} is allowed.",
            f"{exact[0]['steps']} losses within {max(row['largest'] for row in exact):.1g}",
        )
    graphs = [sides for sides in runs.values() if {"c", "c_graph"} <= set(sides)]
    if graphs:
        same = sum(sides["c"]["series"]["loss"] == sides["c_graph"]["series"]["loss"] for sides in graphs)
        page.text(
            "c_graph replays a captured step: its losses are those of the steps queued one by one, bit for "
            f"bit, in {same} of {len(graphs)} runs."
        )
    page.question("How far are the losses apart, and how much of that is noise?")
    page.plot("apart", apart, x="step", y="distance", title=f"Distance of the losses from PyTorch's, {dtype}")
    report_noise(page, runs)


def allowed(row):
    return f"; {LOSSES_WITHIN:g} is allowed" if row["dtype"] == "f32" else ""


def report_noise(page, runs):
    """Mixed precision: how far each curve is from PyTorch's autocast, beside how far another seed's is."""
    for sides in runs.values():
        if not {"c", "torch_eager", OTHER_SEED} <= set(sides):
            continue
        noise = sides[OTHER_SEED]["values"]
        rows = []
        for impl, words in (
            ("c", "C"),
            ("c_graph", "C, captured"),
            (ROUNDING, "PyTorch in f32"),
            (OTHER_SEED, "PyTorch's autocast, other seed"),
        ):
            if impl in sides:
                found = sides[impl]["values"]
                row = {"curve": words, "mean distance": found["mean"], "largest distance": found["largest"]}
                over = {
                    f"{name} / seed's": found[name] / noise[name]
                    for name in ("mean", "largest")
                    if noise[name]
                }
                rows.append(row | over)
        page.text("Distances of the losses from those of PyTorch's autocast, step by step:")
        page.table(pd.DataFrame(rows), "noise")
        mine = sides["c"]["values"]
        page.text(
            "The other seed draws other weights and sees the same batches: two runs of PyTorch's autocast that differ "
            f"in nothing else are {noise['mean']:.2g} from each other in the mean and {noise['largest']:.2g} at the "
            f"most. C is {placed(mine, noise)} that noise, at {mine['mean']:.2g} and {mine['largest']:.2g}, and has to "
            "be within it in both."
        )
        said = (
            f"In bf16 mixed precision the losses are {mine['mean']:.2g} from those of PyTorch's autocast in the mean; "
            f"with another seed PyTorch's own are {noise['mean']:.2g} apart"
        )
        if ROUNDING in sides:
            rounding = sides[ROUNDING]["values"]
            page.text(
                "PyTorch in f32 has the same weights and shows what the rounding of bf16 alone does to the curve: "
                f"{rounding['mean']:.2g} in the mean and {rounding['largest']:.2g} at the most. C is "
                f"{placed(mine, rounding, ROUNDINGS)} {ROUNDINGS} times that, and has to be within it in both as well."
            )
            said += f", and in f32 {rounding['mean']:.2g}"
        figure = f"{mine['mean']:.2g} from autocast; another seed {noise['mean']:.2g}"
        page.answer("transformer_training", f"{said}.", figure)


def placed(mine, band, times=1):
    """Where a curve's distances are: in the mean and at the most, as the rule has it."""
    held = all(mine[name] <= times * band[name] for name in ("mean", "largest"))
    return "within" if held else "beyond"
