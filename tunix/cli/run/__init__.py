"""One training run: its folder, its processes, its result."""
