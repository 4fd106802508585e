"""The rules of drawing a token, and when a completion ends."""
