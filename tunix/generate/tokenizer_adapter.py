"""One interface to every kind of tokenizer.

Samplers and data pipelines use `TokenizerAdapter`. Folders with a `tokenizer.json` are
read with `tokenizers` and `jinja2` alone; `transformers` is needed only for folders
without that file and for model ids without it.
"""

from __future__ import annotations

import datetime
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tunix.generate.tokenizer import (
  added_tokens,
  chat_template as chat_templates,
  files as tokenizer_files,
  loading as tokenizer_loading,
  messages as messages_lib,
)
from tunix.generate.tokenizer.backends import Backend, Token, choose
from tunix.generate.tokenizer.template_limits import ChatTemplateCostError

# Text before a continuation while it is encoded, see `encode_continuation`. No
# tokenizer that needs this anchor merges a line break with the next letter.
_ANCHOR = "\n"


class TokenizerAdapter:
  """A tokenizer of any kind that encodes, decodes and renders chats.

  The wrapped tokenizer is never changed. Id 0 has no special meaning.

  Attributes:
    add_eos: `tokenize` may end with the EOS token.
  """

  add_eos: bool = True

  def __init__(
    self,
    tokenizer: object,
    *,
    chat_template: tokenizer_files.ChatTemplates | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    pad_token: str | None = None,
    eos_ids: Sequence[int] = (),
    template_args: Mapping[str, Any] | None = None,
    add_bos: bool | None = None,
    message_form: Literal["plain", "given"] | None = None,
    add_tokens: Sequence[str] = (),
  ):
    """Wraps a tokenizer.

    Args:
      tokenizer: a transformers tokenizer, a `tokenizers.Tokenizer`, a tiktoken
        encoding, another adapter, or an object with encode, decode, bos_id, eos_id
        and pad_id, such as a SentencePiece processor.
      chat_template: jinja source, or sources by name. None: the tokenizer's.
      bos_token: text of the BOS token; "": there is none; None: the tokenizer's.
      eos_token: text of the EOS token; "": there is none; None: the tokenizer's.
      pad_token: text of the padding token; "": there is none; None: the tokenizer's.
      eos_ids: further end-of-sequence ids, as in a model's generation_config.json.
      template_args: defaults of the chat template's variables, such as
        {"enable_thinking": False}. They become part of `chat_template`.
      add_bos: True puts BOS before plain texts, False does not. None does what the
        tokenizer itself does. If it has no post-processor, as SentencePiece files, or
        if `bos_token` is given, None is True.
      message_form: "plain" gives the chat template messages in the one form of
        `tunix.generate.tokenizer.messages`; "given" as they are, without null fields,
        and keeps special tokens as text in the answers of episodes, as runs of earlier
        versions do. None: the form of the other adapter, else "plain".
      add_tokens: texts that become tokens of their own, with the next free ids. A text
        that is a token already stays as it is. See `tunix.generate.new_tokens`.

    Raises:
      ValueError: the object lacks methods, which the message names; it has no token of
        a given text, or cannot be extended by `add_tokens`; or a template cannot have
        an entry of `template_args`.
    """
    self._template_args = dict(template_args or {})
    chat_templates.check_defaults(self._template_args, "template_args")
    texts = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token}
    self._given_roles: dict[str, Token] = {}
    if isinstance(tokenizer, TokenizerAdapter):
      self._backend: Backend = tokenizer._backend
      self._given_roles |= tokenizer._given_roles
      chat_template = chat_template or tokenizer._given_template
      eos_ids = (*eos_ids, *tokenizer._given_eos_ids)
      self._template_args = tokenizer._template_args | self._template_args
      if add_bos is None and not bos_token:
        add_bos = vars(tokenizer).get("add_bos")
      self._message_form = message_form or tokenizer._message_form
      self._added = dict(tokenizer._added)
    else:
      self._backend = choose(tokenizer)
      self._message_form = message_form or "plain"
      self._added: dict[str, int] = {}
    if add_tokens:
      self._backend, new = added_tokens.extended(self._backend, add_tokens)
      self._added |= new
    self._given_template, self._given_eos_ids = chat_template, tuple(eos_ids)
    for role, text in texts.items():
      if text is not None:
        self._given_roles[role] = self._backend.named(role, text) if text else Token()
    if add_bos is not None or bos_token:
      self.add_bos = add_bos is not False

  def __repr__(self) -> str:
    return f"TokenizerAdapter({type(self.tokenizer).__name__})"

  @classmethod
  def from_pretrained(
    cls,
    path: str | os.PathLike[str],
    *,
    chat_template: tokenizer_files.ChatTemplates | None = None,
    revision: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    add_bos: bool | None = None,
    add_tokens: Sequence[str] = (),
  ) -> TokenizerAdapter:
    """Loads the tokenizer of a Hugging Face folder, a `tokenizer.json` or a model id.

    Args:
      path: the folder, the file, or a model id "owner/name".
      chat_template: jinja source, or sources by name. None: the tokenizer's.
      revision: commit, tag or branch of a model id; None: its newest commit.
      template_args, add_bos, add_tokens: see `TokenizerAdapter`.

    Raises:
      FileNotFoundError: the path does not exist, or has no tokenizer.
      ImportError: the folder has no `tokenizer.json`, and transformers is missing.
      ValueError: a file is damaged, a folder has a revision, or as for the constructor.
    """
    tokenizer = tokenizer_loading.load_pretrained(path, revision)
    return TokenizerAdapter(
      tokenizer,
      chat_template=chat_template,
      template_args=template_args,
      add_bos=add_bos,
      add_tokens=add_tokens,
    )

  @property
  def tokenizer(self) -> Any:
    """The wrapped object."""
    return self._backend.raw

  @functools.cached_property
  def add_bos(self) -> bool:
    """True if `tokenize` and rows of plain text begin with the BOS token."""
    return self._backend.begins_texts(self.bos_id())

  def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
    """Returns the token ids of `text`.

    Special tokens that are written in the text become their ids.

    Args:
      text: the text.
      add_special_tokens: add the tokens that the tokenizer puts around a text, or the
        BOS token if the tokenizer cannot. A text that begins with BOS gets no second
        one.
    """
    ids = self._backend.encode(text, add_special_tokens)
    if not add_special_tokens:
      return ids
    bos = self._bos()
    if not self._backend.adds_special:
      return ids if ids[:1] == bos else [*bos, *ids]
    is_double = bos and ids[:2] == 2 * bos and self._backend.puts_first(bos[0])
    return ids[1:] if is_double else ids

  def encode_continuation(self, text: str) -> list[int]:
    """Returns the token ids of a text that continues another text.

    SentencePiece-style tokenizers put a space before every text that they encode, which
    would be wrong inside a sentence. The ids of a first part from `encode` and those of
    a second part from this function together decode to the joined parts.
    """
    if not text or not self._adds_prefix:
      return self.encode(text)
    # After an anchor the tokenizer adds no space. The ids of the anchor are removed
    # again.
    anchor, ids = self.encode(_ANCHOR), self.encode(_ANCHOR + text)
    return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.encode(text)

  @functools.cached_property
  def _adds_prefix(self) -> bool:
    """True if a letter has other ids at the start of a text than after other text."""
    alone, after = self.encode("a"), self.encode(_ANCHOR + "a")
    return after[-len(alone) :] != alone

  def decode(
    self, ids: Sequence[int] | np.ndarray | int, skip_special_tokens: bool = True
  ) -> str:
    """Returns the text of token ids.

    Args:
      ids: a sequence or an array of ids, or one id.
      skip_special_tokens: leave out the texts of special tokens.
    """
    plain = [int(i) for i in np.atleast_1d(np.asarray(ids, dtype=np.int64))]
    if skip_special_tokens and not self._backend.drops_special:
      dropped = {token.id for token in self._backend.roles().values()}
      dropped |= set(self._special_tokens.values())
      plain = [i for i in plain if i not in dropped]
    return self._backend.decode(plain, skip_special_tokens)

  def _roles(self) -> dict[str, Token]:
    """Returns the special tokens by role; given ones replace the tokenizer's."""
    return {**self._backend.roles(), **self._given_roles}

  def _role(self, name: str) -> Token:
    return self._roles().get(name, Token())

  def _texts(self) -> dict[str, str]:
    return {role: token.text for role, token in self._roles().items() if token.text}

  def _bos(self) -> list[int]:
    bos = self.bos_id()
    return [] if bos is None else [bos]

  def bos_id(self) -> int | None:
    """Returns the id of the beginning-of-sequence token; None if there is none."""
    return self._role("bos_token").id

  def eos_id(self) -> int | None:
    """Returns the id of the end-of-sequence token; None if there is none."""
    return self._role("eos_token").id

  def pad_id(self) -> int | None:
    """Returns the id of the padding token, or else of the end-of-sequence token."""
    pad = self._role("pad_token").id
    return self.eos_id() if pad is None else pad

  def unk_id(self) -> int | None:
    """Returns the id of text outside the vocabulary; None if there is none.

    A token that also begins, ends or pads sequences does not count.
    """
    unknown = self._backend.unknown_id()
    ours = (self.bos_id(), self.pad_id(), *self.eos_ids())
    return None if unknown in ours else unknown

  def eos_ids(self) -> tuple[int, ...]:
    """Returns every id that ends a sequence, `eos_id` first.

    Llama 3 and Qwen end a turn and a text with different tokens. The further ids come
    from the folder's generation_config.json and config.json.
    """
    every = [self.eos_id(), *self._given_eos_ids, *self._backend.eos_ids]
    return tuple(dict.fromkeys(i for i in every if i is not None))

  @property
  def bos_token(self) -> str | None:
    """Text of the beginning-of-sequence token; None if there is none."""
    return self._role("bos_token").text or None

  @property
  def eos_token(self) -> str | None:
    """Text of the end-of-sequence token; None if there is none."""
    return self._role("eos_token").text or None

  @property
  def vocab_size(self) -> int:
    """Number of ids, with those of added tokens."""
    return self._backend.vocab_size()

  @property
  def added_tokens(self) -> dict[str, int]:
    """Text -> id of the tokens that `add_tokens` added."""
    return dict(self._added)

  @functools.cached_property
  def _special_tokens(self) -> dict[str, int]:
    return self._backend.special_tokens()

  def special_tokens(self) -> dict[str, int]:
    """Returns text -> id of the special tokens whose text is known."""
    return dict(self._special_tokens)

  @property
  def message_form(self) -> str:
    """The form of messages, see the constructor."""
    return self._message_form

  def special_ids(self) -> frozenset[int]:
    """Returns the ids without text of their own: begin, end, padding, turn markers."""
    in_roles = (self.bos_id(), self.pad_id(), *self.eos_ids())
    ids = (*self._special_tokens.values(), *in_roles)
    return frozenset(i for i in ids if i is not None)

  def tokenize(
    self, text: str, prefix: str = "", suffix: str = "", add_eos: bool = True
  ) -> np.ndarray:
    """Returns BOS and the ids of `prefix + text + suffix`, int32 [T].

    The BOS token is left out if the tokenizer has none or puts none before a text (see
    `add_bos`), or if the text already begins with it.

    Args:
      text: the text.
      prefix: text before it.
      suffix: text after it.
      add_eos: end with the EOS token, unless the adapter's `add_eos` is False.

    Raises:
      ValueError: an EOS token is needed and the tokenizer has none.
    """
    ids = self.encode(prefix + text + suffix)
    bos, eos, add_eos = self._bos(), self.eos_id(), add_eos and self.add_eos
    if self.add_bos and ids[:1] != bos:
      ids = [*bos, *ids]
    if add_eos and eos is None:
      raise ValueError(
        "this tokenizer has no end-of-sequence token to append; name one with "
        "TokenizerAdapter(tokenizer, eos_token=...) or pass add_eos=False"
      )
    return np.asarray([*ids, eos] if add_eos else ids, np.int32)

  @property
  def chat_template(self) -> tokenizer_files.ChatTemplates | None:
    """Jinja source of the chat template, or sources by name; None if there is none."""
    template = self._given_template or self._backend.chat_template
    return template and chat_templates.with_defaults(template, self._template_args)

  def has_chat_template(self) -> bool:
    """Returns True if `apply_chat_template` has a template or a renderer."""
    return bool(self.chat_template) or self._renderer() is not None

  def marks_generation(self, tools: object = None) -> bool:
    """Returns True if the template for these tools has `{% generation %}` blocks."""
    template = self.chat_template
    return bool(template) and chat_templates.marks_generation(_select(template, tools))

  def reads_tools(self) -> bool:
    """Returns True unless a template leaves tools out of the text."""
    template = self.chat_template
    return not template or chat_templates.reads_tools(_select(template, True))

  def _renderer(self) -> Callable[..., Any] | None:
    """Returns the object's own renderer, for objects without a readable template."""
    renderer = getattr(self.tokenizer, "apply_chat_template", None)
    base = getattr(type(self.tokenizer), "apply_chat_template", None)
    # transformers' standard renderer needs a template, and there is none.
    stock = getattr(base, "__module__", "") == "transformers.tokenization_utils_base"
    return None if stock else renderer

  def template_messages(
    self, messages: Sequence[Mapping[str, Any]], tools: object = None
  ) -> list[dict[str, Any]]:
    """Returns messages in the form in which `apply_chat_template` renders them.

    Args:
      messages: dicts with "role" and "content".
      tools: JSON schemas of tools; a tokenizer may have another template for them.

    Raises:
      ValueError: arguments of a tool call are no JSON object.
    """
    if self._message_form == "given":
      return [messages_lib.present(message) for message in messages]
    template = self.chat_template
    form = messages_lib.CallForm()
    if template:
      form = messages_lib.call_form(_select(template, tools))
    return messages_lib.for_template(messages, form)

  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tokenize: bool = False,
    *,
    now: datetime.datetime | None = None,
    **kwargs: object,
  ) -> Any:
    """Renders a conversation to text, or to token ids with `tokenize`.

    Args:
      messages: dicts with "role" and "content".
      add_generation_prompt: end with the header of the assistant's next turn.
      tokenize: return list[int] instead of str. No special tokens are added to those
        that the template writes.
      now: time that templates with a date show; None: the clock's. An object that
        renders without a jinja template uses its own clock.
      **kwargs: `tools`, `documents`, and variables of the template
        (`enable_thinking=False`, ...).

    Raises:
      ValueError: there is no chat template, it refuses the conversation, or as for
        `template_messages`.
    """
    template = self.chat_template
    messages = self.template_messages(messages, kwargs.get("tools"))
    if template:
      source = _select(template, kwargs.get("tools"))
      if self._message_form == "plain":
        messages = messages_lib.as_template_parts(source, messages)
      options = {**self._texts(), **kwargs, "now": now}
      try:
        text = chat_templates.render(
          source, messages, add_generation_prompt=add_generation_prompt, **options
        )
      except ChatTemplateCostError as error:
        folder = None if self._given_template else self._backend.folder
        if folder is None:
          raise
        raise type(error)(f"{folder}: {error}") from error
      return self.encode(text) if tokenize else text
    renderer = self._renderer()
    if renderer is None:
      raise ValueError(
        "this tokenizer has no chat template; pass chat_template=... (jinja source), "
        'or use {"prompt": "text", "response": "text"} records'
      )
    kwargs = {**self._template_args, **kwargs, "tokenize": tokenize}
    return renderer(messages, add_generation_prompt=add_generation_prompt, **kwargs)

  # Refuses variables that `apply_chat_template` cannot pass to a template.
  check_template_variables = staticmethod(chat_templates.check_variables)

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes a folder that `from_pretrained` and AutoTokenizer can read.

    Raises:
      TypeError: the tokenizer is an object without `save_pretrained`.
      OSError: the folder cannot be written.
    """
    target = pathlib.Path(folder)
    # The tokenizer itself does not have the choice of the caller.
    is_own = self.add_bos == self._backend.begins_texts(self.bos_id())
    fields = {} if is_own else {"add_bos_token": self.add_bos}
    self._backend.save(target, {**self._texts(), **fields})
    if self.chat_template:
      tokenizer_files.write_chat_template(target, self.chat_template)


def adapted(tokenizer: object) -> TokenizerAdapter:
  """Returns the tokenizer in an adapter; an adapter is returned itself."""
  is_adapter = isinstance(tokenizer, TokenizerAdapter)
  return tokenizer if is_adapter else TokenizerAdapter(tokenizer)


class Tokenizer(TokenizerAdapter):
  """A tokenizer that is loaded from a path, with fixed choices for BOS and EOS."""

  def __init__(
    self,
    tokenizer_type: str = "huggingface",
    tokenizer_path: str | os.PathLike[str] = "",
    add_bos: bool = True,
    add_eos: bool = True,
  ):
    """Loads the tokenizer.

    Args:
      tokenizer_type: "huggingface" (folder, `tokenizer.json` or model id) or
        "sentencepiece" (`.model` file; needs the sentencepiece package).
      tokenizer_path: path of the tokenizer, or model id.
      add_bos: `tokenize` begins with the BOS token, if there is one.
      add_eos: `tokenize` ends with the EOS token.

    Raises:
      ValueError: the type is unknown.
      FileNotFoundError: the path has no tokenizer.
    """
    loaders = tokenizer_loading.LOADERS
    if tokenizer_type not in loaders:
      raise ValueError(
        f"tokenizer_type is {tokenizer_type!r}, expected one of {sorted(loaders)}"
      )
    super().__init__(loaders[tokenizer_type](tokenizer_path))
    self.add_bos, self.add_eos = add_bos, add_eos


def _select(template: tokenizer_files.ChatTemplates, tools: object) -> str:
  """Returns the source for a conversation with or without tools."""
  if isinstance(template, str):
    return template
  name = "tool_use" if tools and "tool_use" in template else "default"
  if name not in template:
    raise ValueError(
      f"the tokenizer has chat templates {sorted(template)} and none named 'default'; "
      "pass chat_template=... with the source of one"
    )
  return template[name]
