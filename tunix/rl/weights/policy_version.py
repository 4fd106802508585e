"""Versions of the policy, computed from the content of its weights.

A rollout stores the version of the weights that sampled it. A rollout of unknown
weights raises an error.

This module moves no weights: `placement.copy_weights` copies them to a sampler in this
process, and `rl.rollout.remote_host` sends them to remote hosts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable

from flax import nnx

from tunix.sft.checkpoints.stamp import content_stamp
from tunix.utils import checks


class UnknownWeightsError(RuntimeError):
  """A rollout comes from weights that were not published, or are no longer known."""


@dataclasses.dataclass(frozen=True)
class PolicyVersion:
  """The identity of a policy.

  Attributes:
    step: optimizer updates before the policy was published.
    stamp: content stamp of its parameters, see `tunix.sft.checkpoints.stamp`.
  """

  step: int
  stamp: str

  def __post_init__(self):
    checks.fields(self, step=checks.NOT_NEGATIVE)
    if not isinstance(self.stamp, str) or not self.stamp:
      raise ValueError(f"stamp is {self.stamp!r}: expected a content stamp")

  def to_json(self) -> str:
    """Returns one line of JSON for `from_json`."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def from_json(cls, text: str) -> PolicyVersion:
    """Reads the result of `to_json`.

    Raises:
      ValueError: the text is not a version.
    """
    try:
      return cls(**json.loads(text))
    except (TypeError, json.JSONDecodeError) as error:
      raise ValueError(f"{text!r} is not a policy version in JSON: {error}") from error


def policy_stamp(model: nnx.Module) -> str:
  """Returns the content stamp of a module's parameters, without its random state."""
  # Dropout counters differ between the trainer and the engine; parameters must not.
  return content_stamp(nnx.state(model, nnx.Param))


class PublishedVersions:
  """The versions that rollouts may come from.

  Args:
    history: number of the latest versions that are known. If rollouts lag behind
      training, it must be at least the lag plus 1.
    known: versions of an earlier run, oldest first.

  Raises:
    ValueError: `history` is below 1.
  """

  def __init__(self, history: int = 8, known: Iterable[PolicyVersion] = ()):
    checks.number("history", history, checks.COUNT, whole=True)
    self._history = history
    # Replaced and never changed, because rollouts may read it in another thread.
    self._known = tuple(known)[-history:]

  @property
  def known(self) -> tuple[PolicyVersion, ...]:
    """The known versions, oldest first, which a run saves."""
    return self._known

  @property
  def current(self) -> PolicyVersion | None:
    """The version that was published last; None before the first."""
    return self._known[-1] if self._known else None

  def publish(self, model: nnx.Module, step: int) -> PolicyVersion:
    """Stamps the model and makes it the current version.

    Args:
      model: the model that samples the next rollouts.
      step: optimizer updates so far.

    Raises:
      ValueError: `step` is below the step of the current version.
    """
    version = PolicyVersion(step, policy_stamp(model))
    if self.current is not None and step < self.current.step:
      raise ValueError(
        f"step is {step}, below the published step {self.current.step}: make a new "
        "PublishedVersions for a restored run"
      )
    # `known` has a limited length. Publishing unchanged weights again must not remove
    # an older version from it.
    if version != self.current:
      self._known = (*self._known, version)[-self._history :]
    return version

  def check(self, version: PolicyVersion | None) -> int:
    """Returns the age of a version in publications; 0 is the current version.

    Raises:
      UnknownWeightsError: the version is not known.
    """
    for age, candidate in enumerate(reversed(self._known)):
      if candidate == version:
        return age
    raise UnknownWeightsError(
      f"a rollout comes from {_name(version)}; the known versions are {self._names()}: "
      "sync the weights before generating, or raise `history` if rollouts may lag that "
      "far"
    )

  def identify(self, model: nnx.Module) -> PolicyVersion:
    """Returns the latest known version with the same content as the model's weights.

    Raises:
      UnknownWeightsError: the weights were changed after they were published.
    """
    stamp = policy_stamp(model)
    # The same weights can have several versions with different steps. The latest is
    # returned.
    for candidate in reversed(self._known):
      if candidate.stamp == stamp:
        return candidate
    raise UnknownWeightsError(
      f"the model that generates has the stamp {stamp}; the known versions are "
      f"{self._names()}: its weights changed after they were published; sync them again"
    )

  def _names(self) -> str:
    return ", ".join(map(_name, self._known)) or "none"


def _name(version: PolicyVersion | None) -> str:
  if version is None:
    return "no version"
  return f"step {version.step} ({version.stamp[:12]})"
