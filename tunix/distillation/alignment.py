"""Aligns the tokens of two tokenizers by the bytes of one text.

A span is a part of a text that both tokenizers begin and end with a token boundary, and
that holds no smaller span. A span has one or more tokens of each. Every token is in one
span, so the log-probabilities of the spans add up to those of all tokens.

Offsets are bytes of UTF-8, because one token may hold a part of a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tunix.generate.engine.token_bytes import token_bytes
from tunix.generate.tokenizer_adapter import TokenizerAdapter


class Reading(NamedTuple):
  """A completion of the student in the tokens of the teacher.

  Attributes:
    ids: [m] the teacher's tokens.
    teacher_spans: [m] the number of the span of each; ascending.
    student_spans: [n] the number of the span of each token of the student; ascending. A
      span that is not in `teacher_spans` is not read by the teacher.
  """

  ids: np.ndarray
  teacher_spans: np.ndarray
  student_spans: np.ndarray


class TextAlignment:
  """Reads completions of a student with the tokenizer of its teacher.

  An end token of the student becomes the first end token of the teacher. A special
  token within a completion is read as its text. Bytes that are no UTF-8 are read as
  U+FFFD, and an incomplete character at the end is not read.

  Args:
    student, teacher: the tokenizers.
    end_ids: ids that end a completion, beside the end tokens of the student.

  Raises:
    ValueError: the teacher has no end token, or the bytes of the tokens of a tokenizer
      cannot be found, see `token_bytes`.
  """

  def __init__(
    self,
    student: TokenizerAdapter,
    teacher: TokenizerAdapter,
    end_ids: Iterable[int] = (),
  ):
    end = teacher.eos_id()
    if end is None:
      raise ValueError(
        "the teacher's tokenizer has no end-of-sequence token; expected one for "
        "the student's. Name it: TokenizerAdapter(tokenizer, eos_token=...)"
      )
    self._end, self.teacher = end, teacher
    self._ends = {*student.eos_ids(), *end_ids}
    self._student_pieces, self._teacher_pieces = _pieces(student), _pieces(teacher)

  def read(self, ids: Sequence[int] | np.ndarray) -> Reading:
    """Returns the teacher's tokens of a completion of the student, and the spans."""
    is_ended = len(ids) > 0 and int(ids[-1]) in self._ends
    # A model may have more ids than its tokenizer; those have no text.
    known = self._student_pieces
    pieces = [known[i] if i < len(known) else b"" for i in map(int, ids)]
    pieces = pieces[: len(pieces) - is_ended]
    count = len(pieces) if is_ended else _complete(pieces)
    text = b"".join(pieces[:count]).decode("utf-8", "replace")
    tokens = self.teacher.encode_continuation(text) if text else []
    other = [self._teacher_pieces[i] for i in tokens]
    student, teacher = spans(pieces[:count], other)
    # The tokens behind the text are one more span. Only the end token has a partner.
    behind = max([-1, *student[-1:], *teacher[-1:]]) + 1
    student = np.append(student, np.full(len(ids) - count, behind))
    if is_ended:
      tokens, teacher = [*tokens, self._end], np.append(teacher, behind)
    return Reading(np.asarray(tokens, np.int32), teacher, student)


def spans(
  student: Sequence[bytes], teacher: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the number of the span of each token, for both tokenizations of a text.

  If the texts differ, because a tokenizer normalizes or has no token for a character,
  the difference is inside one span. Both sides have the same numbers, int64 [n] and
  [m], ascending from 0, unless one has no tokens.

  Args:
    student, teacher: bytes of each token.
  """
  own, other = b"".join(student), b"".join(teacher)
  first = _common(own, other)
  last = _common(own[first:][::-1], other[first:][::-1])
  ends, their_ends = (
    np.cumsum([len(piece) for piece in side], dtype=np.int64)
    for side in (student, teacher)
  )
  # Ends of the teacher's tokens as offsets in the student's text. Between the common
  # beginning and the common end no offset is that of the student.
  is_last = their_ends >= len(other) - last
  is_first = (their_ends <= first) & ~is_last
  shifted = their_ends + len(own) - len(other)
  moved = np.select([is_last, is_first], [shifted, their_ends], len(own) - last)
  is_shared = (ends <= first) | (ends >= len(own) - last)
  shared = np.intersect1d(ends[is_shared], moved[is_last | is_first])
  return np.searchsorted(shared, ends), np.searchsorted(shared, moved)


def last_of_span(numbers: np.ndarray) -> np.ndarray:
  """Returns the index of the last token of the span of each token, [n]."""
  return np.searchsorted(numbers, numbers, side="right") - 1


def _common(a: bytes, b: bytes) -> int:
  """Returns the number of equal bytes at the beginning."""
  length = min(len(a), len(b))
  left, right = (np.frombuffer(data[:length], np.uint8) for data in (a, b))
  return int(np.append(left != right, True).argmax())


def _complete(pieces: Sequence[bytes]) -> int:
  """Returns the number of tokens before an incomplete character at the end."""
  for count in range(len(pieces), 0, -1):
    data = b"".join(pieces[:count])
    if codecs.utf_8_decode(data, "replace")[1] == len(data):
      return count
  return 0


def _pieces(tokenizer: TokenizerAdapter) -> list[bytes]:
  """Returns the bytes of each id; those of a special token are its text."""
  pieces = [data or b"" for data in token_bytes(tokenizer)]
  for text, number in tokenizer.special_tokens().items():
    pieces[number] = text.encode()
  return pieces
