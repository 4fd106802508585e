"""Metrics in Prometheus's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tunix.utils import optional

_PREFIX = "tunix_"
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1200)

# Numbers of the engine that only grow; all others go up and down.
_COUNTERS = {
  *("engine_prompt_tokens", "engine_prefix_hit_tokens", "engine_prefilled_tokens"),
  *("engine_generated_tokens", "engine_preemptions", "engine_launches"),
  *("engine_rounds", "engine_draft_tokens", "engine_accepted_tokens"),
  *("engine_model_draft_tokens", "engine_model_accepted_tokens"),
  "router_retries",
}


class Metrics:
  """Counts of the server, and the engine's numbers when they are asked for.

  Args:
    gauges: returns numbers by name; called for each scrape.

  Raises:
    ImportError: the package prometheus-client is missing.
  """

  def __init__(self, gauges: Callable[[], Mapping[str, float]]):
    self._library: Any = optional.require(
      "prometheus_client", "the server's metrics", "tunix[serve]"
    )
    self._gauges = gauges
    self._registry = self._library.CollectorRegistry()
    self._registry.register(self)
    make = {"registry": self._registry}
    self._requests = self._library.Counter(
      f"{_PREFIX}http_requests", "Answers", ["route", "status"], **make
    )
    self._seconds = self._library.Histogram(
      f"{_PREFIX}http_request_seconds",
      "Time of a request",
      ["route"],
      buckets=_SECONDS,
      **make,
    )
    self._first = self._library.Histogram(
      f"{_PREFIX}first_token_seconds",
      "Time to the first token of a stream",
      buckets=_FIRST_TOKEN,
      **make,
    )

  def answered(self, route: str, status: int, seconds: float) -> None:
    """Counts an answer; the status 499 stands for a client that went away."""
    self._requests.labels(route, str(status)).inc()
    self._seconds.labels(route).observe(seconds)

  def first_token(self, seconds: float) -> None:
    """Counts the time to the first token of a stream."""
    self._first.observe(seconds)

  def text(self) -> bytes:
    """Returns all metrics as text."""
    return self._library.generate_latest(self._registry)

  @property
  def media_type(self) -> str:
    """Content type of `text`."""
    return self._library.CONTENT_TYPE_LATEST

  def describe(self) -> list[Any]:
    """Returns nothing: a registry would else collect once to learn the names."""
    return []

  def collect(self) -> Iterator[Any]:
    """Yields the engine's numbers; the registry calls it for each scrape."""
    core = optional.require(
      "prometheus_client.core", "the server's metrics", "tunix[serve]"
    )
    for name, value in self._gauges().items():
      counts = name in _COUNTERS
      family = core.CounterMetricFamily if counts else core.GaugeMetricFamily
      yield family(_PREFIX + name, name.replace("_", " "), value=value)
