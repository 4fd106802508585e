"""What a trainer is called with: refused early, with the call that was meant."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from tunix.perf.trace import NoopTracer, make_tracer
from tunix.sft.config import TrainingConfig

_OWN_METRICS = {"loss", "grad_norm"}


def check_kinds(model: Any, config: Any) -> None:
  """Refuses arguments of the wrong kind with the call that was meant.

  Raises:
    TypeError: `model` is no module, or `config` no TrainingConfig.
  """
  if isinstance(model, TrainingConfig) or not isinstance(model, nnx.Module):
    raise TypeError(
      f"the first argument is a {type(model).__name__}, expected an nnx.Module: "
      "PeftTrainer(model, optimizer, training_config)"
    )
  if not isinstance(config, TrainingConfig):
    raise TypeError(
      f"training_config is a {type(config).__name__}, expected a TrainingConfig: "
      "PeftTrainer(model, optimizer, training_config)"
    )


def resolve_optimizer(
  optimizer: Any, config: TrainingConfig
) -> optax.GradientTransformation:
  """The optax transformation to use; AdamW at the config's rate when none is given.

  Raises:
    TypeError: it is no optimizer.
    ValueError: there is none and no rate, or an nnx.Optimizer has been used already.
  """
  if optimizer is None:
    if config.learning_rate is None:
      raise ValueError(
        "no optimizer: pass an optax transformation, or learning_rate= in the config "
        "for AdamW"
      )
    return optax.adamw(config.learning_rate)
  if isinstance(optimizer, nnx.Optimizer):
    if int(optimizer.step[...]):
      raise ValueError(
        f"the nnx.Optimizer has done {int(optimizer.step[...])} updates, whose state "
        "would be lost: pass the optax transformation itself"
      )
    return optimizer.tx
  if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
    raise TypeError(
      f"optimizer is a {type(optimizer).__name__}, expected an optax transformation "
      "such as optax.adamw(1e-5)"
    )
  return optimizer


def resolve_tracer(tracer: Any, config: TrainingConfig) -> NoopTracer:
  """The tracer to use; what the config asks for when none is given.

  Raises:
    TypeError: it is no tracer.
    ValueError: the config asks for another one.
  """
  if tracer is None:
    return make_tracer(config.perf_metrics_options, config.log_dir)
  if not isinstance(tracer, NoopTracer):
    raise TypeError(
      f"perf_tracer is a {type(tracer).__name__}: expected a PerfTracer or a "
      "NoopTracer of tunix.perf.trace"
    )
  if config.perf_metrics_options is not None:
    raise ValueError(
      "perf_tracer and perf_metrics_options both say how to trace: leave one out"
    )
  return tracer


def named_metrics(aux: Any) -> dict[str, Any]:
  """Metrics by name, as a loss or a subclass gave them.

  Raises:
    TypeError: they are no dict, or one of them is no scalar.
    ValueError: one has a name that the trainer needs.
  """
  if aux is None:
    return {}
  if not isinstance(aux, dict):
    raise TypeError(
      f"the loss's aux is a {type(aux).__name__}: it must be a dict of scalars by "
      "name, or be made into one by _post_process_train_step and "
      "_post_process_eval_step"
    )
  if taken := sorted(_OWN_METRICS & aux.keys()):
    raise ValueError(
      f"the loss's aux has {taken[0]!r}, a name of the trainer's own metric: rename it"
    )
  for name, value in aux.items():
    if not jax.tree_util.all_leaves([value]) or np.size(value) != 1:
      raise TypeError(
        f"{name!r} in the loss's aux is a {type(value).__name__} of shape "
        f"{np.shape(value)}: give a scalar, or make one of it in "
        "_post_process_train_step and _post_process_eval_step"
      )
  return aux
