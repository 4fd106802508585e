"""Weights from trainer to sampler: placement, copies, resharding, versions."""
