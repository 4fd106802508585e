"""Checks of a trainer's arguments, with errors that name the right call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from tunix.perf.trace import NoopTracer, make_tracer
from tunix.sft.config import TrainingConfig
from tunix.sft.steps import shared_steps
from tunix.utils import checks

Optimizer = optax.GradientTransformation | nnx.Optimizer

# Metrics that the trainer itself reports.
_RESERVED_METRICS = {"loss", "grad_norm"}


def check_kinds(model: object, config: object) -> None:
  """Refuses a model and a config of the wrong type.

  Raises:
    TypeError: `model` is no nnx.Module, or `config` is no TrainingConfig.
  """
  if isinstance(model, TrainingConfig) or not isinstance(model, nnx.Module):
    raise TypeError(
      f"the first argument is {checks.type_of(model)}; expected an nnx.Module. Call "
      "PeftTrainer(model, optimizer, training_config)."
    )
  if not isinstance(config, TrainingConfig):
    raise TypeError(
      f"training_config is {checks.type_of(config)}; expected a TrainingConfig. Call "
      "PeftTrainer(model, optimizer, training_config)."
    )


def resolve_optimizer(
  optimizer: Optimizer | None, config: TrainingConfig
) -> optax.GradientTransformation:
  """Returns the optax transformation of a trainer.

  Args:
    optimizer: an optax transformation, an unused nnx.Optimizer, or None for AdamW with
      the config's learning rate.
    config: the trainer's settings.

  Raises:
    TypeError: `optimizer` is of another kind.
    ValueError: There is neither an optimizer nor a learning rate; or the nnx.Optimizer
      has made updates.
  """
  if optimizer is None:
    if config.learning_rate is None:
      raise ValueError(
        "no optimizer: pass an optax transformation, or set learning_rate= in the "
        "config for AdamW"
      )
    return _adamw(config.learning_rate)
  if isinstance(optimizer, nnx.Optimizer):
    if int(optimizer.step[...]):
      raise ValueError(
        f"the nnx.Optimizer has made {int(optimizer.step[...])} updates, whose state "
        "would be lost. Pass the optax transformation itself."
      )
    return optimizer.tx
  if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
    raise TypeError(
      f"optimizer is {checks.type_of(optimizer)}; expected an optax transformation "
      "such as optax.adamw(1e-5)"
    )
  return optimizer


@functools.lru_cache(maxsize=shared_steps.MOST)
def _adamw(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
  """Returns one object for equal rates, so that trainers can share compiled steps."""
  return optax.adamw(learning_rate)


def resolve_tracer(tracer: NoopTracer | None, config: TrainingConfig) -> NoopTracer:
  """Returns the tracer of a trainer: the given one, or one made from the config.

  Raises:
    TypeError: `tracer` is no tracer.
    ValueError: A tracer is given, and the config describes another one.
  """
  if tracer is None:
    return make_tracer(config.perf_metrics_options, config.log_dir)
  if not isinstance(tracer, NoopTracer):
    raise TypeError(
      f"perf_tracer is {checks.type_of(tracer)}; expected a PerfTracer or a "
      "NoopTracer of tunix.perf.trace"
    )
  if config.perf_metrics_options is not None:
    raise ValueError(
      "perf_tracer and perf_metrics_options are both set. Leave one of them out."
    )
  return tracer


def named_metrics(aux: object) -> dict[str, Any]:
  """Checks the metrics of a loss or of a subclass.

  Args:
    aux: a dict of scalars by name, or None.

  Returns: the dict; {} for None.

  Raises:
    TypeError: `aux` is no dict, or a value is no scalar.
    ValueError: A name belongs to a metric of the trainer.
  """
  if aux is None:
    return {}
  if not isinstance(aux, dict):
    raise TypeError(
      f"the loss's aux is {checks.type_of(aux)}; expected a dict of scalars by name. "
      "Return one, or make one in _post_process_train_step and _post_process_eval_step."
    )
  if taken := sorted(_RESERVED_METRICS & aux.keys()):
    raise ValueError(
      f"the loss's aux has {taken[0]!r}, a name of the trainer's own metric. Rename it."
    )
  for name, value in aux.items():
    if not jax.tree_util.all_leaves([value]) or np.size(value) != 1:
      raise TypeError(
        f"{name!r} in the loss's aux is {checks.type_of(value)} of shape "
        f"{np.shape(value)}; expected a scalar. Return one, or make one in "
        "_post_process_train_step and _post_process_eval_step."
      )
  return aux
