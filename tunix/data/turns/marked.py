"""Finds the trained text of a chat template with `{% generation %}` blocks.

The blocks decide which text is trained, as in transformers. The template prints two
marks around each block, which are taken out again. A block belongs to the turn whose
content it prints, so that turns that are not trained can be left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from tunix.data.turns import payloads, trained_spans
from tunix.data.turns.payloads import Message
from tunix.data.turns.trained_spans import Content, Segment

# Renders messages with two marks around each block.
MarkedRenderer = Callable[[Sequence[Message], tuple[str, str]], str]

Range = tuple[int, int]


def find_segments(
  messages: Sequence[Message],
  turns: Sequence[int],
  render: trained_spans.Renderer,
  render_marked: MarkedRenderer,
) -> list[Segment]:
  """Cuts the rendered conversation at the ends of the blocks of trained turns.

  Args:
    messages, turns, render: as in `trained_spans.find_segments`.
    render_marked: (messages, marks) -> text.

  Returns:
    The segments, whose texts join to the rendered conversation.

  Raises:
    ValueError: no block holds text of a trained turn with content or tool calls, or a
      block holds trained and untrained turns.
  """
  full = render(messages, False)
  blocks = _blocks(full, messages, render_marked)
  answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
  contents = trained_spans.find_contents(messages, answers, full, render)
  trained: dict[int, list[Range]] = {turn: [] for turn in turns}
  segments, done = [], 0
  for start, stop in blocks:
    owners = _owners(start, stop, contents)
    ours = [turn for turn in owners if turn in trained]
    if ours and len(ours) < len(owners):
      other = next(turn for turn in owners if turn not in trained)
      raise ValueError(
        "one {% generation %} block of the chat template holds "
        f"messages[{ours[0]}], which is trained, and messages[{other}], which is not; "
        "give each turn a block of its own"
      )
    for turn in ours:
      trained[turn].append((start, stop))
    if ours:
      segments += [Segment(full[done:start], False), Segment(full[start:stop], True)]
      done = stop
  empty = [turn for turn, ranges in trained.items() if not ranges]
  lost = {turn: payloads.missing(messages[turn], "") for turn in empty}
  if places := trained_spans.lost_places(lost):
    raise ValueError(
      "the chat template has {% generation %} blocks, and none of them holds "
      f"{places}: these would not be trained; put them into such blocks, or set "
      '"train": false in these turns'
    )
  segments.append(Segment(full[done:], False))
  return [s for s in segments if s.text]


def _blocks(
  full: str, messages: Sequence[Message], render_marked: MarkedRenderer
) -> list[Range]:
  """Returns the ranges of the blocks with text, in characters of `full`."""
  # Private-use characters of Unicode, of which a conversation holds few if any.
  unused = (c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in full)
  opening, closing = next(unused), next(unused)
  text = render_marked(messages, (opening, closing))
  pieces = re.split(f"([{opening}{closing}])", text)
  blocks: list[Range] = []
  place, starts = 0, []
  for piece in pieces:
    if piece == opening:
      starts.append(place)
    elif piece == closing and starts:
      start = starts.pop()
      # A block within a block adds nothing.
      if start < place and not starts:
        blocks.append((start, place))
    else:
      place += len(piece)
  if text.translate({ord(opening): None, ord(closing): None}) != full or starts:
    raise ValueError(
      "the chat template changes the text of a {% generation %} block after the block "
      "has printed it, so that its place is unknown; print the block directly"
    )
  return blocks


def _owners(start: int, stop: int, contents: Mapping[int, Content]) -> list[int]:
  """Returns the turns whose contents a block holds, else the turn with the nearest.

  A block may hold only the header of a turn, or only the token that closes it.
  """
  within = [t for t, c in contents.items() if c.start < stop and start < c.stop]
  if within or not contents:
    return within
  gaps = {t: max(c.start - stop, start - c.stop) for t, c in contents.items()}
  return [min(gaps, key=lambda turn: gaps[turn])]
