"""What processes_test runs in each process: RANK PORT COUNT FOLDER JOB WHAT...."""

import pathlib
import shutil
import sys

import jax
import numpy as np
import optax

from tests.rl import clusters
from tunix.rl.algorithm_config import RolloutCorrection
from tunix.rl.config import Role
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rewards import RewardManager
from tunix.sft.config import CheckpointOptions
from tunix.sft.metrics_logger import JsonlBackend, MetricsLoggerOptions
from tunix.utils import coordination, mesh as mesh_lib, tree

CALLS = []


def counted(prompts, completions, **columns):
  CALLS.append(len(prompts))
  return clusters.even(prompts, completions, **columns)


def learner(job, folder, steps):
  options = {
    "mini_batch_size": 4,
    "max_steps": steps,
    "eval_every_n_steps": 2,
    "checkpoint_root_directory": str(folder / "checkpoints"),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=1),
    "metrics_logging_options": MetricsLoggerOptions(
      folder, backend_factories=[lambda: JsonlBackend(folder)]
    ),
  }
  rewards = RewardManager([counted], rows_per_call=1)
  if job == "ppo":
    cluster = clusters.cluster(clusters.model(), critic=True, **options)
    return PPOLearner(cluster, PPOConfig(beta=0.0), rewards)
  cluster = clusters.cluster(
    clusters.model(),
    reference=clusters.model(1),
    actor_optimizer=optax.adam(1e-2),
    **options,
  )
  correction = RolloutCorrection()
  config = GRPOConfig(num_generations=4, beta=0.04, rollout_correction=correction)
  return GRPOLearner(cluster, config, rewards)


def run(job, folder, steps, batches=4):
  """Trains on; returns the step it began at, and the weights."""
  out = learner(job, folder, steps)
  start = out.train_steps
  out.train(clusters.prompts(batches, size=4), clusters.prompts(1, size=4, seed=9))
  params = out.rl_cluster.actor_trainer._module.params
  weights = {k: mesh_lib.to_host(x) for k, x in tree.flatten(params).items()}
  out.close()
  return start, weights


def whole(job, folder):
  """The run in one go."""
  _, weights = run(job, folder / "whole", 4)
  (folder / f"rows-{jax.process_index()}").write_text(str(sum(CALLS)))
  if jax.process_index() == 0:
    np.savez(folder / "weights.npz", **weights)


def cut(job, folder):
  """The run cut in the middle: the same bytes."""
  run(job, folder / "cut", 2)
  if jax.process_index() == 0:
    shutil.copytree(folder / "cut", folder / "half")  # for one process to go on from
  coordination.gather("a copy", None)
  start, weights = run(job, folder / "cut", 4)
  assert start == 2
  if jax.process_index() == 0:
    for name, value in np.load(folder / "weights.npz").items():
      np.testing.assert_array_equal(weights[name], value, err_msg=name)


def from_half(job, folder):
  """Goes on from what other processes left."""
  start, weights = run(job, folder / "half", 4)
  assert start == 2
  np.savez(folder / "half.npz", **weights)


def roles(job, folder):
  """The rollout on other axes of the same devices; on other devices it is refused."""
  del job, folder
  axes = {"fsdp": 4, "tp": 2}
  for devices in (jax.devices(), jax.devices()[::-1]):
    mesh = mesh_lib.create_mesh(axes, devices)
    refused = devices != jax.devices()
    try:
      out = clusters.grpo(role_to_mesh={Role.ROLLOUT: mesh}, max_steps=1)
    except ValueError as error:
      assert refused and "rollout has other devices than the actor" in str(error), error
    else:
      assert not refused
      out.train(clusters.prompts(1, size=4))
      assert out.rl_cluster.actor_trainer.train_steps == 1
      out.close()


def different_prompts(job, folder):
  out = learner(job, folder, 4)
  seed = jax.process_index()
  try:
    out.train(clusters.prompts(1, size=4, seed=seed))
  except ValueError as error:
    assert "(train): digest is" in str(error), error
    assert "given the same prompts" in str(error), error
  else:
    raise AssertionError("they were taken")


def main() -> None:
  rank, port, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
  folder, job = pathlib.Path(sys.argv[4]), sys.argv[5]
  if count > 1:
    jax.distributed.initialize(
      f"localhost:{port}", num_processes=count, process_id=rank
    )
    try:
      learner(job, folder / "nowhere", 4)
    except ValueError as error:
      part = f"the actor is on devices of 1 of {count} processes"
      assert part in str(error), error
    else:
      raise AssertionError("models on one device were taken")
  with jax.set_mesh(mesh_lib.create_mesh({"fsdp": 8})):
    for name in sys.argv[6:]:
      globals()[name](job, folder)
  print("done")


if __name__ == "__main__":
  main()
