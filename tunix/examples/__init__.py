"""Examples that run on a laptop, built on the public command."""
