"""Rows of some tokens that are trained while the rest of the embedding is frozen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix.models.transformer.shards import explicit


class TokenRows(nnx.Module):
  """Rows of the embedding, and of an untied unembedding, that replace the frozen ones.

  The frozen tables keep their numbers. Rows are rounded to the dtype of the table that
  they replace, so that a merged model has the same numbers.

  Attributes:
    ids: the n token ids, in ascending order.
    lora_input: rows of the embedding [n, D].
    lora_output: rows of an untied unembedding [n, D]. None if the embeddings are tied,
      or if the unembedding is not trained.
  """

  def __init__(
    self,
    ids: tuple[int, ...],
    lora_input: nnx.LoRAParam,
    lora_output: nnx.LoRAParam | None,
  ):
    self.ids = ids
    self.lora_input = lora_input
    self.lora_output: nnx.LoRAParam | None = nnx.data(lora_output)

  def looked_up(
    self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"], stored: Any
  ) -> Float[Array, "B T D"]:
    """Returns looked-up rows with those of `ids` replaced.

    Args:
      x: rows of the frozen table, not scaled.
      tokens: their token ids.
      stored: dtype of the table.
    """
    rows, ids = self.lora_input[...].astype(stored).astype(x.dtype), jnp.array(self.ids)
    slot = jnp.minimum(jnp.searchsorted(ids, tokens), len(self.ids) - 1)
    return jnp.where((ids[slot] == tokens)[..., None], rows[slot], x)

  @explicit.auto_inside(lambda _, table, tied: jax.typeof(table).sharding.spec)
  def in_table(self, table: jax.Array, *, tied: bool) -> jax.Array:
    """Returns an unembedding with the rows written: [V, D] if tied, else [D, V]."""
    if tied:
      return written(table, self.ids, self.lora_input[...])
    if self.lora_output is None:
      return table
    return written(table.T, self.ids, self.lora_output[...]).T

  def in_logits(
    self,
    logits: Float[Array, "B T V"],
    hidden: Float[Array, "B T D"],
    stored: Any,
    *,
    tied: bool,
  ) -> Float[Array, "B T V"]:
    """Returns logits with those of `ids` computed from the trained rows.

    A decode step would otherwise copy the whole unembedding.
    """
    rows = self.lora_input if tied else self.lora_output
    if rows is None:
      return logits
    rows = rows[...].astype(stored).astype(hidden.dtype)
    new = jnp.einsum("btd,nd->btn", hidden, rows, preferred_element_type=jnp.float32)
    return logits.at[..., jnp.array(self.ids)].set(new)


def written(table: jax.Array, ids: Any, rows: jax.Array) -> jax.Array:
  """Returns a table [V, D] with the rows of some ids replaced by rows [n, D]."""
  return table.at[jnp.array(ids)].set(rows.astype(table.dtype))
