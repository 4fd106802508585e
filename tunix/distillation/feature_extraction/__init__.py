"""Features of layers: captured, pooled, projected."""
