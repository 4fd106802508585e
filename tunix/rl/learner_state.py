"""The state of an RL run between two rollouts, saved and restored as one RunState."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tunix.rl.rl_cluster import RLCluster
from tunix.rl.trainer import Trainer
from tunix.rl.weights import policy_version
from tunix.rl.weights.policy_version import PolicyVersion
from tunix.sft.metrics_logger import Mode
from tunix.sft.steps.run_state import ARRAYS, Position, RunState
from tunix.utils.setting import named_values


@dataclasses.dataclass
class LearnerProgress(Position):
  """The counters of a learner; `data_state` is the position in the prompts.

  Attributes:
    rollouts: batches of rollouts that were trained on.
    batch_rows: rows of the largest batch so far; smaller batches are padded to it.
    pending: prompts that were drawn and are not yet trained on, one dict each.
    batch_prompts: prompts of the largest batch of the data, with a curriculum.
    solve_rates: solve rates of prompts, see `Curriculum.rates`.
  """

  rollouts: int = 0
  batch_rows: int = 0
  pending: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  batch_prompts: int = 0
  solve_rates: dict[str, float] = dataclasses.field(default_factory=dict)

  def rewind(self) -> None:
    """Restarts the prompts at the next call of `train`."""
    super().rewind()
    self.pending = []

  def to_json(self) -> dict[str, Any]:
    """Returns the counters as JSON.

    Raises:
      TypeError: a pending prompt has a column that JSON cannot represent.
    """
    out = dataclasses.asdict(self)
    try:
      json.dumps(out["pending"])
    except TypeError as error:
      raise TypeError(
        f"pending prompts cannot be saved as JSON ({error}): use strings, numbers, "
        "lists and dicts in the columns of the data"
      ) from error
    return out


def trainers(cluster: RLCluster) -> dict[str, Trainer]:
  """Returns the trainers of the cluster by role."""
  roles = {"actor": cluster.actor_trainer, "critic": cluster.critic_trainer}
  return {role: trainer for role, trainer in roles.items() if trainer is not None}


def of_run(
  cluster: RLCluster,
  progress: LearnerProgress,
  identity: Mapping[str, Any],
  ahead: list[Any],
) -> RunState:
  """Returns the whole state of a run.

  Args:
    cluster: the models and trainers.
    progress: the counters of the learner.
    identity: values that must be the same when the run is resumed.
    ahead: batches that are sampled and not yet trained on, see `Schedule.to_json`.
  """
  states, counters = {}, {}
  for role, trainer in trainers(cluster).items():
    trainer.flush()
    states[role], counters[role] = trainer.run_state()
  return RunState(
    **_nested(states),
    progress={
      "trainers": counters,
      "learner": progress.to_json(),
      "metrics": cluster.logger.state(),
      "identity": dict(identity),
      "version": cluster.version.to_json(),
      "sampler": cluster.rollout.sampler,
      **({"ahead": ahead} if ahead else {}),
    },
    custom_metadata={},
  )


def form(cluster: RLCluster) -> RunState:
  """Returns the arrays of a run; a restore reads their shapes and shardings."""
  return RunState(
    **_nested({role: t.run_state()[0] for role, t in trainers(cluster).items()})
  )


def load(
  cluster: RLCluster, step: int, state: RunState, identity: Mapping[str, Any]
) -> LearnerProgress:
  """Restores a checkpoint into the cluster; returns the counters of the learner.

  Raises:
    ValueError: the checkpoint belongs to other models or to another kind of run.
  """
  if (saved := state.progress) is None or "learner" not in saved:
    raise ValueError(
      f"checkpoint {step} was not written by an RL learner: train into another folder"
    )
  for name in sorted(saved["identity"].keys() | identity.keys()):
    value, before = identity.get(name), saved["identity"].get(name)
    if before != value:
      raise ValueError(
        f"checkpoint {step} belongs to a run with {name} {before}, and this run has "
        f"{value}: resume with the models of that run, or use another folder"
      )
  for role, trainer in trainers(cluster).items():
    part = {n: (x or {}).get(role, {}) for n, x in named_values(state, ARRAYS).items()}
    trainer.load_run_state(RunState(**part), saved["trainers"][role])
  cluster.logger.restore(saved["metrics"])
  # Earlier versions had the padded sampler only, and named none.
  if (sampler := saved.get("sampler", "padded")) and cluster.rollout.sampler:
    cluster.rollout.use_sampler(sampler)
  # The checkpoint has only the trained arrays. The stamp covers the frozen weights too,
  # so that a run cannot resume with another base model.
  version = cluster.sync_weights()
  if version != (before := PolicyVersion.from_json(saved["version"])):
    raise ValueError(
      f"the policy restored from checkpoint {step} has the stamp {version.stamp}, but "
      f"{before.stamp} was saved: the frozen weights differ from those that the run "
      "was started with, or the checkpoint is damaged; resume with the same model"
    )
  return LearnerProgress(**saved["learner"])


def identity(cluster: RLCluster) -> dict[str, Any]:
  """Returns what a run does not change: stamps of models, and settings of rollouts."""
  fixed = {"reference": cluster.reference, "reward model": cluster.reward}
  config = cluster.cluster_config.training_config
  ahead: dict[str, Any] = {"lag": config.staleness} if config.staleness else {}
  if config.schedule == "greedy":
    ahead["schedule"] = "greedy"
  if (form := cluster.cluster_config.rollout(Mode.TRAIN).weights) is not None:
    ahead["weights"] = form
  return ahead | {
    name: policy_version.policy_stamp(model)
    for name, model in fixed.items()
    if model is not None
  }


def _nested(states: Mapping[str, RunState]) -> dict[str, Any]:
  """Converts {role: state} to {part: {role: arrays}} without empty parts."""
  return {
    part: {
      role: arrays for role, state in states.items() if (arrays := getattr(state, part))
    }
    for part in ARRAYS
  }
