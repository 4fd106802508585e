"""Whether a learner's parts fit together, checked before anything is sampled."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from tunix.models import calling
from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.rewards import RewardManager
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.metrics_logger import Mode
from tunix.sft.module_state import is_lora
from tunix.utils import mesh as mesh_lib


def reward_manager(reward_fns: Any, cluster: RLCluster) -> RewardManager | None:
  """The manager of reward functions; None where the reward model is alone.

  Raises:
    ValueError: there is neither.
  """
  if isinstance(reward_fns, RewardManager):
    return reward_fns
  functions = [reward_fns] if callable(reward_fns) else list(reward_fns or ())
  if not functions and cluster.reward is None:
    raise ValueError(
      "there is neither a reward function nor a reward model: pass reward_fns, or "
      "reward= to RLCluster"
    )
  return RewardManager(functions) if functions else None


def shares_prompts(cluster: RLCluster, config: AlgorithmConfig) -> bool:
  """Whether the prompt of a group is computed once for all its completions.

  Raises:
    ValueError: it should be, and cannot.
  """
  models = [m for m in (cluster.actor, cluster.reference) if m is not None]
  can = (
    config.num_generations > 1
    and config.exact_tile_rows is None
    and all(calling.adapt(model).shares_prompts for model in models)
  )
  if config.shared_prompt and not can:
    raise ValueError(
      "shared_prompt=True, but there is one completion a prompt, or the actor or the "
      "reference cannot share prompts (our text decoders can): leave it None"
    )
  return can if config.shared_prompt is None else config.shared_prompt


def check_exploring(rollout: RolloutConfig) -> None:
  """What training asks of the sampling.

  Raises:
    ValueError: it is greedy.
  """
  if rollout.temperature == 0:
    raise ValueError(
      "temperature is 0: greedy rollouts do not explore and have no log-probs to "
      "learn from; set it above 0 (evaluations may have 0: give Mode.EVAL a "
      "RolloutConfig of its own, or set rollout.eval_temperature)"
    )


def _check_processes(cluster: RLCluster) -> None:
  """What several processes ask of the cluster: they compute everything together, so
  every role lies on all their devices.

  Raises:
    ValueError: a role lies elsewhere, or there is an engine of another kind.
  """
  count = jax.process_count()
  models = {"actor": cluster.actor, "critic": cluster.critic}
  models |= {"reference": cluster.reference, "reward": cluster.reward}
  for role, model in models.items():
    if model is None:
      continue
    mesh = mesh_lib.mesh_of(nnx.state(model))
    here = {d.process_index for d in mesh.devices.flat} if mesh is not None else set()
    if len(here) != count:
      raise ValueError(
        f"the {role} lies on devices of {max(1, len(here))} of {count} processes: with "
        "several of them every role lies on a mesh over all their devices; set it with "
        "jax.set_mesh(mesh) before the models are made, or by role_to_mesh"
      )
  if cluster.cluster_config.rollout_engine != "vanilla":
    raise ValueError(
      f"rollout_engine is {cluster.cluster_config.rollout_engine!r}: {count} processes "
      'sample together with "vanilla" alone'
    )


def check(cluster: RLCluster, config: AlgorithmConfig, *, uses_critic: bool) -> None:
  """What every learner asks of its cluster.

  Raises:
    ValueError: processes that do not share every role, greedy rollouts, a role that is
      missing, or one that nothing would use.
  """
  if jax.process_count() > 1:
    _check_processes(cluster)
  check_exploring(cluster.cluster_config.rollout(Mode.TRAIN))
  if config.beta and cluster.reference is None and not is_lora(cluster.actor):
    raise ValueError(
      f"beta is {config.beta}, and there is no reference model to keep close to: "
      "pass reference= to RLCluster, train LoRA adapters, or set beta=0"
    )
  if cluster.reference is not None and not config.beta:
    raise ValueError(
      "beta is 0 and there is a reference, with which nothing would be compared: set "
      "beta, or leave reference= out"
    )
  if cluster.critic is not None and not uses_critic:
    raise ValueError(
      "there is a critic, and this algorithm trains none: leave critic= out, or use "
      "PPOLearner"
    )
