"""The sampler of a run on a mesh whose batch is split."""

import jax
import numpy as np
import pytest

from tests import toys
from tests.rl import clusters
from tests.sft import trainers
from tunix.rl.config import Role
from tunix.sft.peft_trainer import CheckpointOptions

SIZES = {"num_heads": 8, "num_kv_heads": 8, "embed_dim": 64, "hidden_dim": 64}


def run(folder, steps, gather="split", **options):
  """Trains to a step; returns the name of the sampler and the weights."""
  learner = clusters.grpo(
    actor=toys.model(num_layers=1, **SIZES),
    rollout={"gather_weights": gather},
    checkpoint_root_directory=str(folder),
    checkpointing_options=CheckpointOptions(save_every_n_steps=1),
    max_steps=steps,
    **options,
  )
  learner.train(clusters.prompts(steps))
  learner.close()
  cluster = learner.rl_cluster
  return cluster.rollout.sampler, trainers.leaves(cluster.actor_trainer.model)


def test_a_run_on_a_mesh_goes_on_with_its_sampler(tmp_path, mesh_fsdp8):
  with jax.set_mesh(mesh_fsdp8):
    _, whole = run(tmp_path / "whole", 3, rollout_engine="padded")
    run(tmp_path / "cut", 2, rollout_engine="padded")
    sampler, again = run(tmp_path / "cut", 3)
    assert sampler == "padded"
    for name, weight in whole.items():
      np.testing.assert_array_equal(again[name], weight)
    assert run(tmp_path / "new", 1)[0] == "engine"
    assert run(tmp_path / "rows", 1, gather=True)[0] == "padded"


def test_an_engine_of_the_process_draws_the_same_tokens(mesh_fsdp8):
  drawn = []
  for engine in ("vanilla", "per_process"):
    cluster = clusters.cluster(rollout_engine=engine)
    out = cluster.generate(["5 6", "7"], num_generations=2, seed=3)
    drawn.append([row.tolist() for row in out.tokens])
  assert drawn[0] == drawn[1]
  with pytest.raises(ValueError, match=r"begun with the sampler 'engine', and PerPro"):
    cluster.rollout.use_sampler("engine")
  with pytest.raises(ValueError, match="does not suit the engine"):
    meshes = {Role.ROLLOUT: mesh_fsdp8}
    clusters.cluster(rollout_engine="per_process", role_to_mesh=meshes)
