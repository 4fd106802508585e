"""Checks that the parts of a learner match, before anything is sampled."""

from __future__ import annotations

import logging
from typing import Any

import jax
from flax import nnx

from tunix.models import calling
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.experts import route_records
from tunix.perf import programs
from tunix.rl.algorithm_config import LOSS_ALGOS, AlgorithmConfig
from tunix.rl.reward.rewards import RewardManager
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.weights import placement
from tunix.sft.metrics_logger import Mode
from tunix.sft.steps.module_state import is_lora
from tunix.utils import mesh as mesh_lib

_log = logging.getLogger(__name__)


def reward_manager(
  reward_fns: Any, cluster: RLCluster, *, has_others: bool = False
) -> RewardManager | None:
  """Returns the manager of the reward functions; None if there are none.

  Args:
    reward_fns: see RLLearner.
    cluster: its reward model may take the place of functions.
    has_others: True if environments give rewards.

  Raises:
    ValueError: nothing gives a reward.
  """
  if isinstance(reward_fns, RewardManager):
    return reward_fns
  functions = [reward_fns] if callable(reward_fns) else list(reward_fns or ())
  if not functions and cluster.reward is None and not has_others:
    raise ValueError(
      "there is neither a reward function nor a reward model: pass reward_fns, "
      "reward= to RLCluster, or env= to the learner"
    )
  return RewardManager(functions) if functions else None


def shares_prompts(cluster: RLCluster, config: AlgorithmConfig) -> bool:
  """Returns True if the prompt of a group is computed once for all its completions.

  Raises:
    ValueError: `shared_prompt` is True and a model cannot share prompts.
  """
  models = [m for m in (cluster.actor, cluster.reference) if m is not None]
  can = (
    config.num_generations > 1
    and config.exact_tile_rows is None
    and all(calling.adapt(model).shares_prompts for model in models)
  )
  if config.shared_prompt and not can:
    raise ValueError(
      "shared_prompt is True, but each prompt has one completion, or the actor or the "
      "reference cannot share prompts (our decoders can, without batch_invariant): "
      "leave it None"
    )
  return can if config.shared_prompt is None else config.shared_prompt


def samples_exactly(cluster: RLCluster) -> bool:
  """Returns True if the sampler's log-probs of tokens should be those of the actor.

  It is False for meshes and layers whose bits were not compared.
  """
  rollout, actor = cluster.cluster_config.rollout(Mode.TRAIN), cluster.actor
  return bool(
    calling.config_value(actor, "batch_invariant")
    and _splits_rows_alone(actor)
    and getattr(cluster.rollout, "sampler", None) == "engine"
    and cluster.rollout.model() is actor
    and not cluster.cluster_config.training_config.staleness
    and not rollout.filters
    and rollout.weights is None
    and getattr(actor, "token_rows", None) is None
    and all(
      node.can_be_invariant
      for _, node in nnx.iter_graph(actor)
      if isinstance(node, Linear)
    )
  )


def _splits_rows_alone(actor: nnx.Module) -> bool:
  """Returns True on one device, or in one process on a mesh of `dp` and `fsdp`."""
  mesh = mesh_lib.mesh_of(nnx.state(actor))
  if mesh is None or mesh.size == 1:
    return True
  rules = calling.config_value(actor, "sharding")
  used = {axis for axis, size in mesh.shape.items() if size > 1}
  # tp splits the sums of a row and cp its tokens; the bits of ep were not compared.
  return jax.process_count() == 1 and used <= {*rules.batch_axes} - {rules.ep}


def buckets_lengths(cluster: RLCluster, config: AlgorithmConfig) -> bool:
  """Returns True if batches are padded to less than the limits of their rows.

  `exact_tile_rows` promises bits that do not depend on other rows. A mesh axis that
  splits tokens must divide the widths, which is checked for the limits.
  """
  sizes = cluster.cluster_config.training_config
  mesh = mesh_lib.mesh_of(nnx.state(cluster.actor))
  rules = getattr(getattr(cluster.actor, "config", None), "sharding", None)
  axis = getattr(rules, "cp", None)
  splits_tokens = mesh is not None and mesh.shape.get(axis, 1) > 1
  needs_limits = config.exact_tile_rows is not None or splits_tokens
  # A plan is for the longest rows.
  return sizes.bucketed_lengths and not needs_limits and not programs.is_recording()


def check_exploring(rollout: RolloutConfig) -> None:
  """Checks that the rollouts of training are sampled, not greedy.

  Raises:
    ValueError: the temperature is 0.
  """
  if rollout.temperature == 0:
    raise ValueError(
      "temperature is 0: greedy rollouts do not explore and have no log-probabilities "
      "to learn from; set it above 0 (for greedy evaluations give Mode.EVAL another "
      "RolloutConfig, or set rollout.eval_temperature)"
    )


def corrected(
  rollout: RolloutConfig, config: AlgorithmConfig, staleness: int
) -> AlgorithmConfig:
  """Returns the config with the correction that the rollouts need.

  Args:
    rollout: the sampling of training.
    config: settings of the algorithm.
    staleness: see `AlgorithmConfig.for_staleness`.
  """
  is_rounded = rollout.weights is not None
  return config.for_staleness(staleness, is_rounded=is_rounded)


def check_support(
  rollout: RolloutConfig, config: AlgorithmConfig, staleness: int
) -> None:
  """Checks that importance weights compare distributions over the same tokens.

  The engine's log-probabilities are those among the tokens that its filters keep. The
  trainer's are those among all tokens, and the kept ones are not recorded.

  The arguments are those of `corrected`.

  Raises:
    ValueError: there are filters and a correction.
  """
  rule, filters = corrected(rollout, config, staleness).correction, rollout.filters
  if rule is None or not filters:
    return
  (name, value), *_ = filters.items()
  is_default = config.rollout_correction is None
  raise ValueError(
    f"rollout.{name} is {value} and algorithm.rollout_correction.kind is {rule.kind}"
    f"{', which rollouts in 8 bits and stale rollouts have by default' * is_default}: "
    "the engine gives probabilities among the tokens that the filter keeps, and the "
    f"trainer among all. Leave {name} out, or set algorithm.rollout_correction.kind to "
    "off"
  )


def check_centering(
  rollout: RolloutConfig, config: AlgorithmConfig, staleness: int
) -> None:
  """Checks that the loss has a mean score that the recorded probabilities give.

  The arguments are those of `corrected`.

  Raises:
    ValueError: `center_scores` with a loss or a correction that it does not center.
  """
  if not rollout.center_scores:
    return
  rule = corrected(rollout, config, staleness).correction
  kind, level = ("off", "token") if rule is None else (rule.kind, rule.level)
  for name, value, known in (
    ("loss_algo", config.loss_algo, [x for x in LOSS_ALGOS if x != "rloo"]),
    ("rollout_correction.kind", kind, ("truncate", "mask", "cispo", "off")),
    ("rollout_correction.level", level, ("token",)),
    ("exact_tile_rows", config.exact_tile_rows, (None,)),
  ):
    if value not in known:
      raise ValueError(
        f"rollout.center_scores is {rollout.center_scores} and algorithm.{name} is "
        f"{value!r}, which it does not center; expected one of {list(known)}. Change "
        f"{name}, or set center_scores to 0"
      )


def _check_processes(cluster: RLCluster) -> None:
  """Checks a cluster of several processes, which compute every role together.

  Raises:
    ValueError: a role is not on the devices of all processes.
  """
  count = jax.process_count()
  models = {"actor": cluster.actor, "critic": cluster.critic}
  models |= {"reference": cluster.reference, "reward": cluster.reward}
  for role, model in models.items():
    if model is None:
      continue
    mesh = mesh_lib.mesh_of(nnx.state(model))
    devices = [] if mesh is None else mesh.devices.flat
    present = {device.process_index for device in devices}
    if len(present) != count:
      raise ValueError(
        f"the {role} is on devices of {max(1, len(present))} of {count} processes: "
        "with several processes every role needs a mesh over all devices; set it with "
        "jax.set_mesh(mesh) before the models are made, or by role_to_mesh"
      )


def _check_schedule(cluster: RLCluster, config: AlgorithmConfig) -> None:
  """Checks that sampling and training can overlap, if the schedule is not sync.

  Raises:
    ValueError: an engine, an algorithm or a placement does not allow it.
  """
  name = cluster.cluster_config.training_config.schedule
  if jax.process_count() > 1:
    _check_processes_overlap(cluster, name)
  if config.collects_batches:
    raise ValueError(
      "dynamic_sampling is True, which samples until a batch is full, and schedule is "
      f"{name!r}, which samples before it is known what is missing: set "
      "dynamic_sampling to False, or schedule to sync"
    )
  try:
    samples = cluster.rollout.sampling_devices() | placement.devices_of(cluster.reward)
  except TypeError:
    raise ValueError(
      f"rollout_engine is {type(cluster.rollout).__name__}, whose weights are in "
      f"another process, and schedule is {name!r}: use the vanilla engine, or set "
      "schedule to sync"
    ) from None
  trains = placement.devices_of(cluster.actor, cluster.critic, cluster.reference)
  # Two threads that start programs over the same devices may start them in another
  # order on each device. Programs that exchange data then wait for each other.
  # An engine on one device exchanges nothing with others while it samples.
  is_alone = cluster.rollout.mesh is not None and len(samples) == 1
  if trains & samples and len(trains | samples) > 1 and not is_alone:
    raise ValueError(
      f"schedule is {name!r} and {len(trains & samples)} of {len(trains | samples)} "
      "devices both train and sample: expected one device in all; or devices of their "
      "own for the rollout and the reward model (role_to_mesh); or rollout_engine "
      '"per_process" on one device of each process'
    )


def _check_processes_overlap(cluster: RLCluster, name: str) -> None:
  """Checks that sampling and training can overlap in each of several processes.

  Raises:
    ValueError: the schedule, the engine, its devices or a role does not allow it.
  """
  start = f"schedule is {name!r} and there are {jax.process_count()} processes"
  if cluster.rollout.mesh is None:
    raise ValueError(
      f"{start}, whose samples and updates would be programs over all devices, started "
      'in another order on each process: set rollout_engine to "per_process", or '
      "schedule to sync"
    )
  if cluster.reward is not None:
    raise ValueError(
      f"{start}, and there is a reward model, which all processes run together: use "
      "reward functions, or set schedule to sync"
    )


def _check_routes(cluster: RLCluster) -> None:
  """Checks that the actor has routes that can be replayed.

  Raises:
    ValueError: it has no experts.
  """
  try:
    route_records.form_of(cluster.actor)
  except ValueError as error:
    raise ValueError(
      f"replay_routes is True and the actor is {type(cluster.actor).__name__}; "
      "expected a mixture of experts of tunix. Set replay_routes to False"
    ) from error


def check(cluster: RLCluster, config: AlgorithmConfig, *, uses_critic: bool) -> None:
  """Checks the cluster of a learner.

  Raises:
    ValueError: a role is not on all processes, rollouts are greedy, a role is missing,
      a role would not be used, or two settings contradict each other.
  """
  if jax.process_count() > 1:
    _check_processes(cluster)
  if cluster.cluster_config.training_config.staleness:
    _check_schedule(cluster, config)
  check_exploring(cluster.cluster_config.rollout(Mode.TRAIN))
  staleness = cluster.cluster_config.training_config.staleness
  check_support(cluster.cluster_config.rollout(Mode.TRAIN), config, staleness)
  check_centering(cluster.cluster_config.rollout(Mode.TRAIN), config, staleness)
  if cluster.cluster_config.rollout(Mode.TRAIN).replay_routes:
    _check_routes(cluster)
  weights = cluster.cluster_config.rollout(Mode.TRAIN).weights
  if weights is not None and config.exact_tile_rows is not None:
    raise ValueError(
      f"rollout.weights is {weights!r} and algorithm.exact_tile_rows is "
      f"{config.exact_tile_rows}, which promises that sampler and trainer agree to the "
      "bit. Leave one of them out"
    )
  if config.beta and cluster.reference is None and not is_lora(cluster.actor):
    raise ValueError(
      f"beta is {config.beta} and there is no reference model: pass reference= to "
      "RLCluster, train LoRA adapters, or set beta=0"
    )
  if cluster.reference is not None and not config.beta:
    raise ValueError(
      "beta is 0 and there is a reference model, which would not be used: set beta, or "
      "leave reference= out"
    )
  if config.num_generations == 2:
    _log.warning(
      "num_generations is 2: each advantage compares with one other completion. Groups "
      "of 8 (the default of the command) learn better"
    )
  if cluster.critic is not None and not uses_critic:
    raise ValueError(
      "there is a critic, which this algorithm does not use: leave critic= out, or use "
      "PPOLearner"
    )
