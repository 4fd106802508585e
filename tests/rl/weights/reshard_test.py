import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from tests import toys
from tunix.models import quantization
from tunix.models.automodel import AutoModel
from tunix.rl.weights import reshard
from tunix.sft.checkpoints import stamp
from tunix.utils import mesh as mesh_lib, tree

X = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)


def mesh(axes, first=0):
  count = int(np.prod(list(axes.values())))
  return mesh_lib.create_mesh(axes, jax.devices()[first : first + count])


def layout(axes, spec, first=0):
  return NamedSharding(mesh(axes, first), spec)


def shard_bytes(where, shape):
  return int(np.prod(where.shard_shape(shape))) * 4


def test_the_intermediate_of_eight_shards_for_four():
  """fsdp 8 becomes split 4 times replica 2: device 2 i and 2 i + 1 hold quarter i."""
  source, target = layout({"fsdp": 8}, P("fsdp")), layout({"fsdp": 4}, P("fsdp"))
  between, last = reshard.route(source, target, X.shape)
  assert last is target and between.spec == P("fsdp_intermediate_split")
  assert dict(between.mesh.shape) == {
    "fsdp_intermediate_split": 4,
    "fsdp_intermediate_replica": 2,
  }
  index = between.devices_indices_map(X.shape)
  for i, device in enumerate(jax.devices()):
    assert index[device][0] == slice(4 * (i // 2), 4 * (i // 2 + 1))


def test_the_same_devices_in_another_order():
  """Rows to columns: a program keeps the order, so that the shards cross in between."""
  source = layout({"f": 8}, P("f"))
  turned = mesh_lib.create_mesh({"f": 8}, jax.devices()[::-1])
  target = NamedSharding(turned, P(None, "f"))
  narrow, landing, last = reshard.route(source, target, X.shape)
  assert narrow.spec == P("f") and landing.shard_shape(X.shape) == (2, 24)
  x = jax.device_put(X, source)
  out = reshard.reshard_arrays(x, source, target)
  assert last is target and out.sharding == target and x._npy_value is None
  np.testing.assert_array_equal(out, X)


LAYOUTS = {
  "8 to 4": ({"f": 8}, P("f"), {"f": 4}, P("f"), 0),
  "8 to 2, apart": ({"f": 8}, P("f"), {"f": 2}, P("f"), 6),
  "4 to 2, disjoint": ({"f": 4}, P("f"), {"f": 2}, P("f"), 4),
  "4 to whole": ({"f": 4}, P("f"), {"f": 4}, P(), 4),
  "rows to columns": ({"f": 4}, P("f"), {"f": 4}, P(None, "f"), 4),
  "2 to 4": ({"f": 2}, P("f"), {"f": 4}, P("f"), 4),
  "4 x 2 to 2": ({"f": 4, "t": 2}, P("f", "t"), {"f": 2}, P("f"), 6),
  "4 x 2 to 2 x 2": ({"f": 4, "t": 2}, P("f", "t"), {"f": 2, "t": 2}, P("f", "t"), 4),
  "two axes on one": ({"d": 2, "f": 4}, P(("d", "f")), {"f": 4}, P("f"), 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_side_holds_more_than_the_target_will(name, monkeypatch):
  """The array arrives, no stage was fetched to the host (JAX keeps what it fetched in
  `_npy_value`), and no device on the way holds more than the larger of what it has and
  what a device of the target gets."""
  moved = []

  def move(x, where, real=reshard._move):
    moved.append(x)
    return real(x, where)

  monkeypatch.setattr(reshard, "_move", move)
  axes, spec, to_axes, to_spec, first = LAYOUTS[name]
  source, target = layout(axes, spec), layout(to_axes, to_spec, first)
  stages = reshard.route(source, target, X.shape)
  limit = max(shard_bytes(where, X.shape) for where in (source, target))
  assert max(shard_bytes(where, X.shape) for where in stages) <= limit
  x = jax.device_put(X, source)
  direct = jax.device_put(X, source)
  jax.device_put(direct, target).block_until_ready()
  assert direct._npy_value is not None  # what this file is there to avoid
  out = reshard.reshard_arrays(x, None, target)
  assert moved[0] is x and len(moved) == len(stages)
  assert [stage._npy_value for stage in moved] == [None] * len(stages)
  assert out.sharding == target
  np.testing.assert_array_equal(out, X)


def test_there_and_back():
  """8 devices to 2 x 4, to 4, to 1 and back: equal bits everywhere, and the sources are
  gone as soon as their copies have come."""
  layouts = [
    layout({"f": 8}, P("f")),
    layout({"f": 2, "t": 4}, P("f", "t")),
    layout({"f": 4}, P("f")),
    layout({"f": 1}, P()),
  ]
  fresh = lambda: {"a": jnp.arange(16 * 24.0).reshape(16, 24), "b": jnp.ones((64, 8))}
  arrays = jax.jit(fresh, out_shardings=layouts[0])()
  wanted = stamp.content_stamp(arrays)
  for where in (*layouts[1:], *layouts[-2::-1]):
    before, arrays = (
      arrays,
      reshard.reshard_pytree(arrays, where, donate_input=True),
    )
    assert stamp.content_stamp(arrays) == wanted
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(arrays)):
      assert new.sharding == where and old.is_deleted()


def test_gathering_the_intermediate_gathers_no_more():
  """From the compiled program: a device's result is its quarter, and its temporaries
  are no larger."""
  source, target = layout({"f": 8}, P("f")), layout({"f": 4}, P("f"))
  between, _ = reshard.route(source, target, (1024, 256))
  shape = jax.ShapeDtypeStruct((1024, 256), np.float32, sharding=source)
  program = jax.jit(lambda x: x, out_shardings=between).lower(shape).compile()
  memory = program.memory_analysis()
  assert memory is not None
  assert memory.output_size_in_bytes == 1024 * 256 * 4 // 4
  assert memory.temp_size_in_bytes <= memory.output_size_in_bytes


def test_routes_that_need_no_stage():
  rows = layout({"f": 8}, P("f"))
  for source, target in [
    (rows, layout({"f": 8}, P())),  # the same devices: one all-gather
    (rows, layout({"f": 8}, P(None, "f"))),
    (rows, SingleDeviceSharding(jax.devices()[0])),
    (layout({"f": 4}, P()), layout({"f": 4}, P("f"), 4)),
    (layout({"f": 3}, P(None, "f")), layout({"f": 4}, P(), 4)),  # nothing in common
  ]:
    assert reshard.route(source, target, X.shape) == [target]
    out = reshard.reshard_arrays(jax.device_put(X, source), source, target)
    np.testing.assert_array_equal(out, X)
    assert out.sharding == target


def test_targets_are_shardings_arrays_or_prefixes():
  one, two = layout({"f": 4}, P("f"), 4), layout({"f": 2}, P())
  arrays = {"a": X, "b": (X + 1, X + 2)}
  first = reshard.reshard_pytree(arrays, one)
  assert {leaf.sharding for leaf in jax.tree.leaves(first)} == {one}
  second = reshard.reshard_pytree(first, {"a": one, "b": two})
  assert [x.sharding for x in jax.tree.leaves(second)] == [one, two, two]
  third = reshard.reshard_pytree(arrays, second)
  assert [x.sharding for x in jax.tree.leaves(third)] == [one, two, two]
  assert stamp.content_stamp(third) == stamp.content_stamp(arrays)
  with pytest.raises(TypeError, match="int, which has no sharding"):
    reshard.reshard_pytree({"a": X}, {"a": 3})
  with pytest.raises(ValueError, match=r"[Kk]ey"):
    reshard.reshard_pytree({"a": X}, {"b": one})


def test_a_wrong_source_is_refused():
  x = jax.device_put(X, layout({"f": 8}, P("f")))
  target = layout({"f": 4}, P("f"))
  with pytest.raises(ValueError, match="source_sharding is"):
    reshard.reshard_arrays(x, layout({"f": 8}, P()), target)


def test_inside_jit():
  source, target = layout({"f": 8}, P("f")), layout({"g": 2, "h": 4}, P("g"))
  move = jax.jit(lambda x: reshard.reshard_arrays(x, source, target))
  out = move(jax.device_put(X, source))
  assert out.sharding.is_equivalent_to(target, 2)
  np.testing.assert_array_equal(out, X)


def test_donated_arrays_are_deleted_but_not_shared_memory():
  source, target = layout({"f": 8}, P("f")), layout({"f": 4}, P("f"))
  x, kept = jax.device_put(X, source), jax.device_put(X + 1, source)
  out = reshard.reshard_pytree([x, kept], [target, source], donate_input=True)
  assert x.is_deleted() and not kept.is_deleted()
  np.testing.assert_array_equal(out[0], X)
  np.testing.assert_array_equal(out[1], X + 1)
  reshard.reshard_pytree(out[0], source)
  assert not out[0].is_deleted()


def test_pathways_moves_when_it_is_there(monkeypatch):
  moved = []

  def fake(x, where):
    moved.append(where)
    return jax.device_put(x, where)

  x = jax.device_put(X, layout({"f": 8}, P("f")))
  target = layout({"f": 4}, P("f"))
  name = "pathwaysutils.experimental.reshard"
  monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(reshard=fake))
  reshard.reshard_arrays(x, None, target)
  assert not moved  # JAX does not run through Pathways
  monkeypatch.setenv("JAX_PLATFORMS", "proxy,cpu")
  reshard.reshard_arrays(x, None, target)
  assert moved[-1] == target and len(moved) == 2


def test_pathways_without_pathwaysutils_warns_once(monkeypatch, caplog):
  x = jax.device_put(X, layout({"f": 8}, P("f")))
  target = layout({"f": 4}, P("f"))
  name = "pathwaysutils.experimental.reshard"
  monkeypatch.setitem(sys.modules, name, None)  # not installed
  reshard._warn_once.cache_clear()
  reshard.reshard_arrays(x, None, target)
  assert not caplog.records  # JAX does not run through Pathways
  monkeypatch.setenv("JAX_PLATFORMS", "proxy,cpu")
  for _ in range(2):
    out = reshard.reshard_arrays(x, None, target)
    assert out.sharding == target
    np.testing.assert_array_equal(out, X)
  [record] = caplog.records
  assert "pip install pathwaysutils" in record.message


def specs(model):
  return {
    path: tuple(leaf.sharding.spec) if isinstance(leaf.sharding, NamedSharding) else ()
    for path, leaf in tree.flatten(nnx.state(model)).items()
  }


def devices(model):
  return {d for x in jax.tree.leaves(nnx.state(model)) for d in x.sharding.device_set}


def values(model):
  return {path: np.asarray(x) for path, x in tree.flatten(nnx.state(model)).items()}


@pytest.mark.parametrize("kind", ["lora", "nf4"])
def test_a_model_there_and_back(kind, mesh_fsdp4_tp2):
  model = toys.model(lora_rank=2 if kind == "lora" else 0, num_layers=1)
  if kind == "nf4":
    model = quantization.quantize(model, "nf4")
  before = values(model)
  assert reshard.reshard_model_to_mesh(model, mesh_fsdp4_tp2) is model
  split = specs(model)
  assert split["embed_tokens.embedding"] == ("tp", "fsdp")
  reshard.reshard_model_to_mesh(model, mesh({"tp": 2}, 6))
  assert specs(model)["embed_tokens.embedding"] == ("tp", None)
  assert devices(model) == set(jax.devices()[6:])
  jax.tree.map(np.testing.assert_array_equal, values(model), before)
  reshard.reshard_model_to_mesh(model, mesh_fsdp4_tp2)
  assert specs(model) == split
  jax.tree.map(np.testing.assert_array_equal, values(model), before)


def test_a_model_replicated_and_split_again(mesh_fsdp8):
  model = AutoModel.from_config(toys.config(), mesh_fsdp8)
  split = specs(model)
  reshard.reshard_model_to_mesh(model, mesh({"fsdp": 4}), replicate=True)
  leaves = jax.tree.leaves(nnx.state(model))
  assert all(x.is_fully_replicated and len(x.devices()) == 4 for x in leaves)
  reshard.reshard_model_to_mesh(model, mesh_fsdp8)
  assert specs(model) == split
  alive = jax.tree.leaves(nnx.state(model))
  assert reshard.reshard_model_to_mesh(model, None) is model
  assert all(a is b for a, b in zip(alive, jax.tree.leaves(nnx.state(model))))


def test_a_users_layout_is_kept():
  """Split otherwise than its metadata says, by somebody who knows why."""
  explicit = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
  model = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
  where = NamedSharding(explicit, P(None, "b"))
  model.kernel.set_value(jax.device_put(model.kernel[...], where))
  reshard.reshard_model_to_mesh(model, mesh({"b": 2}))
  assert model.kernel[...].sharding.spec == P(None, "b")
  reshard.reshard_model_to_mesh(model, mesh({"b": 5}))  # 5 does not divide 24
  assert model.kernel[...].is_fully_replicated


def test_the_mesh_that_is_set_may_be_of_other_devices(mesh_fsdp8):
  """A cluster with roles on 4 + 4 devices, made under the mesh of all 8."""
  source, target = (layout({"fsdp": 4}, P(*s), first=4) for s in (("fsdp",), ()))
  x = jax.device_put(X, source)
  with jax.set_mesh(mesh_fsdp8):
    moved = reshard.reshard_pytree(x, target)
  assert moved.sharding == target
  np.testing.assert_array_equal(moved, X)


def test_weights_arrive_without_a_program_on_the_devices_that_sample(monkeypatch):
  """Two threads that start programs over the same devices could wait for each other."""
  target = layout({"tp": 4}, P(None, "tp"), first=4)
  x = jax.device_put(X, layout({"fsdp": 4}, P("fsdp")))
  used, lay_out = [], reshard._lay_out

  def noted(sharding):
    used.append(sharding.device_set)
    return lay_out(sharding)

  monkeypatch.setattr(reshard, "_lay_out", noted)
  sent = reshard.landed({"x": x}, {"x": target})["x"]
  assert sent.sharding.device_set == target.device_set
  assert target.device_set not in used
  out = reshard.laid_out(sent, target)
  assert out.sharding == target and used[-1] == target.device_set
  np.testing.assert_array_equal(out, X)
