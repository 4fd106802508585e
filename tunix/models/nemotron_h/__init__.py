"""Nemotron-H and Nemotron Nano: Mamba-2, attention and MLPs, one to a layer."""
