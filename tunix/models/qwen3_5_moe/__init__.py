"""Qwen3.5 mixtures of experts."""
