import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.generate import distributions
from tunix.generate.drawing import filters

VOCAB = 1000  # more than the 256 tokens that bounds are first looked for in


@jax.jit
def keep(scaled, rules):
  return filters.keep(scaled, **rules)


def kept(chances, **rules):
  """The tokens kept, of unnormalized probabilities [V] or [B, V]."""
  logits = jnp.log(jnp.atleast_2d(jnp.asarray(chances, jnp.float32)))
  scaled = logits - logits.max(-1, keepdims=True)
  rules = {k: jnp.full(len(logits), v) for k, v in rules.items()}
  found = np.isfinite(keep(scaled, rules))
  return [np.flatnonzero(row).tolist() for row in found]


def test_by_hand():
  chances = [0.1, 0.4, 0.2, 0.3]
  assert kept(chances, top_k=2) == [[1, 3]]
  assert kept(chances, top_p=0.7) == [[1, 3]]  # 0.4 + 0.3 reach it
  assert kept(chances, top_p=0.71) == [[1, 2, 3]]
  assert kept(chances, top_p=1e-6) == [[1]]
  assert kept(chances, min_p=0.45) == [[1, 2, 3]]  # at least 0.18
  assert kept(chances, min_p=0.76) == [[1]]
  assert kept(chances) == [[0, 1, 2, 3]]


def test_the_order_is_top_k_top_p_min_p():
  # The two best have 4/7 and 3/7 among themselves: the first alone reaches 0.55.
  assert kept([0.1, 0.4, 0.2, 0.3], top_k=2, top_p=0.55) == [[1]]
  assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.55) == [[1, 3]]
  # Of all tokens 0.75 takes three; were min_p first, two would have 4/7 and 3/7.
  assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.9, min_p=0.6) == [[1, 3]]
  assert kept([0.16, 0.4, 0.14, 0.3], top_p=0.8, min_p=0.38) == [[0, 1, 3]]


def test_equals_stay_or_go_together():
  assert kept([2, 1, 1, 1], top_k=2) == [[0, 1, 2, 3]]
  assert kept([2, 1, 1, 1], top_p=0.5) == [[0, 1, 2, 3]]
  assert kept([2, 1, 1, 1], top_p=0.4) == [[0]]
  assert kept([2, 1, 1, 1], min_p=0.5) == [[0, 1, 2, 3]]
  assert kept([1] * 600, top_k=1) == [list(range(600))]
  assert kept([1] * 600, top_p=0.1) == [list(range(600))]
  assert kept([2] + [1] * 600, top_k=300, top_p=0.5) == [list(range(601))]


def test_more_than_there_is():
  assert kept([0.5, 0.3, 0.2], top_k=10) == [[0, 1, 2]]
  scaled = jnp.asarray([[0.0, -jnp.inf, -1.0]])
  for rules in ({"top_k": 3}, {"top_p": 1.0}, {"min_p": 0.0}):
    found = keep(scaled, {k: jnp.full(1, v) for k, v in rules.items()})
    np.testing.assert_array_equal(found, scaled)


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(
  "rules",
  [
    {"top_k": 1},
    {"top_k": 256},
    {"top_k": 257},
    {"top_k": 999},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"top_k": 400, "top_p": 0.9},
    {"top_k": 100, "top_p": 0.9, "min_p": 0.01},
  ],
  ids=str,
)
def test_equal_to_a_sort(spread, rules):
  logits = np.random.default_rng(0).normal(size=(4, VOCAB)) * spread
  expected = [np.flatnonzero(distributions.exact(x, **rules)).tolist() for x in logits]
  assert kept(np.exp(logits), **rules) == expected


def test_rows_depend_on_themselves_alone():
  # A flat row is searched, which must not change the steep one's bound.
  rng = np.random.default_rng(0)
  steep, flat = np.exp(rng.normal(size=VOCAB) * 5), np.exp(rng.normal(size=VOCAB) / 9)
  for rules in ({"top_p": 0.9}, {"top_k": 300}, {"top_k": 300, "top_p": 0.5}):
    alone = kept(steep, **rules), kept(flat, **rules)
    assert kept([steep, flat], **rules) == [alone[0][0], alone[1][0]]


def test_bounds_of_rows_differ():
  scaled = jnp.zeros((3, 4)) - jnp.arange(4.0)
  found = keep(scaled, {"top_k": jnp.asarray([1, 3, 4])})
  assert np.isfinite(found).sum(1).tolist() == [1, 3, 4]


def test_huge_and_tiny_logits():
  scaled = jnp.asarray([[0.0, -1e30, -jnp.inf, -1e-30]])
  found = keep(scaled, {"top_k": jnp.asarray([2])})
  assert np.isfinite(found).tolist() == [[True, False, False, True]]
