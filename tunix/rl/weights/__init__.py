"""Weights from trainer to sampler: placement, resharding, synchronization."""
