import json
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.sft import metrics_logger
from tunix.sft.metrics_logger import (
  JsonlBackend,
  LoggingBackend,
  MetricsLogger,
  MetricsLoggerOptions,
  Mode,
  TensorboardBackend,
)


class ListBackend:
  """A user's backend, without positions."""

  def __init__(self):
    self.events = []
    self.closed = 0

  def log_scalar(self, event, value, **kwargs):
    self.events.append((event, value, kwargs["step"]))

  def close(self):
    self.closed += 1


def logger_with(*backends, log_dir="unused"):
  factories = [lambda b=b: b for b in backends]
  return MetricsLogger(MetricsLoggerOptions(log_dir, backend_factories=factories))


def test_events_are_prefix_mode_name_without_a_leading_slash():
  backend = ListBackend()
  logger = logger_with(backend)
  logger.log("", "loss", jnp.float32(2.5), Mode.TRAIN, 3)
  logger.log("actor", "loss", 1.5, "eval", 4)
  assert backend.events == [("train/loss", 2.5, 3), ("actor/eval/loss", 1.5, 4)]
  logger.close()
  assert backend.closed == 1
  assert isinstance(backend, LoggingBackend)


def test_means_and_history():
  logger = MetricsLogger()
  for step, value in enumerate([1.0, 2.0, 6.0]):
    logger.log("", "loss", value, Mode.TRAIN, step)
    logger.log("", "perplexity", math.exp(value), Mode.TRAIN, step)
  assert logger.get_metric("", "loss", "train") == 3.0
  np.testing.assert_allclose(
    logger.get_metric("", "perplexity", Mode.TRAIN), math.exp(3)
  )
  assert logger.get_last_metric("", "loss", Mode.TRAIN) == 6.0
  history = logger.get_metric_history("", "loss", Mode.TRAIN)
  assert isinstance(history, np.ndarray) and history.tolist() == [1, 2, 6]
  assert logger.metric_exists("", "loss", Mode.TRAIN)
  assert not logger.metric_exists("", "loss", Mode.EVAL)


@pytest.mark.parametrize(
  ("values", "expected"), [([0.0, 2.0], 0.0), ([math.inf, 1.0], math.inf)]
)
def test_perplexities_at_the_edge(values, expected):
  logger = MetricsLogger()
  for value in values:
    logger.log("", "perplexity", value, Mode.EVAL, 0)
  assert logger.get_metric("", "perplexity", Mode.EVAL) == expected


def test_unknown_names_are_value_errors_that_list_what_there_is():
  logger = MetricsLogger()
  logger.log("", "loss", 1.0, Mode.TRAIN, 0)
  for read in (logger.get_metric, logger.get_metric_history, logger.get_last_metric):
    with pytest.raises(ValueError, match=r"'a/eval/x'.*\['train/loss'\]"):
      read("a", "x", Mode.EVAL)
  with pytest.raises(ValueError, match="mode is 'test'"):
    logger.log("", "loss", 1.0, "test", 0)


def test_values_are_mirrored_to_jax_monitoring_and_loggers_hear_only_their_own():
  heard = []

  def listener(event, value, **kwargs):
    heard.append((event, value, kwargs.get("step")))

  one, two = ListBackend(), ListBackend()
  jax.monitoring.register_scalar_listener(listener)
  try:
    logger_with(one).log("", "loss", 1.0, Mode.TRAIN, 7)
    other = logger_with(two)
    jax.monitoring.record_scalar("/jax/something", 5.0)
    other.close()
    jax.monitoring.record_scalar("after", 6.0)
  finally:
    jax.monitoring.unregister_scalar_listener(listener)
  assert ("train/loss", 1.0, 7) in heard and ("after", 6.0, None) in heard
  assert one.events == [("train/loss", 1.0, 7)] and two.events == []


def test_default_backends(tmp_path, monkeypatch):
  for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
    monkeypatch.delenv(name, raising=False)
  backends = MetricsLoggerOptions(tmp_path).create_backends()
  assert [type(b) for b in backends] == [JsonlBackend, TensorboardBackend]
  monkeypatch.setenv("WANDB_PROJECT", "mine")
  backends = MetricsLoggerOptions(tmp_path).create_backends()
  assert type(backends[-1]) is metrics_logger.WandbBackend
  assert MetricsLoggerOptions(tmp_path, backend_factories=[]).create_backends() == []


def test_backends_are_chosen_by_name(tmp_path, monkeypatch):
  monkeypatch.setenv("WANDB_MODE", "offline")
  choice = {"jsonl": None, "tensorboard": False, "wandb": False, "console": True}
  backends = MetricsLoggerOptions(tmp_path, backends=choice).create_backends()
  assert [type(b) for b in backends] == [JsonlBackend, metrics_logger.ConsoleBackend]
  with pytest.raises(ValueError, match="backends has the name 'csv'"):
    MetricsLoggerOptions(tmp_path, backends={"csv": True})


def test_bad_options():
  with pytest.raises(ValueError, match="log_dir is empty"):
    MetricsLoggerOptions("")
  with pytest.raises(ValueError, match="flush_every_n_steps is 0"):
    MetricsLoggerOptions("x", flush_every_n_steps=0)


def log_steps(logger, steps):
  for step in steps:
    logger.log("", "loss", 1 / (step + 3), Mode.TRAIN, step)
    logger.log("", "perplexity", math.exp(1 / (step + 3)), Mode.TRAIN, step)


def test_state_and_restore_continue_means_and_files(tmp_path):
  whole = logger_with(JsonlBackend(tmp_path / "whole"))
  log_steps(whole, range(12))
  whole.close()

  first = logger_with(JsonlBackend(tmp_path / "run"), ListBackend())
  log_steps(first, range(5))
  state = json.loads(json.dumps(first.state(), allow_nan=False))
  log_steps(first, range(5, 9))  # lost by the kill

  second = logger_with(JsonlBackend(tmp_path / "run"), ListBackend())
  second.restore(state)
  log_steps(second, range(5, 12))
  second.close()
  for name in ("loss", "perplexity"):
    assert second.get_metric("", name, "train") == whole.get_metric("", name, "train")
    assert second.get_last_metric("", name, "train") == whole.get_last_metric(
      "", name, "train"
    )
  one, two = ((tmp_path / d / "metrics.jsonl").read_bytes() for d in ("whole", "run"))
  assert one == two


def test_the_state_does_not_grow_with_the_age_of_the_run(tmp_path):
  logger = logger_with(JsonlBackend(tmp_path))
  log_steps(logger, range(100, 110))
  early = len(json.dumps(logger.state()))
  log_steps(logger, range(110, 900))
  assert len(json.dumps(logger.state())) < early + 40


def test_non_finite_history_survives_json():
  logger = MetricsLogger()
  logger.log("", "loss", math.inf, Mode.TRAIN, 0)
  state = json.loads(json.dumps(logger.state(), allow_nan=False))
  other = MetricsLogger()
  other.restore(state)
  assert other.get_metric("", "loss", "train") == math.inf


def test_restoring_none_begins_anew(tmp_path, caplog):
  logger = logger_with(JsonlBackend(tmp_path))
  log_steps(logger, range(5))
  logger.close()
  logger.restore(None)  # of another run that shares it
  assert logger.metric_exists("", "loss", Mode.TRAIN)
  with caplog.at_level(logging.WARNING):
    logger_with(JsonlBackend(tmp_path)).restore(None)
  assert (tmp_path / "metrics.jsonl.1").exists()


def test_two_backends_of_one_class_keep_their_own_positions(tmp_path):
  def make():
    return logger_with(JsonlBackend(tmp_path / "a"), JsonlBackend(tmp_path / "b"))

  logger = make()
  log_steps(logger, range(5))
  state = logger.state()
  assert set(state["backends"]) == {"JsonlBackend", "JsonlBackend#2"}
  log_steps(logger, range(5, 9))
  again = make()
  again.restore(state)
  log_steps(again, range(5, 9))
  again.close()
  a, b = ((tmp_path / d / "metrics.jsonl").read_bytes() for d in "ab")
  assert a == b and a.count(b"\n") == 9


def test_logging_after_close_goes_on(tmp_path):
  logger = MetricsLogger(MetricsLoggerOptions(tmp_path))
  log_steps(logger, range(3))
  logger.close()
  log_steps(logger, range(3, 6))
  logger.close()
  logger.close()
  assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 6
