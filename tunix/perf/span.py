"""Spans: named phases with a beginning, an end, and phases inside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass
class Span:
  """One phase of a run. Times are seconds of the tracer's clock.

  Attributes:
    name: name of the phase.
    begin: time of its beginning.
    end: time of its end; None while the phase is open.
    inner: ended phases inside it, in the order of their ends.
    devices: names of the devices that it ran on, such as "tpu:0"; empty if unknown.
  """

  name: str
  begin: float
  end: float | None = None
  inner: list[Span] = dataclasses.field(default_factory=list)
  devices: tuple[str, ...] = ()

  @property
  def ended(self) -> bool:
    """True if the phase has ended."""
    return self.end is not None

  @property
  def duration(self) -> float:
    """Seconds from beginning to end.

    Raises:
      ValueError: the span is still open.
    """
    if self.end is None:
      raise ValueError(f"span {self.name!r} is open: it has no duration yet")
    return self.end - self.begin

  def below(self) -> Iterator[Span]:
    """Yields every span inside this one, outer spans before inner ones."""
    for span in self.inner:
      yield span
      yield from span.below()

  def find_all(self, name: str) -> list[Span]:
    """Returns the spans called `name` inside this one, at any depth."""
    return [span for span in self.below() if span.name == name]

  def __str__(self) -> str:
    """Returns one indented line for each span, with its milliseconds."""
    return "\n".join(self._lines(""))

  def _lines(self, indent: str) -> Iterator[str]:
    spent = f"{1e3 * self.duration:.3f} ms" if self.ended else "open"
    yield f"{indent}{self.name}: {spent}"
    for span in self.inner:
      yield from span._lines(indent + "  ")


# Public name of a span that contains others.
SpanGroup = Span


def busy_seconds(spans: list[Span]) -> float:
  """Returns the seconds during which at least one of the spans was open."""
  total, until = 0.0, float("-inf")
  for span in sorted(spans, key=lambda s: s.begin):
    end = span.begin + span.duration
    total += max(0.0, end - max(span.begin, until))
    until = max(until, end)
  return total
