"""Calls of `train` that follow one another, in one process or in a script run again."""

import os
import signal

import jax.numpy as jnp
import optax
import pytest

from tests import optimizers
from tests.sft import trainers
from tests.sft.trainers import history, smalls, trainer
from tunix.sft.hooks import TrainingHooks
from tunix.sft.loop.interrupts import Stopped
from tunix.sft.metrics.jsonl import read_jsonl
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions
from tunix.sft.peft_trainer import CheckpointOptions, PeftTrainer, TrainingConfig


class At(TrainingHooks):
  """Does something once, at the end of a step."""

  def __init__(self, step, do):
    self.step, self.do = step, do

  def on_train_step_end(self, trainer, train_step, train_loss):
    if train_step == self.step and self.do is not None:
      do, self.do = self.do, None
      do(trainer)


def fail(trainer):
  raise ZeroDivisionError


def saving(folder, **config):
  return {
    "checkpoint_root_directory": str(folder / "checkpoints"),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=1),
    "metrics_logging_options": MetricsLoggerOptions(folder / "logs"),
    **config,
  }


def weights_after(batches):
  t = trainer()
  t.train(batches)
  return trainers.leaves(t.model)


@pytest.mark.parametrize("interrupt", [fail, lambda t: os.kill(os.getpid(), 15)])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_generator_goes_on_where_it_stands(interrupt, parts):
  data = smalls(8)
  stream = (batch for batch in data)
  t = trainer(gradient_accumulation_steps=parts)
  t.with_training_hooks(At(2, interrupt))
  with pytest.raises((ZeroDivisionError, Stopped)):
    t.train(stream)
  t.train(stream)
  assert (t.train_steps, t.iter_steps) == (8 // parts, 8)
  whole = trainer(gradient_accumulation_steps=parts)
  whole.train(data)
  assert trainers.equal(trainers.leaves(t.model), trainers.leaves(whole.model))


def test_a_batch_given_by_hand_moves_no_place_in_the_data():
  t = trainer().with_training_hooks(At(2, fail))
  with pytest.raises(ZeroDivisionError):
    t.train(smalls(4))
  t.train_step(trainers.small(9))
  t.train(smalls(4))
  assert t.iter_steps == 5


def test_a_generator_loses_nothing_to_a_failed_first_evaluation():
  def failing():
    raise ZeroDivisionError
    yield

  data = smalls(3)
  stream = (batch for batch in data)
  t = trainer()
  with pytest.raises(ZeroDivisionError):
    t.train(stream, failing())
  t.train(stream)
  assert (t.train_steps, t.iter_steps) == (3, 3)


@pytest.mark.parametrize("at", [2, 4, 5, 11])
def test_a_script_of_several_calls_resumes_in_the_right_one(tmp_path, at):
  data = smalls(4)

  def script(hooks=None):
    t = trainer(**saving(tmp_path))
    t.with_training_hooks(hooks)
    for _ in range(3):
      t.train(data)
    t.close()
    return t

  with pytest.raises(ZeroDivisionError):
    script(At(at, fail))
  t = script()
  assert t.train_steps == 12
  assert trainers.equal(trainers.leaves(t.model), weights_after(data * 3))
  lines = read_jsonl(tmp_path / "logs" / "metrics.jsonl")
  assert [line["step"] for line in lines] == list(range(1, 13))
  assert script().train_steps == 12, "a finished script does nothing"


def test_a_checkpoint_taken_before_an_evaluation_is_followed_by_it(tmp_path):
  def run(folder, hooks=None):
    t = trainer(**saving(folder, eval_every_n_steps=2))
    t.with_training_hooks(hooks).train(smalls(4), smalls(1))
    t.close()
    return (folder / "logs" / "metrics.jsonl").read_bytes()

  def save_and_fail(t):
    t.save_checkpoint()
    fail(t)

  whole = run(tmp_path / "whole")
  for at in (2, 4):
    cut = tmp_path / f"cut{at}"
    with pytest.raises(ZeroDivisionError):
      run(cut, At(at, save_and_fail))
    assert run(cut) == whole


def test_a_signal_during_an_evaluation_ends_it(tmp_path):
  seen = []

  def batches():
    for batch in smalls(5):
      seen.append(batch)
      if len(seen) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
      yield batch

  class Evaluation:
    def __iter__(self):
      return batches()

  t = trainer(**saving(tmp_path))
  with pytest.raises(Stopped, match="stopped after step 0; a checkpoint is saved"):
    t.train(smalls(2), Evaluation())
  assert len(seen) == 2
  t.train(smalls(2), Evaluation())
  assert len(history(t, "loss", "eval")) == 2


def test_data_that_fails_loses_no_step(tmp_path):
  def data():
    yield from smalls(3)
    raise ZeroDivisionError

  options = saving(tmp_path) | {
    "checkpointing_options": CheckpointOptions(save_every_n_steps=100)
  }
  t = trainer(**options)
  with pytest.raises(ZeroDivisionError):
    t.train(data())
  t._run._checkpoints.wait()
  assert trainer(**options).train_steps == 3


def test_all_metrics_are_in_the_file_when_a_call_ends(tmp_path):
  t = trainer(metrics_logging_options=MetricsLoggerOptions(tmp_path))
  t.train(smalls(3))
  lines = read_jsonl(tmp_path / "metrics.jsonl")
  assert [line["step"] for line in lines] == [1, 2, 3]


def test_a_second_run_into_a_folder_does_not_mix_with_the_first(tmp_path):
  for _ in range(2):
    trainer(metrics_logging_options=MetricsLoggerOptions(tmp_path)).train(smalls(2))
  for name in ("metrics.jsonl", "metrics.jsonl.1"):
    assert [line["step"] for line in read_jsonl(tmp_path / name)] == [1, 2]


def test_a_shared_logger_keeps_what_it_has():
  logger = MetricsLogger()
  logger.log("", "before", 1.0, "train", 0)
  PeftTrainer(trainers.tokens_only(), optimizers.sgd(1), TrainingConfig(), logger)
  assert logger.get_metric_history("", "before", "train").tolist() == [1]


def test_only_one_of_the_steps_overridden():
  class PerRow(PeftTrainer):
    def _eval_step(self, model, batch):
      return jnp.mean(batch["input_tokens"].shape[0] * 0.0 + 4.0)

  t = PerRow(trainers.tokens_only(), optimizers.sgd(1), TrainingConfig())
  t.train(smalls(1), [trainers.small(0, rows=4), trainers.small(1, rows=1)])
  assert history(t, "loss", "eval")[0] == 4.0
  (ready,), _ = t._ready([trainers.small(1, rows=1)], 4)
  assert ready["input_tokens"].shape[0] == 1


def test_aux_none_and_names_that_are_taken():
  class Silent(PeftTrainer):
    def _post_process_train_step(self, aux):
      return None

  def loss(model, **batch):
    return jnp.mean(model(batch["input_tokens"])), {"grad_norm": 1.0}

  t = Silent(trainers.tokens_only(), optimizers.sgd(1), TrainingConfig())
  t.with_loss_fn(loss, has_aux=True).train(smalls(1))
  t = trainer().with_loss_fn(loss, has_aux=True)
  with pytest.raises(ValueError, match="aux has 'grad_norm', a name of the trainer"):
    t.train(smalls(1))


def unlearnable(model, **batch):
  return jnp.sum(model(batch["input_tokens"])) * jnp.nan


def test_a_loss_that_is_no_number_is_said_once(caplog):
  # The optimizer drops such a gradient, so the weights stay as they are.
  t = trainer(tx=optax.apply_if_finite(optimizers.sgd(1), 9)).with_loss_fn(unlearnable)
  t.train(smalls(3))
  assert caplog.text.count("the loss of step 1 is nan: lower the learning rate") == 1


@pytest.mark.parametrize("steps", [1, 3])
def test_weights_that_are_no_numbers_end_the_run_and_are_not_saved(tmp_path, steps):
  root = {"checkpoint_root_directory": str(tmp_path), "max_steps": steps}
  t = trainer(tx=optimizers.sgd(1), **root).with_loss_fn(unlearnable)
  # A step is looked at while the next one is computed.
  with pytest.raises(RuntimeError, match=f"not finite after step {min(steps, 2)},"):
    t.train(smalls(3))
  t.close()
  assert trainer(tx=optimizers.sgd(1), **root).train_steps == 0


def test_a_last_update_that_overflows_is_seen():
  overflows = optax.scale(-float("inf"))  # the loss and its gradient are finite
  # The remedy has a name in commands and one in Python.
  remedy = r"training\.max_grad_norm, in Python with optax\.clip_by_global_norm"
  with pytest.raises(
    RuntimeError, match=f"a weight is not finite after step 1.*{remedy}"
  ):
    trainer(tx=overflows, max_steps=1).train(smalls(1))
