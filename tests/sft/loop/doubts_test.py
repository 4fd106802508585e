"""Signs that a run does not learn, from its metrics."""

import re
import types

import numpy as np
import pytest

from tests.sft import trainers
from tunix.sft.config import TrainingConfig
from tunix.sft.loop import doubts
from tunix.sft.loop.run import Run
from tunix.sft.metrics_logger import MetricsLogger, Mode


def notes(prefix="", **metrics):
  logger = MetricsLogger()
  for name, values in metrics.items():
    for step, value in enumerate(values, 1):
      logger.log(prefix, name.replace("__", "/"), value, Mode.TRAIN, step)
  return list(doubts.notes(logger, prefix).values())


FALLING = np.exp(np.linspace(3, 2, 16))


@pytest.mark.parametrize(
  ("metric", "values", "note"),
  [
    ("groups__all_equal", [1, 1, 0, 0, 1, 1], "67% of the groups .*num_generations"),
    ("groups__all_equal", [1, 0, 0, 1, 0, 0], None),
    ("groups__all_equal", [1, 1, 1], None),  # too early
    ("completions__truncated", [0.6, 0.7, 0.8, 0.9], "75% .*max_tokens_to_generate"),
    ("completions__truncated", [0.1, 0.7, 0.2, 0.2], None),
    ("groups__all_equal", [0.9, 0.9, 0.2, 0.0], None),  # no longer
    ("rewards__score__mean", [0.5] * 6 + [0.0] * 6, r"from 0.5 to 0; lower training\."),
    ("rewards__score__mean", [0.125, 0.1, 0.2, 0.0], None),  # noise of few batches
    ("rewards__score__mean", [0.5, 0.6, 0.4, 0.3] * 3, None),
    ("rewards__score__mean", [-0.5, -0.6, -0.4, -2.0] * 3, None),  # has no scale
    ("perplexity", [20.0, 20.1] * 8, r"did not fall: 20.05 .*training\.learning_rate"),
    ("perplexity", FALLING[::-1], "did not fall"),
    ("perplexity", FALLING, None),
    ("perplexity", [20.0] * 11, None),
    ("perplexity", [1.0] * 16, None),  # nothing is left to learn
    ("perplexity", [1.0] * 8 + [2.0] * 8, "did not fall"),
    ("perplexity", [20.0] * 12 + [float("inf")], None),  # has a warning of its own
    ("loss", [1.0] * 16, None),  # of a user: it may have any meaning
    ("rewards__accuracy", [0.4, 0.6] * 8, "last steps is 0.50, and 0.5 is chance"),
    ("rewards__accuracy", [0.5] * 8 + [0.7] * 8, None),
  ],
)
@pytest.mark.parametrize("prefix", ["", "mine"])
def test_a_sign_is_named_with_the_key_to_change(metric, values, note, prefix):
  found = notes(prefix, **{metric: values})
  assert len(found) == (note is not None)
  assert all(re.search(note, text) for text in found), found


def test_a_resumed_run_judges_no_part_of_its_values():
  """A run that fell and then converged, and was killed before its last values."""
  first, second = MetricsLogger(), MetricsLogger()
  first.log("", "perplexity", 20.0, Mode.TRAIN, 1)
  second.restore(first.state())
  for step in range(2, 18):
    second.log("", "perplexity", 2.0, Mode.TRAIN, step)
  assert not doubts.notes(second, "")


def test_metrics_that_are_no_sign_in_a_run():
  logger = MetricsLogger()
  for step in range(4):
    logger.log("", "groups/all_equal", 1.0, Mode.TRAIN, step)
  assert doubts.notes(logger, "") and not doubts.notes(logger, "", ["groups/all_equal"])


def test_signs_are_logged_once_on_the_way_and_returned_at_the_end(caplog):
  work = types.SimpleNamespace(
    metrics_logger=MetricsLogger(), train_steps=0, _no_doubts=()
  )
  run = Run(work, TrainingConfig(), trainers.trainer().perf_tracer)
  for step in range(1, 9):
    work.train_steps = step
    work.metrics_logger.log("", "groups/all_equal", 1.0, Mode.TRAIN, step)
    run._look_for_doubts()
  (record,) = caplog.records
  assert record.getMessage().startswith("after step 4: 100% of the groups")
  work._had_no_gradient = False
  assert record.getMessage().endswith(*run._notes())


def test_a_flat_loss_is_a_note_of_the_result(caplog):
  batch = trainers.small(0)
  flat = trainers.trainer(learning_rate=None, tx=trainers.optimizers.sgd(0.0))
  note = flat.train([batch] * 18).notes[0]
  assert note.startswith("the perplexity did not fall")
  assert f"after step 16: {note}" in caplog.text
  assert not trainers.trainer().train([batch] * 12).notes
