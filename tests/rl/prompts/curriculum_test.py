"""Chances of prompts by their solve rate, and the batches that they give."""

import json
import random

import numpy as np
import pytest

from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.pipeline import PromptSource
from tunix.rl.prompts.curriculum import Curriculum, CurriculumConfig, key_of


@pytest.mark.parametrize(
  ("rate", "changes", "chance"),
  [
    (None, {}, 1.0),
    (0.5, {}, 1.0),
    (0.25, {}, 0.75),  # 4 * 1/4 * 3/4
    (0.25, {"focus": 2.0}, 0.5625),
    (0.25, {"focus": 0.0}, 1.0),
    (0.9, {}, 0.1),
    (1.0, {"easy_chance": 0.0}, 0.0),
    (0.9, {"easy_from": 0.95}, 0.36),
    (0.1, {}, 0.25),
    (0.0, {"hard_chance": 0.5}, 0.5),
    (0.1, {"hard_to": 0.05}, 0.36),
  ],
)
def test_the_chance_follows_from_the_solve_rate(rate, changes, chance):
  assert CurriculumConfig(**changes).chance(rate) == pytest.approx(chance)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"hard_to": 0.9}, "expected hard_to below easy_from"),
    ({"memory": 1.0}, "never changes"),
    ({"most_batches": 0}, "most_batches is 0"),
    ({"easy_chance": 1.5}, "easy_chance is 1.5"),
  ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    CurriculumConfig(**changes)


def test_a_curriculum_needs_to_know_what_passes():
  with pytest.raises(ValueError, match="set pass_threshold"):
    AlgorithmConfig(curriculum=CurriculumConfig())


@pytest.mark.parametrize(("memory", "rate"), [(0.0, 1.0), (0.5, 0.625), (0.75, 0.4375)])
def test_a_solve_rate_is_an_average_over_groups(memory, rate):
  made = Curriculum(CurriculumConfig(memory=memory), 0.5)
  row = {"prompts": "a"}
  made.note([row], np.array([[1.0, 0.0, 0.4, np.nan, 0.0]]))  # one of four passes
  assert made.rates == {}  # a step that fails leaves nothing
  made.commit(0)
  assert list(made.rates.values()) == [0.25]
  made.note([row], np.array([[1.0, 0.5]]))
  made.note(
    [{"prompts": "b"}], np.array([[np.nan, np.nan]])
  )  # of which nothing is known
  assert made.commit(7) == {
    "curriculum/solve_rate": rate,
    "curriculum/skipped": 7.0,
    **{
      f"curriculum/{p}": float(p == made.config.pool(rate)) for p in ("easy", "middle")
    },
    "curriculum/hard": 0.0,
  }


def batches(size=4, passes=200):
  """Batches of prompts 0 to 11, again and again."""
  numbers = [n % 12 for n in range(12 * passes)]
  groups = [numbers[i : i + size] for i in range(0, len(numbers), size)]
  return [{"prompts": [f"p{n}" for n in g], "number": g} for g in groups]


def source_of(made, saved=None, **options):
  saved = saved or {"place": None, "pending": [], "size": 0}
  return PromptSource(
    batches(**options), saved["place"], saved["pending"], made, saved["size"]
  )


def solved(rows, step):
  """Rewards of 4 completions: prompt n is solved n / 11 of the time."""
  dice = np.random.default_rng(step)
  return np.array([dice.random(4) < row["number"] / 11 for row in rows], np.float64)


def run(steps, config, *, cuts=frozenset(), gives_back=0):
  """Prompts of each step of a run that is saved and restored at some steps."""
  made = Curriculum(config, 1.0)
  source, seen = source_of(made), []
  for step in range(steps):
    batch = source.take()
    if gives_back:
      source.give_back(batch.take(range(gives_back)))
    seen.append(batch.columns["number"])
    made.note(batch.rows(), solved(batch.rows(), step))
    made.commit(source.skipped)
    size, place, pending = source.size, source.commit(), source.pending
    assert source.has_more()  # drawn ahead, which no checkpoint counts
    if step in cuts:
      saved = json.dumps([size, place, pending, made.rates])
      size, place, pending, rates = json.loads(saved)
      made = Curriculum(config, 1.0)
      made.rates = rates
      source = source_of(made, {"place": place, "pending": pending, "size": size})
  return seen


@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_cut_anywhere_draws_the_same_prompts(seed):
  dice = random.Random(seed)
  options = {"seed": seed, "easy_chance": dice.random(), "hard_chance": dice.random()}
  config = CurriculumConfig(**options, focus=dice.choice([0.0, 1.0]))
  back = dice.choice([0, 2])
  whole = run(12, config, gives_back=back)
  cuts = frozenset(dice.sample(range(12), 4))
  assert run(12, config, cuts=cuts, gives_back=back) == whole
  assert all(len(numbers) == 4 for numbers in whole)


def test_prompts_of_the_middle_are_drawn_more_often():
  uniform = CurriculumConfig(easy_chance=1.0, hard_chance=1.0, focus=0.0)
  assert run(6, uniform) == [b["number"] for b in batches()[:6]]
  drawn = np.concatenate(run(60, CurriculumConfig(easy_chance=0.0, hard_chance=0.0)))
  counts = np.bincount(drawn, minlength=12)
  assert counts[[0, 11]].max() == 1  # retired after the first look
  assert counts[4:8].min() > 10
  again = np.concatenate(run(60, CurriculumConfig(easy_chance=0.5, hard_chance=0.5)))
  assert np.bincount(again, minlength=12)[[0, 11]].min() > 1  # visited again
  other = np.concatenate(run(60, CurriculumConfig(seed=1)))
  assert other.tolist() != np.concatenate(run(60, CurriculumConfig())).tolist()


@pytest.mark.parametrize("most", [1, 3])
def test_a_batch_is_filled_after_so_many_batches_of_the_data(most):
  never = {"easy_chance": 0.0, "hard_chance": 0.0, "focus": 8.0}
  made = Curriculum(CurriculumConfig(most_batches=most, **never), 1.0)
  source = source_of(made)
  source.take()
  rows = [row for batch in batches()[:3] for row in PromptSource([batch]).take().rows()]
  made.rates = {key_of(row): 1.0 for row in rows}
  made.rates[key_of(rows[9])] = 0.75  # with the chance 0.1
  source.commit()
  numbers = source.take().columns["number"]
  assert len(numbers) == 4 and source.drawn == 1 + most
  # The one with the highest chance goes first, then those in the order of the data.
  assert numbers == ([4, 5, 6, 7] if most == 1 else [9, 4, 5, 6])
  assert source.skipped == 4 * most - 4


def test_the_end_of_the_data_gives_a_smaller_batch_and_then_none():
  made = Curriculum(CurriculumConfig(easy_chance=0.0), 1.0)
  source = source_of(made, passes=2)
  rows = [row for _ in range(3) for row in source.take().rows()]
  made.note(rows[1:], np.ones((11, 4)))
  made.commit(0)
  assert source.take().columns["number"] == [0]
  assert source.take() is None and not source.has_more()
