"""DPOTrainer: trains on pairs of completions, with any loss of `ops.preference`."""

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
from tunix.data.batches import PAIR, Rows
from tunix.models import calling
from tunix.ops import preference
from tunix.ops.pair_losses import PairScores
from tunix.ops.preference import PairLossSpec
from tunix.ops.reductions import WeightedSum
from tunix.perf.trace import NoopTracer
from tunix.sft.dpo import completions
from tunix.sft.dpo.completions import completion_logps, weigh
from tunix.sft.dpo.pairs import DataInput, TrainingInput
from tunix.sft.dpo.precomputed import PrecomputedLogps
from tunix.sft.dpo.preference_config import (
  CompletionsConfig,
  DPOTrainingConfig,
  ORPOTrainingConfig,
  PreferenceConfig,
)
from tunix.sft.dpo.reference import ReferenceModel, reference_for
from tunix.sft.loop.trainer_arguments import Optimizer
from tunix.sft.losses import batch_fields
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer
from tunix.sft.steps import windows
from tunix.sft.steps.shared_steps import Call
from tunix.sft.steps.train_step import BatchLoss

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
  "PreferenceConfig",
  "PreferenceTrainer",
  "TrainingInput",
  "process_dpo_record",
]

_log = logging.getLogger(__name__)


class DPOTrainer(PeftTrainer):
  """Trains a language model on pairs of a chosen and a rejected completion.

  The default loss is direct preference optimization (Rafailov et al. 2023,
  arXiv:2305.18290); `training_config.loss` chooses another one. Batches are
  `DataInput`s (text), `TrainingInput`s (token ids), or dicts with the fields of one of
  them; or pairs that share rows (`tunix.data.batching.buckets.batch_pairs`). Both
  completions of a pair run in one forward pass, and logits are computed for completion
  tokens only.

  The loss is the mean over the pairs of a global batch and does not depend on the
  number of micro-batches. The losses aot, aot_unpaired and bco_pair compare a pair with
  the other pairs of the global batch. With several micro-batches they need a second
  forward pass, which has no dropout: the gradient is then taken at the comparison
  without dropout.

  Metrics: see `tunix.ops.preference.pair_loss`.

  Args:
    model: the policy. If it has adapters, only the adapters are trained.
    ref_model: the reference, which is not changed. None: a model with adapters is
      compared with its own frozen weights, without a second copy. A model without
      adapters then needs `reference_logps`, `reference_free=True` in the config, or a
      loss without a reference (simpo, cpo, orpo).
    optimizer: see PeftTrainer.
    training_config: settings, the loss among them; None: a DPOTrainingConfig.
    tokenizer: tokenizer of text batches.
    reference_logps: the reference's log-probabilities from disk. Their model stamp is
      compared with `ref_model`, or, without one, with the model below its adapters.
    metrics_logger, perf_tracer: see PeftTrainer.

  Raises:
    TypeError: The config is no DPOTrainingConfig.
    ValueError: The loss needs a reference and there is none; the reference is the
      policy itself; or the log-probabilities belong to another model.
  """

  training_config: DPOTrainingConfig

  def __init__(
    self,
    model: nnx.Module,
    ref_model: nnx.Module | None = None,
    optimizer: Optimizer | None = None,
    training_config: DPOTrainingConfig | None = None,
    tokenizer: object = None,
    *,
    reference_logps: PrecomputedLogps | None = None,
    metrics_logger: MetricsLogger | None = None,
    perf_tracer: NoopTracer | None = None,
  ):
    config = completions.checked_config(training_config, DPOTrainingConfig)
    self._logps = reference_logps if config.spec.needs_reference else None
    self._reference = _reference(config, model, ref_model, self._logps)
    models = [one for one in (model, ref_model) if one is not None]
    self._shares_prompts = completions.shares_prompts(config.shared_prompt, models)
    # A loss given by name reports the metric kl, which is wrong without a reference:
    # `reference_free` therefore passes the changed spec.
    self._pair_loss: preference.Loss = config.chosen_loss
    if config.reference_free:
      self._pair_loss = config.spec
    self._pair_options = config.loss_options
    self._reader = functools.partial(
      batches.read_pairs, options=config.text_options(tokenizer), may_share=True
    )
    super().__init__(model, optimizer, config, metrics_logger, perf_tracer)

  def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """Replaces the config's loss by a function of pairs: `loss_fn(scores, *, beta)`.

    Args:
      loss_fn: takes PairScores, and the keywords `beta` and `label_smoothing` if its
        signature has them; returns a value for each pair, [B].
      has_aux: True if `loss_fn` returns a pair of the values and a dict of metrics,
        [B] each.

    Raises:
      ValueError: The config sets label_smoothing, and `loss_fn` does not take it.
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

  def _prepare_inputs(self, pairs: Rows) -> Any:
    rows = completions.token_columns(pairs)
    if "sequence" in rows:
      self._check_shared(rows)
    out = {"rows": rows, "weights": pairs["weights"]}
    if self._logps is not None:
      out["reference"] = self._logps.logps(rows, pairs["weights"])
    elif self._reference is not None:
      out["reference"] = self._reference.logps(
        self._module, self._state.mesh, rows, PAIR, self._shares_prompts
      )
    return out

  def _check_shared(self, rows: Rows) -> None:
    """Refuses pairs that share rows where a setting or the model needs rows of one."""
    options = {
      "shared_prompt": self.training_config.shared_prompt,
      "reference_logps": self._logps is not None,
    }
    if used := [name for name, is_set in options.items() if is_set]:
      raise ValueError(
        f"{used[0]} is set and the pairs of the batch share rows (it has the field "
        "'sequence'); expected rows of one pair. Set data.pad_to=longest, or build the "
        "batches without shared_rows"
      )
    windows.check_read([rows], calling.call_parameters(self._module.model))

  def _prepare_window(self, batches: list[Any]) -> list[Any]:
    """Adds the coefficients of a coupled loss to each micro-batch.

    A coupled loss compares all pairs of the global batch. Its gradient is linear in
    log-probabilities with coefficients that need all pairs, so they are computed here,
    before the micro-batches are trained one after the other.
    """
    coupled = preference.pair_loss_spec(self._pair_loss).coupled
    if not coupled or len(batches) == 1:
      return batches
    parts = [self._score_now(batch) for batch in batches]
    ends = np.cumsum([len(part.weights) for part in parts])
    scores = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
    shares = self._coefficients(scores)

    def cut(start, end):
      return jax.tree.map(lambda x: x[start:end], shares)

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

  def _score(self, model: nnx.Module, batch: object) -> PairScores:
    return _scores(model, batch, self._shares_prompts)

  def _train_step(
    self, model: nnx.Module, batch: object
  ) -> tuple[WeightedSum, dict[str, Any]]:
    return self._configured_step()(model, batch)

  def _configured_step(self) -> Call:
    return Call.of(
      _step,
      loss=self._pair_loss,
      options=tuple(sorted(self._pair_options.items())),
      beta=self.training_config.beta,
      shared_prompt=self._shares_prompts,
    )

  def _traced_losses(self) -> tuple[BatchLoss, BatchLoss]:
    return self._losses_of(DPOTrainer, self._configured_step())


def _scores(model: nnx.Module, batch: Any, shared_prompt: bool) -> PairScores:
  """Returns the policy's and the reference's log-probabilities of each pair."""
  rows = batch["rows"]
  logps = completion_logps(model, rows, PAIR, shared_prompt)
  reference = batch.get("reference", jnp.zeros_like(logps))
  if "tokens" in rows:
    tokens = rows["tokens"].T
  else:
    tokens = [jnp.sum(rows[f"{name}_mask"] != 0, axis=1) for name in PAIR]
  columns = (*logps.T, *reference.T, *tokens, batch["weights"])
  return PairScores(*(x.astype(jnp.float32) for x in columns))


def _step(
  model: nnx.Module,
  batch: Any,
  *,
  loss: preference.Loss,
  options: tuple[tuple[str, Any], ...],
  beta: float,
  shared_prompt: bool,
) -> tuple[WeightedSum, dict[str, Any]]:
  """Returns the loss of a micro-batch of pairs, and its metrics."""
  scores = _scores(model, batch, shared_prompt)
  if "coupled" in batch:
    out = preference.coupled_loss(loss, batch["coupled"], scores, beta)
  else:
    out = preference.pair_loss(loss, scores, **dict(options))
  return weigh(out, scores.weights)


PreferenceTrainer = DPOTrainer


class ORPOTrainer(DPOTrainer):
  """A DPOTrainer with the loss orpo (Hong et al. 2024, arXiv:2403.07691).

  The loss adds the likelihood of the chosen completion and its odds against the
  rejected one. It has no reference, and averages log-probabilities over tokens.

  Args:
    model, ref_model, optimizer, tokenizer: see DPOTrainer.
    training_config: settings; None: an ORPOTrainingConfig.
    **more: further arguments of DPOTrainer.

  Raises:
    ValueError: The config has another loss.
  """

  def __init__(
    self,
    model: nnx.Module,
    ref_model: nnx.Module | None = None,
    optimizer: Optimizer | None = None,
    training_config: DPOTrainingConfig | None = None,
    tokenizer: Any = None,
    **more: Any,
  ):
    config = ORPOTrainingConfig() if training_config is None else training_config
    if isinstance(config, DPOTrainingConfig) and config.chosen_loss != "orpo":
      raise ValueError(
        f"training_config.loss is {config.chosen_loss!r}; expected 'orpo'. Use "
        "ORPOTrainingConfig, or DPOTrainer for other losses."
      )
    super().__init__(model, ref_model, optimizer, config, tokenizer, **more)


DpoTrainer, DpoTrainingConfig = DPOTrainer, DPOTrainingConfig
OrpoTrainer, OrpoTrainingConfig = ORPOTrainer, ORPOTrainingConfig


def process_dpo_record(
  record: object, tokenizer: object, max_prompt_length: int, max_response_length: int
) -> TrainingInput:
  """Tokenizes one pair, or a batch of pairs; for a map over a dataset.

  Args:
    record: a DataInput, or a dict with prompts (or prompt), chosen_responses (chosen),
      rejected_responses (rejected) and optionally margins (margin). The values are
      those of one pair, or lists of B.
    tokenizer: a TokenizerAdapter, or an object that it can wrap.
    max_prompt_length, max_response_length: most tokens; see CompletionsConfig.

  Returns:
    NumPy arrays [B, tokens]; [tokens] for one pair.

  Raises:
    ValueError: A completion is empty, both are equal, or a field is missing.
  """
  lengths = CompletionsConfig(
    max_prompt_length=max_prompt_length, max_response_length=max_response_length
  )
  options = lengths.text_options(tokenizer)
  columns = batch_fields(record)
  if not batches.is_one_pair(columns):
    return TrainingInput(**batches.read_pairs(columns, options))
  rows = batches.read_pairs({name: [x] for name, x in columns.items()}, options)
  one = TrainingInput(**{name: x[0] for name, x in rows.items()})
  return one if "weights" in columns else dataclasses.replace(one, weights=None)


def _reference(
  config: DPOTrainingConfig,
  model: nnx.Module,
  ref_model: nnx.Module | None,
  logps: PrecomputedLogps | None,
) -> ReferenceModel | None:
  """Returns the model that computes reference log-probabilities; None if none must."""
  if not config.spec.needs_reference:
    if ref_model is not None:
      _log.warning("the loss has no reference: ref_model is not used")
    return None
  if logps is not None:
    logps.check(model if ref_model is None else ref_model)
    return None
  name = str(config.chosen_loss)
  return reference_for(name, model, ref_model, config.data_sharding_axis)
