"""Turns of a rendered conversation, where they begin and end."""
