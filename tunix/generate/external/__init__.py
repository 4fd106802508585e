"""Engines of other projects, over HTTP or in the process."""
