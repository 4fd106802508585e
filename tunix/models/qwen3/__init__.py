"""Qwen 3, dense and mixtures of experts."""
