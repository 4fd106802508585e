"""Images inside a row of tokens: expansion of the prompt, merging and groups.

In a prompt, an image is one token <start_of_image>. `expand_images` replaces it by
newlines, <start_of_image>, S soft tokens, <end_of_image> and newlines. The vectors of
the projector replace the embeddings of the soft tokens. They are not scaled: Gemma
multiplies only embeddings of text by sqrt(D).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tunix.models.vision.soft_tokens import (
  check_images as check_images,
  image_groups as image_groups,
  scatter_images as scatter_images,
)
from tunix.utils import checks

# Token ids of 1 to 31 newlines in a row in Gemma 3's vocabulary.
GEMMA3_NEWLINES = tuple(range(107, 138))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTokens:
  """The ids around an image; the defaults are Gemma 3's.

  Attributes:
    start: id of <start_of_image>, in the prompt and before the soft tokens.
    soft: id of a soft token, whose embedding is replaced.
    end: id of <end_of_image>.
    per_image: number of soft tokens of an image.
    newlines: ids of one, two, three, ... consecutive newlines. The tokenizer encodes
      consecutive newlines as one token. An image adds two, so after one newline in the
      prompt it gets the token of three.
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
        f"newlines are {self.newlines}; expected at least the ids of one and of two "
        "newlines, because an image has two newlines on each side"
      )
    ids = (self.start, self.soft, self.end, *self.newlines)
    if len(set(ids)) < len(ids):
      raise ValueError(
        f"start {self.start}, soft {self.soft}, end {self.end} and newlines "
        f"{self.newlines} must differ: take the ids from the tokenizer"
      )


def expand_images(ids: Iterable[int], tokens: ImageTokens) -> list[int]:
  r"""Replaces each <start_of_image> by its expansion.

  The result equals tokenizing "\n\n<start_of_image>...<end_of_image>\n\n" in the text:
  newlines of the prompt beside an image join the image's newlines into one token.
  Hugging Face's processor, which the checkpoints are used with, works on the text.
  Google's code inserts a separate "\n\n" instead.

  Args:
    ids: token ids of the prompt, with one `tokens.start` per image.
    tokens: the ids around an image.

  Returns:
    The token ids with all images expanded.

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
  trailing = 0  # newlines that end the prompt so far and are not yet in `out`
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
  """Returns the tokens of a run of newlines, the longest tokens first."""
  whole, rest = divmod(count, len(ids))
  return [ids[-1]] * whole + ([ids[rest - 1]] if rest else [])
