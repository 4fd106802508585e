"""`tunix rollouts` beside `tunix train --rollout.engine=remote`, as two commands."""

import json
import subprocess
import sys
import threading

import pytest

from tests import forks
from tests.cli import runs
from tunix.cli import config as config_lib
from tunix.cli.jobs.rl_settings import RLRun
from tunix.cli.run import tiny
from tunix.utils import env

SOON = 120  # seconds; compilation on a busy machine is the longest part


@pytest.fixture
def keys(model, tmp_path):
  data = tmp_path / "prompts.jsonl"
  rows = [{"prompt": f"{n} weeks?", "answer": str(7 * n)} for n in range(8)]
  data.write_text("".join(json.dumps(row) + "\n" for row in rows))
  (tmp_path / "short.py").write_text(
    "def short(prompts, completions, **columns):\n"
    "  return [1.0 / (1 + len(text)) for text in completions]\n"
  )
  return {
    "job": "grpo",
    "model__path": model,
    "data__train": data,
    "reward__functions": f"{tmp_path}/short.py:short",
    "rollout__max_prompt_length": 40,
    "rollout__max_tokens_to_generate": 4,
    "training__global_batch_size": 4,
    "training__max_steps": 3,
    "training__learning_rate": 0.01,
    "algorithm__beta": 0.0,
    "logging__tensorboard": "false",
    "lora__rank": 2,
    "output_dir": tmp_path / "out",
  }


def trained(keys, name, **more):
  out = keys["output_dir"].with_name(name)
  words = runs.arguments(**(keys | more | {"output_dir": out}))
  assert runs.tunix("train", *words) == 0
  return (out / "export" / "adapter_model.safetensors").read_bytes()


def host(*words):
  """A process of `tunix rollouts`, and its address."""
  process = forks.popen(
    [sys.executable, "-m", "tunix.cli.main", "rollouts", *map(str, words)],
    stdout=subprocess.PIPE,
    text=True,
    env=env.inherited({"TUNIX_API_KEY": "secret", "JAX_PLATFORMS": "cpu"}),
  )
  late = threading.Timer(SOON, process.kill)  # a pipe has no time limit
  late.start()
  assert process.stdout is not None
  line = process.stdout.readline()
  late.cancel()
  assert line.startswith("sampling at http://127.0.0.1:"), line
  return process, line.split()[-1]


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_learns_the_same_with_a_host_that_samples(keys, monkeypatch):
  """The host gets the words of the run, and ends after SIGTERM."""
  here = trained(keys, "here")
  process, url = host("--port=0", *runs.arguments(**keys))
  try:
    monkeypatch.setenv("TUNIX_API_KEY", "secret")
    far = {"rollout__engine": "remote", "rl__rollout_hosts": f"[{url}]"}
    assert trained(keys, "far", **far) == here
    process.terminate()
    assert process.wait(60) == 0
  finally:
    process.kill()


@pytest.mark.parametrize(
  ("more", "part"),
  [
    ({"rollout__engine": "remote"}, "rl.rollout_hosts is [] and rollout.engine"),
    ({"rl__rollout_hosts": "[http://a:1]"}, "to the addresses of its hosts"),
  ],
)
def test_engine_and_hosts_belong_together(keys, more, part):
  with pytest.raises(ValueError) as raised:
    config_lib.load(runs.arguments(**(keys | more)))
  assert part in str(raised.value)


def test_a_tiny_run_leaves_the_hosts_alone(keys):
  """They have the real model, and may be sampling for a run."""
  far = {"rollout__engine": "remote", "rl__rollout_hosts": "[http://a:1]"}
  far["rollout__engine_options"] = "{lost_s: 600}"
  config = tiny.load(runs.arguments(**(keys | far)))
  assert isinstance(config, RLRun) and config.rollout.engine == "vanilla"
  assert not config.rl.rollout_hosts and not config.rollout.engine_options


@pytest.mark.parametrize(
  ("axes", "devices", "expected"),
  [
    ({}, 1, {}),
    ({"tp": 4}, 1, {}),
    ({"tp": 4}, 2, {"tp": 1}),
    ({"tp": 8}, 8, {"tp": 4}),
  ],
)
def test_a_tiny_run_fits_any_number_of_devices(
  keys, axes, devices, expected, monkeypatch
):
  monkeypatch.setattr(tiny.jax, "device_count", lambda: devices)
  monkeypatch.setattr(tiny, "write_model", lambda *_: keys["model__path"])
  own = {"rl__rollout_mesh": json.dumps(axes), "mesh": "{fsdp: -1}"}
  config = tiny.load(runs.arguments(**(keys | own)))
  assert isinstance(config, RLRun) and config.rl.rollout_mesh == expected


@pytest.mark.parametrize(
  ("words", "part"),
  [
    (["--job=sft"], "job is sft, expected grpo or ppo"),
    (["--job=grpo", "--host=0.0.0.0"], "set an API key"),
    (["--job=grpo", "--tp=-1"], "--tp is -1"),
    (["--job=grpo", "--nothing=1"], "nothing"),
    (["--job=grpo"], "model.path is not set"),
  ],
)
def test_wrong_arguments_of_a_host_are_named(words, part, capsys):
  assert runs.tunix("rollouts", "--port=0", *words) == 2
  assert part in capsys.readouterr().err
