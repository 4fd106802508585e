import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tunix.utils import mesh as mesh_lib


def test_create_mesh():
  mesh = mesh_lib.create_mesh({"fsdp": 4, "tp": 2})
  assert dict(mesh.shape) == {"fsdp": 4, "tp": 2}
  assert set(mesh.axis_types) == {AxisType.Auto}
  assert dict(mesh_lib.create_mesh({"dp": 2, "fsdp": -1}).shape) == {"dp": 2, "fsdp": 4}
  assert mesh_lib.create_mesh({"fsdp": 3}, jax.devices()[:3]).size == 3


@pytest.mark.parametrize(
  "axes, message",
  [
    ({"fsdp": 3}, r"needs 3 devices, there are 8"),
    ({"fsdp": 3, "tp": -1}, r"there are 8"),
    ({"fsdp": 16, "tp": -1}, r"there are 8"),
    ({"fsdp": 0}, r"sizes must be at least 1"),
    ({"fsdp": -1, "tp": -1}, r"one of them may be -1"),
    ({"fsdp": -2}, r"sizes must be at least 1"),
  ],
)
def test_meshes_that_cannot_be(axes, message):
  with pytest.raises(ValueError, match=message):
    mesh_lib.create_mesh(axes)


def explicit():
  return jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))


def test_explicit_axes_become_auto(mesh_fsdp8):
  assert mesh_lib.auto(explicit()) == mesh_fsdp8
  assert mesh_lib.auto(mesh_fsdp8) is mesh_fsdp8


def test_current_mesh_in_every_way_to_set_one(mesh_fsdp8):
  assert mesh_lib.current_mesh() is None
  with jax.set_mesh(mesh_fsdp8):
    assert mesh_lib.current_mesh() == mesh_fsdp8
  with jax.set_mesh(explicit()):
    assert mesh_lib.current_mesh() == mesh_fsdp8
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    with mesh_fsdp8:
      assert mesh_lib.current_mesh() == mesh_fsdp8
  with mesh_lib.use_mesh(mesh_fsdp8):
    assert mesh_lib.current_mesh() == mesh_fsdp8
  with mesh_lib.use_mesh(None):
    assert mesh_lib.current_mesh() is None


def test_context_mesh_is_seen_while_tracing(mesh_fsdp8):
  seen = []

  @jax.jit
  def traced(x):
    seen.append(mesh_lib.context_mesh())
    return x

  traced(jnp.ones(1))
  assert seen.pop() is None
  with jax.set_mesh(mesh_fsdp8):
    traced(jnp.ones(2))
  assert dict(seen.pop().shape) == {"fsdp": 8}
  with jax.set_mesh(mesh_lib.create_mesh({"fsdp": 1}, jax.devices()[:1])):
    traced(jnp.ones(3))
  assert seen.pop() is None, "one device needs no mesh"


def test_mesh_of(mesh_fsdp8):
  x = jax.device_put(jnp.ones(8), NamedSharding(mesh_fsdp8, P("fsdp")))
  assert mesh_lib.mesh_of({"a": jnp.ones(2), "b": x}) == mesh_fsdp8
  assert mesh_lib.mesh_of({"a": jnp.ones(2), "b": np.ones(2)}) is None


@pytest.mark.parametrize(
  "spec, shape, want",
  [
    (("fsdp", "tp"), (8, 6), P("fsdp", "tp")),
    (("fsdp", "tp"), (8, 5), P("fsdp", None)),
    (("ep", "tp"), (8, 6), P(None, "tp")),
    ((("fsdp", "tp"),), (16, 3), P(("fsdp", "tp"), None)),
    ((("fsdp", "tp"),), (12, 3), P("fsdp", None)),  # as far as they divide
    ((("fsdp", "tp"),), (6, 3), P(None, None)),
    ((("dp", "fsdp"),), (4,), P("fsdp")),
    ((), (4, 4), P(None, None)),
  ],
)
def test_fit_spec(spec, shape, want, mesh_fsdp4_tp2):
  assert mesh_lib.fit_spec(spec, shape, mesh_fsdp4_tp2) == want


def test_axes_size(mesh_fsdp4_tp2):
  sizes = [
    mesh_lib.axes_size(mesh_fsdp4_tp2, axes) for axes in (None, "tp", ("fsdp", "tp"))
  ]
  assert sizes == [1, 2, 8]


def test_constrain(mesh_fsdp8):
  x = jnp.arange(16.0).reshape(8, 2)
  assert mesh_lib.constrain(x, "fsdp") is x
  pin = jax.jit(lambda x: mesh_lib.constrain(x * 1, "fsdp", "tp"))
  with jax.set_mesh(mesh_fsdp8):
    y = pin(x)
  np.testing.assert_array_equal(x, y)
  assert y.addressable_shards[0].data.shape == (1, 2)
  with jax.set_mesh(mesh_fsdp8):
    assert mesh_lib.constrain(jnp.ones((7, 2)), "fsdp").shape == (7, 2)


def test_context_platform(mesh_fsdp8):
  assert mesh_lib.context_platform() == "cpu"
  device = jax.sharding.AbstractDevice(
    device_kind="TPU v5e", num_cores=1, platform="tpu"
  )
  chips = jax.sharding.AbstractMesh((2,), ("fsdp",), abstract_device=device)
  with jax.sharding.use_abstract_mesh(chips):
    assert mesh_lib.context_platform() == "tpu"
  with mesh_fsdp8:
    assert mesh_lib.context_platform() == "cpu"
