import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tunix.generate import sampling


def keys_for(rows, position=0, seed=0):
  rows = jnp.asarray(rows)
  positions = jnp.full(rows.shape, position)
  return sampling.row_keys(jax.random.key(seed), rows, positions)


@pytest.mark.parametrize("vocab", [1, 5, 256, 257, 1000])
def test_greedy_is_argmax(vocab):
  logits = jax.random.normal(jax.random.key(vocab), (16, vocab))
  np.testing.assert_array_equal(sampling.greedy(logits), jnp.argmax(logits, -1))


def test_greedy_takes_the_first_of_equals_and_never_the_filling():
  logits = jnp.full((3, 600), -jnp.inf)
  logits = logits.at[0, 599].set(-5e30).at[1, 300].set(1.0).at[1, 280].set(1.0)
  logits = logits.at[2].set(2.0)
  np.testing.assert_array_equal(sampling.greedy(logits), [599, 280, 0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_exact_distribution(temperature):
  # 5 likely tokens in one block, 3 in the next, which is filled up.
  logits = np.full(300, -20.0)
  likely = [0, 1, 2, 254, 255, 256, 298, 299]
  logits[likely] = [0.0, 1.0, -1.0, 0.5, 2.0, 1.5, 0.0, 1.0]
  exact = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
  count = 10_000
  rows = jnp.broadcast_to(jnp.asarray(logits), (count, 300))
  drawn = sampling.sample(keys_for(np.arange(count)), rows, temperature)
  seen = np.bincount(np.asarray(drawn), minlength=300)
  observed = np.append(seen[likely], count - seen[likely].sum())
  expected = np.append(exact[likely], 1 - exact[likely].sum()) * count
  if expected[-1] < 5:
    assert observed[-1] <= 5
    observed, expected = observed[:-1], expected[:-1]
    expected = expected * observed.sum() / expected.sum()
  assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_a_draw_never_takes_what_has_no_probability():
  logits = sampling.forbid(jnp.zeros((512, 300)), jnp.arange(2, 300))
  drawn = sampling.sample(keys_for(np.arange(512)), logits, 1.0)
  assert set(np.asarray(drawn)) == {0, 1}


def test_a_tiny_temperature_is_greedy():
  logits = jax.random.normal(jax.random.key(0), (32, 400)) * 1e4
  drawn = sampling.sample(keys_for(np.arange(32)), logits, 1e-38)
  np.testing.assert_array_equal(drawn, jnp.argmax(logits, -1))


def test_keys_depend_on_row_and_position_alone():
  data = lambda *args, **kw: jax.random.key_data(keys_for(*args, **kw)).tolist()
  assert data([5, 2])[0] == data([5])[0] == data([1, 7, 5])[2]
  drawn = [*data([0, 1, 2], 0), *data([0, 1, 2], 1), *data([0, 1, 2], 0, seed=1)]
  assert len({tuple(key) for key in drawn}) == 9


def test_token_logps_by_hand():
  # softmax([0, ln 3]) = [1/4, 3/4]
  logits = jnp.log(jnp.asarray([[1.0, 3.0], [1.0, 3.0]]))
  found = sampling.token_logps(logits, jnp.asarray([0, 1]))
  np.testing.assert_allclose(found, np.log([0.25, 0.75]), rtol=1e-6)


def test_forbid_ignores_ids_past_the_vocabulary():
  found = sampling.forbid(jnp.zeros((2, 4)), jnp.asarray([1, 2**31 - 1]))
  np.testing.assert_array_equal(jnp.isneginf(found), [[False, True, False, False]] * 2)


def test_is_in():
  found = sampling.is_in(jnp.asarray([3, 0, 9]), jnp.asarray([9, 3, 2**31 - 1]))
  assert found.tolist() == [True, False, True]
