"""Rollouts by an SGLang-JAX server; tested against a fake of its API only."""

from __future__ import annotations

from typing import Any

from flax import nnx

from tunix.generate.sglang_jax_sampler import SglangJaxSampler
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.engine_rollout import URL, EngineRollout, take_options

_REQUIRED = {
  "url": URL,
  "restart": "a function restart(folder) -> address, for new weights",
}
_OPTIONAL = ("timeout_s", "weights_dir", "request")


class SglangJaxRollout(EngineRollout):
  """Rollouts over HTTP, see `SglangJaxSampler`.

  The engine takes no seed, so a resumed run samples other completions.

  Args:
    model: not used; `update_params` sends the weights.
    tokenizer: tokenizer of the model.
    rollout_config: its `engine_options` must have "url", the address of a running
      server, and "restart", a function that restarts the server on a folder: this
      engine has no other way to take new weights. They may have "timeout_s" and
      "weights_dir" (see SglangJaxSampler), and "request": further sampling parameters,
      such as {"regex": "[0-9]+"}.

  Raises:
    ValueError: "url" or "restart" is missing, or an option is unknown.
    EngineError: no server answers.
  """

  def __init__(self, model: nnx.Module, tokenizer: Any, rollout_config: RolloutConfig):
    del model
    options = take_options(rollout_config, "SGLang-JAX", _REQUIRED, _OPTIONAL)
    request = {"engine_options": options.pop("request", {})}
    sampler = SglangJaxSampler(options.pop("url"), tokenizer, **options)
    super().__init__(sampler, request)
