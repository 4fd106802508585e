"""Programs shipped for TPUs are the same, byte for byte, when they are made again.

Needs libtpu (the `tpu` extra), which asks for no TPU: `pytest -m slow
tests/plan/ship_tpu_test.py`.
"""

import os
import subprocess
import sys

import pytest
from jax._src import compilation_cache as cache

from tests.cli import runs

pytest.importorskip("libtpu", reason="pip install 'tunix[tpu]'")

WORDS = (
  "--model.name=qwen3_0p6b",
  # Wide enough for splash attention, whose kernels carry positions in source files.
  "--model.args={num_layers: 2, embed_dim: 256, hidden_dim: 128, num_heads: 2,"
  " num_kv_heads: 2, head_dim: 128, vocab_size: 512}",
  *("--model.dtype=bfloat16", "--data.max_length=1024"),
  *("--training.global_batch_size=4", "--training.max_steps=10"),
)


@pytest.mark.slow
def test_files_are_the_same_when_made_again(tmp_path):
  folders = [tmp_path / "one", tmp_path / "two"]
  for folder in folders:  # each in a process of its own
    command = [sys.executable, "-m", "tunix.cli.main", "plan", *WORDS]
    command += ["--topology", "v5e:2x2", "--ship", str(folder)]
    env = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    subprocess.run(command, check=True, cwd=runs.ROOT, env=env)
  one, two = map(programs, folders)
  assert len(one) == 2 and one == two
  assert any(b"splash" in data for data in one.values())


def programs(folder):
  """{name: executable}, without the seconds of its compilation."""
  return {
    file.name: cache.extract_executable_and_time(
      cache.decompress_executable(file.read_bytes())
    )[0]
    for file in folder.glob("*-cache")
  }
