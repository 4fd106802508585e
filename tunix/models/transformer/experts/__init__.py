"""Mixtures of experts: layer, routing, and experts on several devices."""
