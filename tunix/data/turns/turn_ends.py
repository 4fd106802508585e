"""Finds the tokens that close a turn of a rendered conversation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tunix.data.turns import payloads
from tunix.data.turns.payloads import Message

Renderer = Callable[[Sequence[Message], bool], str]

_SPACE = re.compile(r"\s*")


def tail_length(
  messages: Sequence[Message],
  turn: int,
  rest: str,
  closing: re.Pattern[str],
  render: Renderer,
  tails: list[str],
) -> int:
  """Returns the length of the text from the last arguments to the closing token.

  The conversation that ends with this turn shows the text. It may hold special tokens
  that end a call and not the turn; the last special token closes the turn.

  Args:
    messages, turn, closing, render: as in `trained_spans.find_segments`.
    rest: text of the rendered conversation after the last arguments of the turn.
    tails: texts that were found for earlier turns. The list is extended, so that turns
      with an equal text need no rendering of their own.
  """
  for tail in tails:
    length = _overlap(tail, rest, closing)
    if length is not None:
      return length
  changed = payloads.replaced(messages[turn], payloads.PLACEHOLDERS[0])
  try:
    text = render([*messages[:turn], changed], False)
  except ValueError:  # a template may refuse a conversation that ends here
    text = ""
  if payloads.PLACEHOLDERS[0] not in text:
    token = closing.search(rest)
    return token.start() if token else 0
  tail = text.rpartition(payloads.PLACEHOLDERS[0])[2].rstrip()
  length = _overlap(tail, rest, closing)
  if length is None:
    # The template closes the turn differently if messages follow. The turn ends where
    # both texts differ, but not inside of a token.
    common = (common_prefix(tail[start:], rest) for start in range(len(tail)))
    length = max(common, default=0)
    for token in closing.finditer(rest):
      if token.start() < length < token.end():
        length = token.start()
  tails.append(rest[: closing_stop(rest, length, closing) or length])
  return length


def _overlap(tail: str, rest: str, closing: re.Pattern[str]) -> int | None:
  """Returns the length of the tail before its last token, if `rest` begins with it.

  The arguments may end with the same text as a placeholder, such as a brace, so that
  the beginning of `tail` may be missing. A tail without tokens counts as a whole.

  Returns:
    The length; None if `rest` does not begin with the end of `tail`.
  """
  tokens = list(closing.finditer(tail))
  last = tokens[-1].start() if tokens else len(tail)
  stop = tokens[-1].end() if tokens else len(tail)
  for start in range(last + bool(tokens)):
    if rest.startswith(tail[start:stop]):
      return last - start
  return None


def closing_end(
  messages: Sequence[Message],
  turn: int,
  rest: str,
  closing: re.Pattern[str],
  render: Renderer,
  known: dict[str, int],
) -> int | None:
  """Returns the length of `rest` up to the end of the turn; None if no token closes it.

  The first special token after the content closes the turn. If more special tokens
  follow, they may close it, too, such as the end of the response and the end of the
  turn, or belong to the header of the next message. The template prints the tokens
  that close a turn both at the end of a conversation and before a further message.

  Args:
    messages, turn, closing, render: as in `trained_spans.find_segments`.
    rest: text of the rendered conversation after the content of the turn.
    known: {special tokens in a row: length of those that close a turn}, from earlier
      turns. The dict is extended, so that equal rows need no rendering of their own.
  """
  ends: list[int] = []
  while (end := closing_stop(rest, ends[-1] if ends else 0, closing)) is not None:
    ends.append(end)
  if len(ends) < 2:
    return ends[0] if ends else None
  row = rest[: ends[-1]]
  if row not in known:
    shared = common_prefix(row, _other_rest(messages, turn, render))
    known[row] = max([end for end in ends if end <= shared], default=ends[0])
  return known[row]


def _other_rest(messages: Sequence[Message], turn: int, render: Renderer) -> str:
  """Returns the text after the content of a turn in another conversation.

  The conversation ends with the turn if messages follow it in `messages`, and goes on
  with a question if none does. The text is empty if the template refuses that.
  """
  content, question = payloads.PLACEHOLDERS
  changed = [*messages[:turn], payloads.replaced(messages[turn], content)]
  if turn == len(messages) - 1:
    changed.append({"role": "user", "content": question})
  try:
    before, _, after = render(changed, False).rpartition(content)
  except ValueError:
    return ""
  return after if before else ""


def closing_stop(full: str, end: int, closing: re.Pattern[str]) -> int | None:
  """Returns the end of the special token that closes the turn; None without one.

  Only white space may separate the token from the text of the turn.
  """
  space = _SPACE.match(full, end)
  token = closing.match(full, space.end() if space else end)
  return token.end() if token else None


def common_prefix(a: str, b: str) -> int:
  """Returns the length of the longest common prefix.

  Bisection compares slices in C, which is faster than a Python loop over characters.
  `low` is always the length of a common prefix, and `high` is never too small.
  """
  low, high = 0, min(len(a), len(b))
  while low < high:
    middle = (low + high + 1) // 2
    if a[:middle] == b[:middle]:
      low = middle
    else:
      high = middle - 1
  return low
