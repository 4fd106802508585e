import jax
import jax.numpy as jnp
from flax import nnx

from tunix.utils import tree


class Pair(nnx.Module):
  def __init__(self):
    self.one = nnx.Param(jnp.ones((2, 3)))
    self.parts = nnx.List([nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))])


def test_paths_of_dicts_lists_and_modules():
  assert list(tree.flatten({"a": {"b": 1}, "c": [2, 3]})) == ["a.b", "c.0", "c.1"]
  assert sorted(tree.flatten(nnx.state(Pair()))) == ["one", "parts.0.kernel"]


def test_a_parameter_called_value_keeps_its_name():
  assert list(tree.flatten({"head": {"value": 1}})) == ["head.value"]


def test_nest_undoes_flatten():
  nested = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
  assert tree.nest(tree.flatten(nested)) == nested


def test_size_bytes_counts_global_shapes(mesh_fsdp8):
  where = jax.NamedSharding(mesh_fsdp8, jax.P("fsdp"))
  x = jax.device_put(jnp.ones((8, 4), jnp.bfloat16), where)
  assert tree.size_bytes({"x": x, "y": jnp.ones(3, jnp.float32)}) == 8 * 4 * 2 + 12
