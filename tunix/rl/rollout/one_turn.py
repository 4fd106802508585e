"""Completions of a prompt as the first actions of episodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tunix.generate.outputs import with_text
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.tokens import Completion
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.rollout.client import Draw, SamplingClient


def completions(
  tokenizer: TokenizerAdapter,
  prompt: np.ndarray,
  config: RolloutConfig,
  count: int,
  client: SamplingClient,
  **reads: Any,
) -> RolloutOutput:
  """Returns `count` completions of one prompt, with the version of each token.

  Args:
    tokenizer: decodes the completions.
    prompt: int32 [T].
    config: limits.
    count: number of completions.
    client: draws them; it gives versions.
    **reads: `Draw.images` and `Draw.forbidden`.

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
  client.submit(
    [
      Draw(episode=i, turn=0, prompt=prompt, max_tokens=most, **reads)
      for i in range(count)
    ]
  )
  by_row: dict[int, Completion] = {}
  while client.open:
    by_row |= {drawn.number: drawn for drawn in client.poll()}
  rows = [by_row[i] for i in range(count)]
  rows = [dataclasses.replace(row, prompt=prompt) for row in rows]
  return RolloutOutput.of([with_text(row, tokenizer, config.stops) for row in rows])
