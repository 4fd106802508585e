"""Prompt lookup against a loop over lists."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

from tunix.generate.engine.device import prompt_lookup

WIDTH, COUNT = 12, 3
propose = jax.jit(prompt_lookup.propose, static_argnums=2)


def looked_up(tokens, count):
  """What followed the latest earlier place with the same last 3, or else 2, tokens.

  Or else what followed any token after the 3 tokens before the last one.
  """
  for length in (3, 2):
    end = tokens[-length:]
    if len(tokens) <= length:
      continue
    for start in range(len(tokens) - length - 1, -1, -1):
      if tokens[start : start + length] == end:
        found = tokens[start + length :][:count]
        return found + [prompt_lookup.NONE] * (count - len(found))
  for start in range(len(tokens) - 5, -1, -1):
    if tokens[start : start + 3] == tokens[-4:-1]:
      found = tokens[start + 4 :][:count]
      return found + [prompt_lookup.NONE] * (count - len(found))
  return [prompt_lookup.NONE] * count


def test_after_a_replaced_token():
  """5 6 7 8 9 3 becomes 5 6 7 1 9 ...: 9 follows whatever stands for 8."""
  history = jnp.array([[5, 6, 7, 8, 9, 3, 5, 6, 7, 1, 0, 0]])
  assert prompt_lookup.propose(history, jnp.array([9]), 3).tolist() == [[9, 3, 5]]
  assert prompt_lookup.propose(history.at[0, 7].set(4), jnp.array([9]), 3).tolist() == [
    [-1] * 3
  ]


rows = st.lists(
  st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=4, max_size=4
)


@settings(max_examples=300, deadline=None)
@given(rows, st.integers(-1, 2))
def test_it_is_the_loop_over_lists(rows, filler):
  """Whatever is behind the last token, such as a longer completion before it."""
  history = np.full((4, WIDTH), filler, np.int32)
  for n, row in enumerate(rows):
    history[n, : len(row)] = row
  position = np.array([len(row) - 1 for row in rows], np.int32)
  found = propose(history, position, COUNT)
  np.testing.assert_array_equal(found, [looked_up(row, COUNT) for row in rows])


def test_by_hand():
  history = jnp.array([[5, 6, 7, 8, 9, 5, 6, 7, 0, 0], [5, 6, 7, 8, 9, 5, 6, 7, 0, 0]])
  position = jnp.array([7, 4])
  assert prompt_lookup.propose(history, position, 4).tolist() == [
    [8, 9, 5, 6],
    [-1] * 4,
  ]
  assert prompt_lookup.propose(history, position, 0).shape == (2, 0)
  # Three tokens are a better sign than two, and the latest place than an earlier one.
  history = jnp.array([[1, 2, 3, 4, 2, 3, 5, 1, 2, 3], [2, 3, 4, 2, 3, 5, 2, 3, 0, 0]])
  assert prompt_lookup.propose(history, jnp.array([9, 7]), 1).tolist() == [[4], [5]]
