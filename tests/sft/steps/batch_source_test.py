import json
import logging

import pytest

from tunix.sft.steps.batch_source import BatchSource


class Counting:
  """An iterator with a state, as Grain's have; `kind` is the state's type."""

  def __init__(self, end, kind=dict):
    self.end, self.kind, self.at, self.drawn = end, kind, 0, 0

  def __iter__(self):
    return self

  def __next__(self):
    if self.at == self.end:
      raise StopIteration
    self.at, self.drawn = self.at + 1, self.drawn + 1
    return self.at

  def get_state(self):
    state = {"at": self.at}
    return state if self.kind is dict else json.dumps(state).encode()

  def set_state(self, state):
    self.at = (state if self.kind is dict else json.loads(state))["at"]


def drain(source):
  return list(iter(source.next, None))


def test_a_list_is_resumed_by_skipping_and_says_so(caplog):
  source = BatchSource([1, 2, 3, 4])
  assert [source.next(), source.next()] == [1, 2]
  state = json.loads(json.dumps(source.state()))
  with caplog.at_level(logging.WARNING):
    again = BatchSource([1, 2, 3, 4], saved=state)
  assert "drawing and dropping the 2 micro-batches" in caplog.text
  assert drain(again) == [3, 4] and again.drawn == 4


@pytest.mark.parametrize("kind", [dict, bytes])
def test_an_iterator_with_a_state_is_set_and_not_drawn(kind, caplog):
  source = BatchSource(Counting(5, kind))
  assert [source.next(), source.next()] == [1, 2]
  state = json.loads(json.dumps(source.state()))
  data = Counting(5, kind)
  again = BatchSource(data, saved=state)
  assert data.drawn == 0 and not caplog.text
  assert drain(again) == [3, 4, 5] and again.drawn == 5


def test_data_that_ended_sooner_than_before_is_an_error():
  with pytest.raises(ValueError, match=r"ended after 2 .* had consumed 3"):
    BatchSource([1, 2], saved={"drawn": 3})


def test_a_function_goes_before_the_data_and_is_resumed_by_skipping():
  source = BatchSource(["not", "used"], iter([1, 2, None]).__next__)
  assert drain(source) == [1, 2] and source.state() == {"drawn": 2}
  again = BatchSource(None, iter([1, 2, 3, None]).__next__, saved={"drawn": 2})
  assert drain(again) == [3]


def test_no_data_at_all():
  with pytest.raises(ValueError, match="no training data: pass an iterable"):
    BatchSource(None)


class Reading(Counting):
  """Counts how often its state is read."""

  reads = 0

  def get_state(self):
    self.reads += 1
    return super().get_state()


def test_drawing_reads_no_state():
  data = Reading(100)
  source = BatchSource(data)
  before = data.reads
  for _ in range(10):
    source.take(5)
  assert data.reads == before


def test_a_place_behind_what_was_drawn_is_a_state_and_a_skip():
  source = BatchSource(Counting(9))
  source.take(4)
  source.remember()
  source.take(2)
  source.take(2)
  assert source.state(4) == {"drawn": 4, "iterator": {"at": 4}}
  saved = json.loads(json.dumps(source.state(6)))
  assert saved == {"drawn": 6, "iterator": {"at": 4}, "skip": 2}
  data = Counting(9)
  again = BatchSource(data, saved=saved)
  assert again.drawn == 6 and data.drawn == 2
  assert drain(again) == [7, 8, 9]


def test_none_among_the_batches_is_no_end():
  source = BatchSource([1, None, 2])
  with pytest.raises(ValueError, match="yielded None after 1 micro-batch;"):
    source.take(3)


def test_a_generator_cannot_go_back_to_an_older_checkpoint():
  source = BatchSource(iter([1, 2, 3]))
  source.take(1)
  source.take(2)
  with pytest.raises(ValueError, match=r"consumed 0 micro-batches, .* given 3"):
    source.go_back(0)
  source.go_back(1)
  assert drain(source) == [2, 3]
