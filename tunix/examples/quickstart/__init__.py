"""The quickstart: a model is trained twice on sums, and answers."""
