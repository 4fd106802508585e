"""Checks that two models have the same token ids."""

from __future__ import annotations

from typing import Any

from tunix.generate.tokenizer_adapter import TokenizerAdapter, adapted
from tunix.models import calling
from tunix.ops.distill import check_same_vocabulary

# Texts that tokenizers of different families split differently.
_TEXTS = (
  "The quick brown fox, 12345 + 67890 = 80235?",
  "  def f(x):\n\treturn x ** 2  # naïve",
  "Ünïcödé 東京 здравствуй",
)


def check_sizes(student: Any, teacher: Any) -> None:
  """Checks the vocabulary sizes of two models, if both are known.

  Raises:
    ValueError: the sizes differ.
  """
  sizes = calling.vocab_size(student), calling.vocab_size(teacher)
  if sizes[0] is not None and sizes[1] is not None:
    check_same_vocabulary(sizes[0], sizes[1])


def check_tokenizers(student: object, teacher: object) -> None:
  """Checks that two tokenizers split texts into the same ids.

  The whole vocabularies are compared if both tokenizers have `get_vocab`, otherwise the
  special tokens that are known.

  Args:
    student, teacher: TokenizerAdapters, or tokenizers that one can wrap.

  Raises:
    ValueError: the tokenizers differ. The message has the first text, role or token.
  """
  pair = adapted(student), adapted(teacher)
  for text in _TEXTS:
    ids = [list(map(int, tokenizer.encode(text))) for tokenizer in pair]
    if ids[0] != ids[1]:
      raise _difference(repr(text), *(f"{row[:8]}..." for row in ids))
  # Padding may differ, because it is never scored.
  ends = {"bos_id": [t.bos_id() for t in pair], "eos_id": [t.eos_id() for t in pair]}
  for role, ids in ends.items():
    if ids[0] != ids[1]:
      raise _difference(role, *ids)
  _check_tokens(*pair)


def _check_tokens(student: TokenizerAdapter, teacher: TokenizerAdapter) -> None:
  """Compares the ids of all tokens except padding."""
  padding = {_padding(student), _padding(teacher)}
  tables = [
    {text: i for text, i in table.items() if text not in padding}
    for table in _comparable_tokens(student, teacher)
  ]
  different = sorted(tables[0].items() ^ tables[1].items(), key=lambda x: (x[1], x[0]))
  if different:
    text = different[0][0]
    ids = (table.get(text, "unknown") for table in tables)
    raise _difference(f"the token {text!r}", *ids)


def _difference(subject: str, student: object, teacher: object) -> ValueError:
  return ValueError(
    f"the tokenizers differ: {subject} is {student} to the student and {teacher} to "
    "the teacher, so that one id means different tokens. Use a teacher with the "
    "student's tokenizer, or compare by text: distill.align=text, in Python "
    "TextTeacher(model=..., tokenizer=...)"
  )


def _comparable_tokens(*tokenizers: TokenizerAdapter) -> list[dict[str, int]]:
  """Returns {text: id} of the tokens of each tokenizer that can be compared."""
  whole = [_vocabulary(tokenizer) for tokenizer in tokenizers]
  special = [tokenizer.special_tokens() for tokenizer in tokenizers]
  if all(table is None for table in whole):
    return special
  # If only one vocabulary is known, only the special tokens of the other tokenizer are
  # compared.
  limits = [tokens for tokens, table in zip(special, whole) if table is None]
  return [
    tokens
    if table is None
    else {t: i for t, i in table.items() if all(t in limit for limit in limits)}
    for tokens, table in zip(special, whole)
  ]


def _vocabulary(tokenizer: TokenizerAdapter) -> dict[str, int] | None:
  """Returns {text: id} of all tokens, with added tokens; None without `get_vocab`."""
  get_vocab = getattr(tokenizer.tokenizer, "get_vocab", None)
  return None if get_vocab is None else get_vocab()


def _padding(tokenizer: TokenizerAdapter) -> str | None:
  """Returns the text of the padding token if it has no other role, else None."""
  pad = tokenizer.pad_id()
  if pad in (tokenizer.bos_id(), *tokenizer.eos_ids()):
    return None
  texts = (text for text, i in tokenizer.special_tokens().items() if i == pad)
  return next(texts, None)
