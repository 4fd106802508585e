import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.generate import toy_ids
from tests.models.lora_test import widen
from tunix.generate.sampler import Sampler
from tunix.models import lora
from tunix.models.adapters import lora_modules
from tunix.models.transformer.dense import dropout

STATE = jnp.array([123, 0], jnp.uint32)


def test_share_and_scale():
  x = jnp.ones((8, 50, 40))
  y = np.asarray(dropout.apply(x, STATE, 0.25))
  assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
  # 16,000 draws: the standard deviation of the share is 0.0034.
  assert abs((y == 0).mean() - 0.25) < 0.015


def test_rows_decide_and_not_how_they_are_cut():
  x = jnp.ones((4, 6, 10))
  whole = dropout.apply(x, STATE, 0.5)
  second = dropout.apply(x[2:], STATE.at[1].set(2), 0.5)
  np.testing.assert_array_equal(whole[2:], second)
  longer = dropout.apply(jnp.ones((4, 9, 10)), STATE, 0.5)
  np.testing.assert_array_equal(whole, longer[:, :6])
  assert np.any(whole[0] != whole[1])
  assert np.any(whole != dropout.apply(x, STATE.at[0].set(7), 0.5))


def test_sorted_rows_get_a_mask_of_their_own():
  x = jnp.ones((40, 10))
  one, two = (dropout.apply(x, STATE.at[1].set(n), 0.5) for n in (0, 8))
  assert np.any(one != two) and np.any(one[0] != one[1])


def test_every_layer_and_module_has_its_own_seed():
  model = lora.apply(toys.model(), lora.LoraConfig(rank=2, dropout=0.5))
  seeds = np.stack(
    [np.asarray(m.lora_rng[...]) for m in lora_modules.adapted(model).values()]
  )
  assert seeds.shape == (7, 2, 2)
  assert len(np.unique(seeds[..., 0])) == 14 and not np.any(seeds[..., 1])
  other = lora.apply(toys.model(), lora.LoraConfig(rank=2, dropout=0.5), seed=1)
  found = lora_modules.adapted(other)["layers.attn.q_proj"].lora_rng[...]
  assert np.all(found[:, 0] != seeds[:1, :, 0])


@pytest.mark.parametrize("stacked", [True, False])
def test_off_until_train_and_different_at_each_call(stacked):
  tokens = toys.batch(0)["input_tokens"]
  config = lora.LoraConfig(rank=4, dropout=0.3)
  model = widen(lora.apply(toys.model(), config))
  plain = widen(lora.apply(toys.model(), lora.LoraConfig(rank=4)))(tokens)[0]
  model = model if stacked else model.unstack()
  np.testing.assert_array_equal(model(tokens)[0], model(tokens)[0])
  np.testing.assert_allclose(model(tokens)[0], plain, atol=1e-6)
  model.train()
  one, two = model(tokens)[0], model(tokens)[0]
  assert np.abs(one - plain).max() > 1e-3 and np.abs(one - two).max() > 1e-3
  for linear in lora_modules.adapted(model).values():
    assert np.all(np.asarray(linear.lora_rng[...])[..., 1] == 2 * len(tokens))
  model.eval()
  np.testing.assert_allclose(model(tokens)[0], plain, atol=1e-6)


def test_sampling_runs_without():
  config = lora.LoraConfig(rank=4, dropout=0.5)
  model = widen(lora.apply(toys.model(), config))
  sampler = Sampler(model, toy_ids.Ids())
  prompt = [[5, 6, 7]]
  want = sampler(prompt, 4, return_logits=True)
  model.train()
  got = sampler(prompt, 4, return_logits=True)
  np.testing.assert_array_equal(got.logits[0], want.logits[0])


def test_state_is_random_state_and_no_parameter():
  model = lora.apply(toys.model(), lora.LoraConfig(rank=2, dropout=0.5))
  found = [x for _, x in nnx.iter_graph(model) if isinstance(x, nnx.RngState)]
  assert len(found) == 7 and not any(isinstance(x, nnx.Param) for x in found)
  assert jax.tree.leaves(found)[0].dtype == jnp.uint32
