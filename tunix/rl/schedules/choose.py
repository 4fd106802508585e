"""The schedule that the settings of a run name."""

from __future__ import annotations

from typing import Any

from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.experience.experience import Experience, ShapeRewards
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.schedules.greedy import Greedy
from tunix.rl.schedules.schedule import Lagged, Sync
from tunix.sft.metrics_logger import Mode


def make(
  cluster: RLCluster,
  algorithm: AlgorithmConfig,
  experience: Experience,
  shape_rewards: ShapeRewards,
) -> Sync:
  """Returns the schedule of a learner.

  Args:
    cluster: the models; its training settings name the schedule.
    algorithm: settings of the algorithm.
    experience: samples and computes rewards.
    shape_rewards: see `Experience.rollouts`.
  """
  config = cluster.cluster_config.training_config
  if config.schedule == "sync":
    return Sync(experience, shape_rewards)
  limits: dict[str, Any] = {
    "lag": config.staleness,
    "timeout_s": config.rollout_timeout_s,
  }
  if config.schedule == "lagged":
    return Lagged(cluster, experience, shape_rewards, **limits)
  sampling = cluster.cluster_config.rollout(Mode.TRAIN)
  folder = config.checkpoint_root_directory
  return Greedy(
    cluster,
    experience,
    shape_rewards,
    **limits,
    max_tokens=sampling.max_prompt_length + experience.max_tokens(sampling),
    generations=algorithm.num_generations,
    folder=None if folder is None else str(folder),
    replay=config.replay,
  )
