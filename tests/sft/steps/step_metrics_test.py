import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops.reductions import WeightedSum
from tunix.perf.trace import NoopTracer
from tunix.sft.config import TrainingConfig
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.steps.step_metrics import StepReporter, matmul_params
from tunix.sft.steps.train_step import StepMetrics


def reporter(**config):
  logger = MetricsLogger()
  options = {"pbar_description": None, **config}
  config = TrainingConfig(**options)
  return logger, StepReporter(logger, config, (100, 10), jax.devices, NoopTracer())


def metrics(loss, weight=4.0, rate=None):
  scalars = [jnp.float32(x) for x in (loss, weight, 1.5)]
  return StepMetrics(*scalars, None if rate is None else jnp.float32(rate), {})


def test_values_come_a_step_late_and_flush_brings_the_rest():
  logger, report = reporter()
  for step, loss in enumerate([3.0, 2.0], start=1):
    with report.step(step - 1):
      pass
    report.put(step, metrics(loss), {"extra": jnp.float32(step)}, tokens=8)
  assert logger.get_metric_history("", "loss", "train").tolist() == [3]
  report.flush()
  assert logger.get_metric_history("", "loss", "train").tolist() == [3, 2]
  assert logger.get_metric_history("", "extra", "train").tolist() == [1, 2]
  assert logger.get_metric_history("", "trained_tokens", "train").tolist() == [4, 4]
  perplexities = logger.get_metric_history("", "perplexity", "train")
  np.testing.assert_allclose(perplexities, np.exp([3, 2]))


def test_what_is_worth_watching_is_told_in_lines(capsys):
  names = {"metrics_prefix": "run/actor", "pbar_description": "Actor"}
  _, report = reporter(**names, max_steps=2, learning_rate=0.5)
  report.run_values = {"rewards/score/mean": 0.25}  # the learner sets it
  for step in (1, 2):
    with report.step(step - 1):
      pass
    margin = {"rewards/margin": jnp.float32(step)}
    report.put(step, metrics(3.0), margin, tokens=0)
  report.end()
  start, *lines = capsys.readouterr().err.splitlines()
  assert start == "Actor: compiling ..."
  assert [line.partition(", loss")[0] for line in lines] == [
    "Actor: step 1 of 2",
    "Actor: step 2 of 2",
  ]
  assert "loss=3, reward=0.25, margin=1, grad_norm=1.5, lr=0.5" in lines[0]
  with report.step(2):
    pass
  assert "compiling" not in capsys.readouterr().err  # it was, in the call before
  with report.step(2, program="wider rows"):
    pass
  assert capsys.readouterr().err == "Actor: compiling ...\n"


def test_the_state_holds_every_dispatched_step():
  _, report = reporter()
  with report.step(0):
    pass
  report.put(1, metrics(3.0), {}, tokens=8)
  names = {row[2] for row in report.state()["history"]}
  assert {"loss", "grad_norm"} <= names


class _Sized:
  """One batch, and a length that is a number or an error."""

  def __init__(self, length):
    self.length = length

  def __iter__(self):
    return iter("a")

  def __len__(self):
    if isinstance(self.length, int):
      return self.length
    raise self.length


@pytest.mark.parametrize(
  ("length", "total"),
  [
    (3, 3),
    (2**31, 0),  # endless
    (2**63 - 1, 0),
    (2**63, 0),  # OverflowError of Python
    (-1, 0),
    (NotImplementedError(), 0),
    (TypeError(), 0),
  ],
)
def test_an_evaluation_needs_no_number_of_batches(monkeypatch, length, total):
  _, report = reporter()
  phases = []
  monkeypatch.setattr(report, "phase", lambda *x: phases.append(x))
  assert list(report.counted(_Sized(length), 5)) == ["a"]
  assert phases == [("evaluating", 5, 0, total)]


def test_eval_means_are_weighted():
  _, report = reporter()
  mean = lambda total, weight: WeightedSum(jnp.float32(total), jnp.float32(weight))
  parts = [
    (mean(6, 3), {"a": mean(3, 3), "own": mean(1, 1), "empty": mean(0, 0)}),
    (mean(10, 1), {"a": mean(5, 1), "own": mean(1, 3), "empty": mean(0, 0)}),
  ]
  out = report.eval_means(parts, lambda aux: {"b": aux.pop("a"), **aux}, tokens=8)
  # What has weights of its own is divided by those: (1 + 1) / (1 + 3).
  perplexity = math.exp(4)
  assert out == {"loss": 4, "perplexity": perplexity, "b": 2, "own": 0.5, "empty": 0}
  assert "perplexity" not in report.eval_means(parts, lambda aux: aux, tokens=0)
  huge = [(WeightedSum(jnp.float32(1e4), jnp.float32(1)), {})]
  assert report.eval_means(huge, lambda aux: aux, tokens=1)["perplexity"] == math.inf


@pytest.mark.parametrize(
  ("parts", "message"),
  [
    ([], "the evaluation data has no batch"),
    ([(WeightedSum(jnp.zeros(()), jnp.zeros(())), {})], "every mask is zero"),
  ],
)
def test_an_evaluation_of_nothing_is_an_error(parts, message):
  with pytest.raises(ValueError, match=message):
    reporter()[1].eval_means(parts, lambda aux: aux, tokens=1)


def test_parameters_that_multiply_tokens():
  tied = {"embed": {"embedding": np.ones((10, 4))}, "norm": {"scale": np.ones(4)}}
  head = {"lm_head": {"kernel": np.ones((4, 10))}}
  lora = {"lm_head": {"kernel_lora_a": np.ones((4, 2))}}
  assert matmul_params(tied, {}) == (40, 40)
  assert matmul_params({**tied, **head}, {}) == (40, 40), "a table that is looked up"
  assert matmul_params(lora, {**tied, **head}) == (48, 8)
