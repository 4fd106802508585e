"""Code of others: a jail for programs, and processes for functions that may hang."""
