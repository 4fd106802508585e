"""Prompts and completions in the form that scoring reads, without padding between."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Ids = Int[Array, "B T"]
Mask = Bool[Array, "B T"] | Int[Array, "B T"]


def extent(mask: Mask) -> jax.Array:
  """Returns bool [B, R], True up to the last True of each row, which may have holes."""
  # A running maximum from the right stays 1 from the last True to the start.
  return jax.lax.cummax(mask.astype(jnp.int32), axis=1, reverse=True) > 0


class Rows(NamedTuple):
  """The prompts [B, P] and completions [B, R] of a batch, padded with token 0.

  Attributes:
    prompts: ids, padded on the left.
    prompt_mask: True on the prompts' tokens.
    completions: ids, padded on the right.
    completion_mask: True on the tokens to score.
    prompt_routes, completion_routes: the experts of the tokens that a call replays, [B,
      P, M, k] and [B, R, M, k], see experts/route_records.py; or None.
    images: the argument `images` of the model, one row of images for B / N adjacent
      rows; or None.
  """

  prompts: jax.Array
  prompt_mask: jax.Array
  completions: jax.Array
  completion_mask: jax.Array
  prompt_routes: jax.Array | None = None
  completion_routes: jax.Array | None = None
  images: Any = None

  @classmethod
  def checked(
    cls,
    *arrays: Any,
    prompt_routes: object = None,
    completion_routes: object = None,
    images: Any = None,
  ) -> Rows:
    """Checks the shapes of four arrays, in the order of the attributes, and routes.

    Padding ids may be outside the model's vocabulary, so they are replaced by 0.
    """
    shapes = [x.shape for x in arrays]
    are_pairs = shapes[0] == shapes[1] and shapes[2] == shapes[3]
    if not (
      are_pairs
      and len(shapes[0]) == len(shapes[2]) == 2
      and shapes[0][0] == shapes[2][0]
    ):
      raise ValueError(
        f"prompts {shapes[0]}, their mask {shapes[1]}, completions {shapes[2]}, their "
        f"mask {shapes[3]}: expected [B, P] twice and [B, R] twice"
      )
    prompts, prompt_mask, completions, completion_mask = map(jnp.asarray, arrays)
    rows = cls(
      prompts, prompt_mask.astype(bool), completions, completion_mask.astype(bool)
    )
    return rows._replace(
      prompts=jnp.where(rows.prompt_mask, prompts, 0),
      completions=jnp.where(rows.extent, completions, 0),
      images=images,
    )._with_routes(prompt_routes, completion_routes)

  def _with_routes(self, prompts: Any, completions: Any) -> Rows:
    if prompts is None and completions is None:
      return self
    shapes = [None if x is None else x.shape[:2] for x in (prompts, completions)]
    if shapes != [self.prompts.shape, self.completions.shape]:
      raise ValueError(
        f"prompt_routes and completion_routes are of the tokens {shapes}; expected "
        f"{self.prompts.shape} and {self.completions.shape}. Give both or neither"
      )
    routes = map(jnp.asarray, (prompts, completions))
    return self._replace(**dict(zip(("prompt_routes", "completion_routes"), routes)))

  def seen(self) -> dict[str, Any]:
    """Returns the images as an argument of the model; {} without images."""
    return {} if self.images is None else {"images": self.images}

  @property
  def extent(self) -> jax.Array:
    """bool [B, R], True up to the last scored token of each completion."""
    return extent(self.completion_mask)

  def joined(self, width: int | None = None) -> jax.Array:
    """Removes the padding between prompts and completions.

    Returns:
      [B, width]: each prompt's tokens from slot 0, then the completion's, then 0.
      `width` is P + R unless given.
    """
    return self._moved(self.prompts, self.completions, width)

  def joined_routes(self, width: int | None = None) -> jax.Array | None:
    """Returns the routes [B, width, M, k] of `joined`; None if there are none."""
    if self.prompt_routes is None or self.completion_routes is None:
      return None
    return self._moved(self.prompt_routes, self.completion_routes, width)

  def _moved(self, prompts: jax.Array, completions: jax.Array, width: int | None):
    # Each row moves to the left by the padding of its prompt.
    both = jnp.concatenate([prompts, completions], axis=1)
    padding = self.prompts.shape[1] - jnp.sum(self.prompt_mask, axis=1)
    source = padding[:, None] + jnp.arange(width or both.shape[1])
    source = source.reshape(*source.shape, *(1,) * (both.ndim - 2))
    return jnp.take_along_axis(both, source, axis=1, mode="fill", fill_value=0)

  def predicting_slots(self, count: int | None = None) -> jax.Array:
    """Returns [B, R], the slots of `joined` that predict the completion tokens.

    `count` replaces R. Slots after the end of a row may be out of range.
    """
    # Token i of a completion is in slot length + i; the slot before it predicts it.
    lengths = jnp.sum(self.prompt_mask, axis=1)
    return lengths[:, None] - 1 + jnp.arange(count or self.completions.shape[1])
