import itertools
import json
import tracemalloc
from typing import ClassVar

import pytest

from tunix.data.batching import streams
from tunix.data.reading import stream
from tunix.data.reading.stream import Streamed


class Stateful:
  """An iterable with the state of `datasets.IterableDataset`."""

  reads: ClassVar[list[int]] = []  # of all copies

  def __init__(self, records):
    # Not attributes of their own: iterators of a shallow copy share them too.
    self.records, self.state = records, {"first": 0, "place": 0}

  def __iter__(self):
    for number in range(self.state["first"], len(self.records)):
      self.state["place"] = number + 1
      self.reads.append(number)
      yield self.records[number]

  def state_dict(self):
    return {"place": self.state["place"]}

  def load_state_dict(self, state):
    self.state["first"] = state["place"]


def record(number):
  return {"prompt": f"{number}", "response": "sea"}


def lines(tmp_path, count, name="a.jsonl"):
  path = tmp_path / name
  # Blank lines and letters of several bytes move the place in the file.
  path.write_text("".join(f"{json.dumps(record(i))}\n\n" for i in range(count)))
  return stream.of_file(path)


def numbers(items):
  return [int(item.record["prompt"]) for item in items]


@pytest.fixture(params=["lines", "state", "count", "function", "two parts"])
def parts(request, tmp_path):
  records = [record(i) for i in range(11)]
  return {
    "lines": lambda: [lines(tmp_path, 11)],
    "state": lambda: [stream.of_iterable(Stateful(records), name="s")],
    "count": lambda: [stream.of_iterable(records, name="s")],
    "function": lambda: [stream.of_iterable(lambda: iter(records), name="s")],
    "two parts": lambda: [
      lines(tmp_path, 4),
      stream.of_iterable(lambda: map(record, range(4, 11)), name="s"),
    ],
  }[request.param]()


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_place_restores_exactly(parts, shuffle):
  options = {"shuffle": shuffle, "seed": 3, "num_epochs": 2}
  items = streams.draws(Streamed(parts, shuffle_buffer=4), **options)
  expected = numbers(items)
  assert sorted(expected) == sorted([*range(11)] * 2)
  assert (expected == [*range(11)] * 2) is not shuffle
  iterator = iter(items)
  for count in range(len(expected) + 1):
    state = json.loads(json.dumps(iterator.get_state()))
    other = iter(items)
    other.set_state(state)
    assert numbers(other) == expected[count:]
    next(iterator, None)


def test_a_shuffle_depends_on_its_seed():
  def order(seed):
    records = Streamed([stream.of_iterable([*map(record, range(20))], name="s")])
    return numbers(streams.draws(records, shuffle=True, seed=seed, num_epochs=1))

  assert order(0) == order(0) != order(1)


def test_an_endless_stream_is_read_as_far_as_needed():
  part = stream.of_iterable(lambda: map(record, itertools.count()), name="s")
  items = streams.draws(Streamed([part]), shuffle=True, seed=0, num_epochs=None)
  assert len(set(numbers(itertools.islice(items, 3000)))) == 3000


def test_a_source_with_a_state_skips_without_reading():
  source = Stateful([record(i) for i in range(30)])
  items = streams.draws(
    Streamed([stream.of_iterable(source, name="s")]),
    shuffle=False,
    seed=0,
    num_epochs=1,
  )
  iterator = iter(items)
  for _ in range(20):
    next(iterator)
  other, state = iter(items), iterator.get_state()
  source.reads.clear()
  other.set_state(state)
  assert numbers(itertools.islice(other, 1)) == [20]
  assert source.reads == [19, 20]


def test_a_file_is_never_in_memory_as_a_whole(tmp_path):
  path = tmp_path / "large.jsonl"
  line = json.dumps(record(0) | {"filler": "x" * 100_000}) + "\n"
  path.write_text(line * 200)  # 20 MB
  items = iter(
    streams.draws(
      Streamed([stream.of_file(path)], shuffle_buffer=4),
      shuffle=True,
      seed=0,
      num_epochs=1,
    )
  )
  tracemalloc.start()
  assert sum(1 for _ in items) == 200
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 4e6


def test_a_stream_that_changed_is_noticed():
  records = [record(i) for i in range(5)]
  part = stream.of_iterable(records, name="s")
  items = streams.draws(Streamed([part]), shuffle=False, seed=0, num_epochs=1)
  iterator = iter(items)
  next(iterator), next(iterator)
  state = iterator.get_state()
  for changed in ([records[1], records[0]], records[:1]):
    part = stream.of_iterable(changed, name="s")
    other = iter(streams.draws(Streamed([part]), shuffle=False, seed=0, num_epochs=1))
    with pytest.raises(
      ValueError, match=r"the stream s has .* place of the checkpoint"
    ):
      other.set_state(state)


@pytest.mark.parametrize("source", [iter([]), "text", 3, {"a": 1}])
def test_what_cannot_be_read_again_is_refused(source):
  with pytest.raises(TypeError, match="Give the function that makes the iterator"):
    stream.of_iterable(source, name="s")


def test_a_pass_without_records_is_an_error():
  once = iter([record(0)])
  records = Streamed([stream.of_iterable(lambda: once, name="s")])
  items = iter(streams.draws(records, shuffle=False, seed=0, num_epochs=None))
  assert numbers([next(items)]) == [0]
  with pytest.raises(ValueError, match="no record in pass 2; expected the same"):
    next(items)


def test_errors_name_the_place(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text(json.dumps(record(0)) + "\n\n{bad\n")
  with pytest.raises(ValueError, match=r"a\.jsonl:3: invalid JSON"):
    Streamed([stream.of_file(path)]).validate()
  path.write_text("\n" + json.dumps({"prompt": "without a response"}))
  with pytest.raises(ValueError, match=r'a\.jsonl:2: "prompt" without "response"'):
    Streamed([stream.of_file(path)]).validate()
  path.write_text("")
  with pytest.raises(ValueError, match=r"a\.jsonl is empty"):
    Streamed([stream.of_file(path)]).validate()
