"""The rows of a round: which tokens of which sequences a call of the model runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """R rows of Q consecutive tokens of one sequence each.

  Tokens after the first `count` of a row are padding. They are not written to a page,
  and their outputs are 0.

  Attributes:
    table: int32 [R, N], the numbers of the pages of each row's sequence, in order. The
      token at position p is in page `table[r, p // page_tokens]`. Entries that no
      valid token of the row is in or attends to may be 0.
    start: int32 [R], position of the first token, at least 0.
    count: int32 [R], number of valid tokens; 0 for an idle row.
    tokens: number of tokens Q of each row.
  """

  table: Leaf
  start: Leaf
  count: Leaf
  tokens: int = dataclasses.field(metadata={"static": True})

  @property
  def rows(self) -> int:
    """Number of rows R."""
    return self.start.shape[0]

  @property
  def positions(self) -> Int[jax.Array, "R Q"]:
    """Position of each token."""
    return self.start[:, None] + jnp.arange(self.tokens, dtype=jnp.int32)

  @property
  def is_valid(self) -> Bool[jax.Array, "R Q"]:
    """False for padding."""
    return jnp.arange(self.tokens) < self.count[:, None]

  def places(self, page_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the page of each token, 0 for padding, and its slot in it, int32 [R, Q].

    Args:
      page_tokens: number of tokens of a page.
    """
    positions = self.positions
    column = jnp.minimum(positions // page_tokens, self.table.shape[1] - 1)
    page = jnp.take_along_axis(self.table, column, axis=1)
    return jnp.where(self.is_valid, page, 0), positions % page_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ragged:
  """The T tokens of a round: the rows of each group, one group after the other.

  Attributes:
    groups: the groups. T is the sum of R * Q over them.
  """

  groups: tuple[Group, ...]

  @property
  def tokens(self) -> int:
    """Number of tokens T."""
    return sum(group.rows * group.tokens for group in self.groups)

  @property
  def positions(self) -> Int[jax.Array, "T"]:
    """Position of each token."""
    return jnp.concatenate([group.positions.reshape(-1) for group in self.groups])

  @property
  def is_valid(self) -> Bool[jax.Array, "T"]:
    """False for padding."""
    return jnp.concatenate([group.is_valid.reshape(-1) for group in self.groups])

  def places(self, page_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Returns the page of each token, 0 for padding, and its slot in it, int32 [T]."""
    pairs = [group.places(page_tokens) for group in self.groups]
    page, slot = (jnp.concatenate([x.reshape(-1) for x in xs]) for xs in zip(*pairs))
    return page, slot

  def split(self, x: jax.Array) -> list[jax.Array]:
    """Splits an array [T, ...] into the tokens of each group, [R * Q, ...]."""
    parts, at = [], 0
    for group in self.groups:
      parts.append(x[at : at + group.rows * group.tokens])
      at += group.rows * group.tokens
    return parts
