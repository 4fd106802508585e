"""Rollouts by our own sampler, from weights that this process holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from tunix.generate.sampler import CacheConfig, Sampler
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput


class VanillaRollout(BaseRollout):
  """Samples from a module, as it stands at each call.

  Args:
    model: the module; colocated, it is the actor itself.
    tokenizer: see `Sampler`.
    rollout_config: its lengths bound the cache.

  Raises:
    ValueError: engine_options, of which there are none here.
  """

  def __init__(self, model: nnx.Module, tokenizer: Any, rollout_config: RolloutConfig):
    if rollout_config.engine_options:
      raise ValueError(
        f"engine_options {sorted(rollout_config.engine_options)} are for other "
        "engines: the vanilla rollout has none, leave them out"
      )
    size = rollout_config.kv_cache_size
    cache = None if size is None else CacheConfig(cache_size=size)
    self._sampler = Sampler(model, tokenizer, cache)

  def generate(
    self,
    prompts: Sequence[Any],
    rollout_config: RolloutConfig,
    *,
    num_generations: int = 1,
    seed: Any = None,
  ) -> RolloutOutput:
    c = rollout_config
    ids = [self._sampler.tokenize(prompt) for prompt in prompts]
    longest = max(map(len, ids), default=0)
    if longest > c.max_prompt_length:
      raise ValueError(
        f"a prompt has {longest} tokens, max_prompt_length is {c.max_prompt_length}: "
        "drop such prompts from the data or raise RolloutConfig.max_prompt_length"
      )
    out = self._sampler(
      ids,
      c.max_tokens_to_generate,
      temperature=c.temperature,
      top_p=c.top_p,
      top_k=c.top_k,
      min_p=c.min_p,
      eos_tokens=c.eos_tokens,
      stop_strings=c.stop_strings or (),
      num_samples=num_generations,
      seed=c.seed if seed is None else seed,
      include_eos=True,
      return_logprobs=True,
    )
    return RolloutOutput(
      text=out.text,
      tokens=list(out.tokens),
      prompt_tokens=[row for row in ids for _ in range(num_generations)],
      logprobs=list(out.sampling_logprobs or ()),
      finish_reasons=out.finish_reasons,
      version=self.version,
    )

  def update_params(self, model: Any, version: Any) -> None:
    """The module samples with the weights that it holds; `model` must be that one."""
    if model is not self._sampler.transformer:
      raise ValueError(
        "the vanilla rollout samples from the module it was made with: copy weights "
        "into it (placement.copy_weights) instead of handing another one over"
      )
    self.version = version

  def pad_id(self) -> int:
    pad = self._sampler.tokenizer.pad_id()
    return 0 if pad is None else pad

  def eos_id(self) -> int:
    return self._sampler.tokenizer.eos_ids()[0]

  def model(self) -> nnx.Module:
    return self._sampler.transformer
