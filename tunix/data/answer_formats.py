"""Another name of what `tunix.data.records` holds."""

from tunix.data.records import ANSWERED, LABELLED, PAIRS, PROMPTS

__all__ = ["ANSWERED", "LABELLED", "PAIRS", "PROMPTS"]
