"""The estimate of the engine: weights, pages of its cache, and the time of a round.

In a round every slot runs one token. It reads all weights once, and the keys and values
of the tokens in the slots.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from flax import nnx

from tunix.generate.decoders import layout
from tunix.generate.engine.cache.paged_store import PageStore
from tunix.generate.engine.cache.slot_state import SlotStore
from tunix.generate.engine.device.state import Blocks, Round
from tunix.models.transformer.paged import attention as paged
from tunix.perf import programs
from tunix.perf.programs import ProgramRecord
from tunix.plan import residents
from tunix.plan.program import ProgramEstimate
from tunix.plan.residents import gib

MIXED = "engine mixed"  # rounds that prefill and decode; figures are of one round
DECODE = "engine decode"  # rounds that decode; figures are of one round

# Programs that make the cache or move parts of it, for which no time is estimated. They
# are shipped.
HELPERS = tuple(
  f"engine {name}" for name in ("zeros", "start", "load", "write", "copy")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineEstimate:
  """Memory and speed of the engine, as far as memory and its bandwidth decide.

  Attributes:
    path: "rows", or the implementation of attention over pages (see `paged.PATHS`).
    slots: number of completions that run at the same time.
    slot_tokens: most tokens of a slot, prompt and completion together.
    pages: number of pages of the cache.
    page_tokens: tokens of a page.
    pages_that_fit: number of pages that fit beside all else; None: the memory of a
      device is not known.
    token_bytes: bytes of one token's keys and values, on all devices together.
    cache_bytes: bytes of the pages, and of the rows, on one device.
    weights_bytes: bytes of the weights in the layout of decoding, on one device.
    weights: that layout in words.
    context: tokens of each slot in the round that is timed.
    round_seconds: lower bound of the time of a round in which all slots decode; None:
      the rates of a device are not known.
  """

  path: str
  slots: int
  slot_tokens: int
  pages: int
  page_tokens: int
  pages_that_fit: int | None
  token_bytes: int
  cache_bytes: int
  weights_bytes: int
  weights: str
  context: int
  round_seconds: float | None

  @property
  def tokens_per_second(self) -> float | None:
    """Upper bound for all devices together, with that context in each slot."""
    return None if not self.round_seconds else self.slots / self.round_seconds

  def lines(self) -> list[str]:
    """Returns the lines of the report."""
    over = self.path if self.path == "rows" else f"pages ({self.path})"
    fits = ""
    if self.pages_that_fit is not None:
      fits = f"; at most {self.pages_that_fit:,} pages fit"
    lines = [
      f"engine: {self.slots:,} slots of at most {self.slot_tokens:,} tokens, attention "
      f"over {over}; weights take {gib(self.weights_bytes)} of each device and lie "
      f"{self.weights}",
      f"cache: {self.pages:,} pages of {self.page_tokens:,} tokens, "
      f"{self.token_bytes / 1024:,.1f} KiB a token, {gib(self.cache_bytes)} of each "
      f"device{fits}",
    ]
    if self.round_seconds:
      lines.append(
        f"a round of {self.slots:,} slots with {self.context:,} tokens each takes at "
        f"least {self.round_seconds * 1e3:,.2f} ms: at most "
        f"{self.tokens_per_second:,.0f} tokens/s on all devices"
      )
    return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """The completions of one call of the engine, each as long as it may be.

  Attributes:
    prompts: number of prompts.
    samples: number of completions of each prompt.
    prompt_tokens, new_tokens: tokens of each prompt and of each completion.
  """

  prompts: int
  samples: int
  prompt_tokens: int
  new_tokens: int

  @property
  def context(self) -> int:
    """Mean number of tokens in a slot while it decodes."""
    return self.prompt_tokens + self.new_tokens // 2


@dataclasses.dataclass(frozen=True)
class EngineRecords:
  """The recorded programs of an engine, and what their arguments tell."""

  records: Mapping[str, ProgramRecord]

  @property
  def _carry(self) -> Round:
    return next(x for x in self.records[DECODE].args if isinstance(x, Round))

  @property
  def _store(self) -> Any:
    """The pages, and the rows, without the states of recurrent layers."""
    store = self._carry.store
    return store.inner if isinstance(store, SlotStore) else store

  @property
  def _blocks(self) -> Blocks:
    return next(x for x in self.records[MIXED].args if isinstance(x, Blocks))

  @property
  def slots(self) -> int:
    """Number of slots."""
    return self._carry.slots.last.shape[0]

  def rounds(self, load: Load) -> dict[str, int]:
    """Returns the least number of rounds of each program for a load.

    A prompt is prefilled once for all of its completions. Rounds that prefill also
    decode.
    """
    _, width, page = self._blocks.tokens.shape
    blocks = load.prompts * -(-load.prompt_tokens // page)
    prefill = -(-blocks // width)
    tokens = load.prompts * load.samples * load.new_tokens
    # The prompt that is prefilled last has all tokens but the first before it.
    decode = max(load.new_tokens - 1, -(-tokens // self.slots) - prefill, 1)
    return {MIXED: prefill, DECODE: decode}

  def read_bytes(self, context: int) -> float:
    """Returns the bytes that a device reads in a round.

    Args:
      context: tokens of each slot.
    """
    layers = self._layers()
    seen = [min(context, w or context) for w in self._windows(len(layers))]
    tokens = sum(n * bytes_ for n, (_, bytes_) in zip(seen, layers))
    return self._weights() + self.slots * tokens

  def estimate(
    self,
    planned: Mapping[str, ProgramEstimate],
    memory_bytes: float | None,
    context: int,
  ) -> EngineEstimate:
    """Returns the estimate of the engine.

    Args:
      planned: estimates of the programs.
      memory_bytes: memory of a device; None: not known.
      context: tokens of each slot in the round that is timed.
    """
    layers, page = self._layers(), self._blocks.tokens.shape[2]
    pages = max(count for count, _ in layers)
    held = sum(count * page * bytes_ for count, bytes_ in layers)
    fits = None
    if memory_bytes is not None:
      most = max(planned[name].held_bytes for name in (MIXED, DECODE))
      free = memory_bytes - (most - held)
      # One page takes the writes of idle slots.
      fits = max(0, int(free * pages // held) - 1)
    opening = self.records.get("unstack")
    return EngineEstimate(
      path=self._path(),
      slots=self.slots,
      slot_tokens=self._slot_tokens(page),
      pages=pages - 1,
      page_tokens=page,
      pages_that_fit=fits,
      token_bytes=round(sum(self._whole_token_bytes())),
      cache_bytes=sum(map(residents.shard_bytes, self._cache())),
      weights_bytes=self._weights(),
      weights=layout.words(opening and opening.args[1]),
      context=context,
      round_seconds=planned[DECODE].seconds,
    )

  def _weights(self) -> int:
    return sum(
      map(residents.shard_bytes, programs.shapes_in(self.records[DECODE].args[1]))
    )

  def _windows(self, layers: int) -> list[int | None]:
    """Returns the window of each layer; None where attention reads all tokens."""
    if self._path() == "rows":
      return [None] * layers  # masked tokens of a row are read as well
    sizes = nnx.merge(*self.records[DECODE].args[:2]).config
    return [sizes.kinds[kind].window for kind in sizes.layer_kinds]

  def _path(self) -> str:
    store = self._store
    return store.layers[0].path if isinstance(store, PageStore) else "rows"

  def _slot_tokens(self, page: int) -> int:
    store = self._store
    if isinstance(store, PageStore):
      return store.tables[0].shape[-1] * page
    return store.rows_v[0].shape[3]

  def _cache(self) -> list[Any]:
    return [x for x in programs.shapes_in(self._carry.store) if x.ndim > 3]

  def _pages(self) -> list[tuple[int, tuple[Any, ...]]]:
    """Returns (number of pages, arrays) of each layer."""
    store = self._store
    if not isinstance(store, PageStore):
      return [(k.shape[0], (k, v)) for k, v in zip(store.pages_k, store.pages_v)]
    axes = [0 if paged.PATHS[x.path].is_joint else 1 for x in store.layers]
    return [(x.pages[0].shape[axis], x.pages) for x, axis in zip(store.layers, axes)]

  def _layers(self) -> list[tuple[int, float]]:
    """Returns (number of pages, bytes of a token on one device) of each layer."""
    page = self._blocks.tokens.shape[2]

    def size(arrays):
      return sum(map(residents.shard_bytes, arrays))

    return [(count, size(arrays) / (count * page)) for count, arrays in self._pages()]

  def _whole_token_bytes(self) -> list[float]:
    """Returns the bytes of a token on all devices, for each layer."""
    page = self._blocks.tokens.shape[2]

    def size(x):
      return math.prod(x.shape) * x.dtype.itemsize

    return [sum(map(size, xs)) / (count * page) for count, xs in self._pages()]
