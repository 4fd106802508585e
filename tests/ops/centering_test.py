"""The centering term against a loop over the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops.policy_gradient import centering_loss


def head_of(q, k):
  """The k most likely tokens of rows [T, V] and their probabilities, [1, T, k]."""
  ids = np.argsort(-q, axis=1)[:, :k]
  return jnp.asarray(ids)[None], jnp.asarray(np.take_along_axis(q, ids, 1))[None]


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize(
  "weight",
  [
    jnp.ones_like,
    lambda r: jnp.clip(r, 0, 1.3),
    lambda r: jnp.clip(r, 0.8, 1.3),
    lambda r: jnp.where((r >= 0.7) & (r <= 1.5), r, 0.0),
    lambda r: r,
  ],
  ids=["plain", "truncated", "two-sided", "masked", "whole"],
)
def test_centering_subtracts_the_mean_score_of_the_sampler(k, weight):
  rng = np.random.default_rng(k)
  logits, others = rng.normal(size=(2, 4, 6)).astype(np.float32)
  others[0, :2] = -np.inf  # a filter of the sampler
  p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (logits, others))
  ids, probs = head_of(q, k)

  def loss(logits):
    logps = jnp.take_along_axis(jax.nn.log_softmax(logits)[None], ids, axis=2)
    return centering_loss(logps, probs, jnp.array([2.0]), weight).sum()

  got = jax.jit(jax.grad(loss))(jnp.asarray(logits))
  for t in range(4):
    # The sampler as it is assumed to be: exact on the head, else like the policy.
    head = set(ids[0, t].tolist())
    rest = [v for v in range(6) if v not in head]
    share = (1 - q[t, list(head)].sum()) / max(p[t, rest].sum(), 1e-6)
    assumed = np.where([v in head for v in range(6)], q[t], share * p[t])
    ratios = np.where(assumed > 1e-6, p[t] / np.maximum(assumed, 1e-6), 0)
    mass = assumed * np.asarray(weight(jnp.asarray(ratios)))
    want = sum(2 * mass[v] * (np.eye(6)[v] - p[t]) for v in range(6))
    np.testing.assert_allclose(got[t], want, atol=1e-5)


def test_tokens_without_a_head_are_not_centered():
  # Those of an older journal.
  logps, none = jnp.full((1, 2, 3), -1.0), jnp.zeros((1, 2, 3))
  fn = lambda x: centering_loss(x, none, jnp.ones(1)).sum()
  assert fn(logps) == 0 and not jax.jit(jax.grad(fn))(logps).any()
