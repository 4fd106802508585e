"""Rollouts by a vLLM server."""

from __future__ import annotations

from typing import Any

from flax import nnx

from tunix.generate.vllm_sampler import VllmSampler
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.engine_rollout import URL, EngineRollout, take_options

_OPTIONAL = ("model", "logprob_kind", "timeout_s", "weights_dir", "weights", "request")


class VllmRollout(EngineRollout):
  """Rollouts over HTTP, see `VllmSampler`.

  Args:
    model: not used; `update_params` sends the weights.
    tokenizer: tokenizer of the model.
    rollout_config: its `engine_options` must have "url", the address of a running
      server (docs/guides/engines.md shows how to start one). They may have "model",
      "logprob_kind", "timeout_s", "weights_dir" and "weights" (see VllmSampler), and
      "request": further fields of each request, such as {"structured_outputs": {...}}.

  Raises:
    ValueError: "url" is missing, or an option is unknown.
    EngineError: no server answers.
  """

  def __init__(self, model: nnx.Module, tokenizer: Any, rollout_config: RolloutConfig):
    del model
    options = take_options(rollout_config, "vLLM", {"url": URL}, _OPTIONAL)
    request = {"engine_options": options.pop("request", {})}
    super().__init__(VllmSampler(options.pop("url"), tokenizer, **options), request)
