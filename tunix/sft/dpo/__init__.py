"""Preference training: pairs, single labeled answers, reward models."""
