"""Data sets of the examples."""
