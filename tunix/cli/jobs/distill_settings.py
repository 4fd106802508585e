"""The settings of the job distill."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from tunix.cli.settings.data import RowSettings
from tunix.cli.settings.run import Dtype, StreamRun
from tunix.data.records import ANSWERED, PROMPTS, SFT, Kind
from tunix.data.turns.teacher_prompts import DEMONSTRATION, Taught
from tunix.generate.decoders.layout import GatherWeights
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.utils import checks
from tunix.utils.setting import field_values, known_values, model_setting, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillSettings:
  """The teacher, and the loss that compares it with the student.

  Attributes:
    teacher: folder of the teacher. Its tokenizer must be the student's, unless
      distill.align is set.
    align: text: the teacher has its own tokenizer and chat template, and spans of text
      are compared, by the strategy policy_gradient. null: tokens are compared.
    strategy: logit: divergence of the two distributions, with cross-entropy.
      policy_gradient: reverse KL on completions of the student. null: logit.
    on_policy_fraction: share of the steps in which the student writes the completions,
      sampled as the section rollout says; other steps take the completions of the data,
      whose records are prompts with one completion each. 1: training reads only the
      prompts of the data. null: all rows come from the data, as in the job sft.
    teacher_dtype: dtype of the teacher's computation; null: the checkpoint's.
    temperature: temperature of both distributions; null: 2, with policy_gradient
      rollout.temperature.
    alpha: weight of the divergence in the loss, the rest is cross-entropy; null: 0.5.
    top_k: compares only the teacher's top_k most probable tokens; null: all tokens.
    divergence: divergence of the strategy logit; null: forward_kl.
    jsd_beta: weight of the teacher in the mixture of jsd; null: 0.5.
    cache: folder that keeps the teacher's top_k tokens of every row, so that they are
      computed once. Without distill.teacher the folder is only read.
    self_teacher: weights of the student as its own teacher, which reads a demonstration
      in its prompt, with distill.on_policy_fraction. average: a moving average of the
      student's weights; current: the weights at each step; initial: those before the
      training. In place of distill.teacher. Defaults of this setting: reverse_kl,
      temperature 1, alpha 1, and top_k 100 unless the weights are initial.
    average_rate: share of the new weights in the average after each step; null: 0.05.
    template: prompt of the teacher, with the student's prompt at {prompt} and the
      demonstration at {demonstration}; null: a text of the library if
      distill.self_teacher or distill.demonstration is set, else the student's prompt.
    demonstration: field of the records with the demonstration; null: the answer.
    max_teacher_prompt_length: most tokens of a prompt that only the teacher reads. A
      longer one is not cut: with data.overlong=drop or truncate its record is left out.
    teachers: folders of several teachers by name, in place of distill.teacher. Each
      record names its own. Default of top_k with it: 100.
    teacher_column: field of the records with the name of the teacher.
  """

  teacher: str | None = model_setting("teacher")
  align: Literal["text"] | None = setting(None, fingerprint="teacher_tokenizer")
  strategy: Literal["logit", "policy_gradient"] | None = None
  on_policy_fraction: float | None = None
  teacher_dtype: Dtype | None = None
  temperature: float | None = None
  alpha: float | None = None
  top_k: int | None = None
  divergence: Literal["forward_kl", "reverse_kl", "jsd"] | None = None
  jsd_beta: float | None = None
  cache: str | None = setting(None, path="written", may_change=True)
  self_teacher: Literal["average", "current", "initial"] | None = None
  average_rate: float | None = None
  template: str | None = None
  demonstration: str | None = None
  max_teacher_prompt_length: int = 1024
  teachers: dict[str, str] = setting(
    default_factory=dict, may_change=True, fingerprint="teachers"
  )
  teacher_column: str = "teacher"

  def __post_init__(self):
    checks.fields(
      self,
      top_k=checks.COUNT,
      on_policy_fraction=checks.SHARE,
      alpha=checks.SHARE,
      jsd_beta=checks.SHARE,
      temperature=checks.POSITIVE,
      average_rate=checks.SHARE,
      max_teacher_prompt_length=checks.COUNT,
    )
    self._check_teachers()
    fraction = self.on_policy_fraction
    if self.strategy == "policy_gradient":
      if fraction != 1:
        raise ValueError(
          "strategy is 'policy_gradient' and distill.on_policy_fraction "
          f"{'not set' if fraction is None else fraction}; expected 1, because the "
          "gradient is only right on completions of the student"
        )
      unread = ("alpha", "top_k", "divergence", "jsd_beta")
      for name, value in known_values(self, unread).items():
        raise ValueError(
          f"{name} is {value!r} and distill.strategy 'policy_gradient', which does "
          "not read it. Leave one of them out"
        )
    if fraction is not None and self.cache is not None:
      raise ValueError(
        f"cache is {self.cache!r} and distill.on_policy_fraction {fraction}; new "
        "completions of the student are in no cache. Leave one of them out"
      )
    has_folder = self.teacher is not None or self.teachers
    if self.teacher_dtype is not None and not has_folder:
      raise ValueError(
        f"teacher_dtype is {self.teacher_dtype!r} and distill.teacher is not set. Name "
        "the teacher's folder"
      )

  def _check_teachers(self) -> None:
    """Refuses several sources of the teacher, and keys that would not be read."""
    sources = ("teacher", "self_teacher", "teachers")
    values = field_values(self)
    given = [name for name in sources if values[name]]
    if len(given) > 1:
      raise ValueError(
        f"{given[1]} is {values[given[1]]!r} and distill.{given[0]} "
        f"{values[given[0]]!r}; expected one of them. Leave one out"
      )
    prompted = (*sources[1:], "template", "demonstration")
    own = [name for name in prompted if values[name]]
    if own and self.on_policy_fraction is None:
      raise ValueError(
        f"{own[0]} is {values[own[0]]!r} and distill.on_policy_fraction not "
        "set. Set it to 1: the student writes the completions that this teacher scores"
      )
    # The name of an object in memory, "<...>", has no tokenizer.
    is_folder = self.teacher is not None and not self.teacher.startswith("<")
    if self.align and not (self.strategy == "policy_gradient" and is_folder):
      raise ValueError(
        f"align is {self.align!r}, distill.strategy {self.strategy!r} and "
        f"distill.teacher {self.teacher!r}; expected 'policy_gradient' and the folder "
        "of one teacher. Set both, or leave align out"
      )
    unread = {
      "average_rate": self.self_teacher == "average",
      "max_teacher_prompt_length": self.has_teacher_prompts,
      "teacher_column": bool(self.teachers),
    }
    defaults = {field.name: field.default for field in dataclasses.fields(self)}
    for name, is_read in unread.items():
      if not is_read and values[name] != defaults[name]:
        raise ValueError(
          f"{name} is {values[name]!r}, and neither the teacher nor its prompt reads "
          "it. Leave it out, or set distill.self_teacher, template, teachers or align"
        )

  @property
  def has_teacher_prompts(self) -> bool:
    """True if the teacher reads other tokens than the student as its prompt."""
    return self.align is not None or self.taught.template is not None

  @functools.cached_property
  def teacher_tokenizer(self) -> TokenizerAdapter | None:
    """The tokenizer of a teacher that is compared by text; None: the student's."""
    if self.align is None or self.teacher is None:
      return None
    return TokenizerAdapter.from_pretrained(self.teacher)

  @property
  def taught(self) -> Taught:
    """The fields of records for the teacher.

    Raises:
      ValueError: a place of the template is missing.
    """
    template = self.template
    if template is None and (self.self_teacher or self.demonstration):
      template = DEMONSTRATION
    return Taught(
      template=template,
      demonstration=self.demonstration,
      teachers=tuple(self.teachers),
      column=self.teacher_column,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudentRollout(RolloutConfig):
  """The sampling of the student's completions.

  Attributes:
    seed: seed of the sampling; null: the key seed.
  """

  max_tokens_to_generate: int = 256
  max_prompt_length: int = 256
  seed: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
  stop_strings: tuple[str, ...] = ()
  # Options of RolloutConfig that the student's sampler has not.
  kv_cache_size: int | None = setting(None, python_only=True)
  slots: int | None = setting(None, python_only=True)
  gather_weights: GatherWeights = setting(None, python_only=True)
  replay_routes: bool = setting(False, python_only=True)
  center_scores: int = setting(0, python_only=True)
  weights: Literal["int8", "fp8"] | None = setting(None, python_only=True)
  engine_options: Mapping[str, Any] = setting(default_factory=dict, python_only=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillRun(StreamRun):
  """Settings of a run of the job distill.

  Attributes:
    distill: the teacher, and the loss (docs/trainers/distill.md).
    rollout: sampling of completions; in distill the student's completions.
  """

  reads_images: ClassVar[bool] = True

  job: Literal["distill"] = "distill"
  data: RowSettings = dataclasses.field(default=RowSettings())
  distill: DistillSettings = DistillSettings()
  rollout: StudentRollout = StudentRollout()

  def __post_init__(self):
    super().__post_init__()
    if self.data.stream:
      raise ValueError(
        "data.stream is true; expected false, because distill reads all of its records "
        "before the training. Leave it out"
      )

  @property
  def is_on_policy(self) -> bool:
    """True if the student writes completions that the teacher scores."""
    return self.distill.on_policy_fraction is not None

  @property
  def follows_lengths(self) -> bool:
    """True if rows may be as short as the longest record.

    A cache finds rows by their padded tokens, so their width must not depend on the
    other records.
    """
    return super().follows_lengths and self.distill.cache is None

  def kind(self, *, training: bool) -> Kind:
    """Returns the kind of the records: examples, or prompts for the student."""
    if not self.is_on_policy:
      return SFT
    # Every evaluation compares on the same completions, those of the data.
    prompts_only = training and self.distill.on_policy_fraction == 1
    kind = PROMPTS if prompts_only else ANSWERED
    return self.distill.taught.kind(kind, self.distill.teacher_tokenizer)

  def row_keys(self, kind: Kind) -> dict[str, str]:
    """Returns the keys of the row length, or of the student's lengths."""
    if kind is SFT:
      return {"max_length": "data.max_length"}
    names = {
      "max_prompt_length": "rollout.max_prompt_length",
      "max_completion_length": "rollout.max_tokens_to_generate",
    }
    if self.distill.has_teacher_prompts:
      names["max_teacher_prompt_length"] = "distill.max_teacher_prompt_length"
    return names
