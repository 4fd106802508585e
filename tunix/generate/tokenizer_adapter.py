"""One interface over every kind of tokenizer.

`TokenizerAdapter` is what samplers and data pipelines talk to. Folders that hold a
`tokenizer.json` are read with `tokenizers` and `jinja2` alone; `transformers` is asked
only for folders without one and for model ids.
"""

from __future__ import annotations

import datetime
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.generate import (
  chat_template as chat_templates,
  tokenizer_files,
  tokenizer_loading,
)
from tunix.generate.tokenizer_backends import Backend, Token, choose

# Text in front of a continuation while it is encoded (see encode_continuation). A
# line break merges with no letter in any tokenizer that needs the detour.
_ANCHOR = "\n"


class TokenizerAdapter:
  """Encodes, decodes and renders chats, whatever the tokenizer is.

  The tokenizer is never changed. Id 0 is an id like any other.

  Attributes:
    add_bos, add_eos: whether `tokenize` begins with BOS, and may end with EOS.
  """

  add_bos: bool = True
  add_eos: bool = True

  def __init__(
    self,
    tokenizer: Any,
    *,
    chat_template: tokenizer_files.ChatTemplates | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    pad_token: str | None = None,
    eos_ids: Sequence[int] = (),
  ):
    """Wraps a tokenizer.

    Args:
      tokenizer: a transformers tokenizer, a `tokenizers.Tokenizer`, a tiktoken
        encoding, another adapter, or an object with encode, decode, bos_id, eos_id
        and pad_id (a SentencePiece processor is one).
      chat_template: jinja source (or sources by name) instead of the tokenizer's own.
      bos_token, eos_token, pad_token: the text of special tokens, where the
        tokenizer does not know or should not be asked; "" says there is none.
      eos_ids: further end-of-sequence ids, as in a model's generation_config.json.

    Raises:
      ValueError: the object lacks methods (they are named), or a token is unknown.
    """
    stated = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token}
    self._stated: dict[str, Token] = {}
    if isinstance(tokenizer, TokenizerAdapter):
      self._backend: Backend = tokenizer._backend
      self._stated |= tokenizer._stated
      chat_template = chat_template or tokenizer._stated_template
      eos_ids = (*eos_ids, *tokenizer._stated_eos_ids)
    else:
      self._backend = choose(tokenizer)
    self._stated_template, self._stated_eos_ids = chat_template, tuple(eos_ids)
    for role, text in stated.items():
      if text is not None:
        self._stated[role] = self._backend.named(role, text) if text else Token()

  @classmethod
  def from_pretrained(
    cls,
    path: str | os.PathLike[str],
    *,
    chat_template: tokenizer_files.ChatTemplates | None = None,
    revision: str | None = None,
  ) -> TokenizerAdapter:
    """The tokenizer of a Hugging Face folder, a `tokenizer.json`, or a model id.

    Args:
      path: of the folder or file, or a hub id "owner/name".
      chat_template: instead of its own.
      revision: of a hub id: a commit, tag or branch; None: its newest commit.

    Raises:
      FileNotFoundError: there is no such folder, or no tokenizer in it.
      ImportError: the folder has no `tokenizer.json` and transformers is missing.
      ValueError: a file of the folder is damaged, or it is given a revision.
    """
    tokenizer = tokenizer_loading.load_pretrained(path, revision)
    return TokenizerAdapter(tokenizer, chat_template=chat_template)

  @property
  def tokenizer(self) -> Any:
    """The object that was wrapped."""
    return self._backend.raw

  def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
    """Token ids of `text`; special tokens written in the text are recognised."""
    ids = self._backend.encode(text, add_special_tokens)
    if add_special_tokens and not self._backend.adds_special:
      return [*self._bos(), *ids]
    return ids

  def encode_continuation(self, text: str) -> list[int]:
    """Token ids of text that goes on where other text ended.

    SentencePiece-style tokenizers put a space before every text that they encode;
    here it would stand in the middle of a sentence. Ids of two parts, encoded with
    `encode` and with this, decode to the parts' concatenation.
    """
    if not text or not self._adds_prefix:
      return self.encode(text)
    anchor, ids = self.encode(_ANCHOR), self.encode(_ANCHOR + text)
    return ids[len(anchor) :] if ids[: len(anchor)] == anchor else self.encode(text)

  @functools.cached_property
  def _adds_prefix(self) -> bool:
    alone, after = self.encode("a"), self.encode(_ANCHOR + "a")
    return after[-len(alone) :] != alone

  def decode(
    self, ids: Sequence[int] | np.ndarray | int, skip_special_tokens: bool = True
  ) -> str:
    """The text of token ids (a sequence, an array, or one id)."""
    plain = [int(i) for i in np.atleast_1d(np.asarray(ids, dtype=np.int64))]
    if skip_special_tokens and not self._backend.drops_special:
      dropped = {token.id for token in self._backend.roles().values()}
      dropped |= set(self._special_tokens.values())
      plain = [i for i in plain if i not in dropped]
    return self._backend.decode(plain, skip_special_tokens)

  def _roles(self) -> dict[str, Token]:
    """Special tokens by role: those of the tokenizer, but for what was stated."""
    return {**self._backend.roles(), **self._stated}

  def _role(self, name: str) -> Token:
    return self._roles().get(name, Token())

  def _texts(self) -> dict[str, str]:
    return {role: token.text for role, token in self._roles().items() if token.text}

  def _bos(self) -> list[int]:
    bos = self.bos_id()
    return [] if bos is None else [bos]

  def bos_id(self) -> int | None:
    """Id of the beginning-of-sequence token, None when there is none."""
    return self._role("bos_token").id

  def eos_id(self) -> int | None:
    """Id of the end-of-sequence token, None when there is none."""
    return self._role("eos_token").id

  def pad_id(self) -> int | None:
    """Id of the padding token; the end-of-sequence id where no token is for that."""
    pad = self._role("pad_token").id
    return self.eos_id() if pad is None else pad

  def eos_ids(self) -> tuple[int, ...]:
    """Every id that ends a sequence, the tokenizer's own first.

    Llama 3 and Qwen end a turn and a text with different tokens; the further ids
    come from the folder's generation_config.json and config.json.
    """
    every = [self.eos_id(), *self._stated_eos_ids, *self._backend.eos_ids]
    return tuple(dict.fromkeys(i for i in every if i is not None))

  @property
  def bos_token(self) -> str | None:
    """Text of the beginning-of-sequence token."""
    return self._role("bos_token").text or None

  @property
  def eos_token(self) -> str | None:
    """Text of the end-of-sequence token."""
    return self._role("eos_token").text or None

  @property
  def vocab_size(self) -> int:
    """Number of ids, added tokens included."""
    return self._backend.vocab_size()

  @functools.cached_property
  def _special_tokens(self) -> dict[str, int]:
    return self._backend.special_tokens()

  def special_tokens(self) -> dict[str, int]:
    """Text -> id of the special tokens whose text is known."""
    return dict(self._special_tokens)

  def special_ids(self) -> frozenset[int]:
    """Ids that stand for no text: begin, end, padding, turn markers."""
    in_roles = (self.bos_id(), self.pad_id(), *self.eos_ids())
    ids = (*self._special_tokens.values(), *in_roles)
    return frozenset(i for i in ids if i is not None)

  def tokenize(
    self, text: str, prefix: str = "", suffix: str = "", add_eos: bool = True
  ) -> np.ndarray:
    """`prefix + text + suffix` as int32 [T], BOS first when there is one.

    A BOS that the text already begins with is not doubled.

    Raises:
      ValueError: `add_eos` with a tokenizer that has no end-of-sequence token.
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
    """Jinja source of the chat template (or sources by name), None without one."""
    return self._stated_template or self._backend.chat_template

  def has_chat_template(self) -> bool:
    """Whether `apply_chat_template` can work."""
    return bool(self.chat_template) or self._renderer() is not None

  def _renderer(self) -> Callable[..., Any] | None:
    """The tokenizer's own renderer, where it keeps no template that we can read."""
    renderer = getattr(self.tokenizer, "apply_chat_template", None)
    base = getattr(type(self.tokenizer), "apply_chat_template", None)
    # transformers' stock renderer needs a template, and there is none.
    stock = getattr(base, "__module__", "") == "transformers.tokenization_utils_base"
    return None if stock else renderer

  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tokenize: bool = False,
    *,
    now: datetime.datetime | None = None,
    **kwargs: Any,
  ) -> Any:
    """The conversation as text, or as token ids with `tokenize`.

    Args:
      messages: dicts with "role" and "content".
      add_generation_prompt: end with the header of the assistant's next turn.
      tokenize: return list[int] instead of str; no special token is added to those
        that the template writes.
      now: the time that templates with a date show, the clock's when None. (An
        object that renders without a jinja template follows its own clock.)
      **kwargs: `tools`, `documents`, and names that the template reads
        (`enable_thinking=False`, ...).

    Raises:
      ValueError: there is no chat template, or it refuses the conversation.
    """
    template = self.chat_template
    if template:
      source = _select(template, kwargs.get("tools"))
      variables = {**self._texts(), **kwargs}
      text = chat_templates.render(
        source,
        messages,
        add_generation_prompt=add_generation_prompt,
        now=now,
        **variables,
      )
      return self.encode(text) if tokenize else text
    renderer = self._renderer()
    if renderer is None:
      raise ValueError(
        "this tokenizer has no chat template; pass chat_template=... (jinja source), "
        'or use {"prompt": "text", "response": "text"} records'
      )
    return renderer(
      messages, add_generation_prompt=add_generation_prompt, tokenize=tokenize, **kwargs
    )

  # Refuses names that `apply_chat_template` cannot hand to a template.
  check_template_variables = staticmethod(chat_templates.check_variables)

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes the tokenizer so that `from_pretrained` and AutoTokenizer read it back.

    Raises:
      TypeError: a user's own tokenizer object, which only its owner can write.
      OSError: the folder cannot be written.
    """
    target = pathlib.Path(folder)
    self._backend.save(target, self._texts())
    if self.chat_template:
      tokenizer_files.write_chat_template(target, self.chat_template)


def adapted(tokenizer: Any) -> TokenizerAdapter:
  """The tokenizer wrapped; itself where it is an adapter."""
  is_adapter = isinstance(tokenizer, TokenizerAdapter)
  return tokenizer if is_adapter else TokenizerAdapter(tokenizer)


class Tokenizer(TokenizerAdapter):
  """A tokenizer by path, with fixed choices for BOS and EOS."""

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
        "sentencepiece" (a `.model` file; needs the sentencepiece package).
      tokenizer_path: where it is.
      add_bos: `tokenize` begins with BOS, when there is one.
      add_eos: `tokenize` ends with EOS.

    Raises:
      ValueError: an unknown type.
      FileNotFoundError: nothing at the path.
    """
    loaders = tokenizer_loading.LOADERS
    if tokenizer_type not in loaders:
      raise ValueError(
        f"tokenizer_type {tokenizer_type!r} is unknown; use one of {sorted(loaders)}"
      )
    super().__init__(loaders[tokenizer_type](tokenizer_path))
    self.add_bos, self.add_eos = add_bos, add_eos


def _select(template: tokenizer_files.ChatTemplates, tools: Any) -> str:
  if isinstance(template, str):
    return template
  name = "tool_use" if tools and "tool_use" in template else "default"
  if name not in template:
    raise ValueError(
      f"the tokenizer has chat templates {sorted(template)} and none named 'default'; "
      "pass chat_template=... with the source of one"
    )
  return template[name]
