"""The losses of routers in train steps."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.sft import trainers
from tests.sft.dpo import preferences
from tunix.models.transformer.config import MoEConfig
from tunix.models.transformer.experts import routing
from tunix.sft.losses import next_token_loss
from tunix.utils import tree

EXPERTS = MoEConfig(num_experts=4, experts_per_token=2, hidden_dim=8)
NAMES = ("balance_loss", "z_loss", "entropy", "max_share")


def mixture(**weights):
  return toys.model(num_layers=1, moe=dataclasses.replace(EXPERTS, **weights))


def batch():
  whole = toys.batch(0, rows=2, length=8)
  return {name: whole[name] for name in ("input_tokens", "input_mask")}


def one_step(model, **options):
  """A step of SGD at rate 1: the parameters before, after, and the trainer."""
  before = trainers.leaves(model, nnx.Param)
  trainer = trainers.trainer(model, optimizers.sgd(1.0), **options)
  trainer.train([batch()])
  return before, trainers.leaves(trainer.model, nnx.Param), trainer


def test_a_step_adds_the_weighted_losses():
  model = mixture(balance_weight=0.5, z_weight=0.25)
  graph, state = nnx.split(model)

  def loss(state):
    model = nnx.merge(graph, state)
    with routing.logged(model) as logs:
      value = next_token_loss(model, **batch()).mean()
      sums = logs.sums()
    return value + 0.5 * sums.balance_loss() + 0.25 * sums.z_loss()

  value, gradient = jax.jit(jax.value_and_grad(loss))(state)
  before, after, trainer = one_step(model)
  for path, want in tree.flatten(gradient).items():
    step = before[path] - after[path]
    np.testing.assert_allclose(step, want, atol=2e-6, err_msg=path)
  assert trainers.history(trainer, "loss") == [pytest.approx(float(value), rel=1e-6)]
  assert {n: len(trainers.history(trainer, f"router/{n}")) for n in NAMES} == (
    dict.fromkeys(NAMES, 1)
  )
  assert 0.25 <= trainers.history(trainer, "router/max_share")[0] <= 0.5


def test_micro_batches_and_preferences_log_them():
  model = mixture(balance_weight=0.01)
  trainer = trainers.trainer(model, gradient_accumulation_steps=2)
  trainer.train([batch(), batch()])
  assert len(trainers.history(trainer, "router/entropy")) == 1
  policy = preferences.trainer(mixture(), mixture())
  policy.train([preferences.pairs()])
  assert len(trainers.history(policy, "router/entropy")) == 1
