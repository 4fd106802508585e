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

_SHORTEST = 16  # shapes are powers of two from here up


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

  Rows of similar lengths run together, padded to powers of two.

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
  for (prompt, completion), indices in sorted(alike.items()):
    chosen = [rows[i] for i in indices]
    # One program a shape: the last rows are filled up, also of a single part.
    chosen += [chosen[-1]] * (-len(chosen) % batch_size)
    out[indices] = inference.run(
      model, of, _stacked(chosen, prompt, completion), batch_size, ()
    )[: len(indices)]
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
