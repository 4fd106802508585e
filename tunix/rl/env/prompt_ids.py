"""The ids of an episode's prompts, in memory that grows with the row.

Each prompt of a row begins with the prompt before it. The prompts are views of one
array, so a row of many turns costs as much memory as its last prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LEAST = 256  # ids of the smallest array


class PromptIds:
  """The prompt of the next action of an episode.

  Attributes:
    ids: int32 [T], a view that cannot be written. It keeps its values when the object
      goes on to the next prompt.
  """

  def __init__(self):
    self._memory = np.zeros(0, np.int32)
    self.ids = self._view(0)

  def follow(self, drawn: Sequence[int] | np.ndarray, prompt: Sequence[int]) -> bool:
    """Goes on to the next prompt.

    Args:
      drawn: ids of the action after the last prompt.
      prompt: ids of the next prompt.

    Returns: True if it begins with the last prompt and the action, as in one row.
    """
    new, known = np.array(prompt, np.int32), len(self.ids)
    start = known + len(drawn)
    goes_on = (
      known > 0
      and len(new) >= start
      and np.array_equal(new[:known], self.ids)
      and np.array_equal(new[known:start], drawn)
    )
    if not goes_on or len(new) > len(self._memory):
      # Twice as many: the sum over all arrays of a row stays below four last prompts.
      size = 2 * len(new) if goes_on else max(_LEAST, len(new))
      self._memory = np.zeros(size, np.int32)
      known = 0
    self._memory[known : len(new)] = new[known:]
    self.ids = self._view(len(new))
    return goes_on

  def _view(self, count: int) -> np.ndarray:
    view = self._memory[:count]
    view.flags.writeable = False
    return view
