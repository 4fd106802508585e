"""Records: what a line of data may hold, checked and taken apart.

A record is a dict; a `Kind` says which fields it must have. Further ones are allowed
and ignored.

  SFT       {"prompt": text or [messages], "response": text}
            {"messages": [{"role": ..., "content": ...}, ...]}
            {"text": text}
  PAIRS     {"prompt": text or [messages], "chosen": ..., "rejected": ...}
            {"chosen": [messages], "rejected": [messages]}, whole conversations: what
            they begin with in common is the prompt
  LABELLED  {"prompt": text or [messages], "completion": ..., "label": true or false}
  ANSWERED  {"prompt": text or [messages], "response": text} or {"messages": [...]}, the
            last of which is the completion: records of SFT with one completion
  PROMPTS   {"prompt": text or [messages]} or {"messages": [...]}, whose last message is
            left out where it is the assistant's: a "response" is not read

The forms of other libraries' files are read as well, see `tunix.data.forms`.

In files of fine-tuning a completion is called "response", as most such files have it. A
chosen or rejected completion is text or a list of messages; a list that begins with the
conversation again (with a system or user turn) is taken as a whole one. A pair may
carry a number "margin", how much better the chosen one is; a record may carry "tools",
JSON schemas for the chat template. A message may carry `"weight": 0` or
`"train": false`: the turn is shown to the model but not learned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tunix.data import forms as foreign

Text = str | Sequence[Mapping[str, Any]]
_LABELS = {"true": True, "false": False}


class Record(NamedTuple):
  """A record taken apart.

  Attributes:
    form: which of its kind's forms it has.
    prompt: text or messages; empty where everything is completion.
    completions: by name; text or messages.
    extra: "margin" (a float) or "label" (a bool), where the record has it.
    tools: for the chat template; None: the record brings none.
  """

  form: str
  prompt: Text
  completions: dict[str, Text]
  extra: dict[str, Any]
  tools: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """What records are read as.

  Attributes:
    name: in messages and settings.
    expected: its forms in words, for error messages.
    read: (record, its place) -> its parts; raises ValueError for a wrong one.
    completions: names of what a record has behind its prompt.
    noun: what reports call a record.
    forms: of other libraries' files that are taken too.
  """

  name: str
  expected: str
  read: Callable[[Any, str], Record]
  completions: tuple[str, ...] = ("completion",)
  noun: str = "records"
  forms: tuple[foreign.Form, ...] = ()


def read_sft(record: Any, where: str) -> Record:
  """A record of fine-tuning.

  Raises:
    ValueError: a needed field is missing or of the wrong type; begins with `where`.
  """
  record = foreign.of(record, where, *SFT.forms)
  check_mapping(record, where, SFT.expected)
  known = [name for name in ("prompt", "messages", "text") if name in record]
  if len(known) != 1:
    raise ValueError(f"{where}: found {describe_fields(record)}, {SFT.expected}")
  [form] = known
  prompt: Text = ""
  if form == "prompt":
    if "response" not in record:
      raise ValueError(f'{where}: "prompt" without "response"; {SFT.expected}')
    check_string(record, "response", where)
    check_text(record, "prompt", where)
    prompt, completion = record["prompt"], record["response"]
  elif form == "messages":
    check_messages(record["messages"], f'{where}: "messages"')
    prompt, completion = [], record["messages"]
  else:
    check_string(record, "text", where)
    if not record["text"].strip():
      raise ValueError(f'{where}: "text" is blank, expected something to learn')
    completion = record["text"]
  return Record(form, prompt, {"completion": completion}, {}, record.get("tools"))


def read_pair(record: Any, where: str) -> Record:
  """A record of two completions.

  Raises:
    ValueError: a field is missing or wrong; begins with `where`.
  """
  record = foreign.of(record, where, *PAIRS.forms)
  completions = _completions(record, where, PAIRS)
  extra = {}
  if record.get("margin") is not None:
    margin = record["margin"]
    number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not number or not math.isfinite(margin):
      raise ValueError(f'{where}: "margin" is {margin!r}, expected a finite number')
    extra["margin"] = float(margin)
  prompt, completions = split(record.get("prompt"), completions, where)
  return Record("pair", prompt, completions, extra, record.get("tools"))


def read_labelled(record: Any, where: str) -> Record:
  """A record of one completion and whether it is a good one.

  Raises:
    ValueError: a field is missing or wrong; begins with `where`.
  """
  record = foreign.of(record, where, *LABELLED.forms)
  completions = _completions(record, where, LABELLED)
  # A cell of CSV is text, and Python's own writer says True.
  label = _LABELS.get(str(record.get("label")).lower())
  if label is None:
    raise ValueError(
      f'{where}: "label" is {record.get("label")!r}, expected true (a good answer) or '
      "false"
    )
  prompt, completions = split(record.get("prompt"), completions, where)
  extra = {"label": label}
  return Record("labelled", prompt, completions, extra, record.get("tools"))


def read_answered(record: Any, where: str) -> Record:
  """A record of fine-tuning with one completion.

  Raises:
    ValueError: it is no such record, or does not end with an answer.
  """
  record = foreign.of(record, where, *SFT.forms)
  read = read_sft(record, where)
  if read.form == "messages" and len(record["messages"]) > 1:
    *prompt, last = record["messages"]
    if last["role"] != "assistant":
      raise ValueError(
        f"{where}: the last message is of the role {last['role']!r}: expected the "
        "assistant's answer"
      )
    read = read._replace(prompt=prompt, completions={"completion": [last]})
  elif read.form != "prompt":
    raise ValueError(f"{where}: {ANSWERED.expected}, found {describe_fields(record)}")
  return read._replace(form="answered")


def read_prompt(record: Any, where: str) -> Record:
  """A record of which the prompt alone is read.

  Raises:
    ValueError: it has none; begins with `where`.
  """
  record = foreign.of(record, where, *PROMPTS.forms)
  check_mapping(record, where, PROMPTS.expected)
  known = [name for name in ("prompt", "messages") if name in record]
  if len(known) != 1:
    raise ValueError(f"{where}: found {describe_fields(record)}, {PROMPTS.expected}")
  [form] = known
  prompt = record[form]
  if form == "prompt":
    check_text(record, "prompt", where)
  else:
    check_messages(prompt, f'{where}: "messages"')
    if prompt[-1]["role"] == "assistant":
      prompt = prompt[:-1]
    if not prompt:
      raise ValueError(f"{where}: the only message is an answer: expected a prompt")
  return Record("prompt", prompt, {}, {}, record.get("tools"))


def is_empty(completion: Text) -> bool:
  """Whether a completion says nothing."""
  if isinstance(completion, str):
    return not completion.strip()
  return all(
    not (message.get("content") or "").strip() and not message.get("tool_calls")
    for message in completion
  )


def _completions(record: Any, where: str, kind: Kind) -> dict[str, Text]:
  check_mapping(record, where, kind.expected)
  if not all(name in record for name in kind.completions):
    raise ValueError(f"{where}: found {describe_fields(record)}, {kind.expected}")
  for name in (*kind.completions, "prompt"):
    if name in record:
      check_text(record, name, where)
  return {name: record[name] for name in kind.completions}


def split(
  prompt: Text | None, completions: Mapping[str, Any], where: str
) -> tuple[Text, dict[str, Text]]:
  """The prompt and the completions behind it, which may begin with the prompt again.

  Args:
    prompt: None: it is what the completions begin with in common.
    completions: checked, by name; messages as lists, whole conversations or not.
    where: the place of the record, for error messages.

  Raises:
    ValueError: there is no prompt, or the conversations do not begin with it.
  """
  whole = [name for name, value in completions.items() if _is_whole(value)]
  if not whole:
    if prompt is None:
      raise ValueError(
        f'{where}: no "prompt", and {_quoted(completions)} do not begin with it: '
        'expected a "prompt", or whole conversations as lists of messages'
      )
    return prompt, dict(completions)
  if len(whole) < len(completions):
    raise ValueError(
      f'{where}: "{whole[0]}" is a whole conversation and {_quoted(completions)} are '
      "not both: give the prompt in both, or in none"
    )
  count = _common_messages(list(completions.values()), where)
  first = next(iter(completions.values()))
  if prompt is not None:
    count = _repeated(prompt, first[:count], where)
  return first[:count], {name: value[count:] for name, value in completions.items()}


def _is_whole(completion: Any) -> bool:
  messages = isinstance(completion, list) and completion
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
    "completions alone"
  )


def _quoted(names: Any) -> str:
  return " and ".join(f'"{name}"' for name in names)


def describe_fields(record: Mapping[str, Any]) -> str:
  """The names of a record's fields, for messages."""
  return "fields " + ", ".join(map(repr, record)) if record else "no fields"


def check_mapping(record: Any, where: str, expected: str) -> None:
  """Refuses what is no object, and "tools" that are no schemas.

  Raises:
    ValueError: begins with `where`.
  """
  if not isinstance(record, Mapping):
    raise ValueError(f"{where}: found a {_name(record)}, {expected}")
  if not isinstance(record.get("tools", []), list | None):
    raise ValueError(
      f'{where}: "tools" is a {_name(record["tools"])}, expected a list of JSON schemas'
    )
  for tool in record.get("tools") or []:
    if not isinstance(tool, Mapping):
      raise ValueError(
        f'{where}: "tools" holds a {_name(tool)}, expected a list of JSON schemas'
      )


def check_string(
  record: Mapping[str, Any], field: str, where: str, also: str = ""
) -> None:
  """Refuses a field that is no string.

  Raises:
    ValueError: begins with `where`.
  """
  if not isinstance(record[field], str):
    raise ValueError(
      f'{where}: "{field}" is a {_name(record[field])}, expected a string{also}'
    )


def check_text(record: Mapping[str, Any], field: str, where: str) -> None:
  """Refuses a field that is neither text nor messages.

  Raises:
    ValueError: begins with `where`.
  """
  if isinstance(record[field], list):
    check_messages(record[field], f'{where}: "{field}"')
  else:
    check_string(record, field, where, also=" or a list of messages")


def check_messages(messages: Any, where: str) -> None:
  """Refuses what is no list of messages.

  Raises:
    ValueError: begins with `where`.
  """
  if not isinstance(messages, list) or not messages:
    what = "an empty list" if messages == [] else f"a {_name(messages)}"
    raise ValueError(f"{where} is {what}, expected a list of messages")
  for number, message in enumerate(messages):
    _check_message(message, f"{where}[{number}]")


def _check_message(message: Any, where: str) -> None:
  if not isinstance(message, Mapping):
    raise ValueError(
      f'{where} is a {_name(message)}, expected {{"role": ..., "content": ...}}'
    )
  role, content = message.get("role"), message.get("content")
  if not isinstance(role, str):
    raise ValueError(
      f'{where}: "role" is {_name(role)}, expected a string such as "user"'
    )
  silent = content is None and message.get("tool_calls")
  if not isinstance(content, str) and not silent:
    raise ValueError(
      f'{where}: "content" is {_name(content)}, expected a string (text alone is read)'
    )
  if message.get("weight", 1) not in (0, 1):
    raise ValueError(
      f'{where}: "weight" is {message["weight"]!r}, expected 0 (do not train) or 1'
    )
  if not isinstance(message.get("train", True), bool):
    raise ValueError(
      f'{where}: "train" is {message["train"]!r}, expected true or false'
    )


def _name(value: Any) -> str:
  return "missing" if value is None else f"{type(value).__name__}"


SFT = Kind(
  name="sft",
  expected=(
    'expected {"prompt": ..., "response": ...}, {"messages": [...]} or {"text": ...}'
  ),
  read=read_sft,
  forms=foreign.FINE_TUNING,
)
PAIRS = Kind(
  name="pair",
  expected=(
    'expected {"prompt": ..., "chosen": ..., "rejected": ...} or '
    '{"chosen": [messages], "rejected": [messages]}'
  ),
  read=read_pair,
  completions=("chosen", "rejected"),
  noun="pairs",
  forms=foreign.PAIRS,
)
LABELLED = Kind(
  name="labelled",
  expected='expected {"prompt": ..., "completion": ..., "label": true or false}',
  read=read_labelled,
  noun="completions",
  forms=foreign.LABELLED,
)
ANSWERED = Kind(
  name="answered",
  expected=(
    'expected {"prompt": ..., "response": ...} or {"messages": [...]} that ends with '
    "an answer"
  ),
  read=read_answered,
  noun="completions",
  forms=foreign.FINE_TUNING,
)
PROMPTS = Kind(
  name="prompt",
  expected='expected {"prompt": text or [messages]} or {"messages": [...]}',
  read=read_prompt,
  completions=(),
  noun="prompts",
  forms=foreign.PROMPTS,
)
KINDS = {kind.name: kind for kind in (SFT, PAIRS, LABELLED, ANSWERED, PROMPTS)}
