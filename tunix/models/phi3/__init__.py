"""Phi 3 and 4."""
