"""From records on disk to batches of tokens."""
