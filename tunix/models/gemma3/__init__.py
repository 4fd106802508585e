"""Gemma 3: text and vision."""
