import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import toy_ids
from tunix.generate import parity
from tunix.generate.sampler import Sampler
from tunix.models.transformer.attention import layer as attention
from tunix.models.transformer.model import Transformer


def test_mismatch_by_hand():
  # Differences 0.1, -0.3 and one outside the mask: mean |d| = 0.2, one of two beyond
  # 0.2, mean ratio (e^0.1 + e^-0.3) / 2.
  logps = jnp.array([[-1.0, -2.0, -9.0]])
  rollout = jnp.array([[-1.1, -1.7, 0.0]])
  mask = jnp.array([[1, 1, 0]])
  got = jax.jit(lambda *a: parity.mismatch(*a, threshold=0.2))(logps, rollout, mask)
  want = (np.exp(0.1) + np.exp(-0.3)) / 2
  np.testing.assert_allclose(got["max_abs"], 0.3, rtol=1e-5)
  np.testing.assert_allclose(got["mean_abs"], 0.2, rtol=1e-5)
  assert float(got["share_apart"]) == 0.5
  np.testing.assert_allclose(got["mean_ratio"], want, rtol=1e-5)


def test_mismatch_of_nothing_and_of_what_is_no_number():
  empty = parity.mismatch(jnp.ones((1, 2)), jnp.zeros((1, 2)), jnp.zeros((1, 2)))
  assert {float(x) for x in empty.values()} == {0.0}
  bad = jnp.array([[jnp.nan, 0.0]])
  found = parity.mismatch(bad, jnp.zeros((1, 2)), jnp.ones((1, 2)))
  assert float(found["share_apart"]) == 0.5 and np.isnan(found["max_abs"])
  # Where nothing counts, nothing spoils the rest.
  found = parity.mismatch(bad, jnp.zeros((1, 2)), jnp.array([[0, 1]]))
  assert float(found["max_abs"]) == 0.0


def measure(model, **options):
  sampler = Sampler(model, toy_ids.Ids())
  prompts = toy_ids.prompts(4, longest=9)
  options = {"tokens": 6, "seed": 1, "threshold": 1e-4, **options}
  return parity.measure(sampler, prompts, **options)


def test_our_decoder_agrees_with_itself():
  found = measure(toy_ids.sharp_model())
  assert found.passed and 0 < found.max_abs < 1e-4
  assert found.tokens == found.greedy_tokens == 24
  assert found.top1_flips == 0 and found.share_apart == 0.0
  assert abs(found.mean_ratio - 1) < 1e-4
  strict = measure(toy_ids.sharp_model(), threshold=0.0)
  assert not strict.passed and strict.share_apart > 0
  assert "24 sampled tokens" in str(found) and "greedy tokens: 0" in str(found)


def test_models_of_users_are_measured_too():
  found = measure(toys.TokensOnly(nnx.Rngs(0)))
  assert found.passed and found.top1_flips == 0


@pytest.fixture
def fresh_programs():
  """Nothing that was compiled before, or with a broken op, is used."""
  jax.clear_caches()
  yield
  jax.clear_caches()


def test_a_broken_op_shows(monkeypatch, fresh_programs):
  # In a decode step, one token wide, positions are turned twice as far.
  right = attention.rotate

  def wrong(x, sin_cos):
    out = right(x, sin_cos)
    return right(out, sin_cos) if x.shape[1] == 1 else out

  monkeypatch.setattr(attention, "rotate", wrong)
  found = measure(toy_ids.sharp_model())
  assert not found.passed and found.share_apart > 0.5 and found.mean_ratio != 1


def test_greedy_tokens_that_scoring_would_not_choose_are_counted(
  monkeypatch, fresh_programs
):
  right = Transformer.logits

  def wrong(self, hidden):
    out = right(self, hidden)
    return jnp.roll(out, 1, axis=-1) if hidden.shape[1] == 1 else out

  monkeypatch.setattr(Transformer, "logits", wrong)
  found = measure(toy_ids.sharp_model())
  assert found.top1_flips == found.greedy_tokens == 24


def test_a_negative_threshold_is_refused():
  with pytest.raises(ValueError, match="threshold is -1"):
    measure(toys.model(), threshold=-1)
