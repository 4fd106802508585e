"""From a configuration to the trainers of preferences: dpo, orpo, kto, reward."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from tunix.cli import build, build_data, fingerprints
from tunix.cli.build_data import RunData
from tunix.cli.schema import Config
from tunix.cli.schema_preference import PREFERENCE_JOBS
from tunix.data.scan import Report
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.transformer.model import Transformer
from tunix.sft.config import Schedule
from tunix.sft.dpo.dpo_trainer import DPOTrainer, ORPOTrainer
from tunix.sft.dpo.kto_trainer import KTOTrainer
from tunix.sft.dpo.precomputed import PrecomputedLogps
from tunix.sft.dpo.preference_config import (
  DPOTrainingConfig,
  KTOConfig,
  ORPOTrainingConfig,
  RewardConfig,
)
from tunix.sft.dpo.reward_trainer import RewardTrainer

Trainer = DPOTrainer | KTOTrainer | RewardTrainer

# (trainer, configuration)
TRAINERS: dict[str, tuple[Any, Any]] = {
  "dpo": (DPOTrainer, DPOTrainingConfig),
  "orpo": (ORPOTrainer, ORPOTrainingConfig),
  "kto": (KTOTrainer, KTOConfig),
  "reward": (RewardTrainer, RewardConfig),
}
# Keys that say where the reference is, and are no setting of the trainer.
_PLACES = ("reference", "reference_logps")

# n_D desirable_weight / (n_U undesirable_weight), arXiv:2402.01306, section 4.2.
_BALANCE = (1.0, 4 / 3)


def settings(config: Config, **options: Any) -> Any:
  """The trainer's settings, `options` among them.

  Raises:
    ValueError: an unknown loss or option, or one out of its range.
  """
  names = tuple(n for n in PREFERENCE_JOBS[config.job] if n not in _PLACES)
  made_of = TRAINERS[config.job][1]
  try:
    return made_of(**options, **config.preference.given(names))
  except (TypeError, ValueError) as error:
    raise ValueError(f"preference: {error}") from error


def check(config: Config) -> None:
  """Refuses settings that the trainer would refuse, before anything is loaded.

  Raises:
    ValueError: see `settings`; a reference that nothing would be compared with; or
      several processes and log-probabilities that are still to be written.
  """
  made = settings(config)
  if config.job == "dpo" and not made.spec.needs_reference:
    for name in _PLACES:
      if (value := getattr(config.preference, name)) is not None:
        raise ValueError(
          f"preference.{name} is {value!r} and the loss {made.loss!r} has no "
          "reference: leave it out"
        )
  where = config.preference.reference_logps
  if where is not None and jax.process_count() > 1 and _written(where) is None:
    raise ValueError(
      f"preference.reference_logps is {where!r}, where nothing is written yet, and "
      f"there are {jax.process_count()} processes, each of which would write what it "
      "sees alone: write it with a run in one process (one step is enough; another "
      "output_dir), then start these"
    )


def build_compared_data(
  config: Config, tokenizer: TokenizerAdapter, known: Any = None
) -> RunData:
  """The data, with the reference among the fingerprints.

  Raises:
    FileNotFoundError, ValueError: see `build_data.build_data`, or there is no such
      reference.
  """
  data = build_data.build_data(config, tokenizer, known)
  data.fingerprints.update(
    fingerprints.of_models({"reference": config.preference.reference})
  )
  return data


def build_labelled_data(
  config: Config, tokenizer: TokenizerAdapter, known: Any = None
) -> RunData:
  """The data of the job kto.

  Raises:
    FileNotFoundError, ValueError: see `build_data.build_data`; or all responses have
      one label, from which KTO learns nothing but to raise or to lower all of them.
  """
  data = build_compared_data(config, tokenizer, known)
  report: Report = data.reports["train"]
  if not report.desirable or not report.undesirable:
    label = "true" if report.desirable else "false"
    raise ValueError(
      f"{config.data.train}: all {report.kept} responses have the label {label}, and "
      "KTO compares both kinds: add the other, or use the job sft for good ones alone"
    )
  return data


def balance_note(config: Config, report: Report) -> str | None:
  """What to do about labels of which one kind outweighs the other; None: nothing."""
  made = settings(config)
  assert report.desirable
  share = report.desirable / report.undesirable
  ratio = made.desirable_weight * share / made.undesirable_weight
  low, high = _BALANCE
  if low <= ratio <= high:
    return None
  name = "undesirable_weight" if share > 1 else "desirable_weight"
  value = share if share > 1 else 1 / share
  return (
    f"note: desirable responses weigh {ratio:.2f} times what undesirable ones do, and "
    f"KTO's paper keeps to 1 to 1.33: preference.{name}={value:.3g} (and the other "
    "weight 1) makes it 1"
  )


def build_trainer(
  config: Config,
  model: Transformer,
  tokenizer: TokenizerAdapter,
  tx: optax.GradientTransformation,
  *,
  mesh: Mesh | None,
  output_dir: pathlib.Path,
  learning_rate: float | Schedule,
) -> Trainer:
  """The trainer of a settled configuration, put back where its checkpoints stand.

  Args: see `build_rl.build_learner`; batches are token ids, so that the tokenizer is
  needed for the reference's log-probabilities alone.

  Raises:
    FileNotFoundError, ValueError: the reference is missing, or another one.
  """
  options = build.training_options(config, output_dir, learning_rate)
  made = settings(config, **options)
  trainer = TRAINERS[config.job][0]
  logger = build.build_logger(config, output_dir)
  if config.job == "reward":
    return trainer(model, tx, made, metrics_logger=logger)
  more: dict[str, Any] = {}
  reference = None
  if config.preference.reference_logps is not None:
    more["reference_logps"], reference = _logps(config, model, tokenizer, mesh, made)
  elif config.job == "kto" or made.spec.needs_reference:
    reference = build.build_reference(config, config.preference.reference, mesh)
  return trainer(model, reference, tx, made, metrics_logger=logger, **more)


def _logps(
  config: Config,
  model: Transformer,
  tokenizer: TokenizerAdapter,
  mesh: Mesh | None,
  made: DPOTrainingConfig,
) -> tuple[PrecomputedLogps, Transformer | None]:
  """The reference's log-probabilities, and the reference if it is not the model."""
  keys = config.preference
  assert keys.reference_logps is not None
  reference = None
  if keys.reference is not None:
    reference = build.build_reference(config, keys.reference, mesh)
  if (written := _written(keys.reference_logps)) is not None:
    return written, reference
  records = build_data.open_records(config)
  every = itertools.chain.from_iterable(
    build_data.batches(config, tokenizer, part, training=False)
    for part in records.values()
  )
  # The model has not learnt anything yet: it is put back by the trainer.
  source = model if reference is None else reference
  done = PrecomputedLogps.write(keys.reference_logps, source, every, made)
  return done, reference


def _written(folder: str) -> PrecomputedLogps | None:
  """What an earlier run has written. A writer that was killed leaves a file of another
  name, which is none."""
  try:
    return PrecomputedLogps(folder)
  except FileNotFoundError:
    return None
