"""Modules as parity/<module>.py are, on the fake library: one that works, one in which everything goes wrong."""
