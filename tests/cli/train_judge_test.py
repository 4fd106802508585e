"""`tunix train` with a judge behind a server: what it asks, keeps, logs and hides."""

import json
import shutil

import pytest

from tests.cli import runs
from tests.rl.reward.judge_server import material, serving

KEY = "sk-NobodyMaySeeThisKey0000"


@pytest.fixture
def keys(model, tmp_path, monkeypatch):
  monkeypatch.setenv("JUDGE_KEY", KEY)
  lines = [{"prompt": f"How many days are in {i} weeks?"} for i in range(9)]
  data = tmp_path / "prompts.jsonl"
  data.write_text("".join(json.dumps(x) + "\n" for x in lines))
  (tmp_path / "short.txt").write_text("{prompt}\nIs it short?\n{completion}")
  call = f"judge('{tmp_path}/short.txt', model='m', key_variable='JUDGE_KEY')"
  return {
    "job": "grpo",
    "model__path": model,
    "data__train": data,
    "reward__functions": f'["{call}"]',
    "rollout__max_prompt_length": 40,
    "rollout__max_tokens_to_generate": 4,
    "training__global_batch_size": 4,
    "training__max_steps": 4,
    "training__learning_rate": 0.01,
    "algorithm__num_generations": 2,
    "checkpoint__every_n_steps": 2,
    "logging__tensorboard": "false",
    "output_dir": tmp_path / "out",
  }


def short(question, _=0):
  return f"Verdict: {max(1, 10 - len(material(question)[-1]))}"


def prompt_tokens(out):
  """What the judge was paid for in each step."""
  lines = (out / "logs" / "timings.jsonl").read_text().splitlines()
  return [json.loads(line)["perf/judge_prompt_tokens"] for line in lines]


def test_a_resumed_run_asks_its_judge_nothing_again(keys, tmp_path, monkeypatch, capfd):
  """The step after the last checkpoint is repeated with the answers that were kept."""
  out = tmp_path / "out"
  with serving(short) as server:
    monkeypatch.setenv("TUNIX_JUDGE_URL", server.url)
    assert runs.tunix("train", *runs.arguments(**keys)) == 0
    asked = len(server.questions)
    assert asked == len(set(server.questions)) > 0
    before = (out / "logs" / "metrics.jsonl").read_bytes()
    assert sum(prompt_tokens(out)) == 7 * asked
    shutil.rmtree(out / "checkpoints" / "4")
    (out / "result.json").unlink()
    server.rule = lambda *_: "Verdict: 1"
  with serving(server.rule) as moved:  # to another address
    monkeypatch.setenv("TUNIX_JUDGE_URL", moved.url)
    assert runs.tunix("train", *runs.arguments(**keys)) == 0
    assert not moved.questions
    (tmp_path / "short.txt").write_text("{completion}")
    assert runs.tunix("train", *runs.arguments(**keys, seed=1)) != 0
  assert (out / "logs" / "metrics.jsonl").read_bytes() == before
  assert "the content of reward.functions has changed" in capfd.readouterr().err
  steps = runs.metrics(out)
  assert all("rewards/short" in step for step in steps.values())
  assert prompt_tokens(out)[2:] == [0, 0]
  files = [file for file in out.rglob("*") if file.is_file()]
  assert any(file.suffix == ".answers" for file in files)
  assert not any(KEY.encode() in file.read_bytes() for file in files)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    ("judge('{}/short.txt')", "a judge has no model; expected one of model"),
    ("judge('{}/other.txt', model='m', url='http://h')", "no such file; give a text"),
    ("judge('{}/short.txt', folder='/none')", "/none"),
    ("judge('{}/short.txt', model='m', ur='x')", "unexpected keyword argument 'ur'"),
    ("judge('{}/short.txt', model='m')", "variable TUNIX_JUDGE_URL neither"),
    ("pair_judge('{}/short.txt', model='m', url='http://h')", "short.txt has no {fir"),
    ("rubric(model='m', url='http://h')", "criteria and column are []; expected one"),
    ("judg('a.txt')", "judge"),
  ],
)
def test_a_wrong_judge_is_refused_before_the_run(keys, tmp_path, call, message, capfd):
  call = call.replace("{}", str(tmp_path))
  keys = runs.arguments(**keys | {"reward__functions": f'["{call}"]'})
  assert runs.tunix("train", *keys, "--dry-run") == 2
  assert message in capfd.readouterr().err
