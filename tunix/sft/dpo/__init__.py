"""Preference training: pairs, single labelled answers, reward models."""
