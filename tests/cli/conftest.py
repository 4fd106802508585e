"""One model folder and one pair of data files for all tests of the command."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.cli import runs


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory):
  """Keeps compiled programs: most runs here have the same ones, and compiling is most
  of what they cost. Processes that `runs.spawn` starts share them."""
  folder = str(tmp_path_factory.mktemp("programs"))
  keys = {
    "jax_compilation_cache_dir": folder,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
  }
  before = {key: getattr(jax.config, key) for key in keys}
  for key, value in keys.items():
    jax.config.update(key, value)
  compilation_cache.reset_cache()
  with pytest.MonkeyPatch.context() as patch:
    for key, value in keys.items():
      patch.setenv(key.upper(), str(value))
    yield
  for key, value in before.items():
    jax.config.update(key, value)
  compilation_cache.reset_cache()


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
