"""Rollouts by a vLLM server."""

from __future__ import annotations

from typing import Any

from tunix.generate.vllm_sampler import VllmSampler
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.engine_rollout import URL, EngineRollout, take_options

_OPTIONAL = ("model", "logprob_kind", "timeout_s", "weights_dir", "request")


class VllmRollout(EngineRollout):
  """Samples by HTTP, see `VllmSampler`.

  Args:
    model: not used: the weights are sent by `update_params`.
    tokenizer: of the model.
    rollout_config: `engine_options` has "url" of a running server (how to start one:
      docs/guides/engines.md), what else VllmSampler takes, and "request": further
      fields of each request, such as {"structured_outputs": {...}}.

  Raises:
    ValueError: there is no "url", or an option that vLLM does not know.
    EngineError: no server answers.
  """

  def __init__(self, model: Any, tokenizer: Any, rollout_config: RolloutConfig):
    del model
    options = take_options(rollout_config, "vLLM", {"url": URL}, _OPTIONAL)
    request = {"engine_options": options.pop("request", {})}
    super().__init__(VllmSampler(options.pop("url"), tokenizer, **options), request)
