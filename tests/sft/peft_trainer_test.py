"""The loop: cadence, metrics, hooks, arguments."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import optimizers, toys
from tests.sft import trainers
from tests.sft.trainers import history, smalls, trainer
from tunix.sft.hooks import DataHooks, TrainingHooks
from tunix.sft.losses import next_token_loss
from tunix.sft.metrics.jsonl import read_jsonl
from tunix.sft.metrics_logger import (
  JsonlBackend,
  MetricsLogger,
  MetricsLoggerOptions,
)
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.profiler import ProfilerOptions


class Diary(TrainingHooks):
  """Writes down every call, with the step."""

  def __init__(self):
    self.calls, self.losses = [], []

  def on_train_start(self, trainer):
    self.calls.append(("start", trainer.train_steps))

  def on_train_end(self, trainer):
    self.calls.append(("end", trainer.train_steps))

  def on_train_step_start(self, trainer):
    self.calls.append(("step", trainer.train_steps))

  def on_train_step_end(self, trainer, train_step, train_loss):
    assert train_step == trainer.train_steps
    self.calls.append(("stepped", train_step))
    self.losses.append(float(train_loss))

  def on_eval_step_start(self, trainer):
    self.calls.append(("eval", trainer.train_steps))

  def on_eval_step_end(self, trainer, eval_loss):
    self.calls.append(("evaluated", trainer.train_steps))
    assert np.isfinite(eval_loss)


def test_a_run_calls_hooks_in_order_and_the_loss_falls():
  diary = Diary()
  t = trainer(eval_every_n_steps=2).with_training_hooks(diary)
  t.train([trainers.small(0)] * 3, smalls(1))
  assert diary.calls == [
    *[("start", 0), ("eval", 0), ("evaluated", 0)],
    *[("step", 0), ("stepped", 1), ("step", 1), ("stepped", 2)],
    *[("eval", 2), ("evaluated", 2)],
    *[("step", 2), ("stepped", 3), ("eval", 3), ("evaluated", 3), ("end", 3)],
  ]
  assert diary.losses[0] > diary.losses[1] > diary.losses[2]
  assert history(t, "loss") == diary.losses
  assert (t.train_steps, t.iter_steps, t.optimizer.step) == (3, 3, 3)


def test_any_object_with_some_of_the_hooks_will_do():
  class Only:
    def on_train_step_end(self, trainer, train_step, train_loss):
      self.last = train_step

  t = trainer().with_training_hooks(only := Only())
  t.train(smalls(2))
  assert only.last == 2


def test_train_inside_train_is_refused_and_train_step_is_not():
  class Nested(TrainingHooks):
    def on_train_step_end(self, trainer, train_step, train_loss):
      if train_step == 1:
        trainer.train_step(trainers.small(5))
      else:
        trainer.train(smalls(1))

  t = trainer().with_training_hooks(Nested())
  with pytest.raises(RuntimeError, match="train was called while this trainer trains"):
    t.train(smalls(3))
  t.with_training_hooks(None).train(smalls(1))  # the refused call leaves nothing


def test_data_hooks_supply_both_kinds_of_batches():
  class Data(DataHooks):
    def __init__(self):
      self.train, self.eval = smalls(3), []

    def load_next_train_batch(self, trainer):
      return self.train.pop(0) if self.train else None

    def load_next_eval_batch(self, trainer):
      self.eval = [] if len(self.eval) == 2 else self.eval + [trainers.small(9)]
      return self.eval[-1] if self.eval else None

  t = trainer().with_data_hooks(Data())
  t.train(None)
  assert t.train_steps == 3 and len(history(t, "loss", "eval")) == 2
  plain = trainer()
  plain.train(smalls(3), [trainers.small(9)] * 2)
  assert history(t, "loss") == history(plain, "loss")
  assert history(t, "loss", "eval") == history(plain, "loss", "eval")


def test_evaluation_happens_first_last_and_every_n():
  seen = []

  class Evaluations(TrainingHooks):
    def on_eval_step_end(self, trainer, eval_loss):
      seen.append(trainer.train_steps)

  for every in (None, 2, 5):
    t = trainer(eval_every_n_steps=every).with_training_hooks(Evaluations())
    t.train(smalls(5), smalls(1))
  assert seen == [0, 5, 0, 2, 4, 5, 0, 5]


def test_evaluation_is_weighted_by_tokens():
  one, other = trainers.small(0), trainers.small(1)
  other = {**other, "input_mask": other["input_mask"] * (np.arange(4) < 1)[:, None]}
  t = trainer()
  parts = [t.eval_step(b)["loss"] for b in (one, other)]
  weights = [b["input_mask"][:, 1:].sum() for b in (one, other)]
  t.train([one], [one, other])
  want = np.average(parts, weights=weights)
  got = history(t, "loss", "eval")[0]
  np.testing.assert_allclose(got, want, rtol=1e-6)
  assert abs(got - np.mean(parts)) > 1e-4, "the plain mean would pass as well"
  np.testing.assert_allclose(history(t, "perplexity", "eval")[0], np.exp(got))


def test_max_steps_stops_and_another_call_does_nothing():
  for config in ({"max_steps": 2}, {"num_train_steps": 2}):
    t = trainer(**config)
    data = iter(smalls(5))
    t.train(data)
    assert t.train_steps == 2 and len(list(data)) == 3, "nothing is drawn in vain"
    before = trainers.leaves(t.model)
    t.train(smalls(5))
    assert t.train_steps == 2 and trainers.equal(before, trainers.leaves(t.model))


def test_a_second_call_starts_the_data_anew():
  t = trainer()
  t.train(smalls(3))
  t.train(smalls(2))
  assert (t.train_steps, t.iter_steps) == (5, 5)
  whole = trainer()
  whole.train(smalls(3) + smalls(2))
  assert trainers.equal(trainers.leaves(t.model), trainers.leaves(whole.model))


def test_an_interrupted_call_goes_on_in_the_data(caplog):
  class Once(TrainingHooks):
    def on_train_step_end(self, trainer, train_step, train_loss):
      if train_step == 2 and not hasattr(self, "failed"):
        self.failed = True
        raise RuntimeError("hook failed")

  t = trainer().with_training_hooks(Once())
  with pytest.raises(RuntimeError, match="hook failed"):
    t.train(smalls(5))
  t.train(smalls(5))
  assert "dropping the 2 micro-batches" in caplog.text
  whole = trainer()
  whole.train(smalls(5))
  assert trainers.equal(trainers.leaves(t.model), trainers.leaves(whole.model))


def test_no_batches_are_errors():
  with pytest.raises(ValueError, match="the training data gave no batch"):
    trainer().train([])
  with pytest.raises(ValueError, match="no training data: pass an iterable"):
    trainer().train(None)
  with pytest.raises(ValueError, match="the evaluation data has no batch"):
    trainer().train(smalls(3), iter([]))
  empty = {**trainers.small(0), "input_mask": np.zeros((4, 8))}
  with pytest.raises(ValueError, match="no trained token"):
    trainer().train([empty])
  with pytest.raises(ValueError, match="the evaluation data has no trained token"):
    trainer().train(smalls(1), [empty])


def test_metric_names_and_prefix():
  t = trainer(metrics_prefix="actor", learning_rate=0.25)
  t.train(smalls(2), smalls(1))
  names = {"loss", "perplexity", "grad_norm", "learning_rate", "trained_tokens"}
  names |= {"step_time_sec", "steps_per_sec", "tokens_per_sec", "tflops_per_sec"}
  logger = t.metrics_logger
  for name in names:
    assert logger.metric_exists("actor", name, "train"), name
    assert not logger.metric_exists("", name, "train")
  trained = logger.get_metric_history("actor", "trained_tokens", "train")
  assert trained.tolist() == [b["input_mask"][:, 1:].sum() for b in smalls(2)]


def test_accumulation_draws_micro_batches_and_a_step_takes_a_global_batch():
  whole = toys.batch(0, rows=8, length=8)
  whole.pop("segment_ids")
  parts = toys.cut(whole, 2)
  one, drawn, split = (
    trainer(tx=optimizers.sgd(0.5), gradient_accumulation_steps=n) for n in (1, 2, 2)
  )
  one.train([whole])
  drawn.train(parts)
  split.train_step(whole)
  assert (drawn.train_steps, drawn.iter_steps) == (1, 2)
  assert split.train_steps == 1
  want = trainers.leaves(one.model)
  for t in (drawn, split):
    for name, value in trainers.leaves(t.model).items():
      np.testing.assert_allclose(value, want[name], atol=1e-6)
  with pytest.raises(ValueError, match="3 rows cannot be cut into 2"):
    split.train_step({k: v[:3] for k, v in whole.items()})


def test_a_short_last_window_counts_right_and_compiles_nothing():
  full, last = trainers.small(0), trainers.small(1)
  short = {k: v[:3] for k, v in last.items()}
  t = trainer(tx=optimizers.sgd(0.5), gradient_accumulation_steps=2)
  with trainers.compilations() as names:
    t.train([full, full, short])
  assert (t.train_steps, t.iter_steps) == (2, 3)
  assert names.count("jit(step)") == 1, names
  want = trainer(tx=optimizers.sgd(0.5))
  want.train([full, short])
  for name, value in trainers.leaves(t.model).items():
    np.testing.assert_allclose(value, trainers.leaves(want.model)[name], atol=1e-6)


def test_eval_batches_do_not_change_the_rows_that_train():
  t = trainer()
  t.train(smalls(1, rows=2), smalls(1, rows=8))
  assert t._progress.train_rows == 2
  t.train(smalls(1, rows=1))
  assert t._progress.train_rows == 2


def test_skip_jit_runs_python_and_gives_the_same():
  concrete = []

  def loss(model, **batch):
    concrete.append(not isinstance(batch["input_tokens"], jax.core.Tracer))
    return next_token_loss(model, **batch)

  jitted, plain = (trainer(tx=optimizers.sgd(0.1)).with_loss_fn(loss) for _ in range(2))
  jitted.train(smalls(2))
  assert not any(concrete)
  concrete.clear()
  plain.train(smalls(2), skip_jit=True)
  assert concrete == [True, True]
  for name, value in trainers.leaves(plain.model).items():
    np.testing.assert_allclose(value, trainers.leaves(jitted.model)[name], atol=1e-6)


def test_metrics_go_to_the_logger_and_the_files(tmp_path):
  options = MetricsLoggerOptions(tmp_path)
  t = trainer(metrics_logging_options=options)
  t.train(smalls(2))
  t.close()
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(line)["loss"] for line in lines] == history(t, "loss")
  mine = MetricsLogger()
  t = PeftTrainer(
    trainers.tokens_only(),
    optimizers.sgd(1),
    TrainingConfig(pbar_description=None),
    metrics_logger=mine,
  )
  t.train(smalls(2))
  assert len(mine.get_metric_history("", "loss", "train")) == 2


def test_the_profiler_traces_the_steps_of_both_ways_to_train(tmp_path):
  def traced(folder):
    return len(list(folder.rglob("*.trace.json.gz")))

  options = [ProfilerOptions(tmp_path / name, 1, 2) for name in "ab"]
  t = trainer(profiler_options=options[0])
  t.train(smalls(4))
  assert traced(tmp_path / "a") == 1
  t = trainer(profiler_options=options[1])
  t.train_step(trainers.small(0))
  t.train_step(trainers.small(1))
  assert t._reporter._profiler.active, "it goes on over several calls"
  t.train_step(trainers.small(2))
  assert not t._reporter._profiler.active and traced(tmp_path / "b") == 1


def test_the_progress_bar_shows_the_loss(monkeypatch):
  from tunix.sft.steps import step_metrics

  bars = []

  class Bar(step_metrics.ProgressBar):
    def __init__(self, *args, **kwargs):
      super().__init__(*args, **kwargs)
      self.description = args[3]
      bars.append(self)

  monkeypatch.setattr(step_metrics, "ProgressBar", Bar)
  t = trainer(pbar_description="Fitting")
  t.train(smalls(2))
  (bar,) = bars
  assert bar.description == "Fitting"
  assert bar.shown == {"loss": f"{history(t, 'loss')[-1]:.4g}"}
  trainer(pbar_description=None).train(smalls(1))
  assert len(bars) == 1


def test_steps_in_flight_are_bounded(monkeypatch):
  from tunix.sft.steps import step_metrics

  seen = []

  class Throttler(step_metrics.InflightThrottler):
    def __init__(self, limit):
      seen.append(limit)
      super().__init__(limit)

  monkeypatch.setattr(step_metrics, "InflightThrottler", Throttler)
  trainer(max_inflight_computations=7).train(smalls(1))
  assert seen == [7]


def test_a_lowered_step_is_the_one_that_runs():
  t = trainer()
  lowered = t.lower_train_step(trainers.small(0))
  memory = lowered.compile().memory_analysis()
  assert memory.temp_size_in_bytes > 0 and t.train_steps == 0
  assert t._progress.train_rows == 0, "nothing is padded to what was not trained"
  t.train_step(trainers.small(0))
  assert t.train_steps == 1


def test_close_may_be_called_twice_and_the_model_lives(tmp_path):
  t = trainer(checkpoint_root_directory=str(tmp_path))
  t.train(smalls(1))
  t.close()
  t.close()
  assert np.isfinite(t.model(np.zeros((1, 2), np.int32))).all()
  with pytest.raises(RuntimeError, match="is closed"):
    t.train(smalls(1))
  assert t.train_steps == 1, "refused before anything is trained"


def test_metrics_are_written_although_the_last_checkpoint_is_not(tmp_path, monkeypatch):
  def full(manager):
    raise OSError("No space left")

  logging = MetricsLoggerOptions(
    tmp_path, backend_factories=[lambda: JsonlBackend(tmp_path)]
  )
  t = trainer(
    checkpoint_root_directory=str(tmp_path / "c"), metrics_logging_options=logging
  )
  t.train_step(trainers.small(0))
  monkeypatch.setattr("orbax.checkpoint.CheckpointManager.close", full)
  with pytest.raises(OSError, match="could not be written"):
    t.close()
  assert [x["step"] for x in read_jsonl(tmp_path / "metrics.jsonl")] == [1]


def test_the_metrics_logger_is_there_to_read():
  t = trainers.trainer(trainers.wide())
  t.train(trainers.smalls(2))
  assert len(t.metrics_logger.get_metric_history("", "loss", "train")) == 2


def test_a_run_that_ends_before_max_steps_says_so(caplog):
  result = trainers.trainer(max_steps=7).train(trainers.smalls(2))
  (note,) = result.notes
  assert "the data ended after 2 steps, and max_steps is 7" in note
  assert note in str(result) and note in caplog.text


def test_a_run_without_gradients_says_so():
  t = trainers.trainer().with_loss_fn(lambda model, **batch: jnp.float32(1.0))
  (note,) = t.train(trainers.smalls(2)).notes
  assert "the gradient was 0 in all 2 steps" in note
