"""Exact log-probs of sampled tokens, whose bits do not depend on other rows.

The rounding errors of decoding with a cache depend on the shapes of the batch. This
module scores each row again, alone in a tile, by the scorer that trainers use in exact
mode. The width of the tile depends only on the lengths of the row.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tunix.generate import outputs, scoring
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.sizes import batching
from tunix.generate.tokens import Completion
from tunix.utils import mesh as mesh_lib


def scored(
  model: nnx.Module,
  rows: Sequence[Completion],
  options: SamplingOptions,
  mesh: Mesh | None,
) -> list[Completion]:
  """Returns rows with both kinds of log-probs of the tokens that the caller receives.

  Args:
    model: the module.
    rows: all rows of the call.
    options: options of the call, without filters and forbidden tokens.
    mesh: mesh of the weights.
  """
  prompts = [row.prompt for row in rows]
  tokens = [outputs.kept_tokens(x.ids, x.finish_reason, options) for x in rows]
  with mesh_lib.use_mesh(mesh):
    score = functools.partial(logps, model, prompts, tokens)
    raw = score(1.0)
    if options.temperature == 0:  # no token is sampled, so these are 0
      drawn = [np.zeros_like(row) for row in raw]
    else:
      drawn = raw if options.temperature == 1 else score(float(options.temperature))
  out = []
  for row, *both in zip(rows, raw, drawn):
    # 0 for the end-of-sequence token, if the caller does not receive it.
    own, other = (np.pad(x, (0, len(row.ids) - len(x))) for x in both)
    out.append(dataclasses.replace(row, logps=own, sampling_logps=other))
  return out


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
def _scored(
  graph: nnx.GraphDef[Any], state: nnx.State, arrays: Any, temperature: float
) -> jax.Array:
  model = nnx.merge(graph, state)
  model.eval()
  scores = scoring.score_completions(
    model, *arrays, temperature=temperature, tile_rows=1
  )
  return scores.logps
