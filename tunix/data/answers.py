"""A prompt with its responses as tokens, for training that compares responses.

Prompts are padded on the left and responses on the right, as rollouts are. Where text
ends and begins is what `tunix.data.chat` says, so that a response has the tokens that
fine-tuning would train and a model would sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix.data import chat as chats
from tunix.data.examples import Overlong
from tunix.generate.tokenizer_adapter import TokenizerAdapter

# Text, messages of a chat, or token ids.
Text = str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray


class Answered(NamedTuple):
  """A prompt and its responses, int32, not padded.

  Attributes:
    prompt: [P], with the tokenizer's BOS once in front, up to the response (in chats:
      with the header of the answer).
    responses: [R] each, without BOS, with the token that ends an answer.
    masks: [R] each, 1 on scored tokens; 0 on turns of users and tools inside a response
      of several messages, which the model sees.
  """

  prompt: np.ndarray
  responses: tuple[np.ndarray, ...]
  masks: tuple[np.ndarray, ...]


def tokenise(
  prompt: Text,
  responses: Sequence[Text],
  tokenizer: TokenizerAdapter | None,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
) -> Answered:
  """Tokens of a prompt and of its responses.

  Args:
    prompt: text, messages, or token ids, which stay as they are.
    responses: of the prompt, or none; token ids where the prompt is, else text or
      messages.
    tokenizer: encodes text and renders chats; token ids need none.
    where: the place of the record, for error messages.
    chat: whether a prompt of plain text is the user's turn of a chat; None: when the
      tokenizer has a chat template.
    template_kwargs: further names for the chat template.

  Raises:
    ValueError: the template is missing or refuses the messages, the prompt is empty, or
      the template shows it otherwise before another response. The message begins with
      `where`.
  """
  if not isinstance(prompt, str) and not len(prompt):
    raise ValueError(
      f"{where}: the prompt has nothing to predict a response from; drop the record"
    )
  if _are_ids(prompt):
    return _from_ids(prompt, responses, where)
  if tokenizer is None:
    raise ValueError(f"{where}: text needs a tokenizer; give one, or token ids")
  how: Any = {"where": where, "chat": chat, "template_kwargs": template_kwargs}
  text: Any = prompt
  rendered = [
    chats.render_response(text, response, tokenizer, **how)  # pyright: ignore
    for response in responses
  ]
  shown = rendered or [chats.render_prompt(text, tokenizer, **how)]
  prompts = [example.tokens[: example.prompt_length] for example in shown]
  plain = isinstance(prompt, str) and not (
    tokenizer.has_chat_template() if chat is None else chat
  )
  if plain and not prompt and tokenizer.bos_id() is None:
    raise ValueError(
      f"{where}: the prompt is empty, and this tokenizer has no BOS to begin with: "
      "there is nothing to predict a response from; drop the record"
    )
  if any(not np.array_equal(other, prompts[0]) for other in prompts[1:]):
    raise ValueError(f"{where}: {_why_prompts_differ(responses)}")
  parts = [_response(e.tokens, e.mask, e.prompt_length) for e in rendered]
  return Answered(prompts[0], tuple(p[0] for p in parts), tuple(p[1] for p in parts))


def _why_prompts_differ(responses: Sequence[Text]) -> str:
  """What of the record, or of the template, makes them so."""
  before = [_before_the_answer(response) for response in responses]
  for turns in zip(*before):
    if any(turn != turns[0] for turn in turns):
      return (
        f"the responses differ in a turn of the role {turns[0]['role']!r} before the "
        "assistant's first: responses are compared behind the same prompt; give both "
        "the same one, or drop the record"
      )
  if any(len(turns) != len(before[0]) for turns in before):
    return (
      "one response has turns before the assistant's first that another has not: give "
      "both the same prompt, or drop the record"
    )
  return (
    "the chat template writes the prompt differently before each response; use a "
    "template whose prompt does not depend on the answer"
  )


def _before_the_answer(response: Any) -> list[Any]:
  turns = [] if isinstance(response, str) else response
  return list(itertools.takewhile(lambda turn: turn["role"] != "assistant", turns))


def _response(
  tokens: np.ndarray, mask: np.ndarray, start: int
) -> tuple[np.ndarray, np.ndarray]:
  """Up to the last trained token: what a template writes behind it is no answer."""
  stop = int(np.flatnonzero(mask)[-1]) + 1
  return tokens[start:stop], mask[start:stop]


def _are_ids(text: Text) -> bool:
  if isinstance(text, str):
    return False
  return isinstance(text, np.ndarray) or isinstance(text[0], int | np.integer)


def _from_ids(prompt: Any, responses: Sequence[Any], where: str) -> Answered:
  if not all(len(response) == 0 or _are_ids(response) for response in responses):
    raise ValueError(
      f"{where}: the prompt is token ids and a response is not; give ids for both"
    )
  ids = tuple(np.asarray(response, np.int32) for response in responses)
  masks = tuple(np.ones(len(response), np.int32) for response in ids)
  return Answered(np.asarray(prompt, np.int32), ids, masks)


def fit(
  answered: Answered,
  *,
  max_prompt_length: int | None,
  max_response_length: int | None,
  overlong: Overlong = "truncate",
  bos_id: int | None = None,
  keys: Mapping[str, str] | None = None,
) -> Answered | None:
  """The same within the limits; None when it is dropped.

  `truncate` keeps the end of a prompt, behind its BOS if it began with one, and the
  beginning of a response, which then learns no end.

  Args:
    answered: tokens.
    max_prompt_length, max_response_length: in tokens; None: no limit.
    overlong: what happens to what is longer.
    bos_id: of the tokenizer.
    keys: what messages call the arguments above; their names where not given.

  Raises:
    ValueError: something is longer and the policy is "error".
  """
  lengths = [("prompt", len(answered.prompt), max_prompt_length)]
  lengths += [("response", len(r), max_response_length) for r in answered.responses]
  over = [part for part in lengths if part[2] is not None and part[1] > part[2]]
  if not over:
    return answered
  if overlong == "drop":
    return None
  if overlong == "error":
    what, length, limit = over[0]
    name = lambda argument: (keys or {}).get(argument, argument)
    raise ValueError(
      f"the {what} has {length} tokens and {name(f'max_{what}_length')} is {limit}: "
      f'raise it, or set {name("overlong")} to "truncate" or "drop"'
    )
  return Answered(
    _end_of(answered.prompt, max_prompt_length, bos_id),
    tuple(response[:max_response_length] for response in answered.responses),
    tuple(mask[:max_response_length] for mask in answered.masks),
  )


def _end_of(prompt: np.ndarray, limit: int | None, bos_id: int | None) -> np.ndarray:
  if limit is None or len(prompt) <= limit:
    return prompt
  kept = prompt[-limit:].copy()
  if bos_id is not None and limit > 1 and prompt[0] == bos_id:
    kept[0] = bos_id
  return kept


def seen_part(ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Ids and mask up to the last scored token: what the scores of a response depend on,
  unscored tokens between its turns among it. What comes behind is padding."""
  scored = np.flatnonzero(mask)
  stop = int(scored[-1]) + 1 if len(scored) else 0
  return ids[:stop], mask[:stop] != 0


def equal_responses(pair: Answered) -> bool:
  """Whether both responses of a pair are the same: what is scored, and what is seen by
  what is scored."""
  chosen, rejected = map(seen_part, pair.responses, pair.masks)
  return all(map(np.array_equal, chosen, rejected))


def stack_prompts(
  prompts: Sequence[np.ndarray], length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Token ids and mask, int32 [B, length] each, padded on the left."""
  ids = np.full((len(prompts), length), pad_id, np.int32)
  mask = np.zeros((len(prompts), length), np.int32)
  for row, prompt in enumerate(prompts):
    ids[row, length - len(prompt) :] = prompt
    mask[row, length - len(prompt) :] = 1
  return ids, mask


def stack_responses(
  responses: Sequence[np.ndarray],
  masks: Sequence[np.ndarray],
  length: int,
  pad_id: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Token ids and mask, int32 [B, length] each, padded on the right."""
  ids = np.full((len(responses), length), pad_id, np.int32)
  mask = np.zeros((len(responses), length), np.int32)
  for row, (response, own) in enumerate(zip(responses, masks, strict=True)):
    ids[row, : len(response)] = response
    mask[row, : len(response)] = own
  return ids, mask
