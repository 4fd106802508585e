"""Translation of CheckpointOptions to and from orbax's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tunix.sft.checkpoints import barrier as checkpoint_barrier
from tunix.sft.config import CheckpointOptions
from tunix.utils import checks
from tunix.utils.setting import field_values


def from_any(options: object) -> CheckpointOptions:
  """Returns CheckpointOptions for any accepted kind of options.

  Args:
    options: CheckpointOptions, orbax's CheckpointManagerOptions, or None.

  Raises:
    TypeError: The options are of another kind.
    ValueError: A setting of orbax's options has no counterpart here.
  """
  if options is None:
    return CheckpointOptions()
  if isinstance(options, CheckpointOptions):
    return options
  import orbax.checkpoint as ocp

  if not isinstance(options, ocp.CheckpointManagerOptions):
    raise TypeError(
      f"options is {checks.type_of(options)}; expected "
      "tunix.sft.config.CheckpointOptions or orbax's CheckpointManagerOptions"
    )
  policies, defaults = ocp.checkpoint_managers, ocp.CheckpointManagerOptions()
  supported = {
    "save_interval_steps",
    "max_to_keep",
    "enable_async_checkpointing",
    "save_decision_policy",
    "create",
  }
  usual = field_values(defaults)
  for name, value in field_values(options).items():
    if name not in supported and value != usual[name]:
      remedy = "Leave it out."
      if name in ("best_fn", "best_mode"):
        remedy = "Use TrainingConfig.best, which keeps the best checkpoint."
      raise ValueError(
        f"CheckpointManagerOptions.{name} is {value!r}, which has no counterpart "
        f"in tunix.sft.config.CheckpointOptions. {remedy}"
      )
  cadence: dict[str, Any] = {"save_every_n_steps": options.save_interval_steps}
  policy: Any = options.save_decision_policy
  if isinstance(policy, policies.FixedIntervalPolicy):
    cadence = {"save_every_n_steps": policy.interval}
  elif isinstance(policy, policies.ContinuousCheckpointingPolicy):
    cadence = {"min_interval_secs": policy.minimum_interval_secs or 0}
  elif policy is not None:
    raise ValueError(
      f"save_decision_policy is {checks.type_of(policy)}; expected a "
      "FixedIntervalPolicy or a ContinuousCheckpointingPolicy"
    )
  return CheckpointOptions(
    max_to_keep=options.max_to_keep,
    asynchronous=options.enable_async_checkpointing,
    **cadence,
  )


def kept(steps: Sequence[int], newest: int | None, best: int | None) -> list[bool]:
  """Tells for each checkpoint if it is kept.

  Args:
    steps: steps of the checkpoints, in ascending order.
    newest: number of newest checkpoints to keep; None: all.
    best: step of a further checkpoint to keep; None: no further one.
  """
  first = 0 if newest is None else max(len(steps) - newest, 0)
  return [index >= first or step == best for index, step in enumerate(steps)]


@dataclasses.dataclass(frozen=True)
class _Keep:
  """The PreservationPolicy that orbax calls at every save.

  Orbax deletes old checkpoints after the new one is complete. A kill in between leaves
  too many checkpoints, never too few.
  """

  newest: int | None
  best: Callable[[], int | None]

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: object
  ) -> list[bool]:
    del context
    return kept([info.step for info in checkpoints], self.newest, self.best())


def for_orbax(options: CheckpointOptions, best: Callable[[], int | None]) -> Any:
  """Returns the CheckpointManagerOptions of orbax with the same meaning.

  Args:
    options: our options.
    best: function that returns the step of a checkpoint that is always kept, or None.
  """
  import orbax.checkpoint as ocp

  policies = ocp.checkpoint_managers
  if options.save_every_n_steps is not None:
    decision = policies.FixedIntervalPolicy(interval=options.save_every_n_steps)
  else:
    decision = policies.ContinuousCheckpointingPolicy(
      minimum_interval_secs=int(options.interval_secs)
    )
  return ocp.CheckpointManagerOptions(
    save_decision_policy=decision,
    preservation_policy=_Keep(options.max_to_keep, best),
    enable_async_checkpointing=options.asynchronous,
    async_options=ocp.AsyncOptions(
      timeout_secs=options.timeout_secs, barrier_sync_fn=checkpoint_barrier.Barrier()
    ),
    create=True,
  )
