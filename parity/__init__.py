"""Parity: identical inputs through PyTorch and through C, and what differs. `python -m parity --help`."""
