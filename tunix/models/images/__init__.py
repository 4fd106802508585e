"""Images as files and arrays, turned into the pixels that vision towers read."""
