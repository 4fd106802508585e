"""Outputs of layers, of users' models and of stacked layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tunix.distillation.feature_extraction import (
  SowedModule,
  pop_sowed_intermediate_outputs,
  sowed_module,
  unwrap_sowed_modules,
  wrap_model_with_sowed_modules,
)
from tunix.models.transformer.attention.layer import Attention
from tunix.models.transformer.decoder_layer import DecoderLayer


class Tower(nnx.Module):
  """Linear layers in a list, in a dict and by name."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.first = nnx.Linear(4, 4, rngs=rngs)
    self.many = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])
    self.last = nnx.Dict(end=nnx.Linear(4, 4, rngs=rngs))
    self.norm = nnx.LayerNorm(4, rngs=rngs)

  def __call__(self, x):
    x = self.first(x)
    for layer in self.many:
      x = layer(x)
    return self.norm(self.last["end"](x))


def test_wrapped_modules_keep_what_they_put_out_and_come_back():
  model, x = Tower(), jnp.ones((2, 4))
  want, graph = model(x), nnx.graphdef(model)
  wrap_model_with_sowed_modules(model, [nnx.Linear])
  assert isinstance(model.many[10], SowedModule)
  np.testing.assert_array_equal(model(x), want)
  state = nnx.to_pure_dict(pop_sowed_intermediate_outputs(model))
  (first,) = state["first"]["intermediate_output"]
  np.testing.assert_array_equal(first, model.first.wrapped_model(x))
  assert len(state["many"]) == 11
  assert not jax.tree.leaves(pop_sowed_intermediate_outputs(model))  # taken out
  unwrap_sowed_modules(model)
  assert nnx.graphdef(model) == graph


def test_layers_come_in_their_order():
  """The list has more than ten: '10' is not before '2'."""
  model, x = Tower(), jnp.ones((2, 4))
  out, features = sowed_module.capture(model, nnx.Linear, lambda m: m(x))
  assert features.shape == (2, 13, 4)
  at = x = model.first(x)
  np.testing.assert_array_equal(features[:, 0], at)
  for i, layer in enumerate(model.many):
    x = layer(x)
    np.testing.assert_array_equal(features[:, 2 + i], x)
  np.testing.assert_array_equal(features[:, 1], model.last["end"](x))
  np.testing.assert_array_equal(out, model(jnp.ones((2, 4))))


def test_a_module_called_twice_keeps_both():
  model = Tower()
  wrap_model_with_sowed_modules(model, [nnx.LayerNorm])
  model(jnp.ones((2, 4)))
  model(jnp.zeros((2, 4)))
  assert len(jax.tree.leaves(pop_sowed_intermediate_outputs(model))) == 2


@pytest.mark.parametrize(
  ("remat", "scanned"), [("none", True), ("block", True), ("none", False)]
)
def test_our_decoder_is_captured_as_it_is(remat, scanned):
  """Stacked, scanned, rematerialized: the model is not touched, and its output is the
  last layer's."""
  model = toys.model(remat=remat, scan_layers=scanned)
  before = nnx.graphdef(model)
  tokens = toys.batch(0)["input_tokens"]

  @jax.jit
  def run(state):
    model = nnx.merge(before, state)
    out, features = sowed_module.capture(
      model, DecoderLayer, lambda m: m(tokens, return_hidden=True)[0]
    )
    return out, features, model.norm(features[:, -1])

  out, features, normed = run(nnx.state(model))
  assert features.shape == (8, 2, 16, 32)
  np.testing.assert_allclose(out, normed, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
    out, model(tokens, return_hidden=True)[0], rtol=1e-4, atol=1e-4
  )
  assert nnx.graphdef(model) == before


def test_wrapping_stacked_layers_is_refused_with_a_remedy():
  with pytest.raises(ValueError, match=r"stacked.*model.unstack\(\)"):
    wrap_model_with_sowed_modules(toys.model(), [DecoderLayer])
  loose = toys.model().unstack()
  wrap_model_with_sowed_modules(loose, [Attention])
  loose(toys.batch(0)["input_tokens"])
  assert len(jax.tree.leaves(pop_sowed_intermediate_outputs(loose))) == 2


def test_what_cannot_be_captured():
  with pytest.raises(ValueError, match="itself is a Tower"):
    wrap_model_with_sowed_modules(Tower(), [Tower])
  with pytest.raises(ValueError, match="no layer of type Conv"):
    wrap_model_with_sowed_modules(Tower(), [nnx.Conv])
  with pytest.raises(ValueError, match="stored no outputs"):
    sowed_module.capture(Tower(), nnx.Linear, lambda m: None)


def test_outputs_of_different_shapes_are_refused():
  class Narrowing(nnx.Module):
    def __init__(self):
      self.a = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
      self.b = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
      return self.b(self.a(x))

  with pytest.raises(ValueError, match="have shapes"):
    sowed_module.capture(Narrowing(), nnx.Linear, lambda m: m(jnp.ones((1, 4))))
