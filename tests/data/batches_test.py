import logging
import re

import numpy as np
import pytest

from tests import toys_text
from tests.sft.dpo import preferences
from tunix.data.batches import BadRow, TextOptions, read_labelled, read_pairs
from tunix.data.rows import SideBySide
from tunix.sft.dpo.dpo_trainer import process_dpo_record
from tunix.sft.dpo.kto_trainer import KTODataInput, KTOTrainingInput
from tunix.sft.dpo.pairs import DataInput, TrainingInput
from tunix.sft.losses import batch_fields

TEXT = toys_text.chat_tokenizer(None)


def reader(prompt=8, completion=8, tokenizer=TEXT, **options):
  """The batch types' door, with the options at hand."""
  limits = SideBySide(max_prompt_length=prompt, max_completion_length=completion)
  return Door(TextOptions(tokenizer=tokenizer, limits=limits, **options))


class Door:
  def __init__(self, options):
    self.options, self.counts = options, options.tally.counts

  def pairs(self, batch):
    return TrainingInput(**read_pairs(batch_fields(batch), self.options))

  def single(self, batch):
    return KTOTrainingInput(**read_labelled(batch_fields(batch), self.options))


def text(**changes):
  fields = {"prompt": ["hi", "say"], "chosen": [" a", " b"], "rejected": [" c", " d"]}
  return {**fields, **changes}


def test_all_forms_of_a_batch_give_the_same_rows():
  want = reader().pairs(text())
  data = DataInput(["hi", "say"], [" a", " b"], [" c", " d"])
  for form in (data, want, vars(want)):
    got = reader().pairs(form)
    for name, value in vars(want).items():
      np.testing.assert_array_equal(getattr(got, name), value)
  assert want.weights.tolist() == [1.0, 1.0] and want.margins is None


def test_margins_come_along():
  got = reader().pairs(text(margin=[0.5, 2]))
  assert got.margins.tolist() == [0.5, 2.0]


def test_rows_of_zeros_are_padding():
  got = reader().pairs(preferences.with_padding(preferences.pairs(rows=2), 4))
  assert got.weights.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
  ("batch", "message"),
  [
    (text(chosen=[" a", ""]), "row 1 of the batch: a completion is empty"),
    (text(chosen=[" c", " b"]), "row 0 of the batch: the chosen and the rejected"),
  ],
)
def test_bad_text_is_refused_or_skipped(batch, message, caplog):
  with pytest.raises(BadRow, match=message):
    reader().pairs(batch)
  skips = reader(bad_rows="skip")
  with caplog.at_level(logging.WARNING):
    weights = skips.pairs(batch).weights.tolist()
  assert sorted(weights) == [0.0, 1.0]
  assert "rows without weight" in caplog.text and message in caplog.text
  assert sum(skips.counts.values()) == 1


def test_bad_tokens_are_refused_or_skipped():
  empty, equal = preferences.pairs(), preferences.pairs()
  empty["rejected_mask"][2] = 0
  for part in ("ids", "mask"):
    equal[f"rejected_{part}"][1] = equal[f"chosen_{part}"][1]
  no_prompt = preferences.pairs()
  no_prompt["prompt_mask"][3] = 0
  for batch, row, why in ((empty, 2, "empty"), (equal, 1, "equal"), (no_prompt, 3, "")):
    with pytest.raises(BadRow, match=f"row {row} .*{why}"):
      reader().pairs(batch)
    assert reader(bad_rows="skip").pairs(batch).weights[row] == 0


def test_equal_after_the_cut_is_equal():
  batch = text(chosen=[" the sea is wide", " b"], rejected=[" the sea is deep", " d"])
  assert reader().pairs(batch).weights.tolist() == [1, 1]
  with pytest.raises(BadRow, match="cut to equal tokens by their maximum"):
    reader(completion=1).pairs(batch)


def test_cuts_are_counted_and_warned_of_at_powers_of_ten(caplog):
  short = reader(prompt=1)
  with caplog.at_level(logging.WARNING):
    for _ in range(6):
      short.pairs(text())
  assert short.counts == {"prompts longer than their maximum were cut": 12}
  assert [r.getMessage() for r in caplog.records] == [
    f"prompts longer than their maximum were cut so far: {n}" for n in (1, 10)
  ]


def test_labelled_answers():
  data = KTODataInput(["hi", "say"], [" a", " b"], [True, False])
  got = reader().single(data)
  assert got.labels.tolist() == [True, False] and got.labels.dtype == bool
  same = {"prompt": ["hi", "say"], "completion": [" a", " b"], "label": [1, 0]}
  np.testing.assert_array_equal(
    reader().single(same).completion_ids, got.completion_ids
  )
  with pytest.raises(ValueError, match='no "labels"'):
    reader().single({k: x for k, x in same.items() if k != "label"})


@pytest.mark.parametrize(
  ("labels", "message"),
  [
    (["False", True, True, True], "row 0 of the batch: the label is 'False'"),
    ([1, -1, 1, 1], "row 1 of the batch: the label is -1"),
    ([1, 0, 0.2, 1], "row 2 of the batch: the label is 0.2"),
    ([True, True, True, None], "row 3 of the batch: the label is None"),
    ([True], r"labels have shape \(1,\)"),
    (np.ones((4, 1), bool), r"labels have shape \(4, 1\)"),
  ],
)
def test_labels_are_yes_or_no(labels, message):
  batch = preferences.labelled()
  with pytest.raises(ValueError, match=message):
    reader().single({**batch, "labels": labels})
  for given in (np.array([1, 0, 0, 1]), [np.True_, False, np.int32(0), 1]):
    got = reader().single({**batch, "labels": given}).labels
    assert got.tolist() == [True, False, False, True] and got.dtype == bool


def test_a_number_for_each_row():
  batch = preferences.pairs()
  for name in ("margins", "weights"):
    for shape in ((4, 1), (1,), ()):
      with pytest.raises(ValueError, match=re.escape(f"{name} have shape {shape}")):
        reader().pairs({**batch, name: np.ones(shape)})
    with pytest.raises(ValueError, match=f"row 1 of the batch: {name} hold nan"):
      reader().pairs({**batch, name: [1, None, 1, 1]})
  with pytest.raises(ValueError, match=r"weights have shape \(2, 1\)"):
    reader().pairs(text(weights=[[1.0], [0.0]]))


def test_weights_come_along_with_text():
  got = reader().pairs(text(weights=[0.5, 0]))
  assert got.weights.tolist() == [0.5, 0.0]
  padding = text(weights=[1, 0], chosen=[" a", ""])
  assert reader().pairs(padding).weights.tolist() == [1.0, 0.0]
  skips = reader(bad_rows="skip")
  assert skips.pairs({**padding, "weights": [1, 1]}).weights.tolist() == [1.0, 0.0]
  assert sum(skips.counts.values()) == 1
  one = {"prompt": "hi", "chosen": " a", "rejected": " b", "weights": 0.5}
  assert process_dpo_record(one, TEXT, 8, 8).weights == 0.5


def turns_of_a_tool():
  """Pairs whose answers differ in what a tool said between two turns alone."""
  batch = preferences.pairs()
  for name in ("chosen", "rejected"):
    batch[f"{name}_ids"][:] = [4, 5, 6, 7, 0]
    batch[f"{name}_mask"][:] = [1, 1, 0, 1, 0]
  batch["rejected_ids"][:, 2] = 16
  return batch


def test_answers_that_differ_in_what_is_not_scored_differ():
  batch = turns_of_a_tool()
  assert reader().pairs(batch).weights.tolist() == [1] * 4
  batch["rejected_ids"][1, 2] = 6
  batch["rejected_ids"][1, 4] = 9  # padding, whatever its ids
  with pytest.raises(BadRow, match="row 1 of the batch: the chosen and the rejected"):
    reader().pairs(batch)
  batch["rejected_mask"][1, 2] = 1  # another thing is scored
  assert reader().pairs(batch).weights.tolist() == [1] * 4


def test_the_setting_is_named_to_those_who_have_it():
  """The command, which gives token ids, has another."""
  with pytest.raises(BadRow, match='set bad_rows="skip"'):
    reader().pairs(text(chosen=[" c", " b"]))
  batch = preferences.pairs()
  batch["chosen_mask"][0] = 0
  with pytest.raises(BadRow, match=r"drop the row$"):
    Door(TextOptions()).pairs(batch)


@pytest.mark.parametrize(
  ("batch", "message"),
  [
    (text(labels=[1, 0]), "a column 'labels' that nothing reads"),
    (text(chosen_responses=[" e", " f"]), "a column 'chosen' that nothing reads"),
    ({"prompt": ["a"]}, r"no 'chosen_responses' or 'chosen' \(found \['prompt'\]\)"),
    (text(chosen=" a"), "chosen is one text"),
    (text(prompt=["hi"]), "differ in length: {'prompts': 1"),
    ({"prompt_ids": np.ones((2, 3))}, "the batch has no 'prompt_mask'"),
    ({**preferences.pairs(), "extra": 1}, "a field 'extra' that nothing reads"),
    ({**preferences.pairs(), "chosen_mask": np.ones((4, 2))}, "expected .B, tokens."),
  ],
)
def test_wrong_forms_are_named(batch, message):
  with pytest.raises(ValueError, match=message):
    reader().pairs(batch)


def test_text_needs_a_tokenizer():
  with pytest.raises(ValueError, match="pass tokenizer= to the trainer"):
    reader(tokenizer=None).pairs(text())
  with pytest.raises(ValueError, match="max_prompt_length"):
    Door(TextOptions(tokenizer=TEXT)).pairs(text())


def test_a_training_input_of_lists_is_read():
  columns = {k: x.tolist() for k, x in preferences.pairs().items()}
  assert reader().pairs(TrainingInput(**columns)).weights.sum() == 4
