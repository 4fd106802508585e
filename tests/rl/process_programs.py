"""What processes_test runs in each of several processes: RANK PORT COUNT FOLDER JOB."""

import pathlib
import sys

import jax
import numpy as np
import optax

from tests.rl import clusters
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rewards import RewardManager
from tunix.sft.config import CheckpointOptions
from tunix.sft.metrics_logger import JsonlBackend, MetricsLoggerOptions
from tunix.utils import mesh as mesh_lib

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
  rewards = RewardManager([counted], rows_per_call=4)
  if job == "ppo":
    cluster = clusters.cluster(clusters.model(), critic=True, **options)
    return PPOLearner(cluster, PPOConfig(), rewards)
  cluster = clusters.cluster(
    clusters.model(),
    reference=clusters.model(1),
    actor_optimizer=optax.adam(1e-2),
    **options,
  )
  config = GRPOConfig(num_generations=4, beta=0.04)
  return GRPOLearner(cluster, config, rewards)


def run(job, folder, steps, batches=4):
  """Trains on; returns the step it began at, and the weights."""
  out = learner(job, folder, steps)
  start = out.train_steps
  out.train(clusters.prompts(batches, size=4), clusters.prompts(1, size=4, seed=9))
  weights = {
    ".".join(map(str, path)): mesh_lib.to_host(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(
      jax.tree.map(lambda x: x, out.rl_cluster.actor_trainer._module.params)
    )
  }
  out.close()
  return start, weights


def main() -> None:
  rank, port, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
  folder, job = pathlib.Path(sys.argv[4]), sys.argv[5]
  if count > 1:
    jax.distributed.initialize(
      f"localhost:{port}", num_processes=count, process_id=rank
    )
  with jax.set_mesh(mesh_lib.create_mesh({"fsdp": 8})):
    _, whole = run(job, folder / "whole", 4)
    rows = sum(CALLS)
    run(job, folder / "cut", 2)
    start, cut = run(job, folder / "cut", 4)
  assert start == 2
  for name, value in whole.items():
    np.testing.assert_array_equal(cut[name], value, err_msg=name)
  if rank == 0:
    np.savez(folder / "weights.npz", **whole)
  (folder / f"rows-{rank}").write_text(str(rows))
  print("done")


if __name__ == "__main__":
  main()
