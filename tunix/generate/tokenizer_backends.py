"""One face for four kinds of tokenizer; no tokenizer package is imported here.

A backend wraps the user's object and never changes it. `choose` picks the backend by
what the object is or can do.
"""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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


class Backend(Protocol):
  """What the adapter needs of a tokenizer."""

  raw: Any

  def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
  def token_id(self, name: str) -> int | None:
    """The id of "bos_token", "eos_token" or "pad_token"."""
    ...

  def tokens(self) -> dict[str, str]:
    """Special tokens by role, as far as their text is known."""
    ...

  def special_tokens(self) -> dict[str, int]:
    """Text -> id of every special token whose text is known."""
    ...

  def vocab_size(self) -> int: ...
  def save(self, folder: pathlib.Path) -> None: ...


def choose(tokenizer: Any, names: Mapping[str, str]) -> Backend:
  """The backend for `tokenizer`.

  Args:
    tokenizer: a transformers tokenizer, a `tokenizers.Tokenizer`, a tiktoken encoding
      (or what has its methods), a backend, or any object with encode, decode, bos_id,
      eos_id, pad_id (methods or attributes).
    names: roles the caller states ("eos_token" -> "<|im_end|>", "" for none).

  Raises:
    ValueError: the object lacks methods, or a stated token is not in its vocabulary.
  """
  ours = TokenizersBackend | HuggingFaceBackend | TiktokenBackend | ObjectBackend
  if isinstance(tokenizer, ours):
    return tokenizer.renamed(names) if names else tokenizer
  lineage = {(c.__module__.split(".")[0], c.__name__) for c in type(tokenizer).__mro__}
  if ("transformers", "PreTrainedTokenizerBase") in lineage:
    return HuggingFaceBackend(tokenizer, names)
  if ("tokenizers", "Tokenizer") in lineage:
    return TokenizersBackend(tokenizer, names)
  missing = [name for name in _REQUIRED if not hasattr(tokenizer, name)]
  if missing and all(hasattr(tokenizer, name) for name in _TIKTOKEN):
    return TiktokenBackend(tokenizer, names)
  if missing:
    raise ValueError(
      f"a {type(tokenizer).__name__} is no tokenizer: it lacks {', '.join(missing)}; "
      "pass a transformers tokenizer, a tokenizers.Tokenizer, a tiktoken encoding, or "
      "an object with " + ", ".join(_REQUIRED)
    )
  return ObjectBackend(tokenizer, names)


class TokenizersBackend:
  """Over `tokenizers.Tokenizer` (Rust)."""

  def __init__(
    self,
    tokenizer: Any,
    names: Mapping[str, str],
    config: Mapping[str, Any] | None = None,
  ):
    self.raw = tokenizer
    self._rust = tokenizer
    if tokenizer.truncation is not None or tokenizer.padding is not None:
      # Both would silently change every row. The user's object keeps its settings.
      self._rust = type(tokenizer).from_str(tokenizer.to_str())
      self._rust.no_truncation()
      self._rust.no_padding()
    self._config = dict(config or {})
    guessed = _by_convention(self.special_tokens()) if config is None else {}
    merged = {**guessed, **names}
    self._names = {role: text for role, text in merged.items() if text}
    for role, text in self._names.items():
      if self._rust.token_to_id(text) is None:
        raise ValueError(f"{role} {text!r} is not in the tokenizer's vocabulary")

  def renamed(self, names: Mapping[str, str]) -> TokenizersBackend:
    return TokenizersBackend(self.raw, {**self._names, **names}, self._config)

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    return self._rust.encode(text, add_special_tokens=add_special_tokens).ids

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    return self._rust.decode(ids, skip_special_tokens=skip_special_tokens)

  def token_id(self, name: str) -> int | None:
    text = self._names.get(name)
    return None if text is None else self._rust.token_to_id(text)

  def tokens(self) -> dict[str, str]:
    return dict(self._names)

  def special_tokens(self) -> dict[str, int]:
    added = self._rust.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special}

  def vocab_size(self) -> int:
    return self._rust.get_vocab_size(with_added_tokens=True)

  def save(self, folder: pathlib.Path) -> None:
    tokenizer_files.write_folder(
      folder,
      tokenizer_json=self._rust.to_str(pretty=True),
      config=self._config,
      tokens=self._names,
    )


class HuggingFaceBackend:
  """Over a transformers tokenizer, fast or slow."""

  def __init__(self, tokenizer: Any, names: Mapping[str, str]):
    self.raw = tokenizer
    self._stated = dict(names)
    for role, text in names.items():
      if text and text not in tokenizer.get_vocab():
        raise ValueError(f"{role} {text!r} is not in the tokenizer's vocabulary")

  def renamed(self, names: Mapping[str, str]) -> HuggingFaceBackend:
    return HuggingFaceBackend(self.raw, {**self._stated, **names})

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    return list(self.raw.encode(text, add_special_tokens=add_special_tokens))

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)

  def token_id(self, name: str) -> int | None:
    text = self.tokens().get(name)
    return None if text is None else self.raw.convert_tokens_to_ids(text)

  def tokens(self) -> dict[str, str]:
    own = self.raw.special_tokens_map
    named = {k: own[k] for k in tokenizer_files.TOKEN_NAMES if own.get(k)}
    return {role: text for role, text in {**named, **self._stated}.items() if text}

  def special_tokens(self) -> dict[str, int]:
    listed = {t: self.raw.convert_tokens_to_ids(t) for t in self.raw.all_special_tokens}
    added = getattr(self.raw, "added_tokens_decoder", {})
    return {**{t.content: i for i, t in added.items() if t.special}, **listed}

  def vocab_size(self) -> int:
    return len(self.raw)

  def save(self, folder: pathlib.Path) -> None:
    self.raw.save_pretrained(folder)


class TiktokenBackend:
  """Over `tiktoken.Encoding`, and objects with its methods."""

  def __init__(self, encoding: Any, names: Mapping[str, str]):
    self.raw = encoding
    known = self.special_tokens()
    merged = {**_by_convention(known), **names}
    self._names = {role: text for role, text in merged.items() if text}
    for role, text in self._names.items():
      if text not in known:
        raise ValueError(f"{role} {text!r} is no special token of the encoding")

  def renamed(self, names: Mapping[str, str]) -> TiktokenBackend:
    absent = dict.fromkeys(_CONVENTION, "")
    return TiktokenBackend(self.raw, {**absent, **self._names, **names})

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    bos = self.token_id("bos_token") if add_special_tokens else None
    # By default tiktoken refuses texts that hold special tokens.
    ids = self.raw.encode(text, allowed_special="all")
    return [*([] if bos is None else [bos]), *ids]

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    special = set(self.special_tokens().values()) if skip_special_tokens else ()
    return self.raw.decode([i for i in ids if i not in special])

  def token_id(self, name: str) -> int | None:
    text = self._names.get(name)
    return None if text is None else self.raw.encode_single_token(text)

  def tokens(self) -> dict[str, str]:
    return dict(self._names)

  def special_tokens(self) -> dict[str, int]:
    texts = sorted(self.raw.special_tokens_set)
    return {text: self.raw.encode_single_token(text) for text in texts}

  def vocab_size(self) -> int:
    return self.raw.n_vocab

  def save(self, folder: pathlib.Path) -> None:
    raise TypeError(
      f"a {type(self.raw).__name__} cannot be written as tokenizer.json; save its "
      f"ranks to {folder} yourself, or train with a tokenizers.Tokenizer"
    )


class ObjectBackend:
  """Over anything with encode, decode, bos_id, eos_id and pad_id."""

  def __init__(self, tokenizer: Any, names: Mapping[str, str]):
    if names:
      raise ValueError(
        f"{sorted(names)} given for a {type(tokenizer).__name__}, whose ids come from "
        "its own bos_id, eos_id and pad_id; set them there"
      )
    self.raw = tokenizer
    self._encode_takes_special = _accepts(tokenizer.encode, "add_special_tokens")
    self._decode_takes_special = _accepts(tokenizer.decode, "skip_special_tokens")

  def renamed(self, names: Mapping[str, str]) -> ObjectBackend:
    return ObjectBackend(self.raw, names)

  def encode(self, text: str, add_special_tokens: bool) -> list[int]:
    if self._encode_takes_special:
      ids = self.raw.encode(text, add_special_tokens=add_special_tokens)
      return [int(i) for i in ids]
    bos = self.token_id("bos_token") if add_special_tokens else None
    return [*([] if bos is None else [bos]), *(int(i) for i in self.raw.encode(text))]

  def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
    if self._decode_takes_special:
      return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)
    if skip_special_tokens:
      special = {self.token_id(name) for name in _CONVENTION}
      ids = [i for i in ids if i not in special]
    return self.raw.decode(ids)

  def token_id(self, name: str) -> int | None:
    value = getattr(self.raw, name.replace("_token", "_id"))
    value = value() if callable(value) else value
    # SentencePiece says -1 for "there is none".
    return None if value is None or int(value) < 0 else int(value)

  def tokens(self) -> dict[str, str]:
    found = {role: self._text(role) for role in _CONVENTION}
    return {role: text for role, text in found.items() if text}

  def _text(self, role: str) -> str | None:
    stated = getattr(self.raw, role, None)
    if isinstance(stated, str):
      return stated
    number = self.token_id(role)
    pieces = getattr(self.raw, "id_to_piece", None)
    return pieces(number) if pieces is not None and number is not None else None

  def special_tokens(self) -> dict[str, int]:
    ids = {role: self.token_id(role) for role in _CONVENTION}
    return {t: i for role, t in self.tokens().items() if (i := ids[role]) is not None}

  def vocab_size(self) -> int:
    size: Any = getattr(self.raw, "vocab_size", None)
    size = size() if callable(size) else size
    return int(len(self.raw) if size is None else size)

  def save(self, folder: pathlib.Path) -> None:
    if not hasattr(self.raw, "save_pretrained"):
      raise TypeError(
        f"a {type(self.raw).__name__} cannot be written as tokenizer.json; copy its "
        f"files to {folder} yourself, or train with a tokenizers.Tokenizer"
      )
    self.raw.save_pretrained(folder)


def _by_convention(known: Mapping[str, int]) -> dict[str, str]:
  """The roles of special tokens that bear a usual name."""
  return {
    role: next(name for name in candidates if name in known)
    for role, candidates in _CONVENTION.items()
    if any(name in known for name in candidates)
  }


def _accepts(function: Any, argument: str) -> bool:
  try:
    parameters = inspect.signature(function).parameters
  except (TypeError, ValueError):
    return False  # a C function without a signature
  return argument in parameters
