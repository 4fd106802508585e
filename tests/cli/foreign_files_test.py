"""Files as the documentation of other libraries shows them are taken as they are."""

import csv
import json

import pytest

from tests import toys_text
from tunix.cli import main as cli

SKY = [
  {"role": "user", "content": "What color is the sky?"},
  {"role": "assistant", "content": "It is blue."},
]
WRONG = [{"role": "assistant", "content": "It is green."}]
WEATHER = {
  "type": "function",
  "function": {
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
  },
}
CALL = {"name": "get_weather", "arguments": {"place": "Bonn"}}
TOOLS = [
  {"role": "user", "content": "How is the weather in Bonn?"},
  {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": CALL}],
  },
  {"role": "tool", "tool_call_id": "a", "name": "get_weather", "content": "rain"},
  {"role": "assistant", "content": "It rains in Bonn."},
]
TURNS = [
  {"from": "human", "value": "How is the weather in Bonn?"},
  {"from": "function_call", "value": json.dumps(CALL)},
  {"from": "observation", "value": "rain"},
  {"from": "gpt", "value": "It rains in Bonn."},
]

# Library and what its documentation calls it -> (file, job, a record).
FILES = {
  "TRL, language modeling": ("a.jsonl", "sft", {"text": "The sky is blue."}),
  "TRL, prompt-completion": (
    "a.csv",
    "sft",
    {"prompt": "The sky is", "completion": " blue."},
  ),
  "TRL, conversational prompt-completion": (
    "a.parquet",
    "sft",
    {"prompt": SKY[:1], "completion": SKY[1:]},
  ),
  "TRL, conversational preference": (
    "a.jsonl",
    "dpo",
    {"prompt": SKY[:1], "chosen": SKY[1:], "rejected": WRONG},
  ),
  "TRL, preference with an implicit prompt": (
    "a.jsonl",
    "dpo",
    {"chosen": SKY, "rejected": [SKY[0], *WRONG]},
  ),
  "TRL, unpaired preference": (
    "a.jsonl",
    "kto",
    {"prompt": "The sky is", "completion": " blue.", "label": True},
  ),
  "TRL, prompt-only": (
    "a.jsonl",
    "grpo",
    {"prompt": SKY[:1], "solution": "It is blue."},
  ),
  "OpenAI, messages with tools": (
    "a.jsonl",
    "sft",
    {"messages": TOOLS, "tools": [WEATHER], "parallel_tool_calls": False},
  ),
  "torchtune and Unsloth, ShareGPT": (
    "a.json",
    "sft",
    {"conversations": [TURNS[0], TURNS[3]]},
  ),
  "Stanford Alpaca": (
    "a.json",
    "sft",
    {"instruction": "Add.", "input": "2 and 3", "output": "5", "text": "Below is ..."},
  ),
  "LLaMA-Factory, Alpaca with history": (
    "a.json",
    "sft",
    {
      "instruction": "And of the sea?",
      "input": "",
      "output": "It is blue, too.",
      "system": "Answer in a sentence.",
      "history": [["What color is the sky?", "It is blue."]],
    },
  ),
  "LLaMA-Factory, ShareGPT with tools": (
    "a.json",
    "sft",
    {
      "conversations": TURNS,
      "system": "Use the tools.",
      "tools": json.dumps([WEATHER]),
    },
  ),
  "LLaMA-Factory, Alpaca for KTO": (
    "a.json",
    "kto",
    {"instruction": "Add.", "input": "2 and 3", "output": "5", "kto_tag": True},
  ),
  "LLaMA-Factory, ShareGPT preference": (
    "a.json",
    "dpo",
    {
      "conversations": TURNS[:1],
      "chosen": {"from": "gpt", "value": "It rains."},
      "rejected": {"from": "gpt", "value": "No."},
    },
  ),
  "axolotl, chat_template": ("a.jsonl", "sft", {"messages": [*SKY, *SKY]}),
}
# What a silent loss of a column would leave out.
SAYS = {
  "LLaMA-Factory, Alpaca with history": ("Answer in a sentence.", "It is blue."),
  "LLaMA-Factory, ShareGPT with tools": ("Use the tools.", "The weather of a place."),
  "OpenAI, messages with tools": ("The weather of a place.", "get_weather"),
  "Stanford Alpaca": ("Add.\n", "2 and 3"),
}
GRPO = {"reward.functions": "exact_match(column=solution)"}
GRPO["rollout.max_tokens_to_generate"] = 8


def write(file, record, count=8):
  records = [record] * count
  if "kto_tag" in record or "label" in record:  # KTO wants both
    key = "label" if "label" in record else "kto_tag"
    records = [{**record, key: number % 2 == 0} for number in range(count)]
  if file.suffix == ".jsonl":
    file.write_text("".join(json.dumps(x) + "\n" for x in records))
  elif file.suffix == ".json":
    file.write_text(json.dumps(records, indent=2))
  elif file.suffix == ".csv":
    with file.open("w", newline="") as out:
      writer = csv.DictWriter(out, list(record))
      writer.writeheader()
      writer.writerows(records)
  else:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(records), file)
  return file


@pytest.mark.parametrize("name", FILES)
def test_files_of_others_train_without_a_conversion(name, model, tmp_path, capsys):
  file, job, record = FILES[name]
  keys = {
    "job": job,
    "model.path": model,
    "data.train": write(tmp_path / file, record),
    "output_dir": tmp_path / "out",
    "training.max_steps": 2,
    **(GRPO if job == "grpo" else {}),
  }
  if "tools" in record:  # the model's own template knows no tools
    keys["tokenizer.chat_template"] = tmp_path / "tools.jinja"
    keys["tokenizer.chat_template"].write_text(toys_text.QWEN3)
  words = [f"--{key}={value}" for key, value in keys.items()]
  assert cli.main(["train", "--dry-run", *words]) == 0, capsys.readouterr().err
  said = capsys.readouterr().out
  assert "train data: 8 " in said and "1 dropped" not in said
  for text in SAYS.get(name, ()):
    assert text in said
