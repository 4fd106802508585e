"""From a step's device scalars to logged metrics, a progress bar and a trace."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.ops.reductions import WeightedSum
from tunix.perf import flops
from tunix.perf.trace import NoopTracer
from tunix.sft.config import TrainingConfig
from tunix.sft.inflight_throttler import InflightThrottler
from tunix.sft.metrics_buffer import MetricsBuffer
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.profiler import Profiler
from tunix.sft.progress_bar import ProgressBar
from tunix.sft.train_step import StepMetrics, map_sums
from tunix.utils import tree

_log = logging.getLogger(__name__)

# What is worth watching, by metric; those of a job without it have none.
_WATCHED = {
  "loss": "loss",
  "rewards/score/mean": "reward",
  "rewards/margin": "margin",
  "rewards/accuracy": "accuracy",
}
_DETAILS = {
  "grad_norm": "grad_norm",
  "learning_rate": "lr",
  "tokens_per_sec": "tokens/s",
}


class StepReporter:
  """Everything that is told about steps; the trainer only hands values in.

  Args:
    logger: where metrics go.
    config: prefix, bar, profiler, steps in flight, learning rate.
    matmul_params: (all, trained) parameters that multiply every token.
    devices: gives the devices that the run computes on.
    tracer: whose metrics are logged with each step's.
  """

  def __init__(
    self,
    logger: MetricsLogger,
    config: TrainingConfig,
    matmul_params: tuple[int, int],
    devices: Callable[[], Sequence[Any]],
    tracer: NoopTracer,
  ):
    self.logger = logger
    self._config = config
    self._matmul_params = matmul_params
    self._devices = devices
    self._tracer = tracer
    self._warned = False
    self._compiled = False
    self._buffer = MetricsBuffer()
    self._throttler = InflightThrottler(config.max_inflight_computations)
    self._profiler: Profiler | None = None
    self._bar: ProgressBar | None = None
    self._clock: float | None = None
    self._tokens: dict[int, int] = {}

  @contextlib.contextmanager
  def step(self, done: int) -> Iterator[None]:
    """Around the dispatch of a step; `done` steps came before it. Waits while too many
    are in flight."""
    if self._profiler is None:
      config = self._config
      self._profiler = Profiler(done, config.max_steps, config.profiler_options)
    self._show(done)
    if self._clock is None:
      self._clock = time.perf_counter()
    with self._tracer.span_group("device_wait"):
      self._throttler.wait_for_next()
    self._profiler.maybe_activate(done)
    with jax.profiler.StepTraceAnnotation("train", step_num=done + 1):
      yield

  def _show(self, done: int) -> None:
    config = self._config
    if self._bar is None and config.pbar_description is not None:
      self._bar = ProgressBar(
        self.logger, done, config.max_steps, config.pbar_description
      )
      if not self._compiled:
        self._bar.say("compiling ...")
    self._compiled = True

  def put(
    self, step: int, metrics: StepMetrics, aux: Mapping[str, Any], tokens: int
  ) -> None:
    """Takes a dispatched step's scalars; logs those of the step before."""
    self._throttler.add_computation(metrics.loss)
    values = {"loss": metrics.loss, "grad_norm": metrics.grad_norm, **aux}
    if tokens:
      values["trained_tokens"] = metrics.weight
    rate = self._learning_rate(step, metrics)
    if rate is not None:
      values["learning_rate"] = rate
    self._tokens[step] = tokens
    self._buffer.put(step, values)
    if self._profiler is not None:
      self._profiler.maybe_deactivate(step, wait_for=metrics.loss)
    for ready in self._buffer.ready():
      self._log_step(*ready)

  def _learning_rate(self, step: int, metrics: StepMetrics) -> Any:
    rate = self._config.learning_rate
    if metrics.learning_rate is not None:
      return metrics.learning_rate
    return rate(step - 1) if callable(rate) else rate

  def _log_step(self, step: int, values: dict[str, float]) -> None:
    tokens, now = self._tokens.pop(step), time.perf_counter()
    seconds = now - (self._clock or now)
    self._clock = now
    self._warn_of_nan(step, values)
    values = _with_perplexity(values, tokens)
    if seconds > 0:
      values |= self._speeds(tokens, seconds)
    # As the seconds above: from the log of the step before to this one.
    self.log({**values, **self._tracer.export()}, Mode.TRAIN, step)
    if self._bar is not None:
      details = {say: values[name] for name, say in _DETAILS.items() if name in values}
      if (memory := values.get("device_memory_bytes")) is not None:
        details["GiB"] = memory / 2**30
      self._bar.update(1, self._watched(values), details)

  def _watched(self, values: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the step, and of the run that a role of RL belongs to."""
    shown = {}
    run, _, _ = self._config.metrics_prefix.rpartition("/")
    for name, say in _WATCHED.items():
      if name in values:
        shown[say] = values[name]
      elif self.logger.metric_exists(run, name, Mode.TRAIN):
        shown[say] = self.logger.get_last_metric(run, name, Mode.TRAIN)
    return shown

  def _warn_of_nan(self, step: int, values: Mapping[str, float]) -> None:
    if self._warned or math.isfinite(values["loss"]):
      return
    self._warned = True
    _log.warning(
      "the loss of step %d is %s: lower the learning rate, or look at the batch; every "
      "later step works on what this one left",
      step,
      values["loss"],
    )

  def _speeds(self, tokens: int, seconds: float) -> dict[str, float]:
    """Machine-dependent figures of a step."""
    out = {"step_time_sec": seconds, "steps_per_sec": 1 / seconds}
    if tokens:
      total, trained = self._matmul_params
      work = flops.train_flops(total, tokens, trained_matmul_params=trained)
      out["tokens_per_sec"] = tokens / seconds
      out["tflops_per_sec"] = work / seconds / 1e12
      if (share := flops.mfu(work, seconds, self._devices())) is not None:
        out["mfu"] = share
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_in_use" in stats:
      out["device_memory_bytes"] = float(stats["bytes_in_use"])
    return out

  def bound(self, result: WeightedSum) -> None:
    """Notes the result of an evaluation's batch; waits while too many are in flight."""
    self._throttler.add_computation(result.total)
    self._throttler.wait_for_next()

  def log(self, values: Mapping[str, float], mode: Mode, step: int) -> None:
    """Logs values by name."""
    for name, value in values.items():
      self.logger.log(self._config.metrics_prefix, name, value, mode, step)

  def eval_means(
    self,
    parts: Sequence[tuple[WeightedSum, Any]],
    post_process: Callable[[dict[str, Any]], dict[str, Any]],
    tokens: int,
  ) -> dict[str, float]:
    """Weighted means over the batches of an evaluation.

    Args:
      parts: (loss, aux with a WeightedSum at every leaf) of each batch.
      post_process: means of aux -> metrics by name.
      tokens: in all batches, padding included; 0 when they hold none.

    Raises:
      ValueError: there was no batch, or nothing in them had weight.
    """
    if not parts:
      raise ValueError(
        "the evaluation data gave no batch: pass something that can be iterated anew "
        "for every evaluation (a list, a Grain dataset), not a spent generator"
      )
    # In float64: the sums of many batches come home exact, whatever their number.
    home = jax.tree.map(lambda x: np.asarray(x, np.float64), list(parts))
    loss, aux = jax.tree.map(lambda *xs: sum(xs), *home)
    if not loss.weight:
      raise ValueError(
        "nothing in the evaluation data is trained: every mask is zero; look at a "
        "batch with `tunix data show`"
      )
    extra = post_process(map_sums(_mean_on_host, aux))
    values = {
      "loss": _mean_on_host(loss),
      **{name: float(value) for name, value in extra.items()},
    }
    self._clock = None  # the time of an evaluation is no step's
    return _with_perplexity(values, tokens)

  def flush(self) -> None:
    """Logs every step that was dispatched; waits for the device."""
    self._throttler.wait_for_all()
    for ready in self._buffer.drain():
      self._log_step(*ready)
    self._clock = None

  def state(self) -> dict[str, Any]:
    """The logger's place, as JSON, with every dispatched step in it."""
    self.flush()
    return self.logger.state()

  def restore(self, state: dict[str, Any] | None) -> None:
    """Takes back what was logged after `state`, and what is still to be logged; see
    MetricsLogger.restore."""
    self.flush()
    self.logger.restore(state)

  def end(self) -> None:
    """Everything is logged and in its files; logging may go on."""
    self.flush()
    self.stop()
    self.logger.flush()

  def close(self) -> None:
    """Logs what is left and closes the backends."""
    self.end()
    self.logger.close()

  def stop(self) -> None:
    """Ends the bar and the profile; what was dispatched stays to be logged."""
    self._tracer.synchronize()
    if self._profiler is not None:
      self._profiler.close()
    if self._bar is not None:
      self._bar.close()
      self._bar = None


def _mean_on_host(x: WeightedSum) -> float:
  """Its mean in float64, which JAX would round to float32."""
  return float(x.total / x.weight) if x.weight else 0.0


def _with_perplexity(values: dict[str, float], tokens: int) -> dict[str, float]:
  """Adds perplexity beside a loss that is a mean over tokens."""
  if not tokens:
    return values
  loss = values["loss"]
  perplexity = math.exp(loss) if loss < 700 else math.inf
  return {"loss": loss, "perplexity": perplexity, **values}


def matmul_params(
  params: Any, frozen: Any, experts_share: float = 1.0
) -> tuple[int, int]:
  """(all, trained) parameters in matrices that a token meets; an embedding table counts
  when it is also the output head, and of experts `experts_share` (moe.active_share)."""
  everything = {**tree.flatten(frozen), **tree.flatten(params)}
  has_head = any("lm_head" in name for name in everything)

  def count(arrays):
    numbers = {
      name: _numbers(name, x)
      for name, x in arrays.items()
      if x.ndim >= 2 and not (has_head and name.endswith("embedding"))
    }
    experts = sum(n for name, n in numbers.items() if ".experts." in name)
    return sum(numbers.values()) - round(experts * (1 - experts_share))

  return count(everything), count(tree.flatten(params))


def _numbers(name: str, x: Any) -> int:
  """Numbers of the matrix that an array stands for: of a quantised kernel the codes
  do, two in a byte when they have 4 bits (uint8; 8-bit ones are int8)."""
  if name.endswith("kernel.scales"):
    return 0
  return 2 * x.size if name.endswith("kernel.codes") and x.dtype == "uint8" else x.size
