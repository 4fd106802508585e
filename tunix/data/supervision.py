"""Old name of show.py; chat.py and turns/trained_spans.py find the trained text."""

from tunix.data.show import check_supervision, describe_batch, trained_targets

__all__ = ["check_supervision", "describe_batch", "trained_targets"]
