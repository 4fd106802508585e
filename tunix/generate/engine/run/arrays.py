"""A launch as arrays: the rules and places of the slots, and the blocks of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Seq

import numpy as np

from tunix.generate.drawing import filters
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.device.state import Blocks, Slots, Vectors
from tunix.generate.engine.device.token_sampling import Rules
from tunix.generate.engine.request import EngineRequest
from tunix.generate.engine.scheduling.plan import Block, Fork, Plan
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.generate.sizes import batching
from tunix.models.images.prompt_images import PromptImages

STOP_IDS = 16  # most ids that end a completion
BIASES = 320  # most ids with a bias; OpenAI's API allows 300

Running = Seq[Sequence | None]


def slots_of(
  running: Running, plan: Plan, config: EngineConfig, shifts: bool = False
) -> Slots:
  """Returns the state of the slots before a launch; `shifts`: with `Slots.shift`."""
  count, drafts = config.slots, config.draft_tokens

  def numbers():
    return np.zeros(count, np.int32)

  slots = Slots(
    last=numbers(),
    position=numbers(),
    index=numbers(),
    limit=numbers(),
    active=np.zeros(count, bool),
    is_waiting=np.zeros(count, bool),
    stop_ids=np.full((count, STOP_IDS), batching.NO_TOKEN, np.int32),
    history=np.full((count, config.max_tokens if drafts else 0), -1, np.int32),
    drafted=numbers(),
    shift=numbers() if shifts else None,
  )
  for at, s in enumerate(running):
    if s is None:
      continue
    slots.last[at], slots.position[at] = s.tokens[s.length - 1], s.length - 1
    slots.index[at], slots.limit[at] = s.drawn, s.limit
    slots.active[at], slots.drafted[at] = s.is_decoding, s.drafted
    slots.stop_ids[at, : len(s.stop_ids)] = s.stop_ids
    if slots.shift is not None and s.images is not None:
      slots.shift[at] = s.images.shift
    if drafts:
      slots.history[at, : s.length] = s.known
  for fork in plan.forks:
    slots.is_waiting[fork.follower.slot] = True
  return slots


FLAGS = ("draws", "filters", "biases", "scores", "tops")


def uses_of(request: EngineRequest) -> frozenset[str]:
  """Returns the flags of `token_sampling.Rules` that a request needs."""
  used = {
    "draws": request.temperature > 0,
    "filters": bool(request.filters),
    "biases": bool(request.logit_bias),
    "scores": request.logprobs,
    "tops": request.top_logprobs > 0,
    "prompts": request.prompt_logprobs,
  }
  return frozenset(name for name, is_used in used.items() if is_used)


def rules_of(running: Running, count: int, uses: frozenset[str]) -> Rules:
  """Returns the rules of the slots.

  Args:
    running: the completion in each slot.
    count: number of slots.
    uses: flags that the programs are compiled for.
  """
  rules = Rules(
    keys=np.zeros((count, 2), np.uint32),
    rows=np.zeros(count, np.int32),
    temperature=np.zeros(count, np.float32),
    filter_values={name: np.full(count, off) for name, off in filters.OFF.items()},
    bias_ids=np.full((count, BIASES), batching.NO_TOKEN, np.int32),
    bias=np.zeros((count, BIASES), np.float32),
    **dict.fromkeys(FLAGS, np.False_),
    uses=uses,
  )
  on: set[str] = set()
  for at, s in enumerate(running):
    if s is None:
      continue
    r = s.request
    rules.keys[at], rules.rows[at] = s.key, r.first_row + s.sample
    rules.temperature[at] = r.temperature
    for name, value in s.filters.items():
      rules.filter_values[name][at] = value
    if r.logit_bias:
      rules.bias_ids[at, : len(r.logit_bias)] = list(r.logit_bias)
      rules.bias[at, : len(r.logit_bias)] = list(r.logit_bias.values())
    on |= s.uses
  flags = {name: np.bool_(name in on) for name in FLAGS}
  return dataclasses.replace(rules, **flags)


def blocks_of(
  rounds: Seq[Seq[Block]],
  forks: Seq[Fork],
  width: int,
  config: EngineConfig,
  vectors_of: Callable[[PromptImages], np.ndarray],
) -> Blocks:
  """Returns the blocks of rounds.

  Args:
    rounds: the blocks of each round, at most `width` each.
    forks: first tokens that are drawn for followers.
    width: number N of blocks of a round, those that only fill it included.
    config: sizes of the engine.
    vectors_of: returns the vectors of a prompt's images, see `Vectors.table`.
  """
  shape, size = (config.rounds, width), config.page_tokens
  blocks = Blocks(
    vectors=_vectors(rounds, (*shape, size), vectors_of),
    tokens=np.zeros((*shape, size), np.int32),
    targets=np.zeros((*shape, size), np.int32),
    slots=np.zeros(shape, np.int32),
    starts=np.zeros(shape, np.int32),
    counts=np.zeros(shape, np.int32),
    draws=np.full((config.rounds, config.slots), -1, np.int32),
    ends=np.zeros((config.rounds, config.slots), np.int32),
    scores=np.bool_(any(b.sequence.request.prompt_logprobs for r in rounds for b in r)),
  )
  for number, each in enumerate(rounds):
    for n, block in enumerate(each):
      s, end = block.sequence, block.start + block.count
      at = number, n
      blocks.tokens[at][: block.count] = s.tokens[block.start : end]
      targets = s.tokens[block.start + 1 : min(end + 1, s.length)]
      blocks.targets[at][: len(targets)] = targets
      blocks.slots[at], blocks.starts[at] = s.slot, block.start
      blocks.counts[at] = block.count
      if block.is_last:
        drawing = [s, *(f.follower for f in forks if f.leader is s)]
        for one in drawing:
          blocks.draws[number, one.slot] = n * size + block.count - 1
          blocks.ends[number, one.slot] = end
  return blocks


def _vectors(
  rounds: Seq[Seq[Block]],
  shape: tuple[int, ...],
  vectors_of: Callable[[PromptImages], np.ndarray],
) -> Vectors | None:
  """Returns the vectors of the images in blocks, or None.

  Args:
    rounds: the blocks of each round.
    shape: sizes R, N and Q of the arrays.
    vectors_of: see `blocks_of`.
  """
  index = np.full(shape, -1, np.int32)
  last = np.zeros(shape, np.int32)
  tables, used, both_ways = [], 0, False
  rope: np.ndarray | None = None
  for number, each in enumerate(rounds):
    for n, block in enumerate(each):
      places, end = block.sequence.images, block.start + block.count
      last[number, n] = block.start + np.arange(shape[2])
      if places is None:
        continue
      vectors = places.vector[block.start : end]
      is_image = vectors >= 0
      if (offsets := places.rope_offsets(block.start, end)) is not None:
        rope = np.zeros((*shape, offsets.shape[1]), np.int32) if rope is None else rope
        rope[number, n, : block.count] = offsets
      elif not is_image.any():
        continue
      tables.append(vectors_of(places.images)[vectors[is_image]])
      at = used + np.cumsum(is_image) - 1
      index[number, n, : len(vectors)] = np.where(is_image, at, -1)
      used += len(tables[-1])
      if places.last is not None:
        last[number, n, : len(vectors)] = places.last[block.start : end]
        both_ways = True
  if not tables:
    return None
  rows = np.zeros((batching.bucket(used), tables[0].shape[1]), tables[0].dtype)
  rows[:used] = np.concatenate(tables)
  return Vectors(rows, index, last if both_ways else None, rope)
