"""Metrics and their places; `tunix.sft.metrics_logger` calls it."""
