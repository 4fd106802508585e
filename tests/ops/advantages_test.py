import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops import advantages
from tunix.ops.advantages import ADVANTAGES, gae, whiten

REWARDS = jnp.array([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
NAMES = [
  "group_normalized",
  "group_centered",
  "leave_one_out",
  "batch_normalized",
  "batch_scaled",
  "centered_normalized",
]
OF_GROUPS = [name for name in NAMES if name != "batch_normalized"]


def close(got, want, tolerance=1e-6):
  np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_group_centered_by_hand():
  # Means 3 and 1.
  close(advantages.group_centered(REWARDS), [[-2, -1, 3], [-1, -1, 2]])


def test_leave_one_out_by_hand():
  # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; 0 - 3 / 2, 3 - 0.
  close(advantages.leave_one_out(REWARDS), [[-3, -1.5, 4.5], [-1.5, -1.5, 3]])


def test_group_normalized_by_hand():
  # Squares 4 + 1 + 9 over 2 is 7; 1 + 1 + 4 over 2 is 3.
  want = [np.array([-2, -1, 3]) / math.sqrt(7), np.array([-1, -1, 2]) / math.sqrt(3)]
  close(advantages.group_normalized(REWARDS, epsilon=0.0), want)


def test_batch_normalized_by_hand():
  # Mean 2, squares 1 + 0 + 16 + 4 + 4 + 1 = 26 over 5.
  want = np.array([[-1, 0, 4], [-2, -2, 1]]) / math.sqrt(26 / 5)
  close(advantages.batch_normalized(REWARDS, epsilon=0.0), want)


def test_batch_scaled_by_hand():
  want = np.array([[-2, -1, 3], [-1, -1, 2]]) / math.sqrt(26 / 5)
  close(advantages.batch_scaled(REWARDS, epsilon=0.0), want)


def test_centered_normalized_by_hand():
  # The centered rewards have mean 0; squares 4 + 1 + 9 + 1 + 1 + 4 = 20 over 5.
  want = np.array([[-2, -1, 3], [-1, -1, 2]]) / 2
  close(advantages.centered_normalized(REWARDS, epsilon=0.0), want)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
def test_mean_normalized_by_hand(of):
  # Means 3 and 1; two of two valid members, mean 2; only rewards of 0; one valid.
  got = advantages.mean_normalized(of(REWARDS))
  close(got, [[-2 / 3, -1 / 3, 1], [-1, -1, 2]])
  rewards = of([[1.0, np.nan, 3.0], [0.0, 0.0, 0.0], [np.nan, 5.0, np.nan]])
  got = advantages.mean_normalized(rewards, where=np.isfinite(rewards))
  close(got, [[-0.5, 0, 0.5], [0, 0, 0], [0, 0, 0]])
  close(jax.jit(advantages.mean_normalized)(REWARDS)[1], [-1, -1, 2])
  with pytest.raises(ValueError, match=r"a reward is -1\.0; expected at least 0"):
    advantages.mean_normalized(of([[1.0, -1.0]]))
  hidden = of([[1.0, 2.0, -1.0]])  # not valid, so it may have any value
  close(
    advantages.mean_normalized(hidden, where=np.array([[True, True, False]])),
    [[-1 / 3, 1 / 3, 0]],
  )


@pytest.mark.parametrize(
  "name",
  ["group_normalized", "batch_normalized", "batch_scaled", "centered_normalized"],
)
def test_epsilon_is_added_to_the_deviation(name):
  fn = ADVANTAGES[name]
  plain, more = fn(REWARDS, epsilon=0.0), fn(REWARDS, epsilon=1.0)
  deviation = {
    "group_normalized": np.sqrt([[7.0], [3.0]]),
    "batch_normalized": math.sqrt(26 / 5),
    "batch_scaled": math.sqrt(26 / 5),
    "centered_normalized": 2.0,
  }[name]
  close(more, plain * deviation / (deviation + 1))
  assert np.any(fn(REWARDS) != plain)  # the default is not 0


@pytest.mark.parametrize("name", NAMES)
def test_where_equals_dropping_members(name):
  fn = ADVANTAGES[name]
  padded = jnp.array([[1.0, jnp.nan, 2.0, 6.0], [0.0, 0.0, jnp.inf, 3.0]])
  where = jnp.isfinite(padded)
  got = fn(padded, where=where)
  close(np.asarray(got)[np.asarray(where)].reshape(2, 3), fn(REWARDS))
  np.testing.assert_array_equal(got[~where], [0.0, 0.0])


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_have_no_advantage_at_all(name):
  # In float32 the mean of three times 0.1 is not 0.1.
  rewards = jnp.full((2, 3), 0.1)
  np.testing.assert_array_equal(ADVANTAGES[name](rewards), np.zeros((2, 3)))
  np.testing.assert_array_equal(ADVANTAGES[name](rewards + 1e4), np.zeros((2, 3)))


@pytest.mark.parametrize("name", NAMES)
def test_rewards_of_the_host_are_compared_in_float64(name):
  rewards = np.array([[0.0, 1.0, 3.0], [2.0, 2.0, 5.0]])
  near = ADVANTAGES[name](rewards)
  close(ADVANTAGES[name](rewards + 2**33), near)
  close(near, ADVANTAGES[name](jnp.asarray(rewards)))
  largest = ADVANTAGES[name](np.array([[1e15, -1e15]] * 100))
  assert np.isfinite(largest).all() and np.abs(largest).min() > 0.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("valid", [0, 1])
def test_fewer_than_two_valid_members(name, valid):
  rewards = jnp.array([[5.0, jnp.nan, jnp.nan]])
  where = jnp.array([[valid == 1, False, False]])
  np.testing.assert_array_equal(ADVANTAGES[name](rewards, where=where), [[0, 0, 0]])


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_does_not_matter_and_the_sum_is_zero(name):
  fn = ADVANTAGES[name]
  close(fn(REWARDS + 64.0), fn(REWARDS), 1e-5)
  axis = None if name == "batch_normalized" else 1
  close(jnp.sum(fn(REWARDS), axis=axis), 0.0, 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_jit_equals_eager_and_one_group_is_enough(name):
  fn = ADVANTAGES[name]
  close(jax.jit(fn)(REWARDS), fn(REWARDS))
  host, where = np.asarray(REWARDS), REWARDS > 0.5
  masked = jax.jit(lambda where: fn(host, where=where))
  close(masked(where), fn(REWARDS, where=where))
  one = REWARDS[:1]
  if name in ("group_normalized", "group_centered", "leave_one_out"):
    close(fn(one), fn(REWARDS)[:1])
  assert fn(one).shape == (1, 3)
  assert fn(np.asarray(REWARDS, np.float64)).dtype == jnp.float32


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("shape", [(3, 1), (3,)])
def test_a_group_needs_two(name, shape):
  with pytest.raises(ValueError, match=r"at least 2 completions.*num_generations"):
    ADVANTAGES[name](jnp.zeros(shape))


def test_one_completion_a_prompt_is_enough_for_the_batch():
  # Mean 3, deviation 2.
  got = advantages.batch_normalized(jnp.array([[1.0], [3.0], [5.0]]), epsilon=0.0)
  close(got, [[-1], [0], [1]])


def test_known_names_mean_the_same_functions():
  assert ADVANTAGES["grpo"] is advantages.group_normalized
  assert ADVANTAGES["drgrpo"] is advantages.group_centered
  assert ADVANTAGES["rloo"] is advantages.leave_one_out
  known = {"mean_normalized", "grpo", "drgrpo", "rloo"}
  assert set(NAMES) | known == set(ADVANTAGES)


def gae_loop(rewards, values, gamma, lam):
  """One row without mask, from the definition as a sum."""
  n = len(rewards)
  deltas = [
    rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t]
    for t in range(n)
  ]
  return [
    sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)
  ]


def test_gae_by_hand():
  # gamma 1/2, lam 1/2: deltas 1 + 1 - 1 = 1, 0 + 2 - 2 = 0, 8 - 4 = 4;
  # A_2 = 4, A_1 = 0 + 4 / 4 = 1, A_0 = 1 + 1 / 4; returns A + V.
  got = gae(
    jnp.array([[1.0, 0.0, 8.0]]),
    jnp.array([[1.0, 2.0, 4.0]]),
    jnp.ones((1, 3)),
    gamma=0.5,
    lam=0.5,
  )
  close(got[0], [[1.25, 1, 4]])
  close(got[1], [[2.25, 3, 8]])


@pytest.fixture(scope="module")
def episode():
  rng = np.random.default_rng(0)
  mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 1, 1], [0] * 5])
  return rng.normal(size=(4, 5)), rng.normal(size=(4, 5)), mask


@pytest.mark.parametrize(
  ("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)]
)
def test_gae_skips_what_is_masked(episode, gamma, lam):
  rewards, values, mask = episode
  nan = np.where(mask, 0.0, np.nan)
  got, returns = gae(
    jnp.array(rewards + nan), jnp.array(values + nan), mask, gamma=gamma, lam=lam
  )
  for row in range(4):
    on = mask[row] == 1
    want = gae_loop(rewards[row][on], values[row][on], gamma, lam)
    close(got[row][on], want, 1e-5)
    close(returns[row][on], want + values[row][on], 1e-5)
    np.testing.assert_array_equal(got[row][~on], 0.0)
    np.testing.assert_array_equal(returns[row][~on], 0.0)


def test_gae_under_jit_and_for_one_row(episode):
  rewards, values, mask = map(jnp.array, episode)
  fn = lambda r, v, m: gae(r, v, m, gamma=0.9, lam=0.8)[0]
  close(jax.jit(fn)(rewards, values, mask), fn(rewards, values, mask))
  close(fn(rewards[:1], values[:1], mask[:1]), fn(rewards, values, mask)[:1])


def test_gradient_of_gae_ignores_masked_nan(episode):
  rewards, values, mask = episode
  nan = np.where(mask, values, np.nan)
  fn = lambda v: jnp.sum(gae(rewards, v, mask, gamma=0.9, lam=0.8)[0] ** 2)
  gradient = np.asarray(jax.jit(jax.grad(fn))(jnp.array(nan)))
  assert np.isfinite(gradient).all() and not gradient[mask == 0].any()
  step = np.zeros_like(values)
  step[0, 1] = 1e-2
  slope = (fn(nan + step) - fn(nan - step)) / 2e-2
  close(slope, gradient[0, 1], 1e-3)


def test_batches_of_nothing():
  assert whiten(jnp.zeros((0, 3)), jnp.zeros((0, 3))).shape == (0, 3)
  empty = jnp.zeros((2, 0))
  assert gae(empty, empty, empty, gamma=1.0, lam=1.0)[0].shape == (2, 0)


def test_whiten_by_hand():
  # Over 1, 3, 5: mean 3, deviation 2.
  x, mask = jnp.array([[1.0, 3.0], [jnp.nan, 5.0]]), jnp.array([[1, 1], [0, 1]])
  close(whiten(x, mask, epsilon=0.0), [[-1, 0], [0, 1]])
  close(whiten(x, mask, epsilon=2.0), [[-0.5, 0], [0, 0.5]])
  np.testing.assert_array_equal(whiten(x, jnp.zeros((2, 2))), np.zeros((2, 2)))


def test_decoupled_by_hand():
  """One reward in hundreds, one in ones: each is normalized, the sum over the batch."""
  long = jnp.array([[100.0, 300.0], [500.0, 500.0]])
  short = jnp.array([[1.0, 0.0], [1.0, 0.0]])
  exact = functools.partial(advantages.group_normalized, epsilon=0.0)
  root = 1 / math.sqrt(2)  # a pair's two members, over the sample's deviation
  summed = np.array([[-root + 2 * root, root - 2 * root], [2 * root, -2 * root]])
  want = summed / np.std(summed, ddof=1)
  close(advantages.decoupled(exact, [long, short], [1.0, 2.0]), want, 1e-5)


def test_decoupled_rewards_do_not_collapse():
  """The paper's point: of two binary rewards (1, 1), (1, 0), (0, 0) a total of 2 and
  one of 1 come to equal advantages of their groups; here they differ."""
  one = jnp.array([[1.0, 0.0], [1.0, 0.0]])
  two = jnp.array([[1.0, 0.0], [0.0, 0.0]])
  total = advantages.group_normalized(one + two)
  close(total[0], total[1])
  each = advantages.decoupled(advantages.group_normalized, [one, two], [1.0, 1.0])
  assert each[0, 0] > 1.5 * each[1, 0] > 0


def test_decoupled_leaves_invalid_members_out():
  where = jnp.array([[True, True, False], [True, True, True]])
  rewards = jnp.array([[1.0, 0.0, jnp.nan], [0.0, 1.0, 0.0]])
  got = advantages.decoupled(
    advantages.group_normalized, [rewards, 2 * rewards], [1.0, 1.0], where=where
  )
  assert got[0, 2] == 0 and np.isfinite(got).all()
