"""The jobs dpo, orpo and reward: training on pairs of completions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tunix.cli.jobs.job import Job, Loaded, length_of, micro_batches
from tunix.cli.jobs.preference_settings import (
  HALF,
  DPORun,
  ORPORun,
  PreferenceRun,
  RewardRun,
)
from tunix.cli.make import data as build_data
from tunix.data.records import PAIRS
from tunix.models.transformer.model import Transformer
from tunix.sft.dpo.dpo_trainer import DPOTrainer, ORPOTrainer
from tunix.sft.dpo.precomputed import PrecomputedLogps
from tunix.sft.dpo.preference_config import DPOTrainingConfig
from tunix.sft.dpo.reward_trainer import RewardTrainer


def trainer_config(run: Loaded) -> Any:
  """Returns the config of the run's trainer."""
  return run.config.preference.trainer_config(**run.training_options())


def _build_dpo(run: Loaded) -> DPOTrainer:
  options, places = trainer_config(run), run.config.preference
  reference, logps = None, None
  if places.reference_logps is not None:
    logps, reference = _logps(run, options)
  elif options.spec.needs_reference:
    reference = run.models.reference(places.reference)
  return DPOTrainer(
    run.model,
    reference,
    run.optimizer,
    options,
    metrics_logger=run.logger(),
    reference_logps=logps,
  )


def _build_orpo(run: Loaded) -> ORPOTrainer:
  return ORPOTrainer(
    run.model, None, run.optimizer, trainer_config(run), metrics_logger=run.logger()
  )


def _build_reward(run: Loaded) -> RewardTrainer:
  return RewardTrainer(
    run.model, run.optimizer, trainer_config(run), metrics_logger=run.logger()
  )


def _logps(
  run: Loaded, options: DPOTrainingConfig
) -> tuple[PrecomputedLogps, Transformer | None]:
  """Returns the reference's log-probabilities, and the reference if it is a second
  model."""
  places = run.config.preference
  reference = (
    None if places.reference is None else run.models.reference(places.reference)
  )
  if (written := _written(places.reference_logps)) is not None:
    return written, reference
  batches = itertools.chain.from_iterable(
    build_data.batches(run.config, run.tokenizer, records, training=False, whole=True)
    for records in build_data.open_records(run.config).values()
  )
  # The model is untrained here: the trainer restores its checkpoint later.
  source = run.model if reference is None else reference
  logps = PrecomputedLogps.write(places.reference_logps, source, batches, options)
  return logps, reference


def _written(folder: str) -> PrecomputedLogps | None:
  """Returns the log-probabilities that an earlier run wrote; None if there are none.

  An interrupted run leaves a folder without the mark of completeness, which is as none.
  """
  try:
    return PrecomputedLogps(folder)
  except FileNotFoundError:
    return None


def describe_batch(config: PreferenceRun) -> str:
  """Returns the sizes of a global batch in words."""
  sizes, limits = config.training, config.preference
  return (
    f"{config.job}: {config.records.counted(sizes.global_batch_size)} of at most "
    f"{limits.max_prompt_length} + {limits.max_response_length} tokens"
    f"{micro_batches(config)}"
  )


def _example(config: Any) -> dict[str, np.ndarray]:
  """Returns a global batch of pairs of full length, for `tunix plan`.

  Raises:
    ValueError: The loss compares the pairs of several micro-batches.
  """
  training, limits = config.training, config.preference
  spec = getattr(limits.trainer_config(), "spec", None)
  if spec is not None and spec.coupled and training.micro_batches > 1:
    raise ValueError(
      f"preference.loss is {limits.loss!r}, which compares the pairs of several "
      "micro-batches and cannot be planned yet. Plan it with one micro-batch."
    )
  rows = training.global_batch_size
  batch: dict[str, np.ndarray] = {"weights": np.ones(rows, np.float32)}
  lengths = {"prompt": limits.max_prompt_length}
  lengths |= dict.fromkeys(("chosen", "rejected"), limits.max_response_length)
  # A different token for each column, because equal completions are refused.
  for token, (name, length) in enumerate(lengths.items()):
    batch[f"{name}_ids"] = np.full((rows, length), token, np.int32)
    batch[f"{name}_mask"] = np.ones((rows, length), np.int32)
  return batch


_PAIRS = {"loss": "loss", "accuracy": "rewards/accuracy"}
ROW_LENGTH = length_of("data", "max_length")
FIRST_VALUES = {"data.max_length": 2 * HALF, "data.num_epochs": 1}

# A pair is two sequences.
_PAIR_SEQUENCES = lambda config: 2 * config.training.global_batch_size

DPO = Job(
  summary="DPO and the other losses of pairs (see preference.loss)",
  records=(PAIRS,),
  first_values=FIRST_VALUES,
  settings=DPORun,
  build=_build_dpo,
  results=_PAIRS,
  batch=describe_batch,
  length=ROW_LENGTH,
  example=_example,
  sequences=_PAIR_SEQUENCES,
)
ORPO = Job(
  summary="ORPO, which needs no reference model",
  records=(PAIRS,),
  first_values=FIRST_VALUES,
  settings=ORPORun,
  build=_build_orpo,
  results=_PAIRS,
  batch=describe_batch,
  length=ROW_LENGTH,
  example=_example,
  sequences=_PAIR_SEQUENCES,
)
REWARD = Job(
  summary="a reward model from pairs",
  records=(PAIRS,),
  first_values=FIRST_VALUES,
  settings=RewardRun,
  build=_build_reward,
  results=_PAIRS,
  batch=describe_batch,
  length=ROW_LENGTH,
  example=_example,
  sequences=_PAIR_SEQUENCES,
)
