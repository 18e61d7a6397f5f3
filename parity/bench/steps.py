"""The steps that bench times, for its cases, its timings and its pages."""

PHASES = ("forward", "backward", "optimizer")
WARMUPS = (0, 1, 2, 5)  # steps left out before the ten that are timed
WHOLE_CONTEXT = 512  # of the steps that are compared with compiled PyTorch
# Of the cases that measure what warm-up changes; none of bench's CONTEXTS, so that no two cases are one.
COLD_CONTEXT = 384
LONG_S, LONGEST_S = 0.2, 0.5  # steps from which on there are fewer of warm-up
