"""Samplers and rollout engines of users, as they were written for earlier versions."""

import collections
import dataclasses

import numpy as np
import pytest

from tests.generate import toy_ids
from tunix.generate import batching
from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.generate.engine.request import EngineRequest
from tunix.generate.options import SamplingOptions
from tunix.generate.outputs import sampler_output
from tunix.rl import placement
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
from tunix.rl.rollout.sampler_rollout import SamplerRollout


class Echo(BaseSampler):
  """Writes `_sample`, and the columns of the output by itself."""

  name = "echo"
  not_honoured = frozenset({"return_logits", "beam_size", "exact", "forbidden_tokens"})

  def _sample(self, prompts, options):
    rows = [p for p in prompts for _ in range(options.num_samples)]
    padded, _ = batching.left_padded(rows, len(rows), max(map(len, rows)), 0)
    tokens = [
      np.array([collections.Counter(map(int, row)).most_common(1)[0][0]], np.int32)
      for row in rows
    ]
    zeros = [np.zeros(1, np.float32) for _ in rows]
    return SamplerOutput(
      text=[self.tokenizer.decode(row.tolist()) for row in tokens],
      tokens=tokens,
      padded_prompt_tokens=padded,
      logprobs=zeros,
      sampling_logprobs=zeros,
      finish_reasons=["length"] * len(rows),
    )


class Rules(BaseSampler):
  """Writes `_sample`, and reads each option."""

  not_honoured = frozenset({"return_logits", "seed"})

  def _sample(self, prompts, options):
    more = dataclasses.replace(options, temperature=0.5, seed=3)
    assert isinstance(options, SamplingOptions) and "seed" in more.active
    more.refuse({"echo"}, self.name, "choose another one")
    self.seen = {**dataclasses.asdict(options), "filters": options.filters}
    limits = options.limits(len(prompts)).repeat(options.num_samples)
    ends = [*options.stops, *map(str, self._eos_ids(options))]
    tokens = [np.full(limit, 7, np.int32) for limit in limits]
    return sampler_output(
      self.tokenizer,
      prompts,
      options,
      tokens=tokens,
      finish_reasons=["stop" if ends else "length"] * len(tokens),
      logprobs=[np.zeros(len(row), np.float32) for row in tokens],
      sampling_logprobs=[np.zeros(len(row), np.float32) for row in tokens],
    )


class OwnCall(BaseSampler):
  """Writes `__call__` with the options that there were, and checks them itself."""

  def __call__(
    self,
    input_strings,
    max_generation_steps,
    max_prompt_length=None,
    *,
    temperature,
    top_p,
    top_k,
    min_p,
    eos_tokens,
    stop_strings,
    num_samples,
    seed=None,
    first_prompt=0,
    include_eos=False,
    return_logprobs=False,
  ):
    options = SamplingOptions(
      max_generation_steps=max_generation_steps,
      max_prompt_length=max_prompt_length,
      temperature=temperature,
      top_p=top_p,
      top_k=top_k,
      min_p=min_p,
      eos_tokens=eos_tokens,
      stop_strings=stop_strings,
      num_samples=num_samples,
      seed=seed,
      first_prompt=first_prompt,
      include_eos=include_eos,
      return_logprobs=return_logprobs,
    )
    return Rules(self.tokenizer)._sample(
      self._token_ids(input_strings, options), options
    )


class Weights(SamplerRollout):
  """A rollout over a sampler, which takes weights."""

  def __init__(self, model, tokenizer, rollout_config):
    self.length = rollout_config.max_tokens_to_generate
    super().__init__(model(tokenizer))

  def update_params(self, model, version):
    self.moves, self.version = placement.copy_weights, version


class Own(BaseRollout):
  """Writes every method, and reads each setting."""

  def __init__(self, model, tokenizer, rollout_config):
    self._model, self._tokenizer = model, tokenizer
    self._config = dataclasses.replace(rollout_config, engine_options={})

  def _count(self, config):
    return config.max_tokens_to_generate

  def generate(
    self, prompts, rollout_config, *, num_generations=1, seed=None, first_prompt=0
  ):
    c = rollout_config
    assert len(prompts) <= c.max_prompt_length and c.temperature > 0
    stops, seed = c.stop_strings or (), c.seed if seed is None else seed
    rows = [np.full(self._count(c), 7, np.int32)] * (len(prompts) * num_generations)
    return RolloutOutput(
      text=["7"] * len(rows),
      tokens=rows,
      prompt_tokens=[np.ones(1, np.int32)] * len(rows),
      logprobs=[np.zeros(len(row), np.float32) for row in rows],
      finish_reasons=["stop" if stops else "length"] * len(rows),
      version=self.version,
    )

  def update_params(self, model, version):
    self._model, self.version = model, version

  def pad_id(self):
    return 0

  def eos_id(self):
    return 2


class OwnRequests(Own):
  """Writes the requests of our engine from the settings, field by field."""

  def _count(self, config):
    c = config
    request = EngineRequest(
      prompt=np.ones(1, np.int32),
      max_tokens=c.max_tokens_to_generate,
      num_samples=1,
      temperature=c.temperature,
      top_k=c.top_k,
      top_p=c.top_p,
      min_p=c.min_p,
      seed=c.seed,
      first_row=2,
      stop_ids=c.eos_tokens,
      stop_strings=tuple(c.stop_strings or ()),
      logprobs=True,
    )
    later = dataclasses.replace(request, stop_ids=(3,), seed=4)
    assert (request.stop_ids, later.stop_ids, later.seed) == (c.eos_tokens, (3,), 4)
    return request.max_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(RolloutConfig):
  """Settings with a field and a check of their own."""

  top_p: float | None = 0.9
  retries: int = 0

  def __post_init__(self):
    super().__post_init__()
    if self.retries < 0:
      raise ValueError("retries")


FILTERED = {"temperature": 0.5, "top_p": 0.5, "top_k": 2, "min_p": 0.1}
ENDING = {"eos_tokens": [4], "stop_strings": ["x"]}


@pytest.mark.parametrize("kind", [Echo, Rules, OwnCall])
@pytest.mark.parametrize("rules", [{}, FILTERED, ENDING])
def test_a_sampler_of_users_completes_for_a_rollout(kind, rules):
  config = RolloutConfig(max_tokens_to_generate=1, **rules)
  rollout = Weights(kind, toy_ids.Ids(), config)
  rollout.update_params(None, "new")
  out = rollout.generate(["7", [1, 7, 7]], config, num_generations=2, first_prompt=1)
  assert [row.tolist() for row in out.tokens] == [[7]] * 4 and out.version == "new"


def test_a_sampler_of_users_is_given_each_option():
  rules = Rules(toy_ids.Ids())
  rules(["3 1"], [2], **FILTERED, **ENDING, num_samples=2, return_logprobs=True)
  wanted = {**FILTERED, **ENDING, "num_samples": 2, "max_generation_steps": [2]}
  assert rules.seen.items() >= wanted.items()
  assert rules.seen["filters"] == {"top_k": 2, "top_p": 0.5, "min_p": 0.1}
  with pytest.raises(ValueError, match="seed: leave that out"):
    rules(["3 1"], 2, temperature=1.0, seed=3)


@pytest.mark.parametrize("kind", [Own, OwnRequests])
@pytest.mark.parametrize("config", [RolloutConfig, OwnConfig])
@pytest.mark.parametrize("rules", [{}, FILTERED, ENDING])
def test_a_rollout_of_users_reads_the_settings(kind, config, rules):
  settings = config(max_tokens_to_generate=3, seed=5, **rules)
  out = kind(None, toy_ids.Ids(), settings).generate(["1"], settings)
  assert out.tokens[0].tolist() == [7, 7, 7]
  assert out.finish_reasons == ["stop" if "stop_strings" in rules else "length"]
  assert settings.sampling_options == {
    "temperature": 1.0,
    **dict.fromkeys(("top_k", "min_p", "eos_tokens")),
    "top_p": 0.9 if config is OwnConfig else None,
    **rules,
    "stop_strings": rules.get("stop_strings", ()),
  }
