"""Analytic costs of models and machines; spans of what a run did, and when."""
