"""RewardTrainer: a model that scores whole answers, learned from pairs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from tunix.generate import scoring
from tunix.ops.reductions import WeightedSum
from tunix.ops.reward_loss import bradley_terry
from tunix.sft.dpo.answer_trainer import AnswerTrainer, answer_rows, weigh
from tunix.sft.dpo.pairs import PAIR, DataInput, TrainingInput
from tunix.sft.dpo.preference_config import RewardConfig
from tunix.sft.dpo.reader import token_columns
from tunix.sft.metrics_logger import MetricsLogger

__all__ = ["DataInput", "RewardConfig", "RewardTrainer", "TrainingInput"]


class RewardTrainer(AnswerTrainer):
  """Trains a reward model by the Bradley-Terry likelihood of pairs
  (tunix.ops.reward_loss).

  Batches are those of PreferenceTrainer; their `margins` say how far apart two rewards
  should at least be. The trained model is what `RLCluster(reward=model)` and
  `scoring.score_sequences` take: the score at an answer's last token, its EOS.

  Metrics: rewards/chosen, rewards/rejected, rewards/margin, rewards/accuracy.

  Args:
    model: a model with one score a position: `heads.with_scores(language_model)`,
      `AutoModel.from_pretrained(folder, num_scores=1)`, or a user's that gives
      [B, T, 1]. With adapters only these are trained, and the head stays as it is.
    optimizer, tokenizer, metrics_logger: see PeftTrainer and PreferenceTrainer.
    training_config: a RewardConfig.

  Raises:
    TypeError: the config is no RewardConfig.
    ValueError: the model is a language model, or has several scores.
  """

  config_type = RewardConfig
  training_config: RewardConfig

  def __init__(
    self,
    model: nnx.Module,
    optimizer: Any = None,
    training_config: RewardConfig | None = None,
    tokenizer: Any = None,
    *,
    metrics_logger: MetricsLogger | None = None,
  ):
    scores = getattr(getattr(model, "config", None), "num_scores", 1)
    if scores != 1:
      raise ValueError(
        f"the model has {scores or 'no'} scores a position, a reward model has 1: "
        "heads.with_scores(model), or AutoModel.from_pretrained(folder, num_scores=1)"
      )
    super().__init__(model, optimizer, training_config, tokenizer, metrics_logger)

  def _read(self, batch: Any) -> TrainingInput:
    return self._reader.pairs(batch)

  def _prepare_inputs(self, batch: Any) -> Any:
    pairs = self._reader.pairs(batch)
    out = {"rows": token_columns(pairs), "weights": pairs.weights}
    return out if pairs.margins is None else {**out, "margins": pairs.margins}

  def _train_step(
    self, model: nnx.Module, batch: Any
  ) -> tuple[WeightedSum, dict[str, Any]]:
    rewards = scoring.score_sequences(model, *answer_rows(batch["rows"], PAIR))
    # Padding rows may score anything; they get no weight.
    loss = bradley_terry(
      *rewards.reshape(-1, len(PAIR)).T,
      margin=batch.get("margins"),
      centering=self.training_config.centering,
    )
    return weigh(loss, jnp.asarray(batch["weights"]))
