"""Configurations of Hugging Face folders; the families call it."""
