"""The loops of tinker-cookbook, unmodified, against our server.

`TUNIX_COOKBOOK_PYTHON` names the interpreter of an environment with
`tinker-cookbook[math-rl]`; this interpreter is the default.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.tinker.serving import KEY, server

PYTHON = os.environ.get("TUNIX_COOKBOOK_PYTHON", sys.executable)
LOOPS = pathlib.Path(__file__).with_name("cookbook_loops.py")
MODEL = "Qwen/Qwen3-8B-Base"  # the cookbook has a table of names


@pytest.fixture(scope="module")
def url(tmp_path_factory):
  found = subprocess.run(
    [PYTHON, "-c", "import importlib.util as i; assert i.find_spec('tinker_cookbook')"],
    capture_output=True,
  )
  if found.returncode:
    pytest.skip("tinker-cookbook is not installed; TUNIX_COOKBOOK_PYTHON names another")
  root = tmp_path_factory.mktemp("tinker")
  with server(root, name=MODEL, max_tokens=4096, lora_alpha=8.0) as (url, _):
    yield url


def run(name, url, log, steps, *loss):
  """Runs a loop; returns the metrics of its steps, and its checkpoints."""
  done = subprocess.run(
    [PYTHON, LOOPS, name, MODEL, url, log, str(steps), *loss],
    env={
      **os.environ,
      "TINKER_API_KEY": KEY,
      "TINKER_BASE_URL": url,  # of the grader, whose address is no option
      "PYTHONPATH": "",
    },
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  read = lambda file: [json.loads(x) for x in (log / file).read_text().splitlines()]
  return read("metrics.jsonl"), read("checkpoints.jsonl")


def test_the_supervised_loop(url, tmp_path):
  metrics, checkpoints = run("sl_loop", url, tmp_path, 5)
  losses = [x["train_mean_nll"] for x in metrics]
  assert len(losses) == 5 and losses[-1] < losses[0] - 0.5, losses
  assert [x["name"] for x in checkpoints] == ["000002", "000004", "final"]
  assert checkpoints[-1]["sampler_path"].startswith("tinker://")
  # A loop that is started again goes on from its last checkpoint.
  (tmp_path / "checkpoints.jsonl").write_text(json.dumps(checkpoints[0]) + "\n")
  again = run("sl_loop", url, tmp_path, 3)[0][5:]
  assert [x["train_mean_nll"] for x in again] == losses[2:3]


@pytest.mark.parametrize("loss", ["importance_sampling", "gspo"])
def test_the_loop_of_reinforcement_learning(url, tmp_path, loss):
  metrics, checkpoints = run("rl_loop", url, tmp_path, 8, loss)
  rewards = [x["reward/total"] for x in metrics]
  assert np.mean(rewards[-2:]) > np.mean(rewards[:2]), rewards
  assert all(x["grad_norm"] > 0 for x in metrics)
  assert checkpoints[-1]["name"] == "final"


def test_the_recipe_with_a_rubric(url, tmp_path):
  metrics, checkpoints = run("rubric", url, tmp_path, 2, "cispo")
  norms = [x["grad_norm"] for x in metrics if "grad_norm" in x]
  assert len(norms) == 2 and max(norms) > 0, metrics
  assert [x["name"] for x in checkpoints] == ["000002", "final"]
