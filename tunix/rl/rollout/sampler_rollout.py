"""Rollout engine over any sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.generate.base_sampler import BaseSampler
from tunix.generate.outputs import fill_id
from tunix.models.images.prompt_images import PromptImages
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput


class SamplerRollout(BaseRollout):
  """Rollouts by a sampler. Subclasses write `update_params`.

  Args:
    sampler: a BaseSampler, or an object with its call.
    options: options of each call, in addition to those of RolloutConfig.
  """

  def __init__(self, sampler: BaseSampler, options: Mapping[str, Any] | None = None):
    self._sampler: Any = sampler
    self._options = dict(options or {})

  def generate(
    self,
    prompts: Sequence[Any],
    rollout_config: RolloutConfig,
    *,
    num_generations: int = 1,
    seed: jax.Array | int | None = None,
    first_prompt: int = 0,
    images: Sequence[PromptImages | None] = (),
  ) -> RolloutOutput:
    """Returns `num_generations` completions of each prompt; see `BaseRollout.generate`.

    Raises:
      ValueError: a prompt is longer than `max_prompt_length`, or the engine does not
        give log-probs of the distribution it drew from.
    """
    c = rollout_config
    draws = {"seed": c.seed if seed is None else seed, "first_prompt": first_prompt}
    if "seed" in self._sampler.not_honoured:  # the engine takes no seed
      draws = {}
    ids = [self._sampler.tokenize(prompt) for prompt in prompts]
    longest = max(map(len, ids), default=0)
    if longest > c.max_prompt_length:
      raise ValueError(
        f"a prompt has {longest} tokens and max_prompt_length is "
        f"{c.max_prompt_length}. Drop longer prompts from the data, or raise "
        "RolloutConfig.max_prompt_length"
      )
    options = {
      "num_samples": num_generations,
      **c.sampling_options,
      **draws,
      "include_eos": True,
      "return_logprobs": True,
      # Not False: samplers of users need not know the option.
      **({"return_routes": True} if c.replay_routes else {}),
      **({"images": images} if len(images) else {}),
      **self._options,
    }
    return self._output(ids, c.max_tokens_to_generate, options)

  def _output(
    self, prompts: list[np.ndarray], steps: int, options: dict[str, Any]
  ) -> RolloutOutput:
    """Calls the sampler.

    Args:
      prompts: ids of the prompts.
      steps: most tokens of a completion.
      options: other arguments of the call.
    """
    out = self._sampler(prompts, steps, **options)
    if out.sampling_logprobs is None:
      raise ValueError(
        f"temperature is {options['temperature']}, or a filter is used, and the engine "
        "gives raw log-probs, which are not those of the distribution that it sampled "
        "from. Start it with processed log-probs (vLLM: --logprobs-mode "
        "processed_logprobs), or sample at temperature 1 without filters"
      )
    return RolloutOutput(
      text=out.text,
      tokens=list(out.tokens),
      prompt_tokens=[row for row in prompts for _ in range(options["num_samples"])],
      logprobs=list(out.sampling_logprobs),
      finish_reasons=out.finish_reasons,
      version=self.version,
      routes=out.routes if options.get("return_routes") else None,
    )

  def pad_id(self) -> int:
    return fill_id(self._sampler.tokenizer)

  def eos_id(self) -> int:
    return self._sampler.tokenizer.eos_ids()[0]
