"""Tokens or weights of experts: what is fewer bytes travels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from tests import toys
from tunix.models.transformer.config import MoEConfig, ShardingRules
from tunix.models.transformer.experts import shard as expert_shard
from tunix.utils import mesh as mesh_lib

WIDE, NARROW = 256, 4  # hidden widths: the weights of the latter are few bytes


# A device sends 4 bytes for each of 8 numbers of a token, and 4 + 4 for each of its two
# experts, and gets 8 numbers back: 4 * 8 + 2 * 8 + 4 * 8 = 80 bytes. The experts have
# 8 * 100 * 4 = 3,200 bytes, a fourth of them on each device.
@pytest.mark.parametrize(("tokens", "axis"), [(9, "ep"), (10, "ep"), (11, None)])
@pytest.mark.parametrize(("dtype", "numbers"), [(jnp.float32, 100), (jnp.int4, 800)])
def test_the_rule_by_hand(tokens, axis, dtype, numbers):
  mesh = AbstractMesh((4,), ("ep",))
  x = jax.ShapeDtypeStruct((tokens, 4, 8), jnp.float32)
  experts = [jax.ShapeDtypeStruct((8, numbers), dtype)]
  shard = expert_shard.on_mesh(x, experts, 8, 2, mesh, ShardingRules(ep="ep"))
  assert (shard.axis, shard.count) == (axis, 2 if axis else 8)


@pytest.mark.parametrize(
  ("hidden", "axes"),
  [
    (WIDE, {"fsdp": 2, "ep": 4}),
    (NARROW, {"fsdp": 2, "ep": 4}),
    (NARROW, {"ep": 2, "cp": 2, "tp": 2}),
  ],
)
def test_either_way_gradients_are_those_of_one_device(hidden, axes):
  moe = MoEConfig(num_experts=8, experts_per_token=2, hidden_dim=hidden)
  made = toys.model(num_layers=1, moe=moe).unstack()
  graph, state = nnx.split(made.layers[0].mlp)
  x = jax.random.normal(jax.random.key(0), (8, 32, 32))
  loss = lambda state, x: jnp.sum(jnp.square(nnx.merge(graph, state)(x)))
  run = jax.jit(jax.grad(loss, argnums=(0, 1)))
  want = run(state, x)
  with jax.set_mesh(mesh_lib.create_mesh(axes)):
    assert ("all_gather" in run.lower(state, x).as_text()) == (hidden == WIDE)
    got = mesh_lib.to_host(run(state, x))
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(other)
