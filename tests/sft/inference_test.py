"""Forward passes of models that lie where nothing else does."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tunix.sft import inference
from tunix.utils import mesh as mesh_lib

ROWS = {"x": np.arange(12, dtype=np.float32).reshape(4, 3)}


def score(model, x):
  return model(x)[:, 0]


def linear(mesh=None):
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  if mesh is not None:
    whole = NamedSharding(mesh, PartitionSpec())
    nnx.update(model, jax.device_put(nnx.state(model), whole))
  return model


@pytest.mark.parametrize("names", [("fsdp", "tp"), ("data", "model")])
def test_rows_are_split_over_the_axes_that_the_models_mesh_has(names, mesh_fsdp8):
  own = mesh_lib.create_mesh(dict.fromkeys(names, 2), jax.devices()[:4])
  want = inference.run(linear(), score, ROWS, None, ("fsdp",))
  with jax.set_mesh(mesh_fsdp8):  # another, of the trained model
    model = linear(own)
    found = inference.apply(model, score, ROWS, ("fsdp",))
    parts = inference.run(model, score, ROWS, 2, ("fsdp",))
  assert found.devices() == set(own.devices.flat)
  np.testing.assert_allclose(found, want, rtol=1e-6)
  np.testing.assert_allclose(parts, want, rtol=1e-6)
