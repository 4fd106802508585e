"""KTOTrainer: learns from single answers, each marked as good or bad."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.ops import kto
from tunix.ops.reductions import WeightedSum
from tunix.sft import sharding_utils
from tunix.sft.dpo.answer_trainer import AnswerTrainer, answer_logps, weigh
from tunix.sft.dpo.pairs import KTODataInput, KTOTrainingInput
from tunix.sft.dpo.preference_config import KTOConfig
from tunix.sft.dpo.reader import token_columns
from tunix.sft.dpo.reference import ReferenceModel, reference_for
from tunix.sft.metrics_logger import MetricsLogger

__all__ = ["KTOConfig", "KTODataInput", "KTOTrainer", "KTOTrainingInput"]

_ANSWER = ("completion",)

_log = logging.getLogger(__name__)


class KTOTrainer(AnswerTrainer):
  """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306).

  Batches are `KTODataInput`s (text), `KTOTrainingInput`s (token ids) or dicts with the
  fields of one; answers need no partner. How far the policy is from its reference (z0)
  is estimated once for a global batch, however it is cut: each prompt of it with the
  answer of the row before, under both models, without gradient and dropout.

  A global batch in which all answers are good, or all bad, is trained, but learns to
  raise (or lower) everything it sees: the first is warned of, then the tenth, the
  hundredth ... In one of a single row z0 is 0.

  Metrics: rewards/chosen and rewards/rejected (of good and of bad answers; 0 where
  there are none), rewards/margin, log_probs/chosen, log_probs/rejected, kl (z0).

  Args:
    model, ref_model, optimizer, tokenizer, metrics_logger: see PreferenceTrainer.
    training_config: a KTOConfig.

  Raises:
    TypeError: the config is no KTOConfig.
    ValueError: no reference: see PreferenceTrainer.
  """

  config_type = KTOConfig
  training_config: KTOConfig

  def __init__(
    self,
    model: nnx.Module,
    ref_model: nnx.Module | None = None,
    optimizer: Any = None,
    training_config: KTOConfig | None = None,
    tokenizer: Any = None,
    *,
    metrics_logger: MetricsLogger | None = None,
  ):
    config = self.checked_config(training_config)
    self._reference: ReferenceModel = reference_for(
      "kto", model, ref_model, config.data_sharding_axis
    )
    self._one_label = 0  # global batches so far
    super().__init__(model, optimizer, config, tokenizer, metrics_logger)

  def _read(self, batch: Any) -> KTOTrainingInput:
    return self._reader.single(batch)

  def _ref_logps(self, rows: dict[str, Any]) -> jax.Array:
    found = self._reference.logps(self._module, self._state.mesh, rows, _ANSWER)
    return found[:, 0]

  def _prepare_inputs(self, batch: Any) -> Any:
    read = self._reader.single(batch)
    rows = token_columns(read)
    return {
      "rows": rows,
      "labels": read.labels,
      "weights": read.weights,
      "reference": self._ref_logps(rows),
    }

  def _prepare_window(self, batches: list[Any]) -> list[Any]:
    """Adds z0 of the global batch."""
    self._warn_of_one_label(batches)
    kl = self._kl(_mismatched(batches))
    return [{**batch, "kl": kl} for batch in batches]

  def _warn_of_one_label(self, batches: Sequence[Any]) -> None:
    seen = {bool(x) for b in batches for x in b["labels"][b["weights"] != 0]}
    if len(seen) != 1:
      return
    total = self._one_label = self._one_label + 1
    if total == 10 ** (len(str(total)) - 1):
      kind = "desirable" if seen.pop() else "undesirable"
      _log.warning(
        "global batches with answers of one kind so far: %d (all %s): shuffle the "
        "data, or make batches larger",
        total,
        kind,
      )

  def _kl(self, batches: Sequence[Any]) -> jax.Array:
    logps, ref_logps, weights = [], [], []
    axes = self.training_config.data_sharding_axis
    for batch in batches:
      logps.append(self._without_gradient(batch))
      ref_logps.append(self._ref_logps(batch["rows"]))
      weights.append(sharding_utils.shard_input(batch["weights"], axes))
    together = (jnp.concatenate(parts) for parts in (logps, ref_logps, weights))
    return _estimate(*together)

  def _score(self, model: nnx.Module, batch: Any) -> jax.Array:
    return answer_logps(model, batch["rows"], _ANSWER, shared=False)[:, 0]

  def _train_step(
    self, model: nnx.Module, batch: Any
  ) -> tuple[WeightedSum, dict[str, Any]]:
    loss = kto.kto_loss(
      self._score(model, batch),
      batch["reference"],
      batch["labels"],
      batch["weights"],
      kl=batch["kl"],
      **self.training_config.loss_options,
    )
    return weigh(loss, batch["weights"])

  def _post_process_train_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return kto.kto_metrics(aux)

  def _post_process_eval_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return kto.kto_metrics(aux)


_estimate = jax.jit(kto.kl_estimate)


def _mismatched(batches: Sequence[Any]) -> list[Any]:
  """The batches with every real row's answer replaced by that of the real row before
  it in the global batch; rows without weight, and a row alone, get none."""
  width = max(batch["rows"]["completion_ids"].shape[1] for batch in batches)

  def together(name: str) -> np.ndarray:
    columns = [np.asarray(batch["rows"][name]) for batch in batches]
    return np.concatenate(
      [np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in columns]
    )

  weights = np.concatenate([np.asarray(batch["weights"]) for batch in batches])
  real = np.flatnonzero(weights)
  counted = np.zeros_like(weights)
  if len(real) > 1:
    counted[real] = 1.0
  moved = {}
  for name in ("completion_ids", "completion_mask"):
    column = together(name)
    column[real] = column[np.roll(real, 1)]
    moved[name] = column * counted[:, None].astype(column.dtype)
  ends = np.cumsum([len(batch["weights"]) for batch in batches])[:-1]
  parts = {name: np.split(x, ends) for name, x in {**moved, "weights": counted}.items()}
  return [
    {
      "rows": {**batch["rows"], **{name: parts[name][i] for name in moved}},
      "weights": parts["weights"][i],
    }
    for i, batch in enumerate(batches)
  ]
