"""Where the trained text of a rendered conversation stands.

Found by rendering, not by asking the template: the conversation is rendered again
with contents of turns replaced by stand-ins, and what differs is content. This holds
for templates that drop earlier thinking, trim white space or merge the system turn
into the user's.

A conversation is rendered a fixed number of times, however long it is. All contents are
replaced together, then every second one: a turn that was kept stands between two
stand-ins there, where its text can be told from what the template writes around it.
Laid together the pieces must give the whole conversation. Where they do not (what a
template writes for one turn depends on the content of another) every turn is looked at
by itself, at three renderings each.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Renderer = Callable[[Sequence[Message], bool], str]

# Private-use characters, which occur in no text; the first and the last of the two
# differ, so that common prefixes and suffixes end exactly at the content.
_STAND_INS = ("\ue000\ue001", "\ue002\ue003")
_NUMBERED = re.compile("\ue000(\\d+)\ue001")
_CONTENT_KEYS = ("content", "reasoning_content", "thinking", "reasoning")
_SPACE = re.compile(r"\s*")


class Content(NamedTuple):
  """A turn's content in the rendered conversation.

  Attributes:
    start, stop: where it stands.
    header: where it would begin, if it did not begin like what the template writes in
      front of a stand-in (a think block of its own, where the template puts an empty
      one).
  """

  start: int
  stop: int
  header: int


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
  contents = _contents(messages, turns, full, render)
  if contents is None:
    each = {turn: _content_alone(messages, turn, full, render) for turn in turns}
    contents = {turn: content for turn, content in each.items() if content is not None}
  starts = _completion_starts(messages, contents, full, render)
  closing = re.compile("|".join(sorted(map(re.escape, end_tokens), key=len)[::-1]))
  segments: list[Segment] = []
  done, needs_eos = 0, False
  for turn, content in contents.items():
    start, end = max(done, starts[turn]), content.stop
    stop = _closing_stop(full, end, closing if end_tokens else None, messages[turn])
    if stop is None and turn == len(messages) - 1:
      needs_eos = True
      full = full.rstrip() if full[end:].strip() else full[:end]
      stop = len(full)
    stop = max(start, end if stop is None else stop)
    segments += [Segment(full[done:start], False), Segment(full[start:stop], True)]
    done = stop
  segments.append(Segment(full[done:], False))
  return [s for s in segments if s.text], needs_eos


def _contents(
  messages: Sequence[Message], turns: Sequence[int], full: str, render: Renderer
) -> dict[int, Content] | None:
  """The turns' contents, by three renderings; None: these do not say. (A turn that
  shows no stand-in may be left out, or be written in another way.)"""
  gaps = _between(messages, turns, render)
  if gaps is None:
    return None
  first = _between(messages, turns[::2], render)
  second = _between(messages, turns[1::2], render) if turns[1:] else [full]
  if first is None or second is None:
    return None
  contents: dict[int, Content] = {}
  laid, left = "", gaps[0]  # the text so far, and what stood behind its last content
  for at, turn in enumerate(turns):
    before, after = gaps[at], gaps[at + 1]
    # This turn's text, where those beside it are replaced.
    piece = (first if at % 2 else second)[(at + 1) // 2]
    start = _common_prefix(piece, before)
    stop = max(start, len(piece) - _common_prefix(piece[::-1], after[::-1]))
    # Of the text between two turns the one before may have written the beginning in
    # another way, and this one the end: what both leave is what stands there.
    cut = len(before) - len(left)
    if start < cut:
      return None
    laid += before[cut:start]
    place = len(laid)
    contents[turn] = Content(place, place + stop - start, place + len(before) - start)
    laid += piece[start:stop]
    left = piece[stop:]
  return contents if laid + left == full else None


def _between(
  messages: Sequence[Message], turns: Sequence[int], render: Renderer
) -> list[str] | None:
  """The texts around the turns' stand-ins, one more than turns; None: they do not stand
  there in order."""
  changed = list(messages)
  for turn in turns:
    changed[turn] = _with_content(messages[turn], f"\ue000{turn}\ue001")
  text = render(changed, False)
  texts, places, done = [], [], 0
  for mark in _NUMBERED.finditer(text):
    turn = int(mark[1])
    if places[-1:] == [turn]:  # a thought and a content: one turn's
      done = mark.end()
      continue
    places.append(turn)
    texts.append(text[done : mark.start()])
    done = mark.end()
  return [*texts, text[done:]] if places == list(turns) else None


def _content_alone(
  messages: Sequence[Message], turn: int, full: str, render: Renderer
) -> Content | None:
  """A turn's content by two renderings, None if the template leaves the turn out."""
  one, two = (
    render(
      [*messages[:turn], _with_content(messages[turn], s), *messages[turn + 1 :]], False
    )
    for s in _STAND_INS
  )
  if one == two:
    return None
  start = min(_common_prefix(full, one), _common_prefix(full, two))
  tail = min(_common_prefix(full[::-1], other[::-1]) for other in (one, two))
  return Content(start, max(start, len(full) - tail), start)


def _with_content(message: Message, text: str) -> dict[str, Any]:
  changed = {k: text for k in _CONTENT_KEYS if isinstance(message.get(k), str)}
  return {**message, **changed, "content": text}


def _completion_starts(
  messages: Sequence[Message],
  contents: Mapping[int, Content],
  full: str,
  render: Renderer,
) -> dict[int, int]:
  """Where generation would have started, had the model been asked for each turn.

  What a template writes between a message and the answer that it asks for depends on
  the message's role. So the first and the last turn behind each role are asked for;
  where what is known of one foretells both, it tells those between.
  """
  starts = {turn: content.start for turn, content in contents.items()}
  behind: dict[str, list[int]] = {}
  for turn in contents:
    if turn:  # nothing asks for a first message
      behind.setdefault(messages[turn - 1]["role"], []).append(turn)
  for role, turns in behind.items():
    # How a template writes an answer before an answer may depend on which is the last.
    few = not turns[2:] or role == "assistant"
    told = {} if few else _foretold(messages, turns, contents, full, render)
    for turn in (turns[0], turns[-1]):
      starts[turn] = _prompt_end(messages, turn, full, render, contents[turn])
    agree = told and all(starts[t] == told[t] for t in (turns[0], turns[-1]))
    for turn in turns[1:-1]:
      starts[turn] = (
        told[turn]
        if agree
        else _prompt_end(messages, turn, full, render, contents[turn])
      )
  return starts


def _foretold(
  messages: Sequence[Message],
  turns: Sequence[int],
  contents: Mapping[int, Content],
  full: str,
  render: Renderer,
) -> dict[int, int]:
  """Where generation would have started for turns behind messages of one role, by two
  renderings; {}: these do not say."""
  every = sorted({*turns, *(turn - 1 for turn in turns)})
  texts = _between(messages, every, render)
  last = turns[-1]
  asked = _between(messages[:last], [last - 1], lambda some, _: render(some, True))
  if texts is None or asked is None:
    return {}
  headers = dict(zip(every, texts))
  question_end = asked[1]  # behind the message before: its end, and the prompt for more
  starts = {}
  for turn in turns:
    content = contents[turn]
    place = content.header - len(headers[turn])
    stop = place + len(question_end)
    fits = full.startswith(question_end, place) and stop <= content.stop
    starts[turn] = stop if fits else content.start
  return starts


def _prompt_end(
  messages: Sequence[Message],
  turn: int,
  full: str,
  render: Renderer,
  content: Content,
) -> int:
  """Where generation would have started, had the model been asked for this turn."""
  try:
    prompt = render(messages[:turn], True)
  except ValueError:  # a template may refuse a conversation that stops here
    return content.start
  fits = full.startswith(prompt) and len(prompt) <= content.stop
  return len(prompt) if fits else content.start


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
    token = closing.search(full, end)
  else:
    space = _SPACE.match(full, end)
    token = closing.match(full, space.end() if space else end)
  return token.end() if token else None


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
