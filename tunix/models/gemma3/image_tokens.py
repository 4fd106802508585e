"""Images inside a row of tokens: expanding the prompt, merging, who sees whom.

An image is one token <start_of_image> in the prompt. Expanded it is newlines,
<start_of_image>, S soft tokens, <end_of_image>, newlines; the soft tokens' embeddings
are the projector's vectors, put in as they are: Gemma scales the text's embeddings by
sqrt(D) and not the images'.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tunix.utils import checks

# "\n" is 107 in Gemma 3's vocabulary, and runs of up to 31 have the ids after it.
GEMMA3_NEWLINES = tuple(range(107, 138))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTokens:
  """The ids around an image; the defaults are Gemma 3's.

  Attributes:
    start: <start_of_image>, in the prompt and before the soft tokens.
    soft: stands for one soft token; its embedding is replaced.
    end: <end_of_image>.
    per_image: soft tokens of an image.
    newlines: ids of one, two, three, ... newlines in a row: the tokenizer makes one
      token of a run, so an image after a newline gets a token of three.
  """

  start: int = 255_999
  soft: int = 262_144
  end: int = 256_000
  per_image: int = 256
  newlines: tuple[int, ...] = GEMMA3_NEWLINES

  def __post_init__(self):
    checks.fields(self, per_image=checks.COUNT)
    if len(self.newlines) < 2:
      raise ValueError(
        f"newlines are {self.newlines}, expected the ids of one, two, ... newlines: "
        "an image stands between two pairs of them"
      )
    ids = (self.start, self.soft, self.end, *self.newlines)
    if len(set(ids)) < len(ids):
      raise ValueError(
        f"start {self.start}, soft {self.soft}, end {self.end} and newlines "
        f"{self.newlines} must differ: take the ids from the tokenizer"
      )


def expand_images(ids: Iterable[int], tokens: ImageTokens) -> list[int]:
  r"""Replaces each <start_of_image> by its expansion.

  The result is what tokenizing "\n\n<start_of_image>...<end_of_image>\n\n" in place
  gives: newlines beside an image join its own into one token. (Google's own code puts
  a separate "\n\n" there; Hugging Face's processor, which checkpoints are used with,
  works on the text.)

  Args:
    ids: of the prompt, one `tokens.start` an image.
    tokens: the ids.

  Returns:
    The ids with images expanded.

  Raises:
    ValueError: the prompt holds soft or end tokens, so it is expanded already.
  """
  ids = list(ids)
  expanded = sum(i in (tokens.soft, tokens.end) for i in ids)
  if expanded:
    raise ValueError(
      f"the prompt holds {expanded} tokens of expanded images ({tokens.soft} or "
      f"{tokens.end}), expected only {tokens.start}: expand it once"
    )
  lengths = {token: n for n, token in enumerate(tokens.newlines, 1)}
  image = [tokens.start, *[tokens.soft] * tokens.per_image, tokens.end]
  out: list[int] = []
  trailing = 0  # newlines that stand last in `out` and may still grow
  for token in ids:
    if token == tokens.start:
      if not trailing and out and out[-1] in lengths:
        trailing = lengths[out.pop()]
      out += _newlines(trailing + 2, tokens.newlines) + image
      trailing = 2
    elif trailing and token in lengths:
      trailing += lengths[token]
    else:
      out += _newlines(trailing, tokens.newlines)
      out.append(token)
      trailing = 0
  return out + _newlines(trailing, tokens.newlines)


def _newlines(count: int, ids: Sequence[int]) -> list[int]:
  """A run of newlines, in the longest tokens first."""
  whole, rest = divmod(count, len(ids))
  return [ids[-1]] * whole + ([ids[rest - 1]] if rest else [])


def check_images(
  tokens: np.ndarray,
  num_images: int | Sequence[int],
  image_token_id: int,
  per_image: int,
) -> None:
  """Refuses a batch whose soft tokens and images do not match.

  For host arrays, before the jitted step; inside it `scatter_images` answers with NaN.

  Args:
    tokens: int [B, T].
    num_images: images that come with the batch, or with each row; without blank ones.
    image_token_id: the soft token.
    per_image: soft tokens of an image.

  Raises:
    ValueError: names the counts.
  """
  counts = np.sum(np.asarray(tokens) == image_token_id, axis=-1)
  for row, count in enumerate(counts):
    if count % per_image:
      raise ValueError(
        f"row {row} holds {count} image tokens, expected a multiple of {per_image}: "
        "do not cut a row inside an image"
      )
  wanted = counts // per_image
  per_row = np.ndim(num_images) > 0
  if not np.array_equal(wanted if per_row else wanted.sum(), num_images):
    raise ValueError(
      f"the rows hold {counts.tolist()} image tokens, places for {wanted.tolist()} "
      f"images of {per_image}, but {num_images} images were given: give one image for "
      "each place"
    )


def scatter_images(
  embeddings: Float[Array, "B T D"],
  tokens: Int[Array, "B T"],
  image_features: Float[Array, "n S D"] | Float[Array, "B M S D"],
  image_token_id: int,
) -> Float[Array, "B T D"]:
  """Puts the images' vectors in the places of the soft tokens, in order.

  [n, S, D]: the first S soft tokens of the batch, row by row, get the first image, and
  so on. [B, M, S, D]: each row has its own M images, which stay with it when a batch
  is cut into micro-batches or spread over devices.

  Features that are left over are not used (blank images that keep shapes equal). When
  there are too few, every soft token (of that row) becomes NaN: nothing can raise
  inside a jitted step, and vectors of a wrong image would pass unseen. See
  `check_images`.

  Args:
    embeddings: of the tokens, scaled as the family does.
    tokens: ids.
    image_features: unscaled; cast to the embeddings' dtype.
    image_token_id: the soft token.

  Raises:
    ValueError: images by row, of another number of rows.
  """
  rows, _, dim = embeddings.shape
  is_image = tokens == image_token_id
  features = image_features.astype(embeddings.dtype)
  if features.ndim == 3:
    flat = _fill(
      embeddings.reshape(-1, dim), is_image.reshape(-1), features.reshape(-1, dim)
    )
    return flat.reshape(embeddings.shape)
  if features.shape[0] != rows:
    raise ValueError(
      f"image_features have shape {features.shape}, expected {rows} rows of images as "
      "there are rows of tokens: pad rows with blank images"
    )
  by_row = features.reshape(rows, math.prod(features.shape[1:3]), dim)
  return jax.vmap(_fill)(embeddings, is_image, by_row)


def _fill(
  embeddings: Float[Array, "T D"],
  is_image: Bool[Array, " T"],
  features: Float[Array, "K D"],
) -> Float[Array, "T D"]:
  """The k-th feature at the k-th place; NaN there if places outnumber features."""
  if features.shape[0] == 0:  # nothing that a gather could clip to
    return jnp.where(is_image[:, None], jnp.nan, embeddings)
  order = jnp.cumsum(is_image) - 1
  taken = features[jnp.clip(order, 0, features.shape[0] - 1)]
  taken = jnp.where(order[-1] < features.shape[0], taken, jnp.nan)
  return jnp.where(is_image[:, None], taken, embeddings)


def image_groups(tokens: Int[Array, "B T"], image_token_id: int) -> Int[Array, "B T"]:
  """Numbers each row's runs of soft tokens 1, 2, ...; 0 elsewhere; int32.

  `Visibility` opens each run to itself in both directions. Two images that touch are
  one run. Expanded prompts never have that: an end token
  and newlines stand between.
  """
  is_image = tokens == image_token_id
  before = jnp.pad(is_image, ((0, 0), (1, 0)))[:, :-1]
  number = jnp.cumsum((is_image & ~before).astype(jnp.int32), axis=-1, dtype=jnp.int32)
  return jnp.where(is_image, number, 0)
