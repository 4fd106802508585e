"""Compatibility module: another name of `tunix.data.show`."""

from tunix.data.show import check_supervision, describe_batch, trained_targets

__all__ = ["check_supervision", "describe_batch", "trained_targets"]
