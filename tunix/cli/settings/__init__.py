"""The settings of a run: keys, types, files, help."""
