"""One optimizer step: its state, its programs, its metrics."""
