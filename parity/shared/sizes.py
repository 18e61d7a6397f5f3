"""How large the models are, by name."""

from ref import transformer as ref

BATCH = 4  # of models that one process runs
SIZES = {size: (*extents, 10_000) for size, extents in ref.SIZES.items()}
SIZES["8B"] = (4096, 11008, 34, 32, 151_936)  # of the 2026 leaderboard
SIZES["laptop"] = (256, 1024, 4, 4, 2000)  # trains in milliseconds on two cores


def extents(size):
    """The keys of a case that say how large the model of this name is, and how many weights it has but the norms'."""
    d_model, d_ff, layers, heads, vocab = SIZES[size]
    keys = dict(d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, vocab=vocab)
    return keys, 2 * vocab * d_model + layers * (4 * d_model**2 + 3 * d_model * d_ff)


def keys_of(size, context, dtype, mode, batch=BATCH, **more):
    """The keys of a case that runs the model of this name."""
    keys = {"size": size} | extents(size)[0] | dict(batch=batch, context=context, dtype=dtype)
    return keys | more | {"pass": mode}
