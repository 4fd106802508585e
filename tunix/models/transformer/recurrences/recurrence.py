"""The tokens of a call as a recurrent mixer runs them.

A recurrent mixer (a gated delta net, Mamba-2) knows the earlier tokens of a row by a
state of fixed size. This module passes it the tokens of every kind of call: padded and
packed rows, prompts with several completions, and the two caches. A mixer has a method
`empty_state(rows)` and a `Step`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tunix.models.transformer.visibility import Visibility

State = Any
# Runs rows of consecutive tokens: (state [B, ...], inputs [B, T, ...], valid [B, T],
# starts [B, T] or None) to (outputs [B, T, ...], state after the valid tokens). `valid`
# is False on padding, which must not change a state and is at the beginning or the end
# of a row. `starts` is True at tokens that begin a segment; they see no earlier token.
Step = Callable[[State, Any, jax.Array, jax.Array | None], tuple[Any, State]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowState:
  """The state of one layer in a `KVCache`.

  Attributes:
    state: a tree of arrays [B, ...].
  """

  state: State

  def recur(self, step: Callable[..., Any], inputs: object) -> tuple[Any, RowState]:
    """Runs tokens from the state; `step` is (state, inputs, valid)."""
    shape = jax.tree.leaves(inputs)[0].shape[:2]
    out, state = step(self.state, inputs, jnp.ones(shape, bool))

    def same(new, old):
      return new.astype(old.dtype)

    return out, RowState(jax.tree.map(same, state, self.state))


def run(
  step: Step,
  empty_state: Callable[[int], State],
  inputs: object,
  visible: Visibility,
  cached: Any = None,
) -> tuple[Any, Any]:
  """Runs the tokens of a call; returns their outputs and the layer's new cache.

  Args:
    step: runs rows of tokens.
    empty_state: returns the state of a number of new rows.
    inputs: a tree of arrays [B, T, ...].
    visible: the layout of the rows. A mask is read at each token's own slot only: a
      token that does not see itself is padding.
    cached: None, or the layer's cache, an object with the method `recur`.
  """
  rows, tokens = jax.tree.leaves(inputs)[0].shape[:2]
  valid = visible.valid(rows, tokens)
  if cached is not None:

    def go(state, inputs, own):
      return step(state, inputs, own if visible.mask is None else own & valid, None)

    return cached.recur(go, inputs)
  if (shared := visible.shared) is not None:
    # Every completion begins with the state after its prompt.
    def each(part, x):
      return jax.tree.map(part, x)

    prompts, state = step(
      empty_state(rows), each(shared.prompts, inputs), shared.prompts(valid), None
    )
    state = each(lambda x: jnp.repeat(x, shared.copies, axis=0), state)
    rest, _ = step(
      state, each(shared.completions, inputs), shared.completions(valid), None
    )
    return jax.tree.map(shared.rows, prompts, rest), None
  starts = None
  if (ids := visible.segment_ids) is not None:
    starts = (ids != jnp.roll(ids, 1, axis=1)).at[:, 0].set(True)
  return step(empty_state(rows), inputs, valid, starts)[0], None
