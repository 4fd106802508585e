"""Completions of a prompt, drawn by an object that draws the actions of episodes."""

from __future__ import annotations

import numpy as np

from tunix.generate.outputs import text_of
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.env.policy import Draw, Drawn, Policy
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput


def completions(
  tokenizer: TokenizerAdapter,
  prompt: np.ndarray,
  config: RolloutConfig,
  count: int,
  policy: Policy,
) -> RolloutOutput:
  """Returns `count` completions of one prompt, with the version of each token.

  Args:
    tokenizer: decodes the completions.
    prompt: int32 [T].
    config: limits.
    count: number of completions.
    policy: draws them; it gives versions.

  Raises:
    ValueError: the prompt is longer than `max_prompt_length`.
  """
  if len(prompt) > config.max_prompt_length:
    raise ValueError(
      f"a prompt has {len(prompt)} tokens and max_prompt_length is "
      f"{config.max_prompt_length}. Drop longer prompts from the data, or raise "
      "RolloutConfig.max_prompt_length"
    )
  most = config.max_tokens_to_generate
  policy.submit(
    [Draw(episode=i, turn=0, prompt=prompt, max_tokens=most) for i in range(count)]
  )
  by_row: dict[int, Drawn] = {}
  while policy.open:
    by_row |= {drawn.episode: drawn for drawn in policy.poll()}
  rows = [by_row[i] for i in range(count)]
  return RolloutOutput(
    text=[
      text_of(tokenizer.decode, r.ids, r.finish_reason, config.stops) for r in rows
    ],
    tokens=[row.ids for row in rows],
    prompt_tokens=[prompt] * count,
    logprobs=[row.logps for row in rows],
    finish_reasons=[row.finish_reason for row in rows],
    versions=[np.asarray(row.versions, np.int32) for row in rows],
    routes=[row.routes for row in rows] if config.replay_routes else None,
  )
