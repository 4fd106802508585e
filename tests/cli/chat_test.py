"""`tunix chat`, and prompts and defaults of `tunix generate`; the sampler is a stub."""

import io
import json
import types

import pytest

from tests.cli import runs
from tunix.cli.make import model_folders
from tunix.cli.run import folder as run_folder
from tunix.generate.engine_sampler import EngineSampler


@pytest.fixture
def replies(monkeypatch):
  """What the sampler was asked; its n-th reply is "reply n"."""
  asked = []

  def stream(self, prompts, steps, *, every, **options):
    asked.append((self.tokenizer.decode(prompts[0]), steps, options))
    for text in ("reply", f" {len(asked)}"):
      if options.get("seed") == 9 and text != "reply":
        raise KeyboardInterrupt
      yield types.SimpleNamespace(text=text)

  monkeypatch.setattr(EngineSampler, "stream", stream)
  return asked


def chat(monkeypatch, model, said, *words):
  monkeypatch.setattr("sys.stdin", io.StringIO(said))
  return runs.tunix("chat", "--model", model, *words)


def test_a_conversation_grows_and_is_reset(model, replies, monkeypatch, capsys):
  said = "The sea\n\nis deep\n/reset\nis five\n/exit\nnever asked\n"
  words = ["--system", "Be short.", "--temperature", 0.5, "--max_new_tokens", 7]
  assert chat(monkeypatch, model, said, *words) == 0
  assert capsys.readouterr().out == "reply 1\nreply 2\nreply 3\n"
  first, second, third = (text for text, _, _ in replies)
  assert "The sea" in first and "deep" not in first
  assert "The sea" in second and "reply 1" in second and "is deep" in second
  assert "The sea" not in third and "five" in third
  assert all("Be short." in text for text in (first, second, third))
  assert replies[0][1:] == (7, {"temperature": 0.5})


def test_ctrl_c_ends_the_reply_and_keeps_it(model, replies, monkeypatch, capsys):
  words = ["--temperature", 1.0, "--seed", 9]
  assert chat(monkeypatch, model, "The sea\nis deep\n", *words) == 0
  assert capsys.readouterr().out == "reply\nreply\n"
  assert "reply" in replies[1][0]


def test_a_conversation_beyond_the_positions(model, replies, monkeypatch, capsys):
  assert chat(monkeypatch, model, "sea " * 300 + "\nThe sea\n") == 0
  output = capsys.readouterr()
  assert "/reset" in output.err and output.out == "reply 1\n"


def test_the_default_is_what_fits():
  model = types.SimpleNamespace(config=types.SimpleNamespace(max_position=40))
  assert model_folders.new_tokens(model, [3, 10], None) == 30
  assert model_folders.new_tokens(model, [3], 5) == 5
  assert model_folders.new_tokens(types.SimpleNamespace(), [3], None) == 128


def test_a_run_stands_for_its_export(tmp_path):
  run = tmp_path / "run"
  (run / "export").mkdir(parents=True)
  (run / "config.yaml").write_text("model:\n  path: base\n")
  with pytest.raises(FileNotFoundError, match="has no export: `tunix export --run"):
    run_folder.export_of(str(run), None)
  (run / "export" / "adapter_config.json").touch()
  assert run_folder.export_of(str(run), None) == ("base", str(run / "export"))
  assert run_folder.export_of(str(run), "other") == ("base", "other")
  (run / "export" / "config.json").touch()
  assert run_folder.export_of(str(run), None) == (str(run / "export"), None)
  assert run_folder.export_of("ORG/NAME", None) == ("ORG/NAME", None)


def test_generate_reads_prompts_and_writes_json(model, monkeypatch, tmp_path, capsys):
  def draw(self, prompts, **options):
    rows = [f"{x}!" for x in prompts]
    return types.SimpleNamespace(text=rows, finish_reasons=["eos"] * len(rows))

  monkeypatch.setattr(EngineSampler, "__call__", draw)
  monkeypatch.setattr("sys.stdin", io.StringIO("How\n\nThe sea\n"))
  words = ["generate", "--model", model, "--json", "--prompt_file"]
  assert runs.tunix(*words, "-") == 0
  lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert lines == [
    {"prompt": x, "completion": f"{x}!", "finish_reason": "eos"}
    for x in ("How", "The sea")
  ]
  file = tmp_path / "prompts.jsonl"
  file.write_text('{"prompt": "is five"}\n')
  assert runs.tunix(*words, file) == 0
  assert json.loads(capsys.readouterr().out)["prompt"] == "is five"
  for text, message in (
    ("", "--prompt_file is"),
    ("{", "prompts.jsonl:1 is not JSON"),
    ('{"text": "a"}', 'prompts.jsonl:1 is not {"prompt": "text"}'),
  ):
    file.write_text(text)
    assert runs.tunix(*words, file) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "generate", "stream"])
def test_escape_sequences_of_replies_do_not_reach_a_terminal(
  model, monkeypatch, capsys, command
):
  reply = types.SimpleNamespace(text="a\x1b[2J\n", finish_reasons=["eos"])
  drawn = types.SimpleNamespace(text=["a\x1b[2J\n"], finish_reasons=["eos"])
  monkeypatch.setattr(EngineSampler, "stream", lambda *_, **__: iter([reply]))
  monkeypatch.setattr(EngineSampler, "__call__", lambda *_, **__: drawn)

  def output():
    if command == "chat":
      assert chat(monkeypatch, model, "The sea\n") == 0
    else:
      words = ["generate", "--model", model, "--prompt", "The sea"]
      assert runs.tunix(*words, *["--stream"] * (command == "stream")) == 0
    return capsys.readouterr().out

  assert output() == "a\x1b[2J\n\n"
  monkeypatch.setattr("sys.stdout.isatty", lambda: True)
  assert output() == "a\\x1b[2J\n\n"
