"""Soft tokens: the tokens of a row whose embeddings are replaced by images' vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def check_images(
  tokens: np.ndarray,
  num_images: int | Sequence[int],
  image_token_id: int,
  per_image: int,
) -> None:
  """Refuses a batch whose soft tokens and images do not match.

  It takes host arrays and is called before the jitted step. Inside the step
  `scatter_images` cannot raise and writes NaN.

  Args:
    tokens: token ids, int [B, T].
    num_images: number of images of the batch, or of each row; blank images not counted.
    image_token_id: id of a soft token.
    per_image: number of soft tokens of an image.

  Raises:
    ValueError: the counts do not match; the message lists them.
  """
  counts = np.sum(np.asarray(tokens) == image_token_id, axis=-1)
  for row, count in enumerate(counts):
    if count % per_image:
      raise ValueError(
        f"row {row} holds {count} image tokens, expected a multiple of {per_image}: "
        "do not cut a row inside an image"
      )
  places = counts // per_image
  per_row = np.ndim(num_images) > 0
  if not np.array_equal(places if per_row else places.sum(), num_images):
    raise ValueError(
      f"the rows hold {counts.tolist()} image tokens, places for {places.tolist()} "
      f"images of {per_image}, but {num_images} images were given: give one image for "
      "each place"
    )


def scatter_images(
  embeddings: Float[Array, "B T D"],
  tokens: Int[Array, "B T"],
  image_features: Float[Array, "n S D"] | Float[Array, "B M S D"],
  image_token_id: int,
) -> Float[Array, "B T D"]:
  """Replaces the embeddings of the soft tokens by the images' vectors, in order.

  Features [n, S, D] belong to the batch: the first S soft tokens, row by row, get the
  first image, and so on. Features [B, M, S, D] belong to rows: the M images of a row
  stay with it when a batch is cut into micro-batches or spread over devices. If there
  are k times as many rows of tokens, k adjacent ones have the same images: the vectors
  are repeated, and the tower computes them once.

  Surplus features are not used: blank images keep shapes equal. If there are too few,
  every soft token (of that row) becomes NaN. Nothing can raise inside a jitted step,
  and the vectors of a wrong image would stay unnoticed. See `check_images`.

  Args:
    embeddings: embeddings of the tokens, scaled as the family does.
    tokens: token ids.
    image_features: vectors of the images, unscaled; cast to the embeddings' dtype.
    image_token_id: id of a soft token.

  Raises:
    ValueError: the rows of the features do not divide those of the tokens.
  """
  rows, _, dim = embeddings.shape
  is_image = tokens == image_token_id
  features = image_features.astype(embeddings.dtype)
  if features.ndim == 3:
    flat = _fill(
      embeddings.reshape(-1, dim), is_image.reshape(-1), features.reshape(-1, dim)
    )
    return flat.reshape(embeddings.shape)
  if not features.shape[0] or rows % features.shape[0]:
    raise ValueError(
      f"image_features have shape {features.shape}, expected {rows} rows of images as "
      "there are rows of tokens, or a divisor: pad rows with blank images"
    )
  by_row = features.reshape(len(features), math.prod(features.shape[1:3]), dim)
  by_row = jnp.repeat(by_row, rows // len(features), axis=0)
  return jax.vmap(_fill)(embeddings, is_image, by_row)


def _fill(
  embeddings: Float[Array, "T D"],
  is_image: Bool[Array, " T"],
  features: Float[Array, "K D"],
) -> Float[Array, "T D"]:
  """Puts the k-th feature at the k-th soft token, or NaN if there are too few."""
  if features.shape[0] == 0:  # a gather would have no row to clip to
    return jnp.where(is_image[:, None], jnp.nan, embeddings)
  order = jnp.cumsum(is_image) - 1
  taken = features[jnp.clip(order, 0, features.shape[0] - 1)]
  taken = jnp.where(order[-1] < features.shape[0], taken, jnp.nan)
  return jnp.where(is_image[:, None], taken, embeddings)


def image_groups(tokens: Int[Array, "B T"], image_token_id: int) -> Int[Array, "B T"]:
  """Returns the number of each soft token's run in its row, 1, 2, ..., else 0; int32.

  `Visibility` lets the tokens of a run attend to each other in both directions. Two
  adjacent images would be one run. Expanded prompts have none: an end token and
  newlines separate images.
  """
  is_image = tokens == image_token_id
  before = jnp.pad(is_image, ((0, 0), (1, 0)))[:, :-1]
  number = jnp.cumsum((is_image & ~before).astype(jnp.int32), axis=-1, dtype=jnp.int32)
  return jnp.where(is_image, number, 0)
