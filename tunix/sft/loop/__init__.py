"""The loop of every trainer, and what may interrupt it."""
