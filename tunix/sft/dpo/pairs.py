"""Batches of preference data: pairs and labelled completions, as text and as tokens.

A prompt and its completions are tokenised as fine-tuning data is (tunix.data.chat):
text as it stands, with BOS in front of the prompt and EOS behind a completion; lists of
messages through the tokenizer's chat template, where the completion is what the model
would have generated, its closing token with it. `tunix.data.batches` reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from tunix.data.batches import BadRow
from tunix.data.records import Text
from tunix.data.rows import SideBySide

__all__ = [
  "BadRow",
  "DataInput",
  "KTODataInput",
  "KTOTrainingInput",
  "Limits",
  "TrainingInput",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DataInput:
  """B pairs as text.

  Attributes:
    prompts: texts, or lists of messages.
    chosen_responses, rejected_responses: a text each; beside a list of messages also
      the assistant's message, a list of that alone, or the whole conversation.
    margins: how much better the chosen one is, for losses that ask (RewardTrainer).
  """

  prompts: Sequence[Text]
  chosen_responses: Sequence[Text]
  rejected_responses: Sequence[Text]
  margins: Sequence[float] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingInput:
  """B pairs as tokens, or one pair without the first axis.

  Attributes:
    prompt_ids, prompt_mask: [B, P], padded on the left.
    chosen_ids, chosen_mask: [B, R], padded on the right, no BOS.
    rejected_ids, rejected_mask: [B, R] likewise, of the same or another width.
    margins: [B], see DataInput.
    weights: [B], 1 for a pair and 0 for padding; None: rows without any token are
      padding.
  """

  prompt_ids: Any
  prompt_mask: Any
  chosen_ids: Any
  chosen_mask: Any
  rejected_ids: Any
  rejected_mask: Any
  margins: Any = None
  weights: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KTODataInput:
  """B single answers as text, each good or bad.

  Attributes:
    prompts, completions: as DataInput's prompts and responses.
    labels: True for a desirable answer.
  """

  prompts: Sequence[Text]
  completions: Sequence[Text]
  labels: Sequence[bool]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KTOTrainingInput:
  """B single answers as tokens, or one without the first axis.

  Attributes:
    prompt_ids, prompt_mask: [B, P], padded on the left.
    completion_ids, completion_mask: [B, R], padded on the right, no BOS.
    labels: bool [B].
    weights: [B], see TrainingInput.
  """

  prompt_ids: Any
  prompt_mask: Any
  completion_ids: Any
  completion_mask: Any
  labels: Any
  weights: Any = None


def Limits(prompt: int, response: int) -> SideBySide:
  """Most tokens of a prompt and of a completion."""
  return SideBySide(max_prompt_length=prompt, max_completion_length=response)
