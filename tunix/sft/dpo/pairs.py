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
import numpy as np

from tunix.data import chat
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
      the assistant's message, or a list of that alone.
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
    cut: whether the prompt was, and whether an answer was.
  """

  prompt: list[int]
  responses: tuple[list[int], ...]
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
    prompt: a text or a list of messages; None or [] where the answers are whole
      conversations: then it is what they have in common at the beginning.
    responses: see DataInput.
    tokenizer: for tokens, BOS, EOS and the chat template.
    limits: where to cut.
    where: the row's place, for messages.

  Raises:
    BadRow: an answer is empty.
    ValueError: the fields have the wrong form.
  """
  if not prompt and not isinstance(prompt, str):
    prompt, responses = _split_conversations(responses, where)
  encoded = [_encode(prompt, answer, tokenizer, where) for answer in responses]
  prompts = [ids for ids, _ in encoded]
  if prompt == "" and tokenizer.bos_id() is None:
    raise ValueError(
      f"{where}: the prompt is empty and the tokenizer has no BOS, so an answer's "
      "first token has nothing to be predicted from; give the pair a prompt"
    )
  if any(ids != prompts[0] for ids in prompts):
    raise ValueError(
      f"{where}: the prompt is not tokenised alike before both answers (the chat "
      "template shows it by what follows): render it yourself and pass texts"
    )
  answers = tuple(ids[: limits.response] for _, ids in encoded)
  cut = any(len(ids) > limits.response for _, ids in encoded)
  kept = _keep_end(prompts[0], limits.prompt, tokenizer.bos_id())
  return Row(kept, answers, (len(kept) < len(prompts[0]), cut))


def _split_conversations(
  responses: Sequence[Any], where: str
) -> tuple[Sequence[Any], list[Any]]:
  """(messages in common, the rest of each): of conversations that begin alike."""
  if not all(is_messages(answer) and answer for answer in responses):
    raise ValueError(
      f"{where}: without a prompt the answers must be whole conversations (lists of "
      "messages with a common beginning); add the prompt"
    )
  common = 0
  shortest = min(len(answer) for answer in responses) - 1
  while common < shortest and all(a[common] == responses[0][common] for a in responses):
    common += 1
  return responses[0][:common], [answer[common:] for answer in responses]


def is_messages(value: Any) -> bool:
  """Whether it is a conversation (or no turn of one) rather than a column."""
  return isinstance(value, list | tuple) and all(isinstance(m, Mapping) for m in value)


def _encode(
  prompt: Text, answer: Any, tokenizer: TokenizerAdapter, where: str
) -> tuple[list[int], list[int]]:
  """Token ids of the prompt and of the answer."""
  if isinstance(prompt, str):
    if not isinstance(answer, str):
      raise ValueError(
        f"{where}: the prompt is a text and an answer a {type(answer).__name__}: make "
        "both texts, or the prompt a list of messages"
      )
    empty = not answer.strip()
    record: dict[str, Any] = {"prompt": prompt, "response": answer}
  else:
    message = _answer_message(answer, where)
    empty = not (message.get("content") or "").strip() and not message.get("tool_calls")
    shown = [{**turn, "train": False} for turn in prompt]
    record = {"messages": [*shown, {**message, "train": True, "weight": 1}]}
  if empty:
    raise BadRow(f"{where}: an answer is empty; drop the pair")
  example = chat.render(
    record, tokenizer, where=where, chat=not isinstance(prompt, str)
  )
  split = example.prompt_length
  answer_ids = example.tokens[split:][example.mask[split:] == 1]
  return example.tokens[:split].tolist(), answer_ids.tolist()


def _answer_message(answer: Any, where: str) -> Mapping[str, Any]:
  """The assistant's message that an answer to messages is."""
  if isinstance(answer, str):
    return {"role": "assistant", "content": answer}
  turns = [answer] if isinstance(answer, Mapping) else answer
  if is_messages(turns) and len(turns) == 1 and turns[0].get("role") == "assistant":
    return turns[0]
  roles = [turn.get("role") for turn in turns] if is_messages(turns) else turns
  raise ValueError(
    f"{where}: an answer to messages is one message of the assistant, found {roles!r}: "
    "put the turns before it into the prompt"
  )


def _keep_end(ids: list[int], limit: int, bos: int | None) -> list[int]:
  """The last `limit` tokens, BOS in front if it was there."""
  if len(ids) <= limit:
    return ids
  if ids[0] == bos and limit > 1:
    return [ids[0], *ids[1 - limit :]]
  return ids[-limit:]


def pad(
  rows: Sequence[Sequence[int]], width: int, *, left: bool
) -> tuple[np.ndarray, np.ndarray]:
  """(ids, mask), int32 [B, width]; padding is 0 in both."""
  ids = np.zeros((len(rows), width), np.int32)
  mask = np.zeros((len(rows), width), np.int32)
  for i, row in enumerate(rows):
    place = slice(width - len(row), width) if left else slice(0, len(row))
    ids[i, place], mask[i, place] = row, 1
  return ids, mask
