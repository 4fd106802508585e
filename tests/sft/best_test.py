"""The best checkpoint and early stopping: decisions by hand, and runs that are cut."""

import json
import math

import jax.numpy as jnp
import pytest

from tests import optimizers
from tests.sft import trainers
from tests.sft.going_on_test import At, fail
from tunix.sft.best import Best, BestOptions, is_over, judge, record_for, value_of
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.peft_trainer import (
  CheckpointOptions,
  PeftTrainer,
  TrainingConfig,
  TrainResult,
)

LOSS = ("loss", False)


@pytest.mark.parametrize(
  ("values", "options", "best", "waited"),
  [
    # (values of the evaluations of steps 1, 2, ...) -> best step, waits after each.
    ([3, 2, 1], {}, 3, [0, 0, 0]),
    ([1, 2, 3], {}, 1, [0, 1, 2]),
    ([2, 2, 1], {}, 3, [0, 1, 0]),  # equal is no improvement, and the first one stays
    # Less than min_delta is waited for, and yet the best checkpoint.
    ([2.0, 1.75, 1.5], {"patience": 1, "min_delta": 0.5}, 3, [0, 1, 0]),
    ([2.0, 1.75, 1.75], {"patience": 1, "min_delta": 0.5}, 2, [0, 1, 2]),
    ([1, 2, 3], {"metric": "a", "greater_is_better": True}, 3, [0, 0, 0]),
    ([3, 1, 2], {"metric": "a", "greater_is_better": True}, 1, [0, 1, 2]),
    # What is not finite is never better, and never the best.
    ([math.nan, 2, math.inf, math.nan], {}, 2, [1, 0, 1, 2]),
    ([math.inf, -math.inf], {}, None, [1, 2]),
  ],
)
def test_decisions(values, options, best, waited):
  chosen = BestOptions(**options)
  record, seen = record_for(chosen, LOSS, None), []
  for step, value in enumerate(values, 1):
    record = judge(record, chosen, step, value)
    seen.append(record.waited)
  assert (record.step, seen) == (best, waited)
  assert record.value == (None if best is None else values[best - 1])


def test_patience_and_the_record_to_go_on_with():
  waited = Best(metric="loss", greater_is_better=False, step=4, value=1.5, waited=2)
  over = [is_over(waited, BestOptions(patience=n)) for n in (1, 2, 3)]
  assert over == [True, True, False] and not is_over(waited, BestOptions())
  assert record_for(BestOptions(), LOSS, waited) is waited
  other = BestOptions(metric="rewards/accuracy", greater_is_better=True)
  assert record_for(other, LOSS, waited) == Best(
    metric="rewards/accuracy", greater_is_better=True
  )
  assert record_for(BestOptions(), ("reward", True), None).metric == "reward"
  assert str(waited) == "best loss 1.5 at step 4"
  assert "no evaluation gave a finite loss" in str(
    record_for(other, LOSS, None)
  ).replace("rewards/accuracy", "loss")


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"patience": 0}, "patience is 0"),
    ({"min_delta": -1.0}, "min_delta is -1.0"),
    ({"min_delta": 0.1}, "min_delta is 0.1 and patience is not set"),
    (
      {"metric": "accuracy"},
      "'accuracy' and greater_is_better is not set",
    ),
    ({"greater_is_better": True}, "greater_is_better is True and metric is not set"),
  ],
)
def test_nonsense_is_refused(values, message):
  with pytest.raises(ValueError, match=message):
    BestOptions(**values)


def test_a_metric_that_is_not_measured_is_named():
  record = Best(metric="acuracy", greater_is_better=True)
  with pytest.raises(ValueError, match=r"best\.metric is .*: accuracy, loss$"):
    value_of(record, {"loss": 1.0, "accuracy": 0.5, "perf/rollout_sec": 1.0})
  with pytest.raises(TypeError, match="best is a dict"):
    TrainingConfig(best={})  # pyright: ignore[reportArgumentType]


# Runs whose evaluations give what stands here for the step.
CURVE = [9.0, 5.0, 4.0, 4.5, 4.25, 4.125, 3.0, 2.0]


class Scripted(PeftTrainer):
  def _eval_step(self, model, batch):
    return jnp.mean(batch["value"])


class Curve:
  def __init__(self, trainer):
    self.trainer = trainer

  def __iter__(self):
    return iter([{"value": jnp.full(4, CURVE[self.trainer.train_steps])}])


def run(folder, hooks=None, data=None, **best):
  config = TrainingConfig(
    best=BestOptions(**best),
    eval_every_n_steps=1,
    checkpoint_root_directory=str(folder / "checkpoints"),
    checkpointing_options=CheckpointOptions(save_every_n_steps=2, max_to_keep=1),
    metrics_logging_options=MetricsLoggerOptions(folder / "logs"),
    pbar_description=None,
  )
  t = Scripted(trainers.tokens_only(), optimizers.adam(1e-2), config)
  t.with_training_hooks(hooks)
  result = t.train(trainers.smalls(7) if data is None else data, Curve(t))
  t.close()
  return result, trainers.leaves(t.model)


def left(folder):
  """Steps that are kept, the run's record and metrics."""
  steps = sorted(int(p.name) for p in (folder / "checkpoints").iterdir())
  newest = folder / "checkpoints" / str(steps[-1]) / "progress"
  (file,) = newest.rglob("metadata")
  counts = json.loads(file.read_text())["counts"]
  return steps, counts, (folder / "logs" / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  folder = tmp_path_factory.mktemp("stopped")
  return folder, *run(folder, patience=3)


def test_a_run_stops_and_keeps_its_best_checkpoint(stopped):
  folder, result, _ = stopped
  best = Best(
    metric="loss", greater_is_better=False, step=2, value=4.0, mark=4.0, waited=3
  )
  assert result == TrainResult(steps=5, ended_by="early_stopping", best=best)
  said = "5 steps; best loss 4 at step 2; stopped early: no better one in 3 evaluations"
  assert str(result) == said
  steps, counts, _ = left(folder)
  assert steps == [2, 5], "the best one, and the newest"
  assert counts["best"]["waited"] == 3


@pytest.mark.parametrize("at", [2, 4, 5])
def test_a_run_that_is_cut_stops_where_it_would_have(stopped, tmp_path, at):
  with pytest.raises(ZeroDivisionError):
    run(tmp_path, At(at, fail), patience=3)
  result, weights = run(tmp_path, patience=3)
  assert result == stopped[1] and trainers.equal(weights, stopped[2])
  assert left(tmp_path) == left(stopped[0])


def test_a_run_that_has_stopped_stays_stopped_until_patience_is_raised(stopped):
  folder, result, weights = stopped
  before = left(folder)
  again, same = run(folder, patience=3)
  assert again == result and trainers.equal(same, weights) and left(folder) == before
  more, _ = run(folder, patience=4)
  assert (more.steps, more.ended_by, more.best.step) == (7, "data", 7)
  assert left(folder)[0] == [7]


def test_without_data_to_evaluate_nothing_is_trained():
  t = trainers.trainer(best=BestOptions())
  with pytest.raises(ValueError, match="'loss', and there is no evaluation data"):
    t.train(trainers.smalls(2))
  assert t.train_steps == 0
  plain = trainers.trainer(max_steps=1)
  assert plain.train(trainers.smalls(2)) == TrainResult(steps=1, ended_by="max_steps")
