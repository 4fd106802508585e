"""The estimate of rollouts: KV cache, rows that fit, tokens per second."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from tunix.generate.decoders import layout
from tunix.generate.decoders.memory import Memory
from tunix.perf.programs import ProgramRecord
from tunix.plan import residents
from tunix.plan.program import ProgramEstimate

OPENING = "unstack"  # slices stacked layers, and lays the weights out for decoding
LOOP = "decode"  # a loop whose length depends on data; figures are of one pass


class NoText:
  """The tokenizer of a plan, which reads no text and samples none."""

  def encode(self, text: str, **options: object) -> list[int]:
    """Returns one id for each character; the ids are not used."""
    del options
    return [0] * len(text)

  def decode(self, ids: Sequence[int], **options: object) -> str:
    """Returns an empty text."""
    del ids, options
    return ""

  def bos_id(self) -> None:
    """Returns None: there is no such id."""

  def eos_id(self) -> int:
    """Returns 0. Programs do not depend on which id ends a row."""
    return 0

  def pad_id(self) -> int:
    """Returns 0. Programs do not depend on the id of padding."""
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
  """Memory and speed of sampling, as far as memory and its bandwidth decide.

  Attributes:
    rows: number of completions that are decoded together.
    slots: tokens in the cache of a row, prompt and completion together.
    cache_token_bytes: bytes of one token's keys and values, on all devices together.
    cache_bytes: bytes of the cache on one device, for all rows.
    most_rows: number of rows that fit beside all else; None: the memory of a device is
      not known.
    tokens_per_second: upper bound for all devices together; None: their rates are not
      known.
    weights: layout of the weights in the loop; see `layout.for_decoding`.
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


def passes(decode: ProgramRecord) -> int:
  """Returns the tokens that the loop adds to a row: all but the first one.

  The prefill gives the first token.
  """
  rules = decode.args[2]
  return max(1, int(np.max(rules.limits)) - 1)


def of_loop(
  decode: ProgramRecord,
  planned: ProgramEstimate,
  memory_bytes: float | None,
  opening: ProgramRecord | None = None,
) -> Rollouts | None:
  """Estimates rollouts from the token loop; None if the model has no KV cache of ours.

  Args:
    decode: the recorded loop.
    planned: estimate of one pass through the loop.
    memory_bytes: memory of a device; None: not known.
    opening: program that lays the weights out before the loop; None: there is none.
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
