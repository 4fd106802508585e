import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.generate import distributions
from tunix.generate.drawing import sampling
from tunix.generate.drawing.filters import OFF


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


# Together with every temperature, and with each other.
RULES = [
  {"temperature": 0.5},
  {"temperature": 2.0},
  {"top_k": 5},
  {"top_p": 0.8},
  {"min_p": 0.15},
  {"top_k": 6, "top_p": 0.9},
  {"top_k": 6, "min_p": 0.2, "temperature": 0.7},
  {"top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
  {"top_k": 6, "top_p": 0.95, "min_p": 0.1, "temperature": 1.2},
  {"top_k": 4, "forbidden": [255, 1]},
]


@pytest.mark.parametrize("rules", RULES, ids=lambda r: "-".join(r))
def test_draws_follow_the_exact_distribution(rules):
  # 5 likely tokens in one block, 3 in the next, which is filled up.
  logits = np.full(300, -20.0)
  likely = [0, 1, 2, 254, 255, 256, 298, 299]
  logits[likely] = [0.0, 1.0, -1.0, 0.5, 2.0, 1.6, 0.1, 1.1]
  count = 10_000
  drawn, _ = draw(np.broadcast_to(logits, (count, 300)), **rules)
  seen = np.bincount(np.asarray(drawn), minlength=300)
  exact = distributions.exact(logits, **rules)
  assert distributions.p_value(seen, exact) > 1e-3
  plain = distributions.exact(logits, temperature=rules.get("temperature", 1.0))
  if rules.keys() != {"temperature"}:  # the rules change what is drawn
    assert np.abs(exact - plain).sum() > 0.05


def draw(logits, temperature=1.0, forbidden=None, **filters):
  rows = len(logits)
  rules = sampling.Draw(
    rows=np.arange(rows),
    key=jax.random.key(0),
    temperature=np.full(rows, temperature, np.float32),
    forbidden=None if forbidden is None else np.asarray(forbidden),
    filter_values={k: np.full(rows, v, OFF[k].dtype) for k, v in filters.items()},
  )
  return choose(jnp.asarray(logits), rules, jnp.zeros(rows, int))


choose = jax.jit(sampling.choose)


def test_the_distribution_drawn_from_is_reported():
  logits = np.log([[4.0, 2.0, 1.0, 1.0, 0.1]])
  _, scaled = draw(logits, top_k=3, forbidden=[0])
  # Without token 0: 2, 1, 1 and 0.1; the three best have 1/2, 1/4, 1/4.
  found = [float(sampling.token_logps(scaled, jnp.asarray([i]))[0]) for i in range(5)]
  expected = np.log([1e-45, 0.5, 0.25, 0.25, 1e-45])
  np.testing.assert_allclose(np.exp(found), np.exp(expected), atol=1e-6)


def test_rows_may_have_rules_of_their_own():
  logits = jnp.log(jnp.asarray([[4.0, 3.0, 2.0, 1.0]] * 3))
  rules = sampling.Draw(
    rows=np.arange(3),
    key=jax.random.key(0),
    temperature=np.ones(3, np.float32),
    filter_values={
      "top_k": np.asarray([1, 2, 4]),
      "top_p": np.asarray([1.0, 1.0, 0.65], np.float32),
    },
  )
  scaled = sampling.choose(logits, rules, jnp.zeros(3, int))[1]
  assert np.isfinite(scaled).sum(1).tolist() == [1, 2, 2]  # 0.4 + 0.3 >= 0.65


def test_a_draw_never_takes_what_has_no_probability():
  logits = sampling.forbid(jnp.zeros((512, 300)), jnp.arange(2, 300))
  drawn = sampling.sample(keys_for(np.arange(512)), logits)
  assert set(np.asarray(drawn)) == {0, 1}


def test_a_tiny_temperature_is_greedy():
  logits = jax.random.normal(jax.random.key(0), (32, 400)) * 1e4
  drawn, _ = draw(logits, temperature=1e-38)
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
