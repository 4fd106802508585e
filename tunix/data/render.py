"""From a record to tokens: a prompt, and completions with the mask of what counts.

Where text ends and begins is what `tunix.data.chat` says for every kind of record, so
that a completion has the tokens that fine-tuning trains and a model would sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix.data import chat as chats, records
from tunix.data.chat import Example
from tunix.data.records import SFT, Kind
from tunix.generate.tokenizer_adapter import TokenizerAdapter

# Text, messages of a chat, or token ids.
Text = str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray


class Rendered(NamedTuple):
  """A prompt and its completions, int32, not padded.

  Attributes:
    prompt: [P], with the tokenizer's BOS once in front, up to the completion (in chats:
      with the header of the answer).
    completions: [C] each, without BOS, with the token that ends an answer.
    masks: [C] each, 1 on tokens that are trained or scored; 0 on turns of users and
      tools inside a completion of several messages, which the model sees.
    extra: "margin" or "label", where the record has it.
    empty: names of completions that say nothing.
  """

  prompt: np.ndarray
  completions: tuple[np.ndarray, ...]
  masks: tuple[np.ndarray, ...]
  extra: Mapping[str, Any] = {}
  empty: tuple[str, ...] = ()


def render_record(
  record: Mapping[str, Any],
  kind: Kind,
  tokenizer: TokenizerAdapter,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
) -> Rendered:
  """A record as tokens; see `tokenise`.

  Raises:
    ValueError: the record is malformed, or nothing of it would be trained; begins with
      `where`.
  """
  how: Any = {"where": where, "chat": chat, "template_kwargs": template_kwargs}
  if kind is SFT:
    return parted(chats.render(record, tokenizer, **how))
  read = kind.read(record, where)
  how["template_kwargs"] = chats.with_tools(read.tools, template_kwargs)
  texts = read.completions
  rendered = tokenise(read.prompt, list(texts.values()), tokenizer, **how)
  empty = tuple(name for name in texts if records.is_empty(texts[name]))
  return rendered._replace(extra=read.extra, empty=empty)


def parted(example: Example) -> Rendered:
  """A row of fine-tuning as a prompt and what is behind it."""
  start = example.prompt_length
  return Rendered(
    example.tokens[:start], (example.tokens[start:],), (example.mask[start:],)
  )


def joined(rendered: Rendered) -> Example:
  """Prompt and completion in one row."""
  [completion], [mask] = rendered.completions, rendered.masks
  return Example(
    tokens=np.concatenate([rendered.prompt, completion]),
    mask=np.concatenate([np.zeros_like(rendered.prompt), mask]),
    prompt_length=len(rendered.prompt),
  )


def tokenise(
  prompt: Text,
  completions: Sequence[Text],
  tokenizer: TokenizerAdapter | None,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
) -> Rendered:
  """Tokens of a prompt and of its completions.

  Args:
    prompt: text, messages, or token ids, which stay as they are.
    completions: of the prompt, or none; token ids where the prompt is, else text or
      messages.
    tokenizer: encodes text and renders chats; token ids need none.
    where: the place of the record, for error messages.
    chat: whether a prompt of plain text is the user's turn of a chat; None: when the
      tokenizer has a chat template.
    template_kwargs: further names for the chat template.

  Raises:
    ValueError: the template is missing or refuses the messages, the prompt is empty, or
      the template shows it otherwise before another completion. The message begins with
      `where`.
  """
  if not isinstance(prompt, str) and not len(prompt):
    raise ValueError(
      f"{where}: the prompt has nothing to predict a completion from; drop the record"
    )
  if _are_ids(prompt):
    return _from_ids(prompt, completions, where)
  if tokenizer is None:
    raise ValueError(f"{where}: text needs a tokenizer; give one, or token ids")
  how: Any = {"where": where, "chat": chat, "template_kwargs": template_kwargs}
  texts: Any = completions
  asked: Any = prompt
  rendered = [chats.render_completion(asked, text, tokenizer, **how) for text in texts]
  shown = rendered or [chats.render_prompt(asked, tokenizer, **how)]
  prompts = [example.tokens[: example.prompt_length] for example in shown]
  plain = isinstance(prompt, str) and not (
    tokenizer.has_chat_template() if chat is None else chat
  )
  if plain and not prompt and tokenizer.bos_id() is None:
    raise ValueError(
      f"{where}: the prompt is empty, and this tokenizer has no BOS to begin with: "
      "there is nothing to predict a completion from; drop the record"
    )
  if any(not np.array_equal(other, prompts[0]) for other in prompts[1:]):
    raise ValueError(f"{where}: {_why_prompts_differ(completions)}")
  # Up to the last trained token: what a template writes behind it is no answer.
  ends = [int(np.flatnonzero(example.mask)[-1]) + 1 for example in rendered]
  return Rendered(
    prompts[0],
    tuple(e.tokens[e.prompt_length : end] for e, end in zip(rendered, ends)),
    tuple(e.mask[e.prompt_length : end] for e, end in zip(rendered, ends)),
  )


def _why_prompts_differ(completions: Sequence[Text]) -> str:
  """What of the record, or of the template, makes them so."""
  before = [_before_the_answer(completion) for completion in completions]
  for turns in zip(*before):
    if any(turn != turns[0] for turn in turns):
      return (
        f"the completions differ in a turn of the role {turns[0]['role']!r} before the "
        "assistant's first: they are compared behind the same prompt; give both the "
        "same one, or drop the record"
      )
  if any(len(turns) != len(before[0]) for turns in before):
    return (
      "one completion has turns before the assistant's first that another has not: "
      "give both the same prompt, or drop the record"
    )
  return (
    "the chat template writes the prompt differently before each completion; use a "
    "template whose prompt does not depend on the answer"
  )


def _before_the_answer(completion: Any) -> list[Any]:
  turns = [] if isinstance(completion, str) else completion
  return list(itertools.takewhile(lambda turn: turn["role"] != "assistant", turns))


def _are_ids(text: Text) -> bool:
  if isinstance(text, str):
    return False
  return isinstance(text, np.ndarray) or isinstance(text[0], int | np.integer)


def _from_ids(prompt: Any, completions: Sequence[Any], where: str) -> Rendered:
  if not all(len(some) == 0 or _are_ids(some) for some in completions):
    raise ValueError(
      f"{where}: the prompt is token ids and a completion is not; give ids for both"
    )
  ids = tuple(np.asarray(some, np.int32) for some in completions)
  masks = tuple(np.ones(len(some), np.int32) for some in ids)
  return Rendered(np.asarray(prompt, np.int32), ids, masks)


def seen_part(ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Ids and mask up to the last scored token: what the scores of a completion depend
  on, unscored tokens between its turns among it. What comes behind is padding."""
  scored = np.flatnonzero(mask)
  stop = int(scored[-1]) + 1 if len(scored) else 0
  return ids[:stop], mask[:stop] != 0


def are_equal(pair: Rendered) -> bool:
  """Whether both completions of a pair are the same: what is scored, and what is seen
  by what is scored."""
  chosen, rejected = map(seen_part, pair.completions, pair.masks)
  return all(map(np.array_equal, chosen, rejected))
