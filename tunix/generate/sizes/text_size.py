"""Bounds of texts, checked before a tokenizer spends seconds on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# A text with more characters than this for each token that it may have is not tokenized
# at all. The longest tokens of large vocabularies are 128 characters of white space.
TOKEN_CHARACTERS = 512


def may_fit(texts: object, tokens: int) -> bool:
  """Returns False if texts together are too long for a number of tokens.

  Every list and mapping counts as a character, so that one that contains itself ends.

  Args:
    texts: a text, or texts in lists and mappings; other values are passed over.
    tokens: most tokens that the texts may have.
  """
  left, most = [texts], tokens * TOKEN_CHARACTERS
  while left and most >= 0:
    value = left.pop()
    most -= len(value) if isinstance(value, str) else 1
    if isinstance(value, Mapping):
      left += [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
      left += [x for x in value if isinstance(x, str | Mapping | list | tuple)]
  return most >= 0


def check(texts: Iterable[str], tokens: int, remedy: str) -> None:
  """Checks that each text may fit.

  Args:
    texts: the texts.
    tokens: most tokens that each of them may have.
    remedy: end of the message: what to do.

  Raises:
    ValueError: a text is too long.
  """
  for text in texts:
    if not may_fit(text, tokens):
      raise ValueError(
        f"a prompt has {len(text)} characters, expected at most "
        f"{tokens * TOKEN_CHARACTERS}, which are {TOKEN_CHARACTERS} for each of "
        f"{tokens} tokens. {remedy}"
      )
