"""Spans of text that two tokenizers have in common."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import assume, example, given, strategies as st

from tests import toys_text
from tunix.distillation import alignment
from tunix.distillation.alignment import TextAlignment
from tunix.generate.tokenizer_adapter import TokenizerAdapter

TEXTS = st.text(
  st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab é東я👍🏽न्ि \n\u0301")),
  max_size=24,
)
CUTS = st.lists(st.integers(0, 60), max_size=20)


def cut(data: bytes, places) -> list[bytes]:
  """Tokens with these ends, some of them empty, some inside a character."""
  ends = [0, *sorted(min(place, len(data)) for place in places), len(data)]
  return [data[a:b] for a, b in itertools.pairwise(ends)]


def joined(numbers, pieces) -> list[bytes]:
  """The bytes of each span."""
  count = max([-1, *numbers]) + 1
  return [
    b"".join(piece for piece, own in zip(pieces, numbers) if own == number)
    for number in range(count)
  ]


def ends(pieces) -> set[int]:
  return set(itertools.accumulate(map(len, pieces)))


@given(TEXTS, CUTS, CUTS)
def test_spans_have_one_text_and_end_at_every_common_boundary(text, first, second):
  own, other = cut(text.encode(), first), cut(text.encode(), second)
  numbers = alignment.spans(own, other)
  parts = [joined(*side) for side in zip(numbers, (own, other))]
  assert parts[0] == parts[1] and b"".join(parts[0]) == text.encode()
  assert ends(parts[0]) == ends(own) & ends(other)
  for side in numbers:  # one after the other, and every one has tokens of both
    assert sorted(side) == side.tolist() and set(side) == set(numbers[0])


@given(TEXTS, TEXTS, TEXTS, TEXTS, CUTS, CUTS)
@example("ab", "e\u0301", "\u00e9", "cd", [1, 2, 4, 5, 6], [1, 2, 4, 5])
def test_a_difference_stays_inside_a_span(start, mine, theirs, rest, first, second):
  """As of a tokenizer that normalizes: the texts before and behind it are aligned."""
  assume(mine and theirs)  # else tokens without text can be spans of their own
  texts = [f"{start}{middle}{rest}".encode() for middle in (mine, theirs)]
  own, other = (cut(*pair) for pair in zip(texts, (first, second)))
  numbers = alignment.spans(own, other)
  parts = [joined(*side) for side in zip(numbers, (own, other))]
  assert [b"".join(side) for side in parts] == texts
  assert len(parts[0]) == len(parts[1])
  assert sum(a != b for a, b in zip(*parts)) <= 1


def test_spans_by_hand():
  own, other = [b"a", b"bc", b"d", b"\xc3", b"\xa9"], [b"ab", b"c", b"d", b"\xc3\xa9"]
  assert [side.tolist() for side in alignment.spans(own, other)] == [
    [0, 0, 1, 2, 2],
    [0, 0, 1, 2],
  ]
  found = alignment.last_of_span(np.asarray([0, 0, 1, 2, 2]))
  assert found.tolist() == [1, 1, 2, 4, 4]
  # Both split the character at one place.
  assert alignment.spans(own[3:], own[3:])[0].tolist() == [0, 1]
  # Decomposed to the student: only this character is one span.
  own, other = [b"a", b"e", b"\xcc\x81", b"b"], [b"a", b"\xc3\xa9", b"b"]
  assert [side.tolist() for side in alignment.spans(own, other)] == [
    [0, 1, 1, 2],
    [0, 1, 2],
  ]
  assert [side.tolist() for side in alignment.spans([], [])] == [[], []]


@functools.lru_cache(maxsize=1)
def pair():
  """(byte-level student, SentencePiece-style teacher, alignment) of one text."""
  student = toys_text.chat_tokenizer("chatml")
  teacher = TokenizerAdapter(toys_text.metaspace(), bos_token="<s>", eos_token="</s>")
  return student, teacher, TextAlignment(student, teacher)


@given(TEXTS)
@example("The river runs slowly past the old mill.")
@example(" two spaces  <think>\n</think> naïve 東京")
def test_a_teacher_reads_the_text_of_the_student(text):
  student, teacher, both = pair()
  ids = [*student.encode_continuation(text), student.eos_id()]
  reading = both.read(ids)
  assert reading.ids[-1] == teacher.eos_id()
  # Behind a line break a decoder drops no space.
  start = teacher.encode("\n")
  said = teacher.decode([*start, *reading.ids[:-1]], skip_special_tokens=False)
  assert said == "\n" + text
  assert set(reading.student_spans) == set(reading.teacher_spans)
  last = [side[-1] for side in (reading.student_spans, reading.teacher_spans)]
  assert last[0] == last[1] == len(set(reading.student_spans)) - 1


@given(st.lists(st.integers(0, 600), max_size=12))
def test_any_tokens_of_a_student_are_read(ids):
  """Also bytes that are no text, special tokens, and ids behind the vocabulary."""
  student, _, both = pair()
  reading = both.read(ids)
  assert len(reading.student_spans) == len(ids)
  assert len(reading.teacher_spans) == len(reading.ids)
  for side in (reading.student_spans, reading.teacher_spans):
    assert sorted(side) == side.tolist()
  assert set(reading.teacher_spans) <= set(reading.student_spans)
  assert student.vocab_size < 600


def test_an_incomplete_character_at_the_end_is_not_read():
  student, teacher, both = pair()
  whole = student.encode("a\u6771")
  assert len(whole) == 4
  reading = both.read(whole[:-1])
  assert reading.ids.tolist() == teacher.encode_continuation("a")
  assert reading.teacher_spans.tolist() == [0]
  assert reading.student_spans.tolist() == [0, 1, 1]
  # Before an end nothing can complete it, so the teacher reads a broken character.
  reading = both.read([*whole[:-1], student.eos_id() or 0])
  assert teacher.decode(reading.ids) == "a\ufffd"
  assert reading.student_spans.tolist() == [0, 1, 1, 2]


def test_an_end_of_the_student_is_the_end_of_the_teacher():
  student, teacher, _ = pair()
  other = student.special_tokens()["<|endoftext|>"]
  both = TextAlignment(student, teacher, [other])
  assert both.read([other]).ids.tolist() == [teacher.eos_id()]
  # Elsewhere a special token is its text.
  said = teacher.decode(both.read([other, *student.encode("a")]).ids)
  assert said == "<|endoftext|>a"
  with pytest.raises(ValueError, match="no end-of-sequence token"):
    TextAlignment(student, TokenizerAdapter(toys_text.metaspace(), eos_token=""))
