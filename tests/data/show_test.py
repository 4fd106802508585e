import types

import numpy as np
import pytest

from tests import toys_text
from tunix.data import show

TOKENIZER = toys_text.chat_tokenizer(None)


def batch(**fields):
  return {name: np.asarray(value) for name, value in fields.items()}


PACKED = batch(
  input_tokens=[[5, 6, 7, 8, 9, 0], [0] * 6],
  input_mask=[[0, 1, 0, 1, 1, 0], [0] * 6],
  segment_ids=[[1, 1, 1, 2, 2, 0], [0] * 6],
)


def test_targets_are_masked_tokens_behind_one_of_their_segment():
  targets = show.trained_targets(PACKED)
  # Token 3 is masked in, but it begins the second segment.
  np.testing.assert_array_equal(targets[0], [0, 1, 0, 0, 1, 0])
  assert show.check_supervision(PACKED) == 2
  plain = types.SimpleNamespace(
    input_tokens=np.ones((1, 3), int), input_mask=np.ones((1, 3), int), segment_ids=None
  )
  assert show.check_supervision(plain) == 2


REASONS = [
  ([0, 0, 0], [0, 0, 0], "every row is padding"),
  ([0, 0, 0], [1, 1, 1], "input_mask is 0 everywhere; the records have no assistant"),
  ([0, 0, 1], [1, 1, 0], "on padding alone"),
  ([1, 0, 1], [1, 1, 2], "only on the first token of a segment"),
]


@pytest.mark.parametrize("mask, segments, reason", REASONS)
def test_a_batch_that_trains_nothing_says_why(mask, segments, reason):
  fields = batch(input_tokens=[[1, 2, 3]], input_mask=[mask], segment_ids=[segments])
  with pytest.raises(ValueError, match="1 row x 3 tokens trains nothing: .*" + reason):
    show.check_supervision(fields)


def test_a_missing_field_is_named():
  with pytest.raises(ValueError, match=r"no input_mask \(found keys input_tokens\)"):
    show.check_supervision({"input_tokens": np.ones((1, 2))})


def test_a_batch_as_text():
  hello, there = TOKENIZER.encode("hello"), TOKENIZER.encode("\nthere")
  n, m = len(hello), len(there)
  pad = 3
  tokens = [1, *hello, *there, 2, 1, *hello, *[0] * pad]
  mask = [0] * (n + 1) + [1] * (m + 1) + [0] + [1] * n + [0] * pad
  segments = [1] * (n + m + 2) + [2] * (n + 1) + [0] * pad
  fields = batch(
    input_tokens=[tokens, [0] * len(tokens)],
    input_mask=[mask, [0] * len(tokens)],
    segment_ids=[segments, [0] * len(tokens)],
  )
  text = show.describe_batch(fields, TOKENIZER)
  used, total = 2 * n + m + 3, len(tokens)
  trained = n + m + 1
  assert text.splitlines() == [
    f"2 rows x {total} tokens: {trained} trained, {used - trained} context, "
    f"{2 * total - used} padding",
    f"row 0: 2 segments, {used} tokens, {trained} trained, {pad} padding",
    "  [1] <s>hello«",
    "      there</s>»",
    "  [2] <s>«hello»",
    "row 1: padding",
  ]
  short = show.describe_batch(fields, TOKENIZER, rows=1, colour=True)
  assert "<s>\033[32m«hello»\033[0m" in short
  assert short.splitlines()[-1] == "... 1 more rows"
