"""Exact log-probs of sampled tokens, whose bits do not depend on other rows.

The rounding errors of decoding with a cache depend on the shapes of the batch. This
module scores each row again, alone in a tile, by the scorer that trainers use in exact
mode. The width of the tile depends only on the lengths of the row.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from tunix.generate import batching, scoring
from tunix.utils import mesh as mesh_lib


def logps(
  model: nnx.Module,
  prompts: Sequence[np.ndarray],
  completions: Sequence[np.ndarray],
  temperature: float,
) -> list[np.ndarray]:
  """Returns the log-probs of each row under softmax(logits / temperature).

  Args:
    model: as for `scoring.score_completions`; scored in eval mode.
    prompts: int32 ids of each row's prompt.
    completions: int32 ids of each row's completion; an empty one has no log-probs.
    temperature: above 0.

  Returns:
    float32 [length] for each row, in nats.
  """
  # Rows of equal bucket widths share a compiled program, whose number of rows is a
  # power of two. Inside the program, tiles of one row run one after the other.
  groups = collections.defaultdict(list)
  for row, (prompt, completion) in enumerate(zip(prompts, completions)):
    widths = (
      batching.bucket(len(x), batching.MIN_TOKENS) for x in (prompt, completion)
    )
    groups[tuple(widths)].append(row)
  graph, state = nnx.split(model)
  out = [np.zeros(0, np.float32)] * len(prompts)
  for widths, rows in groups.items():
    count = batching.bucket(len(rows))
    picked = [*rows, *rows[:1] * (count - len(rows))]
    ids = batching.right_padded([completions[i] for i in picked], widths[1], np.int32)
    lengths = np.array([len(completions[i]) for i in picked])
    arrays = (
      *batching.left_padded([prompts[i] for i in picked], count, widths[0], 0),
      ids,
      np.arange(widths[1]) < lengths[:, None],
    )
    scored = mesh_lib.to_host(_scored(graph, state, arrays, temperature))
    for place, row in enumerate(rows):
      out[row] = scored[place, : len(completions[row])]
  return out


@functools.partial(jax.jit, static_argnums=(0, 3))
def _scored(graph: Any, state: Any, arrays: Any, temperature: float) -> jax.Array:
  model = nnx.merge(graph, state)
  model.eval()
  scores = scoring.score_completions(
    model, *arrays, temperature=temperature, tile_rows=1
  )
  return scores.logps
