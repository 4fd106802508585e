"""From text or messages to tokens and the mask of what is trained."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunix.data import records, spans
from tunix.data.spans import Segment
from tunix.generate.tokenizer_adapter import TokenizerAdapter

# Templates that show today's date show this one in training data: tokens must depend
# on the data alone, or a run resumed after midnight would train on others. (It is
# the date that Llama 3's templates fall back to.)
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)

# Keys of a message that are ours and no business of the template's.
_OUR_KEYS = ("weight", "train")

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """Tokens of one record.

  Attributes:
    tokens: int32 [T].
    mask: int32 [T], 1 on trained tokens. The first token is never trained: nothing
      stands before it to predict it from.
    prompt_length: tokens before the first trained one.
  """

  tokens: np.ndarray
  mask: np.ndarray
  prompt_length: int

  def __len__(self) -> int:
    return len(self.tokens)


def make_example(tokens: list[int], mask: list[int]) -> Example:
  """An example from equally long lists; the first token's mask becomes 0."""
  assert len(tokens) == len(mask)
  marks = np.asarray(mask, np.int32)
  marks[:1] = 0
  trained = np.flatnonzero(marks)
  return Example(
    tokens=np.asarray(tokens, np.int32),
    mask=marks,
    prompt_length=int(trained[0]) if len(trained) else len(marks),
  )


def render(
  record: Mapping[str, Any],
  tokenizer: TokenizerAdapter,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
) -> Example:
  """Tokens and mask of one record of fine-tuning.

  Of a conversation the assistant's turns are trained, each with the token that ends
  it; of a prompt with a completion, that and its end; of a text, everything.
  Text is tokenised piece by piece between those borders, as it is when a model
  continues a prompt.

  Args:
    record: a record as `tunix.data.records` describes.
    tokenizer: gives tokens, BOS, EOS and the chat template.
    where: the record's place, for error messages.
    chat: whether a prompt given as plain text is the user's turn of a chat. None:
      when the tokenizer has a chat template.
    template_kwargs: further names for the chat template; "tools" of the record wins.

  Raises:
    ValueError: the record is malformed, the template is missing or refuses it, or
      nothing of it would be trained. The message begins with `where`.
  """
  read = records.read_sft(record, where)
  return render_completion(
    read.prompt,
    read.completions["completion"],
    tokenizer,
    where=where,
    chat=False if read.form == "text" else chat,
    template_kwargs=with_tools(read.tools, template_kwargs),
  )


def render_completion(
  prompt: str | Sequence[Message],
  completion: str | Sequence[Message],
  tokenizer: TokenizerAdapter,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
) -> Example:
  """Tokens and mask of a prompt with its completion, which is trained.

  Args:
    prompt: text, or the messages before the answer; empty: there are none.
    completion: the answer's text, or messages; of those the assistant's are trained.
    tokenizer, where, chat, template_kwargs: see `render`.

  Raises:
    ValueError: see `render`.
  """
  chat = tokenizer.has_chat_template() if chat is None else chat
  try:
    if isinstance(prompt, str) and isinstance(completion, str) and not chat:
      return _plain([Segment(prompt, False), Segment(completion, True)], tokenizer)
    _check_template(tokenizer, chat)
    return _chat(_conversation(prompt, completion), tokenizer, template_kwargs or {})
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error


def render_prompt(
  prompt: str | Sequence[Message],
  tokenizer: TokenizerAdapter,
  *,
  where: str = "record",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
) -> Example:
  """Tokens of a prompt that nothing follows yet, chats with the header of the answer:
  those in front of its completion in `render_completion`.

  Args:
    prompt, tokenizer, where, chat, template_kwargs: see `render_completion`.

  Raises:
    ValueError: see `render`.
  """
  chat = tokenizer.has_chat_template() if chat is None else chat
  text = prompt_text(
    prompt, tokenizer, where=where, chat=chat, template_kwargs=template_kwargs
  )
  plain = isinstance(prompt, str) and not chat
  try:
    return _tokenise([Segment(text, False)], tokenizer, add_eos=False, add_bos=plain)
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
  """The text that a model continues; chats end with the header of the answer.

  Args, Raises: see `render_prompt`.
  """
  chat = tokenizer.has_chat_template() if chat is None else chat
  if isinstance(prompt, str) and not chat:
    return prompt
  try:
    _check_template(tokenizer, chat)
    return tokenizer.apply_chat_template(
      _shown(_conversation(prompt, [])),
      True,
      now=TEMPLATE_DATE,
      **(template_kwargs or {}),
    )
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error


def _check_template(tokenizer: TokenizerAdapter, chat: bool) -> None:
  if chat:
    return
  raise ValueError(
    "a list of messages needs a chat template, and "
    + (
      "chat is False"
      if tokenizer.has_chat_template()
      else "the tokenizer has none; give one with chat_template=..."
    )
  )


def with_tools(tools: Any, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
  """Names for the template; [] as a record's tools says that it has none."""
  variables = dict(template_kwargs or {})
  return variables if tools is None else {**variables, "tools": tools}


def _conversation(
  prompt: str | Sequence[Message], completion: str | Sequence[Message]
) -> list[dict[str, Any]]:
  """The messages; those of the prompt are marked as not trained."""
  if isinstance(prompt, str):
    prompt = [{"role": "user", "content": prompt}]
  if isinstance(completion, str):
    completion = [{"role": "assistant", "content": completion}]
  return [*({**m, "train": False} for m in prompt), *(dict(m) for m in completion)]


def is_trained(message: Message) -> bool:
  """Whether a turn of a conversation is learned."""
  return (
    message["role"] == "assistant"
    and message.get("train", True)
    and bool(message.get("weight", 1))
  )


def _shown(messages: Sequence[Message]) -> list[dict[str, Any]]:
  """The messages as templates see them."""
  return [{k: v for k, v in m.items() if k not in _OUR_KEYS} for m in messages]


def _chat(
  messages: Sequence[Message], tokenizer: TokenizerAdapter, variables: Mapping[str, Any]
) -> Example:
  turns = [i for i, message in enumerate(messages) if is_trained(message)]
  shown = _shown(messages)

  def rendered(some: Sequence[Message], add_generation_prompt: bool) -> str:
    return tokenizer.apply_chat_template(
      some, add_generation_prompt, now=TEMPLATE_DATE, **variables
    )

  bos = tokenizer.bos_token if tokenizer.bos_id() != tokenizer.eos_id() else None
  closing = [text for text in tokenizer.special_tokens() if text != bos]
  segments, needs_eos = spans.find_segments(shown, turns, rendered, closing)
  example = _tokenise(segments, tokenizer, add_eos=needs_eos)
  if not example.mask.any():
    raise ValueError(f"nothing to train: {_why_untrained(messages, turns)}")
  return example


def _why_untrained(messages: Sequence[Message], turns: Sequence[int]) -> str:
  roles = list(dict.fromkeys(message["role"] for message in messages))
  if turns:
    return "the chat template shows nothing of the assistant's turns; change it"
  if "assistant" in roles:
    return 'every assistant turn has "weight": 0 or "train": false; drop the record'
  return f"no turn of the role 'assistant' (roles: {', '.join(roles)}); add one"


def _plain(segments: Sequence[Segment], tokenizer: TokenizerAdapter) -> Example:
  example = _tokenise(segments, tokenizer, add_eos=True, add_bos=True)
  if not example.mask.any():
    raise ValueError("nothing to train: the text is empty; drop the record")
  return example


def _check_text(text: str) -> None:
  """JSON can write half of a surrogate pair, which is no character and has no token."""
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
) -> Example:
  """Tokens of the segments, one after the other; BOS and EOS are never doubled."""
  tokens: list[int] = []
  mask: list[int] = []
  for segment in segments:
    _check_text(segment.text)
    encode = tokenizer.encode_continuation if tokens else tokenizer.encode
    ids = encode(segment.text)
    tokens += ids
    mask += [int(segment.trained)] * len(ids)
  bos, eos = tokenizer.bos_id(), tokenizer.eos_id()
  if add_bos and bos is not None and tokens[:1] != [bos]:
    tokens, mask = [bos, *tokens], [0, *mask]
  if add_eos and eos is None:
    raise ValueError(
      "the tokenizer has no end-of-sequence token, so the model could not learn to "
      "stop; name one with eos_token=..."
    )
  if add_eos and eos is not None and (tokens[-1:], mask[-1:]) != ([eos], [1]):
    tokens, mask = [*tokens, eos], [*mask, 1]
  return make_example(tokens, mask)
