"""An environment as users of TRL write it; it knows nothing of tunix."""


class Counter:
  """A counter that must reach `goal`."""

  def __init__(self):
    self.value = 0

  def reset(self, goal=3, **columns) -> str | None:
    del columns
    self.value, self.goal = 0, goal
    return f" Reach {goal}."

  def increment(self, step: int) -> str:
    """Increments the counter.

    Args:
      step: how much to add.
    """
    self.value += step
    return f"value {self.value}"

  def get_reward(self) -> float:
    return float(self.value == self.goal)
