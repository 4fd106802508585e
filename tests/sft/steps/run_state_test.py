import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tests import optimizers
from tunix.sft.steps.run_state import (
  RunState,
  flatten_optimizer,
  init_optimizer,
  optimizer_shardings,
  unflatten_optimizer,
)
from tunix.utils import tree

PARAMS = {
  "a": {"kernel": jnp.ones((8, 4))},
  "kernel": jnp.ones((8, 4)),
  "b": jnp.ones(3),
}


def test_only_parts_with_arrays_are_arrays():
  state = RunState(model_params=PARAMS, model_rest={}, progress={"x": 1})
  assert list(state.arrays()) == ["model_params"]


@pytest.mark.parametrize(
  "tx",
  [
    optimizers.adamw(1e-3),
    optimizers.sgd(1e-3),
    optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-3)),
    optax.inject_hyperparams(optax.adam)(1e-3),
    optax.MultiSteps(optimizers.adam(1e-3), 2),
  ],
)
def test_optimizer_state_goes_to_dicts_and_back(tx):
  state = tx.init(PARAMS)
  state = jax.tree.map(lambda x: x + 1, state)
  saved = flatten_optimizer(state)
  assert all(isinstance(k, str) for k in saved)
  back = unflatten_optimizer(saved, tx.init(PARAMS))
  assert jax.tree.structure(back) == jax.tree.structure(state)
  for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state)):
    np.testing.assert_array_equal(a, b)


def test_moments_lie_like_their_parameters(mesh_fsdp8):
  split = NamedSharding(mesh_fsdp8, P("fsdp", None))
  replicated = NamedSharding(mesh_fsdp8, P())
  where = {"a": {"kernel": split}, "kernel": replicated, "b": replicated}
  params = jax.device_put(PARAMS, where)
  state = init_optimizer(optimizers.adam(1e-3), params, mesh_fsdp8)
  flat = tree.flatten(state)
  for moment in ("mu", "nu"):
    assert flat[f"0.{moment}.a.kernel"].sharding.spec == P("fsdp", None)
    assert flat[f"0.{moment}.kernel"].sharding.is_fully_replicated
  assert flat["0.count"].sharding.is_fully_replicated
  factored = optax.adafactor(1e-3).init(params)
  names = tree.flatten(optimizer_shardings(factored, params, mesh_fsdp8))
  assert len(names) == len(jax.tree.leaves(factored))
