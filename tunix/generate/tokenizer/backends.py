"""One interface to four kinds of tokenizer; this file imports no tokenizer package.

A backend wraps the user's tokenizer without changing it. It returns the properties of
the tokenizer itself; the adapter stores settings that its caller adds. `choose` returns
the backend of an object.
"""

from __future__ import annotations

import abc
import copy
import inspect
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunix.generate.tokenizer import (
  files as tokenizer_files,
  limits as tokenizer_limits,
)
from tunix.utils import checks

_REQUIRED = ("encode", "decode", "bos_id", "eos_id", "pad_id")
_TIKTOKEN = ("encode", "decode", "n_vocab", "special_tokens_set", "encode_single_token")

# A bare tokenizers.Tokenizer or a tiktoken encoding does not store the roles of its
# special tokens. These are the usual names for each role, the most specific first.
_CONVENTION = {
  "bos_token": ("<|begin_of_text|>", "<bos>", "<s>", "[BOS]", "<|startoftext|>"),
  "eos_token": (
    *("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<eos>", "</s>", "[EOS]"),
    "<|endoftext|>",
  ),
  "pad_token": ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"),
}


# Characters from which on the batch call of `tokenizers` encodes one text. It releases
# the interpreter's lock, so that other threads go on; the call for one text holds it
# for 1 us a character. Short texts skip the batch call, which starts a pool of threads.
_LONG_TEXT = 4096


class Token(NamedTuple):
  """A special token. Id and text are None if unknown; both None: there is no token."""

  id: int | None = None
  text: str | None = None


class Backend(abc.ABC):
  """The part of a tokenizer that the adapter needs.

  Attributes:
    raw: the user's object.
    eos_ids: ids that end a sequence, in addition to the id in the role "eos_token".
    adds_special: True if `encode` can add special tokens. If False, the adapter does.
    drops_special: True if `decode` can drop special tokens. If False, the adapter does.
    unknown: end of the message for a token text without an id.
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
    """Jinja source, or sources by name, that the object has at present."""
    return getattr(self.raw, "chat_template", None)

  @property
  def folder(self) -> str | None:
    """Folder or model id that the object was loaded from; None if unknown."""
    return getattr(self.raw, "name_or_path", None) or None

  @abc.abstractmethod
  def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

  def puts_first(self, token: int | None) -> bool | None:
    """Returns True if `encode` with special tokens puts a token before a text.

    None: the tokenizer does not say, because it has no post-processor.
    """
    if not self.adds_special or token is None:
      return None
    puts = self.encode("a", True)[:1] == [token]
    return None if not puts and self.post_processor is None else puts

  def begins_texts(self, bos: int | None) -> bool:
    """Returns True unless the tokenizer says that plain texts begin without BOS."""
    return self.puts_first(bos) is not False

  @property
  def post_processor(self) -> Any:
    """The object that adds special tokens; None if there is none."""
    return self.raw

  @abc.abstractmethod
  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

  @abc.abstractmethod
  def id_of(self, text: str) -> int | None:
    """Returns the id of a token that may have a role; None if there is none."""

  def named(self, role: str, text: str) -> Token:
    """Returns the token with that text.

    Raises:
      ValueError: no token has that text; the message begins with the role.
    """
    if (number := self.id_of(text)) is None:
      raise ValueError(f"{role} {text!r} {self.unknown}")
    return Token(number, text)

  def roles(self) -> Mapping[str, Token]:
    """Returns the special tokens by role ("bos_token", "eos_token", ...)."""
    return self._roles

  def unknown_id(self) -> int | None:
    """Returns the id of the role "unk_token"; None if there is none."""
    return self.roles().get("unk_token", Token()).id

  @abc.abstractmethod
  def special_tokens(self) -> dict[str, int]:
    """Returns text -> id of every special token whose text is known."""

  @abc.abstractmethod
  def vocab_size(self) -> int: ...

  def extended(self, tokens: Sequence[Any]) -> Backend:
    """Returns a copy with more tokens, which are `tokenizers.AddedToken` objects.

    Raises:
      ValueError: the object cannot be copied and extended.
    """
    raise ValueError(
      f"add_tokens is set and the tokenizer is {checks.type_of(self.raw)}, which "
      f"cannot be extended with {[str(token.content) for token in tokens]}. Use a "
      "folder with tokenizer.json, or a transformers tokenizer"
    )

  def save(self, folder: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Writes everything but the chat template.

    Args:
      folder: the folder.
      fields: texts of special tokens by role, and `add_bos_token`.

    Raises:
      TypeError: the object cannot write itself.
    """
    del fields  # The object writes its own.
    if not hasattr(self.raw, "save_pretrained"):
      raise TypeError(
        f"{checks.type_of(self.raw)} cannot be written as tokenizer.json; copy its "
        f"files (of tiktoken: its ranks) to {folder} yourself, or train with a "
        "tokenizers.Tokenizer"
      )
    self.raw.save_pretrained(folder)


def choose(tokenizer: object) -> Backend:
  """Returns the backend of an object.

  Args:
    tokenizer: a transformers tokenizer, a `tokenizers.Tokenizer`, a tiktoken encoding
      or an object with its methods, a backend, or any object with encode, decode,
      bos_id, eos_id and pad_id (the ids as methods or as attributes).

  Raises:
    ValueError: the object lacks methods.
  """
  if isinstance(tokenizer, Backend):
    return tokenizer
  # Compares names, because isinstance would import packages that may be missing.
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
      f"{checks.type_of(tokenizer)} is no tokenizer: it lacks {', '.join(missing)}; "
      "pass a transformers tokenizer, a tokenizers.Tokenizer, a tiktoken encoding, or "
      "an object with " + ", ".join(_REQUIRED)
    )
  return ObjectBackend(tokenizer)


class TokenizersBackend(Backend):
  """A `tokenizers.Tokenizer` (Rust), alone or with the other files of its folder."""

  def __init__(
    self, tokenizer: Any, files: tokenizer_files.TokenizerFiles | None = None
  ):
    super().__init__(tokenizer)
    self._files = files
    self._rust = tokenizer
    if tokenizer.truncation is not None or tokenizer.padding is not None:
      # Truncation or padding would change every row without an error. The user's object
      # keeps these settings, and a copy without them encodes.
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

  @property
  def folder(self) -> str | None:
    file = None if self._files is None else self._files.tokenizer_json
    return super().folder if file is None else str(file.parent)

  @property
  def post_processor(self) -> Any:
    return self._rust.post_processor

  def begins_texts(self, bos: int | None) -> bool:
    # transformers follows this field, whatever the post-processor does.
    flag = None if self._files is None else self._files.config.get("add_bos_token")
    return flag if isinstance(flag, bool) else super().begins_texts(bos)

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    encode, adds = self._rust.encode, add_special_tokens
    if len(text) > _LONG_TEXT:

      def encode(x, **options):
        return self._rust.encode_batch([x], **options)[0]

    with tokenizer_limits.without_panic(self.folder):
      return encode(text, add_special_tokens=adds).ids

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    with tokenizer_limits.without_panic(self.folder):
      return self._rust.decode(ids, skip_special_tokens=skip_special_tokens)

  def id_of(self, text: str) -> int | None:
    return self._rust.token_to_id(text)

  def unknown_id(self) -> int | None:
    # The model of tokenizer.json names its own, whatever tokenizer_config.json has.
    text = getattr(self._rust.model, "unk_token", None)
    return super().unknown_id() if text is None else self.id_of(text)

  def special_tokens(self) -> dict[str, int]:
    added = self._rust.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special}

  def vocab_size(self) -> int:
    return self._rust.get_vocab_size(with_added_tokens=True)

  def extended(self, tokens: Sequence[Any]) -> TokenizersBackend:
    rust = type(self._rust).from_str(self._rust.to_str())
    rust.add_tokens(list(tokens))
    return TokenizersBackend(rust, self._files and self._files.without_added())

  def save(self, folder: pathlib.Path, fields: Mapping[str, Any]) -> None:
    source = self._rust.to_str(pretty=True)
    config = {} if self._files is None else self._files.config
    tokenizer_files.write_folder(
      folder, tokenizer_json=source, config={**config, **fields}
    )


class HuggingFaceBackend(Backend):
  """A transformers tokenizer, fast or slow."""

  @property
  def post_processor(self) -> Any:
    fast = getattr(self.raw, "backend_tokenizer", None)
    return self.raw if fast is None else fast.post_processor

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    return list(self.raw.encode(text, add_special_tokens=add_special_tokens))

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)

  def roles(self) -> Mapping[str, Token]:
    texts, number = self.raw.special_tokens_map, self.raw.convert_tokens_to_ids
    names = [name for name in tokenizer_files.TOKEN_NAMES if texts.get(name)]
    return {name: Token(number(texts[name]), texts[name]) for name in names}

  def id_of(self, text: str) -> int | None:
    # convert_tokens_to_ids would return the id of the unknown token.
    return self.raw.get_vocab().get(text)

  def special_tokens(self) -> dict[str, int]:
    listed = {t: self.raw.convert_tokens_to_ids(t) for t in self.raw.all_special_tokens}
    added = getattr(self.raw, "added_tokens_decoder", {})
    return {**{t.content: i for i, t in added.items() if t.special}, **listed}

  def vocab_size(self) -> int:
    return len(self.raw)

  def extended(self, tokens: Sequence[Any]) -> HuggingFaceBackend:
    raw = copy.deepcopy(self.raw)
    raw.add_tokens(list(tokens))
    return HuggingFaceBackend(raw)


class TiktokenBackend(Backend):
  """A `tiktoken.Encoding`, or an object with its methods."""

  adds_special = drops_special = False
  unknown = "is no special token of the encoding"

  def __init__(self, encoding: Any):
    super().__init__(encoding)
    self._roles = _by_convention(self.special_tokens())

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    # By default tiktoken refuses texts with special tokens.
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
  """Any object with encode, decode, bos_id, eos_id and pad_id."""

  unknown = (
    "is given for a tokenizer whose ids come from its own bos_id, eos_id and pad_id; "
    "set them there"
  )

  def __init__(self, tokenizer: Any):
    super().__init__(tokenizer)
    self.adds_special = _accepts(tokenizer.encode, "add_special_tokens")
    self.drops_special = _accepts(tokenizer.decode, "skip_special_tokens")

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    options = {"add_special_tokens": add_special_tokens} if self.adds_special else {}
    return [int(i) for i in self.raw.encode(text, **options)]

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    options = {"skip_special_tokens": skip_special_tokens} if self.drops_special else {}
    return self.raw.decode(ids, **options)

  def roles(self) -> Mapping[str, Token]:
    return {role: self._role(role) for role in _CONVENTION}

  def _role(self, role: str) -> Token:
    number = _value(getattr(self.raw, role.replace("_token", "_id")))
    # SentencePiece returns -1 for a token that it does not have.
    number = None if number is None or int(number) < 0 else int(number)
    text = getattr(self.raw, role, None)
    pieces = getattr(self.raw, "id_to_piece", None)
    if not isinstance(text, str):
      text = None if pieces is None or number is None else pieces(number)
    return Token(number, text)

  def id_of(self, text: str) -> int | None:
    return None

  def special_tokens(self) -> dict[str, int]:
    tokens = self.roles().values()
    return {t.text: t.id for t in tokens if t.text and t.id is not None}

  def vocab_size(self) -> int:
    size: Any = _value(getattr(self.raw, "vocab_size", None))
    return int(len(self.raw) if size is None else size)


def _value(member: object) -> Any:
  """Returns the value of an attribute or of a method without arguments."""
  return member() if callable(member) else member


def _by_convention(ids: Mapping[str, int]) -> dict[str, Token]:
  """Returns the roles of the special tokens that have a usual name."""
  usual = {
    role: next((name for name in candidates if name in ids), None)
    for role, candidates in _CONVENTION.items()
  }
  return {role: Token(ids[text], text) for role, text in usual.items() if text}


def _accepts(function: Any, argument: str) -> bool:
  try:
    return argument in inspect.signature(function).parameters
  except (TypeError, ValueError):
    return False  # A C function has no signature.
