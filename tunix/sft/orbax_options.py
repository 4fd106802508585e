"""When to save and what to keep, in our words and in orbax's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tunix.sft.config import CheckpointOptions


def from_any(options: Any) -> CheckpointOptions:
  """CheckpointOptions as they are, or what says the same for orbax, translated.

  Raises:
    TypeError: something else.
    ValueError: a setting of orbax that has no counterpart here.
  """
  if options is None:
    return CheckpointOptions()
  if isinstance(options, CheckpointOptions):
    return options
  import orbax.checkpoint as ocp

  if not isinstance(options, ocp.CheckpointManagerOptions):
    raise TypeError(
      f"options is a {type(options).__name__}: expected "
      "tunix.sft.config.CheckpointOptions or orbax's CheckpointManagerOptions"
    )
  policies, plain = ocp.checkpoint_managers, ocp.CheckpointManagerOptions()
  understood = {
    "save_interval_steps",
    "max_to_keep",
    "enable_async_checkpointing",
    "save_decision_policy",
    "create",
  }
  for field in dataclasses.fields(options):
    value, default = getattr(options, field.name), getattr(plain, field.name)
    if field.name not in understood and value != default:
      remedy = "leave it out"
      if field.name in ("best_fn", "best_mode"):
        remedy = "TrainingConfig.best keeps the best checkpoint"
      raise ValueError(
        f"CheckpointManagerOptions.{field.name} is {value!r}, which has no counterpart "
        f"in tunix.sft.config.CheckpointOptions: {remedy}"
      )
  cadence: dict[str, Any] = {"save_every_n_steps": options.save_interval_steps}
  policy: Any = options.save_decision_policy
  if isinstance(policy, policies.FixedIntervalPolicy):
    cadence = {"save_every_n_steps": policy.interval}
  elif isinstance(policy, policies.ContinuousCheckpointingPolicy):
    cadence = {"min_interval_secs": policy.minimum_interval_secs or 0}
  elif policy is not None:
    raise ValueError(
      f"save_decision_policy is a {type(policy).__name__}: use FixedIntervalPolicy or "
      "ContinuousCheckpointingPolicy"
    )
  return CheckpointOptions(
    max_to_keep=options.max_to_keep,
    asynchronous=options.enable_async_checkpointing,
    **cadence,
  )


def kept(steps: Sequence[int], newest: int | None, besides: int | None) -> list[bool]:
  """Which of the checkpoints, in order, stay: the newest (None: all), and one more."""
  first = 0 if newest is None else max(len(steps) - newest, 0)
  return [place >= first or step == besides for place, step in enumerate(steps)]


@dataclasses.dataclass(frozen=True)
class _Keep:
  """Orbax's PreservationPolicy: asked at every save; what goes is deleted after the
  new checkpoint is whole, so that a kill leaves too many of them and never too few."""

  newest: int | None
  besides: Callable[[], int | None]

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    del context
    return kept([info.step for info in checkpoints], self.newest, self.besides())


def for_orbax(o: CheckpointOptions, besides: Callable[[], int | None]) -> Any:
  """The CheckpointManagerOptions of orbax that mean the same; `besides` names a step
  that stays, however old it is."""
  import orbax.checkpoint as ocp

  policies = ocp.checkpoint_managers
  if o.save_every_n_steps is not None:
    decision = policies.FixedIntervalPolicy(interval=o.save_every_n_steps)
  else:
    decision = policies.ContinuousCheckpointingPolicy(
      minimum_interval_secs=int(o.interval_secs)
    )
  return ocp.CheckpointManagerOptions(
    save_decision_policy=decision,
    preservation_policy=_Keep(o.max_to_keep, besides),
    enable_async_checkpointing=o.asynchronous,
    async_options=ocp.AsyncOptions(timeout_secs=o.timeout_secs),
    create=True,
  )
