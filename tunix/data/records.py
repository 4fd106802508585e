"""Kinds of records: the fields that a record must have, and its parts.

A record is a dict, for example one line of a data file. A `Kind` defines the fields
that a record must have; other fields are ignored.

  SFT          {"prompt": text or [messages], "response": text}
               {"messages": [{"role": ..., "content": ...}, ...]}
               {"text": text}
  PAIRS        {"prompt": text or [messages], "chosen": ..., "rejected": ...}
               {"chosen": [messages], "rejected": [messages]}: whole conversations,
               whose common beginning is the prompt
  LABELLED     {"prompt": text or [messages], "completion": ..., "label": true or false}
  ANSWERED     the records of SFT that have exactly one completion: {"prompt",
               "response"}, or {"messages"} whose last message is the completion
  PROMPTS      {"prompt": text or [messages]}, or {"messages": [...]} without its last
               message if that is the assistant's. A "response" is ignored
  PROMPT_ROWS  {"prompt": text or [messages], further columns for reward functions}

Records in the form of other libraries are converted first, see `tunix.data.forms`.

Records of fine-tuning name their completion "response", as most public files do. A
chosen or rejected completion is text or a list of messages. A list that starts with a
system or user turn is a whole conversation, which repeats the prompt. A pair may have a
number "margin": how much better the chosen completion is. A record may have "tools",
JSON schemas for the chat template. A message with `"weight": 0` or `"train": false` is
context for the model and is not trained. Messages of the prompt that are not the
assistant's may hold images, see `tunix.data.image_parts`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tunix.data import fields, forms as foreign, image_parts
from tunix.utils import terminal

Text = str | Sequence[Mapping[str, Any]]
# Cells of CSV are text, and Python's csv module writes True and False.
_LABELS = {"true": True, "false": False}
# Column of the rendered prompt in batches for reinforcement learning.
PROMPT_COLUMN = "prompts"
# Column with the token ids of prompts whose text, tokenized, would begin with another
# BOS: a chat template that prints no BOS, of a tokenizer that has one.
PROMPT_IDS_COLUMN = "prompt_token_ids"
# Column with prompts before a chat template, where "prompts" has rendered texts.
RAW_PROMPT_COLUMN = "raw_prompts"
# Columns of prompts with images: a list of paths and data URIs, and the number of image
# tokens that every prompt of a run has room for.
IMAGES_COLUMN = "images"
IMAGE_TOKENS_COLUMN = "prompt_image_tokens"
# Roles of the first turn of a whole conversation.
_FIRST_ROLES = ("system", "developer", "user")
# Reward functions receive the completions under these names.
_RESERVED_COLUMNS = {
  "completion",
  "completions",
  PROMPT_IDS_COLUMN,
  RAW_PROMPT_COLUMN,
  IMAGE_TOKENS_COLUMN,
}


class Record(NamedTuple):
  """The parts of one record.

  Attributes:
    form: name of the form within the record's kind.
    prompt: text or messages; empty if the record has only a completion.
    completions: name -> text or messages.
    extra: further fields: "margin" (float), "label" (bool), those of a teacher (see
      `tunix.data.turns.teacher_prompts`), or all columns of PROMPT_ROWS.
    tools: JSON schemas for the chat template; None if the record has none.
  """

  form: str
  prompt: Text
  completions: dict[str, Text]
  extra: dict[str, Any]
  tools: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """One kind of records.

  Attributes:
    name: name in messages and settings.
    expected: description of its forms, for error messages.
    read: (record, place) -> Record; raises ValueError for a wrong record.
    completions: names of the completions of a record.
    noun: plural noun for the records in reports; `counted` puts a number before it.
    forms: accepted forms of other libraries.
    settings: further settings of `read`, as text for digests.
    teacher_tokenizer: TokenizerAdapter of a teacher's prompts; None: the student's.
  """

  name: str
  expected: str
  read: Callable[[Any, str], Record]
  completions: tuple[str, ...] = ("completion",)
  noun: str = "records"
  forms: tuple[foreign.Form, ...] = ()
  settings: str = ""
  teacher_tokenizer: Any = None

  def counted(self, count: int) -> str:
    """Returns a number with the noun of the records: 1 pair, 2 pairs."""
    return terminal.counted(count, self.noun.removesuffix("s"))


def read_sft(record: Any, where: str) -> Record:
  """Reads a record of fine-tuning.

  Raises:
    ValueError: a field is missing or has the wrong type; begins with `where`.
  """
  record = foreign.convert(record, where, *SFT.forms)
  fields.check_no_pair(record, where, SFT.expected)
  form = _only_field(record, ("prompt", "messages", "text"), where, SFT.expected)
  fields.check_tools(record, where)
  prompt: Text = ""
  if form == "prompt":
    if "response" not in record:
      raise ValueError(f'{where}: "prompt" without "response"; {SFT.expected}')
    fields.check_string(record, "response", where)
    fields.check_text(record, "prompt", where)
    prompt, completion = record["prompt"], record["response"]
  elif form == "messages":
    fields.check_messages(record["messages"], f'{where}: "messages"')
    prompt, completion = [], record["messages"]
  else:
    fields.check_string(record, "text", where)
    if not record["text"].strip():
      raise ValueError(f'{where}: "text" is blank, expected text to train on')
    completion = record["text"]
  return Record(form, prompt, {"completion": completion}, {}, record.get("tools"))


def read_pair(record: object, where: str) -> Record:
  """Reads a record of a chosen and a rejected completion.

  Raises:
    ValueError: a field is missing or wrong; begins with `where`.
  """
  converted, read = _read_completions(record, where, PAIRS)
  margin = converted.get("margin")
  if margin is None:
    return read
  is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
  if not is_number or not math.isfinite(margin):
    raise ValueError(f'{where}: "margin" is {margin!r}, expected a finite number')
  return read._replace(extra={"margin": float(margin)})


def read_labelled(record: object, where: str) -> Record:
  """Reads a record of one completion and its label, true for a good completion.

  Raises:
    ValueError: a field is missing or wrong; begins with `where`.
  """
  converted, read = _read_completions(record, where, LABELLED)
  value = converted.get("label")
  label = _LABELS.get(str(value).lower())
  if label is None:
    raise ValueError(
      f'{where}: "label" is {value!r}, expected true (a good answer) or false'
    )
  return read._replace(extra={"label": label})


def read_answered(record: Any, where: str) -> Record:
  """Reads a record of fine-tuning that has exactly one completion.

  Raises:
    ValueError: the record is not of fine-tuning, or does not end with an answer.
  """
  record = foreign.convert(record, where, *SFT.forms)
  read = read_sft(record, where)
  if read.form == "messages" and len(record["messages"]) > 1:
    *prompt, last = record["messages"]
    if last["role"] != "assistant":
      raise ValueError(
        f"{where}: the last message has the role {last['role']!r}; expected an answer "
        "of the assistant"
      )
    read = read._replace(prompt=prompt, completions={"completion": [last]})
  elif read.form != "prompt":
    raise ValueError(f"{where}: {ANSWERED.expected}, found {fields.describe(record)}")
  return read._replace(form="answered")


def read_prompt(record: Any, where: str) -> Record:
  """Reads the prompt of a record and ignores everything else.

  Raises:
    ValueError: the record has no prompt; begins with `where`.
  """
  record = foreign.convert(record, where, *PROMPTS.forms)
  form = _only_field(record, ("prompt", "messages"), where, PROMPTS.expected)
  fields.check_tools(record, where)
  prompt = record[form]
  if form == "prompt":
    fields.check_text(record, "prompt", where)
  else:
    fields.check_messages(prompt, f'{where}: "messages"')
    if prompt[-1]["role"] == "assistant":
      prompt = prompt[:-1]
    if not prompt:
      raise ValueError(f"{where}: the only message is an answer; expected a prompt")
  return Record("prompt", prompt, {}, {}, record.get("tools"))


def read_prompt_row(record: Any, where: str) -> Record:
  """Reads a prompt with its columns for reward functions; `extra` has the columns.

  The prompt may be named "prompt" or "prompts". "tools" is a plain column, and so are
  "image" and "images" if the prompt has no placeholder of an image.

  Raises:
    ValueError: the prompt is missing, empty or of the wrong type, a column has a
      reserved name, or the numbers of placeholders and images differ; begins with
      `where`.
  """
  record = foreign.convert(record, where)
  prompts = ("prompt", PROMPT_COLUMN)
  form = _only_field(record, prompts, where, PROMPT_ROWS.expected)
  if image_parts.has_places(record[form]):
    record = image_parts.gathered(record, where)
  if reserved := sorted(record.keys() & _RESERVED_COLUMNS):
    raise ValueError(
      f"{where}: the column {reserved[-1]!r} has a reserved name, which stands for "
      "completions or for the tokens of prompts; rename it"
    )
  fields.check_text(record, form, where)
  if not record[form]:
    raise ValueError(f'{where}: "{form}" is empty; {PROMPT_ROWS.expected}')
  # Null under the other name of the prompt is no column.
  columns = {name: value for name, value in record.items() if name not in prompts}
  return Record("prompt", record[form], {}, columns, None)


def check_same_extra(
  extra: Mapping[str, Any], first: Mapping[str, Any], where: str
) -> None:
  """Refuses a record whose further fields differ from those of the first record.

  A batch has one array, and a reward function one argument, for each field.

  Raises:
    ValueError: only one of the two records has a field; begins with `where`.
  """
  for name in sorted(extra.keys() ^ first.keys()):
    raise ValueError(
      f'{where}: the record has {"a" if name in extra else "no"} "{name}", unlike the '
      "first record; give it to all records, or to none"
    )


def is_empty(completion: Text) -> bool:
  """Returns True if a completion has neither text nor tool calls."""
  if isinstance(completion, str):
    return not completion.strip()
  return all(
    not (message.get("content") or "").strip() and not message.get("tool_calls")
    for message in completion
  )


def _only_field(record: Any, names: Sequence[str], where: str, expected: str) -> str:
  """Returns the only one of `names` that the record has.

  Raises:
    ValueError: the record has none or several of them; begins with `where`.
  """
  fields.check_mapping(record, where, expected)
  present = [name for name in names if record.get(name) is not None]
  if len(present) != 1:
    raise ValueError(f"{where}: found {fields.describe(record)}, {expected}")
  return present[0]


def _read_completions(
  record: Any, where: str, kind: Kind
) -> tuple[Mapping[str, Any], Record]:
  """Returns the converted record, and its prompt and completions without `extra`."""
  record = foreign.convert(record, where, *kind.forms)
  fields.check_mapping(record, where, kind.expected)
  if not all(name in record for name in kind.completions):
    raise ValueError(f"{where}: found {fields.describe(record)}, {kind.expected}")
  fields.check_tools(record, where)
  for name in (*kind.completions, "prompt"):
    if name in record:
      fields.check_text(record, name, where)
  completions = {name: record[name] for name in kind.completions}
  prompt, completions = split(record.get("prompt"), completions, where)
  for name, completion in completions.items():
    if image_parts.sources(completion):
      raise ValueError(
        f'{where}: "{name}" holds an image after the prompt; expected images in the '
        "prompt alone, which is what all completions share. Move it, or drop the record"
      )
  fields.check_one_form(completions, where)
  return record, Record(kind.name, prompt, completions, {}, record.get("tools"))


def split(
  prompt: Text | None, completions: Mapping[str, Any], where: str
) -> tuple[Text, dict[str, Text]]:
  """Returns the prompt, and the completions without it.

  Args:
    prompt: text or messages; None takes the common beginning of the completions.
    completions: name -> checked text or messages. Messages may be whole conversations,
      which repeat the prompt.
    where: place of the record, for error messages.

  Raises:
    ValueError: there is no prompt, or the conversations do not begin with it.
  """
  whole = [name for name, value in completions.items() if _is_conversation(value)]
  names = " and ".join(f'"{name}"' for name in completions)
  if not whole:
    if prompt is None:
      raise ValueError(
        f'{where}: no "prompt", and {names} do not begin with it; expected a "prompt", '
        "or whole conversations as lists of messages"
      )
    return prompt, dict(completions)
  if len(whole) < len(completions):
    raise ValueError(
      f'{where}: "{whole[0]}" is a whole conversation, but {names} are not both; give '
      "the prompt in both, or in none"
    )
  count = _common_messages(list(completions.values()), where)
  first = next(iter(completions.values()))
  if prompt is not None:
    count = _prompt_length(prompt, first[:count], where)
  return first[:count], {name: value[count:] for name, value in completions.items()}


def _is_conversation(completion: Any) -> bool:
  has_messages = isinstance(completion, list) and completion
  return bool(has_messages) and completion[0]["role"] in _FIRST_ROLES


def _common_messages(
  conversations: Sequence[Sequence[Mapping[str, Any]]], where: str
) -> int:
  """Returns the length of the common beginning; each keeps at least its last message.

  Raises:
    ValueError: the first messages differ; begins with `where`.
  """
  limit = min(len(messages) for messages in conversations) - 1
  count = 0
  while count < limit and all(
    messages[count] == conversations[0][count] for messages in conversations
  ):
    count += 1
  if not count:
    raise ValueError(
      f"{where}: the conversations have no common first message; expected the same "
      "prompt in both"
    )
  return count


def _prompt_length(prompt: object, common: list[dict[str, Any]], where: str) -> int:
  """Returns the number of messages of `common` that make up the given prompt."""
  if isinstance(prompt, list):
    if common[: len(prompt)] == prompt:
      return len(prompt)
  elif any(m["role"] == "user" and m["content"] == prompt for m in common):
    return len(common)
  raise ValueError(
    f'{where}: the conversations do not begin with "prompt"; leave "prompt" out, or '
    "give the completions alone"
  )


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
PROMPT_ROWS = Kind(
  name="prompt with columns",
  expected='expected {"prompt": text or [messages], further columns}',
  read=read_prompt_row,
  completions=(),
  noun="prompts",
)
KINDS = {
  kind.name: kind for kind in (SFT, PAIRS, LABELLED, ANSWERED, PROMPTS, PROMPT_ROWS)
}
