"""Gemma 4 text models."""
