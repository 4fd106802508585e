"""Computes losses, gradients and updates of the Tinker service; `work` calls it."""
