"""Decoders whose layers do not all have the same modules.

The layers of one structure are stacked, so a model has one stack for each structure.
The order of the layers is a pattern of structures. A pattern that repeats is scanned,
with one period as the body of the scan: three layers with recurrence and one with
attention, for example. `segments` finds what repeats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from tunix.models.transformer.unstack import layer_states


class Segment(NamedTuple):
  """Consecutive layers that repeat a pattern.

  Attributes:
    start: number of the first layer.
    period: number of layers of the pattern.
    repeats: how often the pattern occurs, at least 1.
  """

  start: int
  period: int
  repeats: int

  @property
  def stop(self) -> int:
    """Number of the layer after the last one."""
    return self.start + self.period * self.repeats


@functools.lru_cache(maxsize=64)
def segments(layers: tuple[Hashable, ...]) -> tuple[Segment, ...]:
  """Cuts the layers into segments, so that the fewest layers are compiled.

  A segment is compiled once for each layer of its period. Of cuts with equal numbers,
  the one with the fewest segments is taken.

  Args:
    layers: equal values for layers that one body can run.
  """
  count = len(layers)
  # best[i]: (layers compiled, segments, cut) of the layers from i on.
  best: list[tuple[int, int, tuple[Segment, ...]]] = [(0, 0, ())] * (count + 1)
  for start in reversed(range(count)):
    options = []
    for period in range(1, count - start + 1):
      pattern, repeats = layers[start : start + period], 0
      while layers[start + repeats * period :][:period] == pattern:
        repeats += 1
        segment = Segment(start, period, repeats)
        compiled, number, rest = best[segment.stop]
        options.append((compiled + period, number + 1, (segment, *rest)))
    best[start] = min(options, key=lambda option: option[:2])
  return best[0][2]


def in_order(stacks: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
  """Returns the state of each layer, in the order of the layers.

  Args:
    stacks: state of the stack of each structure, arrays [L of the structure, ...].
    names: structure of each layer.
  """
  parts = {name: iter(layer_states(state)) for name, state in stacks.items()}
  return [next(parts[name]) for name in names]


def scan(
  call: Callable[[str, int, Any, jax.Array], jax.Array],
  x: jax.Array,
  stacks: Mapping[str, Any],
  names: Sequence[str],
  kinds: Sequence[int],
) -> jax.Array:
  """Runs all layers, each segment that repeats in one `lax.scan`.

  Args:
    call: runs one layer, (structure, kind, state, x) -> x.
    x: input of the first layer.
    stacks: see `in_order`.
    names: structure of each layer.
    kinds: kind of each layer, see `TransformerConfig.kinds`.
  """
  cut = segments(tuple(zip(names, kinds)))
  pieces = {name: _pieces(state, name, names, cut) for name, state in stacks.items()}
  for number, segment in enumerate(cut):
    of_period = slice(segment.start, segment.start + segment.period)
    own = {name: pieces[name][number] for name in dict.fromkeys(names[of_period])}

    def body(x, states, at=of_period):
      each = in_order(states, names[at])
      for name, kind, state in zip(names[at], kinds[at], each):
        x = call(name, kind, state, x)
      return x, None

    if segment.repeats == 1:
      x, _ = body(x, jax.tree.map(lambda stack: stack[0], own))
    else:
      x, _ = jax.lax.scan(body, x, own)
  return x


def _pieces(
  state: nnx.State, name: str, names: Sequence[str], cut: Sequence[Segment]
) -> list[Any]:
  """Returns the part of a stack in each segment, arrays [repeats, of a period, ...]."""
  counts = [list(names[s.start : s.stop]).count(name) for s in cut]
  leaves, treedef = jax.tree.flatten(state)
  # One split, whose transpose is one concatenation. Slices would each be padded to the
  # whole stack in the backward pass.
  parts = zip(*(jax.lax.split(leaf, counts) for leaf in leaves))
  return [
    treedef.unflatten([x.reshape(s.repeats, -1, *x.shape[1:]) for x in part])
    if count
    else None
    for s, part, count in zip(cut, parts, counts)
  ]
