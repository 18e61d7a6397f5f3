"""Modules like parity/<module>.py for the fake library: one that works, others that fail."""
