"""The examples of parallel training, on the test world's eight devices."""

import collections

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.examples import loading
from tunix.utils.mesh import create_mesh

STEPS = 3


@pytest.fixture(scope="module")
def tensor():
  return loading.example("tensor_parallel")


@pytest.fixture(scope="module", params=["mlp", "transformer"])
def layouts(request, tensor, tmp_path_factory):
  folder = tmp_path_factory.mktemp(request.param)
  runs = {
    name: tensor.run(request.param, layout, STEPS, folder / name)
    for name, layout in tensor.LAYOUTS.items()
  }
  return request.param, runs


def test_layouts_have_the_losses_of_one_device(layouts):
  _, runs = layouts
  wanted = runs["one"]["losses"]
  assert len(wanted) == STEPS and wanted[-1] < wanted[0]
  for name, run in runs.items():
    np.testing.assert_allclose(run["losses"], wanted, rtol=1e-5, err_msg=name)


def test_layouts_say_what_they_should_to_each_other(layouts):
  task, runs = layouts
  said = {name: set(run["collectives"]) for name, run in runs.items()}
  assert said["one"] == set()
  assert said["data"] == {"all-reduce"}
  # Every device has the two KV heads; their gradients are summed and gathered.
  shared = {"all-gather"} if task == "transformer" else set()
  assert said["tensor"] == {"all-reduce"} | shared
  assert ("all-gather" in said["fsdp"]) == (task == "transformer")


def test_devices_hold_their_part(layouts):
  task, runs = layouts
  held = {name: run["bytes"] for name, run in runs.items()}
  assert held["data"] == held["one"]
  assert held["tensor"] < held["one"] / 4
  if task == "transformer":
    # All but the norms' scales: eight norms of 64 floats, none of them cut.
    assert held["fsdp"] < held["one"] / 7.5


def test_kv_heads_stay_whole_where_the_axis_does_not_divide_them(layouts):
  task, runs = layouts
  if task == "transformer":
    block = runs["fsdp x tensor"]["model"].blocks[0]
    assert block.q.sharding.spec == P("fsdp", "tp", None)
    assert block.kv.sharding.spec == P("fsdp", None, None, None)


def test_a_profile_has_communication_if_devices_share_work(layouts):
  _, runs = layouts
  for name, run in runs.items():
    step, communication, other = run["profile"]
    assert (communication > 0) == (name != "one")
    assert other > 0 and step >= communication + other


def test_overlapping_operations_of_a_device_count_once(tensor):
  spans = [(True, 0, 10, 20), (True, 0, 15, 18), (False, 0, 18, 25), (False, 1, 0, 4)]
  assert tensor.covered(spans) == {0: 15, 1: 4}


def test_collectives_are_listed_with_their_scope(layouts, tensor):
  task, runs = layouts
  if task == "transformer":
    sent = tensor.senders(runs["tensor"]["program"])
    counted = collections.Counter(kind for kind, _, _ in sent)
    assert counted == runs["tensor"]["collectives"]
    for part in ("block0)/attention", "block1)/mlp"):
      assert any(part in scope for _, _, scope in sent)


def test_collectives_are_counted_by_kind(tensor):
  text = """
    %a = f32[8] all-reduce(%x), channel_id=1
    %b = f32[8] all-reduce-start(%a)
    %c = (f32[8]) all-gather(%b)
    %all-to-all.1 = f32[8] fusion(%c)
  """
  assert tensor.collectives(text) == {"all-reduce": 2, "all-gather": 1}


def test_an_mlp_written_by_hand_is_the_one_that_xla_writes(tensor):
  shapes = (8, 16), (16, 32), (32, 16)
  keys = jax.random.split(jax.random.key(0), 3)
  x, w1, w2 = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
  by_hand = jax.jit(tensor.mlp_by_hand(create_mesh({"tp": 8})))
  wanted = np.maximum(x @ w1, 0) @ w2
  np.testing.assert_allclose(by_hand(x, w1, w2), wanted, rtol=1e-4, atol=1e-5)
  said = tensor.collectives(by_hand.lower(x, w1, w2).compile().as_text())
  assert said == {"all-gather": 1, "reduce-scatter": 1}


def test_a_step_written_by_hand_has_the_gradients_of_one_device(tensor):
  shapes = (8, 16), (16, 32), (32, 16), (8, 16)
  keys = jax.random.split(jax.random.key(0), 4)
  *arrays, gradient = (
    jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)
  )
  out, backward = jax.vjp(lambda x, w1, w2: nnx.relu(x @ w1) @ w2, *arrays)
  by_hand = jax.jit(tensor.step_by_hand(create_mesh({"tp": 8})))
  for got, want in zip(by_hand(*arrays, gradient), (out, *backward(gradient))):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
  said = tensor.collectives(by_hand.lower(*arrays, gradient).compile().as_text())
  assert said == {"all-gather": 2, "reduce-scatter": 2}


@pytest.fixture(scope="module")
def data():
  return loading.example("data_parallel")


def test_all_ways_to_write_a_step_are_one(data):
  mesh = data.new_mesh()
  wanted = data.train(jax.jit(data.step), STEPS)
  assert wanted[-1] < wanted[0]
  for losses in (
    data.train(data.by_jit(mesh), STEPS),
    data.train(data.by_shard_map(mesh), STEPS),
    data.by_trainer(mesh, STEPS),
  ):
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_addition_is_traced_once_for_all_devices(data, capsys):
  x = np.arange(48, dtype=np.float32).reshape(16, 3)
  total = data.parallel_add(data.new_mesh(), x, np.ones_like(x))
  np.testing.assert_array_equal(total, x + 1)
  assert total.sharding.shard_shape(x.shape) == (2, 3)
  assert capsys.readouterr().out.count("tracing") == 1


@pytest.mark.parametrize("rows", [1, 3, 8, 13])
def test_exercises_take_any_number_of_rows(data, rows):
  x = np.random.default_rng(0).normal(size=(rows, 5)).astype(np.float32)
  mesh = data.new_mesh()
  np.testing.assert_allclose(data.row_means(mesh, x), x.mean(1), rtol=1e-5)
  np.testing.assert_allclose(data.mean_of_all(mesh, x), x.mean(), rtol=1e-5, atol=1e-7)


def test_every_device_shows_its_rows(data, capfd):
  x = np.arange(16, dtype=np.float32).reshape(16, 1)
  np.testing.assert_array_equal(data.show_rows(data.new_mesh(), x), x)
  jax.effects_barrier()
  lines = capfd.readouterr().out.strip().splitlines()
  assert sorted(line.strip() for line in lines) == [
    f"device {i} has rows that begin with [{2.0 * i:g}. {2.0 * i + 1:g}.]"
    for i in range(8)
  ]


def test_the_example_of_sharding(tmp_path):
  sharding = loading.example("sharding")
  _, wanted = sharding.train(None, tmp_path / "one", STEPS)
  assert wanted[-1] < wanted[0]
  for name, axes in sharding.MESHES.items():
    model, losses = sharding.train(create_mesh(axes), tmp_path / name, STEPS)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4, err_msg=name)
    spec = model.layers.mlp.up_proj.kernel[...].sharding.spec
    cut = (axis if axis in axes else None for axis in ("fsdp", "tp"))
    assert tuple(spec) == (None, *cut)
