"""Renders text or messages to tokens, with a mask of the tokens that are trained."""

from __future__ import annotations

import datetime
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunix.data import image_parts, records
from tunix.data.images import ImageReader, Picture
from tunix.data.turns import marked, reasoning as thoughts, trained_spans
from tunix.data.turns.reasoning import Reasoning
from tunix.data.turns.trained_spans import Segment
from tunix.generate.tokenizer_adapter import TokenizerAdapter

# Chat templates that print today's date get this fixed date. With the real date, a run
# that is resumed on another day would train on other tokens. The templates of Llama 3
# have the same default date.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)

# Keys of a message that the chat template must not see.
_PRIVATE_KEYS = ("weight", "train")

Message = Mapping[str, Any]
Expand = Callable[[Sequence[Segment]], list[Segment]]


class Rendered(NamedTuple):
  """Tokens of a prompt and its completions, int32, without padding.

  A row of fine-tuning has one completion, which begins with its first trained token.

  Attributes:
    prompt: [P], with BOS once in front if the tokenizer has one. In chats it ends with
      the header of the answer.
    completions: [C] each, without BOS, ending with the token that closes an answer.
    masks: [C] each, 1 on tokens that are trained or scored. Turns of users and tools
      inside a completion are 0: the model sees them as context.
    extra: further fields of the record, see `tunix.data.records.Record`.
    empty: numbers of the completions without text; see `Source.fault`.
    is_stripped: reasoning was removed from a completion.
    pictures: images of the prompt, in the order of their tokens.
  """

  prompt: np.ndarray
  completions: tuple[np.ndarray, ...]
  masks: tuple[np.ndarray, ...]
  extra: Mapping[str, Any] = {}
  empty: tuple[int, ...] = ()
  is_stripped: bool = False
  pictures: tuple[Picture, ...] = ()

  @property
  def prompt_length(self) -> int:
    """Number of prompt tokens P."""
    return len(self.prompt)

  @property
  def tokens(self) -> np.ndarray:
    """int32 [P + C], the prompt followed by its only completion."""
    [completion] = self.completions
    return np.concatenate([self.prompt, completion])

  @property
  def mask(self) -> np.ndarray:
    """int32 [P + C], 1 on trained tokens of prompt and only completion."""
    [mask] = self.masks
    return np.concatenate([np.zeros_like(self.prompt), mask])


def rendered_row(
  tokens: Sequence[int] | np.ndarray, mask: Sequence[int] | np.ndarray
) -> Rendered:
  """Splits a row of tokens before its first trained token.

  The first token of a row is never trained, because no token before it predicts it.

  Args:
    tokens: T token ids.
    mask: T numbers, 1 on trained tokens.
  """
  assert len(tokens) == len(mask)
  ids, marks = np.asarray(tokens, np.int32), np.array(mask, np.int32)
  marks[:1] = 0
  trained = np.flatnonzero(marks)
  start = int(trained[0]) if len(trained) else len(marks)
  return Rendered(ids[:start], (ids[start:],), (marks[start:],))


def render(
  record: Mapping[str, Any],
  tokenizer: TokenizerAdapter,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
  reasoning: Reasoning = "keep",
  images: ImageReader | None = None,
  folder: pathlib.Path | None = None,
) -> Rendered:
  """Returns tokens and mask of one record of fine-tuning.

  In a conversation, the assistant's turns are trained, each with the tokens that close
  it. If the chat template has `{% generation %}` blocks, the text in the blocks of
  these turns is trained instead. In a record with a prompt and a response, the response
  and its end are trained. In a text, all tokens are trained. Trained and untrained
  pieces of text are tokenized separately, because a model that continues a prompt sees
  the same boundary.

  Args:
    record: a record of the kind SFT, see `tunix.data.records`.
    tokenizer: tokenizer with BOS, EOS and the chat template.
    where: place of the record, for error messages.
    chat: True treats a plain-text prompt as the user's turn of a chat. None does so if
      the tokenizer has a chat template.
    template_kwargs: further variables of the chat template; "tools" of the record
      overrides them.
    reasoning: treatment of trained turns that reason although the generation prompt
      ends behind a closed block of reasoning: "error", "strip" or "keep".
    images: reads the images of records; None: a record with images is refused.
    folder: folder that relative paths of images begin in; None: the working directory.

  Raises:
    ValueError: the record is malformed, the template is missing or refuses it, or no
      token of it would be trained. The message begins with `where`.
  """
  read = records.read_sft(record, where)
  completion = read.completions["completion"]
  options: Any = {
    "where": where,
    "chat": False if read.form == "text" else chat,
    "template_kwargs": with_tools(read.tools, template_kwargs),
    "reasoning": reasoning,
  }
  sources = image_parts.sources(read.prompt, completion)
  pictures, expand = opened(sources, images, folder, where)
  row = render_completion(read.prompt, completion, tokenizer, expand=expand, **options)
  return row._replace(pictures=pictures)


def opened(
  sources: Sequence[Any],
  images: ImageReader | None,
  folder: pathlib.Path | None,
  where: str,
) -> tuple[tuple[Picture, ...], Expand | None]:
  """Opens the images of a record; see `render` for the arguments.

  Returns:
    The images, and the function that puts their text into a rendered chat; None without
    images.

  Raises:
    ValueError: an image cannot be read, or only text is read; begins with `where`.
  """
  if not sources:
    return (), None
  if images is None:
    raise ValueError(
      f"{where}: the record has an image, and only text is read here; expected a model "
      "with a vision tower in a job that reads images (model.images=true; in Python "
      "images=ImageReader(folder, model.config)). Or leave out the image"
    )
  pictures = images.open(sources, folder, where)
  return pictures, functools.partial(images.expand, pictures)


def render_completion(
  prompt: str | Sequence[Message],
  completion: str | Sequence[Message] | None,
  tokenizer: TokenizerAdapter,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
  reasoning: Reasoning = "keep",
  expand: Expand | None = None,
) -> Rendered:
  """Returns tokens and mask of a prompt and its completion, which is trained.

  Args:
    prompt: text, or the messages before the answer; may be empty.
    completion: text of the answer, or messages, of which the assistant's are trained.
      None returns the prompt alone, with the same tokens as before a completion.
    tokenizer, where, chat, template_kwargs, reasoning: as for `render`.
    expand: puts the text of images into the rendered chat, see `ImageReader.expand`.

  Raises:
    ValueError: as for `render`.
  """
  chat = tokenizer.has_chat_template() if chat is None else chat
  is_plain = isinstance(prompt, str) and not chat
  text = ""
  if completion is None:
    text = prompt_text(
      prompt, tokenizer, where=where, chat=chat, template_kwargs=template_kwargs
    )
  try:
    if completion is None:
      prefix = [Segment(text, False)]
      prefix = prefix if expand is None else expand(prefix)
      return _tokenise(prefix, tokenizer, add_eos=False, add_bos=is_plain)
    if isinstance(prompt, str) and isinstance(completion, str) and not chat:
      return _plain([Segment(prompt, False), Segment(completion, True)], tokenizer)
    _check_template(tokenizer, chat)
    messages = _conversation(prompt, completion)
    return _chat(messages, tokenizer, template_kwargs or {}, reasoning, expand)
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error


def prompt_text(
  prompt: str | Sequence[Message],
  tokenizer: TokenizerAdapter,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
) -> str:
  """Returns the text that a model continues.

  In chats the text ends with the header of the answer.

  Args:
    prompt, tokenizer, where, chat, template_kwargs: as for `render_completion`.

  Raises:
    ValueError: as for `render`.
  """
  chat = tokenizer.has_chat_template() if chat is None else chat
  if isinstance(prompt, str) and not chat:
    return prompt
  try:
    _check_template(tokenizer, chat)
    return tokenizer.apply_chat_template(
      _visible(_conversation(prompt, [])),
      True,
      now=TEMPLATE_DATE,
      **(template_kwargs or {}),
    )
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error


def _check_template(tokenizer: TokenizerAdapter, chat: bool) -> None:
  if chat:
    return
  reason = (
    "chat is False"
    if tokenizer.has_chat_template()
    else "the tokenizer has none; give one with chat_template=..."
  )
  raise ValueError(f"a list of messages needs a chat template, and {reason}")


def with_tools(
  tools: object, template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
  """Returns the template's variables with the record's tools; [] means no tools."""
  variables = dict(template_kwargs or {})
  return variables if tools is None else {**variables, "tools": tools}


def _conversation(
  prompt: str | Sequence[Message], completion: str | Sequence[Message]
) -> list[dict[str, Any]]:
  """Joins the messages and marks those of the prompt as not trained."""
  if isinstance(prompt, str):
    prompt = [{"role": "user", "content": prompt}]
  if isinstance(completion, str):
    completion = [{"role": "assistant", "content": completion}]
  return [*({**m, "train": False} for m in prompt), *(dict(m) for m in completion)]


def is_trained(message: Message) -> bool:
  """Returns True if a turn of a conversation is trained."""
  return (
    message["role"] == "assistant"
    and message.get("train", True)
    and bool(message.get("weight", 1))
  )


def _visible(messages: Sequence[Message]) -> list[dict[str, Any]]:
  """Returns the messages as the chat template receives them."""
  return [
    {k: v for k, v in image_parts.bare(m).items() if k not in _PRIVATE_KEYS}
    for m in messages
  ]


def _chat(
  messages: Sequence[Message],
  tokenizer: TokenizerAdapter,
  variables: Mapping[str, Any],
  reasoning: Reasoning,
  expand: Expand | None = None,
) -> Rendered:
  turns = [i for i, message in enumerate(messages) if is_trained(message)]

  def apply(some: Sequence[Message], add_generation_prompt: bool) -> str:
    return tokenizer.apply_chat_template(
      some, add_generation_prompt, now=TEMPLATE_DATE, **variables
    )

  def mark(some: Sequence[Message], marks: tuple[str, str]) -> str:
    return tokenizer.apply_chat_template(
      some, False, now=TEMPLATE_DATE, generation_marks=marks, **variables
    )

  # Locating a turn changes its arguments, so they have their last form before.
  converted = tokenizer.template_messages(_visible(messages), variables.get("tools"))
  visible = thoughts.without_unsampled(converted, turns, apply, reasoning)
  if tokenizer.marks_generation(variables.get("tools")):
    segments, needs_eos = marked.find_segments(visible, turns, apply, mark), False
  else:
    # Any special token except BOS may close a turn. If a tokenizer uses one token for
    # BOS and EOS, this token closes turns too.
    bos = tokenizer.bos_token if tokenizer.bos_id() != tokenizer.eos_id() else None
    closing = [text for text in tokenizer.special_tokens() if text != bos]
    segments, needs_eos = trained_spans.find_segments(visible, turns, apply, closing)
  if expand is not None:
    segments = expand(segments)
  row = _tokenise(segments, tokenizer, add_eos=needs_eos)
  # Of such a turn at most the end would be trained.
  is_empty = any(
    visible[i] is not converted[i] and records.is_empty([visible[i]]) for i in turns
  )
  if not row.masks[0].any() and not is_empty:
    raise ValueError(f"nothing to train: {_why_untrained(messages, turns)}")
  return row._replace(
    is_stripped=visible is not converted, empty=(0,) if is_empty else ()
  )


def _why_untrained(messages: Sequence[Message], turns: Sequence[int]) -> str:
  roles = list(dict.fromkeys(message["role"] for message in messages))
  if turns:
    return "the chat template prints no text of the assistant's turns; change it"
  if "assistant" in roles:
    return 'every assistant turn has "weight": 0 or "train": false; drop the record'
  return f"no turn has the role 'assistant' (roles: {', '.join(roles)}); add one"


def _plain(segments: Sequence[Segment], tokenizer: TokenizerAdapter) -> Rendered:
  row = _tokenise(segments, tokenizer, add_eos=True, add_bos=True)
  if not row.masks[0].any():
    raise ValueError("nothing to train: the text is empty; drop the record")
  return row


def check_unicode(text: str) -> None:
  """Refuses text with half of a surrogate pair: JSON allows it, UTF-8 does not."""
  try:
    text.encode()
  except UnicodeEncodeError as error:
    code = f"\\u{ord(text[error.start]):04x}"
    raise ValueError(
      f"the text holds {code}, half of a surrogate pair, which is no character; "
      "correct or drop the record"
    ) from error


def _tokenise(
  segments: Sequence[Segment],
  tokenizer: TokenizerAdapter,
  *,
  add_eos: bool,
  add_bos: bool = False,
) -> Rendered:
  """Returns the tokens of consecutive segments.

  BOS and EOS are added, unless the text already has them. Each segment is encoded
  separately. Encoding the joined text could merge the last character of a prompt and
  the first character of an answer into one token, which a model that continues the
  prompt never produces.
  """
  tokens: list[int] = []
  mask: list[int] = []
  for segment in segments:
    check_unicode(segment.text)
    encode = tokenizer.encode_continuation if tokens else tokenizer.encode
    ids = encode(segment.text)
    tokens += ids
    mask += [int(segment.trained)] * len(ids)
  bos, eos = tokenizer.bos_id(), tokenizer.eos_id()
  if add_bos and tokenizer.add_bos and bos is not None and tokens[:1] != [bos]:
    tokens, mask = [bos, *tokens], [0, *mask]
  if add_eos and eos is None:
    raise ValueError(
      "the tokenizer has no end-of-sequence token, which the model needs to learn to "
      "stop; name one with eos_token=..."
    )
  if add_eos and eos is not None and (tokens[-1:], mask[-1:]) != ([eos], [1]):
    tokens, mask = [*tokens, eos], [*mask, 1]
  return rendered_row(tokens, mask)
