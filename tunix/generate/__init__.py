"""Sampling and tokenizers."""
