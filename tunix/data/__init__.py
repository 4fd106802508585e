"""Records on disk, and batches of tokens made from them."""
