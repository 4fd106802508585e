"""What trainers of prompts with answers have in common: reading, weighing, scoring."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.generate import scoring
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.ops.pair_losses import PairLoss
from tunix.ops.reductions import WeightedSum, weighted_sum
from tunix.sft import sharding_utils
from tunix.sft.dpo.preference_config import AnswersConfig
from tunix.sft.dpo.reader import Reader
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer


class AnswerTrainer(PeftTrainer):
  """A PeftTrainer whose batches are prompts with answers, as text or as token ids.

  Subclasses say how a batch is read (`_read`), what is computed of it beforehand, and
  its loss.

  Args:
    model: see PeftTrainer.
    optimizer: see PeftTrainer.
    training_config: an AnswersConfig.
    tokenizer: needed for text; a TokenizerAdapter or what one can be made of.
    metrics_logger: see PeftTrainer.

  Raises:
    TypeError: the config is of another kind.
  """

  config_type: type[AnswersConfig] = AnswersConfig
  training_config: AnswersConfig

  def __init__(
    self,
    model: nnx.Module,
    optimizer: Any = None,
    training_config: AnswersConfig | None = None,
    tokenizer: Any = None,
    metrics_logger: MetricsLogger | None = None,
  ):
    config = self.checked_config(training_config)
    if tokenizer is not None and not isinstance(tokenizer, TokenizerAdapter):
      tokenizer = TokenizerAdapter(tokenizer)
    self._reader = Reader(tokenizer, config.limits, config.bad_rows)
    super().__init__(model, optimizer, config, metrics_logger)

  @classmethod
  def checked_config(cls, config: Any) -> Any:
    """The config, or the default one.

    Raises:
      TypeError: it is none of this trainer.
    """
    if config is None:
      return cls.config_type()
    if not isinstance(config, cls.config_type):
      raise TypeError(
        f"training_config is a {type(config).__name__}: {cls.__name__} takes a "
        f"{cls.config_type.__name__}"
      )
    return config

  def _read(self, batch: Any) -> Any:
    """The batch as checked token rows."""
    raise NotImplementedError

  def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Any:
    """Not offered: the loss is a setting.

    Raises:
      TypeError: always.
    """
    del loss_fn, has_aux
    raise TypeError(
      f"{type(self).__name__} has its loss from its config: of pairs, "
      "PreferenceConfig(loss=f) takes any function of PairScores; PeftTrainer trains "
      "every other loss"
    )

  def with_gen_model_input_fn(self, fn: Callable[[Any], Any]) -> Any:
    """Not offered: map the records before training.

    Raises:
      TypeError: always.
    """
    del fn
    raise TypeError(
      f"{type(self).__name__} reads its batches itself: map them before train(), for "
      "example with process_dpo_record"
    )

  def train_step(self, batch: Any, *unexpected: Any) -> jax.Array:
    """See PeftTrainer; the batch may be text."""
    given = not unexpected and not isinstance(batch, nnx.Module)
    return super().train_step(self._read(batch) if given else batch, *unexpected)

  def lower_train_step(self, batch: Any) -> jax.stages.Lowered:
    """See PeftTrainer; the batch may be text."""
    return super().lower_train_step(self._read(batch))

  def _score(self, model: nnx.Module, batch: Any) -> Any:
    """What `_without_gradient` computes; traced."""
    raise NotImplementedError

  @functools.cached_property
  def _forward(self) -> Callable[..., Any]:
    skeleton = self._module.skeleton

    def forward(params, frozen, rest, batch):
      model = skeleton.merge(params, frozen, rest)
      model.eval()
      return self._score(model, batch)

    return jax.jit(forward)

  def _without_gradient(self, batch: Any) -> Any:
    """`_score` with the current weights and no dropout, left on the device."""
    module = self._module
    module.refresh()
    axes = self.training_config.data_sharding_axis
    placed = sharding_utils.shard_input(batch, axes)
    return self._forward(module.params, module.frozen, module.rest, placed)


def weigh(loss: PairLoss, weights: jax.Array) -> tuple[WeightedSum, dict[str, Any]]:
  """A loss by example as a step wants it: (sum and weight, means of the metrics)."""
  means = {name: weighted_sum(x, weights).mean() for name, x in loss.metrics.items()}
  return weighted_sum(loss.values, weights), means


def answer_rows(
  rows: Mapping[str, Any], answers: Sequence[str]
) -> tuple[Any, Any, Any, Any]:
  """(prompt ids, their mask, completion ids, their mask): one row an answer, those of
  a prompt one after the other."""
  width = max(rows[f"{name}_ids"].shape[1] for name in answers)

  def together(part: str) -> jax.Array:
    columns = [rows[f"{name}_{part}"] for name in answers]
    filled = [jnp.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in columns]
    return jnp.stack(filled, axis=1).reshape(-1, width)

  def prompt(part: str) -> jax.Array:
    return jnp.repeat(rows[f"prompt_{part}"], len(answers), axis=0)

  return prompt("ids"), prompt("mask"), together("ids"), together("mask")


def answer_logps(
  model: nnx.Module, rows: Mapping[str, Any], answers: Sequence[str], shared: bool
) -> jax.Array:
  """Log-probabilities [B, answers] of whole answers, in one forward pass.

  Args:
    model: the policy or the reference.
    rows: prompt_ids, prompt_mask, and ids and mask of every answer.
    answers: their names.
    shared: compute each prompt once.
  """
  scores = scoring.score_completions(
    model, *answer_rows(rows, answers), group_size=len(answers) if shared else 1
  )
  return jnp.sum(scores.logps, axis=1).reshape(-1, len(answers))


@functools.lru_cache(maxsize=16)
def logps_of(answers: tuple[str, ...], shared: bool) -> Callable[..., jax.Array]:
  """`answer_logps` for `inference`: one object a setting, so that it compiles once."""
  return lambda model, **rows: answer_logps(model, rows, answers, shared)
