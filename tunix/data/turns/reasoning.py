"""Answers that reason, under a chat template that is rendered without reasoning.

With `enable_thinking: false`, the generation prompt ends with an empty, closed block of
reasoning. A sample therefore begins behind the block and has no reasoning of its own. A
turn that has some is printed with an open block, which no generation prompt ends with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tunix.data.turns.payloads import THOUGHT_KEYS, Message
from tunix.data.turns.turn_ends import Renderer
from tunix.generate.answers.reasoning import (
  CLOSE_THINK,
  OPEN_THINK,
  THINK_MARKS,
  PlainReader,
  ReasoningReader,
)

# "error" refuses the record, "strip" trains its answers alone, "keep" trains all.
Reasoning = Literal["error", "strip", "keep"]


def without_unsampled(
  messages: Sequence[Message],
  turns: Sequence[int],
  render: Renderer,
  treatment: Reasoning,
) -> Sequence[Message]:
  """Returns the messages without reasoning that no sample would have.

  Args:
    messages: the conversation.
    turns: ascending indices of the messages to train.
    render: (messages, add_generation_prompt) -> text.
    treatment: "strip" removes such reasoning from all trained turns.

  Returns:
    `messages` itself if there is nothing to remove.

  Raises:
    ValueError: a trained turn has such reasoning, and `treatment` is "error".
  """
  if treatment == "keep":
    return messages
  plain = {turn: without(messages[turn]) for turn in turns}
  thoughtful = [turn for turn in turns if plain[turn] is not messages[turn]]
  if not thoughtful or not thoughtful[-1]:
    return messages
  try:
    prompt = render(messages[: thoughtful[-1]], True).rstrip()
  except ValueError:  # a template may refuse a conversation that ends here
    return messages
  mark = next((close for close in THINK_MARKS.values() if prompt.endswith(close)), None)
  if mark is None:
    return messages
  stripped = [plain.get(turn, message) for turn, message in enumerate(messages)]
  # Templates drop the reasoning of earlier turns.
  if render(stripped, False) == render(messages, False):
    return messages
  if treatment == "strip":
    return stripped
  raise ValueError(
    f"messages[{thoughtful[-1]}] holds reasoning that would be trained, but the "
    f"generation prompt ends with {mark!r}, so no sample begins with reasoning. Let "
    'the template reason (enable_thinking), or set reasoning to "strip" (trains the '
    'answer without it) or to "keep"'
  )


def without(message: Message) -> Message:
  """Returns a message without its reasoning; the message itself if it has none.

  The reasoning is in a field, or between marks at the start of the content. As in chat
  templates, the opening <think> may be missing.
  """
  changed: dict[str, Any] = {}
  if isinstance(content := message.get("content"), str):
    is_open = CLOSE_THINK in content and OPEN_THINK not in content
    reader = ReasoningReader(PlainReader(), is_open)
    piece = reader.push(content) + reader.end()
    if piece.reasoning:
      changed["content"] = piece.content
  fields = [key for key in THOUGHT_KEYS if str(message.get(key) or "").strip()]
  if not changed and not fields:
    return message
  rest = {key: value for key, value in message.items() if key not in fields}
  return rest | changed
