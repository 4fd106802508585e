"""`tunix data show` of a file of records."""

import json
import os
import shlex

import pytest

from tests.cli import runs
from tunix.cli.commands.parts import data_file

ALPACA = {"instruction": "Add.", "input": "2 3", "output": "Five."}
CHAT = {
  "messages": [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?", "weight": 0},
    {"role": "user", "content": "Who runs?"},
    {"role": "assistant", "content": "The river."},
  ]
}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2}


def write(file, *records):
  file.write_text("".join(json.dumps(record) + "\n" for record in records))
  return file


def shown(capsys, *words):
  assert runs.tunix("data", "show", *words) == 0
  return capsys.readouterr().out


def test_a_file_is_shown_without_a_configuration(tmp_path, capsys):
  file = write(tmp_path / "a.jsonl", ALPACA, CHAT, PAIR, PAIR)
  assert shown(capsys, file, "--rows", 3).splitlines() == [
    f"{file}: JSON lines, 4 records",
    'keys "instruction", "output": the form of Alpaca, for the jobs sft and distill '
    "(grpo and ppo take its prompt)",
    f"--- {file}:1",
    json.dumps(ALPACA),
    *("prompt:", "Add.", "", "2 3", "completion:", "«Five.»"),
    'keys "messages": the form of tunix, for the jobs sft and distill '
    "(grpo and ppo take its prompt)",
    f"--- {file}:2",
    json.dumps(CHAT),
    *("completion:", "[user] Hi", "[assistant] Yes?", "[user] Who runs?"),
    "[assistant] «The river.»",
    'keys "chosen", "rejected": the form of tunix, for the jobs dpo, orpo and reward',
    f"--- {file}:3",
    json.dumps(PAIR),
    *("prompt:", "a", "chosen:", "«b»", "rejected:", "«c»", "margin: 2.0"),
    "... 1 more",
    "--model=FOLDER or --tokenizer=FOLDER shows the tokens of each record",
  ]


def test_with_a_tokenizer_as_tokens(tmp_path, model, capsys):
  file = write(tmp_path / "a.jsonl", CHAT, PAIR)
  text = shown(capsys, file, "--model", model)
  assert text == shown(capsys, file, "--tokenizer", model)
  assert "«The river.<|im_end|>»" in text and "«Yes?" not in text
  assert "completion, " in text and " trained:\n" in text
  assert "rejected, 2 tokens, 2 trained:\n«c<|im_end|>»" in text
  assert "--tokenizer" not in text


def test_formats_and_columns(tmp_path, capsys):
  table = tmp_path / "a.csv"
  table.write_text("question,answer\nq,a\n")
  columns = "--columns={prompt: question, response: answer}"
  text = shown(capsys, table, columns)
  assert text.startswith(f'{table}: CSV, 1 record\nkeys "prompt", "response": ')
  array = tmp_path / "a.json"
  array.write_text(json.dumps([ALPACA]))
  assert shown(capsys, array).startswith(f"{array}: a JSON array, 1 record\n")


def test_half_a_surrogate_pair_is_refused_with_its_line(tmp_path, capsys):
  good, bad = {"prompt": "a", "response": "b"}, {"prompt": "\ud800", "response": "b"}
  file = write(tmp_path / "a.jsonl", good, bad)
  assert runs.tunix("data", "show", file) == 2
  assert f"{file}:2: the text holds \\ud800, half" in capsys.readouterr().err


def test_a_configuration_of_json_is_none_of_records(tmp_path):
  settings, single = tmp_path / "run.json", tmp_path / "one.json"
  settings.write_text('{"job": "sft",\n "model": {"path": "x"}}\n')
  write(single, ALPACA)
  write(tmp_path / "lines", ALPACA, ALPACA)
  (tmp_path / "run.cfg").write_text("job: sft\n")
  names = ("run.json", "one.json", "lines", "run.cfg", "gone.json", "gone", "a.yaml")
  known = [data_file.is_data(str(tmp_path / name)) for name in names]
  assert known == [False, True, True, False, True, False, False]
  assert data_file.is_data("hf:ORG/NAME")


@pytest.mark.parametrize(
  ("words", "says"),
  [
    ("{d}/gone.jsonl", "no such file; give a file of JSON lines"),
    ("{d}/bad.jsonl", "bad.jsonl:1: invalid JSON"),
    ("{d}/odd.jsonl", "odd.jsonl:1: found fields 'question', expected chosen with"),
    ("{d}/odd.jsonl", "--columns="),
    ("{d}/odd.jsonl --columns=question", "--columns is 'question'"),
    ("{d}/odd.jsonl --columns '{{prompt: q}}'", "there is no column 'q'"),
    ("{d}/odd.jsonl --seed=1", "--data.train="),
    ("{d}/odd.jsonl --model=/none", "no tokenizer folder '/none'"),
    ("{d}/odd.jsonl,{d}/a.yaml", "a.yaml is a configuration"),
    ("{d}/deep.json", "deep.json:1: the JSON is nested too deeply"),
    ("{d}/page.html", "page.html is neither a file of records nor a configuration"),
    ("{d}/model.safetensors", "model.safetensors is neither a file of records nor a"),
    ("{d}/pipe", "a pipe or a device; give a YAML file"),
    ("{d}/twice.yaml", "twice.yaml:4: invalid YAML (the key 'path' is set twice)"),
  ],
)
def test_refusals_are_one_line(tmp_path, capsys, words, says):
  write(tmp_path / "odd.jsonl", {"question": "a"})
  (tmp_path / "bad.jsonl").write_text("{\n")
  (tmp_path / "deep.json").write_text('{"text": %s}' % ("[" * 10**4 + "]" * 10**4))
  (tmp_path / "page.html").write_text("<html><body>a: b</body></html>")
  (tmp_path / "model.safetensors").write_bytes(b"\x08\xff")
  (tmp_path / "twice.yaml").write_text("model:\n  path: a\n  dtype: b\n  path: c\n")
  os.mkfifo(tmp_path / "pipe")
  command = shlex.split(words.format(d=tmp_path))
  assert runs.tunix("data", "show", *command) == 2
  error = capsys.readouterr().err
  assert error.startswith("tunix: error: ") and error.count("\n") == 1
  assert says in error


def test_escape_sequences_of_records_do_not_reach_a_terminal(
  tmp_path, capsys, monkeypatch
):
  file = write(tmp_path / "a.jsonl", {"prompt": "\x1b[2J", "response": "\x1b]0;x\x07"})
  assert "\n\x1b[2J\n" in shown(capsys, file)
  monkeypatch.setattr("sys.stdout.isatty", lambda: True)
  text = shown(capsys, file)
  assert "\n\\x1b[2J\n" in text and "\033[32m«\\x1b]0;x\\x07»\033[0m" in text
