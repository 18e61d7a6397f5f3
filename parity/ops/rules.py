"""What the figures of ops are held against. What an answer is judged by stands with its operation."""

# Of the bandwidth that a copy reaches.
BARS = {"adamw": 0.85, "else": 0.80}
