import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops import router


def drawn(seed=0, layers=3, shape=(2, 7), experts=5):
  rng = np.random.default_rng(seed)
  logits = 2 * rng.normal(size=(layers, *shape, experts)).astype(np.float32)
  mask = (rng.random(shape) < 0.7).astype(np.float32)
  return jnp.asarray(logits), mask


def total(logits, mask, k=2):
  """The sums over all layers."""
  out = router.empty(logits.shape[-1])
  for layer in logits:
    out = out.plus(router.sums(layer, jax.lax.top_k(layer, k)[1], mask))
  return out


def test_by_hand():
  # Two tokens with the probabilities 1/2, 1/4, 1/4 and 1/8, 3/4, 1/8, one choice each:
  # f = (1/2, 1/2, 0) and p = (5/16, 1/2, 3/16). The third token is padding.
  rows = jnp.log(jnp.array([[[4.0, 2, 2], [1, 6, 1], [9, 1, 9]]]))
  got = router.sums(rows, jnp.array([[[0], [1], [2]]]), jnp.array([[1.0, 1, 0]]))
  assert got.choices.tolist() == [1, 1, 0] and float(got.tokens) == 2
  np.testing.assert_allclose(got.balance_loss(), 3 * (5 / 32 + 1 / 4), rtol=1e-6)
  np.testing.assert_allclose(got.z_loss(), np.log(8) ** 2, rtol=1e-6)
  first, second = 1.5 * np.log(2), (6 * np.log(2) + 3 * np.log(4 / 3)) / 4
  second = 0.75 * np.log(4 / 3) + 0.25 * np.log(8)
  statistics = got.statistics()
  np.testing.assert_allclose(
    statistics["entropy"].mean(), (first + second) / 2, rtol=1e-6
  )
  np.testing.assert_allclose(statistics["max_share"].mean(), 0.5)


def test_equal_use_has_the_balance_loss_k():
  logits = jnp.zeros((1, 4, 4))
  chosen = jnp.array([[[0, 1], [1, 2], [2, 3], [3, 0]]])
  sums = router.sums(logits, chosen, jnp.ones((1, 4)))
  np.testing.assert_allclose(sums.balance_loss(), 2.0)


def test_no_tokens():
  empty = router.empty(4)
  assert float(empty.balance_loss()) == float(empty.z_loss()) == 0


def test_padding_has_no_gradient():
  logits, mask = drawn()
  loss = lambda x: total(x, mask).balance_loss() + total(x, mask).z_loss()
  gradient = jax.jit(jax.grad(loss))(logits)
  assert np.all(np.any(gradient, axis=(0, 3)) == (mask != 0))


@pytest.mark.parametrize("masked", [True, False])
def test_transformers_has_the_same_balance_loss(masked):
  torch = pytest.importorskip("torch")
  theirs = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
  logits, mask = drawn()
  if not masked:
    mask = np.ones_like(mask)
  flat = torch.tensor(np.asarray(logits).reshape(3, -1, 5), requires_grad=True)
  keep = torch.tensor(mask) if masked else None
  want = theirs.load_balancing_loss_func(tuple(flat), 5, 2, keep)
  want.backward()
  loss = lambda x: total(x, mask).balance_loss()
  got, gradient = jax.jit(jax.value_and_grad(loss))(logits)
  np.testing.assert_allclose(got, want.item(), rtol=1e-6)
  np.testing.assert_allclose(
    np.asarray(gradient).reshape(flat.shape), flat.grad.numpy(), atol=1e-7
  )
