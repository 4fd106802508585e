"""`tunix.cli.grpo_main` and its siblings: the jobs as modules."""

import importlib
import subprocess
import sys

import pytest

from tests.cli import runs

JOBS = {
  "peft_main": "sft",
  "dpo_main": "dpo",
  "distill_main": "distill",
  "grpo_main": "grpo",
  "ppo_main": "ppo",
}


@pytest.mark.parametrize("name", JOBS)
def test_help_and_errors_are_of_the_job(name, capsys):
  module = importlib.import_module(f"tunix.cli.{name}")
  assert module.main(["--help"]) == 0
  assert f"Keys of the job {JOBS[name]}:" in capsys.readouterr().out
  assert module.main(["--training.max_steps=1"]) == 2
  assert "output_dir" in capsys.readouterr().err


def test_a_run(model, tmp_path):
  data = runs.write_records(tmp_path / "train.jsonl")
  words = {
    "model.path": model,
    "data.train": data,
    "data.max_length": 64,
    "training.max_steps": 1,
    "training.learning_rate": 0.01,
    "logging.tensorboard": "false",
    "export.kind": "none",
    "output_dir": tmp_path / "out",
  }
  command = [sys.executable, "-m", "tunix.cli.peft_main"]
  command += [f"--{name}={value}" for name, value in words.items()]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0 and "done: 1 step" in done.stdout, done.stderr
