"""Which weights a rollout was drawn with: versions by content, not by trust."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable

from flax import nnx

from tunix.sft.stamp import content_stamp
from tunix.utils import checks


class UnknownWeightsError(RuntimeError):
  """A rollout comes from weights that were not published, or too long ago."""


@dataclasses.dataclass(frozen=True)
class PolicyVersion:
  """The identity of a policy.

  Attributes:
    step: optimizer updates when it was published.
    stamp: of its parameters, see `tunix.sft.stamp.content_stamp`.
  """

  step: int
  stamp: str

  def __post_init__(self):
    if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
      raise ValueError(
        f"step is {self.step!r}, it must be a number of updates, 0 or up"
      )
    if not isinstance(self.stamp, str) or not self.stamp:
      raise ValueError(f"stamp is {self.stamp!r}, it must be a content stamp")

  def to_json(self) -> str:
    """One line; `from_json` reads it."""
    return json.dumps(dataclasses.asdict(self))

  @classmethod
  def from_json(cls, text: str) -> PolicyVersion:
    """The version that `to_json` wrote.

    Raises:
      ValueError: the text is something else.
    """
    try:
      return cls(**json.loads(text))
    except (TypeError, json.JSONDecodeError) as error:
      raise ValueError(f"{text!r} is no policy version in JSON: {error}") from error


def policy_stamp(model: nnx.Module) -> str:
  """The content stamp of a module's parameters; random state does not count."""
  return content_stamp(nnx.state(model, nnx.Param))


class WeightSync:
  """The versions that rollouts may come from.

  Args:
    history: how many of the latest versions are known; with rollouts that lag behind
      training, at least the lag plus 1.
    known: versions of an earlier run, oldest first.

  Raises:
    ValueError: `history` is below 1.
  """

  def __init__(self, history: int = 8, known: Iterable[PolicyVersion] = ()):
    checks.number("history", history, checks.COUNT, whole=True)
    self._known = collections.deque(known, maxlen=history)

  @property
  def known(self) -> tuple[PolicyVersion, ...]:
    """The versions, oldest first: what a run saves."""
    return tuple(self._known)

  @property
  def current(self) -> PolicyVersion | None:
    """The version published last."""
    return self._known[-1] if self._known else None

  def publish(self, model: nnx.Module, step: int) -> PolicyVersion:
    """Stamps the model and makes it the current version.

    Args:
      model: what rollouts will be drawn with.
      step: optimizer updates so far.

    Raises:
      ValueError: `step` is below that of the current version.
    """
    version = PolicyVersion(step, policy_stamp(model))
    if self.current is not None and step < self.current.step:
      raise ValueError(
        f"step {step} is published after step {self.current.step}: give a restored run "
        "a WeightSync of its own"
      )
    if version != self.current:
      self._known.append(version)
    return version

  def check(self, version: PolicyVersion | None) -> int:
    """How many publications old a rollout's version is; 0 is the current one.

    Raises:
      UnknownWeightsError: it is not among the known ones.
    """
    for age, known in enumerate(reversed(self._known)):
      if known == version:
        return age
    raise UnknownWeightsError(
      f"a rollout comes from {_name(version)}, known are {self._names()}: sync the "
      "weights before generating, or raise `history` if rollouts may lag that far"
    )

  def identify(self, model: nnx.Module) -> PolicyVersion:
    """The latest known version that the model's weights are.

    Raises:
      UnknownWeightsError: somebody changed them after they were published.
    """
    stamp = policy_stamp(model)
    for known in reversed(self._known):
      if known.stamp == stamp:
        return known
    raise UnknownWeightsError(
      f"the model that generates has the stamp {stamp}, known are {self._names()}: its "
      "weights changed after they were published; sync them again"
    )

  def _names(self) -> str:
    return ", ".join(map(_name, self._known)) or "none"


def _name(version: PolicyVersion | None) -> str:
  if version is None:
    return "no version"
  return f"step {version.step} ({version.stamp[:12]})"
