"""`Source` under the name and the arguments that it had."""

from __future__ import annotations

from typing import Any

from tunix.data.records import KINDS
from tunix.data.rows import SideBySide
from tunix.data.source import Source

__all__ = ["AnswerSource"]


def AnswerSource(
  *, kind: str, max_prompt_length: int, max_response_length: int, **options: Any
) -> Source:
  """A `Source` of prompts with completions side by side.

  Args:
    kind: "pair", "labelled", "answered" or "prompt".
    max_prompt_length, max_response_length: tokens.
    **options: see `Source`.

  Raises:
    ValueError: see `Source`; or an unknown kind.
  """
  if kind not in KINDS:
    raise ValueError(f"kind {kind!r} is unknown; use one of {list(KINDS)}")
  layout = SideBySide(
    max_prompt_length=max_prompt_length, max_completion_length=max_response_length
  )
  return Source(kind=KINDS[kind], layout=layout, **options)
