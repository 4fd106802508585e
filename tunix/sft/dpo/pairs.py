"""Preference data as token rows: prompts padded on the left, answers on the right.

A prompt and its answers are tokenised as fine-tuning data is (tunix.data.chat): text as
it stands, with BOS in front of the prompt and EOS behind an answer; lists of messages
through the tokenizer's chat template, where the answer is what the model would have
generated, its closing token with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tunix.data import answer_formats, answers, formats
from tunix.generate.tokenizer_adapter import TokenizerAdapter

# A text, or a conversation; an answer may also be one message of the assistant.
Text = str | Sequence[Mapping[str, Any]]

# The answers of a pair, in the order that they have in a forward pass.
PAIR = ("chosen", "rejected")


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


class Limits(NamedTuple):
  """Most tokens of a prompt and of an answer; rows are padded to them."""

  prompt: int
  response: int


class Row(NamedTuple):
  """One prompt and its answers, as token ids.

  Attributes:
    prompt: at most `Limits.prompt`; the first tokens are cut, BOS stays.
    responses: each ends with EOS, or was cut at `Limits.response`.
    masks: of each, 1 on scored tokens; see `tunix.data.answers.Answered`.
    cut: whether the prompt was, and whether an answer was.
  """

  prompt: list[int]
  responses: tuple[list[int], ...]
  masks: tuple[list[int], ...]
  cut: tuple[bool, bool]


class BadRow(ValueError):
  """A row from which nothing can be learned."""


def tokenise_row(
  prompt: Text | None,
  responses: Sequence[Any],
  tokenizer: TokenizerAdapter,
  limits: Limits,
  where: str,
) -> Row:
  """One prompt and its answers.

  Args:
    prompt: a text or a list of messages. Answers may be whole conversations, which
      begin with it again; None or []: it is what they have in common at the beginning.
    responses: see DataInput.
    tokenizer: for tokens, BOS, EOS and the chat template.
    limits: where to cut.
    where: the row's place, for messages.

  Raises:
    BadRow: an answer is empty.
    ValueError: the fields have the wrong form.
  """
  prompt, texts = _split(prompt, responses, where)
  if any(answer_formats.is_empty(text) for text in texts):
    raise BadRow(f"{where}: an answer is empty; drop the pair")
  full = answers.tokenise(
    prompt, texts, tokenizer, where=where, chat=not isinstance(prompt, str)
  )
  fitted = answers.fit(
    full,
    max_prompt_length=limits.prompt,
    max_response_length=limits.response,
    bos_id=tokenizer.bos_id(),
  )
  assert fitted is not None  # nothing is dropped
  lengths = [[len(r) for r in some.responses] for some in (full, fitted)]
  return Row(
    fitted.prompt.tolist(),
    tuple(ids.tolist() for ids in fitted.responses),
    tuple(mask.tolist() for mask in fitted.masks),
    (len(fitted.prompt) < len(full.prompt), lengths[0] != lengths[1]),
  )


def _split(
  prompt: Text | None, responses: Sequence[Any], where: str
) -> tuple[Text, list[Text]]:
  """The prompt, and what is behind it in each answer; checked."""
  names = PAIR if len(responses) == len(PAIR) else ("completion",)
  given = {
    name: _checked(answer, f'{where}: "{name}"')
    for name, answer in zip(names, responses, strict=True)
  }
  asked = None
  if prompt or isinstance(prompt, str):
    asked = _checked(prompt, f'{where}: "prompt"')
  said, rest = answer_formats.split(asked, given, where)
  texts = list(rest.values())
  if isinstance(said, str) and (kinds := [t for t in texts if not isinstance(t, str)]):
    raise ValueError(
      f"{where}: the prompt is a text and an answer a {type(kinds[0]).__name__}: make "
      "both texts, or the prompt a list of messages"
    )
  return said, texts


def is_messages(value: Any) -> bool:
  """Whether it is a conversation (or no turn of one) rather than a column."""
  return isinstance(value, list | tuple) and all(isinstance(m, Mapping) for m in value)


def _checked(text: Any, where: str) -> Text:
  """A text, or a list of messages, of which none is an empty answer."""
  turns = [text] if isinstance(text, Mapping) else text
  if isinstance(turns, str):
    return turns
  if not isinstance(turns, list | tuple):
    raise ValueError(
      f"{where} is a {type(text).__name__}, expected a text, a message or a list of "
      "messages"
    )
  turns = list(turns)
  if turns:
    formats.check_messages(turns, where)
  return turns
