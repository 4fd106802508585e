"""Estimates of the FLOPs of a training step; these functions never raise."""

from __future__ import annotations

import logging
from typing import Any

from flax import nnx

from tunix.perf import flops, hlo_flops

_log = logging.getLogger(__name__)


def measure_tflops_per_step(
  train_step_fn: Any, model: nnx.Module, optimizer: object, train_example: Any
) -> float | None:
  """Measures the TFLOPs of one training step on all devices, without running it.

  The step is lowered, not compiled, and the matrix products and convolutions of the
  program are counted. XLA's cost analysis counts the body of a loop once, and so counts
  scanned layers as one layer. This function multiplies a body by the number of its
  iterations, which it reads from the loop's constants (`lax.scan`, `lax.fori_loop`).
  Recomputation counts; hand-written kernels (Pallas, cuDNN) do not. For such kernels,
  and for MFU, use `perf.flops.train_flops`.

  Args:
    train_step_fn: a jitted function of the three other arguments. Use `nnx.jit` if it
      changes a module: under `jax.jit` the changes are lost. A function under `jax.jit`
      is counted as under `nnx.jit`, with a warning.
    model: its first argument.
    optimizer: its second argument.
    train_example: its third argument, a batch.

  Returns:
    FLOPs / 1e12; None, with a warning in the log, if they cannot be measured.
  """
  if not hasattr(train_step_fn, "lower"):
    _log.warning(
      "cannot measure FLOPs of %r: it has no .lower(), wrap it in jax.jit or nnx.jit",
      train_step_fn,
    )
    return None
  example = (model, optimizer, train_example)
  try:
    counted = hlo_flops.count_flops(train_step_fn.lower(*example))
    if (jitted := _with_mutations_kept(train_step_fn, model)) is not None:
      as_given, counted = counted, hlo_flops.count_flops(jitted.lower(*example))
      if counted.flops > as_given.flops:
        _log.warning(
          "jax.jit drops the step's changes of the model, and XLA does not compute "
          "them: the given step does %.1f %% of the reported work. Wrap it in nnx.jit, "
          "which keeps the changes",
          100 * as_given.flops / counted.flops,
        )
  except Exception as error:  # a user's function can raise any error
    _log.warning("cannot measure FLOPs: %s: %s", type(error).__name__, error)
    return None
  if counted.unknown_loops:
    _log.warning(
      "%d loops have a number of iterations that depends on data: each counts once",
      counted.unknown_loops,
    )
  return counted.flops / 1e12


def _with_mutations_kept(step: object, model: nnx.Module) -> Any:
  """Returns a function of `jax.jit` under `nnx.jit`; None for other functions."""
  function: Any = getattr(step, "__wrapped__", None)
  if function is None or not isinstance(model, nnx.Module):
    return None
  jitted = nnx.jit(function)
  return None if isinstance(step, type(jitted)) else jitted


def approximate_tflops_per_second(
  total_model_params: int, global_batch_size: int, step_time_delta: float
) -> float:
  """Returns 6 * parameters * tokens / seconds / 1e12, the TFLOP/s of all devices.

  Args:
    total_model_params: number of trained parameters.
    global_batch_size: number of TOKENS of a step, over all devices.
    step_time_delta: seconds of the step.

  Returns:
    TFLOP/s; 0.0, with a warning in the log, unless all three are positive.
  """
  if total_model_params <= 0 or global_batch_size <= 0 or step_time_delta <= 0:
    _log.warning(
      "cannot compute TFLOP/s of %s parameters, %s tokens and %s seconds: all must be "
      "positive",
      total_model_params,
      global_batch_size,
      step_time_delta,
    )
    return 0.0
  total = flops.train_flops(total_model_params, global_batch_size)
  return total / step_time_delta / 1e12
