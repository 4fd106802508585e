"""Engines outside the process: what is asked of them, and whether weights arrived."""

import dataclasses

import numpy as np
import pytest

from tests.generate.fake_engine import FakeEngine
from tests.rl.clusters import Words
from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.engine_rollout import EngineRollout
from tunix.rl.rollout.sglang_jax_rollout import SglangJaxRollout
from tunix.rl.rollout.vllm_rollout import VllmRollout
from tunix.rl.weights.placement import WeightSyncError
from tunix.rl.weights.policy_version import PolicyVersion


class Engine(BaseSampler):
  """Says its weights: every log-prob is the number it was given."""

  def __init__(self, *, lost: bool = False, raw: bool = False):
    super().__init__(Words())
    self.weights, self.lost, self.raw, self.asked = 0.0, lost, raw, []

  def update_weights(self, model):
    self.weights = self.weights if self.lost else model

  def __call__(self, input_strings, max_generation_steps, num_samples=1, **options):
    steps = {"max_generation_steps": max_generation_steps}
    self.asked.append({**options, **steps, "num_samples": num_samples})
    rows = len(input_strings) * num_samples
    logps = [np.full(max_generation_steps, self.weights, np.float32)] * rows
    return SamplerOutput(
      text=["5"] * rows,
      tokens=[np.full(max_generation_steps, 5, np.int32)] * rows,
      padded_prompt_tokens=np.zeros((rows, 1), np.int32),
      logprobs=logps,
      sampling_logprobs=None if self.raw else logps,
      finish_reasons=["length"] * rows,
    )


FIRST, SECOND = PolicyVersion(0, "a"), PolicyVersion(1, "b")


def test_weights_move_and_rollouts_carry_their_version():
  engine = Engine()
  rollout = EngineRollout(engine)
  rollout.update_params(-1.0, FIRST)
  rollout.update_params(-2.0, SECOND)
  out = rollout.generate(["1 2"], RolloutConfig(), num_generations=3)
  assert out.version == SECOND
  assert len(out.text) == len(out.prompt_tokens) == 3
  assert out.logprobs[0][0] == -2.0
  assert engine.asked[-1]["num_samples"] == 3


def test_a_sync_that_moves_nothing_is_an_error():
  rollout = EngineRollout(Engine(lost=True))
  rollout.update_params(-1.0, FIRST)
  with pytest.raises(WeightSyncError, match="the engine answers as before"):
    rollout.update_params(-2.0, SECOND)


def test_the_same_version_is_sent_once():
  engine = Engine()
  rollout = EngineRollout(engine)
  rollout.update_params(-1.0, FIRST)
  asked = len(engine.asked)
  rollout.update_params(-9.0, dataclasses.replace(FIRST))
  assert len(engine.asked) == asked and engine.weights == -1.0


def test_raw_log_probs_are_refused():
  rollout = EngineRollout(Engine(raw=True))
  with pytest.raises(ValueError, match="processed_logprobs"):
    rollout.generate(["1"], RolloutConfig(temperature=0.7))


# Checked before a call, or read when the engine is made.
NOT_OF_A_CALL = {
  *("slots", "center_scores", "weights"),
  *("max_prompt_length", "kv_cache_size", "gather_weights", "engine_options"),
}
CALLED = {
  "max_tokens_to_generate": "max_generation_steps",
  "replay_routes": "return_routes",
}
SETTINGS = {
  "replay_routes": True,
  "max_tokens_to_generate": 7,
  "temperature": 0.5,
  "top_p": 0.5,
  "top_k": 3,
  "min_p": 0.5,
  "seed": 4,
  "eos_tokens": [3],
  "stop_strings": ["walks"],
}


def test_every_setting_reaches_the_sampler():
  names = {field.name for field in dataclasses.fields(RolloutConfig)}
  assert names == NOT_OF_A_CALL | SETTINGS.keys()
  for name, value in SETTINGS.items():
    engine = Engine()
    for config in ({}, {name: value}):
      EngineRollout(engine).generate(["1"], RolloutConfig(**config))
    before, after = engine.asked
    called = CALLED.get(name, name)
    assert [k for k in after if before.get(k) != after[k]] == [called]


def test_a_prompt_that_is_too_long_is_refused():
  rollout = EngineRollout(Engine())
  with pytest.raises(ValueError, match="max_prompt_length is 1"):
    rollout.generate(["1 2"], RolloutConfig(max_prompt_length=1))


def test_options_of_the_vllm_rollout():
  with pytest.raises(ValueError, match="'url'"):
    VllmRollout(None, Words(), RolloutConfig())
  with pytest.raises(ValueError, match="'port'"):
    VllmRollout(None, Words(), RolloutConfig(engine_options={"port": 1}))


def test_the_sglang_rollout_draws_without_a_seed_of_ours():
  known = [[-0.5, 5, None], [-1.5, 6, None]]
  meta = {"output_token_logprobs": known, "finish_reason": {"type": "length"}}
  model = {"is_generation": True, "model_path": "toy"}
  answers = {"/get_model_info": model, "/generate": {"text": "", "meta_info": meta}}
  with FakeEngine(answers) as server:
    given = {"url": server.url, "restart": lambda folder: server.url}
    given |= {"request": {"regex": "[0-9]+"}}
    rollout = SglangJaxRollout(None, Words(), RolloutConfig(engine_options=given))
    out = rollout.generate(["1 2"], RolloutConfig(), num_generations=2, seed=3)
    asked = server.bodies("/generate")
  assert all(body["sampling_params"]["regex"] == "[0-9]+" for body in asked)
  assert [x.tolist() for x in out.tokens] == [[5, 6], [5, 6]]
  np.testing.assert_allclose(out.logprobs, [[-0.5, -1.5]] * 2)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"temperature": -1.0}, "temperature is -1"),
    ({"top_p": 0.0}, "top_p is 0.0"),
    ({"top_k": 0}, "top_k is 0"),
    ({"min_p": 2.0}, "min_p is 2.0"),
    ({"stop_strings": [""]}, "stop_strings"),
    ({"eos_tokens": (-1,)}, r"eos_tokens\[0\] is -1: .* whole number of at least 0"),
    ({"eos_tokens": [2, 2**31]}, r"eos_tokens\[1\] is 2147483648"),
    ({"temperature": 0.0, "top_k": 3}, "top_k is 3"),
  ],
)
def test_what_no_sampler_takes_is_refused_before_the_first_rollout(options, message):
  with pytest.raises(ValueError, match=message):
    RolloutConfig(**options)


def test_options_of_the_sglang_rollout():
  for given, missing in (({}, "url"), ({"url": "http://localhost:1"}, "restart")):
    with pytest.raises(ValueError, match=missing):
      SglangJaxRollout(None, Words(), RolloutConfig(engine_options=given))
