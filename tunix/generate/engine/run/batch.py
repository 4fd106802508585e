"""Batches of requests that are completed in the thread of the caller."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.request import EngineRequest, Ticket
from tunix.generate.engine.scheduling.draft_policy import Source
from tunix.generate.tokens import Completion


def run(engine: Any, requests: Seq[EngineRequest]) -> list[list[Completion]]:
  """Submits requests, steps the engine until they have ended, and collects them.

  Args:
    engine: an `Engine`.
    requests: the requests.

  Raises:
    ValueError: one of the requests can never run; the others are cancelled.
    RuntimeError: waiting completions are held back.
  """
  tickets: dict[int, Ticket] = {}
  try:
    # The longest starts first, because otherwise it would run alone at the end.
    for i in sorted(range(len(requests)), key=lambda i: -requests[i].max_tokens):
      tickets[i] = engine.submit(requests[i], streams=False)
  except Exception:  # no result is returned, so the other requests need not run
    for ticket in tickets.values():
      engine.cancel(ticket)
    raise
  while any(map(engine.is_open, tickets.values())):
    if not engine.step():
      raise RuntimeError(
        "waiting completions are held back, expected that they may start: call "
        "hold_back(False) first"
      )
  return [engine.collect(tickets[i]) for i in range(len(requests))]


def plain_request(config: EngineConfig, token: int) -> EngineRequest:
  """Returns a short request, for which the narrowest rows suffice.

  Args:
    config: sizes of the engine.
    token: token id of its prompt.
  """
  return EngineRequest(
    prompt=np.full(1, token, np.int32),
    max_tokens=min(config.rounds + 1, config.max_tokens - 1),
    temperature=1.0,
    seed=0,
    stop_ids=(),
    logprobs=True,
  )


WarmUpPart = tuple[Source | None, list[EngineRequest]]


def warm_up_parts(
  config: EngineConfig, vocab_size: int, sources: Seq[Source], constraints: bool
) -> list[WarmUpPart]:
  """Returns batches that run programs of plain and of constrained requests.

  Args:
    config: sizes of the engine.
    vocab_size: V.
    sources: sources of drafts.
    constraints: True adds constrained requests.

  Returns:
    Pairs of a source of drafts (None for constrained requests) and a batch.
  """
  plain: list[WarmUpPart] = [
    # Prompts that differ between sources, so that no prefix is in the cache.
    (source, [plain_request(config, number % vocab_size)])
    for number, source in enumerate(sources)
  ]
  bound = constrained_requests(config, vocab_size) if constraints else []
  return [*plain, *((None, requests) for requests in bound)]


class AnyText:
  """A constraint that allows every token, see `request.Constraint`.

  Args:
    vocab_size: V.
  """

  def __init__(self, vocab_size: int):
    self._mask = np.full(-(-vocab_size // 32), 2**32 - 1, np.uint32)

  def matcher(self) -> AnyText:
    return self

  def mask(self) -> np.ndarray:
    return self._mask

  def accept(self, token: int) -> None:
    pass


def constrained_requests(
  config: EngineConfig, vocab_size: int
) -> list[list[EngineRequest]]:
  """Returns batches of requests that run the programs of constrained requests.

  Each number of blocks of a round has a program, and so do rounds without prefill. A
  batch has the smallest number of blocks that needs the next program.

  Args:
    config: sizes of the engine.
    vocab_size: V.
  """
  constraint, size = AnyText(vocab_size), config.page_tokens
  most = max(1, config.max_tokens - 2)
  pages = max(1, most // size)  # of one prompt
  batches, needed, token = [], 1, 0
  for width in config.block_counts:
    counts = [min(pages, needed - done) for done in range(0, needed, pages)]
    needed = width + 1
    if len(counts) > config.slots:
      break  # a round has at most one prompt for each slot
    batch = []
    for count in counts:
      token += 1  # a new prompt, so that no prefix is in the cache
      batch.append(
        EngineRequest(
          prompt=np.full(min(count * size, most), token % vocab_size, np.int32),
          max_tokens=min(2, config.max_tokens - most),
          temperature=1.0,
          seed=0,
          stop_ids=(),
          logprobs=True,
          constraint=constraint,
        )
      )
    batches.append(batch)
  return batches
