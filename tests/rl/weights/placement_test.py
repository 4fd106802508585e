import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from tests import toys
from tunix.models import backbone, lora, quantization
from tunix.models.automodel import AutoModel
from tunix.rl.weights import placement, reshard
from tunix.rl.weights.placement import WeightSyncError, copy_weights
from tunix.sft.checkpoints import stamp
from tunix.sft.steps.module_state import ModuleState
from tunix.utils import mesh as mesh_lib, tree

TOKENS = toys.batch(0, rows=2, length=8)["input_tokens"]


def mesh(axes, first=0):
  count = int(np.prod(list(axes.values())))
  return mesh_lib.create_mesh(axes, jax.devices()[first : first + count])


@functools.cache
def _base(layers):
  return toys.model(num_layers=layers)


def fresh(layers=2):
  """A model of its own over arrays that are made once."""
  return nnx.clone(_base(layers))


def arrays(model, kind=nnx.Param):
  return tree.flatten(nnx.state(model, kind))


def stamp_of(model):
  return stamp.content_stamp(nnx.state(model, nnx.Param))


def logits(model):
  graph, state = nnx.split(model)
  return np.asarray(jax.jit(lambda s: nnx.merge(graph, s)(TOKENS)[0])(state))


def drawn(model, seed=1):
  """Adapters as after some training: A and B drawn, magnitudes scaled."""
  key = jax.random.key(seed)
  for path, node in sorted(
    (path, node)
    for path, node in nnx.iter_graph(model)
    if isinstance(node, nnx.LoRAParam)
  ):
    key, use = jax.random.split(key)
    noise = jax.random.normal(use, node.shape, node.dtype)
    base = node[...] if path[-1] == "lora_magnitude" else 0.0
    node.set_value(base + 0.1 * noise)
  return model


def adapted(base, seed=1, **options):
  config = lora.LoraConfig(rank=2, targets=("q_proj", "down_proj"), **options)
  return drawn(lora.apply(base, config), seed)


@pytest.mark.parametrize("kind", ["plain", "dropout", "dora", "nf4"])
def test_the_reference_is_the_base_without_a_copy(kind):
  base = fresh(layers=1)
  if kind == "nf4":
    base = quantization.quantize(base, "nf4")
  options = {"dropout": {"dropout": 0.5}, "dora": {"use_dora": True}}
  actor = adapted(base, **options.get(kind, {}))
  actor.train()
  reference = backbone.reference_of(actor)
  assert backbone.share_backbone(actor, reference)
  assert not arrays(reference, nnx.LoRAParam) and arrays(actor, nnx.LoRAParam)
  want = logits(base)
  np.testing.assert_array_equal(logits(reference), want)
  assert np.abs(logits(actor) - want).max() > 1e-3
  training = [m.layers.attn.q_proj.deterministic is False for m in (actor, reference)]
  assert training == [True, False]
  used = {id(x) for x in arrays(actor).values()}
  assert {id(x) for x in arrays(reference).values()} <= used


def test_the_reference_outlives_training_of_the_actor():
  """Trained as the trainer does it: owned, donated, handed back."""
  actor = adapted(fresh())
  reference = backbone.reference_of(actor)
  before = stamp_of(reference)
  state = ModuleState(actor)
  state.own()
  step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
  state.replace(step(state.params), state.rest)
  state.hand_back()
  assert backbone.share_backbone(actor, reference)
  assert stamp_of(reference) == before


class Adapted(nnx.Module):
  """A user's linear map with adapters of another make."""

  def __init__(self):
    self.kernel = nnx.Param(jnp.ones((3, 2)))
    self.first = nnx.LoRAParam(jnp.ones((3, 1)))
    self.second = nnx.LoRAParam(jnp.ones((1, 2)))

  def __call__(self, x):
    return x @ self.kernel[...] + x @ self.first[...] @ self.second[...]


def test_the_reference_of_a_users_model():
  actor = Adapted()
  reference = backbone.reference_of(actor)
  x = jnp.arange(3.0)
  np.testing.assert_array_equal(reference(x), x @ jnp.ones((3, 2)))
  np.testing.assert_array_equal(actor(x), 2 * (x @ jnp.ones((3, 2))))
  assert backbone.share_backbone(actor, reference)


def test_who_shares_nothing():
  actor = fresh()
  with pytest.raises(ValueError, match="no adapters"):
    backbone.reference_of(actor)
  assert not backbone.share_backbone(adapted(actor), toys.model())  # equal numbers
  one = adapted(actor)
  moved = backbone.reference_of(one)
  name = "norm.scale"
  moved.norm.scale.set_value(jnp.copy(moved.norm.scale[...]))
  assert name in arrays(moved) and not backbone.share_backbone(one, moved)
  alias = backbone.reference_of(one)
  scale = alias.norm.scale[...]
  alias.norm.scale.set_value(jax.device_put(scale, scale.sharding))
  assert backbone.share_backbone(one, alias)  # another object, the same memory


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host", None])
def test_offload_and_back(kind, monkeypatch, mesh_fsdp8):
  model = adapted(reshard.reshard_model_to_mesh(fresh(), mesh_fsdp8))
  if kind != "pinned_host":
    monkeypatch.setattr(placement, "_host_kind", lambda x: kind)
  graph = nnx.graphdef(model)
  before = {path: x.sharding for path, x in arrays(model).items()}
  content = {path: np.asarray(x) for path, x in arrays(model).items()}
  assert placement.offload(placement.offload(model)) is model
  for path, x in arrays(model).items():
    if kind is None:
      assert isinstance(x, np.ndarray), path
    else:
      assert x.sharding == before[path].with_memory_kind(kind), path
  assert placement.onload(placement.onload(model)) is model
  assert {path: x.sharding for path, x in arrays(model).items()} == before
  assert nnx.graphdef(model) == graph
  for path, x in arrays(model).items():
    np.testing.assert_array_equal(x, content[path])


def test_offloading_frees_the_devices():
  earlier = jax.live_arrays()  # held, so that no other test's arrays go in between
  model = toys.model()  # nobody else holds its arrays
  live = lambda: sum(
    x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device"
  )
  size = tree.size_bytes(arrays(model))
  before = live()
  placement.offload(model)
  assert before - live() == size
  placement.onload(model)
  assert live() == before
  del earlier


def pair(needs):
  """(source on 4 devices, target on 2 others of the same policy before training)."""
  base, target = reshard.reshard_model_to_mesh(fresh(), mesh({"fsdp": 4})), fresh()
  source = base if needs == "weights" else adapted(base, use_dora=needs == "merged")
  if needs == "adapters":
    target = adapted(target)
  return source, reshard.reshard_model_to_mesh(target, mesh({"tp": 2}, 6))


def train(model):
  """One update of what is trained."""
  kind = nnx.LoRAParam if arrays(model, nnx.LoRAParam) else nnx.Param
  state = jax.tree.map(lambda x: x * 1.25 + 0.01, nnx.state(model, kind))
  nnx.update(model, state)
  return tree.size_bytes(state)


@pytest.mark.parametrize("needs", ["adapters", "merged", "weights"])
def test_weights_reach_another_mesh(needs):
  source, target = pair(needs)
  assert placement.sync_needs(source, target) == needs
  placed = {path: x.sharding for path, x in arrays(target).items()}
  if needs == "merged":  # the fresh target lacks what the drawn adapters add
    assert copy_weights(source, target) > 0
  assert copy_weights(source, target) == 0  # nothing differs
  size = train(source)
  moved = copy_weights(source, target)
  kernels = ("q_proj.kernel", "down_proj.kernel")
  merged = sum(x.nbytes for p, x in arrays(target).items() if p.endswith(kernels))
  assert moved == (merged if needs == "merged" else size)
  expected = lora.merge(source) if needs == "merged" else source
  assert stamp_of(target) == stamp_of(expected)
  assert {path: x.sharding for path, x in arrays(target).items()} == placed


def test_the_same_policy_after_a_sync():
  source, target = pair("merged")
  train(source)
  copy_weights(source, target)
  np.testing.assert_allclose(logits(target), logits(source), atol=1e-4)


def test_a_target_of_another_dtype():
  source = toys.model(seed=1)
  target = AutoModel.from_config(toys.config(param_dtype=jnp.bfloat16))
  size = tree.size_bytes(arrays(target))
  norms = sum(x.nbytes for p, x in arrays(target).items() if "norm" in p)
  assert copy_weights(source, target) == size - norms  # all norms are ones
  for path, x in arrays(target).items():
    assert x.dtype == jnp.bfloat16
    np.testing.assert_array_equal(x, arrays(source)[path].astype(jnp.bfloat16))
  # An update below the target's resolution is no change to it.
  train_little = jax.tree.map(lambda x: x * (1 + 1e-6), nnx.state(source, nnx.Param))
  nnx.update(source, train_little)
  assert 0 <= copy_weights(source, target) < size / 4


def test_shared_arrays_are_not_sent():
  base = fresh()
  source, target = adapted(base, seed=1), adapted(base, seed=2)
  size = tree.size_bytes(arrays(source, nnx.LoRAParam))
  assert copy_weights(source, target) == size


def test_adapters_alone_are_sent_to_a_clone_on_other_devices():
  actor = adapted(fresh(layers=1))
  device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
  clone = nnx.clone(actor)
  nnx.update(clone, jax.device_put(nnx.state(clone), device))
  arrived = placement.sent(actor, clone)
  assert arrived.keys() == arrays(actor, nnx.LoRAParam).keys()
  assert all(x.sharding == device for x in arrived.values())


def test_a_transport_that_loses_the_update():
  source, target = adapted(fresh()), adapted(fresh())
  train(source)
  stale = arrays(target)
  before = stamp_of(target)
  lossy = lambda sent, where: {p: stale[p] for p in sent}
  with pytest.raises(WeightSyncError, match=r"4 of 4 .* still has its old content"):
    copy_weights(source, target, lossy)
  with pytest.raises(
    WeightSyncError, match=r"1 of 4 .* got nothing for .*q_proj.lora_a"
  ):
    copy_weights(source, target, lambda sent, where: dict(sorted(sent.items())[1:]))
  wrong = lambda sent, where: jax.tree.map(
    lambda x, w: jax.device_put(x.at[(0,) * x.ndim].add(1), w), sent, where
  )
  with pytest.raises(WeightSyncError, match="has other content"):
    copy_weights(source, target, wrong)
  assert stamp_of(target) == before
  assert copy_weights(source, target) > 0


def test_models_that_do_not_fit():
  base = fresh()
  with pytest.raises(ValueError, match="only the target has the parameter"):
    copy_weights(base, toys.model(qkv_bias=True))
  with pytest.raises(ValueError, match=r"shape .* models of different sizes"):
    copy_weights(base, toys.model(hidden_dim=32))
  with pytest.raises(ValueError, match="only the source has the parameter"):
    copy_weights(toys.model(qkv_bias=True), base)
  with pytest.raises(ValueError, match=r"only the target has .* and quantization"):
    copy_weights(quantization.quantize(base, "nf4"), base)
  with pytest.raises(ValueError, match=r"source has adapters \(none\)"):
    copy_weights(base, adapted(base))
  with pytest.raises(ValueError, match="scales differ"):
    copy_weights(adapted(base, alpha=2.0), adapted(base, alpha=3.0))


def test_adapters_of_another_make_are_not_merged():
  source, target = Adapted(), Adapted()
  source.first[...] = 3 * source.first[...]
  assert copy_weights(source, target) == 3 * 4
  np.testing.assert_array_equal(target(jnp.arange(3.0)), source(jnp.arange(3.0)))
  with pytest.raises(ValueError, match="adapters of Adapted"):
    copy_weights(source, nnx.Linear(3, 2, rngs=nnx.Rngs(0)))


def test_layouts_are_asked_of_the_transport():
  source, target = pair("adapters")
  train(source)
  asked = {}

  def transport(sent, where):
    asked.update(where)
    return reshard.reshard_pytree(sent, where)

  copy_weights(source, target, transport)
  assert asked.keys() == arrays(target, nnx.LoRAParam).keys()
  two = mesh({"tp": 2}, 6)
  assert all(isinstance(w, NamedSharding) and w.mesh == two for w in asked.values())
  assert asked["layers.attn.q_proj.lora_b"].spec == P(None, None, "tp")
