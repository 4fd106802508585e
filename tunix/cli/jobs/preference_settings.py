"""The settings of the jobs that learn from preferences: dpo, orpo, reward, kto."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from tunix.cli.settings.data import CompletionSettings, RowSettings
from tunix.cli.settings.run import StreamRun
from tunix.data.records import PAIRS, Kind
from tunix.sft.dpo.preference_config import CompletionsConfig, DPOTrainingConfig
from tunix.sft.dpo.reward_trainer import RewardConfig
from tunix.utils import checks
from tunix.utils.setting import known_values, model_setting, setting, shared_values

HALF = 512  # tokens of a prompt, and of a response, where no key sets them

Unusable = Literal["error", "drop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseSettings:
  """Settings of every job on prompts with completions.

  Each job's section declares `unusable` after the keys of its loss, which is the order
  in saved configurations.

  Attributes:
    max_prompt_length: maximum number of tokens of a prompt; data.overlong says what
      happens to longer ones. null: half of data.max_length, or what
      preference.max_response_length leaves of it.
    max_response_length: maximum number of tokens of a response, its end included. null:
      what preference.max_prompt_length leaves of data.max_length.
    unusable: what happens to records with an empty completion, or with two equal ones.
  """

  # The trainer's config, which has the section's fields that concern the loss.
  config_class: ClassVar[type[CompletionsConfig]] = CompletionsConfig

  max_prompt_length: int | None = None
  max_response_length: int | None = None

  def __post_init__(self):
    length = checks.COUNT
    checks.fields(self, max_prompt_length=length, max_response_length=length)
    self.trainer_config()

  @property
  def shares_rows(self) -> bool:
    """True if the trainer takes sequences of several pairs in one row."""
    return False

  def trainer_config(self, **options: object) -> Any:
    """Returns the trainer's config with the values of this section.

    Args:
      **options: further fields of the config.

    Raises:
      ValueError: A value is out of range; the message begins with its key.
    """
    values = {**shared_values(self.config_class, self), **options}
    lengths = "max_prompt_length", "max_response_length"
    if None in map(values.get, lengths):  # the run has not set both yet
      values |= dict.fromkeys(lengths)
    return self.config_class(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOSettings(ResponseSettings):
  """Settings of the job dpo.

  Attributes:
    loss: sigmoid, hinge, ipo, simpo, cpo, ...: docs/trainers/dpo.md has them all.
    beta: strength of the pull toward the reference.
    label_smoothing: probability that a preference label is wrong, for losses that take
      it.
    options: further options of the loss, such as {"gamma": 1.0} of simpo; no key of
      this section.
    reference_free: replace the reference's log-probabilities by 0 in a loss that has a
      reference.
    shared_prompt: compute a pair's prompt once for both completions. The gradient is
      the same up to rounding. null: on CPUs, unless pairs share rows.
    reference: folder of the reference. null: the model itself before the training (with
      adapters the same weights without them, else a second copy).
    reference_logps: folder of the reference's log-probabilities. They are computed
      once, before the training, and later runs read them. No second model is held in
      memory.
  """

  config_class = DPOTrainingConfig

  loss: str = "sigmoid"
  beta: float = 0.1
  label_smoothing: float = 0.0
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  reference_free: bool = False
  shared_prompt: bool | None = None
  unusable: Unusable = "error"
  reference: str | None = model_setting("reference")
  reference_logps: str | None = setting(None, path="written", may_change=True)

  def __post_init__(self):
    super().__post_init__()
    for name, value in known_values(self, ("reference", "reference_logps")).items():
      if self.reference_free:
        raise ValueError(
          f"{name} is {value!r} and preference.reference_free is true, which compares "
          "with no reference. Leave one of them out."
        )
      if not self.trainer_config().spec.needs_reference:
        raise ValueError(
          f"{name} is {value!r} and preference.loss is {self.loss!r}, which has no "
          f"reference. Leave {name} out."
        )

  @property
  def shares_rows(self) -> bool:
    """See `ResponseSettings`."""
    # Stored log-probabilities are found by the tokens of one pair in its own row.
    return not self.shared_prompt and self.reference_logps is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ORPOSettings(ResponseSettings):
  """Settings of the job orpo.

  Attributes:
    shared_prompt: compute a pair's prompt once for both completions. The gradient is
      the same up to rounding. null: on CPUs, unless pairs share rows.
    lambda_orpo: weight of the odds ratio in the loss.
  """

  config_class = DPOTrainingConfig

  shared_prompt: bool | None = None
  lambda_orpo: float = 0.1
  unusable: Unusable = "error"

  @property
  def shares_rows(self) -> bool:
    """See `ResponseSettings`."""
    return not self.shared_prompt

  def trainer_config(self, **options: object) -> DPOTrainingConfig:
    return super().trainer_config(loss="orpo", **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelSettings(ResponseSettings):
  """Settings of the job reward.

  Attributes:
    centering: weight of a term that pulls the sum of a pair's two rewards to 0.
  """

  config_class = RewardConfig

  centering: float = 0.0
  unusable: Unusable = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceRun(StreamRun):
  """Settings of a run that learns from preferences.

  Attributes:
    preference: how completions are compared (docs/trainers/dpo.md).
  """

  records: ClassVar[Kind] = PAIRS
  reads_images: ClassVar[bool] = True

  data: CompletionSettings = dataclasses.field(default=CompletionSettings())
  preference: Any

  def __post_init__(self):
    super().__post_init__()
    logps = getattr(self.preference, "reference_logps", None)
    if self.data.stream and logps is not None:
      raise ValueError(
        f"preference.reference_logps is {logps!r} and data.stream is true; a stream is "
        "never read as a whole before the training. Leave one of them out"
      )
    prompt, response = _lengths(self.data.max_length, self.preference)
    lengths = {"max_prompt_length": prompt, "max_response_length": response}
    # Every reader finds the three numbers, and a resumed run compares them, however
    # they were given.
    for name, section, values in (
      ("data", self.data, {"max_length": prompt + response}),
      ("preference", self.preference, lengths),
    ):
      object.__setattr__(self, name, dataclasses.replace(section, **values))

  def kind(self, *, training: bool) -> Kind:
    """Returns pairs or labeled completions, for training and evaluation alike."""
    del training
    return self.records

  def row_keys(self, kind: Kind) -> dict[str, str]:
    """Returns the keys of the two lengths and of `unusable`."""
    del kind
    return {
      "max_prompt_length": "preference.max_prompt_length",
      "max_completion_length": "preference.max_response_length",
      "unusable": "preference.unusable",
    }

  @property
  def shares_rows(self) -> bool:
    """See `StreamRun`."""
    return super().shares_rows and self.preference.shares_rows

  @property
  def drops(self) -> bool:
    """True if records may be left out."""
    return super().drops or self.preference.unusable == "drop"


def _lengths(row: int | None, limits: ResponseSettings) -> tuple[int, int]:
  """Returns the most tokens of a prompt and of a response.

  Args:
    row: value of data.max_length.
    limits: section with the two limits, of which either may be None.

  Raises:
    ValueError: one limit leaves no token of the row, or both do not add up to it.
  """
  prompt, response = limits.max_prompt_length, limits.max_response_length
  if row is None:
    return prompt or HALF, response or HALF
  if prompt is not None and response is not None:
    # Earlier versions wrote files of all keys, with the default of sft in this one.
    if row not in (prompt + response, RowSettings.max_length):
      raise ValueError(
        f"data.max_length is {row}; expected {prompt + response}, which is "
        "preference.max_prompt_length + max_response_length. Leave out one of the three"
      )
    return prompt, response
  first = prompt or row - (response or row - row // 2)
  if not 0 < first < row:
    name, value = ("response", response) if prompt is None else ("prompt", prompt)
    raise ValueError(
      f"preference.max_{name}_length is {value}; expected at most {row - 1}, because "
      f"data.max_length is {row}. Change one of them"
    )
  return first, row - first


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPORun(PreferenceRun):
  """Settings of a run of the job dpo: DPO, and the other losses of pairs."""

  job: Literal["dpo"] = "dpo"
  preference: DPOSettings = DPOSettings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ORPORun(PreferenceRun):
  """Settings of a run of the job orpo."""

  job: Literal["orpo"] = "orpo"
  preference: ORPOSettings = ORPOSettings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardRun(PreferenceRun):
  """Settings of a run of the job reward: a model with a head of scores."""

  fits_adapter: ClassVar[bool] = False

  job: Literal["reward"] = "reward"
  preference: RewardModelSettings = RewardModelSettings()

  def __post_init__(self):
    super().__post_init__()
    if self.eval.env is not None:
      raise ValueError(
        f"eval.env is {self.eval.env!r} and job is reward, whose model scores answers "
        "and writes none. Leave eval.env out"
      )
