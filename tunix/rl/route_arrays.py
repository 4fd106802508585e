"""Recorded routes of rollouts as padded arrays; see transformer/route_records.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Fields of `Rollouts` and `TrainExample`, and arguments of `scoring`.
NAMES = ("prompt_routes", "completion_routes")


def padded(
  routes: Sequence[np.ndarray | None] | None,
  prompts: Sequence[np.ndarray],
  width: int,
  space: int,
) -> dict[str, Any]:
  """Returns the arrays `NAMES` of rows; {} if nothing was recorded.

  Args:
    routes: experts of the tokens of each row, [T + n, M, k]; None for a row without.
    prompts: ids of each row's prompt.
    width, space: tokens of a padded prompt, and of a padded completion.
  """
  recorded = [x for x in routes or () if x is not None]
  if not recorded:
    return {}
  form, kind = recorded[0].shape[1:], recorded[0].dtype
  out = [np.zeros((len(prompts), size, *form), kind) for size in (width, space)]
  for row, (x, prompt) in enumerate(zip(routes or (), prompts)):
    if x is not None:
      before, after = x[: len(prompt)], x[len(prompt) :]
      out[0][row, width - len(before) :] = before
      out[1][row, : len(after)] = after
  return dict(zip(NAMES, out))
