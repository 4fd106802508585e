"""From a configuration to the trainer of the job distill."""

from __future__ import annotations

import pathlib
from typing import Any

import optax
from jax.sharding import Mesh

from tunix.cli import build, build_data, fingerprints
from tunix.cli.build_data import RunData
from tunix.cli.schema import Config, data_axes
from tunix.distillation import vocabulary
from tunix.distillation.distillation_trainer import DistillationTrainer, TrainingConfig
from tunix.distillation.strategies.logit import LogitStrategy
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


def strategy(config: Config) -> LogitStrategy:
  """What is compared.

  Raises:
    ValueError: an option out of its range.
  """
  given = {theirs: getattr(config.distill, ours) for ours, theirs in _STRATEGY.items()}
  given = {name: value for name, value in given.items() if value is not None}
  try:
    return LogitStrategy(**given)
  except (TypeError, ValueError) as error:
    raise ValueError(f"distill: {error}") from error


def check(config: Config) -> None:
  """Refuses settings that cannot train, before anything is loaded.

  Raises:
    ValueError: see `strategy`, or there is neither teacher nor cache.
  """
  strategy(config)
  keys = config.distill
  if keys.teacher is None and keys.cache is None:
    raise ValueError(
      "distill.teacher is not set: give --distill.teacher=FOLDER (or --distill.cache "
      "with what a teacher has said)"
    )


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
  return data


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
  del tokenizer
  keys, how = config.distill, strategy(config)
  teacher: Any = None
  if keys.teacher is not None:
    teacher = automodel.AutoModel.from_pretrained(
      keys.teacher, mesh, dtype=keys.teacher_dtype
    )
  if keys.cache is not None:
    teacher = TeacherCache(
      keys.cache,
      teacher,
      top_k=keys.top_k,
      temperature=how.how.temperature,
      data_sharding_axis=data_axes(config.mesh),
    )
  options = build.training_options(config, output_dir, learning_rate)
  return DistillationTrainer(
    model,
    teacher,
    how,
    tx,
    TrainingConfig(**options),
    build.build_logger(config, output_dir),
  )
