"""The arrays of `Rollouts` that are padded rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunix.generate.sizes import batching
from tunix.generate.tokens import Tokens, padded

# By column of `Tokens`: the array of the prompts' tokens, if they have it, and that of
# the completions' tokens.
_ARRAYS: dict[str, tuple[str | None, str]] = {
  "ids": (None, "completion_ids"),
  "is_drawn": (None, "completion_mask"),
  "sampling_logps": (None, "rollout_logps"),
  "versions": (None, "versions"),
  "rewards": (None, "turn_rewards"),
  "head_ids": (None, "head_ids"),
  "head_probs": (None, "head_probs"),
  "routes": ("prompt_routes", "completion_routes"),
}
ROUTES = ("prompt_routes", "completion_routes")
# What an example has under the same names.
RECORDED = (*ROUTES, "head_ids", "head_probs")
PROMPTS = ("prompt_ids", "prompt_mask", *(x for x, _ in _ARRAYS.values() if x))
NAMES = (*PROMPTS, *(x for _, x in _ARRAYS.values()))


def of(rows: Sequence[Tokens], width: int, space: int) -> dict[str, Any]:
  """Returns the arrays of rows by name; those that no row knows are missing.

  Args:
    rows: the rows.
    width, space: tokens of a padded prompt, and of a padded completion.
  """
  prompts = [row.prompt for row in rows]
  out: dict[str, Any] = dict(
    zip(PROMPTS, batching.left_padded(prompts, len(rows), width, 0))
  )
  # The mask is no `ids != 0`, because the padding id 0 can also be a token.
  rows = [row.with_mask() for row in rows]
  for column, names in _ARRAYS.items():
    arrays = padded(rows, column, width, space) or ()
    out |= {name: x for name, x in zip(names, arrays) if name and x is not None}
  return out
