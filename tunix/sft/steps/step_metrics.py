"""Reports each step: logged metrics, the progress bar and the profiler's trace."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.ops.reductions import WeightedSum
from tunix.perf import flops
from tunix.perf.trace import NoopTracer
from tunix.sft.config import TrainingConfig
from tunix.sft.metrics.buffer import MetricsBuffer
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.profiler import Profiler
from tunix.sft.progress_bar import ProgressBar
from tunix.sft.steps.inflight_throttler import InflightThrottler
from tunix.sft.steps.train_step import StepMetrics, map_sums
from tunix.utils import tree
from tunix.utils.metric import SAME, Metric

_log = logging.getLogger(__name__)

_OF_TOKENS = "in supervised fine-tuning on tokens"
METRICS = (
  Metric("loss", "of the loss", "value that the job minimizes", known_as=SAME),
  Metric("perplexity", "1", "exp(loss)", "train, eval", _OF_TOKENS, SAME),
  Metric("grad_norm", "1", "norm of the gradient, before clipping", "train", "", SAME),
  Metric(
    "learning_rate",
    "1",
    "learning rate of the update",
    "train",
    "if the settings or `optax.inject_hyperparams` show it",
    SAME,
  ),
  Metric(
    "trained_tokens", "tokens", "tokens that count in the loss", "train", _OF_TOKENS
  ),
  Metric(
    "step_time_sec",
    "s",
    "time since the step before was logged, without evaluations",
    "train",
    known_as=SAME,
  ),
  Metric("steps_per_sec", "1/s", "1 / step_time_sec", "train", known_as=SAME),
  Metric(
    "tokens_per_sec",
    "tokens/s",
    "tokens of the global batch, padding included, by step_time_sec",
    "train",
    _OF_TOKENS,
  ),
  Metric(
    "tflops_per_sec",
    "TFLOP/s",
    "work of the model's matrix products by formula, on all devices",
    "train",
    _OF_TOKENS,
  ),
  Metric(
    "mfu",
    "share",
    "tflops_per_sec by the published peak of all devices",
    "train",
    "if the peak of the device is known (TPUs and several GPUs)",
  ),
  Metric(
    "device_memory_bytes",
    "bytes",
    "memory in use on the first local device when the step is logged",
    "train",
    "if the device reports its memory (not on CPUs)",
  ),
)

# Metrics that the progress bar shows, with their labels. A metric that the job does not
# log is left out.
_WATCHED = {
  "loss": "loss",
  "rewards/score/mean": "reward",
  "rewards/margin": "margin",
  "rewards/accuracy": "accuracy",
}
# Further metrics for progress as lines of text.
_DETAILS = {
  "grad_norm": "grad_norm",
  "learning_rate": "lr",
  "tokens_per_sec": "tokens/s",
}


class StepReporter:
  """Reports the steps of a trainer, and limits the number of steps in flight.

  Args:
    logger: receives the metrics.
    config: settings of the metrics' prefix, the progress bar, the profiler, the steps
      in flight and the learning rate.
    matmul_params: (all, trained) numbers of parameters that multiply every token.
    devices: function that returns the devices of the run.
    tracer: its metrics are logged with those of each step.
    check_weights: raises an error if a weight is not finite. It is called after a step
      with a loss or a gradient that is not finite.
  """

  def __init__(
    self,
    logger: MetricsLogger,
    config: TrainingConfig,
    matmul_params: tuple[int, int],
    devices: Callable[[], Sequence[Any]],
    tracer: NoopTracer,
    check_weights: Callable[[], None] = lambda: None,
  ):
    self.logger = logger
    self._config = config
    self._matmul_params = matmul_params
    self._devices = devices
    self._tracer = tracer
    self._check_weights = check_weights
    self._has_warned = False
    self._programs: set[Hashable] = set()  # that steps ran before
    # Metrics of the run that belong to no trainer, such as the rewards of RL. The bar
    # shows them beside the metrics of each step.
    self.run_values: Mapping[str, float] = {}
    self._buffer = MetricsBuffer()
    self._throttler = InflightThrottler(config.max_inflight_computations)
    self._profiler: Profiler | None = None
    self._bar: ProgressBar | None = None
    # The time of the last logged step; None after a pause that is no step's time.
    self._clock: float | None = None
    self._tokens: dict[int, int] = {}

  @contextlib.contextmanager
  def step(self, done: int, program: Hashable = None) -> Iterator[None]:
    """Surrounds the dispatch of a step; first waits while too many are in flight.

    Args:
      done: number of steps before this one.
      program: stands for the program of the step; a new one is compiled.
    """
    if self._profiler is None:
      config = self._config
      self._profiler = Profiler(done, config.max_steps, config.profiler_options)
    self.phase("" if program in self._programs else "compiling", done)
    self._programs.add(program)
    if self._clock is None:
      self._clock = time.perf_counter()
    with self._tracer.span_group("device_wait"):
      self._throttler.wait_for_next()
    self._profiler.maybe_activate(done)
    with jax.profiler.StepTraceAnnotation("train", step_num=done + 1):
      yield

  def phase(self, name: str, step: int, done: int = 0, total: int = 0) -> None:
    """Shows a phase after `step` steps on the bar; see `ProgressBar.phase`."""
    config = self._config
    if (title := config.pbar_description) is not None:
      self._bar = self._bar or ProgressBar(self.logger, step, config.max_steps, title)
      self._bar.phase(name, done, total)

  def counted(self, batches: Iterable[Any], step: int) -> Iterator[Any]:
    """Yields the batches of an evaluation, and shows their number on the bar."""
    total = _number_of(batches)
    for number, batch in enumerate(batches):
      self.phase("evaluating", step, number, total)
      yield batch

  def put(
    self, step: int, metrics: StepMetrics, aux: Mapping[str, Any], tokens: int
  ) -> None:
    """Takes a dispatched step's scalars, and logs those of the step before it.

    Args:
      step: number of the step, the first is 1.
      metrics: scalars of every step.
      aux: further scalars of the loss, by name.
      tokens: tokens of the global batch, padding included; 0 if it has no tokens.
    """
    self._throttler.add_computation(metrics.loss)
    values = {"loss": metrics.loss, "grad_norm": metrics.grad_norm, **aux}
    if tokens:
      values["trained_tokens"] = metrics.weight
    rate = self._learning_rate(step, metrics)
    if rate is not None:
      values["learning_rate"] = rate
    self._tokens[step] = tokens
    if self._profiler is not None:
      self._profiler.maybe_deactivate(step, wait_for=metrics.loss)
    for before in self._buffer.put(step, values):
      self._log_step(*before)

  def _learning_rate(self, step: int, metrics: StepMetrics) -> Any:
    rate = self._config.learning_rate
    if metrics.learning_rate is not None:
      return metrics.learning_rate
    return rate(step - 1) if callable(rate) else rate

  def _log_step(self, step: int, values: dict[str, float]) -> None:
    tokens, now = self._tokens.pop(step), time.perf_counter()
    seconds = now - (self._clock or now)
    self._clock = now
    values = _with_perplexity(values, tokens)
    if seconds > 0:
      values |= self._speeds(tokens, seconds)
    # Its figures, like `seconds`, cover the time since the step before was logged.
    self.log({**values, **self._tracer.export()}, Mode.TRAIN, step)
    if self._bar is not None:
      details = {
        label: values[name] for name, label in _DETAILS.items() if name in values
      }
      if (memory := values.get("device_memory_bytes")) is not None:
        details["GiB"] = memory / 2**30
      self._bar.update(1, self._watched(values), details)
    self._check_finite(step, values)

  def _watched(self, values: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics for the bar by label."""
    metrics = {**self.run_values, **values}
    return {label: metrics[name] for name, label in _WATCHED.items() if name in metrics}

  @property
  def had_no_gradient(self) -> bool:
    """True if the gradient was 0 in every logged step of the run."""
    where = self._config.metrics_prefix, "grad_norm", Mode.TRAIN
    # A mean of norms is 0 if all of them are. It includes the steps before a resume.
    logger = self.logger
    return logger.metric_exists(*where) and logger.get_metric(*where) == 0

  def _check_finite(self, step: int, values: Mapping[str, float]) -> None:
    bad = [x for x in ("loss", "grad_norm") if not math.isfinite(values[x])]
    if bad and not self._has_warned:
      self._has_warned = True
      _log.warning(
        "the %s of step %d is %s: lower the learning rate, or look at the batch",
        *(bad[0], step, values[bad[0]]),
      )
    if bad:  # an optimizer may skip such a gradient (`optax.apply_if_finite`)
      self._check_weights()

  def _speeds(self, tokens: int, seconds: float) -> dict[str, float]:
    """Returns the figures of a step that depend on the machine."""
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
    """Adds an evaluation's batch to the computations in flight, and waits for room."""
    self._throttler.add_computation(result.total)
    self._throttler.wait_for_next()

  def log(self, values: Mapping[str, float], mode: Mode, step: int) -> None:
    """Logs values by name under the config's prefix."""
    for name, value in values.items():
      self.logger.log(self._config.metrics_prefix, name, value, mode, step)

  def eval_means(
    self,
    parts: Sequence[tuple[WeightedSum, Any]],
    post_process: Callable[[dict[str, Any]], dict[str, Any]],
    tokens: int,
  ) -> dict[str, float]:
    """Returns the weighted means over the batches of an evaluation.

    Args:
      parts: (loss, aux with a WeightedSum at every leaf) of each batch.
      post_process: function from the means of aux to metrics by name.
      tokens: tokens of all batches, padding included; 0 if they have no tokens.

    Raises:
      ValueError: There was no batch, or all weights are 0.
    """
    if not parts:
      raise ValueError(
        "the evaluation data has no batch. Pass a dataset that can be iterated again "
        "for each evaluation (a list, a Grain dataset), not a generator."
      )
    # In float64, because a float32 sum over many batches would lose small terms.
    home = jax.tree.map(lambda x: np.asarray(x, np.float64), list(parts))
    loss, aux = jax.tree.map(lambda *xs: sum(xs), *home)
    if not loss.weight:
      raise ValueError(
        "the evaluation data has no trained token: every mask is zero. Look at a batch "
        "with `tunix data show`."
      )
    extra = post_process(map_sums(_mean_on_host, aux))
    values = {
      "loss": _mean_on_host(loss),
      **{name: float(value) for name, value in extra.items()},
    }
    self._clock = None  # the evaluation's time belongs to no step
    return _with_perplexity(values, tokens)

  def flush(self) -> None:
    """Waits for the device and logs every dispatched step."""
    self._throttler.wait_for_all()
    for ready in self._buffer.drain():
      self._log_step(*ready)
    self._clock = None

  def state(self) -> dict[str, Any]:
    """Logs every dispatched step; returns the logger's state as JSON."""
    self.flush()
    return self.logger.state()

  def restore(self, state: dict[str, Any] | None) -> None:
    """Returns the logger to a `state()`, and drops all later values.

    See MetricsLogger.restore.
    """
    self.flush()
    self.logger.restore(state)

  def end(self) -> None:
    """Logs every dispatched step and flushes the backends; logging can continue."""
    self.flush()
    self.stop()
    self.logger.flush()

  def close(self) -> None:
    """Logs every dispatched step and closes the backends."""
    self.end()
    self.logger.close()

  def stop(self) -> None:
    """Ends the progress bar and the profile; dispatched steps are logged later."""
    self._tracer.synchronize()
    if self._profiler is not None:
      self._profiler.close()
    if self._bar is not None:
      self._bar.close()
      self._bar = None


def _number_of(batches: Iterable[Any]) -> int:
  """Returns the number of batches for the bar; 0 if it is unknown or endless."""
  try:
    number = operator.length_hint(batches)
  except (NotImplementedError, OverflowError, ValueError):
    return 0  # the bar alone needs the number
  return number if number < 2**31 else 0  # libraries write sys.maxsize for endless


def _mean_on_host(x: WeightedSum) -> float:
  """Returns the mean in float64, which JAX would round to float32."""
  return float(x.total / x.weight) if x.weight else 0.0


def _with_perplexity(values: dict[str, float], tokens: int) -> dict[str, float]:
  """Adds the perplexity if the loss is a mean over tokens."""
  if not tokens:
    return values
  loss = values["loss"]
  perplexity = math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
  return {"loss": loss, "perplexity": perplexity, **values}


def matmul_params(
  params: object, frozen: object, experts_share: float = 1.0
) -> tuple[int, int]:
  """Counts the parameters of the matrices that multiply every token.

  An embedding table counts only if it is also the output head.

  Args:
    params: trained arrays.
    frozen: the other parameters.
    experts_share: share of the experts that a token uses (moe.active_share).

  Returns: (all, trained) numbers of parameters.
  """
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
  """Returns the number of weights that an array stores.

  A quantized kernel is stored as codes and scales; only the codes count. 4-bit codes
  are two in a byte (dtype uint8), 8-bit codes have the dtype int8.
  """
  if name.endswith("kernel.scales"):
    return 0
  return 2 * x.size if name.endswith("kernel.codes") and x.dtype == "uint8" else x.size
