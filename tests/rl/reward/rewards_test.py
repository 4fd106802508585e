import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl import reward_faults
from tunix.rl.reward.outcomes import Failed, TimedOut, Value, per_row
from tunix.rl.reward.rewards import RewardManager

PROMPTS = ["p", "q", "r"]
TEXTS = ["a", "bb", "ccc"]


def ones(prompts, completions):
  return [1.0] * len(prompts)


def test_the_total_is_the_weighted_sum():
  # 2 * length + 0.5 * 1
  out = RewardManager([reward_faults.lengths, ones], [2.0, 0.5]).compute(PROMPTS, TEXTS)
  np.testing.assert_array_equal(out.total, [2.5, 4.5, 6.5])
  assert out.total.dtype == np.float64
  np.testing.assert_array_equal(out.by_function["lengths"], [1, 2, 3])
  np.testing.assert_array_equal(out.by_function["ones"], [1, 1, 1])
  assert out.outcomes["lengths"] == [Value(1.0), Value(2.0), Value(3.0)]
  assert out.valid.all() and out.problems() == []


def test_one_function_alone_and_weights_of_one():
  out = RewardManager(reward_faults.lengths).compute(PROMPTS, TEXTS)
  np.testing.assert_array_equal(out.total, [1, 2, 3])


def test_a_row_without_a_value_has_no_reward_and_the_others_keep_theirs():
  def partly(prompts, completions):
    return [1.0, math.nan, None]

  out = RewardManager([ones, partly], [1.0, 0.0]).compute(PROMPTS, TEXTS)
  np.testing.assert_array_equal(out.total, [1.0, math.nan, math.nan])
  np.testing.assert_array_equal(out.by_function["partly"], [1.0, math.nan, math.nan])
  np.testing.assert_array_equal(out.valid, [True, False, False])
  nan = "returned nan; expected a number from -1e+15 to 1e+15"
  assert out.outcomes["partly"][1] == Failed(nan)
  assert out.problems() == [
    f"partly: row 1: {nan}",
    "partly: row 2: returned None as the row's reward, not a number",
  ]


def test_columns_are_passed_by_what_the_signature_takes():
  seen = {}

  def named(completions, answer, missing=7):
    seen["named"] = (completions, answer, missing)
    return [0.0] * 3

  def all_of_them(prompts, **rest):
    seen["all"] = (prompts, rest)
    return [0.0] * 3

  columns = {"answer": np.array([1, 2, 3]), "level": ["x", "y", "z"]}
  RewardManager([named, all_of_them]).compute(PROMPTS, TEXTS, columns)
  texts, answer, missing = seen["named"]
  assert (texts, list(answer), missing) == (TEXTS, [1, 2, 3], 7)
  prompts, rest = seen["all"]
  assert prompts == PROMPTS and set(rest) == {"completions", "answer", "level"}


def test_jax_columns_arrive_as_numpy():
  def kind(prompts, completions, x):
    assert type(x) is np.ndarray
    return x

  out = RewardManager(kind).compute(PROMPTS, TEXTS, {"x": jnp.arange(3)})
  np.testing.assert_array_equal(out.total, [0, 1, 2])


def test_a_missing_column_is_named_with_those_that_there_are():
  def wants(prompts, completions, solution):
    return [0.0] * 3

  with pytest.raises(TypeError, match=r"wants needs 'solution'.*\['answer', 'comp"):
    RewardManager(wants).compute(PROMPTS, TEXTS, {"answer": [1, 2, 3]})
  with pytest.raises(TypeError, match="one needs 'solution'"):

    def one(prompt, completion, solution):
      return 0.0

    RewardManager(per_row(one)).compute(PROMPTS, TEXTS)


@pytest.mark.parametrize(
  ("columns", "message"),
  [
    ({"answer": [1]}, "'answer' has 1 entries for 3 prompts"),
    ({"answer": "abc"}, "one entry per row"),
    ({"prompts": [1, 2, 3]}, r"columns \['prompts'\]"),
  ],
)
def test_columns_that_do_not_fit_are_refused(columns, message):
  with pytest.raises(ValueError, match=message):
    RewardManager(ones).compute(PROMPTS, TEXTS, columns)


def test_names_come_from_the_functions_or_are_given():
  partial = functools.partial(ones)
  assert RewardManager([ones, reward_faults.lengths]).names == ["ones", "lengths"]
  with pytest.raises(ValueError, match=r"several.*'ones'.*names="):
    RewardManager([ones, partial])
  manager = RewardManager([ones, partial], names=["a", "b"])
  assert list(manager.compute(PROMPTS, TEXTS).by_function) == ["a", "b"]
  with pytest.raises(ValueError, match="names is"):
    RewardManager([ones, partial], names=["a"])


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"weights": [1.0, 2.0]}, "weights is"),
    ({"weights": [math.nan]}, r"weights\[0\] is nan"),
    ({"workers": -1}, "workers is -1"),
    ({"workers": math.nan}, "workers is nan"),
    ({"names": "f"}, "names is 'f': it must be a list"),
    ({"workers": 1, "timeout_s": 1.0, "memory_bytes": -1}, "memory_bytes is -1"),
    ({"workers": 2}, "workers is 2 and timeout_s is not set"),
    ({"timeout_s": 1.0}, "timeout_s is 1.0 with workers=0"),
    ({"memory_bytes": 1}, "memory_bytes is 1 with workers=0"),
    ({"workers": 1, "timeout_s": 0.0}, "timeout_s is 0.0"),
    ({"workers": 1, "timeout_s": math.inf}, "timeout_s is inf"),
    ({"rows_per_call": 0}, "rows_per_call is 0"),
  ],
)
def test_options_that_make_no_sense_are_refused(options, message):
  with pytest.raises((TypeError, ValueError), match=message):
    RewardManager(ones, **options)


def test_what_is_no_function_is_refused():
  with pytest.raises(ValueError, match="no reward functions"):
    RewardManager([])
  with pytest.raises(TypeError, match="str, which cannot be called"):
    RewardManager(["exact_match"])  # pyright: ignore
  with pytest.raises(TypeError, match="has no signature"):
    RewardManager(max)


def test_rows_per_call_confines_a_failure():
  def sizes(prompts, completions):
    if "bb" in completions:
      raise ValueError("bb")
    return [float(len(prompts))] * len(prompts)

  def totals(rows_per_call):
    manager = RewardManager(sizes, rows_per_call=rows_per_call)
    return manager.compute(PROMPTS, TEXTS).total

  np.testing.assert_array_equal(totals(None), [math.nan] * 3)
  np.testing.assert_array_equal(totals(2), [math.nan, math.nan, 1.0])
  np.testing.assert_array_equal(totals(1), [1.0, math.nan, 1.0])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_row_that_hangs_costs_its_reward_and_no_other(workers):
  functions = [per_row(reward_faults.hang_on_h), reward_faults.lengths]
  with RewardManager(functions, workers=workers, timeout_s=1.5) as manager:
    out = manager.compute(PROMPTS, ["a", "h", "ccc"])
  np.testing.assert_array_equal(out.total, [2.0, math.nan, 4.0])
  assert out.outcomes["hang_on_h"] == [Value(1.0), TimedOut(1.5), Value(1.0)]
  assert out.problems() == ["hang_on_h: row 1: no answer within 1.5 s"]


def test_workers_and_this_process_agree():
  functions = [
    reward_faults.lengths,
    reward_faults.slow_lengths,
    per_row(reward_faults.slow_length),
    reward_faults.raises,
    reward_faults.echo,
  ]
  columns = {"score": np.array([0.1, math.nan, 3.0])}
  here = RewardManager(functions).compute(PROMPTS, TEXTS, columns)
  for workers in (1, 3):
    with RewardManager(functions, workers=workers, timeout_s=60.0) as manager:
      there = manager.compute(PROMPTS, TEXTS, columns)
    assert there.outcomes == here.outcomes
    np.testing.assert_array_equal(there.total, here.total)


def test_no_rows():
  out = RewardManager([ones, per_row(reward_faults.slow_length)]).compute([], [])
  assert out.total.shape == (0,)
