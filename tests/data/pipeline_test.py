import itertools
import json
import random

import grain
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests import toys_text
from tunix.data import formats
from tunix.data.batching import packing as packing_lib
from tunix.data.chat import rendered_row
from tunix.data.pipeline import build_dataset
from tunix.data.reading import stream
from tunix.data.reading.stream import Streamed

TOKENIZER = toys_text.chat_tokenizer(None)
FIELDS = {"input_tokens", "input_mask", "positions", "segment_ids"}


def make_records(count, seed=0):
  rng = random.Random(seed)
  return [
    {"prompt": f"{i} of {count}", "response": " sea" * rng.randint(0, 9)}
    for i in range(count)
  ]


RECORDS = make_records(23)
STREAM = Streamed([stream.of_iterable(RECORDS, name="s")], shuffle_buffer=6)


def build(records=RECORDS, **kwargs):
  kwargs = {"batch_size": 4, "max_length": 40, **kwargs}
  return build_dataset(records, TOKENIZER, **kwargs)


def segments(batches):
  """(tokens, mask) of every segment, in order."""
  for batch in batches:
    for row in range(len(batch["input_tokens"])):
      ids = batch["segment_ids"][row]
      for number in range(1, ids.max() + 1):
        own = np.flatnonzero(ids == number)
        assert (np.diff(own) == 1).all()
        np.testing.assert_array_equal(batch["positions"][row][own], range(len(own)))
        yield (
          tuple(batch["input_tokens"][row][own].tolist()),
          tuple(batch["input_mask"][row][own].tolist()),
        )


def prompts(batches):
  """Numbers of the records, in the order of training."""
  for tokens, mask in segments(batches):
    yield int(TOKENIZER.decode(tokens[: mask.index(1)]).split()[0])


def same(left, right):
  assert set(left) == set(right) == FIELDS
  for name in FIELDS:
    np.testing.assert_array_equal(left[name], right[name])


@pytest.mark.parametrize("packing", [False, True])
def test_batches_have_one_shape_and_lose_nothing(packing):
  batches = list(build(packing=packing))
  for batch in batches:
    assert set(batch) == FIELDS
    for value in batch.values():
      assert value.dtype == np.int32 and value.shape == (4, 40)
    padding = batch["segment_ids"] == 0
    assert (batch["input_tokens"][padding] == TOKENIZER.pad_id()).all()
    assert not batch["input_mask"][padding].any()
    assert not batch["positions"][padding].any()
  assert sorted(prompts(batches)) == list(range(23))
  if packing:
    assert len(batches) < 6
    assert batches[0]["segment_ids"].max() > 1
  else:
    assert len(batches) == 6  # the last one has three rows of records
    assert batches[-1]["segment_ids"].any(axis=1).tolist() == [True] * 3 + [False]
    assert batches[0]["segment_ids"].max() == 1


def test_packed_and_padded_hold_the_same_segments():
  packed = sorted(segments(build(packing=True)))
  assert packed == sorted(segments(build(packing=False)))


def test_packed_rows_do_not_depend_on_the_batch_size():
  rows = [
    np.concatenate([b["input_tokens"] for b in build(packing=True, batch_size=size)])
    for size in (1, 2)
  ]
  length = min(map(len, rows))
  np.testing.assert_array_equal(rows[0][:length], rows[1][:length])


def test_shuffling_is_by_seed_and_anew_each_epoch():
  once = list(prompts(build()))
  assert once != sorted(once)
  assert once == list(prompts(build()))
  assert once != list(prompts(build(seed=1)))
  assert list(prompts(build(shuffle=False))) == list(range(23))
  thrice = list(prompts(build(num_epochs=3)))
  epochs = [thrice[i : i + 23] for i in (0, 23, 46)]
  assert epochs[0] == once
  assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2]
  endless = prompts(build(num_epochs=None))
  assert list(itertools.islice(endless, 69)) == thrice


@pytest.mark.parametrize("records", [RECORDS, STREAM])
@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("packing", [False, True])
def test_threads_change_nothing(packing, threads, records):
  for left, right in zip(
    build(records, packing=packing),
    build(records, packing=packing, num_threads=threads),
    strict=True,
  ):
    same(left, right)


@pytest.mark.parametrize(
  "kwargs",
  [
    {},
    {"overlong": "drop", "max_length": 20},
    {"records": STREAM},
    {"records": STREAM, "overlong": "drop", "max_length": 20},
  ],
)
@pytest.mark.parametrize("packing", [False, True])
def test_state_restores_exactly_at_every_batch(packing, kwargs):
  dataset = build(packing=packing, num_epochs=4, batch_size=3, **kwargs)
  iterator = iter(dataset)
  states, batches = [json.dumps(iterator.get_state())], []
  for batch in iterator:
    batches.append(batch)
    states.append(json.dumps(iterator.get_state()))
  assert len(batches) > 8
  for position, state in enumerate(states):
    fresh = iter(build(packing=packing, num_epochs=4, batch_size=3, **kwargs))
    fresh.set_state(json.loads(state))
    for later, batch in enumerate(batches[position:], start=position + 1):
      same(next(fresh), batch)
      assert json.dumps(fresh.get_state()) == states[later]
    with pytest.raises(StopIteration):
      next(fresh)


def test_the_same_iterator_goes_back():
  iterator = iter(build(packing=True, num_epochs=None))
  state = iterator.get_state()
  first = [next(iterator) for _ in range(3)]
  iterator.set_state(state)
  for batch in first:
    same(next(iterator), batch)


@pytest.mark.parametrize("records", [RECORDS, STREAM])
@pytest.mark.parametrize("packing", [False, True])
def test_processes_share_each_batch(packing, records):
  whole = list(build(records, packing=packing))
  parts = [
    list(build(records, packing=packing, process_index=i, process_count=2))
    for i in range(2)
  ]
  assert len(parts[0]) == len(parts[1]) == len(whole)
  for batch, first, second in zip(whole, *parts):
    assert first["input_tokens"].shape == (2, 40)
    same(batch, {name: np.concatenate([first[name], second[name]]) for name in FIELDS})


def test_overlong_records():
  records = [*make_records(3), {"prompt": "3 of 4", "response": " sea" * 40}]
  with pytest.raises(ValueError, match=r"record 3: .* more than the maximum of 40"):
    list(build(records))
  assert sorted(prompts(build(records, overlong="drop"))) == [0, 1, 2]
  cut = dict(segments(build(records, overlong="truncate")))
  longest = max(cut, key=len)
  assert len(longest) == 40
  assert longest[-1] != TOKENIZER.eos_id()
  assert len(cut) == 4


@pytest.mark.parametrize("num_epochs", [1, 2, None])
def test_dropping_everything_is_an_error(num_epochs):
  with pytest.raises(ValueError, match="all 23 records are longer than 4 tokens"):
    next(iter(build(max_length=4, overlong="drop", num_epochs=num_epochs)))


def test_records_on_disk_and_bad_ones(tmp_path):
  path = tmp_path / "data.jsonl"
  path.write_text("\n".join(map(json.dumps, RECORDS)))
  for left, right in zip(build(), build(formats.JsonlRecords(path)), strict=True):
    same(left, right)
  path.write_text('{"text": "a"}\n{"text": 3}\n')
  with pytest.raises(ValueError, match=r'data\.jsonl:2: "text" is an int'):
    list(build(formats.JsonlRecords(path)))


def test_chat_is_chosen_by_the_tokenizer_or_stated():
  tokenizer = toys_text.chat_tokenizer("chatml")

  def first(**kwargs):
    batch = next(
      iter(build_dataset(RECORDS, tokenizer, batch_size=1, max_length=40, **kwargs))
    )
    return tokenizer.decode(batch["input_tokens"][0], skip_special_tokens=False)

  assert first().startswith("<|im_start|>user\n")
  assert "<|im_start|>" not in first(chat=False)
  thinking = toys_text.chat_tokenizer("qwen3")
  batches = build_dataset(
    RECORDS[:1],
    thinking,
    batch_size=1,
    max_length=40,
    template_kwargs={"enable_thinking": False},
  )
  assert TOKENIZER.encode("<think>")[0] in next(iter(batches))["input_tokens"]


BAD = [
  ({"batch_size": 0}, "batch_size is 0: it must be a whole"),
  (
    {"batch_size": 3, "process_count": 2},
    "batch_size 3 must be a positive multiple of",
  ),
  ({"process_index": 1}, "process_index 1 of process_count 1"),
  ({"seed": -1}, "seed is -1"),
  ({"num_epochs": 0}, "num_epochs is 0"),
  ({"num_threads": -1}, "num_threads is -1"),
  ({"max_length": 1}, "max_length is 1"),
  ({"overlong": "cut"}, "overlong 'cut'"),
  ({"records": []}, "records is empty"),
]


@pytest.mark.parametrize("kwargs, message", BAD)
def test_nonsense_is_refused_at_once(kwargs, message):
  with pytest.raises(ValueError, match=message):
    build(**kwargs)


@settings(deadline=None, max_examples=30)
@given(
  lengths=st.lists(st.integers(1, 12), min_size=1, max_size=80),
  skip=st.integers(0, 12),
  shuffle=st.booleans(),
)
def test_packing_keeps_every_token_once_and_resumes_inside_a_row(
  lengths, skip, shuffle
):
  counter = itertools.count(1)
  elements = []
  for length in lengths:
    tokens = list(itertools.islice(counter, length))
    made = rendered_row(tokens, [1] * length)
    elements.append({"input_tokens": made.tokens, "input_mask": made.mask})

  def rows():
    source = grain.MapDataset.source(elements).to_iter_dataset()
    return iter(
      packing_lib.pack(source, max_length=12, pad_id=-1, seed=7, shuffle=shuffle)
    )

  iterator = rows()
  head = list(itertools.islice(iterator, skip))
  state = json.loads(json.dumps(iterator.get_state()))
  tail = list(iterator)
  resumed = rows()
  resumed.set_state(state)
  for left, right in zip(resumed, tail, strict=True):
    same(left, right)
  everything = np.concatenate([row["input_tokens"] for row in [*head, *tail]])
  kept = everything[everything >= 0]
  assert sorted(kept.tolist()) == list(range(1, sum(lengths) + 1))
  for row in [*head, *tail]:
    for number in range(1, row["segment_ids"].max() + 1):
      own = row["segment_ids"] == number
      assert (np.diff(row["input_tokens"][own]) == 1).all()
      assert row["input_mask"][own].tolist() == [0] + [1] * (own.sum() - 1)
      assert row["positions"][own].tolist() == list(range(own.sum()))
