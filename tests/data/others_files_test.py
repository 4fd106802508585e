"""Ten files as users of other libraries have them, with their keys and nesting, give
tokens and a mask without a conversion. The texts are ours."""

import csv
import importlib.util
import json

import numpy as np
import pytest

from tests import toys_text
from tunix.data.reading.files import open_file
from tunix.data.records import KINDS
from tunix.data.render import render_record

TOKENIZER = toys_text.chat_tokenizer("qwen3")


def turn(role, text, **more):
  return {"role": role, "content": text, **more}


def said(who, text):
  return {"from": who, "value": text}


ASK = [turn("user", "How many days are in a week?")]
SEVEN, SIX = [turn("assistant", "seven")], [turn("assistant", "six")]
CALL = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
TOOL = {
  "type": "function",
  "function": {
    "name": "add",
    "description": "adds two numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
  },
}

# file, kind, records, what is learned of each completion of the first record
FILES = [
  ("trl_text.csv", "sft", [{"text": "The sea is wide."}], ["sea is wide."]),
  (
    "trl_prompt_completion.jsonl",
    "sft",
    [{"prompt": ASK, "completion": SEVEN}],
    ["seven"],
  ),
  (
    "trl_preference.jsonl",
    "pair",
    [{"prompt": ASK, "chosen": SEVEN, "rejected": SIX}],
    ["seven", "six"],
  ),
  (
    "trl_implicit_prompt.parquet",
    "pair",
    [{"chosen": ASK + SEVEN, "rejected": ASK + SIX}],
    ["seven", "six"],
  ),
  (
    "trl_unpaired.csv",
    "labelled",
    [
      {"prompt": "How many?", "completion": "seven", "label": True},
      {"prompt": "How many?", "completion": "six", "label": False},
    ],
    ["seven"],
  ),
  ("trl_prompt_only.parquet", "prompt", [{"prompt": ASK, "solution": "seven"}], []),
  (
    "llama_factory_alpaca.json",
    "sft",
    [
      {
        "instruction": "Add.",
        "input": "2 and 3",
        "output": "five",
        "system": "Think.",
        "history": [["How many days?", "seven"]],
      }
    ],
    ["seven", "five"],
  ),
  (
    "llama_factory_sharegpt_tools.json",
    "sft",
    [
      {
        "conversations": [
          said("human", "What is the sum?"),
          said("function_call", json.dumps({"name": "add", "arguments": {"a": 1}})),
          said("observation", "3"),
          said("gpt", "three"),
        ],
        "system": "Think.",
        "tools": json.dumps([TOOL]),
      }
    ],
    ["<tool_call>", "three"],
  ),
  (
    "openai_tools.jsonl",
    "sft",
    [
      {
        "messages": [
          turn("user", "What is the sum?"),
          {
            "role": "assistant",
            "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
          },
          turn("tool", "3", tool_call_id="call_1"),
          turn("assistant", "three"),
        ],
        "tools": [TOOL],
        "parallel_tool_calls": False,
      }
    ],
    ["<tool_call>", "three"],
  ),
  (
    "openai_preference.jsonl",
    "pair",
    [
      {
        "input": {"messages": ASK, "tools": [], "parallel_tool_calls": True},
        "preferred_output": SEVEN,
        "non_preferred_output": SIX,
      }
    ],
    ["seven", "six"],
  ),
  (
    "llama_factory_kto.json",
    "labelled",
    [
      {"conversations": [said("human", "Hi"), said("gpt", "seven")], "kto_tag": True},
      {"conversations": [said("human", "Hi"), said("gpt", "six")], "kto_tag": False},
    ],
    ["seven"],
  ),
  (
    "unsloth_conversations.jsonl",
    "sft",
    [{"conversations": ASK + SEVEN, "source": "ours", "score": 5.2}],
    ["seven"],
  ),
]


def write(path, records):
  if path.suffix == ".parquet":
    if importlib.util.find_spec("datasets") is None:
      pytest.skip("parquet needs tunix[data]")
    import datasets

    datasets.Dataset.from_list(records).to_parquet(str(path))
  elif path.suffix == ".csv":
    with path.open("w", newline="") as file:
      writer = csv.DictWriter(file, records[0])
      writer.writeheader()
      writer.writerows(records)
  elif path.suffix == ".json":
    path.write_text(json.dumps(records, indent=2))
  else:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
  ("name", "kind", "records", "learned"), FILES, ids=[file[0] for file in FILES]
)
def test_a_file_is_taken_as_it_is(tmp_path, name, kind, records, learned):
  write(tmp_path / name, records)
  kind = KINDS[kind]
  read = list(open_file(tmp_path / name, kind))
  assert len(read) == len(records)
  rows = [render_record(record, kind, TOKENIZER, where=name) for record in read]
  texts = [
    TOKENIZER.decode(np.asarray(ids)[np.asarray(mask) != 0])
    for ids, mask in zip(rows[0].completions, rows[0].masks)
  ]
  place = 0
  for words in learned:  # all of them, in this order
    place = "\n".join(texts).index(words, place)
  for row in rows:
    assert (len(row.prompt) or kind.name == "sft") and all(map(np.any, row.masks))
  asked = "How", "What", "Think", "Hi", "Add"
  assert not any(word in text for text in texts for word in asked)


def test_labels_of_a_table_are_read(tmp_path):
  [(name, _, records, _)] = [file for file in FILES if file[0] == "trl_unpaired.csv"]
  write(tmp_path / name, records)
  kind = KINDS["labelled"]
  read = [kind.read(record, name) for record in open_file(tmp_path / name, kind)]
  assert [record.extra["label"] for record in read] == [True, False]


def test_a_call_that_is_no_json_is_named():
  record = {"conversations": [said("human", "Hi"), said("function_call", "add(1)")]}
  with pytest.raises(ValueError, match=r'w: "conversations"\[1\] is no JSON'):
    KINDS["sft"].read(record, "w")
  with pytest.raises(ValueError, match=r'w: "history"\[0\] is 3, expected \[question'):
    alpaca = {"instruction": "a", "output": "b", "history": [3]}
    KINDS["sft"].read(alpaca, "w")
  with pytest.raises(ValueError, match='w: "tools" is no JSON'):
    KINDS["sft"].read({"text": "a", "tools": "add"}, "w")
  with pytest.raises(ValueError, match='w: "input" is 3, expected'):
    pair = {"input": 3, "preferred_output": [], "non_preferred_output": []}
    KINDS["pair"].read(pair, "w")
