"""The programs of an engine: launches without work, for plans and warm-ups.

Which programs a launch runs depends on what was drawn before, so a plan cannot follow a
run. It goes through launches of each kind instead, whose blocks have no token and whose
slots decode nothing. Programs depend on sizes alone, so these are those of a run. The
code is that of every launch (`Device.launch`), for plans inside `programs.recording`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence as Seq

import numpy as np

from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.run.device import Device
from tunix.generate.engine.scheduling.draft_policy import Source
from tunix.generate.engine.scheduling.plan import Block, Plan
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.generate.tokens import Completion


def launch(
  device: Device,
  config: EngineConfig,
  sequences: Seq[Sequence],
  sources: Seq[Source] = ("none",),
  widths: Seq[int] | None = None,
) -> None:
  """Calls the programs that an engine runs for completions.

  Args:
    device: the weights and the cache; of shapes for a plan.
    config: sizes of the engine.
    sequences: completions with all rules that the engine is to support.
    sources: all sources of drafts; the last one runs the most.
    widths: widths of rows whose programs are called. None: the widest rows only, with
      the largest round of prompt tokens.
  """
  first = dataclasses.replace(
    sequences[0], uses=frozenset().union(*(s.uses for s in sequences)), slot=0
  )
  is_whole = widths is not None
  for width in [config.max_tokens] if widths is None else widths:
    limit = min(width, config.max_tokens)
    tokens = np.zeros(limit, np.int32)
    # Rows are as wide as the tokens of the completion.
    one = dataclasses.replace(first, tokens=tokens, length=limit, limit=limit)
    running = [one, *[None] * (config.slots - 1)]
    for plan in _plans(one, config, is_whole):
      for source in sources if is_whole else sources[-1:]:
        device.launch(plan, running, None, source)
    if is_whole:
      device.warm_up_moves()


def _plans(sequence: Sequence, config: EngineConfig, is_whole: bool) -> Iterator[Plan]:
  """Yields launches that run a program first in a launch, and after another one."""
  rounds = {n: [Block(sequence, 0, 0)] * n for n in config.block_counts}
  most = max(rounds)
  yield Plan(rounds=[rounds[most]], decode_rounds=1, is_empty=True)
  if not is_whole:
    return
  yield Plan(decode_rounds=1, is_empty=True)
  for blocks in rounds.values():
    yield Plan(rounds=[blocks], is_empty=True)
    for before in (rounds[min(rounds)], rounds[most]):
      if before is not blocks and config.rounds > 1:
        yield Plan(rounds=[before, blocks], is_empty=True)


def completions(sequence: Sequence) -> list[Completion]:
  """Returns completions of one token, in place of those that were not drawn.

  Args:
    sequence: the first completion of a request.
  """
  request, routes = sequence.request, sequence.routes
  one = np.ones(1, np.int32)
  logps = np.zeros(1, np.float32) if request.logprobs else None
  made = Completion(
    prompt=request.prompt,
    ids=one,
    logps=logps,
    sampling_logps=logps,
    versions=one,
    routes=None if routes is None else routes[: sequence.length + 1],
    finish_reason="length",
  )
  return [made] * request.num_samples
