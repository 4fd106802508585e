"""Counts and state of an engine."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
  """Counts since the engine was made, and its state now.

  Attributes:
    waiting, running: completions without and with a slot, now.
    pages_total, pages_free, pages_cached: pages; those that nobody holds; and of these
      the ones that keep a prefix.
    prompt_tokens: tokens of admitted prompts.
    prefix_hit_tokens: of these, tokens that were found in the cache.
    prefilled_tokens: tokens that were prefilled, those of preempted completions again.
    generated_tokens: tokens that were drawn.
    preemptions: completions that gave their pages up and were prefilled again.
    launches, rounds: launches, and their rounds.
    draft_tokens, accepted_tokens: proposed drafts, and accepted ones.
    model_draft_tokens, model_accepted_tokens: of these, those of the draft model.
  """

  waiting: int
  running: int
  pages_total: int
  pages_free: int
  pages_cached: int
  prompt_tokens: int = 0
  prefix_hit_tokens: int = 0
  prefilled_tokens: int = 0
  generated_tokens: int = 0
  preemptions: int = 0
  launches: int = 0
  rounds: int = 0
  draft_tokens: int = 0
  accepted_tokens: int = 0
  model_draft_tokens: int = 0
  model_accepted_tokens: int = 0


# Counts that the engine itself keeps.
COUNTED = (
  *("prompt_tokens", "prefilled_tokens", "generated_tokens"),
  *("launches", "rounds", "draft_tokens", "accepted_tokens"),
  *("model_draft_tokens", "model_accepted_tokens"),
)
