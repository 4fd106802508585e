"""Translation batches, of stand-ins for the two packages that hold the data."""

import itertools
import sys
import types

import numpy as np
import pytest

from tests import toys_text
from tunix.examples.data import translation_dataset as translation

PAIRS = [(f"the day {i}", "le jour " * (1 + i % 4)) for i in range(12)]


@pytest.fixture
def tokenizer():
  return toys_text.chat_tokenizer(None)


@pytest.fixture(autouse=True)
def packages(monkeypatch):
  mtnt = [{"src": a.encode(), "dst": b.encode()} for a, b in PAIRS]
  opus = [{"translation": {"en": a, "fr": b}} for a, b in PAIRS]
  asked = {}

  def data_source(name, split, download):
    asked["mtnt"] = (name, split, download)
    return mtnt, mtnt[:4]

  def load_dataset(name, data_dir, split):
    asked["opus"] = (name, data_dir, split)
    return [opus, opus[:4]]

  fakes = {"tensorflow_datasets": {"data_source": data_source}}
  fakes["datasets"] = {"load_dataset": load_dataset}
  for name, values in fakes.items():
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**values))
  return asked


def make(tokenizer, name="mtnt/en-fr", size=2, length=64, epochs=1, **options):
  return translation.create_datasets(name, size, length, epochs, tokenizer, **options)


def test_both_data_sets_give_the_same_rows(tokenizer, packages):
  first = list(make(tokenizer, tfds_download=False)[0])
  other = list(make(tokenizer, "Helsinki-NLP/opus-100")[0])
  assert packages["mtnt"] == ("mtnt/en-fr", ("train", "valid"), False)
  assert packages["opus"][2] == ["train", "validation"]
  assert len(first) == 6
  for a, b in zip(first, other, strict=True):
    np.testing.assert_array_equal(a.input_tokens, b.input_tokens)


def test_the_source_is_masked_and_rows_are_padded(tokenizer):
  batch = next(iter(make(tokenizer)[0]))
  assert batch.input_tokens.shape == batch.input_mask.shape == (2, 64)
  row, mask = batch.input_tokens[0], batch.input_mask[0]
  shown = tokenizer.tokenize(PAIRS[0][0], **translation.INPUT_TEMPLATE, add_eos=False)
  trained = tokenizer.tokenize(PAIRS[0][1], add_eos=True)
  np.testing.assert_array_equal(row[mask], trained)
  np.testing.assert_array_equal(row[: len(shown)], shown)
  assert (row[len(shown) + len(trained) :] == tokenizer.pad_id()).all()


def test_templates_are_honoured(tokenizer):
  plain = next(iter(make(tokenizer)[0])).input_tokens
  chat = next(iter(make(tokenizer, instruct_tuned=True)[0])).input_tokens
  own = {"prefix": "French? ", "suffix": " "}
  mine = next(iter(make(tokenizer, input_template=own)[0])).input_tokens
  assert not np.array_equal(plain, chat) and not np.array_equal(plain, mine)


def test_longer_examples_are_dropped(tokenizer):
  lengths = sorted(int(r.input_mask.nonzero()[0][-1]) + 1 for r in rows_of(tokenizer))
  limit = lengths[5]
  assert len(list(rows_of(tokenizer, limit))) == sum(x <= limit for x in lengths)


def rows_of(tokenizer, length=64):
  for batch in make(tokenizer, size=1, length=length)[0]:
    yield types.SimpleNamespace(input_mask=batch.input_mask[0])


def test_epochs_and_the_place(tokenizer):
  assert len(list(make(tokenizer, epochs=2)[0])) == 12
  endless, held_out = make(tokenizer, epochs=None)
  assert len(list(itertools.islice(endless, 20))) == 20 and len(list(held_out)) == 2
  first = iter(make(tokenizer)[0])
  list(itertools.islice(first, 2))
  again = iter(make(tokenizer)[0])
  again.set_state(first.get_state())
  want, got = ([x.input_tokens for x in it] for it in (first, again))
  np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize(
  ("options", "part"),
  [
    ({"name": "wmt"}, "dataset_name is 'wmt'"),
    ({"size": 0}, "global_batch_size is 0"),
    ({"input_template": {"prefix": ""}}, "input_template has"),
  ],
)
def test_bad_input(tokenizer, options, part):
  with pytest.raises(ValueError, match=part):
    make(tokenizer, **options)


def test_a_package_that_is_missing(tokenizer, monkeypatch):
  monkeypatch.setitem(sys.modules, "datasets", None)
  with pytest.raises(ImportError, match="pip install datasets"):
    make(tokenizer, "Helsinki-NLP/opus-100")
