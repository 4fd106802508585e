"""Batches of pairs, as text and as token ids.

A prompt and its completions are tokenized like fine-tuning data (see tunix.data.chat).
Text is taken unchanged, with BOS before the prompt and EOS after a completion. Lists of
messages go through the tokenizer's chat template; a completion is then the text that
the model would generate, including its closing token. `tunix.data.batches` reads both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from tunix.data.batches import BadRow
from tunix.data.records import Text

__all__ = ["BadRow", "DataInput", "TrainingInput"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DataInput:
  """A batch of B pairs as text.

  Attributes:
    prompts: B texts, or B lists of messages.
    chosen_responses, rejected_responses: B texts. If the prompt is a list of messages,
      a response may also be the assistant's message, a list of that one message, or the
      whole conversation.
    margins: least difference between the rewards of a pair, for losses that read it
      (RewardTrainer).
  """

  prompts: Sequence[Text]
  chosen_responses: Sequence[Text]
  rejected_responses: Sequence[Text]
  margins: Sequence[float] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingInput:
  """A batch of B pairs as token ids, or one pair without the first axis.

  Attributes:
    prompt_ids, prompt_mask: [B, P], padded on the left.
    chosen_ids, chosen_mask: [B, R], padded on the right, without BOS.
    rejected_ids, rejected_mask: [B, R'], padded on the right, without BOS.
    margins: float [B], as in `DataInput`.
    weights: float [B], 1 for a pair and 0 for a padding row; None: rows without any
      token are padding.
    images: images of the prompts by row, the argument of the model's call, which both
      completions share; None without images.
  """

  prompt_ids: Any
  prompt_mask: Any
  chosen_ids: Any
  chosen_mask: Any
  rejected_ids: Any
  rejected_mask: Any
  margins: Any = None
  weights: Any = None
  images: Any = None
