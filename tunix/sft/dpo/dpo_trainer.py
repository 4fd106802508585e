"""DPO and ORPO: PreferenceTrainer under the names and settings that users know."""

from __future__ import annotations

from typing import Any

from flax import nnx

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.sft.dpo.pairs import DataInput, Limits, TrainingInput
from tunix.sft.dpo.precomputed import PrecomputedLogps
from tunix.sft.dpo.preference_config import DPOTrainingConfig, ORPOTrainingConfig
from tunix.sft.dpo.preference_trainer import PreferenceTrainer
from tunix.sft.dpo.reader import Reader
from tunix.sft.metrics_logger import MetricsLogger

__all__ = [
  "DPOTrainer",
  "DPOTrainingConfig",
  "DataInput",
  "DpoTrainer",
  "DpoTrainingConfig",
  "ORPOTrainer",
  "ORPOTrainingConfig",
  "OrpoTrainer",
  "OrpoTrainingConfig",
  "PrecomputedLogps",
  "TrainingInput",
  "process_dpo_record",
]


class DPOTrainer(PreferenceTrainer):
  """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), or what
  its config says instead: see PreferenceTrainer for the arguments."""

  config_type = DPOTrainingConfig


class ORPOTrainer(DPOTrainer):
  """Odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691): the
  likelihood of the chosen answer and the odds of it against the rejected one, without
  a reference; log-probabilities are averaged over an answer's tokens.

  Args, Raises: see PreferenceTrainer.

  Raises:
    ValueError: the config's algorithm is not "orpo".
  """

  def __init__(
    self,
    model: nnx.Module,
    ref_model: nnx.Module | None = None,
    optimizer: Any = None,
    training_config: DPOTrainingConfig | None = None,
    tokenizer: Any = None,
    *,
    metrics_logger: MetricsLogger | None = None,
  ):
    config = ORPOTrainingConfig() if training_config is None else training_config
    config = self.checked_config(config)
    if config.algorithm != "orpo":
      raise ValueError(
        f"ORPOTrainer with algorithm {config.algorithm!r}: use ORPOTrainingConfig, or "
        "DPOTrainer for the other losses"
      )
    super().__init__(
      model, ref_model, optimizer, config, tokenizer, metrics_logger=metrics_logger
    )


DpoTrainer, DpoTrainingConfig = DPOTrainer, DPOTrainingConfig
OrpoTrainer, OrpoTrainingConfig = ORPOTrainer, ORPOTrainingConfig


def process_dpo_record(
  record: Any, tokenizer: Any, max_prompt_length: int, max_response_length: int
) -> TrainingInput:
  """Token rows of a pair, or of a batch of pairs: for a map over a dataset.

  Args:
    record: DataInput, or a dict with prompts (or prompt), chosen_responses (chosen),
      rejected_responses (rejected) and maybe margins (margin); each of one pair, or
      lists of B.
    tokenizer: a TokenizerAdapter, or what one can be made of.
    max_prompt_length, max_response_length: tokens; see AnswersConfig.

  Returns:
    NumPy arrays [B, tokens]; of one pair without the first axis.

  Raises:
    ValueError: an answer is empty, both are equal, or a field is missing.
  """
  if not isinstance(tokenizer, TokenizerAdapter):
    tokenizer = TokenizerAdapter(tokenizer)
  reader = Reader(tokenizer, Limits(max_prompt_length, max_response_length))
  return reader.pair_or_pairs(record)
