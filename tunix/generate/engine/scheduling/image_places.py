"""The soft tokens of a prompt: their vectors, positions, and what they attend to."""

from __future__ import annotations

import dataclasses

import numpy as np

from tunix.models.images.prompt_images import PromptImages


@dataclasses.dataclass(frozen=True, eq=False)
class ImagePlaces:
  """The places of a prompt's images.

  Attributes:
    images: the images.
    vector: int32 [T], index of the vector that replaces each token's embedding; -1 for
      text.
    last: int32 [T], the last position that each token attends to, if the tokens of an
      image attend to each other in both directions; None: its own.
    rope: int32 [T + 1, P], offsets of the rotary positions of the T tokens of the
      prompt and of the first token after it, for the P pairs of rotary dimensions; see
      `Transformer.__call__`. None: no offsets.
  """

  images: PromptImages
  vector: np.ndarray
  last: np.ndarray | None
  rope: np.ndarray | None = None

  @classmethod
  def of(
    cls,
    prompt: np.ndarray,
    images: PromptImages,
    soft_token: int,
    both_ways: bool,
    rope: np.ndarray | None = None,
  ) -> ImagePlaces:
    """Assigns the vectors of the images to the soft tokens of a prompt, in order."""
    is_soft = prompt == soft_token
    vector = np.where(is_soft, np.cumsum(is_soft) - 1, -1).astype(np.int32)
    if not both_ways:
      return cls(images, vector, None, rope)
    own = np.arange(len(prompt), dtype=np.int32)
    # The run of a soft token ends before the next token of text.
    end = np.where(is_soft, len(prompt), own)
    end = np.minimum.accumulate(end[::-1])[::-1]
    last = np.where(is_soft, end - 1, own).astype(np.int32)
    return cls(images, vector, last, rope)

  @property
  def shift(self) -> int:
    """Offset of the rotary positions of all tokens after the prompt."""
    return 0 if self.rope is None else int(self.rope[-1, 0])

  def rope_offsets(self, start: int, end: int) -> np.ndarray | None:
    """Returns the rotary offsets of positions `start` to `end - 1`, [end - start, P].

    Positions after the prompt have the last offset. None: there are no offsets.
    """
    if self.rope is None:
      return None
    return self.rope[np.minimum(np.arange(start, end), len(self.rope) - 1)]

  def digests_in(self, start: int, end: int) -> bytes:
    """Returns the digests of the images that have soft tokens in [start, end)."""
    vectors = self.vector[start:end]
    ends = np.cumsum(self.images.counts)
    found = np.searchsorted(ends, vectors[vectors >= 0], side="right")
    return b"".join(self.images.digests[i] for i in np.unique(found))

  def block_starts(self, start: int, end: int, size: int) -> list[int]:
    """Splits [start, end) into blocks and returns their starts.

    A block starts at each page boundary (every `size` tokens). If the tokens of an
    image attend to each other, a block also starts at each run of soft tokens.
    """
    pages = [start, *range((start // size + 1) * size, end, size)]
    if self.last is None:
      return pages
    at = np.arange(max(start, 1), min(end, len(self.last)))
    begins = (self.last[at] > at) & (self.last[at - 1] < at)
    return sorted({*pages, *at[begins].tolist()})

  def is_inside_run(self, at: int) -> bool:
    """Returns True if the token before `at` attends to the token at `at`."""
    last = self.last
    return last is not None and 0 < at < len(last) and bool(last[at - 1] >= at)

  @property
  def longest_run(self) -> int:
    """Number of tokens of the longest run that attends in both directions."""
    if self.last is None:
      return 0
    return int(np.max(self.last - np.arange(len(self.last)))) + 1
