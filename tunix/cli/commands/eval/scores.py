"""The inputs of an evaluation, and a model's scores of rows of any length."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tunix.data.chat import Rendered
from tunix.data.images import ImageReader, Picture
from tunix.generate import scoring
from tunix.generate.sizes import batching
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.images import prompt_images
from tunix.models.images.prompt_images import PromptImages
from tunix.models.transformer.model import Transformer
from tunix.sft import inference
from tunix.sft.inference import Score
from tunix.utils import coordination

_SHORTEST = 16  # tokens; widths of batches are powers of two from here up
# Seconds to wait for processes with longer rows. A process that ends is noticed
# earlier.
PATIENCE_S = 24 * 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """One file to evaluate a model on, with the options of all kinds of evaluations.

  Attributes:
    model: a language model, or a reward model for pairs.
    tokenizer: tokenizer of the model.
    path: the file of records.
    batch_size: number of rows of a batch.
    chat, template_args: see `tunix.data.chat.render`.
    shown: number of records on the page.
    images: reads the images of records; None refuses records with images.
  """

  model: Transformer
  tokenizer: TokenizerAdapter
  path: str
  batch_size: int
  chat: bool | None
  template_args: dict[str, Any]
  shown: int
  images: ImageReader | None = None

  def images_of(
    self,
    pictures: Sequence[Picture],
    render: Callable[[], Rendered],
    tokens: np.ndarray,
    where: str,
  ) -> Images | None:
    """Returns the images of a record; None without images.

    Args:
      pictures: the images, opened; they are not kept.
      render: renders the record. It is called when the pixels are needed, so that only
        those of a batch are in memory.
      tokens: token ids of its row, perhaps cut.
      where: place of the record.

    Raises:
      ValueError: the row is cut within an image; begins with `where`.
    """
    reader = self.images
    if reader is None or not pictures:
      return None
    try:
      reader.check(tokens, pictures)
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from error
    room = batching.bucket(sum(picture.num_tokens for picture in pictures))
    return Images(room, lambda: reader.prompt(render().pictures, room))


class Images(NamedTuple):
  """The images of a row, which are opened when they are needed.

  Attributes:
    room: number of soft tokens that they are padded to.
    open: returns them.
  """

  room: int
  open: Callable[[], PromptImages | None]


class Row(NamedTuple):
  """The tokens of a prompt and of the completion to score, int32, without padding.

  Attributes:
    prompt: [P], at least one token.
    completion: [R].
    mask: [R], 1 on scored tokens.
    images: images of the row, or None.
  """

  prompt: np.ndarray
  completion: np.ndarray
  mask: np.ndarray
  images: Images | None = None


def score(
  model: nnx.Module, of: Score, rows: Sequence[Row], batch_size: int
) -> np.ndarray:
  """Returns a score of every row, float32 [rows].

  A batch has rows whose lengths are padded to the same powers of two, and whose images
  are padded to the same size. Several processes
  share the batches. A batch has the same rows and scores as in a single process.

  Args:
    model: the model that scores.
    of: `logps_of_rows` or `rewards_of_rows`.
    rows: the rows, in any order of lengths.
    batch_size: number of rows of a batch.
  """
  out = np.zeros(len(rows), np.float32)
  alike = collections.defaultdict(list)
  for index, row in enumerate(rows):
    widths = (len(row.prompt), max(1, len(row.completion)))
    sizes = (batching.bucket(w, _SHORTEST) for w in widths)
    alike[(*sizes, 0 if row.images is None else row.images.room)].append(index)
  batches = [
    (key[:2], indices[start : start + batch_size])
    for key, indices in sorted(alike.items())
    for start in range(0, len(indices), batch_size)
  ]

  def values(mine: Sequence[tuple[tuple[int, int], list[int]]]) -> list[Any]:
    # All batches are dispatched before the first result is read.
    running = []
    for widths, indices in mine:
      # The last row fills up the batch, so that each shape is compiled once.
      chosen = [rows[i] for i in indices + indices[-1:] * (batch_size - len(indices))]
      running.append(inference.apply(model, of, _stacked(chosen, *widths), ()))
    return [np.asarray(part).tolist() for part in running]

  done = coordination.deal("scores", batches, values, PATIENCE_S)
  for (_, indices), scores in zip(batches, done):
    out[indices] = scores[: len(indices)]
  return out


def _stacked(rows: Sequence[Row], prompt: int, completion: int) -> dict[str, Any]:
  ids, mask = batching.left_padded([row.prompt for row in rows], len(rows), prompt, 0)
  right = batching.right_padded
  return {
    "prompt_ids": ids,
    "prompt_mask": mask,
    "completion_ids": right([row.completion for row in rows], completion, np.int32),
    "completion_mask": right([row.mask for row in rows], completion, np.bool_),
    "images": prompt_images.stacked([x and x.open() for x in (r.images for r in rows)]),
  }


def logps_of_rows(model: nnx.Module, **rows: Any) -> jax.Array:
  """Returns the log-probability of each row's scored tokens, nats [B]."""
  return jnp.sum(scoring.score_completions(model, **rows).logps, axis=1)


def rewards_of_rows(model: nnx.Module, **rows: Any) -> jax.Array:
  """Returns a reward model's score of each row [B]."""
  return scoring.score_sequences(model, **rows)
