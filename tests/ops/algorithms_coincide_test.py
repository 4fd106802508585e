"""Algorithms that theory says are the same, on random completions off-policy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops import advantages as adv, policy_gradient as pg
from tunix.ops.reductions import aggregate

B, T = 6, 4
RNG = np.random.default_rng(0)
LOGPS, OLD = (RNG.normal(size=(2, B, T)) * 0.4 - 1.5).astype(np.float32)
MASK = (np.arange(T) < np.array([4, 1, 3, 2, 4, 2])[:, None]).astype(np.int32)
REWARDS = RNG.normal(size=(3, 2)).astype(np.float32)
OF_ROWS = (REWARDS - REWARDS[:, ::-1]).ravel()  # adv.leave_one_out(REWARDS)


def same(one, other, at=LOGPS, factor=1.0):
  """Value and gradient."""
  one, other = (jax.jit(jax.value_and_grad(f))(at) for f in (one, other))
  np.testing.assert_allclose(one[0], factor * other[0], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(one[1], factor * other[1], rtol=1e-5, atol=1e-6)
  assert np.any(one[1])


def clipped(
  advantages, mode="token-mean", level="token", old=OLD, mask=MASK, **options
):
  def loss(logps):
    ratio = pg.log_ratio(logps, old, mask, level)
    values = pg.clipped_loss(ratio, advantages, **options).values
    return aggregate(values, mask, mode).mean()

  return loss


def reinforce(advantages, mode="token-mean"):
  return lambda x: aggregate(pg.reinforce_loss(x, advantages), MASK, mode).mean()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_grpo_without_deviation_is_rloo_scaled(size):
  rewards = jnp.array(RNG.normal(size=(5, size)), jnp.float32)
  centered, left_out = adv.group_centered(rewards), adv.leave_one_out(rewards)
  np.testing.assert_allclose(centered, (size - 1) / size * left_out, rtol=1e-5)
  np.testing.assert_allclose(adv.leave_one_out(REWARDS).ravel(), OF_ROWS, rtol=1e-6)


def test_grpo_of_two_is_rloo_halved_off_policy_and_clipped():
  grpo = clipped(adv.group_centered(REWARDS).ravel())
  same(grpo, clipped(OF_ROWS), factor=0.5)


def test_grpo_of_two_knows_only_who_is_better():
  got = adv.group_normalized(REWARDS, epsilon=0.0)
  sign = np.sign(REWARDS[:, 0] - REWARDS[:, 1])
  want = np.stack([sign, -sign], axis=1) / np.sqrt(2)
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_dapo_with_equal_clips_is_grpo_with_the_mean_over_tokens():
  def grpo(logps):
    """DeepSeekMath's equation 3 without KL, token by token."""
    total = 0.0
    for i in range(B):
      for t in range(int(MASK[i].sum())):
        w = jnp.exp(logps[i, t] - OLD[i, t])
        total += jnp.minimum(w * OF_ROWS[i], jnp.clip(w, 0.7, 1.3) * OF_ROWS[i])
    return -total / MASK.sum()

  same(clipped(OF_ROWS, clip_low=0.3, clip_high=0.3), grpo)


def test_gspo_of_one_token_is_grpo():
  first = {"old": OLD[:, :1], "mask": MASK[:, :1]}
  for mode in ("token-mean", "sequence-mean-token-mean"):
    gspo = clipped(OF_ROWS, mode, "sequence", **first)
    same(gspo, clipped(OF_ROWS, mode, **first), at=LOGPS[:, :1])
    product = clipped(OF_ROWS, mode, "sequence-product", **first)
    same(product, clipped(OF_ROWS, mode, **first), at=LOGPS[:, :1])


def test_luspo_is_gspo_with_the_sum_over_tokens():
  def luspo(logps):
    """Returns GSPO's loss of each completion times its length (arXiv:2602.05261)."""
    total = 0.0
    for i in range(B):
      n = int(MASK[i].sum())
      s = jnp.exp((logps[i, :n] - OLD[i, :n]).mean())
      total += n * jnp.minimum(s * OF_ROWS[i], jnp.clip(s, 0.7, 1.3) * OF_ROWS[i])
    return -total / B

  bounds = {"clip_low": 0.3, "clip_high": 0.3}
  same(clipped(OF_ROWS, "sequence-mean-token-sum", "sequence", **bounds), luspo)


def test_gspo_of_equal_token_ratios_is_grpo():
  shifted = OLD + jnp.array(RNG.normal(size=(B, 1)), jnp.float32)
  mode = "sequence-mean-token-mean"
  same(clipped(OF_ROWS, mode, "sequence"), clipped(OF_ROWS, mode), at=shifted)


def test_ppo_without_discount_and_critic_is_reinforce():
  last = jnp.arange(T) == MASK.sum(1, keepdims=True) - 1
  rewards = jnp.where(last, REWARDS.reshape(B, 1), 0.0)
  by_token, returns = adv.gae(rewards, jnp.zeros((B, T)), MASK, gamma=1.0, lam=1.0)
  np.testing.assert_allclose(by_token, REWARDS.reshape(B, 1) * MASK, rtol=1e-6)
  np.testing.assert_array_equal(returns, by_token)
  ppo = jax.jit(jax.grad(clipped(by_token, old=None)))(LOGPS)
  want = jax.jit(jax.grad(reinforce(REWARDS.ravel())))(LOGPS)
  np.testing.assert_allclose(ppo, want, rtol=1e-5)
  assert np.any(ppo)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean-token-mean"])
def test_on_policy_all_of_them_are_the_policy_gradient(mode):
  def cispo(logps):
    ratio = pg.log_ratio(logps, None, MASK)
    return aggregate(pg.cispo_loss(ratio, logps, OF_ROWS).values, MASK, mode).mean()

  same(cispo, reinforce(OF_ROWS, mode))
  want = jax.jit(jax.grad(reinforce(OF_ROWS, mode)))(LOGPS)
  for level in ("token", "sequence"):
    got = jax.jit(jax.grad(clipped(OF_ROWS, mode, level, old=None, dual_clip=3.0)))(
      LOGPS
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_dr_grpo_is_grpo_where_all_completions_are_as_long():
  full = jnp.ones((B, T))
  values = pg.clipped_loss(LOGPS - OLD, OF_ROWS).values
  means = [
    aggregate(values, full, "sequence-mean-token-scale", max_tokens=T).mean(),
    aggregate(values, full, "sequence-mean-token-mean").mean(),
    aggregate(values, full, "token-mean").mean(),
    aggregate(values, full, "sequence-mean-token-sum").mean() / T,
  ]
  np.testing.assert_allclose(means, means[0], rtol=1e-5)


def test_cispo_is_ppo_inside_the_bounds():
  """Same gradient (w A times that of logps), another value."""
  wide: dict[str, Any] = {"clip_low": 1.0, "clip_high": 100.0}

  def cispo(logps):
    ratio = pg.log_ratio(logps, OLD, MASK)
    return aggregate(pg.cispo_loss(ratio, logps, OF_ROWS, **wide).values, MASK).mean()

  got, want = (
    jax.jit(jax.grad(cispo))(LOGPS),
    jax.jit(jax.grad(clipped(OF_ROWS, **wide)))(LOGPS),
  )
  np.testing.assert_allclose(got, want, rtol=1e-5)
