import asyncio
import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl import reward_faults
from tunix.rl.reward import outcomes as reward_outcomes
from tunix.rl.reward.outcomes import Failed, Value


@pytest.mark.parametrize(
  "result",
  [
    [1, 2.5, True],
    (1, 2.5, 1),
    np.array([1, 2.5, 1]),
    jnp.array([1, 2.5, 1]),
    [np.float32(1), jnp.float32(2.5), np.array(1)],
  ],
)
def test_numbers_of_every_kind_are_values(result):
  expected = [Value(1.0), Value(2.5), Value(1.0)]
  assert reward_outcomes.outcomes_of(result, 3) == expected


def test_one_number_will_do_for_one_row_only():
  assert reward_outcomes.outcomes_of(0.5, 1) == [Value(0.5)]
  assert reward_outcomes.outcomes_of(np.float64(0.5), 1) == [Value(0.5)]
  told = "returned 0.5, not a list of 2 numbers"
  assert reward_outcomes.outcomes_of(0.5, 2) == [Failed(told)] * 2


@pytest.mark.parametrize(
  ("result", "message"),
  [
    (None, "returned None, not a list of 2 numbers"),
    ([1.0], "returned 1 rewards for 2 rows"),
    ([1.0] * 3, "returned 3 rewards for 2 rows"),
    ("ab", "returned a str, not a list of 2 numbers"),
    ({"a": 1, "b": 2}, "returned a dict, not a list of 2 numbers"),
  ],
)
def test_a_wrong_answer_is_a_failure_of_all_rows(result, message):
  assert reward_outcomes.outcomes_of(result, 2) == [Failed(message)] * 2


RANGE = "; expected a number from -1e+15 to 1e+15"


@pytest.mark.parametrize(
  ("x", "message"),
  [
    (None, "returned None as the row's reward, not a number"),
    (float("nan"), f"returned nan{RANGE}"),
    (float("-inf"), f"returned -inf{RANGE}"),
    (10**400, f"returned inf{RANGE}"),
    (math.exp(100), f"returned 3e+43{RANGE}"),
    (-2e15, f"returned -2e+15{RANGE}"),
    ("1", "returned a str as the row's reward, not a number"),
    (1j, "returned a complex as the row's reward, not a number"),
    (np.ones(2), "returned a list as the row's reward, not a number"),
  ],
)
def test_a_row_that_is_no_number_fails_alone(x, message):
  found = reward_outcomes.outcomes_of([1.0, x, 2.0], 3)
  assert found == [Value(1.0), Failed(message), Value(2.0)]


class Secretive(Exception):
  def __str__(self):
    raise RuntimeError


def test_whatever_is_raised_becomes_a_failure_with_its_place():
  def raising(error):
    def fn():
      raise error

    return reward_outcomes.call(fn, {}, 1)[0].error  # pyright: ignore

  assert raising(ValueError("a\n b")).startswith("ValueError: a b (outcomes_test")
  assert "SystemExit: 4" in raising(SystemExit(4))
  assert "CancelledError" in raising(asyncio.CancelledError())
  assert "cannot be shown" in raising(Secretive())
  assert len(raising(ValueError("x" * 10_000))) < 500
  with pytest.raises(KeyboardInterrupt):  # the user wants out
    raising(KeyboardInterrupt())


def test_async_functions_are_awaited_also_inside_an_event_loop():
  columns = {"prompts": [""] * 2, "completions": ["a", "bb"]}
  expected = [Value(1.0), Value(2.0)]

  async def inside():
    return reward_outcomes.call(reward_faults.slow_lengths, columns, 2)

  assert reward_outcomes.call(reward_faults.slow_lengths, columns, 2) == expected
  assert asyncio.run(inside()) == expected


def test_per_row_calls_with_one_row_and_names_it_in_the_singular():
  seen = []

  def one(prompt, completion, *, answer):
    seen.append((prompt, completion, answer))
    return len(completion)

  rows = reward_outcomes.per_row(one)
  columns = {"prompts": ["p", "q"], "completions": ["a", "bb"], "answer": [1, 2]}
  assert reward_outcomes.call(rows, columns, 2) == [Value(1.0), Value(2.0)]
  assert seen == [("p", "a", 1), ("q", "bb", 2)]
  assert reward_outcomes.name_of(rows) == "one"


def test_per_row_awaits_its_rows_together():
  rows = reward_outcomes.per_row(reward_faults.slow_length)
  columns = {"prompts": ["p", "q"], "completions": ["a", "bb"]}
  assert reward_outcomes.call(rows, columns, 2) == [Value(1.0), Value(2.0)]


def test_names():
  assert reward_outcomes.name_of(reward_faults.raises) == "raises"
  assert reward_outcomes.name_of(functools.partial(reward_faults.raises)) == "raises"
  assert reward_outcomes.name_of(reward_faults.Unloadable()) == "unloadable"
