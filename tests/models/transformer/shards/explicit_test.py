"""Our decoder inside the user's own mesh, whose axes `jax.make_mesh` makes Explicit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tests import toys


@pytest.fixture
def mesh():
  return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)


TOKENS = np.arange(32, dtype=np.int32).reshape(8, 4) % toys.VOCAB


def on(mesh, model):
  """The model's arrays split over the mesh as its specs say."""
  graph, state = nnx.split(model)

  def one(variable):
    spec = variable.get_metadata().get("out_sharding") or ()
    x = variable.get_value()
    entries = [
      a if a in mesh.shape and n % mesh.shape[a] == 0 else None
      for a, n in zip(spec, x.shape)
    ]
    return variable.replace(jax.device_put(x, NamedSharding(mesh, P(*entries))))

  state = jax.tree.map(one, state, is_leaf=lambda x: hasattr(x, "get_metadata"))
  return nnx.merge(graph, state)


def loss(model, tokens):
  return jnp.mean(jnp.square(model(tokens)[0]))


@pytest.mark.parametrize("where", ["as built", "split"])
def test_it_is_called_jitted_and_differentiated(mesh, where):
  plain = toys.model()
  want, _ = plain(TOKENS)
  slope = nnx.grad(loss)(plain, TOKENS)
  with jax.set_mesh(mesh):
    model = toys.model()
    if where == "split":
      model = on(mesh, model)
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("fsdp")))
    results = [model(tokens)[0], nnx.jit(lambda m, t: m(t)[0])(model, tokens)]
    graph, state = nnx.split(model)
    results.append(jax.jit(lambda s, t: nnx.merge(graph, s)(t)[0])(state, tokens))
    hidden, _ = model(tokens, return_hidden=True)
    results.append(model.logits(hidden))
    # Not op by op, see tests/sft/meshes_test.py.
    got = nnx.jit(nnx.grad(loss))(model, tokens)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(slope)):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  for got in results:
    assert got.sharding.mesh.axis_types == (AxisType.Explicit,) * 2
    assert jax.typeof(got).sharding.spec == P("fsdp", None, "tp")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_cache_is_filled(mesh):
  plain = toys.model()
  want, cache = plain(TOKENS, cache=plain.init_cache(8, 6))
  more, _ = plain(TOKENS[:, :1], cache=cache)
  with jax.set_mesh(mesh):
    model = on(mesh, toys.model())
    got, cache = model(TOKENS, cache=model.init_cache(8, 6))
    assert jax.typeof(cache.k[0]).sharding.spec[0] == "fsdp"
    after, _ = model(TOKENS[:, :1], cache=cache)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(after, more, rtol=1e-5, atol=1e-5)
