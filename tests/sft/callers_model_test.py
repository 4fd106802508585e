"""The caller's model is alive and current, whatever happens to a run."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.sft import trainers
from tests.sft.trainers import smalls, trainer
from tunix.sft.hooks import DataHooks, TrainingHooks
from tunix.sft.loop.interrupts import Stopped
from tunix.sft.losses import next_token_loss


@pytest.fixture(scope="module")
def after():
  """Weights after 0 to 4 steps of the run that all tests here repeat."""
  t = trainer(trainers.tokens_only())
  out = [trainers.leaves(t.model)]
  for batch in smalls(4):
    t.train_step(batch)
    out.append(trainers.leaves(t.model))
  assert not trainers.equal(out[0], out[1])
  return out


def assert_holds(model, weights):
  assert trainers.equal(trainers.leaves(model), weights)
  assert np.isfinite(model(np.zeros((1, 2), np.int32))).all()


def test_after_train_and_after_train_step(after):
  model = trainers.tokens_only()
  t = trainer(model)
  t.train(smalls(2))
  assert_holds(model, after[2])
  t.train_step(trainers.small(2))
  assert_holds(model, after[3])
  assert t.model is model


class At(TrainingHooks):
  """Does something after a step."""

  def __init__(self, step, action):
    self.step, self.action = step, action

  def on_train_step_end(self, trainer, train_step, train_loss):
    if train_step == self.step:
      self.action(trainer)


def test_in_hooks_and_in_data_hooks(after):
  model = trainers.tokens_only()
  seen = []

  class Both(TrainingHooks, DataHooks):
    def load_next_train_batch(self, trainer):
      assert_holds(model, after[trainer.train_steps])
      seen.append("data")
      return trainers.small(trainer.train_steps) if trainer.train_steps < 3 else None

    def on_train_step_start(self, trainer):
      assert_holds(model, after[trainer.train_steps])

    def on_train_step_end(self, trainer, train_step, train_loss):
      assert_holds(model, after[train_step])
      seen.append(train_step)

  both = Both()
  trainer(model).with_training_hooks(both).with_data_hooks(both).train(None)
  assert seen == ["data", "data", 1, "data", 2, "data", 3] or seen.count("data") == 4


def test_after_an_exception_in_the_data(after):
  def data():
    yield from smalls(3)
    raise OSError("the disk is gone")

  model = trainers.tokens_only()
  with pytest.raises(OSError, match="the disk is gone"):
    trainer(model).train(data())
  # The batch after a step is drawn while the device computes it.
  assert_holds(model, after[3])


def test_after_an_exception_in_a_hook(after):
  def fail(trainer):
    raise RuntimeError("hook")

  model = trainers.tokens_only()
  with pytest.raises(RuntimeError, match="hook"):
    trainer(model).with_training_hooks(At(2, fail)).train(smalls(4))
  assert_holds(model, after[2])


def test_after_an_exception_in_a_loss(after):
  def loss(model, **batch):
    if batch["input_tokens"].shape[1] == 9:
      raise ZeroDivisionError("traced")
    return next_token_loss(model, **batch).mean()

  model = trainers.tokens_only()
  t = trainer(model).with_loss_fn(loss)
  data = [*smalls(2), trainers.small(2, length=9)]
  with pytest.raises(ZeroDivisionError):
    t.train(data)
  assert t.train_steps == 2
  assert np.isfinite(model(np.zeros((1, 2), np.int32))).all()
  t.train_step(trainers.small(3))
  assert t.train_steps == 3


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_after_a_signal(after, signum):
  model = trainers.tokens_only()
  t = trainer(model).with_training_hooks(At(2, lambda _: os.kill(os.getpid(), signum)))
  with pytest.raises(Stopped, match="stopped after step 2; no checkpoint folder") as e:
    t.train(smalls(4))
  assert e.value.signum == signum and signal.getsignal(signum) is not None
  assert_holds(model, after[2])


def test_ctrl_c_during_train_step_is_not_swallowed(after):
  model = trainers.tokens_only()
  t = trainer(model)
  t.with_training_hooks(At(1, lambda _: os.kill(os.getpid(), signal.SIGINT)))
  with pytest.raises(KeyboardInterrupt):
    t.train_step(trainers.small(0))
  assert_holds(model, after[1])


def test_relatives_that_share_leaves_live_on(after):
  model = trainers.tokens_only()
  relatives = [(nnx.clone(model), after[0])]
  t = trainer(model)

  def clone(trainer):
    relatives.append((nnx.clone(model), after[trainer.train_steps]))
    arrays = jax.tree.map(
      lambda x: jax.device_put(x, x.sharding), nnx.state(model, nnx.Param)
    )
    twin = trainers.tokens_only(7)
    nnx.update(twin, arrays)
    relatives.append((twin, after[trainer.train_steps]))

  t.with_training_hooks(At(1, clone)).train(smalls(2))
  clone(t)
  t.train_step(trainers.small(2))
  clone(t)
  t.train_step(trainers.small(3))
  assert_holds(model, after[4])
  for relative, weights in relatives:
    got = trainers.leaves(relative, nnx.Param)
    assert all(got[k].tobytes() == weights[k].tobytes() for k in got)


def test_a_lora_base_and_its_buffers_are_left_alone():
  adapted = toys.model(lora_rank=2)
  twin = nnx.clone(adapted)
  kinds = nnx.LoRAParam, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
  lora, base = (trainers.leaves(twin, kind) for kind in kinds)
  buffers = jax.tree.leaves(nnx.state(adapted, kinds[1]))
  t = trainer(adapted)
  t.train([toys.batch(0)] * 2)
  assert all(a is b for a, b in zip(buffers, jax.tree.leaves(t._module.frozen)))
  now = jax.tree.leaves(nnx.state(adapted, kinds[1]))
  assert all(a is b for a, b in zip(buffers, now))
  assert trainers.equal(base, trainers.leaves(twin, kinds[1]))
  assert trainers.equal(lora, trainers.leaves(twin, kinds[0]))
  changed = trainers.leaves(adapted, kinds[0])
  assert all((changed[k] != lora[k]).any() for k in lora)


def test_weights_that_the_user_sets_are_used(after):
  """In training, in evaluation, in a hook, and by a trainer made before."""
  model = trainers.tokens_only()
  t = trainer(model, tx=optimizers.sgd(0.0))
  t.train(smalls(1))
  batch = trainers.small(5)
  before = t.eval_step(batch)["loss"]
  model.out.kernel[...] = jnp.zeros_like(model.out.kernel[...])
  model.out.bias[...] = jnp.zeros_like(model.out.bias[...])
  assert abs(before - np.log(toys.VOCAB)) > 1e-3
  np.testing.assert_allclose(t.eval_step(batch)["loss"], np.log(toys.VOCAB), 1e-6)
  np.testing.assert_allclose(float(t.train_step(batch)), np.log(toys.VOCAB), 1e-6)

  def restore(trainer):
    nnx.update(model, nnx.state(trainers.tokens_only(), nnx.Param))

  t.with_training_hooks(At(3, restore)).train([batch] * 2)
  np.testing.assert_allclose(trainers.history(t, "loss")[-1], before, rtol=1e-6)
