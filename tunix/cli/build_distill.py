"""From a configuration to the trainer of the job distill."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from tunix.cli import build, build_data, fingerprints
from tunix.cli.build_data import RunData
from tunix.cli.schema import Config, DataKeys
from tunix.cli.schema_mesh import data_axes
from tunix.cli.schema_rl import RolloutKeys
from tunix.distillation import vocabulary
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.on_policy_trainer import (
  OnPolicyConfig,
  OnPolicyDistillationTrainer,
)
from tunix.distillation.strategies.logit import LogitStrategy
from tunix.distillation.strategies.policy_gradient import PolicyGradientStrategy
from tunix.distillation.teacher_cache import TeacherCache
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel
from tunix.models.transformer.model import Transformer
from tunix.sft.config import Schedule

# Keys of the section -> arguments of the strategy.
_STRATEGY = {
  "temperature": "temperature",
  "alpha": "alpha",
  "top_k": "distill_top_k",
  "divergence": "divergence",
  "jsd_beta": "beta",
}
_JSD_BETA = 0.5  # neither model is preferred


def strategy(config: Config) -> LogitStrategy | PolicyGradientStrategy:
  """What is compared.

  Raises:
    ValueError: an option out of its range.
  """
  given = {theirs: getattr(config.distill, ours) for ours, theirs in _STRATEGY.items()}
  given = {name: value for name, value in given.items() if value is not None}
  if config.distill.divergence == "jsd":
    given.setdefault("beta", _JSD_BETA)
  try:
    if config.distill.strategy == "policy_gradient":
      temperature = given.get("temperature", config.rollout.temperature)
      return PolicyGradientStrategy(temperature=temperature)
    return LogitStrategy(**given)
  except (TypeError, ValueError) as error:
    raise ValueError(f"distill: {error}") from error


def check(config: Config) -> None:
  """Refuses settings that cannot train, before anything is loaded.

  Raises:
    ValueError: see `strategy`; a policy gradient of what was sampled otherwise; or
      there is neither teacher nor cache.
  """
  strategy(config)
  keys = config.distill
  if keys.strategy == "policy_gradient":
    _check_sampling(config)
  if config.is_on_policy:
    _on_policy_options(config)
    owner, defaults, remedy = config.data, DataKeys(), "rollout.max_prompt_length"
    names, prefix = ("max_length", "packing"), "data"
  else:
    owner, defaults, remedy = config.rollout, RolloutKeys(), "data.max_length"
    names, prefix = [f.name for f in dataclasses.fields(RolloutKeys)], "rollout"
  for name in names:
    if getattr(owner, name) != getattr(defaults, name):
      raise ValueError(
        f"{prefix}.{name} is {getattr(owner, name)!r} and distill.on_policy_fraction "
        f"{keys.on_policy_fraction}: rows are as {remedy} says, leave it out"
      )
  if keys.teacher is None and keys.cache is None:
    raise ValueError(
      "distill.teacher is not set: give --distill.teacher=FOLDER (or --distill.cache "
      "with what a teacher has said)"
    )


def _check_sampling(config: Config) -> None:
  """Refuses a policy gradient on tokens that are no samples of what it compares."""
  own, keys = config.rollout, config.distill
  for name in ("top_p", "top_k"):
    if (value := getattr(own, name)) is not None:
      raise ValueError(
        f"rollout.{name} is {value} and distill.strategy 'policy_gradient', which is "
        "right for the student's whole distribution alone: leave it out"
      )
  if keys.temperature not in (None, own.temperature):
    raise ValueError(
      f"distill.temperature is {keys.temperature}, rollout.temperature "
      f"{own.temperature} and distill.strategy 'policy_gradient', which is right at "
      "the temperature of the sampling alone: leave distill.temperature out"
    )


def _on_policy_options(config: Config, **options: Any) -> OnPolicyConfig:
  keys = config.rollout
  try:
    return OnPolicyConfig(
      max_prompt_length=keys.max_prompt_length,
      max_completion_length=keys.max_tokens_to_generate,
      on_policy_fraction=config.distill.on_policy_fraction or 0.0,
      sampling_temperature=keys.temperature,
      top_p=keys.top_p,
      top_k=keys.top_k,
      seed=config.seed if keys.seed is None else keys.seed,
      **options,
    )
  except ValueError as error:
    raise ValueError(f"distill: {error}") from error


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
  config: Config, tokenizer: TokenizerAdapter, known: Any = None
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


def build_trainer(
  config: Config,
  model: Transformer,
  tokenizer: TokenizerAdapter,
  tx: optax.GradientTransformation,
  *,
  mesh: Mesh | None,
  output_dir: pathlib.Path,
  learning_rate: float | Schedule,
) -> DistillationTrainer:
  """The trainer of a settled configuration, put back where its checkpoints stand.

  Args: see `build_rl.build_learner`; the tokenizers were compared with the data.

  Raises:
    FileNotFoundError, ValueError: the teacher is missing, does not fit the student, or
      is another than the cache's.
  """
  keys, how = config.distill, strategy(config)
  teacher: Any = None
  if keys.teacher is not None:
    teacher = automodel.AutoModel.from_pretrained(
      keys.teacher, mesh, dtype=keys.teacher_dtype
    )
  if keys.cache is not None:
    assert isinstance(how, LogitStrategy)  # DistillKeys has looked
    teacher = TeacherCache(
      keys.cache,
      teacher,
      top_k=keys.top_k,
      temperature=how.how.temperature,
      data_sharding_axis=data_axes(config.mesh),
    )
  options = build.training_options(config, output_dir, learning_rate)
  logger = build.build_logger(config, output_dir)
  if config.is_on_policy:
    made = _on_policy_options(config, **options)
    return OnPolicyDistillationTrainer(
      model, teacher, how, tx, made, logger, tokenizer=tokenizer
    )
  return DistillationTrainer(
    model,
    teacher,
    how,
    tx,
    TrainingConfig(**options),
    logger,
  )
