"""Reward functions that configuration files can name."""
