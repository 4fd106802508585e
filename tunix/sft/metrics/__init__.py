"""Where metrics go; `tunix.sft.metrics_logger` calls it."""
