"""KTOTrainer: trains on single completions that are labeled desirable or not.

The settings and the batches of KTO are here too, beside the trainer that reads them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.data import batches as reading
from tunix.data.batches import SINGLE, Rows
from tunix.data.records import Text
from tunix.ops import kto
from tunix.ops.reductions import WeightedSum
from tunix.perf import programs
from tunix.perf.trace import NoopTracer
from tunix.sft import sharding_utils
from tunix.sft.dpo import completions
from tunix.sft.dpo.completions import completion_logps, weigh
from tunix.sft.dpo.preference_config import CompletionsConfig
from tunix.sft.dpo.reference import ReferenceModel, reference_for
from tunix.sft.loop.trainer_arguments import Optimizer
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer
from tunix.sft.steps.shared_steps import Call
from tunix.sft.steps.train_step import BatchLoss
from tunix.utils.setting import named_values

__all__ = ["KTOConfig", "KTODataInput", "KTOTrainer", "KTOTrainingInput"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KTODataInput:
  """A batch of B labeled completions as text.

  Attributes:
    prompts, completions: as `DataInput.prompts` and its responses.
    labels: True for a desirable completion.
  """

  prompts: Sequence[Text]
  completions: Sequence[Text]
  labels: Sequence[bool]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KTOTrainingInput:
  """A batch of B labeled completions as token ids, or one without the first axis.

  Attributes:
    prompt_ids, prompt_mask: [B, P], padded on the left.
    completion_ids, completion_mask: [B, R], padded on the right, without BOS.
    labels: bool [B], True for a desirable completion.
    weights, images: as in `TrainingInput`.
  """

  prompt_ids: Any
  prompt_mask: Any
  completion_ids: Any
  completion_mask: Any
  labels: Any
  weights: Any = None
  images: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTOConfig(CompletionsConfig):
  """Settings of KTOTrainer.

  Attributes:
    beta: strength of the pull toward the reference.
    desirable_weight, undesirable_weight: weights of the two labels in the loss. With
      n_D desirable and n_U undesirable completions, the paper recommends a ratio
      desirable_weight n_D / (undesirable_weight n_U) between 1 and 4/3.
  """

  beta: float = 0.1
  desirable_weight: float = 1.0
  undesirable_weight: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    # The loss checks its options; tracing it here raises the error at construction.
    row = jax.ShapeDtypeStruct((1,), jnp.float32)
    label = jax.ShapeDtypeStruct((1,), bool)
    jax.eval_shape(
      lambda x, y: kto.kto_loss(x, x, y, x, kl=0.0, **self.loss_options), row, label
    )

  @property
  def loss_options(self) -> dict[str, float]:
    """The keyword arguments of the loss."""
    names = ("beta", "desirable_weight", "undesirable_weight")
    return named_values(self, names)


class KTOTrainer(PeftTrainer):
  """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306).

  Batches are `KTODataInput`s (text), `KTOTrainingInput`s (token ids), or dicts with the
  fields of one of them. A completion needs no partner. The distance z0 between policy
  and reference is estimated once for a global batch, whatever the number of
  micro-batches: each prompt is scored with the completion of the row before it, under
  both models, without gradient and dropout. In a global batch of one row z0 is 0.

  A global batch whose completions are all desirable, or all undesirable, is trained:
  the policy then raises, or lowers, the probability of every completion. A warning is
  logged for the first such batch, the tenth, the hundredth and so on.

  Metrics: rewards/chosen and rewards/rejected (means over desirable and undesirable
  completions; 0 if there are none), rewards/margin, log_probs/chosen,
  log_probs/rejected, kl (z0).

  Args:
    model, ref_model, optimizer, tokenizer, metrics_logger, perf_tracer: see DPOTrainer.
    training_config: settings; None: a KTOConfig.

  Raises:
    TypeError: The config is no KTOConfig.
    ValueError: There is no reference; see DPOTrainer.
  """

  training_config: KTOConfig

  def __init__(
    self,
    model: nnx.Module,
    ref_model: nnx.Module | None = None,
    optimizer: Optimizer | None = None,
    training_config: KTOConfig | None = None,
    tokenizer: object = None,
    *,
    metrics_logger: MetricsLogger | None = None,
    perf_tracer: NoopTracer | None = None,
  ):
    config = completions.checked_config(training_config, KTOConfig)
    self._reference: ReferenceModel = reference_for(
      "kto", model, ref_model, config.data_sharding_axis
    )
    self._kto_loss: Callable[..., Any] = Call.of(kto.kto_loss, **config.loss_options)
    self._means: Callable[[dict[str, Any]], dict[str, Any]] = kto.kto_metrics
    options = config.text_options(tokenizer)
    self._tally = options.tally
    self._reader = functools.partial(reading.read_labelled, options=options)
    super().__init__(model, optimizer, config, metrics_logger, perf_tracer)

  def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """Replaces the loss: `loss_fn(logps, ref_logps, labels, weights, *, kl)`.

    Args:
      loss_fn: takes log-probabilities, labels and weights of B completions, and z0 of
        the global batch as `kl`; returns a value for each completion, [B].
      has_aux: True if `loss_fn` returns a pair of the values and a dict of metrics,
        [B] each.
    """
    super().with_loss_fn(loss_fn, has_aux)
    self._kto_loss = completions.as_pair_loss(loss_fn, has_aux)
    # Only the metrics of `kto_loss` are split by label.
    self._means = lambda aux: aux
    return self

  def _ref_logps(self, rows: dict[str, Any]) -> jax.Array:
    logps = self._reference.logps(self._module, self._state.mesh, rows, SINGLE)
    return programs.call("first column", _first_column, logps)

  def _prepare_inputs(self, batch: Rows) -> Any:
    rows = completions.token_columns(batch)
    return {
      "rows": rows,
      "labels": batch["labels"],
      "weights": batch["weights"],
      "reference": self._ref_logps(rows),
    }

  def _prepare_window(self, batches: list[Any]) -> list[Any]:
    """Adds z0 of the global batch to each micro-batch."""
    self._warn_of_one_label(batches)
    kl = self._kl(_mismatched(batches))
    return [{**batch, "kl": kl} for batch in batches]

  def _warn_of_one_label(self, batches: Sequence[Any]) -> None:
    seen = {bool(x) for b in batches for x in b["labels"][b["weights"] != 0]}
    if len(seen) != 1:
      return
    kind = "desirable" if seen.pop() else "undesirable"
    self._tally.add(
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

  def _score(self, model: nnx.Module, batch: object) -> jax.Array:
    return _logps(model, batch)

  def _train_step(
    self, model: nnx.Module, batch: object
  ) -> tuple[WeightedSum, dict[str, Any]]:
    return _step(model, batch, loss=self._kto_loss)

  def _traced_losses(self) -> tuple[BatchLoss, BatchLoss]:
    return self._losses_of(KTOTrainer, Call.of(_step, loss=self._kto_loss))

  def _post_process_train_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return self._means(aux)

  def _post_process_eval_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return self._means(aux)


def _logps(model: nnx.Module, batch: Any) -> jax.Array:
  """Returns the log-probability of each completion, [B]."""
  return completion_logps(model, batch["rows"], SINGLE, shared=False)[:, 0]


def _step(
  model: nnx.Module, batch: Any, *, loss: Callable[..., Any]
) -> tuple[WeightedSum, dict[str, Any]]:
  """Returns the loss of a micro-batch of completions, and its metrics."""
  out = loss(
    _logps(model, batch),
    batch["reference"],
    batch["labels"],
    batch["weights"],
    kl=batch["kl"],
  )
  return weigh(out, batch["weights"])


_estimate = jax.jit(kto.kl_estimate)
# Small operations between programs are jitted so that `tunix plan` can list them.
_join = jax.jit(jnp.concatenate)
_first_column = jax.jit(lambda logps: logps[:, 0])


def _mismatched(batches: Sequence[Any]) -> list[Any]:
  """Replaces each completion by the one of the row before it in the global batch.

  Rows of weight 0 are skipped. They get an empty completion and weight 0, and so does a
  row that is alone in its global batch.
  """
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
