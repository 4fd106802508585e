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
from tunix.examples.quickstart import main as quickstart, train as training
from tunix.examples.quickstart.settings import Settings
from tunix.examples.quickstart.task import QuickstartData
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.sft.metrics_logger import MetricsLogger

TINY = {
  "sft_steps": 3,
  "grpo_steps": 2,
  "num_layers": 1,
  "embed_dim": 16,
  "hidden_dim": 32,
  "num_heads": 2,
  "sft_rows": 2,
  "row_length": 24,
  "prompts": 3,
  "generations": 2,
  "held_out": 5,
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
  for name in ("report.md", "sft/report.html", "grpo/export", "model", "data"):
    assert (settings.output / name).exists()
    assert name in printed and name in report
  assert "| sft | 3 |" in report and "| grpo | 2 |" in report
  assert "(grpo/samples/index.html)" in report and settings.samples.exists()


def test_all_folders_hold_models(tiny):
  settings, _ = tiny
  folders = (settings.model, settings.export("sft"), settings.export("grpo"))
  models = [AutoModel.from_pretrained(folder) for folder in folders]
  assert all(model.config == models[0].config for model in models)
  assert models[0].config.num_layers == 1
  # So short a GRPO meets no reward: whether it learns is seen in the slow test.
  leaves = zip(jax.tree.leaves(models[0]), jax.tree.leaves(models[1]))
  assert all((a != b).any() for a, b in leaves)
  config = json.loads((folders[-1] / "config.json").read_text())
  tokenizer = TokenizerAdapter.from_pretrained(folders[-1])
  assert config["eos_token_id"] == tokenizer.eos_id()


def test_both_stages_are_logged_and_printed(tiny):
  settings, printed = tiny
  for stage, steps in (("sft", 3), ("grpo", 2)):
    found = training.read_series(settings.run(stage), training.METRICS[stage])
    assert [step for step, _ in found["train"]] == list(range(1, steps + 1))
    assert [step for step, _ in found["eval"]] == list(range(steps + 1))
    assert f"step {steps}: held-out " in printed
  assert "held-out accuracy 0.000" in printed


def test_every_question_is_answered_twice(tiny):
  settings, _ = tiny
  answers = [json.loads(line) for line in settings.answers.open()]
  assert len(answers) == 5
  assert {"prompt", "response", "answer", "before", "after", "right"} == set(answers[0])


def test_the_printed_commands_repeat_the_trainings(tiny, tmp_path):
  settings, printed = tiny
  for stage in ("sft", "grpo"):
    file, again = settings.config_file(stage), tmp_path / stage
    assert f"$ tunix train --config {file}" in printed
    assert runs.tunix("train", "--config", file, f"--output_dir={again}") == 0
    for name in ("logs/metrics.jsonl", "export/model.safetensors"):
      assert (again / name).read_bytes() == (settings.run(stage) / name).read_bytes()


def test_the_commands_it_prints_run(tiny, capsys):
  settings, printed = tiny
  lines = re.findall(r"^    tunix (.+)$", printed, re.M)
  commands = {words[0]: words for words in map(shlex.split, lines)}
  assert list(commands) == ["generate", "train"]
  assert runs.tunix(*commands["generate"], "--max_new_tokens=3") == 0
  assert runs.tunix(*commands["train"]) == 0
  assert "rloo: 3 prompts x 2 completions" in capsys.readouterr().out
  assert (settings.output / "grpo-rloo" / "export" / "config.json").exists()


@pytest.mark.parametrize(
  ("field", "value", "stage", "line"),
  [
    ("sft_rows", 7, "sft", "global_batch_size: 7"),
    ("row_length", 30, "sft", "max_length: 30"),
    ("sft_rate", 0.5, "sft", "learning_rate: 0.5"),
    ("sft_steps", 77, "sft", "max_steps: 77"),
    ("grpo_rate", 0.5, "grpo", "learning_rate: 0.5"),
    ("grpo_steps", 77, "grpo", "max_steps: 77"),
    ("prompts", 7, "grpo", "global_batch_size: 7"),
    ("generations", 7, "grpo", "num_generations: 7"),
    ("prompt_tokens", 9, "grpo", "max_prompt_length: 9"),
    ("answer_tokens", 9, "grpo", "max_tokens_to_generate: 9"),
    ("seed", 9, "grpo", "seed: 9"),
  ],
)
def test_settings_reach_the_configurations(tmp_path, field, value, stage, line):
  data = QuickstartData(folder=tmp_path, train=[], held_out=[])
  plain = Settings(output=tmp_path)
  changed = dataclasses.replace(plain, **{field: value})
  assert line in training.config_text(changed, data, stage)
  assert line not in training.config_text(plain, data, stage)


def test_the_model_has_the_size_that_is_asked_for(tmp_path):
  settings = Settings(output=tmp_path, **TINY)
  config = training.new_model(settings, 18).config
  assert config.vocab_size == 18
  for name in ("num_layers", "embed_dim", "hidden_dim", "num_heads"):
    assert getattr(config, name) == getattr(settings, name)
  other = training.new_model(dataclasses.replace(settings, seed=1), 18)
  same = jax.tree.leaves(training.new_model(settings, 18))
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
    (["--sft_steps=0"], "sft_steps is 0: it must be a whole number of at least 1"),
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
    error = runs.without_progress(process.stderr.read())
  assert process.returncode == 130
  assert error.count("\n") == 1
  assert "begin anew with --overwrite" in error


@pytest.mark.slow
def test_the_defaults_learn(tmp_path, capsys):
  assert runs.tunix("quickstart", f"--output={tmp_path}") == 0
  answers = [json.loads(x) for x in (tmp_path / "answers.jsonl").open()]
  before, after = (
    sum(answer[when] == answer["response"] for answer in answers) / len(answers)
    for when in ("before", "after")
  )
  assert 0.3 <= before <= 0.75
  assert after >= max(0.85, before + 0.2)
  assert "report.md" in capsys.readouterr().out
