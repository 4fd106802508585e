"""The one form in which messages reach a chat template.

Records, episodes and requests hold messages in the forms of several libraries. They
all pass through `for_template`, so a model that is trained on a conversation later
reads the same text of it in a rollout and from the server.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunix.generate.answers.call_json import object_of
from tunix.generate.tokenizer import chat_template
from tunix.generate.tokenizer.template_limits import ChatTemplateError

Message = Mapping[str, Any]


class CallForm(NamedTuple):
  """The form in which a chat template takes a turn with tool calls.

  Attributes:
    as_text: arguments are JSON in a text. False: they are an object.
    null_content: a turn without text has the content null. False: an empty text.
  """

  as_text: bool = False
  null_content: bool = False


# Most templates take the first form; the search for the form of a template ends there.
_FORMS = (CallForm(), CallForm(False, True), CallForm(True), CallForm(True, True))
_ARGUMENTS = {"tunix_key": "tunix_value"}
_WORD = "tunix_text"
_TOOL = {"name": "tunix_tool", "description": "", "parameters": {"type": "object"}}


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields whose value is not null."""
  return {key: value for key, value in fields.items() if value is not None}


def plain(message: Message) -> dict[str, Any]:
  """Returns a message without null fields, with its parts of text joined.

  Tool calls do not change.
  """
  message = present(message)
  if is_parts_of_text(message.get("content")):
    texts = [part.get("text") or "" for part in message["content"]]
    message["content"] = "".join(texts)
  return message


def is_parts_of_text(content: object) -> bool:
  """Returns True for a list of {"type": "text", "text": ...}."""
  return isinstance(content, list) and all(
    isinstance(part, Mapping) and part.get("type") == "text" for part in content
  )


def for_template(messages: Sequence[Message], form: CallForm) -> list[dict[str, Any]]:
  """Returns messages as a chat template takes them.

  The role "developer" becomes "system". A turn of the assistant without text gets the
  empty content of `form`, and the arguments of its calls get the form of `form`. Null
  fields of a call go; a null in its arguments is a value and stays. Messages in this
  form do not change. Text in place of JSON stays if the template takes text.

  Raises:
    ValueError: arguments of a call are no JSON object; names the message.
  """
  return [_formed(plain(m), form, f"messages[{i}]") for i, m in enumerate(messages)]


@functools.lru_cache(maxsize=32)
def call_form(template: str) -> CallForm:
  """Finds the form that a template takes, by rendering a tool call in each form.

  Args:
    template: jinja source. If it shows the call in no form, the result is the first.
  """
  return next((form for form in _FORMS if _shows_call(template, form)), _FORMS[0])


def as_template_parts(template: str, messages: list[dict[str, Any]]) -> list[Any]:
  """Returns messages with texts as parts, if the template prints no other texts.

  Args:
    template: jinja source, such as that of SmolVLM.
    messages: result of `for_template`.
  """
  if not _prints_parts_alone(template):
    return messages
  return [
    {**m, "content": [{"type": "text", "text": m["content"]}]}
    if isinstance(m.get("content"), str)
    else m
    for m in messages
  ]


@functools.lru_cache(maxsize=32)
def _prints_parts_alone(template: str) -> bool:
  parts = [{"type": "text", "text": _WORD}]
  return not _prints(template, _WORD) and _prints(template, parts)


def _prints(template: str, content: Any) -> bool:
  question = [{"role": "user", "content": content}]
  try:
    text = chat_template.render(template, question, bos_token="", eos_token="")
  except ChatTemplateError:
    return False
  # A template may print the list as Python shows it.
  return _WORD in text and repr(content) not in text


def _shows_call(template: str, form: CallForm) -> bool:
  """Returns True if a template prints the arguments of a call, and in a usual form."""
  function = {"name": _TOOL["name"], "arguments": _ARGUMENTS}
  # Templates of Mistral refuse an id that has not nine letters and digits.
  call = {"id": "call00000", "type": "function", "function": function}
  question = {"role": "user", "content": "a"}
  answer = {"role": "assistant", "tool_calls": [call]}
  try:
    text = chat_template.render(
      template,
      for_template([question, answer], form),
      tools=[{"type": "function", "function": _TOOL}],
      bos_token="",
      eos_token="",
    )
  except ChatTemplateError:  # for example, the template joins an object and a text
    return False
  if form.as_text:
    return json.dumps(_ARGUMENTS) in text
  [(key, value)] = _ARGUMENTS.items()
  # A template that joins texts may print an object as Python shows it.
  return key in text and value in text and str(_ARGUMENTS) not in text


def _formed(message: dict[str, Any], form: CallForm, where: str) -> dict[str, Any]:
  if message.get("role") == "developer":
    message["role"] = "system"
  calls = message.get("tool_calls")
  if isinstance(calls, list) and calls:
    message["tool_calls"] = [
      _formed_call(call, form, f"{where}.tool_calls[{i}]")
      for i, call in enumerate(calls)
    ]
    if not message.get("content"):
      message["content"] = None if form.null_content else ""
  elif message.get("role") == "assistant":
    message.setdefault("content", "")  # templates join texts
  return message


def _formed_call(call: object, form: CallForm, where: str) -> Any:
  if not isinstance(call, Mapping):
    return call
  call = present(call)
  if isinstance(function := call.get("function"), Mapping):
    formed = _formed_call(function, form, f"{where}.function")
    return {**call, "function": formed}
  value = call.get("arguments")
  arguments = object_of(value)
  if form.as_text and isinstance(value, str) and arguments != {}:
    arguments = value
  elif form.as_text and arguments is not None:
    arguments = json.dumps(arguments, ensure_ascii=False)
  if arguments is None:
    raise ValueError(
      f"{where}.arguments is {value!r:.60}, expected a JSON object. Correct the call"
    )
  return {**call, "arguments": arguments}
