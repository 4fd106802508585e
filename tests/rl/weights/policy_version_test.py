import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests import toys
from tunix.models import lora
from tunix.rl.weights import placement, reshard
from tunix.rl.weights.policy_version import (
  PolicyVersion,
  PublishedVersions,
  UnknownWeightsError,
  policy_stamp,
)
from tunix.utils import mesh as mesh_lib


class Tiny(nnx.Module):
  def __init__(self, value):
    self.weight = nnx.Param(jnp.full((4,), value))
    self.rngs = nnx.Rngs(0)


def test_versions_go_through_json():
  version = PolicyVersion(3, "ab" * 16)
  assert PolicyVersion.from_json(version.to_json()) == version
  assert version.to_json() == '{"step": 3, "stamp": "' + "ab" * 16 + '"}'
  for text in ("nothing", "[3]", '{"step": 3}', '{"step": -1, "stamp": "a"}'):
    with pytest.raises(ValueError, match=r"policy version|step is -1"):
      PolicyVersion.from_json(text)
  for step, stamp in ((True, "a"), (1.0, "a"), (1, ""), (1, None)):
    with pytest.raises((TypeError, ValueError), match=r"step is|stamp is"):
      PolicyVersion(step, stamp)


def test_random_state_is_not_the_policy():
  model = Tiny(1.0)
  before = policy_stamp(model)
  model.rngs.params()
  assert policy_stamp(model) == before != policy_stamp(Tiny(2.0))


def test_rollouts_by_unknown_weights_are_refused():
  sync = PublishedVersions(history=3)
  assert sync.current is None
  with pytest.raises(
    UnknownWeightsError, match="no version; the known versions are none"
  ):
    sync.check(None)
  versions = [sync.publish(Tiny(float(step)), step) for step in range(5)]
  assert sync.known == tuple(versions[2:]) and sync.current == versions[4]
  assert [sync.check(v) for v in versions[2:]] == [2, 1, 0]
  for stranger in (versions[1], PolicyVersion(4, versions[3].stamp)):
    with pytest.raises(UnknownWeightsError, match=r"known versions are step 2 \("):
      sync.check(stranger)
  with pytest.raises(ValueError, match="step is 3"):
    sync.publish(Tiny(0.0), 3)
  with pytest.raises(ValueError, match="history is 0"):
    PublishedVersions(history=0)


def test_a_version_is_published_once_and_survives_a_restart():
  sync = PublishedVersions()
  first = sync.publish(Tiny(0.0), 0)
  assert sync.publish(Tiny(0.0), 0) == first and sync.known == (first,)
  second = sync.publish(Tiny(1.0), 0)  # somebody set other weights
  saved = [version.to_json() for version in sync.known]
  again = PublishedVersions(known=map(PolicyVersion.from_json, saved))
  assert again.check(second) == 0 and again.check(first) == 1


def test_weights_changed_behind_the_back_are_found():
  sync, model = PublishedVersions(), Tiny(1.0)
  version = sync.publish(model, 0)
  assert sync.identify(model) == version == sync.identify(Tiny(1.0))
  later = sync.publish(model, 7)  # a step that changed nothing, as at learning rate 0
  assert sync.identify(model) == later
  model.weight[...] = model.weight[...].at[2].set(1.0 + 1e-7)
  with pytest.raises(UnknownWeightsError, match="changed after they were published"):
    sync.identify(model)


def test_one_round_from_training_to_rollout():
  """A LoRA actor on four devices, a rollout copy with the same adapters on two more:
  after each sync the rollout's weights have the actor's stamp."""
  base = toys.model()
  config = lora.LoraConfig(rank=2, targets=("q_proj",))
  meshes = (
    mesh_lib.create_mesh({"fsdp": 4}, jax.devices()[:4]),
    mesh_lib.create_mesh({"tp": 2}, jax.devices()[4:6]),
  )
  actor, rollout = (
    reshard.reshard_model_to_mesh(lora.apply(base, config), mesh) for mesh in meshes
  )
  sync = PublishedVersions()
  first = sync.publish(rollout, 0)
  assert first.stamp == policy_stamp(actor)
  state = jax.tree.map(lambda x: x + 0.5, nnx.state(actor, nnx.LoRAParam))
  nnx.update(actor, state)
  with pytest.raises(UnknownWeightsError):
    sync.identify(actor)
  assert placement.copy_weights(actor, rollout) == sum(
    x.nbytes for x in jax.tree.leaves(state)
  )
  second = sync.publish(rollout, 1)
  assert second.stamp == policy_stamp(actor) != first.stamp
  assert sync.check(first) == 1
