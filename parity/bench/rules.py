"""What the figures of bench are held against."""

# What a step is to reach: C's captured step over PyTorch's best, C's eager step over PyTorch's eager one.
BARS = {"bf16_mixed": (0.80, 0.50), "f32": (None, 0.90)}
