"""Tasks of reasoning-gym as data and as environments."""

import pickle
import sys

import pytest

from tunix.cli.make import data_sources, environments
from tunix.cli.settings import data as data_settings
from tunix.data.records import PROMPT_ROWS
from tunix.rl.env import making
from tunix.rl.env.adapters import reasoning_gym
from tunix.rl.env.env import Action, EnvError

SUM = "reasoning_gym:chain_sum(size=6, max_terms=2, max_digits=1{})"

# CI has the library after the quick tests.
pytestmark = pytest.mark.long


def opened(text):
  return data_sources.open_records(text, PROMPT_ROWS)


@pytest.fixture
def library():
  return pytest.importorskip("reasoning_gym")


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  with pytest.raises(ImportError, match=r"pip install tunix\[reasoning-gym\]"):
    opened(SUM.format(""))


def test_tasks_depend_on_their_arguments_only(library):
  first, again, other = map(opened, [SUM.format("")] * 2 + [SUM.format(", seed=1")])
  assert list(first) == list(again) and first.fingerprint == again.fingerprint
  # The library's task i of the seed s is its task 0 of the seed s + i.
  questions = {record["prompt"][1]["content"] for record in first}
  assert not questions & {record["prompt"][1]["content"] for record in other}


def test_a_task_is_scored_by_the_library(library):
  make = environments.make_env(SUM.format(""))
  env = pickle.loads(pickle.dumps(making.one(make, dict(opened(SUM.format(""))[3]))))
  tasks = reasoning_gym.Tasks("chain_sum", size=6, max_terms=2, max_digits=1)
  entry = tasks.entry(3)
  system, user = env.initial_observation()
  assert "<answer>" in system["content"] and user["content"] == entry["question"]
  answer = entry["answer"]
  for text, score in (
    (f"<think><answer>5</answer></think>So <answer> {answer}.0 </answer>", 1.0),
    (f"<think>It is {answer} <answer>{answer}</answer>", 0.0),  # not closed
    (f"{answer}", 0.0),  # no tags
    ("<answer>no</answer>", 0.0),
  ):
    result = env.step(Action(text=text))
    assert result.episode_done and result.reward == score
    assert result.metrics == {"solved": float(score == 1)}


def test_without_a_message_of_the_system_the_whole_answer_is_scored(library):
  tasks = reasoning_gym.Tasks("prime_factorization", size=2, system=None)
  assert tasks[0]["prompt"] == tasks.entry(0)["question"]
  assert tasks.score(0, f" {tasks.entry(0)['answer']}\n") == 1.0
  assert tasks.score(0, "none") == 0.0  # the library's scorer raises ValueError


def test_levels_come_in_their_order(library):
  tasks = reasoning_gym.Tasks("chain_sum", size=6, levels=[0, 2, 1])
  bounds = [tasks.entry(i)["metadata"]["difficulty"]["num_terms"][1] for i in range(6)]
  assert bounds == [2, 2, 4, 4, 3, 3]


def test_a_task_that_is_not_the_one_of_the_prompt_fails(library):
  record = opened(SUM.format(""))[0]
  env = reasoning_gym.TaskEnv(**record | {"task_index": 1})
  with pytest.raises(EnvError, match="is not that of the prompt"):
    env.step(Action(text="1"))


@pytest.mark.parametrize(
  ("call", "message"),
  [
    ("chain_summ", "no data set 'chain_summ'; it has chain_sum"),
    ("chain_sum(max_term=3)", "no setting 'max_term'; it has min_terms, max_terms"),
    ("chain_sum(max_terms=1)", "refuses a setting: max_terms must be >= min_terms"),
    ("chain_sum(size=0)", "size is 0; expected a whole number from 1"),
    ("chain_sum(size=1, levels=[0, 1])", "size is 1; expected a whole number from 2"),
    ("chain_sum(seed=-1)", "seed is -1; expected a whole number below"),
    ("chain_sum(levels=[99])", "levels has 99; chain_sum has the levels 0 to 10"),
    ("chain_sum(levels=2, max_terms=3)", "max_terms is set, and levels of chain_sum"),
    ("acre(levels=0)", "acre of reasoning-gym has no levels"),
  ],
)
def test_wrong_calls_are_refused(library, call, message):
  with pytest.raises(ValueError, match=message):
    opened(f"reasoning_gym:{call}")


def test_the_key_env_names_the_prompts():
  source = environments.tasks(SUM.format(""))
  settings = data_settings.DataSettings(eval=SUM.format(", seed=1"))
  assert [part[:2] for part in settings.sources(source)] == [
    ("train", SUM.format("")),
    ("eval", SUM.format(", seed=1")),
  ]
  assert environments.tasks("weeks.py:Weeks") is None
  assert environments.make_env("reasoning_gym") is reasoning_gym.TaskEnv
