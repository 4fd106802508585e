"""The rules of drawing: one list and one check of them, whoever takes them."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from tests.generate import toy_ids
from tunix.cli.jobs.distill import StudentRollout
from tunix.cli.jobs.rl_settings import RolloutSettings
from tunix.cli.settings import keys
from tunix.distillation.on_policy_trainer import OnPolicyConfig
from tunix.generate.base_sampler import BaseSampler
from tunix.generate.drawing import filters
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.drawing.params import SamplingParams
from tunix.generate.engine.request import EngineRequest
from tunix.generate.engine_sampler import EngineSampler
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.client import Draw
from tunix.rl.rollout.local_clients import EngineClient

# Each class with the rules, and what else it needs.
KINDS = {
  SamplingParams: {},
  SamplingOptions: {"max_generation_steps": 1},
  EngineRequest: {"prompt": [1], "max_tokens": 1},
  RolloutConfig: {},
  OnPolicyConfig: {"max_prompt_length": 1, "max_completion_length": 1},
}
SET = SamplingParams(
  temperature=0.5,
  top_p=0.4,
  top_k=3,
  min_p=0.2,
  seed=7,
  eos_tokens=(4, 5),
  stop_strings=("a", "b"),
)
WRONG = {
  "temperature": [-1.0, float("nan"), "1"],
  "top_p": [0.0, 1.5, True],
  "top_k": [0, 1.5, 2**31],
  "min_p": [-0.1, 1.1],
  "seed": [-1, 2**32],
  "eos_tokens": [[-1], [2**31], 3],
  "stop_strings": [[""], ["x"] * 65, ["x" * 1025], [3]],
}


def made(kind, **rules):
  keywords = kind.keywords()
  return kind(**KINDS[kind], **{keywords[rule]: x for rule, x in rules.items()})


def test_every_rule_moves_between_any_two():
  default = SamplingParams().rules()
  assert all(value != default[rule] for rule, value in SET.rules().items())
  for first, second in itertools.product(KINDS, KINDS):
    moved = second.of(first.of(SET, **KINDS[first]), **KINDS[second])
    assert moved.rules() == SET.rules()
    assert (moved.filters, moved.stops) == (SET.filters, SET.stops)
    name = second.keywords()["temperature"]
    changed = dataclasses.replace(moved, **{name: 0.25})
    assert changed.rules() == {**SET.rules(), "temperature": 0.25}
    assert second.of(moved, **KINDS[second], **{name: 0.25}).rules() == changed.rules()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", SET.rules())
def test_a_wrong_rule_is_refused_by_name(kind, rule):
  for value in WRONG[rule]:
    with pytest.raises((TypeError, ValueError), match=f"^{kind.keywords()[rule]}"):
      made(kind, **{rule: value})


@pytest.mark.parametrize("kind", KINDS)
def test_filters_need_a_temperature(kind):
  if kind is not OnPolicyConfig:  # which has no temperature 0
    for name, value in SET.filters.items():
      with pytest.raises(ValueError, match=f"{name} is {value}, and at temperature 0"):
        made(kind, temperature=0.0, **{name: value})
    off = {name: value.item() for name, value in filters.OFF.items()}
    assert made(kind, temperature=0.0, **off).filters == {}
  with pytest.raises(ValueError, match="temperature is 1e-20"):
    made(kind, temperature=1e-20)


def test_every_filter_is_a_rule():
  assert filters.OFF.keys() == SET.filters.keys() <= SET.rules().keys()


def test_ids_that_end_a_request_have_two_names():
  request = EngineRequest(prompt=[1], max_tokens=1, stop_ids=[3], stop_strings="end")
  assert request.stop_ids == request.eos_tokens == [3] and request.stops == ("end",)
  assert dataclasses.replace(request, stop_ids=()).eos_tokens == ()
  with pytest.raises(TypeError, match="eos_tokens"):
    EngineRequest(prompt=[1], max_tokens=1, eos_tokens=[3])


def test_every_rule_is_a_key_of_the_command():
  for section in (RolloutSettings, StudentRollout):
    read = keys.of(section)
    assert read.keys() >= SET.rules().keys()
    assert all(read[rule].meaning for rule in SET.rules())


def test_rows_of_a_sampler_are_drawn_by_all_rules():
  options = SamplingOptions.of(
    SET, max_generation_steps=2, num_samples=2, first_prompt=1
  )
  sampler: Any = BaseSampler(toy_ids.Ids())
  sampler.transformer = None  # only images need it
  requests = EngineSampler._requests(sampler, [np.array([1])] * 2, options)
  for number, request in enumerate(requests):
    assert {**request.rules(), "seed": 7, "eos_tokens": (4, 5)} == SET.rules()
    assert jax.random.key_data(request.seed)[1] == 7
    assert request.first_row == 2 * (1 + number) and request.stop_ids == [4, 5]


class Recording:
  """An engine that only records its requests."""

  def __init__(self):
    self.requests, self.vocab_size, self.tokenizer = [], 9, self

  def eos_ids(self):
    return [2]

  def submit(self, request, streams):
    self.requests.append(request)
    return object()


def test_actions_of_episodes_are_drawn_by_all_rules():
  engine, key = Recording(), jax.random.key(0)
  draw = Draw(episode=0, turn=0, prompt=np.array([1]), max_tokens=2)
  for config in (RolloutConfig.of(SET), RolloutConfig(temperature=0.5)):
    EngineClient(engine, config, key).submit([draw])
  rules = [{**r.rules(), "seed": 7} for r in engine.requests]
  assert rules[0] == SET.rules() and rules[1]["eos_tokens"] == (2,)
  assert all(r.seed is key for r in engine.requests)
