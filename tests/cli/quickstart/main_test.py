"""The quickstart from end to end: tiny in this process, and in full as slow tests."""

import contextlib
import dataclasses
import io
import json
import re
import shlex
import signal

import jax
import pytest

from tests.cli import runs
from tunix.cli.quickstart import main as quickstart, train as training
from tunix.cli.quickstart.settings import Settings
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.sft.metrics_logger import MetricsLogger

TINY = {
  "pretrain_steps": 3,
  "finetune_steps": 4,
  "vocab_size": 320,
  "num_layers": 1,
  "embed_dim": 16,
  "hidden_dim": 32,
  "num_heads": 2,
  "num_kv_heads": 1,
  "batch_size": 2,
  "row_length": 160,
  "questions": 3,
  "answer_tokens": 8,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  """Settings and output of a run that is too short to learn anything."""
  settings = Settings(output=tmp_path_factory.mktemp("tiny") / "out", **TINY)
  settings.output.mkdir()
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    quickstart.run(settings)
  return settings, printed.getvalue()


def test_everything_is_written_and_named(tiny):
  settings, printed = tiny
  report = settings.report.read_text()
  for name in ("report.md", "loss.png", "finetune/export", "checkpoint", "data"):
    assert (settings.output / name).exists()
    assert name in printed and name in report
  assert "| pretraining | 3 |" in report and "| fine-tuning | 4 |" in report


def test_both_folders_hold_models_that_differ(tiny):
  settings, _ = tiny
  first, last = (
    AutoModel.from_pretrained(folder)
    for folder in (settings.checkpoint, settings.export)
  )
  assert first.config == last.config
  assert last.config.num_layers == 1
  leaves = zip(jax.tree.leaves(first), jax.tree.leaves(last))
  assert all((a != b).any() for a, b in leaves)
  config = json.loads((settings.export / "config.json").read_text())
  tokenizer = TokenizerAdapter.from_pretrained(settings.export)
  assert config["eos_token_id"] == tokenizer.eos_id()
  assert tokenizer.has_chat_template()


def test_losses_of_both_stages_are_logged(tiny):
  settings, printed = tiny
  for folder, steps in ((settings.pretrain, 3), (settings.finetune, 4)):
    losses = training.read_losses(folder)
    assert [step for step, _ in losses["train"]] == list(range(1, steps + 1))
    assert [step for step, _ in losses["eval"]] == list(range(steps + 1))
    assert f"step {steps}: held-out loss {losses['eval'][-1][1]:.3f}" in printed


def test_every_question_is_answered_twice(tiny):
  settings, _ = tiny
  answers = [json.loads(line) for line in settings.generations.open()]
  assert len(answers) == 3
  assert {"signature", "before", "after", "check"} == set(answers[0])


def test_the_printed_command_repeats_the_fine_tuning(tiny, tmp_path):
  settings, printed = tiny
  assert f"$ tunix train --config {settings.config_file}" in printed
  again = tmp_path / "again"
  argv = ["--config", str(settings.config_file), f"--output_dir={again}"]
  assert runs.tunix("train", *argv) == 0
  for name in ("logs/metrics.jsonl", "export/model.safetensors"):
    assert (again / name).read_bytes() == (settings.finetune / name).read_bytes()


def test_the_commands_it_prints_run(tiny, capsys):
  settings, printed = tiny
  lines = re.findall(r"^    tunix (.+)$", printed, re.M)
  commands = {words[0]: words for words in map(shlex.split, lines)}
  assert list(commands) == ["generate", "data", "train"]
  assert runs.tunix(*commands["generate"], "--max_new_tokens=3") == 0
  assert runs.tunix(*commands["data"]) == 0
  assert "«Name: " in capsys.readouterr().out
  assert runs.tunix(*commands["train"]) == 0
  assert "LoRA on" in capsys.readouterr().out
  adapter = settings.output / "finetune-lora" / "export" / "adapter_config.json"
  assert json.loads(adapter.read_text())["r"] == 16


def test_the_model_has_the_size_that_is_asked_for(tmp_path):
  settings = Settings(output=tmp_path, **TINY)
  config = training.new_model(settings).config
  for name in ("vocab_size", "num_layers", "embed_dim", "hidden_dim", "num_kv_heads"):
    assert getattr(config, name) == getattr(settings, name)
  other = training.new_model(dataclasses.replace(settings, seed=1))
  same = jax.tree.leaves(training.new_model(settings))
  assert any((a != b).any() for a, b in zip(same, jax.tree.leaves(other)))


def test_evaluations_are_printed_only_inside(capsys):
  logger = MetricsLogger()
  with training.progress_lines():
    logger.log("", "loss", 1.5, "eval", 7)
    logger.log("", "loss", 2.5, "train", 7)
  logger.log("", "loss", 3.5, "eval", 8)
  assert capsys.readouterr().out == "  step 7: held-out loss 1.500\n"


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--pretrain_steps=0"], "pretrain_steps is 0: it must be at least 1"),
    (["--steps=5"], "unrecognized arguments: --steps=5; see tunix quickstart --help"),
    ([], "holds 'mine', which is not of a quickstart"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, arguments, message):
  (tmp_path / "mine").write_text("")
  assert runs.tunix("quickstart", f"--output={tmp_path}", *arguments) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1
  assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
@pytest.mark.ci
def test_ctrl_c_is_one_line(tmp_path):
  with runs.spawn("quickstart", f"--output={tmp_path}") as process:
    for line in process.stdout:
      if "step 0:" in line:
        break
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    error = process.stderr.read()
  assert process.returncode == 130
  assert error.count("\n") == 1
  assert "begin anew with --overwrite" in error


@pytest.mark.slow
def test_the_defaults_learn(tmp_path, capsys):
  assert runs.tunix("quickstart", f"--output={tmp_path}") == 0
  losses = training.read_losses(tmp_path / "finetune")["eval"]
  assert losses[-1][1] < 0.65 * losses[0][1]
  answers = [json.loads(x) for x in (tmp_path / "generations.jsonl").open()]
  right = sum(answer["check"]["format"] for answer in answers)
  assert right >= 0.85 * len(answers)
  assert "report.md" in capsys.readouterr().out
