"""PreferenceTrainer: learns from pairs of answers, with any loss of ops.preference."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.ops import preference
from tunix.ops.pair_losses import PairScores
from tunix.ops.reductions import WeightedSum
from tunix.sft.dpo.answer_trainer import AnswerTrainer, answer_logps, weigh
from tunix.sft.dpo.pairs import PAIR, TrainingInput
from tunix.sft.dpo.precomputed import PrecomputedLogps
from tunix.sft.dpo.preference_config import PreferenceConfig
from tunix.sft.dpo.reader import token_columns
from tunix.sft.dpo.reference import ReferenceModel, reference_for
from tunix.sft.metrics_logger import MetricsLogger

_log = logging.getLogger(__name__)


class PreferenceTrainer(AnswerTrainer):
  """Trains a language model on chosen and rejected answers.

  Batches are `DataInput`s (text), `TrainingInput`s (token ids), or dicts with the
  fields of one; the chosen and the rejected answers of a batch run in one forward pass,
  and logits are computed for their tokens alone. The loss is a mean over pairs, of the
  global batch however it is cut; the losses that compare a pair with the others (aot,
  aot_unpaired, bco_pair) take a second forward pass to be so when there are several
  micro-batches. (That pass has no dropout: with dropout in the policy their gradient
  then is that of the pairs' standing without it.)

  Metrics: see `tunix.ops.preference.pair_loss`.

  Args:
    model: the policy; with adapters in it only they are trained.
    ref_model: the reference; it is not changed. None: with adapters, the same weights
      without them (no second copy); else the loss must need none (simpo, cpo, orpo),
      or the config say `reference_free=True`, or `reference_logps` be given.
    optimizer: see PeftTrainer.
    training_config: the settings.
    tokenizer: needed for text.
    reference_logps: the reference's log-probabilities from disk, instead of computing
      them. They are checked against `ref_model`, else against what lies below the
      adapters, else against the model as it is passed in.
    metrics_logger: see PeftTrainer.

  Raises:
    TypeError: the config is no PreferenceConfig.
    ValueError: a reference is needed and missing, or is the policy itself, or the
      log-probabilities are another model's.
  """

  config_type = PreferenceConfig
  training_config: PreferenceConfig

  def __init__(
    self,
    model: nnx.Module,
    ref_model: nnx.Module | None = None,
    optimizer: Any = None,
    training_config: PreferenceConfig | None = None,
    tokenizer: Any = None,
    *,
    reference_logps: PrecomputedLogps | None = None,
    metrics_logger: MetricsLogger | None = None,
  ):
    config = self.checked_config(training_config)
    self._logps = reference_logps if config.spec.needs_reference else None
    self._reference = _reference(config, model, ref_model, self._logps)
    super().__init__(model, optimizer, config, tokenizer, metrics_logger)

  def _read(self, batch: Any) -> TrainingInput:
    return self._reader.pairs(batch)

  def _prepare_inputs(self, batch: Any) -> Any:
    pairs = self._reader.pairs(batch)
    rows = token_columns(pairs)
    out = {"rows": rows, "weights": pairs.weights}
    if self._logps is not None:
      out["reference"] = self._logps.logps(rows, pairs.weights)
    elif self._reference is not None:
      shared = self.training_config.shared_prompt
      out["reference"] = self._reference.logps(
        self._module, self._state.mesh, rows, PAIR, shared
      )
    return out

  def _prepare_window(self, batches: list[Any]) -> list[Any]:
    """Adds each pair's share of a loss that is coupled over several micro-batches."""
    if not self.training_config.spec.coupled or len(batches) == 1:
      return batches
    parts = [self._without_gradient(batch) for batch in batches]
    ends = np.cumsum([len(part.weights) for part in parts])
    scores = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
    shares = self._coefficients(scores)
    cut = lambda start, end: jax.tree.map(lambda x: x[start:end], shares)
    return [
      {**batch, "coupled": cut(end - len(part.weights), end)}
      for batch, part, end in zip(batches, parts, ends)
    ]

  @functools.cached_property
  def _coefficients(self) -> Any:
    config = self.training_config
    return jax.jit(
      lambda scores: preference.coupled_coefficients(
        config.chosen_loss, scores, **config.loss_options
      )
    )

  def _score(self, model: nnx.Module, batch: Any) -> PairScores:
    """The policy's log-probabilities beside the reference's."""
    rows = batch["rows"]
    logps = answer_logps(model, rows, PAIR, self.training_config.shared_prompt)
    reference = batch.get("reference", jnp.zeros_like(logps))
    tokens = [jnp.sum(rows[f"{name}_mask"] != 0, axis=1) for name in PAIR]
    columns = (*logps.T, *reference.T, *tokens, batch["weights"])
    return PairScores(*(x.astype(jnp.float32) for x in columns))

  def _train_step(
    self, model: nnx.Module, batch: Any
  ) -> tuple[WeightedSum, dict[str, Any]]:
    config = self.training_config
    scores = self._score(model, batch)
    # The spec, not the name: without its reference a loss has no kl to report.
    loss = config.spec if config.reference_free else config.chosen_loss
    if "coupled" in batch:
      out = preference.coupled_loss(loss, batch["coupled"], scores, config.beta)
    else:
      out = preference.pair_loss(loss, scores, **config.loss_options)
    return weigh(out, scores.weights)


def _reference(
  config: PreferenceConfig,
  model: nnx.Module,
  ref_model: nnx.Module | None,
  logps: PrecomputedLogps | None,
) -> ReferenceModel | None:
  """What computes the reference's log-probabilities; None: nothing has to."""
  if not config.spec.needs_reference:
    if ref_model is not None:
      _log.warning("the loss has no reference: ref_model is not used")
    return None
  if logps is not None:
    logps.check(model if ref_model is None else ref_model)
    return None
  name = str(config.chosen_loss)
  return reference_for(name, model, ref_model, config.data_sharding_axis)
