"""Gemma 3: text, and images for the sizes from 4B."""
