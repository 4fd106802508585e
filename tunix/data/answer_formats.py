"""Records of preference data: pairs of responses, and single ones with a label.

A record is a dict of one of four kinds; further keys are allowed and ignored:

  pairs     {"prompt": text or [messages], "chosen": ..., "rejected": ...}
            {"chosen": [messages], "rejected": [messages]}, whole conversations: what
            they begin with in common is the prompt
  labelled  {"prompt": text or [messages], "completion": ..., "label": true or false}
  answered  {"prompt": text or [messages], "response": text} or {"messages": [...]}, the
            last of which is the answer: records of fine-tuning with one answer
  prompt    {"prompt": text or [messages]} or {"messages": [...]}, whose last message is
            left out where it is the assistant's: a "response" is not read

A response is text or a list of messages; a list that begins with the conversation
again (with a system or user turn) is taken as a whole one. A pair may carry a number
"margin", how much better the chosen response is; a record may carry "tools".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tunix.data import formats

Response = str | Sequence[Mapping[str, Any]]


class Answers(NamedTuple):
  """A record taken apart.

  Attributes:
    prompt: text or messages.
    responses: by name: "chosen" and "rejected", "completion", "response", or none.
    extra: "margin" (a float) or "label" (a bool), where the record has it.
    tools: for the chat template; None: the record brings none.
  """

  prompt: Response
  responses: dict[str, Response]
  extra: dict[str, float | bool]
  tools: Any


def read_pair(record: Any, where: str) -> Answers:
  """A record of two responses.

  Raises:
    ValueError: a field is missing or wrong; begins with `where`.
  """
  given = _responses(record, where, ("chosen", "rejected"), PAIRS)
  extra = {}
  if record.get("margin") is not None:
    margin = record["margin"]
    number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not number or not math.isfinite(margin):
      raise ValueError(f'{where}: "margin" is {margin!r}, expected a finite number')
    extra["margin"] = float(margin)
  return _answers(record, given, extra, where)


def read_labelled(record: Any, where: str) -> Answers:
  """A record of one response and whether it is a good one.

  Raises:
    ValueError: a field is missing or wrong; begins with `where`.
  """
  given = _responses(record, where, ("completion",), LABELLED)
  if not isinstance(record.get("label"), bool):
    raise ValueError(
      f'{where}: "label" is {record.get("label")!r}, expected true (a good answer) or '
      "false"
    )
  return _answers(record, given, {"label": record["label"]}, where)


def read_answered(record: Any, where: str) -> Answers:
  """A record of fine-tuning with one response.

  Raises:
    ValueError: it is no such record, or does not end with an answer.
  """
  kind = formats.record_kind(record, where)
  if kind == "prompt":
    prompt, response = record["prompt"], record["response"]
  elif kind == "messages" and len(record["messages"]) > 1:
    *prompt, last = record["messages"]
    if last["role"] != "assistant":
      raise ValueError(
        f"{where}: the last message is of the role {last['role']!r}: expected the "
        "assistant's answer"
      )
    response = [last]
  else:
    raise ValueError(f"{where}: {ANSWERED.expected}, found {formats.fields_of(record)}")
  return Answers(prompt, {"response": response}, {}, record.get("tools"))


def read_prompt(record: Any, where: str) -> Answers:
  """A record of which the prompt alone is read.

  Raises:
    ValueError: it has none; begins with `where`.
  """
  formats.check_mapping(record, where, PROMPTS.expected)
  found = [name for name in ("prompt", "messages") if name in record]
  if len(found) != 1:
    raise ValueError(f"{where}: found {formats.fields_of(record)}, {PROMPTS.expected}")
  prompt = record[found[0]]
  if found == ["messages"] or isinstance(prompt, list):
    formats.check_messages(prompt, f'{where}: "{found[0]}"')
  else:
    formats.check_string(record, "prompt", where, also=" or a list of messages")
  if found == ["messages"] and prompt[-1]["role"] == "assistant":
    prompt = prompt[:-1]
  if not prompt and found == ["messages"]:
    raise ValueError(f"{where}: the only message is an answer: expected a prompt")
  return Answers(prompt, {}, {}, record.get("tools"))


def is_empty(response: Response) -> bool:
  """Whether a response says nothing."""
  if isinstance(response, str):
    return not response.strip()
  return all(
    not (message.get("content") or "").strip() and not message.get("tool_calls")
    for message in response
  )


def _responses(
  record: Any, where: str, names: Sequence[str], form: formats.Form
) -> dict[str, list[dict[str, Any]] | str]:
  formats.check_mapping(record, where, form.expected)
  if not all(name in record for name in names):
    raise ValueError(f"{where}: found {formats.fields_of(record)}, {form.expected}")
  for name in (*names, "prompt"):
    if name not in record:
      continue
    if isinstance(record[name], list):
      formats.check_messages(record[name], f'{where}: "{name}"')
    else:
      formats.check_string(record, name, where, also=" or a list of messages")
  return {name: record[name] for name in names}


def _answers(
  record: Mapping[str, Any], given: dict[str, Any], extra: dict[str, Any], where: str
) -> Answers:
  prompt, responses = split(record.get("prompt"), given, where)
  return Answers(prompt, responses, extra, record.get("tools"))


def split(
  prompt: Response | None, given: Mapping[str, Any], where: str
) -> tuple[Response, dict[str, Response]]:
  """The prompt and the responses behind it, which may begin with the prompt again.

  Args:
    prompt: None: it is what the responses begin with in common.
    given: checked responses by name; messages as lists, whole conversations or not.
    where: the place of the record, for error messages.

  Raises:
    ValueError: there is no prompt, or the conversations do not begin with it.
  """
  whole = [name for name, value in given.items() if _is_whole(value)]
  if not whole:
    if prompt is None:
      raise ValueError(
        f'{where}: no "prompt", and {_quoted(given)} do not begin with it: expected '
        'a "prompt", or whole conversations as lists of messages'
      )
    return prompt, dict(given)
  if len(whole) < len(given):
    raise ValueError(
      f'{where}: "{whole[0]}" is a whole conversation and {_quoted(given)} are not '
      "both: give the prompt in both, or in none"
    )
  count = _common_messages(list(given.values()), where)
  first = next(iter(given.values()))
  if prompt is not None:
    count = _repeated(prompt, first[:count], where)
  return first[:count], {name: value[count:] for name, value in given.items()}


def _is_whole(response: Any) -> bool:
  messages = isinstance(response, list) and response
  return bool(messages) and messages[0]["role"] in ("system", "user")


def _common_messages(
  conversations: Sequence[Sequence[Mapping[str, Any]]], where: str
) -> int:
  """How many messages all begin with, the last of each left out.

  Raises:
    ValueError: none; begins with `where`.
  """
  most = min(len(messages) for messages in conversations) - 1
  count = 0
  while count < most and all(
    m[count] == conversations[0][count] for m in conversations
  ):
    count += 1
  if not count:
    raise ValueError(
      f"{where}: the conversations have no message in common to begin with: expected "
      "the same prompt in both"
    )
  return count


def _repeated(prompt: Any, common: list[dict[str, Any]], where: str) -> int:
  """Messages of the prompt, which the conversations begin with as well."""
  if isinstance(prompt, list):
    if common[: len(prompt)] == prompt:
      return len(prompt)
  elif any(m["role"] == "user" and m["content"] == prompt for m in common):
    return len(common)
  raise ValueError(
    f'{where}: the conversations do not begin with "prompt": leave it out, or give the '
    "responses alone"
  )


def _quoted(names: Any) -> str:
  return " and ".join(f'"{name}"' for name in names)


def _check_pair(record: Any, where: str) -> str:
  read_pair(record, where)
  return "pair"


def _check_labelled(record: Any, where: str) -> str:
  read_labelled(record, where)
  return "labelled"


def _check_answered(record: Any, where: str) -> str:
  read_answered(record, where)
  return "answered"


def _check_prompt(record: Any, where: str) -> str:
  read_prompt(record, where)
  return "prompt"


PROMPTS = formats.Form(
  expected='expected {"prompt": text or [messages]} or {"messages": [...]}',
  check=_check_prompt,
)
ANSWERED = formats.Form(
  expected=(
    'expected {"prompt": ..., "response": ...} or {"messages": [...]} that ends with '
    "an answer"
  ),
  check=_check_answered,
)
PAIRS = formats.Form(
  expected=(
    'expected {"prompt": ..., "chosen": ..., "rejected": ...} or '
    '{"chosen": [messages], "rejected": [messages]}'
  ),
  check=_check_pair,
)
LABELLED = formats.Form(
  expected='expected {"prompt": ..., "completion": ..., "label": true or false}',
  check=_check_labelled,
)
