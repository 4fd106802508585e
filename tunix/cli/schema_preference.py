"""The sections of a configuration that preference training and distillation have.

Null means the trainer's own default.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.cli.convert import at_least

# Which keys of the section `preference` each job reads, besides those that all do.
PREFERENCE_JOBS: dict[str, tuple[str, ...]] = {
  "dpo": (
    *("loss", "beta", "label_smoothing", "options", "shared_prompt"),
    *("reference", "reference_free", "reference_logps"),
  ),
  "orpo": ("lambda_orpo", "shared_prompt"),
  "kto": ("beta", "reference", "desirable_weight", "undesirable_weight"),
  "reward": ("centering",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceKeys:
  """Losses from pairs of responses, or from responses with a label."""

  loss: str | None = None
  beta: float | None = None
  label_smoothing: float | None = None
  lambda_orpo: float | None = None
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  reference: str | None = None
  reference_free: bool = False
  reference_logps: str | None = None
  shared_prompt: bool = False
  desirable_weight: float | None = None
  undesirable_weight: float | None = None
  centering: float | None = None
  max_prompt_length: int = 512
  max_response_length: int = 512
  unusable: Literal["error", "drop"] = "error"

  def __post_init__(self):
    at_least(
      1,
      preference__max_prompt_length=self.max_prompt_length,
      preference__max_response_length=self.max_response_length,
    )
    own = {field.name for field in dataclasses.fields(self)}
    for name, value in self.options.items():
      if name in own:
        raise ValueError(
          f"preference.options has {name!r}, which is a key of its own: set "
          f"preference.{name} instead"
        )
      if not isinstance(value, int | float):
        raise ValueError(
          f"preference.options.{name} is {value!r}, expected a number, true or false"
        )
    for name in ("reference", "reference_logps"):
      if self.reference_free and getattr(self, name) is not None:
        raise ValueError(
          f"preference.{name} is {getattr(self, name)!r} and preference.reference_free "
          "true: nothing would be compared with it; leave one of them out"
        )

  def given(self, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of `names` that are set."""
    values = {name: getattr(self, name) for name in names}
    return {name: value for name, value in values.items() if value not in (None, {})}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillKeys:
  """What a student learns from a teacher, and how."""

  teacher: str | None = None
  strategy: Literal["logit", "policy_gradient"] | None = None
  on_policy_fraction: float | None = None
  teacher_dtype: Literal["float32", "bfloat16", "float16"] | None = None
  temperature: float | None = None
  alpha: float | None = None
  top_k: int | None = None
  divergence: Literal["forward_kl", "reverse_kl", "jsd"] | None = None
  jsd_beta: float | None = None
  cache: str | None = None

  def __post_init__(self):
    at_least(1, distill__top_k=self.top_k)
    on_policy = self.on_policy_fraction is not None
    if self.strategy == "policy_gradient":
      if self.on_policy_fraction != 1:
        given = self.on_policy_fraction if on_policy else "not set"
        raise ValueError(
          "distill.strategy is 'policy_gradient' and distill.on_policy_fraction "
          f"{given}: it is right for what the student writes alone; set that to 1"
        )
      for name in ("alpha", "top_k", "divergence", "jsd_beta"):
        if getattr(self, name) is not None:
          raise ValueError(
            f"distill.{name} is {getattr(self, name)!r} and distill.strategy "
            "'policy_gradient', which does not read it: leave one of them out"
          )
    if on_policy and self.cache is not None:
      raise ValueError(
        f"distill.cache is {self.cache!r} and distill.on_policy_fraction "
        f"{self.on_policy_fraction}: what the student writes is new every time; leave "
        "one of them out"
      )
    if self.teacher_dtype is not None and self.teacher is None:
      raise ValueError(
        f"distill.teacher_dtype is {self.teacher_dtype!r} and distill.teacher is not "
        "set: name the teacher's folder"
      )


def preference_remedies(job: str) -> dict[str, str]:
  """{key of the section that the job does not read: what to do instead}."""
  owners: dict[str, list[str]] = {}
  for owner, names in PREFERENCE_JOBS.items():
    for name in names:
      owners.setdefault(name, []).append(owner)
  read = PREFERENCE_JOBS[job]
  return {
    f"preference.{name}": f"it belongs to the job{'s' * (len(jobs) > 1)} "
    + " and ".join(jobs)
    for name, jobs in owners.items()
    if name not in read
  }
