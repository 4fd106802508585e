"""KTOTrainer: learns from single completions, each marked as good or bad."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.data import batches as reading
from tunix.data.batches import SINGLE
from tunix.ops import kto
from tunix.ops.reductions import WeightedSum
from tunix.perf import programs
from tunix.perf.trace import NoopTracer
from tunix.sft import sharding_utils
from tunix.sft.dpo import completions
from tunix.sft.dpo.completions import BatchReader, Read, completion_logps, weigh
from tunix.sft.dpo.pairs import KTODataInput, KTOTrainingInput
from tunix.sft.dpo.preference_config import KTOConfig
from tunix.sft.dpo.reference import ReferenceModel, reference_for
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer

__all__ = ["KTOConfig", "KTODataInput", "KTOTrainer", "KTOTrainingInput"]


class KTOTrainer(PeftTrainer):
  """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306).

  Batches are `KTODataInput`s (text), `KTOTrainingInput`s (token ids) or dicts with the
  fields of one; completions need no partner. How far the policy is from its reference
  (z0) is estimated once for a global batch, however it is cut: each prompt of it with
  the completion of the row before, under both models, without gradient and dropout.

  A global batch in which all completions are good, or all bad, is trained, but learns
  to raise (or lower) everything it sees: the first is warned of, then the tenth, the
  hundredth ... In one of a single row z0 is 0.

  Metrics: rewards/chosen and rewards/rejected (of good and of bad completions; 0 where
  there are none), rewards/margin, log_probs/chosen, log_probs/rejected, kl (z0).

  Args:
    model, ref_model, optimizer, tokenizer, metrics_logger, perf_tracer: see
      PreferenceTrainer.
    training_config: a KTOConfig.

  Raises:
    TypeError: the config is no KTOConfig.
    ValueError: no reference: see PreferenceTrainer.
  """

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
    perf_tracer: NoopTracer | None = None,
  ):
    config = completions.checked_config(training_config, KTOConfig, KTOConfig)
    self._reference: ReferenceModel = reference_for(
      "kto", model, ref_model, config.data_sharding_axis
    )
    self._kto_loss: Callable[..., Any] = functools.partial(
      kto.kto_loss, **config.loss_options
    )
    self._means: Callable[[dict[str, Any]], dict[str, Any]] = kto.kto_metrics
    options = completions.options_of(config, tokenizer)
    self._reader = BatchReader(reading.read_labelled, options)
    super().__init__(model, optimizer, config, metrics_logger, perf_tracer)

  def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """Replaces the loss: `loss_fn(logps, ref_logps, labels, weights, *, kl)`.

    Args:
      loss_fn: takes log-probabilities, labels and weights of B completions, and the
        z0 of the global batch; gives a value for each, [B].
      has_aux: it gives a pair of that and a dict of metrics, [B] each.
    """
    super().with_loss_fn(loss_fn, has_aux)
    self._kto_loss = completions.as_pair_loss(loss_fn, has_aux)
    self._means = lambda aux: aux  # its metrics are not split by label
    return self

  def _read(self, batch: Any) -> Read:
    return self._reader.read(batch, self._loss.input_fn)

  def _ref_logps(self, rows: dict[str, Any]) -> jax.Array:
    logps = self._reference.logps(self._module, self._state.mesh, rows, SINGLE)
    return programs.call("first column", _first_column, logps)

  def _prepare_inputs(self, batch: Any) -> Any:
    read = self._read(batch).rows
    rows = completions.token_columns(read)
    return {
      "rows": rows,
      "labels": read["labels"],
      "weights": read["weights"],
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
    kind = "desirable" if seen.pop() else "undesirable"
    self._reader.options.tally.add(
      "global batches with completions of one kind",
      f"all {kind}: shuffle the data, or make batches larger",
    )

  def _kl(self, batches: Sequence[Any]) -> jax.Array:
    logps, ref_logps, weights = [], [], []
    axes = self.training_config.data_sharding_axis
    for batch in batches:
      logps.append(self._score_now(batch))
      ref_logps.append(self._ref_logps(batch["rows"]))
      weights.append(sharding_utils.shard_input(batch["weights"], axes))
    columns = (logps, ref_logps, weights)
    together = (programs.call("join", _join, parts) for parts in columns)
    return programs.call("kl estimate", _estimate, *together)

  @functools.cached_property
  def _score_now(self) -> Callable[[Any], jax.Array]:
    axes = self.training_config.data_sharding_axis
    return completions.without_gradient(self._module, self._score, axes)

  def _score(self, model: nnx.Module, batch: Any) -> jax.Array:
    return completion_logps(model, batch["rows"], SINGLE, shared=False)[:, 0]

  def _train_step(
    self, model: nnx.Module, batch: Any
  ) -> tuple[WeightedSum, dict[str, Any]]:
    loss = self._kto_loss(
      self._score(model, batch),
      batch["reference"],
      batch["labels"],
      batch["weights"],
      kl=batch["kl"],
    )
    return weigh(loss, batch["weights"])

  def _post_process_train_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return self._means(aux)

  def _post_process_eval_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return self._means(aux)


_estimate = jax.jit(kto.kl_estimate)
# Operations that run between programs, as what a plan can note.
_join = jax.jit(jnp.concatenate)
_first_column = jax.jit(lambda logps: logps[:, 0])


def _mismatched(batches: Sequence[Any]) -> list[Any]:
  """The batches with every real row's completion replaced by that of the real row
  before it in the global batch; rows without weight, and a row alone, get none."""
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
