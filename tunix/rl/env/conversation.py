"""The tokens of one episode: what was drawn is never decoded and encoded again.

The prompt of an action is the prompt of the one before, the ids that were drawn, and
the ids of the new messages (`Bridge`). Chat templates show only whole conversations, so
the text of the new messages is what a rendering has more than the rendering that ends
with the answer before them.

Some templates print an earlier answer differently once messages follow it, for example
without its reasoning. The setting `history` decides what the next action then reads:

- "split": the conversation as the template prints it. The ids before it are no prefix
  of it, and a new row of training begins (see episode.py).
- "keep": the ids so far, with the new messages after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tunix.generate import tool_calls
from tunix.generate.template_limits import ChatTemplateError
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.env import env as env_lib
from tunix.rl.env.env import Action, EnvError, Message, Observation

History = Literal["split", "keep"]

# A private-use character of Unicode, which no answer contains.
_PLACEHOLDER = "\ue000"


class Conversation:
  """Messages and ids of an episode.

  Args:
    tokenizer: tokenizer of the policy.
    tools: JSON schemas of tools that the template shows.
    history: see the module.

  Attributes:
    messages: the messages so far; empty if observations are ids.
  """

  def __init__(
    self,
    tokenizer: TokenizerAdapter,
    tools: Sequence[Mapping[str, Any]] = (),
    history: History = "split",
  ):
    self._tokenizer, self._tools = tokenizer, list(tools) or None
    self._history = history
    self.messages: list[Message] = []
    self._ids: list[int] = []
    self._opened = False  # the prompt ends inside <think>
    self._ended = False  # the last action ends with an end-of-sequence token

  def observe(self, observation: Observation) -> list[int]:
    """Takes an observation; returns the ids of the prompt of the next action.

    Raises:
      EnvError: the observation has another form, or the template refuses it.
    """
    ids = env_lib.ids_of(observation)
    if ids is not None:
      self._ids = ids
      return list(ids)
    new = env_lib.messages_of(observation)
    try:
      self._ids = self._with(new, observation)
    except (ChatTemplateError, TypeError, ValueError) as error:
      raise EnvError(f"the chat template refuses an observation: {error}") from error
    self.messages += new
    return list(self._ids)

  def act(self, ids: Sequence[int] | np.ndarray, finish_reason: str) -> Action:
    """Takes the ids that were drawn; returns them as the environment receives them."""
    ids = [int(i) for i in ids]
    self._ids = [*self._ids, *ids]
    ended = bool(ids) and ids[-1] in self._tokenizer.eos_ids()
    kept = ids[:-1] if ended else ids
    # The marks of tool calls are special tokens in some vocabularies.
    marked = self._tokenizer.decode(kept, skip_special_tokens=False)
    action = Action(ids)
    action.text = self._tokenizer.decode(kept)
    action.finish_reason = finish_reason
    action.message, action.problem = read_answer(
      marked,
      tool_calls.format_of(self._tokenizer.chat_template) if self._tools else "none",
      [_name(tool) for tool in self._tools or ()],
      opened=self._opened,
    )
    self._ended = ended
    if self.messages:
      self.messages.append(action.message)
    return action

  def _with(self, new: list[Message], observation: Observation) -> list[int]:
    if not self._tokenizer.has_chat_template():
      if not isinstance(observation, str):
        raise EnvError(
          "an observation has messages, and the tokenizer has no chat template: give "
          "texts or token ids, or a tokenizer with a template"
        )
      text = observation
      if self.messages:
        return [*self._ids, *self._tokenizer.encode_continuation(text)]
      return list(map(int, self._tokenizer.tokenize(text, add_eos=False)))
    whole = self._rendered([*self.messages, *new], True)
    self._opened = tool_calls.opens_reasoning(whole)
    if not self.messages:
      return self._tokenizer.encode(whole)
    before = self._rendered(self.messages, False)
    if not whole.startswith(before.rstrip()):
      if self._history == "split":
        return self._tokenizer.encode(whole)
      before, whole = self._without_answer(new)
    return [
      *self._ids,
      *self._tokenizer.encode_continuation(self._bridge(before, whole)),
    ]

  def _without_answer(self, new: list[Message]) -> tuple[str, str]:
    """Renders an answer that no template changes, and the same with new messages."""
    plain = {"role": "assistant", "content": _PLACEHOLDER}
    base = [*self.messages[:-1], plain]
    texts = self._rendered(base, False), self._rendered([*base, *new], True)
    # What is before the answer may differ as well; only what is after it counts.
    before, whole = (text.rpartition(_PLACEHOLDER)[2] for text in texts)
    return _PLACEHOLDER + before, _PLACEHOLDER + whole

  def _bridge(self, before: str, whole: str) -> str:
    """Returns the text after an answer: the end of its turn, and the new messages.

    Args:
      before: a rendering that ends with the answer.
      whole: the same with the new messages, and the header of the next answer.
    """
    kept = before.rstrip()  # white space after the answer may change, too
    ends = self._ends()
    closing = next((end for end in ends if kept.endswith(end)), "")
    if closing:
      kept = kept[: -len(closing)]
    bridge = whole[len(kept) :]
    if self._ended:
      # The end was drawn. Some templates write one only if a message follows.
      bridge = next(
        (bridge.removeprefix(e) for e in ends if bridge.startswith(e)), bridge
      )
    return bridge

  def _ends(self) -> list[str]:
    """Returns the texts of the tokens that end an answer, longest first."""
    ids = set(self._tokenizer.eos_ids())
    special = self._tokenizer.special_tokens().items()
    texts = {text for text, number in special if number in ids}
    texts |= {self._tokenizer.eos_token or ""} - {""}
    return sorted(texts, key=len, reverse=True)

  def _rendered(self, messages: list[Message], adds_prompt: bool) -> str:
    tools: dict[str, Any] = {"tools": self._tools} if self._tools else {}
    return self._tokenizer.apply_chat_template(messages, adds_prompt, **tools)


def read_answer(
  text: str, tool_format: str, tools: Sequence[str], *, opened: bool = False
) -> tuple[Message, str | None]:
  """Reads reasoning and calls of tools from the text of an answer.

  Args:
    text: the answer, with the marks of tool calls.
    tool_format: see `tool_calls.tool_reader`.
    tools: names of the tools.
    opened: True if the prompt ends inside <think>.

  Returns:
    The message, and a description of a call that could not be read, or None.
  """
  reader = tool_calls.tool_reader(tool_format, tools)
  reader = tool_calls.ReasoningReader(reader, opened)
  piece = reader.push(text) + reader.end()
  message: Message = {"role": "assistant", "content": piece.content}
  if piece.reasoning:
    message["reasoning_content"] = piece.reasoning
  if piece.calls:
    message["tool_calls"] = [
      {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": json.loads(call.arguments)},
      }
      for call in piece.calls
    ]
  return message, _problem(piece.content, tool_format)


def _problem(content: str, tool_format: str) -> str | None:
  """Describes a call that stayed text, because it could not be read."""
  marks = {
    "hermes": tool_calls.OPEN_CALL,
    "mistral": tool_calls.MISTRAL_CALLS,
    "llama3": tool_calls.PYTHON_TAG,
  }
  mark = marks.get(tool_format)
  if mark is None or mark not in content:
    return None
  return (
    f"a call of a tool could not be read: after {mark} expected JSON with the name of "
    "a tool and an object of its arguments"
  )


def _name(tool: Mapping[str, Any]) -> str:
  function = tool.get("function")
  return str((function if isinstance(function, Mapping) else tool).get("name", ""))
