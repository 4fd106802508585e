"""Whether two models mean the same by a token's id."""

from __future__ import annotations

from typing import Any

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.ops.distill import check_same_words

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
  ours, theirs = size_of(student), size_of(teacher)
  if ours is not None and theirs is not None:
    check_same_words(ours, theirs)


def check_tokenizers(student: Any, teacher: Any) -> None:
  """Refuses tokenizers that split a text differently, or read an id differently.

  Args:
    student, teacher: TokenizerAdapters, or what one can wrap.

  Raises:
    ValueError: they differ; the message has the first text or role.
  """
  ours, theirs = _adapter(student), _adapter(teacher)
  for text in _TEXTS:
    pair = [list(map(int, t.encode(text))) for t in (ours, theirs)]
    if pair[0] != pair[1]:
      raise ValueError(
        f"the tokenizers differ: {text!r} is {pair[0][:8]}... to the student and "
        f"{pair[1][:8]}... to the teacher, so that probabilities of one id are of "
        "different words. Take a teacher with the student's tokenizer"
      )
  for role in ("bos_id", "eos_id"):  # padding is never scored
    pair = getattr(ours, role)(), getattr(theirs, role)()
    if pair[0] != pair[1]:
      raise ValueError(
        f"the tokenizers differ: {role} is {pair[0]} to the student and {pair[1]} to "
        "the teacher. Take a teacher with the student's tokenizer"
      )


def size_of(model: Any) -> int | None:
  """Words that a model says it has."""
  own = getattr(model, "vocab_size", None)
  return own or getattr(getattr(model, "config", None), "vocab_size", None)


def _adapter(tokenizer: Any) -> TokenizerAdapter:
  known = isinstance(tokenizer, TokenizerAdapter)
  return tokenizer if known else TokenizerAdapter(tokenizer)
