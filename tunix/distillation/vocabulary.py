"""Whether two models mean the same by a token's id."""

from __future__ import annotations

from typing import Any

from tunix.generate.tokenizer_adapter import TokenizerAdapter, adapted
from tunix.models import calling
from tunix.ops.distill import check_same_vocabulary

# Texts that tokenizers of different make split differently.
_TEXTS = (
  "The quick brown fox, 12345 + 67890 = 80235?",
  "  def f(x):\n\treturn x ** 2  # naïve",
  "Ünïcödé 東京 здравствуй",
)


def check_sizes(student: Any, teacher: Any) -> None:
  """Refuses models that say how many words they have, and differ.

  Raises:
    ValueError: they differ.
  """
  ours, theirs = calling.vocab_size(student), calling.vocab_size(teacher)
  if ours is not None and theirs is not None:
    check_same_vocabulary(ours, theirs)


def check_tokenizers(student: Any, teacher: Any) -> None:
  """Refuses tokenizers that split a text differently, or read an id differently.

  Whole vocabularies are compared where both tokenizers give theirs (`get_vocab`), else
  the special tokens that are known.

  Args:
    student, teacher: TokenizerAdapters, or what one can wrap.

  Raises:
    ValueError: they differ; the message has the first text, role or token.
  """
  ours, theirs = adapted(student), adapted(teacher)
  for text in _TEXTS:
    pair = [list(map(int, t.encode(text))) for t in (ours, theirs)]
    if pair[0] != pair[1]:
      raise _differ(repr(text), *(f"{ids[:8]}..." for ids in pair))
  for role in ("bos_id", "eos_id"):  # padding is never scored
    pair = getattr(ours, role)(), getattr(theirs, role)()
    if pair[0] != pair[1]:
      raise _differ(role, *pair)
  _check_words(ours, theirs)


def _check_words(ours: TokenizerAdapter, theirs: TokenizerAdapter) -> None:
  """Refuses words of different ids, but for padding, which is never scored."""
  padding = {_padding(t) for t in (ours, theirs)}
  words = [
    {text: i for text, i in known.items() if text not in padding}
    for known in _known_words(ours, theirs)
  ]
  different = sorted(words[0].items() ^ words[1].items(), key=lambda x: (x[1], x[0]))
  if different:
    text = different[0][0]
    raise _differ(f"the token {text!r}", *(w.get(text, "unknown") for w in words))


def _differ(what: str, ours: Any, theirs: Any) -> ValueError:
  return ValueError(
    f"the tokenizers differ: {what} is {ours} to the student and {theirs} to the "
    "teacher, so that probabilities of one id are of different words. Take a teacher "
    "with the student's tokenizer"
  )


def _known_words(*tokenizers: TokenizerAdapter) -> list[dict[str, int]]:
  """Text -> id of as many tokens as can be compared."""
  whole = [_vocabulary(t) for t in tokenizers]
  special = [t.special_tokens() for t in tokenizers]
  if all(words is None for words in whole):
    return special
  # Where one vocabulary alone is known, it must have the other's special tokens.
  asked = [tokens for tokens, words in zip(special, whole) if words is None]
  return [
    tokens
    if words is None
    else {t: i for t, i in words.items() if all(t in x for x in asked)}
    for tokens, words in zip(special, whole)
  ]


def _vocabulary(tokenizer: TokenizerAdapter) -> dict[str, int] | None:
  """Text -> id of every token, added ones included; None where it is not given."""
  get_vocab = getattr(tokenizer.tokenizer, "get_vocab", None)
  return None if get_vocab is None else get_vocab()


def _padding(tokenizer: TokenizerAdapter) -> str | None:
  """The text of a token for padding alone."""
  pad = tokenizer.pad_id()
  if pad in (tokenizer.bos_id(), *tokenizer.eos_ids()):
    return None
  texts = (text for text, i in tokenizer.special_tokens().items() if i == pad)
  return next(texts, None)
