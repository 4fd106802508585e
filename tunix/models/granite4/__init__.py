"""Granite 4, dense."""
