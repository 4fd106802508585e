"""Proximal policy optimisation, with a critic."""
