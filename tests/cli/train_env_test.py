"""`tunix train --env=...` and tunix.grpo(env=...), from end to end."""

import json
import pathlib
import secrets

import pytest

import tunix
from tests.cli import runs
from tests.rl.env import toy_envs
from tunix.cli import config as config_lib
from tunix.cli.jobs import rl
from tunix.sft.metrics_logger import Mode

SOURCE = '''
from tunix.rl.env.env import StepResult


class Weeks:
  """Asks twice; the reward is the share of answers that are short."""

  def __init__(self, prompt, answer, most=3):
    self._prompt, self._left, self._most = prompt, 2, most

  def initial_observation(self):
    return self._prompt

  def step(self, action):
    self._left -= 1
    return StepResult(
      reward=float(len(action) < self._most) / 2,
      episode_done=not self._left,
      next_observation="Shorter, please.",
    )
'''


@pytest.fixture
def keys(model, tmp_path):
  prompts = [{"prompt": f"Days in {i} weeks?", "answer": str(7 * i)} for i in range(8)]
  (tmp_path / "p.jsonl").write_text("".join(json.dumps(x) + "\n" for x in prompts))
  # A module is loaded once in a process, under its name.
  module = f"weeks_{secrets.token_hex(4)}"
  (tmp_path / f"{module}.py").write_text(SOURCE)
  return {
    "job": "grpo",
    "model__path": model,
    "data__train": tmp_path / "p.jsonl",
    "env": f"{tmp_path}/{module}.py:Weeks(most=4)",
    "episode__max_turns": 2,
    "episode__max_tokens": 48,
    "rollout__max_prompt_length": 40,
    "rollout__max_tokens_to_generate": 4,
    "training__global_batch_size": 4,
    "training__learning_rate": 0.01,
    "algorithm__beta": 0.0,
    "samples__every_n_rollouts": 1,
    "logging__tensorboard": "false",
    "output_dir": tmp_path / "out",
  }


def train(keys, **more):
  return runs.tunix("train", *runs.arguments(**(keys | more)))


def left(folder):
  names = ["logs/metrics.jsonl", "export/model.safetensors"]
  found = [folder / name for name in names] + sorted((folder / "samples").iterdir())
  return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def test_a_run_with_episodes_resumes_to_the_same_bytes(keys, tmp_path, capsys):
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  assert train(keys, output_dir=whole, training__max_steps=2) == 0
  assert "episodes of at most 2 turns and 48 tokens" in capsys.readouterr().out
  for steps in (1, 2):
    every = {"checkpoint__save_every_n_steps": 1}
    assert train(keys, output_dir=parts, training__max_steps=steps, **every) == 0
  assert left(whole) == left(parts)
  lines = (whole / "samples" / "000000.jsonl").read_text().splitlines()
  text = json.loads(lines[0])["completions"][0]["text"]
  assert text.startswith("[user]\nDays in") and "[user]\nShorter, please." in text
  metrics = json.loads((whole / "logs/metrics.jsonl").read_text().splitlines()[0])
  assert metrics["episodes/turns"] == 2


def of_sft(keys, tmp_path):
  """Keys of a job that learns from answers and is evaluated in the environment."""
  kept = ("model__path", "training__global_batch_size", "logging__tensorboard")
  prompts = {"eval__env": keys["env"], "eval__prompts": keys["data__train"]}
  return {
    **{name: keys[name] for name in kept},
    "job": "sft",
    "data__train": runs.write_records(tmp_path / "sft.jsonl", count=8),
    "data__max_length": 96,
    "training__learning_rate": 0.01,
    **prompts,
    "eval__episode": "{max_turns: 2, max_tokens: 48}",
    "eval__max_prompt_length": 40,
    "eval__max_tokens_to_generate": 4,
    "eval__num_generations": 2,
    "training__eval_every_n_steps": 1,
  }


@pytest.mark.long
def test_a_run_on_answers_is_evaluated_in_environments(keys, tmp_path):
  own = of_sft(keys, tmp_path)
  plain = {k: v for k, v in own.items() if "eval" not in k}
  for folder, words in (("watched", own), ("plain", plain)):
    words |= {"output_dir": tmp_path / folder, "training__max_steps": 2}
    assert train(words) == 0
  exports = [tmp_path / f / "export/model.safetensors" for f in ("watched", "plain")]
  assert exports[0].read_bytes() == exports[1].read_bytes()
  text = (tmp_path / "watched/logs/metrics.jsonl").read_text()
  found = [x for x in map(json.loads, text.splitlines()) if x["mode"] == "eval"]
  assert [x["step"] for x in found] == [0, 1, 2]
  assert all(
    {"rewards/score/mean", "pass@2", "episodes/turns"} <= x.keys() for x in found
  )


def test_what_an_evaluation_in_environments_refuses(keys, tmp_path, capsys):
  own = of_sft(keys, tmp_path) | {"output_dir": tmp_path / "out"}
  cases: dict[str, dict] = {
    "eval.prompts is not set": {"eval__prompts": None},
    "eval.env is not set, so no": {"eval__env": None},
    "whose model scores answers": {"job": "reward"},
    "env needs 'answer'": {"eval__prompts": of_words(tmp_path)},
  }
  for message, changes in cases.items():
    words = {k: v for k, v in (own | changes).items() if v is not None}
    assert train(words) != 0
    assert message in capsys.readouterr().err


def of_words(tmp_path):
  (tmp_path / "words.jsonl").write_text('{"prompt": "Days?"}\n')
  return tmp_path / "words.jsonl"


def test_what_is_refused_before_the_run(keys, tmp_path, capsys):
  file = keys["env"].partition(":")[0]
  cases = {
    f"{file}:Days": "has no function 'Days'",
    "Weeks": "expected a function that makes environments",
    f"{file}:Weeks(3)": "with arguments without names",
  }
  for env, message in cases.items():
    assert train(keys, env=env) != 0
    assert message in capsys.readouterr().err
  (tmp_path / "other_env.py").write_text(SOURCE.replace("answer,", "answer, level,"))
  assert train(keys | {"env": f"{tmp_path}/other_env.py:Weeks"}) != 0
  assert "env needs 'level'" in capsys.readouterr().err


def test_an_environment_that_changed_is_not_resumed(keys, tmp_path, capsys):
  assert train(keys, training__max_steps=1) == 0
  capsys.readouterr()
  file = pathlib.Path(keys["env"].partition(":")[0])
  file.write_text(SOURCE + "\n# changed\n")
  assert train(keys, training__max_steps=2) != 0
  assert "env" in capsys.readouterr().err


def test_tasks_of_reasoning_gym_are_the_prompts(keys, capsys):
  pytest.importorskip("reasoning_gym")
  env = "reasoning_gym:chain_sum(size=8, max_terms=2, system=None)"
  assert train(keys, env=env, training__max_steps=1) != 0
  assert "env is 'reasoning_gym:chain_sum(" in capsys.readouterr().err
  del keys["data__train"]
  held_out = {"data__eval": env.replace("size=8", "size=4, seed=1")}
  keys |= {"env": env, "rollout__max_prompt_length": 120, **held_out}
  assert train(keys, training__max_steps=1) == 0
  metrics = (keys["output_dir"] / "logs/metrics.jsonl").read_text()
  assert "env/solved" in metrics
  capsys.readouterr()
  assert train(keys, env=env.replace("8", "9"), training__max_steps=2) != 0
  assert "env" in capsys.readouterr().err


def test_a_plan_has_the_widths_of_episodes(keys):
  config = config_lib.load(runs.arguments(**keys))
  limits = [
    rl.rollout_configs(config, plans=plans)[Mode.TRAIN].max_tokens_to_generate
    for plans in (True, False)
  ]
  assert limits == [48, 4]


def test_the_one_call_form_takes_a_class(model):
  result = tunix.grpo(
    model=str(model),
    data=[{"prompt": f"3 {i}", "number": i} for i in range(4)],
    env=toy_envs.Echo,
    episode={"max_turns": 3, "max_tokens": 24},
    num_generations=2,
    beta=0.0,
    global_batch_size=2,
    rollout={"max_prompt_length": 40, "max_tokens_to_generate": 4},
    max_steps=2,
  )
  assert result.steps == 2
