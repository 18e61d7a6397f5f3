"""What the answers of transformer are judged by, for its cases and its page."""

SMALL_STEPS = 3
WEIGHTS_WITHIN = 1e-5  # relative L2, of every weight tensor after those steps
UPDATES_WITHIN = 0.5  # relative L2, of how far a step in mixed precision moves each weight tensor
# Relative L2 of each gradient tensor of a model that is too large for other orders of summation.
EACH_WITHIN = {"f32": 1e-5, "tf32": 1e-2, "bf16": 5e-2, "bf16_mixed": 5e-2}
LOSSES_WITHIN = 1e-3  # of every loss of a training run in f32
# A run in mixed precision has to stay within the first one's distance from PyTorch's, and within so many
# times the second one's, which has the same weights.
OTHER_SEED, ROUNDING, ROUNDINGS = "torch_eager_seed", "torch_eager_f32", 3
