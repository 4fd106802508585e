"""Results of a launch: tokens, texts and scores, handed to the tickets."""

from __future__ import annotations

import numpy as np

from tunix.generate.engine.device.state import Out, PromptOut
from tunix.generate.engine.host import matching
from tunix.generate.engine.host.plan import Block
from tunix.generate.engine.host.sequence import Sequence
from tunix.generate.engine.request import (
  Completion,
  Delta,
  PromptScores,
  RequestError,
  Ticket,
  TopLogprobs,
)


def take(s: Sequence, out: Out, version: int) -> tuple[int, str | None]:
  """Appends the tokens that a launch drew for a completion.

  Args:
    s: the completion.
    out: results of the launch, on the host.
    version: number of the weights.

  Returns:
    The number of new tokens, and why the completion ended, or None.
  """
  assert s.slot is not None
  prompt, count = len(s.request.prompt), int(out.count[s.slot])
  if not count:
    return 0, None
  drawn = out.tokens[s.slot, :count]
  s.tokens[s.length : s.length + count] = drawn
  if out.routes is not None:  # each token is drawn by a run of the token before it
    s.record(s.length - 1, np.asarray(out.routes[s.slot, :count]))
  stopped, length = bool(out.stopped[s.slot]), s.length + count
  reason = "eos" if stopped else "length" if length >= s.limit else None
  try:
    stop = s.reader.find_stop(s.tokens[prompt : length - stopped])
    if stop is not None:  # what was drawn after it does not count
      count, reason = prompt + stop - s.length, "stop"
    if reason != "eos":
      matching.accept(s, np.asarray(drawn[:count]))
  except RequestError as error:  # it concerns this completion only
    s.failure = error
  s.length += count
  s.versions += [version] * count
  return count, reason


def hand_out(s: Sequence, out: Out, slot: int, count: int, reason: str | None) -> None:
  """Puts the last `count` tokens of a completion into its ticket.

  If they have no text, the completion gets its `failure` instead.
  """
  request = s.request
  if not count and reason is None:
    return
  tokens = s.tokens[len(request.prompt) : s.length]
  try:
    text = s.reader.text(tokens, reason)
  except RequestError as error:
    s.failure = error
    return
  # Copies, because a view would keep the arrays of all slots alive.
  cut = lambda x: x[slot, :count].copy()
  top = None
  if most := request.top_logprobs:
    ids, values = cut(out.top_ids), cut(out.top_logps)
    top = TopLogprobs(ids=ids[:, :most], logprobs=values[:, :most])
  s.ticket.put(
    Delta(
      sample=s.sample,
      text=text,
      tokens=tokens[len(tokens) - count :].copy(),
      logprobs=cut(out.logps) if request.logprobs else None,
      sampling_logprobs=cut(out.sampling_logps) if request.logprobs else None,
      top=top,
      versions=np.array(s.versions[len(s.versions) - count :], np.int32),
      routes=None if reason is None else _routes(s),
      finish_reason=reason,
    )
  )


def _routes(s: Sequence) -> np.ndarray | None:
  """Returns the experts of all tokens of a completion, see `Delta`."""
  if s.routes is None:
    return None
  routes = s.routes[: s.length].copy()
  # A stop string may end it before the last token that was drawn.
  routes[s.length - 1 :] = 0
  return routes


def cancelled(s: Sequence) -> None:
  """Puts the last, empty delta of a cancelled completion into its ticket."""
  none = np.zeros(0, np.int32)
  last = Delta(
    sample=s.sample, text="", tokens=none, versions=none, finish_reason="cancelled"
  )
  s.ticket.put(last)


def score_prompts(rounds: list[list[Block]], out: PromptOut, page_tokens: int) -> None:
  """Collects log-probs of prompts, and gives whole ones to their tickets."""
  for number, blocks in enumerate(rounds):
    for n, block in enumerate(blocks):
      s = block.sequence
      if not s.request.prompt_logprobs or s.ticket.prompt_scores is not None:
        continue
      if block.start == 0:  # also after a preemption
        s.scores = []
      at = slice(n * page_tokens, n * page_tokens + block.count)
      s.scores.append([np.array(x[number, at]) for x in out[:3]])
      if block.is_last:
        logps, ids, values = (np.concatenate(x)[:-1] for x in zip(*s.scores))
        most = s.request.top_logprobs
        top = TopLogprobs(ids=ids[:, :most], logprobs=values[:, :most])
        s.ticket.prompt_scores = PromptScores(logprobs=logps, top=top if most else None)


def record_prompts(rounds: list[list[Block]], out: PromptOut, page_tokens: int) -> None:
  """Records the experts of the tokens of blocks."""
  assert out.routes is not None
  for number, blocks in enumerate(rounds):
    for n, block in enumerate(blocks):
      at = n * page_tokens
      block.sequence.record(
        block.start, np.asarray(out.routes[number, at : at + block.count])
      )


def collected(ticket: Ticket, timeout: float | None) -> list[Completion]:
  """Waits for all completions of a request, see `Engine.collect`."""
  parts: list[list[Delta]] = [[] for _ in range(ticket.request.num_samples)]
  left = len(parts)
  while left:
    delta = ticket.get(timeout)
    parts[delta.sample].append(delta)
    left -= delta.finish_reason is not None
  return [joined(deltas) for deltas in parts]


def joined(deltas: list[Delta]) -> Completion:
  """Returns a completion from its deltas."""
  reason = deltas[-1].finish_reason
  assert reason is not None
  tops = [d.top for d in deltas if d.top is not None]
  join = lambda parts: np.concatenate(parts) if parts else None
  column = lambda name: join([x for d in deltas if (x := getattr(d, name)) is not None])
  ids, values = join([t.ids for t in tops]), join([t.logprobs for t in tops])
  return Completion(
    text="".join(d.text for d in deltas),
    tokens=np.concatenate([d.tokens for d in deltas]),
    logprobs=column("logprobs"),
    sampling_logprobs=column("sampling_logprobs"),
    top=None
    if ids is None or values is None
    else TopLogprobs(ids=ids, logprobs=values),
    versions=np.concatenate([d.versions for d in deltas]),
    routes=deltas[-1].routes,
    finish_reason=reason,
  )
