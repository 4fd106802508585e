import logging

import numpy as np
import pytest

from tests import toys_text
from tests.sft.dpo import preferences
from tunix.sft.dpo.pairs import BadRow, DataInput, KTODataInput, Limits, TrainingInput
from tunix.sft.dpo.reader import Reader

TEXT = toys_text.chat_tokenizer(None)


def reader(**options):
  return Reader(TEXT, Limits(8, 8), **options)


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
    (text(chosen=[" a", ""]), "row 1 of the batch: an answer is empty"),
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
  assert Reader(TEXT, Limits(8, 8)).pairs(batch).weights.tolist() == [1, 1]
  with pytest.raises(BadRow, match="cut to equal tokens by max_response_length"):
    Reader(TEXT, Limits(8, 1)).pairs(batch)


def test_cuts_are_counted_and_warned_of_at_powers_of_ten(caplog):
  short = Reader(TEXT, Limits(1, 8))
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
  ("batch", "message"),
  [
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
    Reader(None, Limits(8, 8)).pairs(text())
  with pytest.raises(ValueError, match="max_prompt_length"):
    Reader(TEXT, None).pairs(text())


def test_a_training_input_of_lists_is_read():
  columns = {k: x.tolist() for k, x in preferences.pairs().items()}
  assert reader().pairs(TrainingInput(**columns)).weights.sum() == 4
