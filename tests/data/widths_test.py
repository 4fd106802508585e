import dataclasses
import functools
import itertools
import json
import math
import random

import grain
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests import toys_text
from tests.data.pipeline_test import FIELDS, same, segments
from tunix.data import batches, pipeline, widths
from tunix.data.batching import buckets
from tunix.data.chat import Rendered
from tunix.data.records import LABELLED, PAIRS, SFT
from tunix.data.rows import OneRow, SideBySide
from tunix.data.scan import FINE_UNIT, STEP, UNIT, scan
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
  return widths.choose(made.layout, scan(made, limit), 1, shards).layout


@pytest.mark.parametrize(
  ("words", "max_length", "shards", "width"),
  [
    ([1, 9], 1024, 1, 64),
    ([1, 90], 1024, 1, -(-(90 * SEA + 3) // FINE_UNIT) * FINE_UNIT),
    ([1, 600], 2048, 1, -(-(600 * SEA + 3) // UNIT) * UNIT),
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
  unit = FINE_UNIT
  assert found.max_completion_length == -(-longest["completion"] // unit) * unit > 64
  assert bounded(sides(records, 40, 512)).max_prompt_length == 40
  # A whole row divides over cp: 41 + 96 does not over 3 shards, 40 + 160 does over 5.
  assert bounded(sides(records, 41, 512), 3) == sides(records, 41, 512).layout
  assert bounded(sides(records, 40, 640), 5).max_completion_length == 160


@settings(deadline=None, max_examples=15)
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


@settings(deadline=None, max_examples=10)
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


def chosen(words, batch_size, max_length=4096, **options):
  made = source(words, max_length)
  return widths.choose(made.layout, scan(made), batch_size, **options)


def test_the_line_says_widths_padding_and_the_remedy():
  made = source([60 // SEA, 9], 1024)
  share = 1 - scan(made).tokens / (2 * 64)
  text = str(chosen([60 // SEA, 9], 2, 1024))
  assert text.startswith(f"64 tokens, about {share:.0%} of them padding; data.packing=")
  text = str(chosen([60 // SEA] * 2, 2))
  assert "padding" in text and "packing" not in text
  assert str(chosen([9] * 50 + [300], 1)).startswith("64 or ")


def expected(lengths, below, batch_size):
  """Mean length of a row, from binomial coefficients."""
  held = [math.comb(n, batch_size) / math.comb(below[-1], batch_size) for n in below]
  steps = np.diff([0, *held])
  return float(np.dot(lengths, steps))


@settings(deadline=None, max_examples=60)
@given(
  counts=st.lists(st.integers(0, 20), min_size=1, max_size=7),
  batch_size=st.integers(1, 9),
)
def test_no_other_widths_pad_less(counts, batch_size):
  """Against every set of at most four lengths."""
  counts = [*counts, batch_size]
  candidates = [UNIT * (i + 1) for i in range(len(counts))]
  below = dict(zip(candidates, itertools.accumulate(counts)))
  found, mean = widths._fewest(
    np.array(candidates), widths._shares(np.array([*below.values()]), batch_size)
  )
  best = {}
  for size in range(1, widths.MOST + 1):
    sets = itertools.combinations(candidates[:-1], size - 1)
    best[size] = min(
      (
        expected(
          [*s, candidates[-1]], [below[w] for w in (*s, candidates[-1])], batch_size
        )
        for s in sets
      ),
      default=math.inf,
    )
  assert found[-1] == candidates[-1] and sorted(set(found)) == list(found)
  assert mean == pytest.approx(expected(found, [below[w] for w in found], batch_size))
  assert mean == pytest.approx(best[len(found)])
  # One more saves too little; each of these saves enough.
  enough = 1 - widths._SAVES
  assert best.get(len(found) + 1, mean) >= enough * mean * (1 - 1e-9)
  for size in range(2, len(found) + 1):
    assert best[size] <= enough * best[size - 1] * (1 + 1e-9)


def test_the_share_of_padding_is_that_of_the_batches():
  rng = random.Random(0)
  words = [min(150, int(rng.expovariate(0.1))) + 1 for _ in range(400)]
  words[7] = 150
  made = source(words, 4096)
  found = widths.choose(made.layout, scan(made), 4)
  assert 2 <= len(found.lengths) <= widths.MOST
  batches = list(built(made, found, batch_size=2, batches_per_step=2))
  padding = [batch["segment_ids"] == 0 for batch in batches]
  share = sum(x.sum() for x in padding) / sum(x.size for x in padding)
  assert found.padding == pytest.approx(share, abs=0.02)
  assert found.padding < 1 - scan(made).tokens / len(words) / found.lengths[-1] - 0.1


def test_many_lengths_are_thinned_out_and_divide_over_the_shards():
  found = chosen([1] * 60 + [40] * 9 + [9000 // SEA], 1, 2**16, shards=3)
  assert all(length % 192 == 0 for length in found.lengths)
  counts = [5] * (2**17 // STEP)
  report = dataclasses.replace(scan(source([1], 2**17)), lengths={"record": counts})
  found = widths.choose(OneRow(max_length=2**17), report, 512)
  assert found.lengths[-1] == 2**17


def built(made, found, **options):
  made = dataclasses.replace(made, layout=found.layout)
  chosen = {"widths": found.lengths, "shared_rows": found.rows}
  return pipeline.build_batches(made, **chosen, **options)


# Shared rows.


def shared(words, batch_size, batches=1, max_length=4096, **options):
  made = source(words, max_length)
  return made, widths.share(made.layout, scan(made), batch_size, batches, **options)


@settings(deadline=None, max_examples=25)
@given(
  words=st.lists(st.integers(1, 120), min_size=1, max_size=20),
  batch_size=st.sampled_from([2, 3, 4, 8]),
  batches=st.sampled_from([1, 2]),
)
def test_a_batch_with_shared_rows_has_the_same_records(words, batch_size, batches):
  made, found = shared(words, batch_size, batches)
  options = {"batch_size": batch_size, "num_threads": 0}
  plain = list(pipeline.build_batches(made, **options))
  cut = list(built(made, found, batches_per_step=batches, **options))
  assert len(plain) == len(cut)
  for before, after in zip(plain, cut):
    assert sorted(segments([before])) == sorted(segments([after]))
    assert after["input_tokens"].shape[0] == found.rows or found.rows is None
    assert after["input_tokens"].shape[1] in found.lengths
  for step in range(0, len(cut), batches):
    assert (
      len({batch["input_tokens"].shape for batch in cut[step : step + batches]}) == 1
    )


def test_any_records_fit_into_shared_rows():
  """The longest records of all meet in one batch, which no draw has seen."""
  made, found = shared([1] * 400 + [120] * 8, 8)
  assert found.rows == 1 and found.lengths[0] < found.lengths[-1]
  made = dataclasses.replace(made, records=[example(120)] * 8)
  (batch,) = built(made, found, batch_size=8, num_threads=0)
  assert batch["input_tokens"].shape == (1, found.lengths[-1])
  assert batch["segment_ids"].max() == 8


def test_rows_are_shared_where_it_saves_tokens():
  many, full = [3] * 60 + [100] * 4, [61 // SEA] * 64
  _, found = shared(many, 8)
  alone = chosen(many, 8)
  assert found.rows < 8 and found.padding < alone.padding - 0.3
  assert str(found).startswith(f"{found.rows} in a batch, shared by short records, of ")
  assert shared(full, 8)[1] == chosen(full, 8)  # nothing to save
  assert shared(many, 1)[1].rows is None


@pytest.mark.parametrize("unit", [1, 2, 4])
def test_shared_rows_divide_over_the_shards_of_a_batch(unit):
  _, found = shared([3] * 60 + [100] * 4, 16, row_unit=unit)
  assert found.rows % unit == 0
  assert shared([3] * 60, unit, row_unit=unit)[1].rows is None


def test_the_share_of_padding_of_shared_rows_is_that_of_the_batches():
  rng = random.Random(0)
  words = [min(90, int(rng.expovariate(0.1))) + 1 for _ in range(400)]
  made, found = shared(words, 8, 2)
  batches = list(built(made, found, batch_size=8, batches_per_step=2))
  padding = [batch["segment_ids"] == 0 for batch in batches]
  share = sum(x.sum() for x in padding) / sum(x.size for x in padding)
  assert found.padding == pytest.approx(share, abs=0.08)


def test_shared_rows_need_widths():
  with pytest.raises(ValueError, match="shared_rows is 2 and widths is empty"):
    pipeline.build_batches(source([1], 64), batch_size=4, shared_rows=2)


def test_every_process_has_its_rows_of_a_shared_batch():
  made, found = shared([3] * 60 + [100] * 4, 16, row_unit=2)
  options = {"batch_size": 16, "num_threads": 0}
  parts = [
    list(built(made, found, process_index=i, process_count=2, **options))
    for i in range(2)
  ]
  for batch, *own in zip(built(made, found, **options), *parts, strict=True):
    same({name: np.concatenate([x[name] for x in own]) for name in own[0]}, batch)


WORDS = [1, 2, 40, 3, 1, 1, 2, 90, 1, 1, 1]


def stepped(rows=None, **options):
  made = source(WORDS, 4096)
  options = {"batch_size": 2, "batches_per_step": 2, "num_threads": 0} | options
  layout, lengths = OneRow(max_length=256), (64, 128, 256)
  found = widths.Widths(layout=layout, lengths=lengths, rows=rows)
  return built(made, found, **options)


def test_the_batches_of_a_step_have_the_width_of_their_longest_record():
  plain = pipeline.build_batches(source(WORDS, 256), batch_size=2, num_threads=0)
  cut = list(stepped())
  assert list(segments(cut)) == list(segments(plain))  # the same records in order
  for step in range(0, len(cut), 2):
    pair = cut[step : step + 2]
    longest = max(int(batch["segment_ids"].sum(axis=1).max()) for batch in pair)
    width = next(w for w in (64, 128, 256) if longest <= w)
    assert {batch["input_tokens"].shape for batch in pair} == {(2, width)}
  assert len({batch["input_tokens"].shape for batch in cut}) > 1
  whole = stepped(batch_size=4, batches_per_step=1)
  shapes = [batch["input_tokens"].shape[1] for batch in whole]
  assert [batch["input_tokens"].shape[1] for batch in cut[::2]] == shapes


@pytest.mark.parametrize("rows", [None, 1])
def test_state_restores_exactly_at_every_batch(rows):
  options = {"num_epochs": 2, "seed": 1, "rows": rows}
  iterator = iter(stepped(**options))
  states, batches = [json.dumps(iterator.get_state())], []
  for batch in iterator:
    batches.append(batch)
    states.append(json.dumps(iterator.get_state()))
  for position, state in enumerate(states):
    fresh = iter(stepped(**options))
    fresh.set_state(json.loads(state))
    for batch in batches[position:]:
      same(next(fresh), batch)
    with pytest.raises(StopIteration):
      next(fresh)


def test_processes_share_each_batch():
  halves = [list(stepped(process_index=i, process_count=2)) for i in range(2)]
  for whole, *parts in zip(stepped(), *halves, strict=True):
    same(whole, {name: np.concatenate([p[name] for p in parts]) for name in FIELDS})


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"widths": [128, 64]}, r"widths \[128, 64\]: expected ascending"),
    ({"widths": [64, 300]}, "from 2 to max_length 256"),
    ({"packing": True}, "packing and widths are both set"),
    ({"length_buckets": [64]}, "length_buckets and widths are both set"),
    ({"batches_per_step": 0}, "batches_per_step is 0"),
  ],
)
def test_nonsense_is_refused(arguments, message):
  options = {"batch_size": 2, "widths": [64], **arguments}
  with pytest.raises(ValueError, match=message):
    pipeline.build_batches(source(WORDS, 256), **options)


# Pairs whose sequences share rows.


def shared_pairs(words, batch_size, batches=1, **options):
  made = sides([pair(*w) for w in words], 512, 512)
  found = widths.share(made.layout, scan(made), batch_size, batches, **options)
  return dataclasses.replace(made, layout=found.layout), found


FEW = [(2, 3, 5)] * 20 + [(30, 4, 20)] * 3


@pytest.mark.parametrize("micro", [1, 2])
def test_a_batch_of_pairs_with_shared_rows_has_the_same_tokens(micro):
  made, found = shared_pairs(FEW, 4, micro)
  options = {"batch_size": 4, "num_threads": 0}
  plain = list(pipeline.build_batches(made, **options))
  cut = list(built(made, found, batches_per_step=micro, **options))
  for before, after in zip(plain, cut, strict=True):
    assert after["input_tokens"].shape[0] == found.rows < 8
    assert after["input_tokens"].shape[1] in found.lengths
    np.testing.assert_array_equal(after["weights"], before["weights"])
    for owner, (number, side) in enumerate(itertools.product(range(4), range(2))):
      if not before["weights"][number]:
        assert not after["tokens"][number].any()
        continue
      parts = [
        (before[f"{name}_ids"][number], before[f"{name}_mask"][number])
        for name in ("prompt", ("chosen", "rejected")[side])
      ]
      ids = np.concatenate([ids[mask != 0] for ids, mask in parts])
      own = (after["sequence"] == owner) & (after["segment_ids"] != 0)
      np.testing.assert_array_equal(after["input_tokens"][own], ids)
      np.testing.assert_array_equal(after["positions"][own], np.arange(len(ids)))
      scored = int(after["input_mask"][own].sum())
      assert scored == after["tokens"][number, side] == parts[1][1].sum()


def test_pairs_share_rows_where_it_saves_tokens():
  _, found = shared_pairs(FEW, 8)
  assert found.rows < 16
  assert str(found).startswith(f"{found.rows} in a batch, shared by short pairs, of ")
  full = [(64 // SEA - 1, 64 // SEA - 1, 64 // SEA - 2)] * 20
  assert shared_pairs(full, 8)[1].rows is None  # nothing to save
  long = [(60, 2, 3)] * 3 + [(40, 2, 3)] * 20
  assert shared_pairs(long, 8)[1].rows == 5
  assert shared_pairs(long, 8, prompt_once=True)[1].rows is None  # that saves more
  made = sides([{**pair(1, 2, 3)}] * 8, 512, 512)
  assert widths.share(made.layout, scan(made, 4), 8).rows is None
  labels = [{"prompt": " sea", "completion": " sea", "label": True}] * 8
  made = sides(labels, 512, 512, LABELLED)
  assert widths.share(made.layout, scan(made), 8).rows is None


def test_every_process_has_its_pairs_and_its_rows():
  made, found = shared_pairs(FEW, 8, row_unit=2)
  options = {"batch_size": 8, "num_threads": 0}
  parts = [
    list(built(made, found, process_index=i, process_count=2, **options))
    for i in range(2)
  ]
  for batch, *own in zip(built(made, found, **options), *parts, strict=True):
    for name, whole in batch.items():
      np.testing.assert_array_equal(np.concatenate([x[name] for x in own]), whole)


def test_an_empty_prompt_scores_nothing():
  """Nothing predicts the first token of its completions: trainers refuse the pair."""
  nothing, one = np.zeros(0, np.int32), np.ones(2, np.int32)
  record = Rendered(nothing, (one, one), (one, one))
  batch = next(
    iter(
      buckets.batch_pairs(
        grain.MapDataset.source([record]).to_iter_dataset(),
        *([], 1, 1),
        layout=SideBySide(max_prompt_length=2, max_completion_length=2),
        **{"pad_id": 0, "first": 0, "count": 1, "shared_rows": 1, "own": slice(0, 1)},
      )
    )
  )
  read = functools.partial(batches.read_pairs, batch, may_share=True)
  with pytest.raises(batches.BadRow, match="row 0 of the batch: the prompt or a compl"):
    read(batches.TextOptions())
  assert not read(batches.TextOptions(bad_rows="skip"))["weights"].any()
  with pytest.raises(ValueError, match=r"has the fields \['input_mask'"):
    batches.read_pairs(
      {**batch, "margins": [0.0]}, batches.TextOptions(), may_share=True
    )


def test_pairs_have_no_such_widths():
  with pytest.raises(ValueError, match="widths are set; expected only for fine-tuning"):
    made = sides([pair(1, 2, 3)], 64, 64)
    pipeline.build_batches(made, batch_size=1, widths=[64])
