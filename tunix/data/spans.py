"""Where the trained text of a rendered conversation stands.

Found by rendering, not by asking the template: the conversation is rendered again
with the turn's content replaced by two stand-ins, and what differs is the content.
This holds for templates that drop earlier thinking, trim white space or merge the
system turn into the user's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Renderer = Callable[[Sequence[Message], bool], str]

# Private-use characters, which occur in no text; the first and the last of the two
# differ, so that common prefixes and suffixes end exactly at the content.
_STAND_INS = ("\ue000\ue001", "\ue002\ue003")
_CONTENT_KEYS = ("content", "reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True)
class Segment:
  """A piece of text that is trained as a whole, or not at all."""

  text: str
  trained: bool


def find_segments(
  messages: Sequence[Message],
  turns: Sequence[int],
  render: Renderer,
  end_tokens: Sequence[str],
) -> tuple[list[Segment], bool]:
  """The rendered conversation, cut where training starts and stops.

  A turn's trained text begins where the generation prompt ends (so an empty think
  block that the template inserts is learned as well), or with the content where the
  conversation does not begin with that prompt; it ends behind the token that closes
  the turn.

  Args:
    messages: the conversation.
    turns: indices of the messages to train, ascending.
    render: (messages, add_generation_prompt) -> text.
    end_tokens: texts of special tokens that may close a turn.

  Returns:
    The segments, whose texts join to the rendered conversation (without white space
    behind a last turn that no token closes), and whether EOS must follow them.
  """
  full = render(messages, False)
  closing = re.compile("|".join(sorted(map(re.escape, end_tokens), key=len)[::-1]))
  segments: list[Segment] = []
  done, needs_eos = 0, False
  for turn in turns:
    content = _content_span(messages, turn, full, render)
    if content is None:
      continue
    start = max(done, _answer_start(messages, turn, full, render, content))
    stop = _closing_stop(
      full, content[1], closing if end_tokens else None, messages[turn]
    )
    if stop is None and turn == len(messages) - 1:
      needs_eos = True
      full = full.rstrip() if full[content[1] :].strip() else full[: content[1]]
      stop = len(full)
    stop = max(start, content[1] if stop is None else stop)
    segments += [Segment(full[done:start], False), Segment(full[start:stop], True)]
    done = stop
  segments.append(Segment(full[done:], False))
  return [s for s in segments if s.text], needs_eos


def _content_span(
  messages: Sequence[Message], turn: int, full: str, render: Renderer
) -> tuple[int, int] | None:
  """Start and end of the turn's content, None if the template leaves the turn out."""
  one, two = (render(_with_content(messages, turn, s), False) for s in _STAND_INS)
  if one == two:
    return None
  start = min(_common_prefix(full, one), _common_prefix(full, two))
  tail = min(_common_prefix(full[::-1], other[::-1]) for other in (one, two))
  return start, max(start, len(full) - tail)


def _with_content(
  messages: Sequence[Message], turn: int, text: str
) -> list[dict[str, Any]]:
  changed = [dict(message) for message in messages]
  message = changed[turn]
  message |= {k: text for k in _CONTENT_KEYS if isinstance(message.get(k), str)}
  message["content"] = text
  return changed


def _answer_start(
  messages: Sequence[Message],
  turn: int,
  full: str,
  render: Renderer,
  content: tuple[int, int],
) -> int:
  """Where generation would have started, had the model been asked for this turn."""
  if turn == 0:
    return content[0]
  try:
    prompt = render(messages[:turn], True)
  except ValueError:  # a template may refuse a conversation that stops here
    return content[0]
  fits = full.startswith(prompt) and len(prompt) <= content[1]
  return len(prompt) if fits else content[0]


def _closing_stop(
  full: str, end: int, closing: re.Pattern[str] | None, message: Message
) -> int | None:
  """Behind the special token that closes the turn; None if there is none.

  Only white space may stand between. A call of a tool is rendered behind the content
  and belongs to the turn, so there the next special token is looked for.
  """
  if closing is None:
    return None
  if message.get("tool_calls"):
    found = closing.search(full, end)
  else:
    found = closing.match(full, end + len(full[end:]) - len(full[end:].lstrip()))
  return found.end() if found else None


def _common_prefix(a: str, b: str) -> int:
  """Length of the longest common prefix, by bisection (slices compare in C)."""
  low, high = 0, min(len(a), len(b))
  while low < high:
    middle = (low + high + 1) // 2
    if a[:middle] == b[:middle]:
      low = middle
    else:
      high = middle - 1
  return low
