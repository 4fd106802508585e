"""One model folder and one pair of data files for all tests of the command."""

import pytest

from tests.cli import runs


@pytest.fixture(scope="session")
def model(tmp_path_factory):
  return runs.write_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="session")
def train_file(tmp_path_factory):
  return runs.write_records(tmp_path_factory.mktemp("cli") / "train.jsonl", 16)


@pytest.fixture(scope="session")
def eval_file(tmp_path_factory):
  return runs.write_records(tmp_path_factory.mktemp("cli") / "eval.jsonl", 6, start=16)


@pytest.fixture
def settings(model, train_file, tmp_path):
  """Keys of a small, quick run."""
  return {
    "model__path": model,
    "data__train": train_file,
    "data__max_length": 48,
    "training__max_steps": 4,
    "training__global_batch_size": 4,
    "training__learning_rate": "1e-2",
    "logging__tensorboard": "false",
    "output_dir": tmp_path / "out",
  }
