"""RLCluster: which role lives where, what moves when, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests import optimizers
from tests.rl import clusters
from tests.sft import trainers
from tunix.rl import setup
from tunix.rl.config import ClusterConfig, RLTrainingConfig, Role
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.metrics_logger import Mode
from tunix.utils import mesh as mesh_lib


def mesh(axes, first=0):
  count = int(np.prod(list(axes.values())))
  return mesh_lib.create_mesh(axes, jax.devices()[first : first + count])


def trained(**options):
  """Weights after two batches of GRPO with a reference."""
  learner = clusters.grpo({"beta": 0.1}, reference=clusters.model(seed=1), **options)
  learner.train(clusters.prompts(2))
  return learner, trainers.leaves(learner.rl_cluster.actor)


def close(a, b):
  return all(np.allclose(a[name], b[name], atol=2e-5) for name in a)


@pytest.fixture(scope="module")
def on_one_device():
  return trained()[1]


def test_on_the_actors_mesh_the_actor_samples():
  """Also on one device: a second model would be copied after each update."""
  for axes in ({"fsdp": 1}, {"fsdp": 2}):
    cluster = clusters.grpo(role_to_mesh={Role.ACTOR: mesh(axes)}).rl_cluster
    assert cluster.rollout.model() is cluster.actor


@pytest.mark.parametrize(
  ("axes", "options", "expected"),
  [
    ({"fsdp": 2}, {}, True),
    ({"fsdp": 2}, {"bucketed_lengths": False}, False),
    ({"cp": 2}, {}, False),  # cp was checked against the limits
  ],
)
def test_which_batches_are_padded_to_less_than_the_limits(axes, options, expected):
  learner = clusters.grpo(role_to_mesh={Role.ACTOR: mesh(axes)}, **options)
  found = setup.buckets_lengths(learner.rl_cluster, learner.algo_config)
  assert found == expected


APART = {Role.ACTOR: ({"fsdp": 4}, 0), Role.ROLLOUT: ({"fsdp": 2}, 4)}
APART |= {Role.REFERENCE: ({"fsdp": 2}, 6)}


@pytest.mark.parametrize("ambient", [False, True])
def test_roles_on_meshes_of_their_own(on_one_device, ambient):
  meshes = {role: mesh(*where) for role, where in APART.items()}
  with mesh_lib.use_mesh(meshes[Role.ACTOR] if ambient else None):
    learner, found = trained(role_to_mesh=meshes)
  cluster = learner.rl_cluster
  models = {Role.ACTOR: cluster.actor, Role.ROLLOUT: cluster.rollout.model()}
  models[Role.REFERENCE] = cluster.reference
  for role, model in models.items():
    leaf = jax.tree.leaves(nnx.state(model, nnx.Param))[0]
    assert leaf.sharding.device_set == set(meshes[role].devices.flat), role
  assert close(found, on_one_device)


def test_a_learner_on_eight_devices(on_one_device, mesh_fsdp8):
  _, found = trained(role_to_mesh={Role.ACTOR: mesh_fsdp8})
  assert close(found, on_one_device)


def test_rollouts_in_another_layout_of_the_same_devices(mesh_fsdp8):
  meshes = {Role.ACTOR: mesh_fsdp8, Role.ROLLOUT: mesh({"tp": 8})}
  cluster = clusters.cluster(role_to_mesh=meshes)
  assert cluster.rollout.model() is not cluster.actor
  kernel = cluster.rollout.model().layers.mlp.up_proj.kernel[...]
  assert kernel.sharding.spec[-1] == "tp"
  alike = clusters.cluster(role_to_mesh={**meshes, Role.ROLLOUT: mesh_fsdp8})
  assert alike.rollout.model() is alike.actor


def test_a_critic_stays_where_it_was_put(mesh_fsdp8):
  meshes = {Role.ACTOR: mesh({"fsdp": 4}), Role.CRITIC: mesh({"fsdp": 2}, 6)}
  with mesh_lib.use_mesh(meshes[Role.ACTOR]):
    cluster = clusters.cluster(critic=True, role_to_mesh=meshes)
    learner = PPOLearner(cluster, PPOConfig(beta=0.0), clusters.even)
    learner.train(clusters.prompts(1))
  assert set(cluster.critic_trainer._state.devices()) == set(jax.devices()[6:8])


def ppo(**options):
  cluster = clusters.cluster(critic=True, reference=clusters.model(seed=1), **options)
  return PPOLearner(cluster, PPOConfig(beta=0.1), clusters.even)


def on_devices(arrays):
  return [x.sharding.memory_kind == "device" for x in jax.tree.leaves(arrays)]


def test_offloading_changes_no_bit_and_keeps_nothing_on_the_devices():
  plain, moved = ppo(), ppo(offload_to_cpu=True)
  seen = []

  def looking(prompts, completions, **columns):
    trainer = moved.rl_cluster.critic_trainer
    seen.append(any(on_devices(trainer.run_state()[0].model_params)))
    seen.append(any(on_devices(nnx.state(moved.rl_cluster.reference))))
    return clusters.even(prompts, completions)

  moved._experience._rewards = type(moved._experience._rewards)(looking)
  for learner in (plain, moved):
    learner.train(clusters.prompts(3))
  assert len(seen) == 6 and not any(seen)
  for name in ("actor", "critic"):
    a, b = (trainers.leaves(getattr(x.rl_cluster, name)) for x in (plain, moved))
    assert all(np.array_equal(a[path], b[path]) for path in a)
  moved.close()
  cluster = moved.rl_cluster
  for model in (cluster.reference, cluster.critic):
    assert all(on_devices(nnx.state(model, nnx.Param)))
    model(np.ones((1, 3), np.int32))  # the caller's again


def test_refused_roles():
  model = clusters.model()
  with pytest.raises(ValueError, match="the reference is the actor"):
    clusters.cluster(model, reference=model)
  with pytest.raises(ValueError, match="vocabulary of 97 tokens, the actor one of 96"):
    clusters.cluster(reference=clusters.model(vocab_size=97))
  with pytest.raises(ValueError, match="critic_optimizer is set"):
    clusters.cluster(critic_optimizer=optimizers.adam(1e-3))
  with pytest.raises(ValueError, match="does not use"):
    GRPOLearner(clusters.cluster(critic=True), GRPOConfig(beta=0.0), clusters.even)
  with pytest.raises(ValueError, match="beta is 0 and there is a reference"):
    clusters.grpo(reference=clusters.model(seed=1))
  with pytest.raises(TypeError, match="perf_config is an int: expected"):
    clusters.RLCluster(
      actor=model,
      tokenizer=clusters.Words(),
      cluster_config=clusters.config(),
      perf_config=1,
    )


def test_a_copy_of_the_actor_is_a_reference():
  model = clusters.model()
  learner = clusters.grpo({"beta": 0.1}, actor=model, reference=nnx.clone(model))
  learner.train(clusters.prompts(2))
  assert learner.rl_cluster.logger.get_metric("actor", "kl", Mode.TRAIN) > 0


def modes(train=None, evaluate=None):
  config = RolloutConfig(**(train or {}))
  return ClusterConfig(
    training_config=RLTrainingConfig(actor_optimizer=optimizers.sgd(0.1)),
    rollout_config={
      Mode.TRAIN: config,
      Mode.EVAL: dataclasses.replace(config, **(evaluate or {})),
    },
  )


def test_ids_beyond_the_vocabulary_are_refused_before_the_first_rollout():
  for mode in Mode:
    ids = {m: [95] if m is not mode else [2, 96] for m in Mode}
    config = modes({"eos_tokens": ids[Mode.TRAIN]}, {"eos_tokens": ids[Mode.EVAL]})
    with pytest.raises(ValueError, match=r"eos_tokens has token id 96; .* 0 to 95\."):
      RLCluster(
        actor=clusters.model(), tokenizer=clusters.Words(), cluster_config=config
      )


def test_one_engine_serves_every_mode():
  assert modes().widest_rollout().kv_cache_size is None
  sizes = modes({"kv_cache_size": 128}, {"kv_cache_size": 200})
  assert sizes.widest_rollout().kv_cache_size == 200
  with pytest.raises(ValueError, match="engine_options differ between modes"):
    modes({}, {"engine_options": {"url": "http://localhost:1"}})


def test_message_lists_are_rendered():
  cluster = clusters.cluster()
  seen = []

  def render(messages, add_generation_prompt, tokenize):
    seen.append((messages[0]["content"], add_generation_prompt, tokenize))
    return [9, 8]  # ids, so that no BOS is added to a text of the template

  cluster.tokenizer.apply_chat_template = render
  out = cluster.generate([[{"role": "user", "content": "5 6"}], "7 8"])
  assert seen == [("5 6", True, True)]
  assert out.prompt_tokens[0].tolist() == [9, 8]
  cluster.generate(["7 8"], apply_chat_template=True)
  assert seen[1] == ("7 8", True, True)


def test_weights_that_were_changed_behind_its_back_are_not_sampled_from():
  cluster = clusters.cluster()
  kernel = cluster.actor.layers.mlp.up_proj.kernel
  kernel.set_value(kernel[...] + 1.0)
  with pytest.raises(RuntimeError, match="changed after they were published"):
    cluster.generate(["5 6"])


def test_the_repr_is_short():
  cluster = clusters.cluster(critic=True)
  assert repr(cluster) == "RLCluster(actor, critic; step 0)"
  assert repr(cluster.tokenizer) == "TokenizerAdapter(Words)"
