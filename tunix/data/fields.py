"""Checks of the fields of one record: types, messages and tools.

Every check raises ValueError with a message that begins with the record's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.utils import checks


def describe(record: Mapping[str, Any]) -> str:
  """Returns the names of a record's fields and which are null, for error messages."""
  names = (f"{name!r}{' (null)' * (value is None)}" for name, value in record.items())
  return "fields " + ", ".join(names) if record else "no fields"


def check_mapping(record: object, where: str, expected: str) -> None:
  """Refuses a record that is no object.

  Args:
    record: a record of a file.
    where: place of the record.
    expected: end of the message, `Kind.expected`.

  Raises:
    ValueError: the record has another type.
  """
  if not isinstance(record, Mapping):
    raise ValueError(f"{where}: found {checks.type_of(record)}, {expected}")


def check_tools(record: Mapping[str, Any], where: str) -> None:
  """Refuses a record whose "tools" are no list of JSON schemas.

  Raises:
    ValueError: "tools" or one of them has another type.
  """
  tools = record.get("tools")
  if not isinstance(tools, list | None):
    wrong = f"is {_type_name(tools)}"
  else:
    others = [tool for tool in tools or [] if not isinstance(tool, Mapping)]
    wrong = f"holds {_type_name(others[0])}" if others else None
  if wrong:
    raise ValueError(f'{where}: "tools" {wrong}, expected a list of JSON schemas')


def check_string(
  record: Mapping[str, Any], field: str, where: str, alternative: str = ""
) -> None:
  """Refuses a field that is no string.

  Args:
    record: a record that has the field.
    field: name of the field.
    where: place of the record.
    alternative: other accepted types, for the message.

  Raises:
    ValueError: the field has another type.
  """
  if not isinstance(record[field], str):
    raise ValueError(
      f'{where}: "{field}" is {_type_name(record[field])}, expected a string'
      f"{alternative}"
    )


def check_text(record: Mapping[str, Any], field: str, where: str) -> None:
  """Refuses a field that is neither a string nor a list of messages.

  Args:
    record: a record that has the field.
    field: name of the field.
    where: place of the record.

  Raises:
    ValueError: the field or one of its messages has another type.
  """
  if isinstance(record[field], list):
    check_messages(record[field], f'{where}: "{field}"')
  else:
    check_string(record, field, where, " or a list of messages")


def check_messages(messages: object, where: str, *, images: bool = True) -> None:
  """Refuses a value that is no list of messages, or an empty list.

  Args:
    messages: the value.
    where: place of the value.
    images: accepts parts with images, see `tunix.data.image_parts`.

  Raises:
    ValueError: the value or one of its messages has the wrong form.
  """
  if not isinstance(messages, list) or not messages:
    problem = "an empty list" if messages == [] else _type_name(messages)
    raise ValueError(f"{where} is {problem}, expected a list of messages")
  for number, message in enumerate(messages):
    _check_message(message, f"{where}[{number}]", images)


def check_no_pair(record: Any, where: str, expected: str) -> None:
  """Refuses a pair among records of fine-tuning.

  Args:
    record: a record of a file.
    where: place of the record.
    expected: expected forms, for the message.

  Raises:
    ValueError: the record has a chosen and a rejected completion, and no other text.
  """
  is_pair = isinstance(record, Mapping) and {"chosen", "rejected"} <= record.keys()
  if is_pair and not record.keys() & {"response", "messages", "text"}:
    raise ValueError(
      f'{where}: the record is a pair ("chosen" and "rejected"); {expected}. Train on '
      "pairs with the job dpo, orpo or reward."
    )


def check_one_form(completions: Mapping[str, Any], where: str) -> None:
  """Refuses completions of which one is text and another a list of messages.

  Raises:
    ValueError: the forms differ; names the type of each.
  """
  if len({isinstance(value, str) for value in completions.values()}) > 1:
    types = " and ".join(
      f'"{name}" is {_type_name(value)}' for name, value in completions.items()
    )
    raise ValueError(
      f"{where}: {types}; expected two texts or two lists of messages. Write both in "
      "one form."
    )


def _check_message(message: object, where: str, images: bool) -> None:
  if not isinstance(message, Mapping):
    raise ValueError(
      f'{where} is {_type_name(message)}, expected {{"role": ..., "content": ...}}'
    )
  role, content = message.get("role"), message.get("content")
  if not isinstance(role, str):
    raise ValueError(
      f'{where}: "role" is {_type_name(role)}, expected a string such as "user"'
    )
  # A turn that only calls tools may have no text.
  calls_tools = content is None and message.get("tool_calls")
  if isinstance(content, list) and images:
    check_parts(content, role, f'{where}: "content"')
  elif not isinstance(content, str) and not calls_tools:
    remedy = "Batches of text have no images: give token ids (docs/guides/images.md)"
    remedy = remedy if isinstance(content, list) else "Write a text, or a list of parts"
    raise ValueError(
      f'{where}: "content" is {_type_name(content)}, expected a string. {remedy}'
    )
  calls = message.get("tool_calls") or []
  if not isinstance(calls, list) or not all(isinstance(c, Mapping) for c in calls):
    raise ValueError(
      f'{where}: "tool_calls" is {calls!r:.60}, expected a list of objects such as '
      '{"function": {"name": ..., "arguments": ...}}'
    )
  if message.get("weight", 1) not in (0, 1):
    raise ValueError(
      f'{where}: "weight" is {message["weight"]!r}, expected 0 (do not train) or 1'
    )
  if not isinstance(message.get("train", True), bool):
    raise ValueError(
      f'{where}: "train" is {message["train"]!r}, expected true or false'
    )


def check_parts(parts: list[Any], role: str, where: str) -> None:
  """Refuses a content whose parts are neither texts nor images of a prompt.

  Args:
    parts: the content.
    role: role of the message.
    where: place of the content.

  Raises:
    ValueError: see above.
  """
  for number, part in enumerate(parts):
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "image"):
      raise ValueError(
        f"{where}[{number}] is a part of the type {kind!r}; expected text or image. "
        "Leave it out: other parts are not read"
      )
    key = "text" if kind == "text" else "image"
    if part.get(key) is None or (kind == "text" and not isinstance(part[key], str)):
      raise ValueError(
        f'{where}[{number}] has "{key}" {_type_name(part.get(key))}; expected a '
        f"{'text' if kind == 'text' else 'path, a data URI or bytes'}"
      )
  if role == "assistant":
    raise ValueError(
      f"{where} of the assistant holds an image; expected text, the only output of the "
      "models. Move the image into a turn of the user"
    )


def _type_name(value: object) -> str:
  return "missing" if value is None else checks.type_of(value)
