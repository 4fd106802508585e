"""Analytic costs of models and machines."""
