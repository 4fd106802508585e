"""The state of an iterator over data that print themselves stays small."""

import dataclasses
import json
import logging

import grain
import pytest

from tests.sft import resume_test
from tests.sft.trainers import smalls
from tunix.sft.steps import iterator_state
from tunix.sft.steps.batch_source import BatchSource


@dataclasses.dataclass
class Texts:
  """A source as tutorials write it: its repr holds the data."""

  texts: list[str]

  def __len__(self):
    return len(self.texts)

  def __getitem__(self, index):
    return self.texts[index]


def loader(texts):
  source = Texts(texts)
  sampler = grain.samplers.IndexSampler(
    num_records=len(source),
    num_epochs=1,
    shard_options=grain.sharding.NoSharding(),
    shuffle=False,
  )
  return grain.DataLoader(data_source=source, sampler=sampler)


LONG = [f"{number} " + "x" * 5000 for number in range(8)]


def test_texts_are_kept_as_digests_and_named_once(caplog):
  with caplog.at_level(logging.WARNING):
    source = BatchSource(loader(LONG))
    source.next()
    state = json.dumps(source.state())
  assert len(state) < 2000 and "xxxx" not in state
  assert caplog.text.count("(Texts(texts=['0 xxx") == 1
  assert "give the class a __repr__" in caplog.text


def test_the_place_is_found_again():
  source = BatchSource(loader(LONG))
  source.take(3)
  saved = json.loads(json.dumps(source.state()))
  again = BatchSource(loader(LONG), saved=saved)
  assert again.drawn == 3 and again.take(9) == LONG[3:]


def test_other_data_are_noticed():
  saved = BatchSource(loader(LONG)).state()
  with pytest.raises(ValueError, match="not what the run was started with"):
    BatchSource(loader([*LONG[1:], "y" * 5000]), saved=saved)


def test_bytes_that_are_no_text_are_named():
  class Pickled:
    def get_state(self):
      return b"\x80\x04K\x01."

  with pytest.raises(ValueError, match="data iterator \\(Pickled\\) gave bytes that"):
    iterator_state.read(Pickled())


def test_a_short_state_is_kept_as_it_is():
  iterator = iter(loader(["a", "b"]))
  next(iterator)
  assert iterator_state.read(iterator) == {
    "iterator_bytes": iterator.get_state().decode()
  }
  assert iterator_state.read(iter([1])) == {}
  assert not iterator_state.restore(iter([1]), {"drawn": 1})


class Counted:
  """Batches with a state that counts its readings."""

  def __init__(self):
    self.batches, self.at, self.reads = smalls(9), 0, 0

  def __iter__(self):
    return self

  def __next__(self):
    if self.at == len(self.batches):
      raise StopIteration
    self.at += 1
    return self.batches[self.at - 1]

  def get_state(self):
    self.reads += 1
    return {"at": self.at}

  def set_state(self, state):
    self.at = state["at"]


def test_a_trainer_reads_the_state_when_it_saves(tmp_path):
  options = resume_test.CheckpointOptions(save_every_n_steps=3)
  trainer = resume_test.make(tmp_path, max_steps=9, checkpointing_options=options)
  data = Counted()
  trainer.train(data)
  trainer.close()
  # Once when it is opened, once a checkpoint is due (remembered before more is drawn).
  assert data.reads <= 1 + 3 + 1
  again = Counted()
  resumed = resume_test.make(tmp_path, max_steps=9, checkpointing_options=options)
  assert resumed.train_steps == 9
  resumed.train(again)
  resumed.close()
