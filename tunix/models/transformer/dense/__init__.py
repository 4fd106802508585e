"""Linear layers, MLPs, and the products that they are made of."""
