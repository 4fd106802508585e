"""Batches of requests that are completed in the thread of the caller."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.request import Completion, EngineRequest, Ticket


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
    # The longest first: it would run alone at the end.
    for i in sorted(range(len(requests)), key=lambda i: -requests[i].max_tokens):
      tickets[i] = engine.submit(requests[i], streams=False)
  except Exception:  # one cannot run, and the others would run for nobody
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


def plain_requests(config: EngineConfig, token: int) -> list[EngineRequest]:
  """Returns requests that run the programs of plain requests.

  Args:
    config: sizes of the engine.
    token: token id that fills their prompts.
  """
  length = max(1, min(config.max_tokens // 2, config.prefill_tokens))
  return [
    EngineRequest(
      prompt=np.full(size, token, np.int32),
      max_tokens=min(config.rounds + 1, config.max_tokens - size),
      temperature=1.0,
      seed=0,
      stop_ids=(),
      logprobs=True,
    )
    for size in sorted({1, length})
  ]
