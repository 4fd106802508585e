"""Decoders: how a model is called token by token, with a cache or without."""
