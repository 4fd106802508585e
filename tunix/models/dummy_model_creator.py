"""Models with random weights, for tests and measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from tunix.models.transformer.shards import sharding
from tunix.utils import mesh as mesh_lib


def create_dummy_model(
  model_class: Callable[..., nnx.Module],
  config: object,
  mesh: Mesh | None = None,
  dtype: DTypeLike | None = None,
  random_seed: int = 0,
  scale: float = 0.02,
) -> Any:
  """Makes a model whose floating-point parameters are all normal draws times `scale`.

  Unlike `AutoModel.from_config` it accepts any class, draws norms and biases too, and
  never runs the initialization of the class.

  Args:
    model_class: traced as `model_class(config, rngs=...)`, for its shapes only.
    config: the configuration of the model.
    mesh: the mesh of the weights, which are drawn shard by shard; None for the mesh of
      the context, or the default device.
    dtype: dtype of the floating-point parameters; None keeps the model's.
    random_seed: seed of the draws, which do not depend on the mesh.
    scale: standard deviation of the draws.

  Raises:
    ValueError: the model has state that is neither a number nor a random key.
  """
  given = mesh
  mesh = mesh_lib.current_mesh() if given is None else mesh_lib.auto(given)
  graph, shapes = sharding.abstract(lambda: model_class(config, rngs=nnx.Rngs(0)))
  leaves, treedef = jax.tree.flatten(shapes)

  def one(i: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(random_seed), i)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      draw = scale * jax.random.normal(key, leaf.shape, jnp.float32)
      return draw.astype(leaf.dtype if dtype is None else dtype)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return jax.random.split(key, leaf.shape) if leaf.shape else key
    if jnp.issubdtype(leaf.dtype, jnp.integer):
      return jnp.zeros(leaf.shape, leaf.dtype)
    raise ValueError(
      f"a variable of dtype {leaf.dtype} cannot be drawn: build the model itself"
    )

  def draw() -> Any:
    return treedef.unflatten([one(i, leaf) for i, leaf in enumerate(leaves)])

  where = None if mesh is None else sharding.named_shardings(shapes, mesh)
  model = nnx.merge(graph, jax.jit(draw, out_shardings=where)())
  return sharding.on_users_mesh(model, given)
