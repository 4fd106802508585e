"""A page about a run, with its curves, settings and samples."""
