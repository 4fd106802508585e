"""Converts records in the form of other libraries into ours.

  Alpaca    {"instruction", "input" (may be empty or missing), "output"}. The prompt is
            the instruction, a blank line and the input; the output is the answer. A
            "system" text and a "history" of [question, answer] precede the instruction
  ShareGPT  {"conversations": [{"from": "human", "value": ...}, ...]}. Next to "chosen"
            and "rejected", the conversation is the prompt. A turn "function_call" is
            the assistant's call of a tool
  TRL       {"prompt", "completion"}, both texts or both lists of messages. Only the
            completion is trained, not the assistant's turns of the prompt. In
            {"prompt", "messages"} the prompt repeats the first message and is dropped
  OpenAI    messages whose content is a list of {"type": "text", "text": ...}; pairs as
            {"input": {"messages"}, "preferred_output", "non_preferred_output"}

LLaMA-Factory's "kto_tag" next to the keys of Alpaca or ShareGPT labels the last answer.
"tools" may be JSON in a string, because a parquet column holds no nested objects.

The keys of a record decide its form. A record in our own form (`tunix.data.records`) is
returned unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tunix.data import image_parts
from tunix.generate.tokenizer import messages
from tunix.utils import checks

_ALPACA = ("instruction", "input", "system", "history")
_CALL = ("function_call", "tool_call")
_ROLES = {
  **dict.fromkeys(("human", "user"), "user"),
  **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
  "system": "system",
  **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


class Form(NamedTuple):
  """One form of another library.

  Attributes:
    name: name of the library in reports.
    needs: keys that a record of this form has.
    without: keys of our own forms, which a record of this form lacks.
    convert: (record, place) -> the record in our form.
  """

  name: str
  needs: frozenset[str]
  without: frozenset[str]
  convert: Callable[[Mapping[str, Any], str], dict[str, Any]]


def convert(record: object, where: str, *forms: Form) -> Any:
  """Converts a record to our form, from the first of `forms` that matches its keys.

  Null counts as absent in fields and in keys of messages. Without `forms`, a null field
  is a column of its own and stays.

  Args:
    record: a record of a file; anything but a mapping is returned unchanged.
    where: place of the record, for error messages.
    *forms: accepted forms, in order of preference.

  Raises:
    ValueError: the keys match a form and the values do not; begins with `where`.
  """
  if not isinstance(record, Mapping):
    return record
  record = messages.present(record) if forms else record
  form = find(record, *forms)
  record = _with_plain_messages(record if form is None else form.convert(record, where))
  if isinstance(tools := record.get("tools"), str):
    # LLaMA-Factory writes "" for a record without tools.
    record = {**record, "tools": _json(tools or "[]", f'{where}: "tools"')}
  return image_parts.gathered(record, where) if forms else record


def find(record: object, *forms: Form) -> Form | None:
  """Returns the first of `forms` that matches the record; None for our own form.

  A null field counts as absent.
  """
  if not isinstance(record, Mapping):
    return None
  keys = messages.present(record).keys()
  return next((f for f in forms if f.needs <= keys and not f.without & keys), None)


def _rest(record: Mapping[str, Any], *taken: str) -> dict[str, Any]:
  return {key: value for key, value in record.items() if key not in taken}


def _json(text: str, where: str) -> Any:
  try:
    return json.loads(text)
  except ValueError as error:
    raise ValueError(f"{where} is no JSON ({error}): {text!r:.60}") from error


def _alpaca(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  rest = _rest(record, *_ALPACA, "output", "text")
  prompt, answer = _alpaca_turns(record, where), record["output"]
  if isinstance(prompt, str):
    return rest | {"prompt": prompt, "response": answer}
  return rest | {"messages": [*prompt, {"role": "assistant", "content": answer}]}


def _alpaca_prompt(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  return _rest(record, *_ALPACA) | {"prompt": _alpaca_turns(record, where)}


def _alpaca_label(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  rest = _rest(record, *_ALPACA, "output", "kto_tag")
  answer = {"completion": record["output"], "label": record["kto_tag"]}
  return rest | answer | {"prompt": _alpaca_turns(record, where)}


def _alpaca_turns(record: Mapping[str, Any], where: str) -> Any:
  """Returns the prompt: messages if the record has a system text or a history."""
  instruction = _instruction(record, where)
  system, history = record.get("system"), record.get("history")
  if not system and not history:
    return instruction
  turns = [{"role": "system", "content": system}] if system else []
  for number, pair in enumerate(history or []):
    if not isinstance(pair, list | tuple) or len(pair) != 2:
      raise ValueError(
        f'{where}: "history"[{number}] is {pair!r:.60}, expected [question, answer]'
      )
    turns += [
      {"role": role, "content": text} for role, text in zip(("user", "assistant"), pair)
    ]
  return [*turns, {"role": "user", "content": instruction}]


def _instruction(record: Mapping[str, Any], where: str) -> str:
  for name in ("instruction", "input"):
    value = record.get(name)
    if not isinstance(value, str | None) or (name == "instruction" and not value):
      raise ValueError(f'{where}: "{name}" is {value!r}, expected text')
  parts = [record["instruction"], record.get("input")]
  return "\n\n".join(part for part in parts if part)


def _sharegpt(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  turns = record["conversations"]
  if not isinstance(turns, list) or not turns:
    raise ValueError(f'{where}: "conversations" is {turns!r:.60}, expected a list')
  ours = [
    _message(turn, f'{where}: "conversations"[{number}]')
    for number, turn in enumerate(turns)
  ]
  if isinstance(system := record.get("system"), str) and system:
    ours = [{"role": "system", "content": system}, *ours]
  return _rest(record, "conversations", "system") | {"messages": ours}


def _sharegpt_pair(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  ours = _sharegpt(record, where)
  answers = {
    name: [_message(record[name], f'{where}: "{name}"')]
    if isinstance(record[name], Mapping)
    else record[name]
    for name in ("chosen", "rejected")
  }
  return _rest(ours, "messages") | answers | {"prompt": ours["messages"]}


def _sharegpt_label(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  ours = _sharegpt(record, where)
  *prompt, answer = ours["messages"]
  rest = _rest(ours, "messages", "kto_tag")
  return rest | {"prompt": prompt, "completion": [answer], "label": record["kto_tag"]}


def _openai_pair(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  request = record["input"]
  if not isinstance(request, Mapping) or "messages" not in request:
    raise ValueError(
      f'{where}: "input" is {request!r:.60}, expected {{"messages": ...}}'
    )
  return {
    **_rest(request, "messages"),
    "prompt": request["messages"],
    "chosen": record["preferred_output"],
    "rejected": record["non_preferred_output"],
  }


def _call(text: Any, where: str) -> dict[str, Any]:
  call = _json(text, where) if isinstance(text, str) else text
  calls = call if isinstance(call, list) else [call]
  if not all(isinstance(one, Mapping) and "name" in one for one in calls):
    raise ValueError(f'{where} is {text!r:.60}, expected {{"name", "arguments"}}')
  tools = [{"type": "function", "function": dict(one)} for one in calls]
  return {"role": "assistant", "content": "", "tool_calls": tools}


def _message(turn: Any, where: str) -> dict[str, Any]:
  if isinstance(turn, Mapping):
    turn = messages.present(turn)
  if _is_message(turn):
    return turn
  if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
    raise ValueError(f'{where} is {turn!r:.60}, expected {{"from": ..., "value": ...}}')
  rest = _rest(turn, "from", "value")
  if turn["from"] in _CALL:
    return _call(turn["value"], where) | rest
  if turn["from"] not in _ROLES:
    roles = ", ".join((*_ROLES, *_CALL))
    raise ValueError(f'{where}: "from" is {turn["from"]!r}, expected one of {roles}')
  return {"role": _ROLES[turn["from"]], "content": turn["value"], **rest}


def _trl(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  prompt, completion = record["prompt"], record["completion"]
  rest = _rest(record, "prompt", "completion")
  if isinstance(completion, str):
    return rest | {"prompt": prompt, "response": completion}
  if not isinstance(completion, list) or not isinstance(prompt, list):
    raise ValueError(
      f'{where}: "prompt" is {checks.type_of(prompt)} and "completion" a '
      f"{type(completion).__name__}, expected two texts or two lists of messages"
    )
  context = [
    {**turn, "train": False} if isinstance(turn, Mapping) else turn for turn in prompt
  ]
  return rest | {"messages": [*context, *completion]}


def _with_plain_messages(record: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns a record whose messages are plain, see `messages.plain`."""
  changed = {
    name: [messages.plain(turn) if _is_message(turn) else turn for turn in value]
    for name, value in record.items()
    if isinstance(value, list) and any(map(_is_message, value))
  }
  return {**record, **changed} if changed else record


def _is_message(value: object) -> bool:
  return isinstance(value, Mapping) and "role" in value


def _chat(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  del where
  return _rest(record, "prompt")


_SFT = frozenset({"messages", "response"})

ALPACA = Form("Alpaca", frozenset({"instruction", "output"}), _SFT, _alpaca)
ALPACA_PROMPT = Form(
  "Alpaca", frozenset({"instruction"}), frozenset({"prompt"}), _alpaca_prompt
)
SHAREGPT = Form("ShareGPT", frozenset({"conversations"}), _SFT, _sharegpt)
SHAREGPT_PAIR = Form(
  "ShareGPT",
  frozenset({"conversations", "chosen", "rejected"}),
  frozenset({"prompt"}),
  _sharegpt_pair,
)
TRL = Form("TRL", frozenset({"prompt", "completion"}), _SFT, _trl)

ALPACA_LABEL = Form(
  "Alpaca",
  frozenset({"instruction", "output", "kto_tag"}),
  frozenset({"prompt", "completion"}),
  _alpaca_label,
)
SHAREGPT_LABEL = Form(
  "ShareGPT",
  frozenset({"conversations", "kto_tag"}),
  frozenset({"prompt", "completion"}),
  _sharegpt_label,
)
OPENAI_PAIR = Form(
  "OpenAI",
  frozenset({"input", "preferred_output", "non_preferred_output"}),
  frozenset({"prompt", "chosen"}),
  _openai_pair,
)

# UltraChat has this form: the prompt repeats the first message.
TRL_CHAT = Form(
  "TRL",
  frozenset({"prompt", "messages"}),
  frozenset({"response", "completion", "text"}),
  _chat,
)

FINE_TUNING = (SHAREGPT, ALPACA, TRL, TRL_CHAT)
PAIRS = (SHAREGPT_PAIR, OPENAI_PAIR, ALPACA_PROMPT)
LABELLED = (SHAREGPT_LABEL, ALPACA_LABEL, ALPACA_PROMPT)
PROMPTS = (SHAREGPT, ALPACA_PROMPT)
