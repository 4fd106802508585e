"""The examples of RL, in a small size, as their readers run them."""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

from tests import forks
from tests.examples import loading
from tests.rl.reward import judge_server
from tunix import Mode

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def rl_loop():
  spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLES / "rl_loop.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize(
  ("prompt", "completion", "expected"),
  [("73=", "37", 1.0), ("73=", "33", 0.5), ("73=", "3", 0.0), ("73=", "", 0.0)],
)
def test_the_reward_is_the_share_of_right_places(rl_loop, prompt, completion, expected):
  assert rl_loop.reward(prompt, completion) == expected


@pytest.mark.slow
@pytest.mark.ci
def test_the_old_log_probs_are_those_of_the_policy(rl_loop):
  """What the sampler reports and what the update computes are one number."""
  model = rl_loop.new_model(0)
  sampler = rl_loop.Sampler(model, rl_loop.Characters())
  _, rows = rl_loop.rollout(sampler, ["73=", "09="], 0)
  scored = np.asarray(rl_loop.log_probs(model, rows))
  mask = rows["completion_mask"]
  assert mask.any()
  assert np.allclose(scored[mask], rows["old_logps"][mask], atol=1e-4)


@pytest.mark.slow
@pytest.mark.ci
def test_the_loop_learns(rl_loop):
  """0.68 at step 40 with these settings; random answers get 0.01."""
  curve = rl_loop.train(45, log=lambda _: None)
  assert np.mean(curve[:5]) < 0.1
  assert np.mean(curve[-5:]) > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_learners_examples_run_and_resume(name, tmp_path):
  command = [sys.executable, EXAMPLES / f"{name}.py", "--output", tmp_path]
  for steps in (2, 4):
    done = forks.run(
      [*command, "--steps", str(steps)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "greedy accuracy 0.00" in done.stdout
  assert (tmp_path / "samples" / "index.html").exists()


@pytest.mark.parametrize("name", ["rl_loop", "grpo", "ppo"])
def test_examples_stay_short(name):
  limit = {"rl_loop": 220}.get(name, 120)
  assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= limit


def agents_scores(steps, folder):
  """Trains the agent; returns the share of episodes that find the digit, by step."""
  spec = importlib.util.spec_from_file_location("agent", EXAMPLES / "agent.py")
  agent = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(agent)
  learner = agent.new_learner(steps, folder)
  learner.train(agent.batches(steps, seed=0))
  logger = learner.rl_cluster.logger
  found = logger.get_metric_history("", "rewards/score/mean", Mode.TRAIN)
  learner.close()
  return found


@pytest.mark.slow
def test_the_agent_learns_to_ask(tmp_path):
  """0.42 at step 55; 0.17 of the episodes find the digit with random weights.

  CI has rl/env/learning_test.py, whose model learns to ask in a quarter of the time.
  """
  found = agents_scores(60, tmp_path)
  assert np.mean(found[:5]) < 0.3 and np.mean(found[-10:]) > 0.36


def test_the_agent_runs_and_shows_its_conversations(tmp_path):
  assert len(agents_scores(2, tmp_path)) == 2
  lines = (tmp_path / "samples" / "000000.jsonl").read_text().splitlines()
  assert json.loads(lines[0])["completions"][0]["text"].startswith("[user]\n?")


@pytest.mark.slow
def test_a_judge_is_trained_served_and_asked(tmp_path):
  command = [sys.executable, EXAMPLES / "judge.py", "--output", tmp_path]
  done = forks.run(
    [*command, "--steps", "2", "--judge_steps", "60"],
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr
  assert "greedy accuracy" in done.stdout
  (kept,) = (tmp_path / "answers").iterdir()
  assert b"Verdict: " in kept.read_bytes()


@pytest.mark.slow
@pytest.mark.ci
def test_the_example_of_a_judge_asks_any_server(tmp_path, monkeypatch):
  """And the questions that its judge is trained on are those that it is asked."""
  example = loading.example("judge")

  def verdict(question, _):
    has_nine = "9" in judge_server.material(question)[0]
    return f"Verdict: {'yes' if has_nine else 'no'}"

  with judge_server.serving(verdict) as server:
    words = ["--output", tmp_path, "--steps", "1", "--url", server.url]
    monkeypatch.setattr(sys, "argv", ["judge.py", *map(str, words)])
    example.main()
  assert (tmp_path / "samples" / "index.html").exists()
  (question, answer), *_ = (row["messages"] for row in example.conversations(1, 0))
  asked, taught = server.questions[0], question["content"]
  hidden = lambda text: [x for x in text.splitlines() if not x.startswith("> ")]
  assert hidden(asked) == hidden(taught)
  assert answer["content"] == verdict(taught, 0)
