"""The job distill: what a student learns from a teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from tunix.cli.build import build, data as build_data, mesh as mesh_axes
from tunix.cli.build.data import RunData
from tunix.cli.jobs import sft
from tunix.cli.jobs.job import Job, Loaded, length_of
from tunix.cli.run import fingerprints
from tunix.cli.settings import keys
from tunix.cli.settings.data import RowSettings
from tunix.cli.settings.run import Dtype, StreamRun
from tunix.data.records import ANSWERED, PROMPTS, SFT, Kind
from tunix.distillation import vocabulary
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig,
  OnPolicyDistillationTrainer,
  Prompts,
)
from tunix.distillation.strategies.logit import LogitStrategy
from tunix.distillation.strategies.policy_gradient import PolicyGradientStrategy
from tunix.distillation.teacher_cache import TeacherCache
from tunix.generate import batching
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.utils import checks

# Keys of the section -> arguments of the strategy.
_STRATEGY = {
  "temperature": "temperature",
  "alpha": "alpha",
  "top_k": "distill_top_k",
  "divergence": "divergence",
  "jsd_beta": "beta",
}
# Arguments of OnPolicyConfig -> keys.
_ON_POLICY = {
  "on_policy_fraction": "distill.on_policy_fraction",
  "sampling_temperature": "rollout.temperature",
  "max_prompt_length": "rollout.max_prompt_length",
  "max_completion_length": "rollout.max_tokens_to_generate",
}
_JSD_BETA = 0.5  # neither model is preferred


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillSettings:
  """What a student learns from a teacher, and how.

  Attributes:
    teacher: folder of the teacher, whose tokenizer must be the student's.
    strategy: logit: the divergence of the two distributions, with cross-entropy;
      policy_gradient: the reverse KL on what the student writes. null: logit.
    on_policy_fraction: share of the steps whose completions the student writes, as
      `rollout` says; the others take those of the data, which are prompts with one
      completion each. 1: training reads the data's prompts alone. null: all rows are
      the data's, as in sft.
    teacher_dtype: of its computation; null: the checkpoint's.
    temperature: of both distributions; null: 2 (policy_gradient: as
      rollout.temperature).
    alpha: share of the divergence in the loss, the rest is cross-entropy; null: 0.5.
    top_k: compare the teacher's so many likeliest words; null: all of them.
    divergence: null: forward_kl.
    jsd_beta: of jsd, the teacher's share of the mixture; null: 0.5.
    cache: folder that keeps the teacher's top_k words of every row, computed once;
      without distill.teacher it is only read.
  """

  teacher: str | None = None
  strategy: Literal["logit", "policy_gradient"] | None = None
  on_policy_fraction: float | None = None
  teacher_dtype: Dtype | None = None
  temperature: float | None = None
  alpha: float | None = None
  top_k: int | None = None
  divergence: Literal["forward_kl", "reverse_kl", "jsd"] | None = None
  jsd_beta: float | None = None
  cache: str | None = None

  def __post_init__(self):
    checks.fields(
      self,
      top_k=checks.COUNT,
      on_policy_fraction=checks.SHARE,
      alpha=checks.SHARE,
      jsd_beta=checks.SHARE,
      temperature=checks.POSITIVE,
    )
    on_policy = self.on_policy_fraction is not None
    if self.strategy == "policy_gradient":
      if self.on_policy_fraction != 1:
        fraction = self.on_policy_fraction if on_policy else "not set"
        raise ValueError(
          "strategy is 'policy_gradient' and distill.on_policy_fraction "
          f"{fraction}: it is right for what the student writes alone; set that to 1"
        )
      for name in ("alpha", "top_k", "divergence", "jsd_beta"):
        if getattr(self, name) is not None:
          raise ValueError(
            f"{name} is {getattr(self, name)!r} and distill.strategy "
            "'policy_gradient', which does not read it: leave one of them out"
          )
    if on_policy and self.cache is not None:
      raise ValueError(
        f"cache is {self.cache!r} and distill.on_policy_fraction "
        f"{self.on_policy_fraction}: what the student writes is new every time; leave "
        "one of them out"
      )
    if self.teacher_dtype is not None and self.teacher is None:
      raise ValueError(
        f"teacher_dtype is {self.teacher_dtype!r} and distill.teacher is not set: name "
        "the teacher's folder"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudentRollout(RolloutConfig):
  """How the student writes.

  Attributes:
    seed: of the completions; null: as seed.
  """

  hidden: ClassVar[tuple[str, ...]] = (
    *("min_p", "eos_tokens", "stop_strings", "kv_cache_size", "gather_weights"),
    "engine_options",
  )

  max_tokens_to_generate: int = 256
  max_prompt_length: int = 256
  seed: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillRun(StreamRun):
  """Distillation.

  Attributes:
    distill: the teacher, and what is compared (docs/guides/distillation.md).
    rollout: how completions are sampled; in distill those that the student writes.
  """

  job: Literal["distill"] = "distill"
  data: RowSettings = dataclasses.field(default=RowSettings())
  distill: DistillSettings = DistillSettings()
  rollout: StudentRollout = StudentRollout()

  @property
  def is_on_policy(self) -> bool:
    """Whether the student writes completions that the teacher judges."""
    return self.distill.on_policy_fraction is not None

  def kind(self, *, training: bool) -> Kind:
    """Examples, or prompts that the student completes."""
    if not self.is_on_policy:
      return SFT
    # Evaluation compares on the same completions every time: those of the data.
    alone = training and self.distill.on_policy_fraction == 1
    return PROMPTS if alone else ANSWERED

  def row_keys(self, kind: Kind) -> dict[str, str]:
    """Rows of one length, or as long as the student's."""
    if kind is SFT:
      return {"max_length": "data.max_length"}
    return {
      "max_prompt_length": "rollout.max_prompt_length",
      "max_completion_length": "rollout.max_tokens_to_generate",
    }


def strategy(config: DistillRun) -> LogitStrategy | PolicyGradientStrategy:
  """What is compared.

  Raises:
    ValueError: an option out of its range.
  """
  values = {theirs: getattr(config.distill, ours) for ours, theirs in _STRATEGY.items()}
  options = {name: value for name, value in values.items() if value is not None}
  if config.distill.divergence == "jsd":
    options.setdefault("beta", _JSD_BETA)
  with keys.under("distill", DistillSettings):
    if config.distill.strategy == "policy_gradient":
      temperature = options.get("temperature", config.rollout.temperature)
      return PolicyGradientStrategy(temperature=temperature)
    return LogitStrategy(**options)


def check(config: DistillRun) -> None:
  """Refuses settings that cannot train, before anything is loaded.

  Raises:
    ValueError: see `strategy`; a policy gradient of what was sampled otherwise; or
      there is neither teacher nor cache.
  """
  strategy(config)
  wanted = config.distill
  if wanted.strategy == "policy_gradient":
    _check_sampling(config)
  if config.is_on_policy:
    _on_policy_options(config)
    owner, defaults, remedy = config.data, RowSettings(), "rollout.max_prompt_length"
    names, prefix = ("max_length", "packing"), "data"
  else:
    owner, defaults, remedy = config.rollout, StudentRollout(), "data.max_length"
    names, prefix = list(keys.of(StudentRollout)), "rollout"
  for name in names:
    if getattr(owner, name) != getattr(defaults, name):
      raise ValueError(
        f"{prefix}.{name} is {getattr(owner, name)!r} and distill.on_policy_fraction "
        f"{wanted.on_policy_fraction if config.is_on_policy else 'is not set'}: rows "
        f"are as {remedy} says, leave it out"
      )
  if wanted.teacher is None and wanted.cache is None:
    raise ValueError(
      "distill.teacher is not set: give --distill.teacher=FOLDER (or --distill.cache "
      "with what a teacher has said)"
    )


def _check_sampling(config: DistillRun) -> None:
  """Refuses a policy gradient on tokens that are no samples of what it compares."""
  sampling, wanted = config.rollout, config.distill
  for name in ("top_p", "top_k"):
    if (value := getattr(sampling, name)) is not None:
      raise ValueError(
        f"rollout.{name} is {value} and distill.strategy 'policy_gradient', which is "
        "right for the student's whole distribution alone: leave it out"
      )
  if wanted.temperature not in (None, sampling.temperature):
    raise ValueError(
      f"distill.temperature is {wanted.temperature}, rollout.temperature "
      f"{sampling.temperature} and distill.strategy 'policy_gradient', which is right "
      "at the temperature of the sampling alone: leave distill.temperature out"
    )


def _on_policy_options(config: DistillRun, **options: Any) -> OnPolicyConfig:
  how = config.rollout
  with build_data.naming(_ON_POLICY):
    return OnPolicyConfig(
      max_prompt_length=how.max_prompt_length,
      max_completion_length=how.max_tokens_to_generate,
      on_policy_fraction=config.distill.on_policy_fraction or 0.0,
      sampling_temperature=how.temperature,
      top_p=how.top_p,
      top_k=how.top_k,
      seed=config.seed if how.seed is None else how.seed,
      **options,
    )


def as_prompts(batch: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
  """A batch of `rows.SideBySide` as the on-policy trainer takes it: token ids of
  prompts, and of completions if there are any, without rows of padding."""
  real = np.flatnonzero(batch["weights"])

  def ids(name: str) -> list[np.ndarray]:
    tokens, mask = batch[f"{name}_ids"], batch[f"{name}_mask"] != 0
    return [tokens[row][mask[row]] for row in real]

  names = {"prompts": "prompt", "completions": "completion"}
  return {ours: ids(name) for ours, name in names.items() if f"{name}_ids" in batch}


def build_taught_data(
  config: DistillRun, tokenizer: TokenizerAdapter, known: Any = None
) -> RunData:
  """The data, with the teacher among the fingerprints.

  Raises:
    FileNotFoundError, ValueError: see `build_data.build_data`, or the teacher has
      another tokenizer.
  """
  if (teacher := config.distill.teacher) is not None:
    vocabulary.check_tokenizers(tokenizer, TokenizerAdapter.from_pretrained(teacher))
  data = build_data.build_data(config, tokenizer, known)
  data.fingerprints.update(fingerprints.of_models({"teacher": teacher}))
  if not config.is_on_policy:
    return data
  train, held_out = (
    None if part is None else part.map(as_prompts)  # pyright: ignore
    for part in (data.train, data.eval)
  )
  return dataclasses.replace(data, train=train, eval=held_out)


def build_trainer(run: Loaded) -> DistillationTrainer:
  """The trainer of a run, put back where its checkpoints stand; the tokenizers were
  compared with the data.

  Raises:
    FileNotFoundError, ValueError: the teacher is missing, does not fit the student, or
      is another than the cache's.
  """
  config: DistillRun = run.config
  wanted, how = config.distill, strategy(config)
  teacher: Any = None
  if wanted.teacher is not None:
    teacher = build.load(
      wanted.teacher, run.mesh, of_shapes=run.of_shapes, dtype=wanted.teacher_dtype
    )
  if wanted.cache is not None:
    if run.of_shapes:
      raise ValueError(
        f"distill.cache is {wanted.cache!r}: what a cache holds is not planned; leave "
        "it out, and the plan has the teacher's program that fills it"
      )
    assert isinstance(how, LogitStrategy)  # DistillSettings has looked
    teacher = TeacherCache(
      wanted.cache,
      teacher,
      top_k=wanted.top_k,
      temperature=how.how.temperature,
      data_sharding_axis=mesh_axes.data_axes(config.mesh),
    )
  options, logger = run.training_options(), run.logger()
  if config.is_on_policy:
    made = _on_policy_options(config, **options)
    if run.of_shapes:  # the dearer kind of step
      made = dataclasses.replace(made, on_policy_fraction=1.0)
    return OnPolicyDistillationTrainer(
      run.model, teacher, how, run.optimizer, made, logger, tokenizer=run.tokenizer
    )
  return DistillationTrainer(
    run.model, teacher, how, run.optimizer, TrainingConfig(**options), logger
  )


def _batch(config: DistillRun) -> str:
  wanted = config.distill
  if config.is_on_policy:
    prompts, tokens = config.training.global_batch_size, config.rollout
    return (
      f"{prompts} prompts a step; in {wanted.on_policy_fraction:.0%} of "
      f"the steps the student writes, with at most {tokens.max_tokens_to_generate} "
      f"tokens; taught by {wanted.teacher}"
    )
  source = wanted.teacher if wanted.teacher is not None else wanted.cache
  return f"{sft.rows(config)}, taught by {source}"


_ROLLOUT = length_of("rollout", "max_prompt_length", "max_tokens_to_generate")


def _length(config: DistillRun) -> tuple[str, int]:
  return _ROLLOUT(config) if config.is_on_policy else sft.row_length(config)


def _example(config: DistillRun) -> Any:
  """A global batch of full rows, or of prompts that the student completes."""
  if not config.is_on_policy:
    return sft.example(config)
  return _prompts(config, config.rollout.max_prompt_length)


def _shorter(config: DistillRun) -> list[Any]:
  if not config.is_on_policy:
    return []
  lengths = batching.least_of_buckets(config.rollout.max_prompt_length)
  return [_prompts(config, length) for length in lengths[:-1]]


def _prompts(config: DistillRun, length: int) -> Prompts:
  """Left-padded, as the data gives them."""
  width = config.rollout.max_prompt_length
  ids = np.zeros((config.training.global_batch_size, width), np.int32)
  mask = np.broadcast_to(np.arange(width) >= width - length, ids.shape)
  return Prompts(prompt_ids=ids, prompt_mask=mask.astype(ids.dtype))


DISTILL = Job(
  summary="distillation from a teacher",
  records=(SFT,),
  first_values={"data.max_length": 1024, "distill.teacher": "my-teacher"},
  settings=DistillRun,
  check=check,
  data=build_taught_data,
  build=build_trainer,
  results={"loss": "loss"},
  batch=_batch,
  length=_length,
  rollout=lambda config: config.rollout if config.is_on_policy else None,
  example=_example,
  shorter=_shorter,
)
