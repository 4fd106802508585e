"""Who holds which array: the caller's module, its relatives, and the trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tests import toys
from tests.sft import trainers
from tunix.sft.steps.module_state import FrozenParam, ModuleState, Skeleton, is_lora
from tunix.utils import mesh as mesh_lib, tree


class Tied(nnx.Module):
  """One parameter at two places, and a list of modules."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.z_head = nnx.Param(jnp.ones((4, 2)))
    self.embed = self.z_head
    self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])

  def __call__(self, tokens):
    x = self.embed[...][tokens]
    for layer in self.layers:
      x = layer(x)
    return x @ self.z_head[...].T


double = jax.jit(lambda params: jax.tree.map(lambda x: 2 * x, params), donate_argnums=0)


def step(state):
  """What a trainer's step does to the arrays."""
  state.own()
  state.replace(double(state.params), state.rest)


def test_parts_of_a_full_and_of_a_lora_model():
  full = ModuleState(model := trainers.tokens_only(rate=0.5))
  assert not is_lora(model) and not full.frozen
  assert sorted(tree.flatten(full.params)) == [
    "embed.embedding",
    "out.bias",
    "out.kernel",
  ]
  assert set(tree.flatten(full.rest)) == {"dropout.rngs.count", "dropout.rngs.key"}
  adapted = ModuleState(model := toys.model(lora_rank=2))
  assert is_lora(model) and adapted.frozen
  names = set(tree.flatten(adapted.params))
  assert names == set(tree.flatten(nnx.state(model, nnx.LoRAParam)))
  assert not names & set(tree.flatten(adapted.frozen))


def test_a_module_without_parameters_is_refused():
  with pytest.raises(ValueError, match="Dropout has no parameters to train"):
    ModuleState(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


def test_arrays_that_a_failed_update_took_are_named():
  state = ModuleState(trainers.tokens_only())
  state.own()
  double(state.params)  # donated, and nothing came back
  with pytest.raises(RuntimeError, match="arrays are gone: an update failed"):
    state.refresh()


def test_merging_gives_the_same_module():
  model = toys.model(lora_rank=2)
  skeleton = Skeleton(model)
  twin = skeleton.merge(*skeleton.split(model))
  assert trainers.equal(trainers.leaves(model), trainers.leaves(twin))


def test_tied_parameters_and_lists_keep_their_places():
  model = Tied()
  before = trainers.leaves(model, nnx.Param)
  state = ModuleState(model)
  step(state)
  state.hand_back()
  assert model.embed is model.z_head
  after = trainers.leaves(model, nnx.Param)
  assert len(after) == 23
  for name in before:
    np.testing.assert_array_equal(after[name], 2 * before[name])


RELATIVES = {
  "clone": nnx.clone,
  "leaves": lambda model: nnx.state(model, nnx.Param),
  # A second array object over the same buffer, which no reference count shows.
  "device_put": lambda model: jax.tree.map(
    lambda x: jax.device_put(x, x.sharding), nnx.state(model, nnx.Param)
  ),
  "shards": lambda model: jax.tree.map(
    lambda x: x.addressable_shards[0].data, nnx.state(model, nnx.Param)
  ),
}


@pytest.mark.parametrize("kind", RELATIVES)
@pytest.mark.parametrize("after_steps", [0, 1])
def test_what_others_hold_survives(kind, after_steps):
  model = trainers.tokens_only()
  state = ModuleState(model)
  for _ in range(after_steps):
    step(state)
    state.hand_back()
  relative = RELATIVES[kind](model)
  if isinstance(relative, nnx.Module):
    relative = nnx.state(relative, nnx.Param)
  arrays = jax.tree.leaves(relative)
  assert len(arrays) == 3
  values = [np.array(x) for x in arrays]
  for _ in range(2):
    step(state)
  state.hand_back()
  for array, value in zip(arrays, values):
    np.testing.assert_array_equal(array, value)


def test_without_a_look_nothing_is_copied_between_steps():
  state = ModuleState(trainers.tokens_only())
  step(state)
  params = state.params
  state.own()
  assert state.params is params


def test_frozen_leaves_stay_the_same_objects():
  model = toys.model(lora_rank=2)
  frozen = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
  before = jax.tree.leaves(frozen)
  state = ModuleState(model)
  for _ in range(2):
    step(state)
    state.hand_back()
  assert all(a is b for a, b in zip(before, jax.tree.leaves(state.frozen)))
  after = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
  assert all(a is b for a, b in zip(before, jax.tree.leaves(after)))


def test_what_the_owner_sets_is_used_and_not_taken_from_him():
  model = trainers.tokens_only()
  state = ModuleState(model)
  step(state)
  state.hand_back()
  mine = jnp.full((16, toys.VOCAB), 3.0)
  model.out.kernel.set_value(mine)
  state.refresh()
  assert state.params["out"]["kernel"] is mine
  step(state)
  np.testing.assert_array_equal(state.hand_back().out.kernel, 6.0 * np.ones(mine.shape))
  np.testing.assert_array_equal(mine, 3.0 * np.ones(mine.shape))


def test_placing_follows_metadata_and_leaves_others_alive(mesh_fsdp8):
  model = trainers.tokens_only()
  model.out.kernel.set_metadata(out_sharding=(None, "fsdp"))
  twin = nnx.clone(model)
  before = trainers.leaves(twin)
  state = ModuleState(model)
  state.place(mesh_fsdp8)
  assert state.params["out"]["kernel"].sharding.spec == P(None, "fsdp")
  bias = state.params["out"]["bias"].sharding
  assert bias.is_fully_replicated and bias.mesh == mesh_fsdp8
  step(state)
  state.hand_back()
  assert trainers.equal(before, trainers.leaves(twin))


@pytest.mark.parametrize("declared_by", ["context", "variable"])
def test_placing_maps_logical_axes_by_the_rules_of_nnx(mesh_fsdp4_tp2, declared_by):
  model, rules = trainers.tokens_only(), (("in", "tp"), ("vocab", "fsdp"))
  model.out.kernel.set_metadata(out_sharding=("in", "vocab"))
  context = rules if declared_by == "context" else ()
  if declared_by == "variable":
    model.out.kernel.set_metadata(sharding_rules=rules)
  state = ModuleState(model)
  with nnx.logical_axis_rules(context):
    state.place(mesh_fsdp4_tp2)
  assert state.params["out"]["kernel"].sharding.spec == P("tp", "fsdp")


def test_an_explicit_layout_without_metadata_is_kept(mesh_fsdp8):
  explicit = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
  model = trainers.tokens_only()
  where = NamedSharding(explicit, P(None, "fsdp"))
  model.out.kernel.set_value(jax.device_put(model.out.kernel[...], where))
  state = ModuleState(model)
  state.place(mesh_fsdp8)
  sharding = state.params["out"]["kernel"].sharding
  assert sharding.spec == P(None, "fsdp") and sharding.mesh == mesh_fsdp8
  assert mesh_lib.mesh_of(state.params) == mesh_fsdp8


def test_what_a_step_sows_is_dropped():
  class Sowing(trainers.toys.TokensOnly):
    def __call__(self, tokens):
      out = super().__call__(tokens)
      self.sow(nnx.Intermediate, "logits", out)
      return out

  skeleton = Skeleton(model := Sowing(nnx.Rngs(0)))
  copy = skeleton.merge(*skeleton.split(model))
  copy(np.zeros((1, 2), np.int32))
  assert nnx.state(copy, nnx.Intermediate)
  assert skeleton.rest_of(copy) == skeleton.split(model)[2]


@pytest.mark.parametrize("lora", [False, True])
def test_a_frozen_parameter_is_neither_trained_nor_moved(lora):
  class WithTable(Tied):
    def __init__(self):
      super().__init__()
      self.table = FrozenParam(jnp.ones((3, 3)))
      if lora:
        self.adapter = nnx.LoRAParam(jnp.ones((2, 1)))

  model = WithTable()
  table = model.table[...]
  state = ModuleState(model)
  assert "table" in tree.flatten(state.frozen)
  assert "table" not in tree.flatten(state.params)
  step(state)
  assert model.table[...] is table
  moved = "adapter" if lora else "z_head"
  np.testing.assert_array_equal(getattr(state.hand_back(), moved)[...][0], 2.0)
