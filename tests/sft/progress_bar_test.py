import io
import os
import subprocess
import sys

import pytest

from tunix.sft import progress_bar
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.progress_bar import ProgressBar


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_the_bar_shows_the_last_values(monkeypatch):
  screen = Terminal()
  monkeypatch.setattr(sys, "stderr", screen)
  bar = ProgressBar(initial_steps=2, max_steps=10, description="Tuning")
  bar.update(1, {"loss": 2.0})
  bar.update(6, {"loss": 1.25, "grad_norm": 0.5})
  bar.close()
  last = screen.getvalue().strip().split("\r")[-1]
  assert last.startswith("Tuning:") and "9/10" in last
  assert "loss=1.25" in last and "grad_norm=0.5" in last
  bar.update(1)  # after close: nothing to draw, no error
  assert screen.getvalue().strip().split("\r")[-1] == last


def test_metrics_are_looked_up_in_the_logger_and_are_no_means():
  logger = MetricsLogger()
  for step, loss in enumerate([4.0, 1.0]):
    logger.log("actor", "loss", loss, Mode.TRAIN, step)
  bar = ProgressBar(logger, metrics_prefix="actor")
  bar.update_metrics(["loss", "not_logged"], Mode.TRAIN)
  assert bar.shown == {"actor_train_loss": "1.000"}
  bar.update_metrics(["loss"], "train", ndigits=1)
  assert bar.shown == {"actor_train_loss": "1.0"}


def test_a_bar_without_a_logger_says_so():
  with pytest.raises(ValueError, match="metrics_logger is None"):
    ProgressBar().update_metrics(["loss"], Mode.TRAIN)


def test_lines_are_written_where_there_is_no_terminal(monkeypatch, capsys):
  clock = iter([0.0, 1.0, 100.0, 101.0, 112.0, 113.0, 114.0, 200.0])
  monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(clock))
  bar = ProgressBar(initial_steps=2, max_steps=7, description="Tuning")
  bar.phase("compiling")
  for step in range(5):
    bar.update(1, {"loss": 2.0 - step / 4}, {"lr": 1e-5})
  bar.close()
  assert capsys.readouterr().err.splitlines() == [
    "Tuning: compiling ...",
    "Tuning: step 3 of 7, loss=2, lr=1e-05",
    # Two steps took 12 seconds, the first one, with its compilation, left out.
    "Tuning: step 5 of 7, loss=1.5, lr=1e-05, 0:00:12 left",
    "Tuning: step 7 of 7, loss=1, lr=1e-05",
  ]


def test_the_newest_step_is_told_at_the_end(capsys):
  bar = ProgressBar(description="Tuning")
  for _ in range(3):
    bar.update(1, {"loss": 1.0})
  bar.close()
  assert capsys.readouterr().err.splitlines() == [
    "Tuning: step 1, loss=1",
    "Tuning: step 3, loss=1",
  ]


def test_one_process_of_several_writes_lines(monkeypatch, capsys):
  monkeypatch.setattr(progress_bar.jax, "process_index", lambda: 1)
  bar = ProgressBar(max_steps=3)
  bar.update(3, {"loss": 2.0})
  bar.close()
  assert capsys.readouterr().err == ""


def test_lines_need_no_tqdm():
  code = (
    "import sys; from tunix.sft.progress_bar import ProgressBar\n"
    "bar = ProgressBar(max_steps=3); bar.update(1, {'loss': 2.0}); bar.close()\n"
    "assert 'tqdm' not in sys.modules"
  )
  out = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    check=True,
    env=dict(os.environ, JAX_PLATFORMS="cpu"),
  )
  assert out.stderr == b"Training: step 1 of 3, loss=2\n" and out.stdout == b""


def test_no_time_is_left_after_the_end_of_the_data(monkeypatch, capsys):
  clock = iter([0.0, 100.0, 101.0, 102.0])
  monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(clock))
  bar = ProgressBar(max_steps=7, description="Tuning")
  for _ in range(2):
    bar.update(1)
  bar.close()
  assert capsys.readouterr().err.splitlines()[-1] == "Tuning: step 2 of 7"


def test_phases_stand_before_the_bar_until_the_next_step(monkeypatch):
  screen = Terminal()
  monkeypatch.setattr(sys, "stderr", screen)
  bar = ProgressBar(max_steps=3, description="Tuning")
  for phase in (("evaluating", 2, 5), ("sampling", 7), ("compiling",)):
    bar.phase(*phase)
  shown = [line.partition(":")[0] for line in screen.getvalue().split("\r")]
  assert shown[-3:] == [
    "Tuning, evaluating 2 of 5",
    "Tuning, sampling 7",
    "Tuning, compiling",
  ]
  bar.update(1, {"loss": 2.0})
  bar.phase("evaluating")
  bar.close()
  assert screen.getvalue().split("\r")[-1].startswith("Tuning:")


def test_phases_are_lines_before_the_first_step_and_every_ten_seconds(
  monkeypatch, capsys
):
  seconds = 0.0
  monkeypatch.setattr(progress_bar.time, "monotonic", lambda: seconds)
  bar = ProgressBar(description="Tuning")
  for seconds in (0.0, 4.0, 11.0, 12.0):
    bar.phase("evaluating", int(seconds), 30)
  bar.phase("compiling")
  bar.update(1)
  seconds = 15.0
  bar.phase("evaluating", 0, 30)
  seconds = 25.0
  bar.phase("sampling")
  bar.phase("evaluating", 9, 30)
  bar.phase("")
  assert capsys.readouterr().err.splitlines() == [
    "Tuning: evaluating 0 of 30 ...",
    "Tuning: evaluating 11 of 30 ...",
    "Tuning: compiling ...",
    "Tuning: step 1",
    "Tuning: evaluating 9 of 30 ...",
  ]
