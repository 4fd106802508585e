"""Renders records of every kind to tokens: a prompt, completions and their masks.

`tunix.data.chat` sets the boundary between prompt and completion for every kind of
record. A completion therefore has the same tokens in preference data, in fine-tuning
and in sampling.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix.data import chat as chats, image_parts, records
from tunix.data.chat import Expand, Rendered
from tunix.data.images import ImageReader, reference
from tunix.data.records import (
  IMAGE_TOKENS_COLUMN,
  IMAGES_COLUMN,
  PROMPT_COLUMN,
  PROMPT_IDS_COLUMN,
  PROMPT_ROWS,
  SFT,
  Kind,
)
from tunix.data.turns.reasoning import Reasoning
from tunix.data.turns.teacher_prompts import TEACHER_PROMPT
from tunix.generate.tokenizer_adapter import TokenizerAdapter

# Text, messages of a chat, or token ids.
Text = str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray


def render_record(
  record: Mapping[str, Any],
  kind: Kind,
  tokenizer: TokenizerAdapter,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
  reasoning: Reasoning = "keep",
  images: ImageReader | None = None,
  folder: pathlib.Path | None = None,
) -> Rendered:
  """Returns the tokens of a record.

  For a record of PROMPT_ROWS, `extra` has its columns and the text of its prompt,
  because samplers and reward functions take text.

  Args:
    record: the record.
    kind: kind that the record is read as.
    tokenizer, where, chat, template_kwargs, reasoning: as for `tokenise`.
    images, folder: as for `tunix.data.chat.render`.

  Raises:
    ValueError: the record is malformed, or nothing of it would be trained; begins with
      `where`.
  """
  options: Any = {"where": where, "chat": chat, "template_kwargs": template_kwargs}
  if kind is SFT:
    options |= {"images": images, "folder": folder}
    return chats.render(record, tokenizer, reasoning=reasoning, **options)
  read = kind.read(record, where)
  if kind is PROMPT_ROWS:
    return _prompt_row(read, tokenizer, images, folder, **options)
  options["template_kwargs"] = chats.with_tools(read.tools, template_kwargs)
  options["reasoning"] = reasoning
  texts = read.completions
  sources = image_parts.sources(read.prompt)
  pictures, options["expand"] = chats.opened(sources, images, folder, where)
  rendered = tokenise(read.prompt, list(texts.values()), tokenizer, **options)
  empty = tuple(
    number
    for number, text in enumerate(texts.values())
    if records.is_empty(text) or number in rendered.empty
  )
  extra = dict(read.extra)
  if TEACHER_PROMPT in extra:
    del options["reasoning"]
    reads = tokenizer if kind.teacher_tokenizer is None else kind.teacher_tokenizer
    own = tokenise(extra[TEACHER_PROMPT], [], reads, **options)
    extra[TEACHER_PROMPT] = own.prompt
  return rendered._replace(extra=extra, empty=empty, pictures=pictures)


def _prompt_row(
  read: records.Record,
  tokenizer: TokenizerAdapter,
  images: ImageReader | None,
  folder: pathlib.Path | None,
  *,
  where: str,
  **options: Any,
) -> Rendered:
  """Returns the prompt of a row; if images are read, the row has their columns."""
  sources = image_parts.sources(read.prompt)
  pictures, expand = chats.opened(sources, images, folder, where)
  options["where"] = where
  text = chats.prompt_text(read.prompt, tokenizer, **options)
  # The tokens that rows of fine-tuning have before a completion.
  prompt = chats.render_completion(
    read.prompt, None, tokenizer, expand=expand, **options
  ).prompt
  extra = {PROMPT_COLUMN: text, **read.extra}
  is_plain = np.array_equal(prompt, tokenizer.tokenize(text, add_eos=False))
  if images is not None or not is_plain:
    extra[PROMPT_IDS_COLUMN] = prompt.tolist()
  if images is not None:
    for name in set(image_parts.COLUMNS) & read.extra.keys():
      raise ValueError(
        f"{where}: there is a column {name!r} and the prompt has no placeholder of an "
        'image; expected {"type": "image"} in the messages, or <image> in the text. '
        "Rename the column if the model is not to see it"
      )
    extra[IMAGES_COLUMN] = [
      reference(source, picture.image, folder)
      for source, picture in zip(sources, pictures)
    ]
    extra[IMAGE_TOKENS_COLUMN] = sum(picture.num_tokens for picture in pictures)
  return Rendered(prompt, (), (), extra=extra, pictures=pictures)


def tokenise(
  prompt: Text,
  completions: Sequence[Text],
  tokenizer: TokenizerAdapter | None,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
  reasoning: Reasoning = "keep",
  expand: Expand | None = None,
) -> Rendered:
  """Returns the tokens of a prompt and its completions.

  Args:
    prompt: text, messages, or token ids, which are used unchanged.
    completions: completions of the prompt, possibly none. Token ids if the prompt is
      token ids, else text or messages.
    tokenizer: tokenizer with the chat template; None if everything is token ids.
    where: place of the record, for error messages.
    chat: True treats a plain-text prompt as the user's turn of a chat. None does so if
      the tokenizer has a chat template.
    template_kwargs: further variables of the chat template.
    reasoning: see `tunix.data.chat.render`.
    expand: see `tunix.data.chat.render_completion`.

  Raises:
    ValueError: the template is missing or refuses the messages, the prompt is empty, or
      its tokens depend on the completion. The message begins with `where`.
  """
  if not isinstance(prompt, str) and not len(prompt):
    raise ValueError(
      f"{where}: the prompt is empty, so that no token precedes the completion; drop "
      "the record"
    )
  if _are_ids(prompt):
    return _from_ids(prompt, completions, where)
  if tokenizer is None:
    raise ValueError(f"{where}: text needs a tokenizer; give one, or token ids")
  options: Any = {"where": where, "chat": chat, "template_kwargs": template_kwargs}
  source: Any = prompt
  texts: Any = completions
  rows = [
    chats.render_completion(
      source, text, tokenizer, reasoning=reasoning, expand=expand, **options
    )
    for text in texts or [None]
  ]
  is_plain = isinstance(prompt, str) and not (
    tokenizer.has_chat_template() if chat is None else chat
  )
  if is_plain and not prompt and not tokenizer.tokenize("", add_eos=False).size:
    has_bos = tokenizer.bos_id() is not None
    remedy = ", or set add_bos (tokenizer.add_bos: true)" if has_bos else ""
    raise ValueError(
      f"{where}: the prompt is empty and the tokenizer {'puts' if has_bos else 'has'} "
      f"no BOS before a text, so that no token precedes the completion; drop the record"
      f"{remedy}"
    )
  # A loss compares completions of one prompt. If a template printed the prompt
  # differently for each completion, the loss would compare prompts too.
  # A completion without text may have no boundary, and is not trained.
  prompts = [row.prompt for row in rows if not row.empty] or [rows[0].prompt]
  if any(not np.array_equal(prompt, prompts[0]) for prompt in prompts):
    raise ValueError(f"{where}: {_why_prompts_differ(completions)}")
  # Templates may print text after the last trained token. This text is not part of the
  # answer and is cut off.
  answers = rows if texts else []
  ends = [int(np.max(np.flatnonzero(row.masks[0]) + 1, initial=0)) for row in answers]
  return Rendered(
    prompts[0],
    tuple(row.completions[0][:end] for row, end in zip(answers, ends)),
    tuple(row.masks[0][:end] for row, end in zip(answers, ends)),
    empty=tuple(number for number, row in enumerate(rows) if row.empty),
    is_stripped=any(row.is_stripped for row in rows),
  )


def _why_prompts_differ(completions: Sequence[Text]) -> str:
  """Returns the reason in the record or in the template."""
  before = [_before_the_answer(completion) for completion in completions]
  for turns in zip(*before):
    if any(turn != turns[0] for turn in turns):
      return (
        f"the completions differ in a turn of the role {turns[0]['role']!r} before the "
        "assistant's first turn, which is part of the prompt; give both the same "
        "prompt, or drop the record"
      )
  if any(len(turns) != len(before[0]) for turns in before):
    return (
      "one completion has turns before the assistant's first turn that another lacks; "
      "give both the same prompt, or drop the record"
    )
  return (
    "the chat template prints the prompt differently before each completion; use a "
    "template whose prompt does not depend on the answer"
  )


def _before_the_answer(completion: Any) -> list[Any]:
  turns = [] if isinstance(completion, str) else completion
  return list(itertools.takewhile(lambda turn: turn["role"] != "assistant", turns))


def _are_ids(text: Text) -> bool:
  if isinstance(text, str):
    return False
  return isinstance(text, np.ndarray) or isinstance(text[0], int | np.integer)


def _from_ids(prompt: object, completions: Sequence[Any], where: str) -> Rendered:
  if not all(len(some) == 0 or _are_ids(some) for some in completions):
    raise ValueError(
      f"{where}: the prompt is token ids but a completion is not; give ids for both"
    )
  ids = tuple(np.asarray(some, np.int32) for some in completions)
  masks = tuple(np.ones(len(some), np.int32) for some in ids)
  return Rendered(np.asarray(prompt, np.int32), ids, masks)


def seen_part(ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns ids and boolean mask up to the last scored token.

  The score of a completion depends on exactly these tokens, including unscored tokens
  between its turns. Later tokens are padding.
  """
  scored = np.flatnonzero(mask)
  stop = int(scored[-1]) + 1 if len(scored) else 0
  return ids[:stop], mask[:stop] != 0


def are_equal(pair: Rendered) -> bool:
  """Returns True if both completions of a pair have equal tokens and equal masks.

  Tokens after the last scored one are ignored, see `seen_part`.
  """
  chosen, rejected = map(seen_part, pair.completions, pair.masks)
  return all(map(np.array_equal, chosen, rejected))
