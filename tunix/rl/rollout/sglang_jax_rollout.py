"""Rollouts by an SGLang-JAX server. Written against its API, never run on it."""

from __future__ import annotations

from typing import Any

from tunix.generate.sglang_jax_sampler import SglangJaxSampler
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.engine_rollout import URL, EngineRollout, take_options

_REQUIRED = {"url": URL, "restart": "restart(folder) -> address, for new weights"}
_OPTIONAL = ("timeout_s", "weights_dir", "request")


class SglangJaxRollout(EngineRollout):
  """Samples by HTTP, see `SglangJaxSampler`. The engine draws by no seed of ours, so
  that a resumed run samples other completions.

  Args:
    model: not used: the weights are sent by `update_params`.
    tokenizer: of the model.
    rollout_config: `engine_options` has "url" of a running server, and "restart", a
      function that starts it anew on a folder: this engine takes new weights no other
      way. Besides, what else SglangJaxSampler takes, and "request": further sampling
      parameters, such as {"regex": "[0-9]+"}.

  Raises:
    ValueError: "url" or "restart" is missing, or an option that it does not know.
    EngineError: no server answers.
  """

  def __init__(self, model: Any, tokenizer: Any, rollout_config: RolloutConfig):
    del model
    options = take_options(rollout_config, "SGLang-JAX", _REQUIRED, _OPTIONAL)
    request = {"engine_options": options.pop("request", {})}
    sampler = SglangJaxSampler(options.pop("url"), tokenizer, **options)
    super().__init__(sampler, request)
