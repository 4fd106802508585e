"""Records as other libraries' files have them, turned into ours.

  Alpaca    {"instruction", "input" (may be empty or missing), "output"}: the prompt is
            the instruction, behind a blank line the input; the output is its answer.
            "system" and "history" ([[question, answer], ...]) come before them
  ShareGPT  {"conversations": [{"from": "human", "value": ...}, ...]}; where "chosen"
            and "rejected" are beside it, it is the prompt. "system" comes before it;
            "tools" may be the text of a JSON list. A turn from "function_call" is one
            of the assistant's, its value the text of {"name", "arguments"}
            Both with "kto_tag" beside them: the last answer, and whether it is good
  TRL       {"prompt", "completion"}, texts or messages; what came before the completion
            is not learned, the assistant's turns among it. Of {"prompt", "messages"}
            the messages are read
  OpenAI    messages whose content is a list of {"type": "text", "text": ...}

A record is known by its keys. What is in our own form (`tunix.data.records`) is given
back as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_CALL = "function_call"
_ROLES = {
  **dict.fromkeys(("human", "user"), "user"),
  **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
  "system": "system",
  _CALL: "assistant",
  **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


class Form(NamedTuple):
  """A form of another library.

  Attributes:
    name: in reports.
    needs: keys by which it is known.
    without: keys of our own forms; with one of them a record is ours.
    convert: (record, its place) -> a record of ours.
  """

  name: str
  needs: frozenset[str]
  without: frozenset[str]
  convert: Callable[[Mapping[str, Any], str], dict[str, Any]]


def of(record: Any, where: str, *forms: Form) -> Any:
  """The record in our form, the first of `forms` whose keys it has.

  Raises:
    ValueError: its keys are such a form's and its values are not; begins with `where`.
  """
  if not isinstance(record, Mapping):
    return record
  form = find(record, *forms)
  return _with_texts(record if form is None else form.convert(record, where))


def find(record: Any, *forms: Form) -> Form | None:
  """The form that a record has; None: it is one of ours, or of none that is known."""
  if not isinstance(record, Mapping):
    return None
  keys = record.keys()
  return next((f for f in forms if f.needs <= keys and not f.without & keys), None)


def _rest(record: Mapping[str, Any], *taken: str) -> dict[str, Any]:
  return {key: value for key, value in record.items() if key not in taken}


def _alpaca(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  prompt = _alpaca_prompt(record, where)
  if isinstance(prompt["prompt"], str):
    return _rest(prompt, "output", "text") | {"response": record["output"]}
  # With turns before it, all of which are learned.
  answer = {"role": "assistant", "content": record["output"]}
  rest = _rest(prompt, "output", "text", "prompt")
  return rest | {"messages": [*prompt["prompt"], answer]}


def _alpaca_prompt(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  """The prompt is text, or messages where something comes before it."""
  prompt: Any = _instruction(record, where)
  if before := _before(record, where):
    prompt = [*before, {"role": "user", "content": prompt}]
  rest = _rest(record, "instruction", "input", "system", "history")
  return rest | {"prompt": prompt}


def _before(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
  """System prompt and earlier turns."""
  turns = _system(record)
  for number, pair in enumerate(record.get("history") or ()):
    if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
      raise ValueError(
        f'{where}: "history"[{number}] is {pair!r:.60}, expected [question, answer]'
      )
    turns.append({"role": "user", "content": pair[0]})
    turns.append({"role": "assistant", "content": pair[1]})
  return turns


def _system(record: Mapping[str, Any]) -> list[dict[str, Any]]:
  text = record.get("system")
  is_there = isinstance(text, str) and text
  return [{"role": "system", "content": text}] if is_there else []


def _alpaca_labelled(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  rest = _rest(_alpaca_prompt(record, where), "output", "kto_tag")
  return rest | {"completion": record["output"], "label": record["kto_tag"]}


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
    raise ValueError(f'{where}: "conversations" is no list of turns: {turns!r:.60}')
  messages = [
    _message(turn, f'{where}: "conversations"[{number}]')
    for number, turn in enumerate(turns)
  ]
  rest = _rest(record, "conversations", "system")
  if isinstance(rest.get("tools"), str):
    rest["tools"] = _parsed(rest["tools"] or "null", f'{where}: "tools"')
  return rest | {"messages": [*_system(record), *messages]}


def _parsed(text: Any, where: str) -> Any:
  try:
    return json.loads(text)
  except (TypeError, ValueError) as error:
    raise ValueError(f"{where} is {text!r:.60}, expected the text of JSON") from error


def _sharegpt_labelled(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  ours = _sharegpt(record, where)
  *prompt, answer = ours["messages"]
  rest = _rest(ours, "messages", "kto_tag")
  return rest | {
    "prompt": prompt,
    "completion": [answer],
    "label": record["kto_tag"],
  }


def _sharegpt_pair(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  ours = _sharegpt(record, where)
  answers = {
    name: [_message(record[name], f'{where}: "{name}"')]
    if isinstance(record[name], Mapping)
    else record[name]
    for name in ("chosen", "rejected")
  }
  return _rest(ours, "messages") | answers | {"prompt": ours["messages"]}


def _message(turn: Any, where: str) -> dict[str, Any]:
  if isinstance(turn, Mapping) and "role" in turn:
    return dict(turn)
  if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
    raise ValueError(f'{where} is {turn!r:.60}, expected {{"from": ..., "value": ...}}')
  if turn["from"] not in _ROLES:
    raise ValueError(
      f'{where}: "from" is {turn["from"]!r}, expected one of {", ".join(_ROLES)}'
    )
  rest = _rest(turn, "from", "value")
  if turn["from"] == _CALL:
    call = _parsed(turn["value"], f'{where}: "value"')
    calls = call if isinstance(call, list) else [call]
    made = [{"type": "function", "function": one} for one in calls]
    return {"role": "assistant", "content": None, "tool_calls": made, **rest}
  return {"role": _ROLES[turn["from"]], "content": turn["value"], **rest}


def _trl(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  prompt, completion = record["prompt"], record["completion"]
  rest = _rest(record, "prompt", "completion")
  if isinstance(completion, str):
    return rest | {"prompt": prompt, "response": completion}
  if not isinstance(completion, list) or not isinstance(prompt, list):
    raise ValueError(
      f'{where}: "prompt" is a {type(prompt).__name__} and "completion" a '
      f"{type(completion).__name__}, expected two texts or two lists of messages"
    )
  shown = [
    {**turn, "train": False} if isinstance(turn, Mapping) else turn for turn in prompt
  ]
  return rest | {"messages": [*shown, *completion]}


def _with_texts(record: Mapping[str, Any]) -> Mapping[str, Any]:
  """The record with the text parts of its messages' content put together."""
  changed = {
    name: [_with_text(message) for message in value]
    for name, value in record.items()
    if isinstance(value, list) and any(_has_parts(message) for message in value)
  }
  return {**record, **changed} if changed else record


def _has_parts(message: Any) -> bool:
  if not isinstance(message, Mapping) or "role" not in message:
    return False
  parts = message.get("content")
  return isinstance(parts, list) and all(
    isinstance(part, Mapping) and part.get("type") == "text" for part in parts
  )


def _with_text(message: Any) -> Any:
  if not _has_parts(message):
    return message
  return {
    **message,
    "content": "".join(p.get("text") or "" for p in message["content"]),
  }


def _chat(record: Mapping[str, Any], where: str) -> dict[str, Any]:
  del where
  return _rest(record, "prompt")


_SFT = frozenset({"messages", "response"})
_LABELLED = frozenset({"prompt", "completion", "label"})

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
ALPACA_LABELLED = Form(
  "Alpaca",
  frozenset({"instruction", "output", "kto_tag"}),
  _LABELLED,
  _alpaca_labelled,
)
SHAREGPT_LABELLED = Form(
  "ShareGPT", frozenset({"conversations", "kto_tag"}), _LABELLED, _sharegpt_labelled
)
TRL = Form("TRL", frozenset({"prompt", "completion"}), _SFT, _trl)

# As the chats of UltraChat: the prompt is the first of the messages again.
TRL_CHAT = Form(
  "TRL",
  frozenset({"prompt", "messages"}),
  frozenset({"response", "completion", "text"}),
  _chat,
)

FINE_TUNING = (SHAREGPT, ALPACA, TRL, TRL_CHAT)
COMPLETIONS = (SHAREGPT_PAIR, ALPACA_PROMPT)
LABELLED = (ALPACA_LABELLED, SHAREGPT_LABELLED, ALPACA_PROMPT)
PROMPTS = (SHAREGPT, ALPACA_PROMPT)
