"""Gemma 1, 1.1 and 2."""
