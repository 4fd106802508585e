"""Old name of show.py; chat.py and turns/spans.py make the mask of trained tokens."""

from tunix.data.show import check_supervision, describe_batch, trained_targets

__all__ = ["check_supervision", "describe_batch", "trained_targets"]
