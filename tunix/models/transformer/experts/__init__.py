"""Mixtures of experts: layer, routing, and experts on several devices.

The losses that balance them are in `tunix.ops.router`.
"""
