"""Log-probabilities over a vocabulary, in chunks."""
