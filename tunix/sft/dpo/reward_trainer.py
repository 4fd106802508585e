"""RewardTrainer: a model that scores whole completions, learned from pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx

from tunix.data import batches
from tunix.data.batches import PAIR
from tunix.generate import scoring
from tunix.ops.reductions import WeightedSum
from tunix.ops.reward_loss import bradley_terry
from tunix.perf.trace import NoopTracer
from tunix.sft.dpo import completions
from tunix.sft.dpo.completions import BatchReader, Read, completion_rows, weigh
from tunix.sft.dpo.pairs import DataInput, TrainingInput
from tunix.sft.dpo.preference_config import RewardConfig
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer

__all__ = ["DataInput", "RewardConfig", "RewardTrainer", "TrainingInput"]


class RewardTrainer(PeftTrainer):
  """Trains a reward model by the Bradley-Terry likelihood of pairs
  (tunix.ops.reward_loss).

  Batches are those of PreferenceTrainer; their `margins` say how far apart two rewards
  should at least be. The trained model is what `RLCluster(reward=model)` and
  `scoring.score_sequences` take: the score at a completion's last token, its EOS.

  Metrics: rewards/chosen, rewards/rejected, rewards/margin, rewards/accuracy.

  Args:
    model: a model with one score a position: `heads.with_scores(language_model)`,
      `AutoModel.from_pretrained(folder, num_scores=1)`, or a user's that gives
      [B, T, 1]. With adapters only these are trained, and the head stays as it is.
    optimizer, tokenizer, metrics_logger, perf_tracer: see PeftTrainer and
      PreferenceTrainer.
    training_config: a RewardConfig.

  Raises:
    TypeError: the config is no RewardConfig.
    ValueError: the model is a language model, or has several scores.
  """

  training_config: RewardConfig

  def __init__(
    self,
    model: nnx.Module,
    optimizer: Any = None,
    training_config: RewardConfig | None = None,
    tokenizer: Any = None,
    *,
    metrics_logger: MetricsLogger | None = None,
    perf_tracer: NoopTracer | None = None,
  ):
    scores = getattr(getattr(model, "config", None), "num_scores", 1)
    if scores != 1:
      raise ValueError(
        f"the model has {scores or 'no'} scores a position, a reward model has 1: "
        "heads.with_scores(model), or AutoModel.from_pretrained(folder, num_scores=1)"
      )
    config = completions.checked_config(training_config, RewardConfig, RewardConfig)
    self._reward_loss: Callable[..., Any] = functools.partial(
      bradley_terry, centering=config.centering
    )
    options = completions.options_of(config, tokenizer)
    self._reader = BatchReader(batches.read_pairs, options)
    super().__init__(model, optimizer, config, metrics_logger, perf_tracer)

  def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """Replaces the loss: `loss_fn(chosen, rejected, *, margin)`.

    Args:
      loss_fn: takes rewards of B pairs, [B] each, and their margins or None; gives a
        value for each, [B].
      has_aux: it gives a pair of that and a dict of metrics, [B] each.
    """
    super().with_loss_fn(loss_fn, has_aux)
    self._reward_loss = completions.as_pair_loss(loss_fn, has_aux)
    return self

  def _read(self, batch: Any) -> Read:
    return self._reader.read(batch, self._loss.input_fn)

  def _prepare_inputs(self, batch: Any) -> Any:
    pairs = self._read(batch).rows
    extra = {n: pairs[n] for n in ("weights", "margins") if n in pairs}
    return {"rows": completions.token_columns(pairs), **extra}

  def _train_step(
    self, model: nnx.Module, batch: Any
  ) -> tuple[WeightedSum, dict[str, Any]]:
    rewards = scoring.score_sequences(model, *completion_rows(batch["rows"], PAIR))
    # Padding rows may score anything; they get no weight.
    pairs = rewards.reshape(-1, len(PAIR)).T
    loss = self._reward_loss(*pairs, margin=batch.get("margins"))
    return weigh(loss, jnp.asarray(batch["weights"]))
