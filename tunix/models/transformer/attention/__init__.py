"""Attention: the layer, its positions, and the paths that compute it."""
