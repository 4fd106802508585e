import numpy as np
import pytest

from tests.sft import trainers
from tunix.sft.metrics_logger import MetricsLogger


def logged(count=3):
  logger = MetricsLogger()
  for step in range(1, count + 1):
    logger.log("", "loss", 4.0 / step, "train", step)
    if step % 2 == 0:
      logger.log("", "loss", 1.0 / step, "eval", step)
  return logger


def test_steps_and_values_by_event():
  history = logged(4).history
  assert list(history) == ["train/loss", "eval/loss"]
  steps, values = history["eval/loss"]
  assert steps.tolist() == [2, 4] and values.tolist() == [0.5, 0.25]
  assert history.rows()[1] == {"step": 2, "train/loss": 2.0, "eval/loss": 0.5}
  assert history.rows()[0] == {"step": 1, "train/loss": 4.0}
  with pytest.raises(KeyError, match=r"'loss' was not logged.*train/loss"):
    _ = history["loss"]


def test_it_stays_as_it_was_taken():
  logger = logged(2)
  history = logger.history
  logger.log("", "loss", 9.0, "train", 3)
  assert history["train/loss"].steps.tolist() == [1, 2]
  assert logger.history["train/loss"].steps.tolist() == [1, 2, 3]


def test_it_is_shown_as_a_table():
  lines = repr(logged(3).history).splitlines()
  assert [line.split() for line in lines] == [
    ["step", "train/loss", "eval/loss"],
    ["1", "4"],
    ["2", "2", "0.5"],
    ["3", "1.3333"],
  ]
  page = logged(3).history._repr_html_()
  assert "<th>train/loss</th>" in page and page.count("<tr>") == 4


def test_a_long_one_is_cut_in_the_middle():
  logger = logged(100)
  for number in range(9):
    logger.log("", f"<{number}>", 1.0, "train", 1)
  text = repr(logger.history).splitlines()
  assert len(text) == 1 + 6 + 1 + 6 + 1
  assert text[7].split() == ["..."] * 9 and text[-2].split()[0] == "100"
  assert text[-1] == "and train/<6>, train/<7>, train/<8>"
  page = logger.history._repr_html_()
  assert "<th>train/&lt;0&gt;</th>" in page and "train/&lt;8&gt;" in page


def test_nothing_was_logged():
  assert repr(MetricsLogger().history) == "step"


def test_a_trainer_has_one():
  t = trainers.trainer(max_steps=2)
  t.train([trainers.small(i) for i in range(2)])
  steps, losses = t.history["train/loss"]
  assert steps.tolist() == [1, 2]
  np.testing.assert_array_equal(
    losses, t.metrics_logger.get_metric_history("", "loss", "train")
  )
  assert "train/loss" in repr(t.history)
  assert repr(t) == f"{type(t).__name__}(step 2 of 2)"
