"""One face for four kinds of tokenizer; no tokenizer package is imported here.

A backend wraps the user's object, never changes it, and says what that object says of
itself; what a caller states besides is kept by the adapter. `choose` picks the backend
by what the object is or can do.
"""

from __future__ import annotations

import abc
import inspect
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunix.generate import tokenizer_files

_REQUIRED = ("encode", "decode", "bos_id", "eos_id", "pad_id")
_TIKTOKEN = ("encode", "decode", "n_vocab", "special_tokens_set", "encode_single_token")

# A bare tokenizers.Tokenizer, or a tiktoken encoding, does not say which token plays
# which role. Names by convention, most specific first; explicit names win.
_CONVENTION = {
  "bos_token": ("<|begin_of_text|>", "<bos>", "<s>", "[BOS]", "<|startoftext|>"),
  "eos_token": (
    *("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<eos>", "</s>", "[EOS]"),
    "<|endoftext|>",
  ),
  "pad_token": ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"),
}


class Token(NamedTuple):
  """A special token, as far as it is known; of neither id nor text: there is none."""

  id: int | None = None
  text: str | None = None


class Backend(abc.ABC):
  """What the adapter needs of a tokenizer.

  Attributes:
    raw: the user's object.
    eos_ids: ids that end a sequence besides the tokenizer's own.
    adds_special: whether `encode` can add special tokens, and drops_special: whether
      `decode` can leave them out. The adapter does what a backend cannot.
    unknown: what is wrong with a text that has no id, for the message.
  """

  adds_special: bool = True
  drops_special: bool = True
  unknown = "is not in the tokenizer's vocabulary"

  def __init__(self, tokenizer: Any):
    self.raw = tokenizer
    self._roles: Mapping[str, Token] = {}
    folder = getattr(tokenizer, "name_or_path", None)
    self.eos_ids: tuple[int, ...] = ()
    if isinstance(folder, str) and os.path.isdir(folder):
      self.eos_ids = tokenizer_files.read_eos_ids(pathlib.Path(folder))

  @property
  def chat_template(self) -> tokenizer_files.ChatTemplates | None:
    """Jinja source, or sources by name, as the object has it at this moment."""
    return getattr(self.raw, "chat_template", None)

  @abc.abstractmethod
  def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

  @abc.abstractmethod
  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

  @abc.abstractmethod
  def id_of(self, text: str) -> int | None:
    """Id of a token that may be given a role; None: there is none of that text."""

  def named(self, role: str, text: str) -> Token:
    """The token that is wanted in a role.

    Raises:
      ValueError: there is none of that text.
    """
    if (number := self.id_of(text)) is None:
      raise ValueError(f"{role} {text!r} {self.unknown}")
    return Token(number, text)

  def roles(self) -> Mapping[str, Token]:
    """Special tokens by role ("bos_token", "eos_token", "pad_token", ...)."""
    return self._roles

  @abc.abstractmethod
  def special_tokens(self) -> dict[str, int]:
    """Text -> id of every special token whose text is known."""

  @abc.abstractmethod
  def vocab_size(self) -> int: ...

  def save(self, folder: pathlib.Path, tokens: Mapping[str, str]) -> None:
    """Writes all but the chat template; `tokens` are the texts by role.

    Raises:
      TypeError: only its owner can write the object.
    """
    del tokens  # the object knows its own
    if not hasattr(self.raw, "save_pretrained"):
      raise TypeError(
        f"a {type(self.raw).__name__} cannot be written as tokenizer.json; copy its "
        f"files (of tiktoken: its ranks) to {folder} yourself, or train with a "
        "tokenizers.Tokenizer"
      )
    self.raw.save_pretrained(folder)


def choose(tokenizer: Any) -> Backend:
  """The backend for `tokenizer`: a transformers tokenizer, a `tokenizers.Tokenizer`, a
  tiktoken encoding (or what has its methods), a backend, or any object with encode,
  decode, bos_id, eos_id, pad_id (methods or attributes).

  Raises:
    ValueError: the object lacks methods.
  """
  if isinstance(tokenizer, Backend):
    return tokenizer
  # By name: an isinstance would import packages that may not be installed.
  lineage = {(c.__module__.split(".")[0], c.__name__) for c in type(tokenizer).__mro__}
  if ("transformers", "PreTrainedTokenizerBase") in lineage:
    return HuggingFaceBackend(tokenizer)
  if ("tokenizers", "Tokenizer") in lineage:
    return TokenizersBackend(tokenizer)
  missing = [name for name in _REQUIRED if not hasattr(tokenizer, name)]
  if missing and all(hasattr(tokenizer, name) for name in _TIKTOKEN):
    return TiktokenBackend(tokenizer)
  if missing:
    raise ValueError(
      f"a {type(tokenizer).__name__} is no tokenizer: it lacks {', '.join(missing)}; "
      "pass a transformers tokenizer, a tokenizers.Tokenizer, a tiktoken encoding, or "
      "an object with " + ", ".join(_REQUIRED)
    )
  return ObjectBackend(tokenizer)


class TokenizersBackend(Backend):
  """Over `tokenizers.Tokenizer` (Rust), alone or with what its folder says of it."""

  def __init__(
    self, tokenizer: Any, files: tokenizer_files.TokenizerFiles | None = None
  ):
    super().__init__(tokenizer)
    self._files = files
    self._rust = tokenizer
    if tokenizer.truncation is not None or tokenizer.padding is not None:
      # Both would silently change every row. The user's object keeps its settings.
      self._rust = type(tokenizer).from_str(tokenizer.to_str())
      self._rust.no_truncation()
      self._rust.no_padding()
    if files is None:
      self._roles = _by_convention(self.special_tokens())
    else:
      self._roles = {
        role: self.named(role, text) for role, text in files.tokens.items()
      }
      self.eos_ids = files.eos_ids

  @property
  def chat_template(self) -> tokenizer_files.ChatTemplates | None:
    return super().chat_template if self._files is None else self._files.chat_template

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    return self._rust.encode(text, add_special_tokens=add_special_tokens).ids

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    return self._rust.decode(ids, skip_special_tokens=skip_special_tokens)

  def id_of(self, text: str) -> int | None:
    return self._rust.token_to_id(text)

  def special_tokens(self) -> dict[str, int]:
    added = self._rust.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special}

  def vocab_size(self) -> int:
    return self._rust.get_vocab_size(with_added_tokens=True)

  def save(self, folder: pathlib.Path, tokens: Mapping[str, str]) -> None:
    tokenizer_files.write_folder(
      folder,
      tokenizer_json=self._rust.to_str(pretty=True),
      config={} if self._files is None else self._files.config,
      tokens=tokens,
    )


class HuggingFaceBackend(Backend):
  """Over a transformers tokenizer, fast or slow."""

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    return list(self.raw.encode(text, add_special_tokens=add_special_tokens))

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)

  def roles(self) -> Mapping[str, Token]:
    texts = self.raw.special_tokens_map
    return {
      role: Token(self.raw.convert_tokens_to_ids(texts[role]), texts[role])
      for role in tokenizer_files.TOKEN_NAMES
      if texts.get(role)
    }

  def id_of(self, text: str) -> int | None:
    # convert_tokens_to_ids would give the unknown token's id.
    return self.raw.get_vocab().get(text)

  def special_tokens(self) -> dict[str, int]:
    listed = {t: self.raw.convert_tokens_to_ids(t) for t in self.raw.all_special_tokens}
    added = getattr(self.raw, "added_tokens_decoder", {})
    return {**{t.content: i for i, t in added.items() if t.special}, **listed}

  def vocab_size(self) -> int:
    return len(self.raw)


class TiktokenBackend(Backend):
  """Over `tiktoken.Encoding`, and objects with its methods."""

  adds_special = drops_special = False
  unknown = "is no special token of the encoding"

  def __init__(self, encoding: Any):
    super().__init__(encoding)
    self._roles = _by_convention(self.special_tokens())

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    # By default tiktoken refuses texts that hold special tokens.
    return list(self.raw.encode(text, allowed_special="all"))

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    return self.raw.decode(ids)

  def id_of(self, text: str) -> int | None:
    return self.special_tokens().get(text)

  def special_tokens(self) -> dict[str, int]:
    texts = sorted(self.raw.special_tokens_set)
    return {text: self.raw.encode_single_token(text) for text in texts}

  def vocab_size(self) -> int:
    return self.raw.n_vocab


class ObjectBackend(Backend):
  """Over anything with encode, decode, bos_id, eos_id and pad_id."""

  unknown = (
    "is given for a tokenizer whose ids come from its own bos_id, eos_id and pad_id; "
    "set them there"
  )

  def __init__(self, tokenizer: Any):
    super().__init__(tokenizer)
    self.adds_special = _accepts(tokenizer.encode, "add_special_tokens")
    self.drops_special = _accepts(tokenizer.decode, "skip_special_tokens")

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    asked = {"add_special_tokens": add_special_tokens} if self.adds_special else {}
    return [int(i) for i in self.raw.encode(text, **asked)]

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    asked = {"skip_special_tokens": skip_special_tokens} if self.drops_special else {}
    return self.raw.decode(ids, **asked)

  def roles(self) -> Mapping[str, Token]:
    return {role: self._role(role) for role in _CONVENTION}

  def _role(self, role: str) -> Token:
    number = getattr(self.raw, role.replace("_token", "_id"))
    number = number() if callable(number) else number
    # SentencePiece says -1 for "there is none".
    number = None if number is None or int(number) < 0 else int(number)
    text = getattr(self.raw, role, None)
    pieces = getattr(self.raw, "id_to_piece", None)
    if not isinstance(text, str):
      text = None if pieces is None or number is None else pieces(number)
    return Token(number, text)

  def id_of(self, text: str) -> int | None:
    return None

  def special_tokens(self) -> dict[str, int]:
    known = self.roles().values()
    return {t.text: t.id for t in known if t.text and t.id is not None}

  def vocab_size(self) -> int:
    size: Any = getattr(self.raw, "vocab_size", None)
    size = size() if callable(size) else size
    return int(len(self.raw) if size is None else size)


def _by_convention(known: Mapping[str, int]) -> dict[str, Token]:
  """The roles of special tokens that bear a usual name."""
  usual = {
    role: next((name for name in candidates if name in known), None)
    for role, candidates in _CONVENTION.items()
  }
  return {role: Token(known[text], text) for role, text in usual.items() if text}


def _accepts(function: Any, argument: str) -> bool:
  try:
    parameters = inspect.signature(function).parameters
  except (TypeError, ValueError):
    return False  # a C function without a signature
  return argument in parameters
