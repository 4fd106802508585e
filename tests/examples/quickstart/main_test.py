"""The quickstart from end to end: a few steps, and in full as slow tests."""

import contextlib
import io
import re
import shlex
import signal

import pytest

from tests.cli import runs
from tunix.examples.quickstart import main as quickstart
from tunix.models.automodel import AutoModel
from tunix.report import series


@pytest.fixture(scope="module")
def short(tmp_path_factory):
  """The folder of a quickstart that is too short to learn anything, and its output."""
  folder = tmp_path_factory.mktemp("short") / "out"
  words = ["quickstart", f"--output={folder}", "--sft_steps=3", "--grpo_steps=2"]
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    assert runs.tunix(*words) == 0
  return folder, printed.getvalue()


def test_everything_is_written_and_named(short):
  folder, output = short
  report = (folder / "report.md").read_text()
  for name in (
    *("report.html", "sft/report.html", "grpo/report.html"),
    "grpo/samples/index.html",
  ):
    assert (folder / name).is_file() and name in report
  assert report.partition("\n\n")[2] in output
  assert "accuracy on held-out sums before GRPO: 0.0%" in report
  assert {path.name for path in folder.iterdir()} <= set(quickstart._NAMES)


def test_each_step_writes_a_model(short):
  folder, _ = short
  for name in ("model", "sft/export", "grpo/export"):
    assert AutoModel.from_pretrained(folder / name).config.num_layers == 2


def test_both_runs_are_evaluated_from_step_0(short):
  folder, _ = short
  for job, metric, steps in (("sft", "loss", 3), ("grpo", "pass@1", 2)):
    points = series.read(folder / job).by_name[metric]["eval"].points()
    assert [point.step for point in points] == list(range(steps + 1))


def commands(output):
  """The commands that a quickstart prints, as lists of words."""
  joined = output.replace("\\\n", " ")
  lines = re.findall(r"^(?:\$|   ) tunix (.+)$", joined, re.M)
  return [shlex.split(line) for line in lines]


def test_the_printed_commands_repeat_the_trainings(short, tmp_path):
  folder, output = short
  steps = commands(output)[:5]
  assert [words[0] for words in steps] == ["init", "train", "init", "train", "report"]
  for job, init in zip(("sft", "grpo"), (steps[0], steps[2])):
    again = [word for word in init if not word.startswith(("--output", "--output_dir"))]
    file = tmp_path / f"{job}.yaml"
    run = tmp_path / job
    assert runs.tunix(*again, f"--output={file}", f"--output_dir={run}") == 0
    assert runs.tunix("train", "--config", file) == 0
    for name in ("logs/metrics.jsonl", "export/model.safetensors"):
      assert (run / name).read_bytes() == (folder / job / name).read_bytes()


def test_the_commands_to_go_on_with_run(short, capsys):
  folder, output = short
  generate, train = commands(output)[5:]
  assert runs.tunix(*generate, "--max_new_tokens=3") == 0
  assert runs.tunix(*train) == 0
  assert "rloo: 16 prompts x 8 completions" in capsys.readouterr().out
  assert (folder / "grpo-rloo" / "export" / "config.json").exists()


@pytest.mark.parametrize(
  "argument, key",
  [
    ("--sft_steps=0", "--sft_steps is 0"),
    ("--grpo_steps=-1", "--grpo_steps is -1"),
    ("--seed=-1", "--seed is -1"),
    ("--steps=5", "--steps=5"),
    ("--overwrite", "'mine'"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, argument, key):
  (tmp_path / "mine").write_text("")
  assert runs.tunix("quickstart", f"--output={tmp_path}", argument) == 2
  error = capsys.readouterr().err
  assert key in error and error.count("\n") == 1
  assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_new_folder_is_made(tmp_path):
  quickstart.prepare_output(tmp_path / "a" / "b", overwrite=False)
  assert (tmp_path / "a" / "b").is_dir()
  quickstart.prepare_output(tmp_path / "a" / "b", overwrite=False)


def old_quickstart(folder):
  (folder / "sft").mkdir()
  (folder / "sft" / "x").write_text("old")
  (folder / "report.md").write_text("old")


def test_a_quickstart_is_only_replaced_with_overwrite(tmp_path):
  old_quickstart(tmp_path)
  with pytest.raises(ValueError, match="--overwrite"):
    quickstart.prepare_output(tmp_path, overwrite=False)
  assert (tmp_path / "sft" / "x").read_text() == "old"
  quickstart.prepare_output(tmp_path, overwrite=True)
  assert not list(tmp_path.iterdir())


def test_other_files_are_never_deleted(tmp_path):
  old_quickstart(tmp_path)
  (tmp_path / "thesis.tex").write_text("mine")
  with pytest.raises(ValueError, match=r"thesis\.tex"):
    quickstart.prepare_output(tmp_path, overwrite=True)
  assert (tmp_path / "report.md").exists()


def test_a_file_is_refused(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(NotADirectoryError, match="--output"):
    quickstart.prepare_output(tmp_path / "file", overwrite=True)


@pytest.mark.slow
@pytest.mark.ci
def test_ctrl_c_is_one_line(tmp_path):
  with runs.spawn("quickstart", f"--output={tmp_path}") as process:
    for line in process.stdout:
      if "written to" in line:
        break
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    error = runs.without_progress(process.stderr.read())
  assert process.returncode == 130
  # Before the training begins, Ctrl-C acts at once, and nothing has to be answered.
  *answer, last = error.splitlines()
  assert [line[:34] for line in answer] in ([], ["tunix: stopping after this step; p"])
  assert "--overwrite" in last


@pytest.mark.slow
def test_the_defaults_learn(tmp_path, capsys):
  assert runs.tunix("quickstart", f"--output={tmp_path}") == 0
  curve = series.read(tmp_path / "grpo").by_name["pass@1"]["eval"]
  before, after = curve.first.value, curve.last.value
  assert 0.3 <= before <= 0.75
  assert after >= max(0.85, before + 0.2)
  assert f"after GRPO: {after:.1%}" in capsys.readouterr().out
