"""A span: a phase with a name, a beginning, an end, and the phases inside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass
class Span:
  """One phase; times are seconds of the tracer's clock.

  Attributes:
    name: of the phase.
    begin: when it began.
    end: when it ended; None while it is open.
    inner: the phases inside it that have ended, in the order in which they did.
    devices: names of what it ran on, where that is known.
  """

  name: str
  begin: float
  end: float | None = None
  inner: list[Span] = dataclasses.field(default_factory=list)
  devices: tuple[str, ...] = ()

  @property
  def ended(self) -> bool:
    """Whether it is over."""
    return self.end is not None

  @property
  def duration(self) -> float:
    """Seconds.

    Raises:
      ValueError: it is still open.
    """
    if self.end is None:
      raise ValueError(f"the span {self.name!r} is open: it has no duration yet")
    return self.end - self.begin

  def below(self) -> Iterator[Span]:
    """Every span inside it, each before those that it holds."""
    for span in self.inner:
      yield span
      yield from span.below()

  def find_all(self, name: str) -> list[Span]:
    """The spans of a name inside it, at any depth."""
    return [span for span in self.below() if span.name == name]

  def __str__(self) -> str:
    """A line a span, indented, in milliseconds."""
    return "\n".join(self._lines(""))

  def _lines(self, indent: str) -> Iterator[str]:
    spent = f"{1e3 * self.duration:.3f} ms" if self.ended else "open"
    yield f"{indent}{self.name}: {spent}"
    for span in self.inner:
      yield from span._lines(indent + "  ")


# Users know a span that holds others by this name.
SpanGroup = Span


def busy_seconds(spans: list[Span]) -> float:
  """Seconds in which at least one of the spans was under way."""
  total, until = 0.0, float("-inf")
  for span in sorted(spans, key=lambda s: s.begin):
    end = span.begin + span.duration
    total += max(0.0, end - max(span.begin, until))
    until = max(until, end)
  return total
