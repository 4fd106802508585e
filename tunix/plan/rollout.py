"""What rollouts take: the cache of keys and values, rows that fit, tokens a second."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tunix.generate import layout
from tunix.generate.memory import Memory
from tunix.perf.programs import Noted
from tunix.plan import residents
from tunix.plan.program import ProgramPlan

OPENING = "unstack"  # slices of stacked layers, and weights laid out anew
LOOP = "decode"  # the program whose length is data: what is read of it is one pass


class NoText:
  """The tokenizer of a plan: nothing is read, and what nobody sampled says nothing."""

  def encode(self, text: str, **options: Any) -> list[int]:
    """A token a letter, none of which is looked at."""
    del options
    return [0] * len(text)

  def decode(self, ids: Sequence[int], **options: Any) -> str:
    """Nothing."""
    del ids, options
    return ""

  def bos_id(self) -> None:
    """There is none."""

  def eos_id(self) -> int:
    """The id that ends a row; which one is no part of a program."""
    return 0

  def pad_id(self) -> int:
    """Likewise."""
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
  """How completions are sampled, as far as memory and its rate decide.

  Attributes:
    rows: completions that are decoded together.
    slots: tokens of a row's cache, prompt and completion.
    cache_token_bytes: keys and values of a token, on all devices together.
    cache_bytes: of a device, for all rows.
    most_rows: that fit beside all else; None: the memory of a device is not known.
    tokens_per_second: of all devices together, at most; None: their rates are not
      known.
    weights: how they lie in the loop; see `layout.for_decoding`.
  """

  rows: int
  slots: int
  cache_token_bytes: int
  cache_bytes: int
  most_rows: int | None
  tokens_per_second: float | None
  weights: str = layout.words(None)

  def __str__(self) -> str:
    lines = [
      f"rollouts: {self.rows:,} rows of {self.slots:,} tokens, whose cache takes "
      f"{self.cache_token_bytes / 1024:,.1f} KiB a token, "
      f"{self.cache_bytes / 2**30:,.2f} GiB of each device"
    ]
    if self.most_rows is not None:
      lines.append(f"at most {self.most_rows:,} such rows fit")
    if self.tokens_per_second is not None:
      lines.append(f"at most {self.tokens_per_second:,.0f} tokens/s on all devices")
    lines.append(f"weights lie {self.weights}")
    return "; ".join(lines)


def passes(decode: Noted) -> int:
  """Tokens of a row that a run of the loop adds: all but the first, which the prefill
  gives."""
  rules = decode.args[2]
  return max(1, int(np.max(rules.limits)) - 1)


def of_loop(
  decode: Noted,
  planned: ProgramPlan,
  memory_bytes: float | None,
  opening: Noted | None = None,
) -> Rollouts | None:
  """What the token loop says of rollouts; None where the model has no cache of ours.

  Args:
    decode: the loop as it was noted.
    planned: what one pass through it needs.
    memory_bytes: of a device; None: not known.
    opening: what lays the weights out before it; None: nothing does.
  """
  memory = decode.args[4]
  if not isinstance(memory, Memory):
    return None
  rows, slots = memory.visible.shape
  buffers = [x for x in jax.tree.leaves(memory.cache) if x.ndim]
  whole = sum(x.size * x.dtype.itemsize for x in buffers)
  of_device = sum(map(residents.shard_bytes, buffers))
  most = None
  if memory_bytes is not None:
    free = memory_bytes - (planned.held_bytes - of_device)
    most = max(0, int(free * rows // of_device))
  speed = None if not planned.seconds else rows / planned.seconds
  return Rollouts(
    rows=rows,
    slots=slots,
    cache_token_bytes=whole // (rows * slots),
    cache_bytes=of_device,
    most_rows=most,
    tokens_per_second=speed,
    weights=layout.words(opening and opening.args[1]),
  )
