"""Qwen 2 and 2.5."""
