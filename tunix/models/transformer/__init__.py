"""The decoder that every family shares."""
