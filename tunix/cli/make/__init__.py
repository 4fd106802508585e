"""Builds the objects of a run from its settings."""
