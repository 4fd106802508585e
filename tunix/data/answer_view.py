"""Another name of what `tunix.data.show` holds."""

from tunix.data.show import describe_completions as describe_answers

__all__ = ["describe_answers"]
