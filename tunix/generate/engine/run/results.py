"""Results of a launch: tokens, texts and scores, handed to the tickets."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunix.generate.engine.device.state import LaunchOutput, PromptOut
from tunix.generate.engine.request import RequestError, Ticket
from tunix.generate.engine.scheduling import matchers
from tunix.generate.engine.scheduling.plan import Block
from tunix.generate.engine.scheduling.sequence import Sequence
from tunix.generate.tokens import Completion, Delta, Tokens, joined
from tunix.utils.setting import named_values


def take(s: Sequence, out: LaunchOutput) -> tuple[int, str | None]:
  """Appends the tokens that a launch drew for a completion.

  Args:
    s: the completion.
    out: results of the launch, on the host.

  Returns:
    The number of new tokens, and the reason for the end, None if it has not ended.
  """
  assert s.slot is not None
  prompt, count = len(s.request.prompt), int(out.count[s.slot])
  if not count:
    return 0, None
  drawn = out.chosen.ids[s.slot, :count]
  s.tokens[s.length : s.length + count] = drawn
  routes = out.chosen.routes
  if routes is not None:  # experts of the inputs: the token before each drawn one
    s.record(s.length - 1, np.asarray(routes[s.slot, :count]))
  stopped, length = bool(out.stopped[s.slot]), s.length + count
  reason = "eos" if stopped else "length" if length >= s.limit else None
  try:
    stop = s.reader.find_stop(s.tokens[prompt : length - stopped])
    if stop is not None:  # tokens after the stop string do not count
      count, reason = prompt + stop - s.length, "stop"
    if reason != "eos":
      matchers.accept(s, np.asarray(drawn[:count]))
  except RequestError as error:  # only this completion fails
    s.failure = error
  s.length += count
  return count, reason


def hand_out(
  s: Sequence,
  out: LaunchOutput,
  slot: int,
  count: int,
  reason: str | None,
  version: int,
) -> None:
  """Puts the last `count` tokens of a completion into its ticket.

  If they cannot be decoded, sets the `failure` of the completion instead.
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
  columns = _columns(s, out, slot, count)
  if reason is not None:
    columns["routes"] = _routes(s)
  s.ticket.put(
    Delta(
      sample=s.sample,
      text=text,
      prompt=request.prompt,
      versions=np.full(count, version, np.int32),
      finish_reason=reason,
      **columns,
    )
  )


def _columns(s: Sequence, out: LaunchOutput, slot: int, count: int) -> dict[str, Any]:
  """Returns the columns of the drawn tokens that the request asks for."""
  chosen, request, tops = out.chosen, s.request, ("top_ids", "top_logps")
  columns = chosen._asdict() if request.logprobs else {"ids": chosen.ids}
  left = (*tops, "routes")
  columns = {n: x for n, x in columns.items() if n not in left and x is not None}
  if most := request.top_logprobs:
    columns |= {n: x[:, :, :most] for n, x in named_values(chosen, tops).items()}
  # Copies, because a view would keep the arrays of all slots alive.
  return {name: x[slot, :count].copy() for name, x in columns.items()}


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
  last = {"versions": np.zeros(0, np.int32), "finish_reason": "cancelled"}
  s.ticket.put(Delta(sample=s.sample, prompt=s.request.prompt, **last))


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
        prompt, top = s.request.prompt, {}
        if most := s.request.top_logprobs:
          top = {"top_ids": ids[:, :most], "top_logps": values[:, :most]}
        s.ticket.prompt_scores = Tokens(
          prompt=prompt[:1], ids=prompt[1:], logps=logps, **top
        )


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
