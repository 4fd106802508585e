"""The jobs of `tunix train`: their settings, and the functions that run them."""
