"""How metrics of several batches come together."""

import pytest

from tunix.rl import metrics
from tunix.rl.pipeline import PromptBatch


def test_extremes_are_told_by_their_names_and_not_by_how_these_begin():
  parts = [
    {"rewards/score/max": 1.0, "completions/min_length": 2.0, "rewards/min_words": 1.0},
    {"rewards/score/max": 3.0, "completions/min_length": 1.0, "rewards/min_words": 4.0},
  ]
  assert metrics.mean_of(parts, [1, 2]) == {
    "rewards/score/max": 3.0,
    "completions/min_length": 1.0,
    "rewards/min_words": 3.0,
  }


def test_batches_of_other_columns_are_named():
  first, other = (PromptBatch(prompts=["p"], columns={c: [1]}, number=0) for c in "ab")
  with pytest.raises(ValueError, match=r"\['a'\] and \['b'\] are put together"):
    first.joined([other])
