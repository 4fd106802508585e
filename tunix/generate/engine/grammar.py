"""Constraints on a completion's text: JSON schema, regular expression, choices.

The package `llguidance` (extra `grammar`) parses the texts and computes the masks on
the host. A mask allows a token if the text so far, continued by the token's bytes, is
the beginning of an allowed text. An end token is allowed if the text so far is an
allowed text. Each `Grammars` builds the index of its tokens (a trie) once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.generate.engine.request import RequestError
from tunix.generate.engine.token_bytes import token_bytes
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import optional

# White space between two parts of JSON, at most once each: a space, or a line break and
# an indentation. Without a bound a model may write white space until `max_tokens`.
_WHITE_SPACE = r" |\r?\n[ \t]{0,64}"

_OTHER = re.compile(r"[^0-9A-Za-z]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_ERROR_LINE = re.compile(r"^\s*error: (.*)$", re.MULTILINE)

# By default llguidance encodes text that a grammar prescribes and allows only this
# encoding. `no_forcing` allows every way to write the text, so that a mask does not
# depend on how a tokenizer encodes parts of a text.
_OPTIONS = '%llguidance {"no_forcing": true}\n'


class Grammars:
  """Builds the constraints of one tokenizer and one model.

  Every method that returns a constraint compiles it. Methods may be called from any
  thread.

  Attributes:
    vocab_size: number of ids of the model's logits, V.
    eos_ids: ids that may follow a complete text.
  """

  def __init__(
    self, tokenizer: TokenizerAdapter, vocab_size: int, eos_ids: Sequence[int]
  ):
    """Builds the index of the tokens.

    Args:
      tokenizer: the tokenizer of the model.
      vocab_size: number of ids of the model's logits, V. Ids that the tokenizer does
        not have are never allowed, and neither are its special tokens.
      eos_ids: ids that end a completion.

    Raises:
      ImportError: the package llguidance is missing.
      ValueError: there is no end token, or it is outside the vocabulary; or the
        tokenizer's tokens have no bytes of their own, see `token_bytes`.
    """
    self._library = optional.require("llguidance", "a constraint", "tunix[grammar]")
    self.vocab_size = vocab_size
    self.eos_ids = tuple(dict.fromkeys(int(i) for i in eos_ids))
    if not self.eos_ids or not all(0 <= i < vocab_size for i in self.eos_ids):
      raise ValueError(
        f"eos_ids is {self.eos_ids}; expected at least one id, each from 0 to "
        f"{vocab_size - 1}. Name the tokens that end a completion"
      )
    by_id = token_bytes(tokenizer)[:vocab_size]
    tokens = [data or b"" for data in by_id] + [b""] * (vocab_size - len(by_id))
    for number in self.eos_ids:
      tokens[number] = b""
    self._ends = _mask_of(self.eos_ids, vocab_size)
    wrapper = self._library.TokenizerWrapper(_Vocabulary(tokens, self.eos_ids[0]))
    self._tokenizer = self._library.LLTokenizer(wrapper, eos_token=list(self.eos_ids))

  def json_schema(self, schema: Mapping[str, Any] | str) -> Grammar:
    """Returns the constraint to JSON that conforms to a schema.

    Properties are written in the order of the schema. Keys that the schema does not
    name may repeat. Keywords that JSON Schema does not define are ignored.

    Args:
      schema: a schema of draft 2020-12 as an object, or the JSON text of one.

    Raises:
      ValueError: the schema is not valid, no text conforms to it, or it has a keyword
        that cannot be enforced.
    """
    parsed = _parse(schema) if isinstance(schema, str) else schema
    if not isinstance(parsed, Mapping):
      raise ValueError(
        f"schema is {_shown(schema)}; expected a JSON object. Pass a JSON schema, or "
        "use json_object() for any object"
      )
    try:
      source = json.dumps(
        {**parsed, "x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
      )
    except (TypeError, ValueError, RecursionError) as error:
      raise ValueError(
        f"schema is {_shown(schema)}; expected values that JSON has ({error}). Pass a "
        "JSON schema"
      ) from error
    grammar = self._compile(f"%json {source}", "schema", schema)
    for part in _with_patterns(parsed):
      if not self._adds_keys(part):
        raise ValueError(
          f"schema is {_shown(schema)}; expected patternProperties that match keys "
          "which properties does not name, because additionalProperties is false; "
          f"{_shown(list(part['patternProperties']))} match none. Leave them out"
        )
    return grammar

  def _adds_keys(self, part: Mapping[str, Any]) -> bool:
    """Returns True if the patterns of an object match a key that is not declared.

    The library allows a comma after the declared properties, and then no key.
    """
    patterns = [
      key for key, value in part["patternProperties"].items() if value is not False
    ]
    if not patterns:
      return True
    source = json.dumps(
      {
        "type": "object",
        "properties": dict.fromkeys(part["properties"], False),
        "patternProperties": {key: {} for key in patterns},
        "additionalProperties": False,
      }
    )
    tokenizer = self._library.LLTokenizer("byte")
    matcher = self._library.LLMatcher(
      tokenizer, f"{_OPTIONS}start: %json {source}", log_level=0
    )
    return matcher.consume_tokens(list(b'{"'))

  def json_object(self) -> Grammar:
    """Returns the constraint to any JSON object."""
    return self.json_schema({"type": "object"})

  def regex(self, pattern: str) -> Grammar:
    """Returns the constraint to texts that match a regular expression as a whole.

    Args:
      pattern: a regular expression in the syntax of Rust's package `regex`, which is
        that of `re` without look-around and back-references. The anchors ^ and $ are
        allowed at its start and end, where they change nothing.

    Raises:
      ValueError: the pattern is not valid, or no text matches it.
    """
    if not _is_text(pattern):
      raise ValueError(
        f"regex is {_shown(pattern)}; expected a string without surrogates. Pass a "
        "regular expression"
      )
    source = self._library.regex_to_lark(pattern, "")
    return self._compile(f"/{source}/", "regex", pattern)

  def choice(self, choices: Sequence[str]) -> Grammar:
    """Returns the constraint to one of some texts.

    Raises:
      ValueError: there is no choice, or one is not a string.
    """
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not choices or not all(map(_is_text, choices)):
      raise ValueError(
        f"choice is {_shown(choices)}; expected a list of at least one string, without "
        "surrogates. Pass the texts to choose from"
      )
    # One expression: as alternatives of a grammar, more than 2,000 texts pass a limit.
    source = "|".join(_OTHER.sub(_escape, text) for text in choices)
    return self._compile(f"/{source}/", "choice", choices)

  def _compile(self, source: str, kind: str, value: object) -> Grammar:
    limits = self._library.LLParserLimits(verbose_errors=False)
    matcher = self._library.LLMatcher(
      self._tokenizer, f"{_OPTIONS}start: {source}", log_level=0, limits=limits
    )
    # An unknown reference or a broken pattern shows now, an empty set of texts with the
    # first mask.
    first = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
      raise ValueError(
        f"{kind} is {_shown(value)}; expected one that can be enforced and that allows "
        f"a text: {_cause(matcher)}. Correct the {kind}"
      )
    return Grammar(matcher, _words(first, len(self._ends)))


def _with_patterns(schema: object) -> Iterator[Mapping[str, Any]]:
  """Yields the objects of a schema that have no keys but those of two tables."""
  todo = [schema]
  while todo:
    part = todo.pop()
    todo += part if isinstance(part, list) else ()
    if not isinstance(part, Mapping):
      continue
    todo += part.values()
    tables = part.get("properties"), part.get("patternProperties")
    is_closed = part.get("additionalProperties") is False
    if is_closed and all(isinstance(table, Mapping) and table for table in tables):
      yield part


class Grammar:
  """A compiled constraint; see `request.Constraint`. `Grammars` builds it."""

  def __init__(self, matcher: Any, first: np.ndarray):
    self._matcher, self._first = matcher, first

  def matcher(self) -> GrammarMatcher:
    """Returns the state of a new completion, which costs a copy and no compilation."""
    return GrammarMatcher(self._matcher.deep_copy(), self._first)


class GrammarMatcher:
  """The state of a constraint while one completion grows; see `request.Matcher`."""

  def __init__(self, matcher: Any, first: np.ndarray):
    self._matcher, self._words = matcher, len(first)
    self._mask: np.ndarray | None = first

  def mask(self) -> np.ndarray:
    """Returns uint32 [ceil(V / 32)]: bit v % 32 of word v // 32 allows token v.

    Bits from V on are 0. The array is read-only. Further calls before `accept` return
    the same array.

    Raises:
      RequestError: the constraint cannot go on. No token of the vocabulary continues
        the text, or the grammar has passed a limit of the library.
    """
    if self._mask is None:
      self._mask = _words(self._matcher.compute_bitmask(), self._words)
      self._check_error("has no next token")
    return self._mask

  def accept(self, token: int) -> None:
    """Takes the token that was drawn, which the last mask allowed.

    Raises:
      RequestError: the mask does not allow the token.
    """
    self._mask = None
    self._matcher.consume_token(int(token))
    self._check_error(f"does not allow token {token}")

  def _check_error(self, problem: str) -> None:
    # The library reports errors by a state, and its masks then allow the end tokens.
    if self._matcher.is_error():
      raise RequestError(
        f"the constraint {problem}: {_cause(self._matcher)}. Simplify the constraint, "
        "and draw only tokens that its mask allows"
      )


class _Vocabulary:
  """The attributes that llguidance reads from a tokenizer."""

  bos_token_id = None

  def __init__(self, tokens: list[bytes], eos_token_id: int):
    self.tokens = tokens
    self.eos_token_id = eos_token_id

  def __call__(self, text: object) -> list[int]:
    raise NotImplementedError("with no_forcing no grammar encodes text")


def _words(mask: bytes, count: int) -> np.ndarray:
  """Returns the first `count` little-endian words of a mask as a read-only array."""
  # The library adds a word of zeros if V is a multiple of 32.
  return np.frombuffer(mask, np.dtype("<u4"), count)


def _mask_of(ids: Sequence[int], vocab_size: int) -> np.ndarray:
  """Returns the mask that allows some ids, uint32 [ceil(V / 32)]."""
  count = -(-vocab_size // 32)
  bits = np.zeros(count * 32, np.uint8)
  bits[list(ids)] = 1
  return _words(np.packbits(bits, bitorder="little").tobytes(), count)


def _is_text(value: object) -> bool:
  """Returns True for a string that UTF-8 can encode."""
  return isinstance(value, str) and not _SURROGATE.search(value)


def _escape(match: re.Match[str]) -> str:
  """Returns the character of a match as an escape of a regular expression."""
  return f"\\x{{{ord(match[0]):X}}}"


def _parse(text: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f"schema is {_shown(text)}; expected JSON text: {error}. Pass a JSON schema"
    ) from error


def _cause(matcher: Any) -> str:
  """Returns the library's message without its print of the grammar."""
  message = matcher.get_error()
  if message.startswith("NoExtensionBias"):
    return "no text is allowed"
  # A message begins with a place in the grammar. For a regular expression it shows the
  # expression in several lines before the error.
  match = _ERROR_LINE.search(message)
  text = match[1] if match else message.splitlines()[0]
  return _shorten(_PLACE.sub("", text).rstrip("."))


def _shown(value: object) -> str:
  return _shorten(repr(value))


def _shorten(text: str) -> str:
  return text if len(text) <= 200 else f"{text[:200]}..."
