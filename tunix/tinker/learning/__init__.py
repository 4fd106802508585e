"""Losses and optimizer of the Tinker service, without a protocol."""
