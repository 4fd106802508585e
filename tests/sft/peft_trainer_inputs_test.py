"""What a trainer is given: model, optimizer, loss, batches, subclasses."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.sft import trainers
from tests.sft.trainers import history, smalls, trainer
from tunix.ops.reductions import WeightedSum
from tunix.sft.loop.trainer_arguments import named_metrics
from tunix.sft.losses import next_token_loss
from tunix.sft.peft_trainer import PeftTrainer, PeftTrainerConfig, TrainingConfig


def rates(tx=None, **config):
  t = trainer(tx=tx, **config)
  t.train(smalls(3))
  logger = t.metrics_logger
  if not logger.metric_exists("", "learning_rate", "train"):
    return None
  return history(t, "learning_rate")


def test_the_learning_rate_metric():
  schedule = optax.linear_schedule(0.5, 0.0, 4)
  assert rates(optax.inject_hyperparams(optax.sgd)(schedule)) == [0.5, 0.375, 0.25]
  assert rates(optimizers.sgd(schedule), learning_rate=schedule) == [0.5, 0.375, 0.25]
  assert rates(optimizers.sgd(0.5), learning_rate=0.5) == [0.5, 0.5, 0.5]
  assert rates(optimizers.sgd(schedule)) is None


def test_learning_rate_alone_gives_adamw():
  t = PeftTrainer(
    trainers.tokens_only(), training_config=TrainingConfig(learning_rate=1e-2)
  )
  want = trainer(tx=optimizers.adamw(1e-2))
  for each in (t, want):
    each.train(smalls(2))
  assert trainers.equal(trainers.leaves(t.model), trainers.leaves(want.model))
  with pytest.raises(ValueError, match=r"no optimizer: pass .*learning_rate="):
    PeftTrainer(trainers.tokens_only())


def test_arguments_of_the_wrong_kind():
  model = trainers.tokens_only()
  with pytest.raises(TypeError, match=r"is a TrainingConfig; .*PeftTrainer\(model,"):
    PeftTrainer(TrainingConfig())  # pyright: ignore[reportArgumentType]
  with pytest.raises(TypeError, match=r"training_config is a dict"):
    PeftTrainer(model, optimizers.sgd(1), {"max_steps": 3})  # pyright: ignore
  with pytest.raises(TypeError, match="optimizer is a float"):
    PeftTrainer(model, 1e-3)
  t = trainer(model)
  for wrong in ((model, trainers.small(0)), (model,)):
    with pytest.raises(TypeError, match=r"trainer.train_step\(batch\)"):
      t.train_step(*wrong)
  assert PeftTrainerConfig is TrainingConfig


def test_an_nnx_optimizer_is_unwrapped_or_refused():
  model = trainers.tokens_only()
  fresh = nnx.Optimizer(model, optimizers.adam(1e-2), wrt=nnx.Param)
  t, want = trainer(model, fresh), trainer()
  for each in (t, want):
    each.train(smalls(2))
  assert trainers.equal(trainers.leaves(t.model), trainers.leaves(want.model))
  gradient = nnx.grad(lambda m: jnp.sum(m.out.kernel[...]))(model)
  fresh.update(model, gradient)
  with pytest.raises(ValueError, match="has made 1 updates"):
    trainer(model, fresh)


def test_losses_of_all_kinds_update_alike():
  """All rows have equally many tokens, so that the two weightings agree."""
  data = [{**b, "input_mask": np.ones((4, 8), np.int32)} for b in smalls(2)]

  def scalar(model, **batch):
    return next_token_loss(model, **batch).mean()

  def pair(model, **batch):
    return scalar(model, **batch), {"rows": batch["input_mask"].shape[0]}

  def weighted_pair(model, **batch):
    return next_token_loss(model, **batch), {"rows": 4}

  want = trainer()
  want.train(data)
  for loss, has_aux in ((scalar, False), (pair, True), (weighted_pair, True)):
    t = trainer().with_loss_fn(loss, has_aux=has_aux)
    t.train(data, data)
    got, expected = trainers.leaves(t.model), trainers.leaves(want.model)
    for name in got:
      np.testing.assert_allclose(got[name], expected[name], atol=2e-5)
    if has_aux:
      assert history(t, "rows") == [4, 4] == history(t, "rows", "eval")


@pytest.mark.parametrize("has_aux", [False, True])
def test_has_aux_must_say_what_the_loss_does(has_aux):
  def loss(model, **batch):
    value = next_token_loss(model, **batch)
    return value if has_aux else (value, {})

  t = trainer().with_loss_fn(loss, has_aux=has_aux)
  with pytest.raises(TypeError, match=f"with_loss_fn\\(fn, has_aux={not has_aux}\\)"):
    t.train_step(trainers.small(0))


def test_aux_is_a_dict_whose_names_are_all_kept():
  def loss(model, aux, **batch):
    return next_token_loss(model, **batch), aux

  t = trainer().with_loss_fn(
    lambda model, **b: loss(model, {"weight": 7.0, "extra": jnp.float32(3)}, **b), True
  )
  t.train(smalls(2))
  assert history(t, "weight") == [7, 7] and history(t, "extra") == [3, 3]
  t = trainer().with_loss_fn(lambda model, **b: loss(model, jnp.float32(1), **b), True)
  with pytest.raises(TypeError, match="aux is an ArrayImpl"):
    t.train_step(trainers.small(0))
  for value, form in [
    (jnp.ones(3), r"an ArrayImpl of shape \(3,\)"),
    ({"a": 1.0}, "a dict"),
  ]:
    with pytest.raises(TypeError, match=f"'extra' in the loss's aux is {form}"):
      named_metrics({"extra": value})


def test_batches_of_any_kind_with_functions_for_them():
  def loss(model, numbers, target):
    hidden = model.embed(numbers)
    return jnp.mean((hidden.sum((1, 2)) - target) ** 2)

  data = [(np.full((4, 2), i), [np.full(4, 1.0, np.float32)]) for i in range(3)]
  t = trainer().with_loss_fn(loss)
  t.with_gen_model_input_fn(lambda b: {"numbers": b[0], "target": b[1][0]})
  t.train(data, data)
  logger = t.metrics_logger
  assert len(history(t, "loss")) == 3
  for name in ("perplexity", "tokens_per_sec", "trained_tokens"):
    assert not logger.metric_exists("", name, "train"), name
  assert not logger.metric_exists("", "perplexity", "eval")


class Doubled(PeftTrainer):
  """Overrides everything that is meant for subclasses."""

  def _prepare_inputs(self, batch):
    return {"input_tokens": np.stack(batch), "input_mask": np.ones((2, 4), np.int32)}

  def _train_step(self, model, batch):
    loss = next_token_loss(model, **batch)
    return WeightedSum(2 * loss.total, loss.weight), {"hidden": 5.0}

  def _eval_step(self, model, batch):
    return next_token_loss(model, **batch)

  def _post_process_train_step(self, aux):
    return {"shown": aux["hidden"]}

  def _post_process_eval_step(self, aux):
    return {"evaluations": 1.0}


def test_subclasses_change_what_a_step_computes():
  batch = [np.arange(4), np.arange(4)]  # not a pytree of arrays with a batch dimension
  t = Doubled(
    trainers.tokens_only(), optimizers.sgd(0.0), TrainingConfig(pbar_description=None)
  )
  doubled = float(t.train_step(batch))
  single = t.eval_step(batch)
  np.testing.assert_allclose(doubled, 2 * single["loss"], rtol=1e-6)
  assert single["evaluations"] == 1
  t._reporter.flush()
  assert history(t, "shown") == [5]


class Centred(PeftTrainer):
  """Weighs every row by how far it is from the mean of the global batch."""

  def _prepare_window(self, batches):
    mean = np.mean([b["input_tokens"].mean() for b in batches])
    return [
      {**b, "loss_weights": np.full(b["input_tokens"].shape, mean, np.float32)}
      for b in batches
    ]


def test_a_subclass_sees_a_whole_global_batch():
  config = TrainingConfig(pbar_description=None, gradient_accumulation_steps=2)
  t = Centred(trainers.tokens_only(), optimizers.sgd(0.0), config)
  t.train([trainers.small(0), trainers.small(1)])
  micro = [trainers.small(i) for i in range(2)]
  mean = np.mean([b["input_tokens"].mean() for b in micro])
  trained = sum(float(np.sum(b["input_mask"][:, 1:])) for b in micro)
  t._reporter.flush()
  np.testing.assert_allclose(history(t, "trained_tokens"), [mean * trained], rtol=1e-6)


def test_changing_the_loss_between_steps_takes_effect():
  t = trainer(tx=optimizers.sgd(0.0))
  plain = float(t.train_step(trainers.small(0)))
  t.with_loss_fn(lambda model, **b: 3 * next_token_loss(model, **b).mean())
  np.testing.assert_allclose(float(t.train_step(trainers.small(0))), 3 * plain, 1e-6)
  t.with_gen_model_input_fn(lambda b: {**b, "input_mask": 0 * b["input_mask"]})
  assert float(t.train_step(trainers.small(0))) == 0


def test_packed_rows_are_refused_where_they_would_leak():
  packed = toys.packed(toys.batch(0, rows=4, length=8))
  with pytest.raises(ValueError, match=r"packed .* takes neither segment_ids nor"):
    trainer().train([packed])
  with pytest.raises(ValueError, match=r"packed .* takes neither segment_ids nor"):
    trainer().eval_step(packed)
  model = toys.FourArguments(nnx.Rngs(0))
  trainer(model).train([packed])
