"""DPOTrainer: learns from pairs of completions, with any loss of ops.preference."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.data import batches
from tunix.data.batches import PAIR, TextOptions
from tunix.generate import tokenizer_adapter
from tunix.ops import preference
from tunix.ops.pair_losses import PairScores
from tunix.ops.preference import PairLossSpec
from tunix.ops.reductions import WeightedSum
from tunix.perf.trace import NoopTracer
from tunix.sft.dpo import completions
from tunix.sft.dpo.completions import BatchReader, Read, completion_logps, weigh
from tunix.sft.dpo.pairs import DataInput, Limits, TrainingInput
from tunix.sft.dpo.precomputed import PrecomputedLogps
from tunix.sft.dpo.preference_config import (
  DPOTrainingConfig,
  ORPOTrainingConfig,
  PreferenceConfig,
)
from tunix.sft.dpo.reference import ReferenceModel, reference_for
from tunix.sft.losses import batch_fields
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer

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
  "PreferenceTrainer",
  "TrainingInput",
  "process_dpo_record",
]

_log = logging.getLogger(__name__)


class DPOTrainer(PeftTrainer):
  """Trains a language model on chosen and rejected completions: by default with direct
  preference optimisation (Rafailov et al. 2023, arXiv:2305.18290).

  Batches are `DataInput`s (text), `TrainingInput`s (token ids), or dicts with the
  fields of one; the chosen and the rejected completions of a batch run in one forward
  pass, and logits are computed for their tokens alone. The loss is a mean over pairs,
  of the global batch however it is cut; the losses that compare a pair with the others
  (aot, aot_unpaired, bco_pair) take a second forward pass to be so when there are
  several micro-batches. (That pass has no dropout: with dropout in the policy their
  gradient then is that of the pairs' standing without it.)

  Metrics: see `tunix.ops.preference.pair_loss`.

  Args:
    model: the policy; with adapters in it only they are trained.
    ref_model: the reference; it is not changed. None: with adapters, the same weights
      without them (no second copy); else the loss must need none (simpo, cpo, orpo),
      or the config say `reference_free=True`, or `reference_logps` be given.
    optimizer: see PeftTrainer.
    training_config: a PreferenceConfig: the loss is its.
    tokenizer: needed for text.
    reference_logps: the reference's log-probabilities from disk, instead of computing
      them. They are checked against `ref_model`, else against what lies below the
      adapters, else against the model as it is passed in.
    metrics_logger, perf_tracer: see PeftTrainer.

  Raises:
    TypeError: the config is no PreferenceConfig.
    ValueError: a reference is needed and missing, or is the policy itself, or the
      log-probabilities are another model's.
  """

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
    perf_tracer: NoopTracer | None = None,
  ):
    config = completions.checked_config(
      training_config, PreferenceConfig, DPOTrainingConfig
    )
    self._logps = reference_logps if config.spec.needs_reference else None
    self._reference = _reference(config, model, ref_model, self._logps)
    # The spec, not the name: without its reference a loss has no kl to report.
    self._pair_loss: preference.Loss = config.chosen_loss
    if config.reference_free:
      self._pair_loss = config.spec
    self._pair_options = config.loss_options
    options = completions.options_of(config, tokenizer)
    self._reader = BatchReader(batches.read_pairs, options)
    super().__init__(model, optimizer, config, metrics_logger, perf_tracer)

  def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """Replaces the loss of the config by one of pairs: `loss_fn(scores, *, beta)`.

    Args:
      loss_fn: takes PairScores, and by name those of `beta` and `label_smoothing` that
        it asks for; gives a value for each pair, [B].
      has_aux: it gives a pair of that and a dict of metrics, [B] each.

    Raises:
      ValueError: the config sets label_smoothing, and it takes none.
    """
    super().with_loss_fn(loss_fn, has_aux)
    compares = self._logps is not None or self._reference is not None
    fn = completions.as_pair_loss(loss_fn, has_aux)
    spec = PairLossSpec(fn, needs_reference=compares)
    config = self.training_config
    options = {"beta": config.beta, "label_smoothing": config.label_smoothing}
    preference.check_pair_loss(spec, **options)
    self._pair_loss, self._pair_options = spec, options
    return self

  def _read(self, batch: Any) -> Read:
    return self._reader.read(batch, self._loss.input_fn)

  def _prepare_inputs(self, batch: Any) -> Any:
    pairs = self._read(batch).rows
    rows = completions.token_columns(pairs)
    out = {"rows": rows, "weights": pairs["weights"]}
    if self._logps is not None:
      out["reference"] = self._logps.logps(rows, pairs["weights"])
    elif self._reference is not None:
      shared = self.training_config.shared_prompt
      out["reference"] = self._reference.logps(
        self._module, self._state.mesh, rows, PAIR, shared
      )
    return out

  def _prepare_window(self, batches: list[Any]) -> list[Any]:
    """Adds each pair's share of a loss that is coupled over several micro-batches."""
    coupled = preference.pair_loss_spec(self._pair_loss).coupled
    if not coupled or len(batches) == 1:
      return batches
    parts = [self._score_now(batch) for batch in batches]
    ends = np.cumsum([len(part.weights) for part in parts])
    scores = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
    shares = self._coefficients(scores)
    cut = lambda start, end: jax.tree.map(lambda x: x[start:end], shares)
    return [
      {**batch, "coupled": cut(end - len(part.weights), end)}
      for batch, part, end in zip(batches, parts, ends)
    ]

  @functools.cached_property
  def _score_now(self) -> Callable[[Any], PairScores]:
    axes = self.training_config.data_sharding_axis
    return completions.without_gradient(self._module, self._score, axes)

  @functools.cached_property
  def _coefficients(self) -> Any:
    loss, options = self._pair_loss, self._pair_options
    return jax.jit(
      lambda scores: preference.coupled_coefficients(loss, scores, **options)
    )

  def _score(self, model: nnx.Module, batch: Any) -> PairScores:
    """The policy's log-probabilities beside the reference's."""
    rows = batch["rows"]
    logps = completion_logps(model, rows, PAIR, self.training_config.shared_prompt)
    reference = batch.get("reference", jnp.zeros_like(logps))
    tokens = [jnp.sum(rows[f"{name}_mask"] != 0, axis=1) for name in PAIR]
    columns = (*logps.T, *reference.T, *tokens, batch["weights"])
    return PairScores(*(x.astype(jnp.float32) for x in columns))

  def _train_step(
    self, model: nnx.Module, batch: Any
  ) -> tuple[WeightedSum, dict[str, Any]]:
    scores, loss = self._score(model, batch), self._pair_loss
    if "coupled" in batch:
      beta = self.training_config.beta
      out = preference.coupled_loss(loss, batch["coupled"], scores, beta)
    else:
      out = preference.pair_loss(loss, scores, **self._pair_options)
    return weigh(out, scores.weights)


PreferenceTrainer = DPOTrainer


class ORPOTrainer(DPOTrainer):
  """Odds-ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691): the
  likelihood of the chosen completion and the odds of it against the rejected one,
  without a reference; log-probabilities are averaged over a completion's tokens.

  Args, Raises: see DPOTrainer.

  Raises:
    ValueError: the config's loss is another.
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
    perf_tracer: NoopTracer | None = None,
  ):
    config = completions.checked_config(
      training_config, DPOTrainingConfig, ORPOTrainingConfig
    )
    if config.algorithm != "orpo":
      raise ValueError(
        f"ORPOTrainer with algorithm {config.algorithm!r}: use ORPOTrainingConfig, or "
        "DPOTrainer for the other losses"
      )
    super().__init__(
      model,
      ref_model,
      optimizer,
      config,
      tokenizer,
      metrics_logger=metrics_logger,
      perf_tracer=perf_tracer,
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
    max_prompt_length, max_response_length: tokens; see CompletionsConfig.

  Returns:
    NumPy arrays [B, tokens]; of one pair without the first axis.

  Raises:
    ValueError: a completion is empty, both are equal, or a field is missing.
  """
  limits = Limits(max_prompt_length, max_response_length)
  options = TextOptions(tokenizer=tokenizer_adapter.adapted(tokenizer), limits=limits)
  columns = batch_fields(record)
  if not batches.is_one_pair(columns):
    return TrainingInput(**batches.read_pairs(columns, options))
  rows = batches.read_pairs({name: [x] for name, x in columns.items()}, options)
  one = TrainingInput(**{name: x[0] for name, x in rows.items()})
  return one if "weights" in columns else dataclasses.replace(one, weights=None)


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
