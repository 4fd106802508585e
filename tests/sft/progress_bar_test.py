import io
import os
import subprocess
import sys

import pytest

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
  with pytest.raises(ValueError, match="no metrics_logger"):
    ProgressBar().update_metrics(["loss"], Mode.TRAIN)


def test_nothing_is_drawn_or_imported_without_a_terminal():
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
  assert out.stderr == b"" and out.stdout == b""
