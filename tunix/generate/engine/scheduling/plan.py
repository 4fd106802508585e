"""The plan of a launch, as the scheduler makes it and the device runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.scheduling.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Block:
  """Consecutive tokens of one completion that a round prefills.

  Attributes:
    sequence: the completion.
    start: position of the first token.
    count: number of tokens.
    is_joined: True if the block must be in the round of the block before it, because
      tokens of both attend to each other.
  """

  sequence: Sequence
  start: int
  count: int
  is_joined: bool = False

  @property
  def is_last(self) -> bool:
    """True if the next token is drawn after this block."""
    return self.start + self.count == self.sequence.length


@dataclasses.dataclass(frozen=True)
class Fork:
  """A follower that draws its first token from the prefill of its leader.

  Attributes:
    leader, follower: the two completions, which have the same prompt.
    copied: the leader's last page of each group of layers, if the prompt fills it only
      partly; the follower gets a copy of this page. Otherwise ().
  """

  leader: Sequence
  follower: Sequence
  copied: tuple[int, ...]


@dataclasses.dataclass
class Plan:
  """The work of one launch.

  Attributes:
    loads: completions that are new in their slots; their pages fill the slots.
    copies: pages that are copied before the rounds, (from, to) of each group of layers.
    rounds: blocks of each round that prefills.
    decode_rounds: number of rounds after `rounds`; these only decode.
    forks: first tokens that are drawn for followers.
    is_empty: the launch calls its programs without running a round; the blocks have no
      tokens.
  """

  loads: list[Sequence] = dataclasses.field(default_factory=list)
  copies: list[tuple[tuple[int, int], ...]] = dataclasses.field(default_factory=list)
  rounds: list[list[Block]] = dataclasses.field(default_factory=list)
  decode_rounds: int = 0
  forks: list[Fork] = dataclasses.field(default_factory=list)
  is_empty: bool = False

  def fills_a_round(self, config: EngineConfig) -> bool:
    """Returns True if a round prefills `prefill_tokens` tokens."""
    return any(len(blocks) == config.block_counts[-1] for blocks in self.rounds)


def rounds_of(
  sequences: Iterable[Sequence],
  config: EngineConfig,
  most: int,
  most_blocks: int | None = None,
) -> list[list[Block]]:
  """Cuts the tokens to prefill into blocks of a page, and blocks into rounds.

  Args:
    sequences: the running completions, earliest rank first.
    config: sizes of the engine.
    most: largest number of rounds; further blocks wait for the next launch.
    most_blocks: largest number of blocks; None for no limit.
  """
  size = config.page_tokens
  blocks = [
    block
    for s in sequences
    if s.leader is None and not s.is_decoding
    for block in _blocks_of(s, size)
  ]
  if most_blocks is not None:
    blocks = blocks[: _whole(blocks, most_blocks)]
  out = []
  while blocks and len(out) < most:
    # Takes the largest size of a round that the blocks fill. The rest goes into smaller
    # rounds. These cost little: each round also decodes, so it would run anyway.
    counts = config.block_counts
    count = max((n for n in counts if n <= len(blocks)), default=counts[0])
    # Or fewer, or more, if an image would be cut.
    count = _whole(blocks, count) or next(
      n for n in range(count, len(blocks) + 1) if _whole(blocks, n) == n
    )
    out.append(blocks[:count])
    blocks = blocks[count:]
  return out


def _blocks_of(s: Sequence, size: int) -> list[Block]:
  """Returns the blocks of the tokens of a completion that are not computed yet."""
  images = s.images
  if images is None:
    starts = range(s.computed, s.length, size)
    return [Block(s, at, min(size, s.length - at)) for at in starts]
  starts = images.block_starts(s.computed, s.length, size)
  return [
    Block(s, at, end - at, at > s.computed and images.is_inside_run(at))
    for at, end in zip(starts, [*starts[1:], s.length])
  ]


def _whole(blocks: list[Block], count: int) -> int:
  """Returns the largest number of blocks, up to `count`, that end with no image cut."""
  while 0 < count < len(blocks) and blocks[count].is_joined:
    count -= 1
  return min(count, len(blocks))
