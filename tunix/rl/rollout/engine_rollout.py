"""Base class of rollouts by an engine outside this process.

Weights are sent to the engine. Its log-probs of a few fixed prompts are compared before
and after, because a change shows that the weights have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from tunix.generate.base_sampler import BaseSampler
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.sampler_rollout import SamplerRollout
from tunix.rl.weights.placement import WeightSyncError

URL = 'the address of a running server, such as "http://localhost:8000"'
# Prompts of `fingerprint`. Small ids are in every vocabulary.
_PROBES = ((1, 2, 3, 4), (4, 3, 2, 1), (2, 2, 2, 2))
_PROBE_TOKENS = 8


class EngineRollout(SamplerRollout):
  """Rollouts by a sampler with `update_weights(model)`, whose engine has the model.

  Args:
    sampler: the sampler.
    options: further options of each of its calls.
  """

  def __init__(self, sampler: BaseSampler, options: Mapping[str, Any] | None = None):
    super().__init__(sampler, options)
    self._last = ""

  def update_params(self, model: nnx.Module, version: Any) -> None:
    """Sends the weights, unless the engine has that version already.

    Raises:
      WeightSyncError: the policy changed, and the engine answers as before.
    """
    before_update = self.version
    if before_update is None or before_update.stamp != version.stamp:
      before = self._last or self.fingerprint()
      self._sampler.update_weights(model)
      self._last = self.fingerprint()
      if before_update is not None and self._last == before:
        raise WeightSyncError(
          f"training changed the policy (step {before_update.step} to {version.step}) "
          "and the engine answers as before: the weights did not reach it, or the "
          "update is too small for its dtype"
        )
    self.version = version

  def fingerprint(self) -> str:
    """Returns the engine's tokens and log-probs for a few fixed prompts, as a text."""
    out = self._sampler(
      [list(probe) for probe in _PROBES],
      _PROBE_TOKENS,
      eos_tokens=[],
      return_logprobs=True,
    )
    logps = out.logprobs if out.logprobs is not None else out.sampling_logprobs
    rows = zip(out.tokens, logps or ())
    return repr([(list(map(int, ids)), list(map(float, row))) for ids, row in rows])


def take_options(
  config: RolloutConfig,
  engine: str,
  required: Mapping[str, str],
  optional: Sequence[str],
) -> dict[str, Any]:
  """Returns a copy of a config's `engine_options`, after a check of their names.

  Args:
    config: the config.
    engine: name of the engine, for messages.
    required: name and description of each option that must be there.
    optional: names of the other options.

  Raises:
    ValueError: the engine does not know an option, or a required one is missing.
  """
  options, allowed = dict(config.engine_options), (*required, *optional)
  if unknown := sorted(options.keys() - set(allowed)):
    raise ValueError(
      f"engine_options has {unknown[0]!r}, which {engine} does not know: choose from "
      f"{', '.join(allowed)}"
    )
  for name, meaning in required.items():
    if name not in options:
      raise ValueError(
        f"engine_options has no {name!r}, which {engine} needs: give {meaning}"
      )
  return options
