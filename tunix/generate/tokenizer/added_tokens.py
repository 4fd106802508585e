"""Tokens that are added to a loaded tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from tunix.generate.tokenizer import loading as tokenizer_loading
from tunix.generate.tokenizer.backends import Backend


def check(texts: Sequence[str], name: str = "add_tokens") -> None:
  """Refuses texts that cannot be tokens.

  Args:
    texts: texts of the tokens.
    name: name of the argument or key, for messages.

  Raises:
    ValueError: a text is empty, all spaces, or repeated, or `texts` is one text.
  """
  if isinstance(texts, str):
    raise ValueError(f"{name} is {texts!r}; expected a list of texts. Give [{texts!r}]")
  for number, text in enumerate(texts):
    if not isinstance(text, str) or not text.strip():
      raise ValueError(
        f"{name} has {text!r}; expected texts with a character that is no space, such "
        "as '<think>'. Leave it out"
      )
    if text in texts[:number]:
      raise ValueError(f"{name} has {text!r} twice; name it once")


def extended(backend: Backend, texts: Sequence[str]) -> tuple[Backend, dict[str, int]]:
  """Returns a copy of a tokenizer with more tokens, and {text: id} of the new ones.

  A text that is a token already keeps its id, and is not new.

  Args:
    backend: the tokenizer. It is unchanged.
    texts: texts of the tokens. Each is found as it is written, and decoded to itself.

  Raises:
    ValueError: see `check`, or the tokenizer cannot be extended, or decodes a new token
      to another text.
  """
  check(texts)
  new = [text for text in texts if backend.id_of(text) is None]
  if not new:
    return backend, {}
  made = backend.extended([tokenizer_loading.added_token(text) for text in new])
  ids = {text: made.id_of(text) for text in new}
  ids = {text: i for text, i in ids.items() if i is not None}
  for text, i in ids.items():
    decoded = made.decode([i], skip_special_tokens=False)
    # Decoders may leave out spaces at the ends of a whole text.
    if decoded.strip() != text.strip():
      raise ValueError(
        f"add_tokens has {text!r}, which this tokenizer would decode as {decoded!r}. "
        "Use ASCII characters"
      )
  return made, ids
