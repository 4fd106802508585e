"""How much a training step computes, and how fast. Nothing here raises."""

from __future__ import annotations

import logging
from typing import Any

from flax import nnx

from tunix.perf import flops, hlo_flops

_log = logging.getLogger(__name__)


def measure_tflops_per_step(
  train_step_fn: Any, model: Any, optimizer: Any, train_example: Any
) -> float | None:
  """TFLOPs of one training step, on all devices together, without running it.

  Lowers (and does not compile) the step and adds up the matrix products and
  convolutions of the program. XLA's cost analysis counts the body of a loop once,
  which makes scanned layers look like one; here a body counts as often as its loop
  runs, read from the loop's constants (`lax.scan`, `lax.fori_loop`). Recomputation
  counts, hand-written kernels (Pallas, cuDNN) do not: for them and for MFU
  use `perf.flops.train_flops`.

  Args:
    train_step_fn: a jitted function of the three other arguments; `nnx.jit` where it
      changes a module. Under `jax.jit` such changes are lost: it is counted as under
      `nnx.jit`, and a warning says so.
    model: its first argument.
    optimizer: its second argument.
    train_example: its third argument, a batch.

  Returns:
    FLOPs / 1e12; None, with a warning in the log, where that cannot be told.
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
    if (kept := _with_mutations_kept(train_step_fn, model)) is not None:
      as_given, counted = counted, hlo_flops.count_flops(kept.lower(*example))
      if counted.flops > as_given.flops:
        _log.warning(
          "jax.jit drops what the step changes in the model, and XLA computes none of "
          "it: the step as given does %.1f %% of the work that is reported here. Wrap "
          "it in nnx.jit, which keeps the changes",
          100 * as_given.flops / counted.flops,
        )
  except Exception as error:  # a user's function may raise anything; runs go on
    _log.warning("cannot measure FLOPs: %s: %s", type(error).__name__, error)
    return None
  if counted.unknown_loops:
    _log.warning(
      "%d loops run for a number of times that depends on data: counted once",
      counted.unknown_loops,
    )
  return counted.flops / 1e12


def _with_mutations_kept(step: Any, model: Any) -> Any:
  """The function below `jax.jit` under `nnx.jit`; None where they are the same."""
  function: Any = getattr(step, "__wrapped__", None)
  if function is None or not isinstance(model, nnx.Module):
    return None
  kept = nnx.jit(function)
  return None if isinstance(step, type(kept)) else kept


def approximate_tflops_per_second(
  total_model_params: int, global_batch_size: int, step_time_delta: float
) -> float:
  """6 * parameters * tokens / seconds / 1e12, over all devices together.

  Args:
    total_model_params: trained parameters.
    global_batch_size: TOKENS of a step, over all devices.
    step_time_delta: seconds of the step.

  Returns:
    TFLOP/s; 0.0, with a warning in the log, unless all three are positive.
  """
  if total_model_params <= 0 or global_batch_size <= 0 or step_time_delta <= 0:
    _log.warning(
      "cannot tell TFLOP/s from %s parameters, %s tokens and %s seconds: all must be "
      "positive",
      total_model_params,
      global_batch_size,
      step_time_delta,
    )
    return 0.0
  total = flops.train_flops(total_model_params, global_batch_size)
  return total / step_time_delta / 1e12
