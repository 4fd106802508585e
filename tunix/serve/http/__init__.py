"""HTTP without models: forms, limits, connections, other hosts."""
