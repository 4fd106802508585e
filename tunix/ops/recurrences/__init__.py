"""Linear recurrences: delta rule, state spaces, short convolutions."""
