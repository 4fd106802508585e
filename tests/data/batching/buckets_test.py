import json
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.data.pipeline_test import (
  FIELDS,
  build,
  make_records,
  prompts,
  same,
  segments,
)
from tunix.data.batching import buckets

LENGTHS = [10, 13]
RECORDS = make_records(101)


def make(**kwargs):
  return build(RECORDS, **{"length_buckets": LENGTHS, **kwargs})


@settings(deadline=None, max_examples=200)
@given(
  lengths=st.lists(st.integers(1, 40), max_size=60),
  size=st.integers(1, 5),
)
def test_a_window_is_cut_into_whole_batches(lengths, size):
  batches = buckets.cut(lengths, [10, 20, 40], size)
  assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
  assert all(len(batch) == size for batch in batches[:-1])
  assert all(batch == sorted(batch) for batch in batches)
  # What goes up is less than a batch a bucket: rows above their own length are few.
  above = 0
  for batch in batches:
    longest = max(lengths[i] for i in batch)
    own = min(at for at in (10, 20, 40) if longest <= at)
    above += sum(
      min(at for at in (10, 20, 40) if lengths[i] <= at) < own for i in batch
    )
  assert above <= 2 * 2 * (size - 1)


def test_rows_are_as_long_as_their_bucket_and_nothing_is_lost():
  plain, cut = list(build(RECORDS)), list(make())
  assert sorted(segments(cut)) == sorted(segments(plain))
  assert len(cut) == len(plain) == 26
  shapes = {batch["input_tokens"].shape for batch in cut}
  assert shapes == {(4, 10), (4, 13), (4, 40)}
  assert [b["segment_ids"].any(axis=1).sum() for b in cut] == [4] * 25 + [1]
  size = {"plain": plain, "cut": cut}
  padding = {
    name: sum(int((batch["segment_ids"] == 0).sum()) for batch in batches)
    for name, batches in size.items()
  }
  assert padding["cut"] < 0.6 * padding["plain"]
  # Short and long batches alternate, as the records do.
  order = [batch["input_tokens"].shape[1] for batch in cut]
  assert order != sorted(order)


def test_the_order_is_by_seed():
  assert list(prompts(make())) == list(prompts(make()))
  assert list(prompts(make())) != list(prompts(make(seed=1)))
  for left, right in zip(make(), make(num_threads=0), strict=True):
    same(left, right)


def test_state_restores_exactly_at_every_batch(monkeypatch):
  monkeypatch.setattr(buckets, "WINDOW", 4)
  dataset = {"num_epochs": 2, "batch_size": 3}
  iterator = iter(make(**dataset))
  states, batches = [json.dumps(iterator.get_state())], []
  for batch in iterator:
    batches.append(batch)
    states.append(json.dumps(iterator.get_state()))
  assert len(batches) == 68
  for position in random.Random(0).sample(range(len(states)), 12) + [68]:
    fresh = iter(make(**dataset))
    fresh.set_state(json.loads(states[position]))
    for batch in batches[position:]:
      same(next(fresh), batch)
    with pytest.raises(StopIteration):
      next(fresh)


def test_processes_share_each_batch():
  halves = [list(make(process_index=i, process_count=2)) for i in range(2)]
  for whole, *parts in zip(make(), *halves, strict=True):
    same(whole, {name: np.concatenate([p[name] for p in parts]) for name in FIELDS})


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"length_buckets": [24, 16]}, r"length_buckets \[24, 16\]: expected ascending"),
    ({"length_buckets": [16, 16]}, "expected ascending lengths from 2 to max_length"),
    ({"length_buckets": [1, 16]}, "from 2 to max_length 40"),
    ({"length_buckets": [16, 41]}, "from 2 to max_length 40"),
    ({"packing": True}, "length_buckets and packing are both set"),
  ],
)
def test_nonsense_is_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    make(**arguments)
