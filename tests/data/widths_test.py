import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests import toys_text
from tests.data.pipeline_test import segments
from tunix.data import pipeline, widths
from tunix.data.records import LABELLED, PAIRS, SFT
from tunix.data.rows import OneRow, SideBySide
from tunix.data.scan import UNIT, scan
from tunix.data.source import Source

TOKENIZER = toys_text.chat_tokenizer(None)
SEA = len(TOKENIZER.encode(" sea"))


def example(words):
  return {"prompt": "a", "response": " sea" * words}


def source(lengths, max_length, **options):
  """Records of the kind SFT with these numbers of words."""
  return Source(
    records=[example(words) for words in lengths],
    kind=SFT,
    tokenizer=TOKENIZER,
    layout=OneRow(max_length=max_length),
    **options,
  )


def pair(prompt, chosen, rejected):
  words = [" sea" * n for n in (prompt, chosen, rejected)]
  return dict(zip(("prompt", "chosen", "rejected"), words))


def sides(records, prompt, completion, kind=PAIRS, **options):
  layout = SideBySide(max_prompt_length=prompt, max_completion_length=completion)
  return Source(
    records=records, kind=kind, tokenizer=TOKENIZER, layout=layout, **options
  )


def bounded(made, shards=1, limit=None):
  return widths.bounded(made.layout, scan(made, limit), shards)


@pytest.mark.parametrize(
  ("words", "max_length", "shards", "width"),
  [
    ([1, 9], 1024, 1, 64),
    ([1, 90], 1024, 1, -(-(90 * SEA + 3) // UNIT) * UNIT),
    ([1, 9], 50, 1, 50),  # never above the limit
    ([1, 9], 1024, 6, 192),
    ([1, 9], 66, 3, 66),
    ([1], 64, 1, 64),
  ],
)
def test_a_row_is_as_wide_as_the_longest_record(words, max_length, shards, width):
  assert bounded(source(words, max_length), shards) == OneRow(max_length=width)


def test_the_limit_stays_where_records_were_not_scanned():
  made = source([1] * 10, 1024)
  assert bounded(made, limit=5) == OneRow(max_length=1024)
  assert bounded(made, limit=10) == OneRow(max_length=64)


@pytest.mark.parametrize(("overlong", "width"), [("drop", 64), ("truncate", 100)])
def test_records_that_are_too_long_count_as_they_are_trained(overlong, width):
  made = source([1, 500], 100, overlong=overlong)
  assert bounded(made) == OneRow(max_length=width)


def test_both_sides_follow_their_longest_parts():
  records = [pair(1, 2, 70), pair(3, 80, 1)]
  longest = scan(sides(records, 512, 512)).longest
  found = bounded(sides(records, 512, 512))
  assert found.max_prompt_length == 64
  assert found.max_completion_length == -(-longest["completion"] // UNIT) * UNIT > 64
  assert bounded(sides(records, 40, 512)).max_prompt_length == 40
  # A whole row divides over cp: 41 + 192 does not over 3 shards, 40 + 320 does over 5.
  assert bounded(sides(records, 41, 512), 3) == sides(records, 41, 512).layout
  assert bounded(sides(records, 40, 640), 5).max_completion_length == 320


@settings(deadline=None, max_examples=40)
@given(
  words=st.lists(st.integers(1, 60), min_size=1, max_size=9),
  limit=st.integers(4, 200),
  overlong=st.sampled_from(["truncate", "drop"]),
)
def test_records_are_those_of_full_rows(words, limit, overlong):
  made = source([1, *words], limit, overlong=overlong)
  narrow = dataclasses.replace(made, layout=bounded(made))
  options = {"batch_size": 2, "num_threads": 0}
  full, cut = (list(pipeline.build_batches(s, **options)) for s in (made, narrow))
  assert list(segments(full)) == list(segments(cut))
  width = narrow.layout.max_length
  for before, after in zip(full, cut, strict=True):
    for name, rows in after.items():
      np.testing.assert_array_equal(rows, before[name][:, :width])


@settings(deadline=None, max_examples=20)
@given(
  words=st.lists(st.tuples(*[st.integers(1, 40)] * 3), min_size=1, max_size=5),
  limits=st.tuples(st.integers(2, 120), st.integers(2, 120)),
)
def test_pairs_are_those_of_full_sides(words, limits):
  records = [pair(p, c, r) for p, c, r in words if c != r] or [pair(1, 2, 3)]
  made = sides(records, *limits, overlong="truncate", unusable="drop")
  made = dataclasses.replace(made, records=[*records, pair(1, 1, 2)])
  narrow = dataclasses.replace(made, layout=bounded(made))
  options = {"batch_size": 2, "num_threads": 0}
  full, cut = (list(pipeline.build_batches(s, **options)) for s in (made, narrow))
  for before, after in zip(full, cut, strict=True):
    for name, rows in after.items():
      shape = np.shape(rows)
      same = before[name]
      if name.startswith("prompt"):
        same = same[:, -shape[1] :]
      elif rows.ndim == 2:
        same = same[:, : shape[1]]
      np.testing.assert_array_equal(rows, same)


def test_labelled_completions_follow_as_well():
  records = [{"prompt": " sea", "completion": " sea" * 3, "label": True}]
  found = bounded(sides(records, 512, 512, LABELLED))
  assert found == SideBySide(max_prompt_length=64, max_completion_length=64)


def test_the_line_says_widths_padding_and_the_remedy():
  made = source([60 // SEA, 9], 1024)
  report = scan(made)
  text = widths.describe(bounded(made), report)
  share = 1 - report.tokens / (2 * 64)
  assert text.startswith(f"64 tokens, {share:.0%} of them padding; data.packing=true")
  made = source([60 // SEA] * 2, 1024)
  text = widths.describe(bounded(made), scan(made))
  assert "padding" in text and "packing" not in text
