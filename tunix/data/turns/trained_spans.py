"""Finds the trained text in a conversation that a chat template rendered.

The template itself is never inspected. The conversation is rendered again with
placeholders in place of a turn's payload: its content, its thinking and the arguments
of its tool calls. The text that differs is payload, called content below. This works
for templates that drop earlier thinking, trim white space, merge the system turn into
the user's turn, or print the calls of a turn instead of its content.

The number of renderings does not depend on the length of the conversation. The first
rendering replaces all contents, and two more replace every second content. In these
two, each kept turn is between two placeholders, so its content can be separated from
the text that the template prints around it. The pieces, joined, must give the whole
conversation. If they do not, because the template's text for one turn depends on the
content of another, each turn is located separately, with three renderings per turn.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tunix.data.turns import payloads, turn_ends
from tunix.data.turns.payloads import Message
from tunix.data.turns.turn_ends import Renderer, common_prefix

# Placeholders with the number of their turn.
_NUMBERED = re.compile("\ue000(\\d+)\ue001")


class Content(NamedTuple):
  """Position of the content of a turn in the rendered conversation, in characters.

  Attributes:
    start, stop: range of the content.
    header: end of the text that the template prints before a placeholder. It is larger
      than `start` if the content begins with the same text as the end of this header.
      For example, the template prints an empty think block before a placeholder, and
      the content begins with a think block.
  """

  start: int
  stop: int
  header: int


@dataclasses.dataclass(frozen=True)
class Segment:
  """A piece of text that is trained as a whole or not at all."""

  text: str
  trained: bool


def find_segments(
  messages: Sequence[Message],
  turns: Sequence[int],
  render: Renderer,
  end_tokens: Sequence[str],
) -> tuple[list[Segment], bool]:
  """Cuts the rendered conversation where training starts and stops.

  The trained text of a turn begins where the generation prompt ends, so that an empty
  think block that the template inserts after this prompt is trained as well. The
  rendered conversation may not begin with the rendered prompt, for example if the
  template drops earlier thinking. Then the prompt's text after the previous message is
  compared; if it differs as well, the trained text begins with the content. The trained
  text ends after the tokens that close the turn.

  Args:
    messages: the conversation.
    turns: ascending indices of the messages to train.
    render: (messages, add_generation_prompt) -> text.
    end_tokens: texts of special tokens that may close a turn.

  Returns:
    The segments, whose texts join to the rendered conversation, and whether EOS must
    follow them. If no token closes the last turn, white space after it is removed.

  Raises:
    ValueError: the template prints no text of a turn that has content, leaves out tool
      calls of a turn, or prints the content of a turn after the results of its calls.
  """
  full = render(messages, False)
  contents = find_contents(messages, turns, full, render)
  _check_order(messages, turns, render)
  starts = _completion_starts(messages, contents, full, render)
  # Longest token first: an alternation takes the first match, and one token may be a
  # prefix of another. Without tokens, the pattern matches nothing.
  tokens = sorted(map(re.escape, end_tokens), key=len)[::-1]
  closing = re.compile("|".join(tokens) or "(?!)")
  lost = {turn: payloads.missing(messages[turn], "") for turn in turns}
  tails: list[str] = []
  ends: dict[str, int] = {}
  segments: list[Segment] = []
  done, needs_eos = 0, False
  for turn, content in contents.items():
    start, end = max(done, starts[turn]), content.stop
    if messages[turn].get("tool_calls"):
      end += turn_ends.tail_length(messages, turn, full[end:], closing, render, tails)
      stop = turn_ends.closing_stop(full, end, closing)
    else:
      stop = turn_ends.closing_end(messages, turn, full[end:], closing, render, ends)
      stop = None if stop is None else end + stop
    if stop is None and turn == len(messages) - 1:
      # The template closes the last turn by no token, so EOS must. White space that the
      # template prints after the content would separate the content from EOS.
      needs_eos = True
      full = full.rstrip() if full[end:].strip() else full[:end]
      stop = len(full)
    stop = max(start, end if stop is None else stop)
    lost[turn] = payloads.missing(messages[turn], full[start:stop])
    segments += [Segment(full[done:start], False), Segment(full[start:stop], True)]
    done = stop
  if places := lost_places(lost):
    raise ValueError(
      f"the chat template prints no text of the assistant's turns: {places} would not "
      'be trained; use a template that prints them, or set "train": false in these '
      "turns"
    )
  segments.append(Segment(full[done:], False))
  return [s for s in segments if s.text], needs_eos


def lost_places(lost: Mapping[int, str]) -> str:
  """Returns what the trained text of each turn lacks, for messages; "" for nothing."""
  return ", ".join(f"{what} of messages[{turn}]" for turn, what in lost.items() if what)


def find_contents(
  messages: Sequence[Message], turns: Sequence[int], full: str, render: Renderer
) -> dict[int, Content]:
  """Returns the positions of the contents of turns that the template prints.

  Args:
    messages, turns, render: as in `find_segments`.
    full: the rendered conversation.
  """
  contents = _contents(messages, turns, full, render)
  if contents is not None:
    return contents
  each = {turn: _content_alone(messages, turn, full, render) for turn in turns}
  return {turn: content for turn, content in each.items() if content is not None}


def _contents(
  messages: Sequence[Message], turns: Sequence[int], full: str, render: Renderer
) -> dict[int, Content] | None:
  """Locates the contents of all turns with three renderings.

  Returns:
    {turn: position}, or None if these renderings do not suffice: the template leaves a
    turn out, or prints it differently.
  """
  gaps = _between(messages, turns, render)
  if gaps is None:
    return None
  first = _between(messages, turns[::2], render)
  second = _between(messages, turns[1::2], render) if turns[1:] else [full]
  if first is None or second is None:
    return None
  contents: dict[int, Content] = {}
  joined, left = "", gaps[0]  # text so far, and the text after its last content
  for at, turn in enumerate(turns):
    before, after = gaps[at], gaps[at + 1]
    # The text of this turn in the rendering that replaces its two neighbors. `first`
    # replaces turns 0, 2, 4, ..., so it keeps the odd ones; `second` is the other way
    # round.
    piece = (first if at % 2 else second)[(at + 1) // 2]
    start = common_prefix(piece, before)
    stop = max(start, len(piece) - common_prefix(piece[::-1], after[::-1]))
    # `before` is the template's text between the previous content and this one. The
    # previous content may change its beginning, so only `before[cut:]` follows that
    # content; this content may change its end, so only `before[:start]` precedes it.
    # The text between the two contents is what both share, `before[cut:start]`.
    cut = len(before) - len(left)
    if start < cut:
      return None
    joined += before[cut:start]
    place = len(joined)
    contents[turn] = Content(place, place + stop - start, place + len(before) - start)
    joined += piece[start:stop]
    left = piece[stop:]
  return contents if joined + left == full else None


def _between(
  messages: Sequence[Message], turns: Sequence[int], render: Renderer
) -> list[str] | None:
  """Renders the turns as placeholders and returns the texts around the placeholders.

  Returns:
    len(turns) + 1 texts; None if placeholders are missing or in another order.
  """
  changed = list(messages)
  for turn in turns:
    changed[turn] = payloads.replaced(messages[turn], f"\ue000{turn}\ue001")
  text = render(changed, False)
  texts, places, done = [], [], 0
  for mark in _NUMBERED.finditer(text):
    turn = int(mark[1])
    # A turn has several placeholders in a row if it has a thought besides the content.
    # All of them, and the text between them, count as one content.
    if places[-1:] == [turn]:
      done = mark.end()
      continue
    places.append(turn)
    texts.append(text[done : mark.start()])
    done = mark.end()
  return [*texts, text[done:]] if places == list(turns) else None


def _content_alone(
  messages: Sequence[Message], turn: int, full: str, render: Renderer
) -> Content | None:
  """Locates one content with two renderings; None if the template leaves it out."""
  one, two = (
    render(
      [*messages[:turn], payloads.replaced(messages[turn], s), *messages[turn + 1 :]],
      False,
    )
    for s in payloads.PLACEHOLDERS
  )
  if one == two:
    return None
  start = min(common_prefix(full, one), common_prefix(full, two))
  tail = min(common_prefix(full[::-1], other[::-1]) for other in (one, two))
  return Content(start, max(start, len(full) - tail), start)


def _check_order(
  messages: Sequence[Message], turns: Sequence[int], render: Renderer
) -> None:
  """Refuses a template that prints a turn's content after the results of its calls.

  The text from the call to the content would be one trained text, with the results.
  """
  mixed = [
    turn
    for turn in turns
    if messages[turn].get("tool_calls") and messages[turn].get("content")
  ]
  mixed = [turn for turn in mixed if turn + 1 < len(messages)]
  if not mixed:
    return
  changed = list(messages)
  for turn in {*mixed, *(turn + 1 for turn in mixed)}:
    changed[turn] = payloads.replaced(messages[turn], f"\ue000{turn}\ue001")
  order = [int(mark[1]) for mark in _NUMBERED.finditer(render(changed, False))]
  last = {turn: place for place, turn in enumerate(order)}
  for turn in mixed:
    if turn + 1 in last and last.get(turn, -1) > order.index(turn + 1):
      raise ValueError(
        f"the chat template prints the content of messages[{turn}] after the results "
        "of its tool calls; move the content to a message of its own, or set "
        '"train": false in this turn'
      )


def _completion_starts(
  messages: Sequence[Message],
  contents: Mapping[int, Content],
  full: str,
  render: Renderer,
) -> dict[int, int]:
  """Returns where generation starts for each turn, in characters.

  The template's text between a message and its answer depends on the role of the
  message. For each role, the generation prompt is rendered for the first and the last
  turn after a message of this role. If a prediction from two renderings gives the same
  two positions, it is used for all turns in between, whose prompts are then not
  rendered.
  """
  starts = {turn: content.start for turn, content in contents.items()}
  behind: dict[str, list[int]] = {}
  for turn in contents:
    if not turn:  # a first message has no generation prompt
      starts[turn] = _payload_start(messages, turn, full, render, contents[turn])
    else:
      behind.setdefault(messages[turn - 1]["role"], []).append(turn)
  for role, turns in behind.items():
    # With up to two turns there is no turn in between to predict. After a message of
    # the assistant, the template's text may depend on which answer is the last.
    predicts = len(turns) > 2 and role != "assistant"
    predicted = (
      _predicted_starts(messages, turns, contents, full, render) if predicts else {}
    )
    for turn in (turns[0], turns[-1]):
      starts[turn] = _prompt_end(messages, turn, full, render, contents[turn])
    agree = predicted and all(starts[t] == predicted[t] for t in (turns[0], turns[-1]))
    for turn in turns[1:-1]:
      starts[turn] = (
        predicted[turn]
        if agree
        else _prompt_end(messages, turn, full, render, contents[turn])
      )
  return starts


def _predicted_starts(
  messages: Sequence[Message],
  turns: Sequence[int],
  contents: Mapping[int, Content],
  full: str,
  render: Renderer,
) -> dict[int, int]:
  """Returns where generation starts for turns after messages of one role.

  Two renderings give all positions: one has placeholders for the turns and the messages
  before them, the other is the generation prompt of the last turn.

  Returns:
    {turn: position in characters}; {} if the placeholders are not found.
  """
  every = sorted({*turns, *(turn - 1 for turn in turns)})
  last = turns[-1]
  try:
    texts = _between(messages, every, render)
    prompt = _between(messages[:last], [last - 1], lambda some, _: render(some, True))
  except ValueError:  # a template may refuse a conversation that ends here
    return {}
  if texts is None or prompt is None:
    return {}
  headers = dict(zip(every, texts))
  # The text after the previous message's content: its end, and the answer's header.
  question_end = prompt[1]
  starts = {}
  for turn in turns:
    content = contents[turn]
    place = content.header - len(headers[turn])
    stop = place + len(question_end)
    fits = full.startswith(question_end, place) and stop <= content.stop
    starts[turn] = (
      stop if fits else _payload_start(messages, turn, full, render, content)
    )
  return starts


def _prompt_end(
  messages: Sequence[Message],
  turn: int,
  full: str,
  render: Renderer,
  content: Content,
) -> int:
  """Returns where generation starts for this turn, in characters."""
  try:
    prompt = render(messages[:turn], True)
  except ValueError:  # a template may refuse a conversation that ends here
    return _payload_start(messages, turn, full, render, content)
  if full.startswith(prompt) and len(prompt) <= content.stop:
    return len(prompt)
  starts = _predicted_starts(messages, [turn], {turn: content}, full, render)
  if turn in starts:
    return starts[turn]
  return _payload_start(messages, turn, full, render, content)


def _payload_start(
  messages: Sequence[Message],
  turn: int,
  full: str,
  render: Renderer,
  content: Content,
) -> int:
  """Returns where the template's text for a turn depends on its content or tool calls.

  The content of a turn with tool calls begins with the first arguments at the latest.
  The call itself begins where a rendering without it differs.
  """
  if not messages[turn].get("tool_calls"):
    return content.start
  plain = {"role": "assistant", "content": payloads.PLACEHOLDERS[0]}
  changed = [*messages[:turn], plain]
  try:
    text = render([*changed, *messages[turn + 1 :]], False)
  except ValueError:  # a template may refuse tool results without a call
    return content.start
  return min(content.start, common_prefix(full, text))
