"""What the KL estimators do to the expected gradient, in the reward and in the loss.

Over all completions of a toy policy pi with reference ref. Two gradients matter: that
of KL(pi || ref) of whole completions, which is what one wants, and the sum over
prefixes of the gradient of the divergence of the next token alone, at the frequency
with which prefixes are visited, which leaves out what a token does to later prefixes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.toy_policy import Toy
from tunix.ops import kl, policy_gradient as pg
from tunix.ops.advantages import ADVANTAGES, gae
from tunix.ops.reductions import aggregate

SUM = "sequence-mean-token-sum"


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="module", params=[1, 3], ids=["one-token", "three-tokens"])
def toy(request):
  with jax.enable_x64(True):
    return Toy(length=request.param)


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def divergence(toy):
  """Gradient of KL(pi || ref) of whole completions."""
  ref = toy.log_probability(jnp.asarray(toy.others))

  def value(logits):
    logps = toy.log_probability(logits)
    return jnp.sum(jnp.exp(logps) * (logps - ref))

  return toy.gradient(value)


def next_token(toy, reverse=True):
  """Sum over prefixes of the gradient of KL(pi || ref), or of KL(ref || pi)."""
  visits, ref = toy.visits(toy.logits), jax.nn.log_softmax(jnp.asarray(toy.others))

  def value(logits):
    logps = jax.nn.log_softmax(logits)
    p, gap = (logps, logps - ref) if reverse else (ref, ref - logps)
    return jnp.sum(visits[:, None] * jnp.exp(p) * gap)

  return toy.gradient(value)


def in_the_loss(toy, terms):
  """Expected gradients of terms of (log-probabilities, the reference's, mask)."""
  ref = toy.logps(jnp.asarray(toy.others))

  def losses(logps, group):
    mask = jnp.asarray(toy.mask)[group]
    values = [term(logps, ref[group], mask) for term in terms]
    return jnp.stack([aggregate(x, mask, SUM).mean() for x in values])

  return toy.expected_gradients(losses, 1)


def test_in_the_loss(toy):
  ratio = lambda logps, mask: pg.log_ratio(logps, None, mask)
  k1, k2, k3, corrected1, corrected3 = in_the_loss(
    toy,
    [
      lambda logps, ref, mask: kl.k1(logps, ref),
      lambda logps, ref, mask: kl.k2(logps, ref),
      lambda logps, ref, mask: kl.k3(logps, ref),
      lambda logps, ref, mask: kl.corrected(kl.k1(logps, ref), ratio(logps, mask)),
      lambda logps, ref, mask: kl.corrected(kl.k3(logps, ref), ratio(logps, mask)),
    ],
  )
  close(k1, 0.0)
  close(k2, next_token(toy))
  close(k3, next_token(toy, reverse=False))
  close(corrected1, next_token(toy))
  close(corrected3, next_token(toy))
  assert np.linalg.norm(k2 - k3) > 0.05 * np.linalg.norm(k2)
  if len(toy.logits) == 1:  # one token: no later prefixes
    close(k2, divergence(toy))
  else:
    assert np.linalg.norm(k2 - divergence(toy)) > 0.05 * np.linalg.norm(k2)


def test_exact_in_the_loss(toy):
  # Here the loss needs the distributions, so the expectation over prefixes is taken
  # with their visits.
  visits = toy.visits(toy.logits)
  value = lambda logits: jnp.sum(visits * kl.exact(logits, jnp.asarray(toy.others)))
  close(toy.gradient(value), next_token(toy))


def test_of_whole_completions_k2_is_exact_in_the_loss(toy):
  total = lambda x, mask: jnp.sum(x * mask, axis=1, keepdims=True)
  ref = toy.logps(jnp.asarray(toy.others))

  def losses(logps, group):
    mask = jnp.asarray(toy.mask)[group]
    values = kl.k2(total(logps, mask), total(ref[group], mask))
    return aggregate(values, jnp.ones((1, 1)), SUM).mean()[None]

  close(toy.expected_gradients(losses, 1)[0], divergence(toy))


def in_the_reward(toy, estimator):
  """Expected gradient that an estimate adds when it is a penalty of the reward."""
  ref = toy.logps(jnp.asarray(toy.others))

  def losses(logps, group):
    mask = jnp.asarray(toy.mask)[group]
    cost = jnp.sum(estimator(logps, ref[group]) * mask, axis=1)
    return aggregate(pg.reinforce_loss(logps, -cost), mask, SUM).mean()[None]

  return toy.expected_gradients(losses, 1)[0]


def test_in_the_reward(toy):
  # The derivative of an expectation is what its distribution gives (the score part, the
  # reward) and what the values give (the loss): the two add up to the derivative of
  # E[estimate], which is the divergence for k1 and k3.
  close(in_the_reward(toy, kl.k1), divergence(toy))
  close(in_the_reward(toy, kl.k3), divergence(toy) - next_token(toy, reverse=False))
  ref = toy.logps(jnp.asarray(toy.others))

  def expected_k2(logits):
    logps = toy.logps(logits)
    each = jnp.sum(jnp.square(logps - ref) / 2 * toy.mask, axis=1)
    return jnp.sum(toy.probability(logits) * each)

  close(in_the_reward(toy, kl.k2), toy.gradient(expected_k2) - next_token(toy))


def test_the_whole_objective(toy):
  """RLOO with k1 in the reward, PPO with k1 a token, GRPO's k3 in the loss."""
  beta, last = 0.3, np.arange(toy.mask.shape[1]) == toy.lengths[:, None] - 1
  ref, final = toy.logps(jnp.asarray(toy.others)), toy.rewards[:, None] * last

  def losses(logps, group):
    mask, rewards = jnp.asarray(toy.mask)[group], jnp.asarray(toy.rewards)[group]
    loss_of = lambda a: pg.clipped_loss(pg.log_ratio(logps, None, mask), a).values
    cost = jax.lax.stop_gradient(kl.k1(logps, ref[group]))
    shaped = rewards - beta * jnp.sum(cost * mask, axis=1)
    rloo = loss_of(ADVANTAGES["leave_one_out"](shaped[None])[0])
    by_token = jnp.asarray(final)[group] - beta * cost
    ppo = loss_of(gae(by_token, 0 * by_token, mask, gamma=1.0, lam=1.0)[0])
    plain = loss_of(ADVANTAGES["group_centered"](rewards[None])[0])
    grpo = plain + beta * kl.k3(logps, ref[group])
    return jnp.stack([aggregate(x, mask, SUM).mean() for x in (rloo, ppo, grpo)])

  rloo, ppo, grpo = toy.expected_gradients(losses, 2)
  true = toy.gradient(toy.expected_reward)
  close(rloo, -true + beta * divergence(toy))
  close(ppo, -true + beta * divergence(toy))
  close(grpo, -true / 2 + beta * next_token(toy, reverse=False))
