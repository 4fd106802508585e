import io
import math
import os
import subprocess
import sys
import types

import pytest

from tests.sft import trainers
from tunix.sft.metrics.backends import (
  ConsoleBackend,
  RewindableBackend,
  TensorboardBackend,
  WandbBackend,
)
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.utils import env


def events_of(folder):
  """(tag, step, value) of scalars, and the steps of session starts."""
  from tensorboardX.proto import event_pb2

  scalars, starts = [], []
  for path in sorted(folder.glob("events.out.tfevents.*")):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], "little")
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      data = data[12 + size + 4 :]
      if event.HasField("session_log"):
        starts.append(event.step)
      for value in event.summary.value:
        scalars.append((value.tag, event.step, value.simple_value))
  return scalars, starts


def test_tensorboard_writes_and_flushes(tmp_path):
  backend = TensorboardBackend(tmp_path, flush_every_n_steps=2)
  assert not list(tmp_path.iterdir())
  for step in range(4):
    backend.log_scalar("train/loss", step / 2, step=step)
  # Step 2 was flushed, and with it all before.
  assert ("train/loss", 2, 1.0) in events_of(tmp_path)[0]
  backend.close()
  assert [step for _, step, _ in events_of(tmp_path)[0]] == [0, 1, 2, 3]


def test_tensorboard_hides_what_a_resumed_run_writes_again(tmp_path):
  first = TensorboardBackend(tmp_path)
  for step in range(5):
    first.log_scalar("train/loss", 1.0, step=step)
  position = first.position()
  assert len(events_of(tmp_path)[0]) == 5  # on disk
  first.log_scalar("train/loss", 1.0, step=5)
  first.close()
  second = TensorboardBackend(tmp_path)
  second.rewind(position)
  second.log_scalar("train/loss", 1.0, step=5)
  second.close()
  assert position == {"step": 4}
  assert events_of(tmp_path)[1] == [5]  # TensorBoard drops earlier files' steps >= 5


def test_tensorboard_begins_anew(tmp_path):
  first = TensorboardBackend(tmp_path)
  first.rewind(None)
  first.log_scalar("train/loss", 1.0, step=3)
  first.close()
  assert events_of(tmp_path)[1] == []  # nothing old, nothing to hide
  first.rewind(None)
  first.log_scalar("train/loss", 1.0, step=0)
  first.close()
  assert events_of(tmp_path)[1] == [0]


def test_console_prints_a_line_per_step_and_mode():
  out = io.StringIO()
  backend = ConsoleBackend(out)
  backend.log_scalar("train/loss", 2.5, step=1)
  backend.log_scalar("train/grad_norm", 1 / 3, step=1)
  assert out.getvalue() == ""
  backend.log_scalar("train/loss", math.nan, step=2)
  assert out.getvalue() == "step 1 train loss=2.5 grad_norm=0.33333\n"
  backend.close()
  assert out.getvalue().splitlines()[1] == "step 2 train loss=nan"
  assert not isinstance(backend, RewindableBackend)


WANDB = """
import json, sys
from tunix.sft.metrics.backends import WandbBackend
assert "wandb" not in sys.modules
backend = WandbBackend("p", "name", sys.argv[1])
for step, tag in ((0, "a"), (1, "a"), (2, "ahead"), (1, "late"), (2, "a"), (3, "a")):
  backend.log_scalar("train/" + tag, step / 2, step=step)
position = json.loads(json.dumps(backend.position()))
assert position["open"] == [[2, None, {"train/ahead": 1.0, "train/a": 1.0}],
                            [3, None, {"train/a": 1.5}]], position
assert backend._run.step == 1, backend._run.step
other = WandbBackend("p", "name", sys.argv[1])
backend.close()
other.rewind(position)
other.log_scalar("train/b", 1.0, step=4)
assert other._run.id == position["run_id"] == backend.position()["run_id"]
other.close()
"""


@pytest.mark.slow
def test_wandb_offline(tmp_path):
  pytest.importorskip("wandb")
  environment = dict(os.environ, WANDB_MODE="offline", WANDB_SILENT="true")
  subprocess.run(
    [sys.executable, "-c", WANDB, str(tmp_path)], check=True, env=environment
  )
  assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


class Unreachable(Exception):
  """In the place of `wandb.Error`."""


def test_wandb_that_does_not_answer_ends_the_run_before_its_first_step(
  tmp_path, monkeypatch
):
  def init(**settings):
    raise Unreachable("api_key not\nconfigured")

  stub = types.SimpleNamespace(init=init, Error=Unreachable)
  monkeypatch.setitem(sys.modules, "wandb", stub)
  options = MetricsLoggerOptions(
    tmp_path, backend_factories=[lambda: WandbBackend("p")]
  )
  expected = r"W&B does not .* 'p' \(api_key not configured\): log in with"
  with pytest.raises(RuntimeError, match=expected) as caught:
    trainers.trainer(metrics_logging_options=options)
  assert "\n" not in str(caught.value) and "WANDB_MODE=offline" in str(caught.value)


def test_wandb_is_not_started_before_a_value_is_sent(monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
  backend = WandbBackend("p")
  assert isinstance(backend, RewindableBackend)
  backend.close()


@pytest.mark.parametrize(
  ("variables", "expected"),
  [
    ({}, False),
    ({"WANDB_API_KEY": "k"}, True),
    ({"WANDB_MODE": "offline"}, True),
    ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, False),
    ({"WANDB_DISABLED": "true", "WANDB_API_KEY": "k"}, False),
    ({"WANDB_SILENT": "true"}, False),
    ({"WANDB_SERVICE": "set by wandb itself"}, False),
  ],
)
def test_wandb_requested(monkeypatch, variables, expected):
  for name in [name for name in os.environ if name.startswith("WANDB_")]:
    monkeypatch.delenv(name)
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  assert env.wandb_requested() is expected


def test_wandb_takes_its_own_words():
  ours, theirs = WandbBackend("p", "run"), WandbBackend(project="p", name="run")
  assert ours._settings == theirs._settings == {"project": "p", "name": "run"}


GROUPS = [
  {
    "prompt": [{"role": "user", "content": "hi"}],
    "completions": [{"text": "a \ud800", "reward": 1.0, "tokens": 2}, {"text": "b"}],
  }
]


def texts_of(folder):
  from tensorboardX.proto import event_pb2

  found = {}
  for path in sorted(folder.glob("events.out.tfevents.*")):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], "little")
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      data = data[12 + size + 4 :]
      for value in event.summary.value:
        if value.metadata.plugin_data.plugin_name == "text":
          found[value.tag, event.step] = value.tensor.string_val[0].decode()
  return found


def test_tensorboard_shows_configuration_and_samples(tmp_path):
  backend = TensorboardBackend(tmp_path)
  backend.log_config({"seed": 3, "mesh": {"dp": 2}})
  backend.rewind(None)
  assert not list(tmp_path.iterdir())
  backend.log_scalar("train/loss", 1.0, step=1)
  backend.log_samples(GROUPS, 4)
  backend.close()
  texts = texts_of(tmp_path)
  assert texts["configuration/text_summary", 0] == '    seed: 3\n    mesh: {"dp": 2}'
  assert "    text: a ?\n    reward: 1.0" in texts["samples/0/text_summary", 4]
  assert len(texts) == 3 and ("train/loss", 1, 1.0) in events_of(tmp_path)[0]


def test_wandb_gets_configuration_and_tables_in_the_order_of_steps(monkeypatch):
  sent, settings = [], {}

  class Run:
    id = "x"

    def log(self, values, step):
      sent.append((step, values))

    def finish(self):
      pass

  def init(**keys):
    settings.update(keys)
    return Run()

  stub = types.SimpleNamespace(init=init, Table=lambda columns, data: (columns, data))
  monkeypatch.setitem(sys.modules, "wandb", stub)
  backend = WandbBackend("p")
  backend.log_config({"seed": 3})
  backend.log_scalar("train/loss", 1.0, step=1)
  backend.log_samples(GROUPS, 2)
  backend.log_scalar("train/loss", 2.0, step=2)
  backend.close()
  assert settings["config"] == {"seed": 3}
  assert [step for step, _ in sent] == [1, 2] and "samples" not in sent[0][1]
  columns, rows = sent[1][1]["samples"]
  assert columns[:4] == ["step", "prompt", "text", "reward"]
  assert [row[2:4] for row in rows] == [["a \ud800", 1.0], ["b", None]]
  assert rows[0][1] == '[{"role": "user", "content": "hi"}]'
