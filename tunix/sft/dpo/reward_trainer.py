"""RewardTrainer: trains a model that scores whole completions on pairs of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx

from tunix.data import batches
from tunix.data.batches import PAIR, Rows
from tunix.generate import scoring
from tunix.models import calling
from tunix.ops.reductions import WeightedSum
from tunix.ops.reward_loss import bradley_terry
from tunix.perf.trace import NoopTracer
from tunix.sft.dpo import completions
from tunix.sft.dpo.completions import completion_rows, weigh
from tunix.sft.dpo.pairs import DataInput, TrainingInput
from tunix.sft.dpo.preference_config import CompletionsConfig
from tunix.sft.loop.trainer_arguments import Optimizer
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer
from tunix.sft.steps.shared_steps import Call
from tunix.sft.steps.train_step import BatchLoss
from tunix.utils import checks

__all__ = ["DataInput", "RewardConfig", "RewardTrainer", "TrainingInput"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(CompletionsConfig):
  """Settings of RewardTrainer.

  Attributes:
    centering: weight of a term that pulls the sum of a pair's two rewards to 0.
  """

  centering: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, centering=checks.NOT_NEGATIVE)


class RewardTrainer(PeftTrainer):
  """Trains a reward model by the Bradley-Terry likelihood of pairs.

  The loss is `tunix.ops.reward_loss.bradley_terry`. Batches are those of DPOTrainer;
  their `margins` are the least differences between the rewards of each pair. The
  trained model is the one that `RLCluster(reward=model)` and `scoring.score_sequences`
  take: a completion's reward is the score at its last token, which is EOS.

  Metrics: rewards/chosen, rewards/rejected, rewards/margin, rewards/accuracy.

  Args:
    model: a model with one score a position: `heads.with_scores(language_model)`,
      `AutoModel.from_pretrained(folder, num_scores=1)`, or a user's model that returns
      [B, T, 1]. If it has adapters, only the adapters are trained, not the head.
    optimizer, tokenizer, metrics_logger, perf_tracer: see DPOTrainer.
    training_config: settings; None: a RewardConfig.

  Raises:
    TypeError: The config is no RewardConfig.
    ValueError: The model is a language model, or has several scores.
  """

  training_config: RewardConfig

  def __init__(
    self,
    model: nnx.Module,
    optimizer: Optimizer | None = None,
    training_config: RewardConfig | None = None,
    tokenizer: object = None,
    *,
    metrics_logger: MetricsLogger | None = None,
    perf_tracer: NoopTracer | None = None,
  ):
    scores = calling.config_value(model, "num_scores", 1)
    if scores != 1:
      raise ValueError(
        f"model has {scores or 'no'} scores a position; expected 1. Make it with "
        "heads.with_scores(model) or AutoModel.from_pretrained(folder, num_scores=1)."
      )
    config = completions.checked_config(training_config, RewardConfig)
    self._reward_loss: Callable[..., Any] = Call.of(
      bradley_terry, centering=config.centering
    )
    self._reader = functools.partial(
      batches.read_pairs, options=config.text_options(tokenizer)
    )
    super().__init__(model, optimizer, config, metrics_logger, perf_tracer)

  def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """Replaces the loss: `loss_fn(chosen, rejected, *, margin)`.

    Args:
      loss_fn: takes the rewards of B pairs, [B] each, and their margins or None;
        returns a value for each pair, [B].
      has_aux: True if `loss_fn` returns a pair of the values and a dict of metrics,
        [B] each.
    """
    super().with_loss_fn(loss_fn, has_aux)
    self._reward_loss = completions.as_pair_loss(loss_fn, has_aux)
    return self

  def _prepare_inputs(self, pairs: Rows) -> Any:
    extra = {n: pairs[n] for n in ("weights", "margins") if n in pairs}
    return {"rows": completions.token_columns(pairs), **extra}

  def _train_step(
    self, model: nnx.Module, batch: object
  ) -> tuple[WeightedSum, dict[str, Any]]:
    return _step(model, batch, loss=self._reward_loss)

  def _traced_losses(self) -> tuple[BatchLoss, BatchLoss]:
    return self._losses_of(RewardTrainer, Call.of(_step, loss=self._reward_loss))


def _step(
  model: nnx.Module, batch: Any, *, loss: Callable[..., Any]
) -> tuple[WeightedSum, dict[str, Any]]:
  """Returns the loss of a micro-batch of pairs, and its metrics."""
  rows = batch["rows"]
  rewards = scoring.score_sequences(
    model, *completion_rows(rows, PAIR), **calling.images_of(model, rows)
  )
  # Padding rows have arbitrary scores; their weight is 0.
  pairs = rewards.reshape(-1, len(PAIR)).T
  out = loss(*pairs, margin=batch.get("margins"))
  return weigh(out, jnp.asarray(batch["weights"]))
