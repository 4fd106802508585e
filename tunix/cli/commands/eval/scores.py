"""A model's scores of rows of any length, in batches of few shapes."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.generate import batching, scoring
from tunix.sft import inference
from tunix.sft.inference import Score
from tunix.utils import coordination

_SHORTEST = 16  # shapes are powers of two from here up
# Seconds to wait for processes whose rows are longer; one that ended is noticed before.
PATIENCE_S = 24 * 3600


class Row(NamedTuple):
  """Tokens of a prompt, and of what is scored behind it; int32, not padded.

  Attributes:
    prompt: [P], at least one.
    completion: [R].
    mask: [R], 1 on scored tokens.
  """

  prompt: np.ndarray
  completion: np.ndarray
  mask: np.ndarray


def score(
  model: nnx.Module, of: Score, rows: Sequence[Row], batch_size: int
) -> np.ndarray:
  """`of` every row, float32 [rows], in their order.

  Rows of similar lengths run together, padded to powers of two. Several processes share
  the batches: each is the one of a single process, and so are its numbers.

  Args:
    model: what scores.
    of: `logps_of_rows` or `rewards_of_rows`.
    rows: what is scored.
    batch_size: rows at a time.
  """
  out = np.zeros(len(rows), np.float32)
  alike = collections.defaultdict(list)
  for index, row in enumerate(rows):
    widths = (len(row.prompt), max(1, len(row.completion)))
    alike[tuple(batching.bucket(w, _SHORTEST) for w in widths)].append(index)
  batches = [
    (widths, indices[start : start + batch_size])
    for widths, indices in sorted(alike.items())
    for start in range(0, len(indices), batch_size)
  ]

  def values(mine: Sequence[tuple[tuple[int, int], list[int]]]) -> list[Any]:
    # All are on their way before the first is waited for.
    running = []
    for widths, indices in mine:
      # One program a shape: the last rows are filled up, also of a single part.
      chosen = [rows[i] for i in indices + indices[-1:] * (batch_size - len(indices))]
      running.append(inference.apply(model, of, _stacked(chosen, *widths), ()))
    return [np.asarray(part).tolist() for part in running]

  done = coordination.deal("scores", batches, values, PATIENCE_S)
  for (_, indices), scores in zip(batches, done):
    out[indices] = scores[: len(indices)]
  return out


def _stacked(rows: Sequence[Row], prompt: int, completion: int) -> dict[str, Any]:
  ids, mask = batching.left_padded([row.prompt for row in rows], len(rows), prompt, 0)
  right = batching.right_padded
  return {
    "prompt_ids": ids,
    "prompt_mask": mask,
    "completion_ids": right([row.completion for row in rows], completion, np.int32),
    "completion_mask": right([row.mask for row in rows], completion, np.bool_),
  }


def logps_of_rows(model: nnx.Module, **rows: Any) -> jax.Array:
  """Log-probability of each row's scored tokens, nats [B]."""
  return jnp.sum(scoring.score_completions(model, **rows).logps, axis=1)


def rewards_of_rows(model: nnx.Module, **rows: Any) -> jax.Array:
  """A reward model's score of each row [B]."""
  return scoring.score_sequences(model, **rows)
