"""A clock that goes as it is told."""


class Clock:
  """Seconds, from 0; `clock.now += 1.5` lets time pass."""

  def __init__(self):
    self.now = 0.0

  def __call__(self) -> float:
    return self.now
