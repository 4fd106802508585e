"""Log-probabilities in the forms of the routes."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from tunix.generate.engine.token_bytes import token_bytes
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.tokens import Tokens

# JSON has no infinity; vLLM writes the same number for a token that cannot be drawn.
LOWEST = -9999.0

_INCOMPLETE = "\ufffd"


class TokenTexts:
  """Texts of single tokens, each decoded once."""

  def __init__(self, tokenizer: TokenizerAdapter):
    self._tokenizer = tokenizer
    self._special = tokenizer.special_ids()
    self.text = functools.lru_cache(maxsize=1 << 16)(self._text)

  def _text(self, token: int) -> str:
    # Tokenizers may drop the space before the first token of a text, so the text of a
    # token is what its second copy adds.
    decode = functools.partial(self._tokenizer.decode, skip_special_tokens=False)
    return decode([token, token])[len(decode([token])) :]

  @functools.cached_property
  def _bytes(self) -> list[bytes | None]:
    try:
      return token_bytes(self._tokenizer)
    except ValueError:  # the decoder changes tokens according to their neighbors
      return []

  def data(self, token: int) -> bytes | None:
    """Returns the bytes of a token, which may be a part of a character, if known."""
    text = self.text(token)
    if _INCOMPLETE not in text:
      return text.encode("utf-8", "replace")
    return self._bytes[token] if token < len(self._bytes) else None

  def shown(self, token: int) -> bytes:
    """Returns the bytes of a token in a text without special tokens."""
    return b"" if token in self._special else self.data(token) or b"?"

  def named(self, token: int, as_ids: bool) -> str:
    """Returns the text, or "token_id:N" if clients ask for ids."""
    return f"token_id:{token}" if as_ids else self.text(token)


class Offsets:
  """Places of the tokens of a growing text, in characters.

  A token inside a character has the place of this character.
  """

  def __init__(self, texts: TokenTexts):
    self._texts, self._place = texts, 0
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

  def push(self, token: int) -> int:
    """Returns the place of the next token."""
    data = self._texts.shown(token)
    # The first byte alone, because it may end a broken character before it.
    self._place += len(self._decoder.decode(data[:1]))
    is_inside = not data or self._decoder.getstate()[0]
    place = self._place if is_inside else self._place - 1
    self._place += len(self._decoder.decode(data[1:]))
    return place


class Scored:
  """Tokens with their log-probabilities.

  Attributes:
    tokens: ids.
    logprobs: in nats; None for a token that nothing precedes.
    top: at each position the most likely ids with their log-probabilities.
  """

  def __init__(self, tokens: Sequence[int], logprobs: Iterable[float | None]):
    self.tokens = [int(token) for token in tokens]
    self.logprobs = [None if x is None else _finite(x) for x in logprobs]
    self.top: list[list[tuple[int, float]]] = [[] for _ in self.tokens]

  @classmethod
  def of(cls, tokens: Tokens, most: int) -> Scored:
    """Returns drawn tokens, or those of a prompt, with `most` of their likely ids."""
    logps, top = tokens.logps, tokens.top
    scored = cls(tokens.ids.tolist(), () if logps is None else logps.tolist())
    if top is not None and most:
      rows = zip(top.ids.tolist(), top.logprobs.tolist())
      made = [[(i, _finite(x)) for i, x in list(zip(*row))[:most]] for row in rows]
      scored.top = made
    return scored

  def __add__(self, other: Scored) -> Scored:
    joined = Scored(self.tokens + other.tokens, self.logprobs + other.logprobs)
    joined.top = self.top + other.top
    return joined


def completion_form(
  scored: Scored, texts: TokenTexts, *, has_top: bool, as_ids: bool, offsets: Offsets
) -> dict[str, Any]:
  """Returns `choices[].logprobs` of /v1/completions.

  Args:
    scored: the tokens.
    texts: texts of tokens.
    has_top: give the most likely tokens; the token itself is always among them.
    as_ids: name tokens "token_id:N".
    offsets: places of the tokens so far.
  """
  name = functools.partial(texts.named, as_ids=as_ids)
  tops = [
    None if logprob is None else _top_dict(row, token, logprob, name)
    for row, token, logprob in zip(scored.top, scored.tokens, scored.logprobs)
  ]
  return {
    "tokens": [name(token) for token in scored.tokens],
    "token_logprobs": scored.logprobs,
    "top_logprobs": tops if has_top else None,
    "text_offset": [offsets.push(token) for token in scored.tokens],
  }


def _top_dict(
  row: list[tuple[int, float]], token: int, logprob: float, name: Any
) -> dict[str, float]:
  # Several ids may have one text, such as parts of a character. The largest number
  # stays: lm-eval compares it with the token's.
  top: dict[str, float] = {}
  for i, value in [*row, (token, logprob)]:
    top[name(i)] = max(value, top.get(name(i), LOWEST))
  return top


def chat_form(scored: Scored, texts: TokenTexts, *, as_ids: bool) -> dict[str, Any]:
  """Returns `choices[].logprobs` of /v1/chat/completions."""

  def entry(token: int, logprob: float | None) -> dict[str, Any]:
    data = texts.data(token)
    return {
      "token": texts.named(token, as_ids),
      "logprob": LOWEST if logprob is None else logprob,
      "bytes": None if data is None else list(data),
    }

  content = [
    {**entry(token, logprob), "top_logprobs": [entry(i, x) for i, x in row]}
    for token, logprob, row in zip(scored.tokens, scored.logprobs, scored.top)
  ]
  return {"content": content, "refusal": None}


def token_form(scored: Scored) -> dict[str, Any]:
  """Returns `choices[].logprobs` of /inference/v1/generate, which has no texts."""

  def entry(token: int, logprob: float | None) -> dict[str, Any]:
    number = LOWEST if logprob is None else logprob
    return {"token": f"token_id:{token}", "token_id": token, "logprob": number}

  content = [
    {**entry(token, logprob), "top_logprobs": [entry(i, x) for i, x in row]}
    for token, logprob, row in zip(scored.tokens, scored.logprobs, scored.top)
  ]
  return {"content": content}


def prompt_form(scored: Scored, texts: TokenTexts) -> list[dict[str, Any] | None]:
  """Returns vLLM's `prompt_logprobs`: one object of token ids at each position."""
  form: list[dict[str, Any] | None] = []
  for token, logprob, row in zip(scored.tokens, scored.logprobs, scored.top):
    if logprob is None:
      form.append(None)
      continue
    entries: dict[int, tuple[float, int | None]] = {
      i: (x, rank) for rank, (i, x) in enumerate(row, 1)
    }
    entries.setdefault(token, (logprob, None))
    form.append(
      {
        str(i): {"logprob": x, "rank": rank, "decoded_token": texts.text(i)}
        for i, (x, rank) in entries.items()
      }
    )
  return form


def _finite(logprob: float) -> float:
  return max(float(logprob), LOWEST)
