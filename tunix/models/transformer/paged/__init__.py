"""Attention over a paged cache, for the engine."""
