"""Mesh, pytree paths, files and environment: what every layer may use."""
